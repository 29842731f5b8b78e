"""Each deliberate fault is found, and right deployments of three engines pass."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deployments import (
    changed,
    control_tokens_as_text,
    deployment,
    edited_template,
    in_dtype,
    in_four_bits,
    llama_server,
    rope,
    strengthened,
    template,
    weights,
    weights_of,
)
from launching import ROOT, environment
from serve_helpers import wait_for

from finetune.__main__ import main as finetune
from finetune.commands.verify import reference
from finetune.data.encoding.templates import TEMPLATES

BASE = ROOT / "data_samples" / "tiny-qwen3"
_TURN, _LOOP = "{{- '<|im_start|>'", "{%- for message in messages %}"
_NO_SYSTEM = "{%- if message.role == 'system' %}{% continue %}{% endif %}"
_DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou are a helpful"
    " assistant.<|im_end|>\n' }}{%- endif %}"
)


def endless(folder: Path) -> None:
    """No end token anywhere: as of a base's generation_config.json with a chat model."""
    for name in ("generation_config.json", "config.json"):
        changed(folder, name, eos_token_id=3999)


# What is wrong with a folder: changes of the template, and others with the name of the finding.
TEMPLATE_FAULTS = {
    "template": template(TEMPLATES["alpaca"]),
    "generation_prompt": edited_template("{%- if add_generation_prompt %}", "{%- if false %}"),
    "system_left_out": edited_template(_TURN, _NO_SYSTEM + _TURN),
    "system_added": edited_template(_LOOP, _DEFAULT_SYSTEM + _LOOP),
    "history": edited_template("for message in messages", "for message in messages[-1:]"),
    "contents_trimmed": edited_template("message.content +", "message.content|trim +"),
    "thinking": edited_template(r"assistant\n' }}", r"assistant\n<think>\n\n</think>\n\n' }}"),
    "special_tokens_as_text": control_tokens_as_text,
}
FAULTS = {name: (change, "template") for name, change in TEMPLATE_FAULTS.items()} | {
    "repetition_penalty": (
        lambda folder: changed(folder, "generation_config.json", repetition_penalty=1.2),
        "unknown",
    ),
    "adapter_left_out": (weights_of(BASE), "adapter_left_out"),
    "adapter_scale": (strengthened(BASE, 2.0), "unknown"),
    "rope_scaling": (rope(rope_type="linear", factor=4.0), "unknown"),
    "quantized": (weights(in_four_bits), "unknown"),
    "end_ignored": (endless, "unknown"),
}


def names(report: dict) -> list[str]:
    return [finding["name"] for finding in report["findings"]]


def test_right_folders_pass(verify, adapter: Path, merged: Path, tmp_path: Path):
    report = verify(adapter, "--merged", merged)
    assert names(report) == [] and report["code"] == 0, json.dumps(report)
    assert report["same"] == report["prompts"] == 5 and report["shows_adapter"]
    assert set(report["compared"].values()) == {5}
    # it says where the base would have passed
    weak = deployment(adapter, tmp_path / "weak", lambda folder: None)
    changed(weak, "adapter_config.json", lora_alpha=1e-6)
    report = verify(weak, "--merged", BASE)
    assert report["code"] == 0 and not report["shows_adapter"]


@pytest.mark.slow
@pytest.mark.skipif(
    not (importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf")),
    reason="needs llama.cpp's server (pip install xllamacpp gguf)",
)
def test_llama_cpp_is_right_with_a_merged_gguf_and_wrong_without_adapter(verify, adapter, tmp_path):
    """`merge --format gguf`, read by llama.cpp itself; then the base's file in its place."""
    import stand_in_converter

    out, base = tmp_path / "gguf", tmp_path / "base.gguf"
    shutil.copyfile(stand_in_converter.__file__, tmp_path / "convert_hf_to_gguf.py")
    words = ["--adapter", adapter, "--output-dir", out, "--format", "gguf", "--llama-cpp", tmp_path]
    assert finetune(["merge", *map(str, words)]) == 0
    files = {"model.gguf", "Modelfile", "README.md", "chat_template.jinja"}
    assert {path.name for path in out.iterdir()} == files
    stand_in_converter.write(BASE, base, "bf16")
    for path, found in ((out / "model.gguf", []), (base, ["adapter_left_out"])):
        with llama_server(path) as address:
            report = verify(adapter, "--endpoint", address)
        assert names(report) == found and report["deployment"]["engine"] == "llama.cpp", report
        assert report["compared"]["token_ids"] == 5 and report["compared"]["logprobs"] >= 3


@pytest.fixture(scope="module")
def transformers_server() -> Iterator[str]:
    """transformers' own server; it loads the folder that a request names as its model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    code = "import sys; from transformers.cli.transformers import main; main()"
    words = [sys.executable, "-c", code, "serve", "--device", "cpu", "--host", "127.0.0.1"]
    with subprocess.Popen([*words, "--port", port], env=environment()) as process:

        def answers() -> bool:
            assert process.poll() is None, "transformers' server ended"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
            return False

        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(answers, 240)
            yield url
        finally:
            process.terminate()


@pytest.mark.slow
def test_transformers_server_is_right_and_each_fault_behind_it_is_found(
    verify, adapter: Path, merged: Path, tmp_path: Path, transformers_server: str
):
    """Seen from outside: answers and the lengths of prompts are all that this server shows."""
    report = verify(adapter, "--endpoint", f"{transformers_server}/v1", "--served-model", merged)
    assert report["code"] == 0 and names(report) == [] and report["compared"]["prompt_lengths"] == 5
    for fault, (change, name) in FAULTS.items():
        folder = deployment(merged, tmp_path / fault, change)
        report = verify(adapter, "--endpoint", transformers_server, "--served-model", folder)
        assert name in names(report) and report["code"] == 1, (fault, json.dumps(report))


@pytest.mark.parametrize("fault", ["special_tokens_as_text", "end_ignored"])
def test_a_folder_with_a_fault_is_found(fault, verify, adapter, merged, tmp_path):
    change, name = FAULTS[fault]
    report = verify(adapter, "--merged", deployment(merged, tmp_path / fault, change))
    assert names(report) == [name] and report["code"] == 1, json.dumps(report)
    (finding,) = report["findings"]
    assert finding["mend"] and len(finding["prompts"]) + report["same"] == report["prompts"]
    assert finding["evidence"][0].startswith("prompt" if name == "template" else "answer")


def test_fewer_bits_than_asked_for_are_found(verify, adapter: Path, tmp_path: Path):
    """Added to all of the head's weights, 8 changes no answer but takes bits of bfloat16."""

    def shifted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t.float() + 8.0 * (n == "lm_head.weight") for n, t in tensors.items()}

    base = deployment(BASE, tmp_path / "base", weights(shifted))
    changed(base, "config.json", dtype="float32")
    tuned, whole = deployment(adapter, tmp_path / "tuned", lambda folder: None), tmp_path / "whole"
    changed(tuned, "adapter_config.json", base_model_name_or_path=str(base))
    words = ["--adapter", str(tuned), "--output-dir", str(whole), "--dtype", "float32"]
    assert finetune(["merge", *words]) == 0
    assert names(verify(tuned, "--merged", whole, "--deployed-dtype", "float32")) == []
    folder = deployment(whole, tmp_path / "computed", in_dtype(torch.bfloat16))
    assert names(verify(tuned, "--merged", folder, "--deployed-dtype", "float32")) == ["unknown"]


def test_two_faults_are_both_found_with_one_load_of_the_reference(
    verify, adapter: Path, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another template, and the base in the place of the merged model."""
    load, loaded = reference.load_weights, []
    monkeypatch.setattr(
        reference, "load_weights", lambda *args, **more: loaded.append(args) or load(*args, **more)
    )
    folder = deployment(merged, tmp_path / "both", FAULTS["history"][0])
    FAULTS["adapter_left_out"][0](folder)
    report = verify(adapter, "--merged", folder)
    assert names(report) == ["template", "adapter_left_out"] and report["code"] == 1
    assert len(loaded) == 1
