"""Each deliberate fault is found with its first difference, and a right deployment passes:
transformers' own server, a folder through transformers, and llama.cpp's server.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
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
from launching import ROOT

from finetune.__main__ import main as finetune
from finetune.commands.verify import reference
from finetune.data.encoding.templates import TEMPLATES

BASE = ROOT / "data_samples" / "tiny-qwen3"
Verify = Callable[..., dict]
_TURN = "{{- '<|im_start|>'"
_DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou are a helpful"
    " assistant.<|im_end|>\n' }}{%- endif %}{%- for message in messages %}"
)


def endless(folder: Path) -> None:
    """No end token anywhere: as of a base's generation_config.json with a chat model."""
    changed(folder, "generation_config.json", eos_token_id=3999)
    changed(folder, "config.json", eos_token_id=3999)


# What is wrong with a folder -> the folder's change, and the name of the finding.
FAULTS = {
    "template": (template(TEMPLATES["alpaca"]), "template"),
    "generation_prompt": (
        edited_template("{%- if add_generation_prompt %}", "{%- if false %}"),
        "template",
    ),
    "system_left_out": (
        edited_template(
            _TURN, "{%- if message.role == 'system' %}{% continue %}{% endif %}" + _TURN
        ),
        "template",
    ),
    "system_added": (
        edited_template("{%- for message in messages %}", _DEFAULT_SYSTEM),
        "template",
    ),
    "history": (
        edited_template("for message in messages", "for message in messages[-1:]"),
        "template",
    ),
    "contents_trimmed": (
        edited_template("message.content +", "message.content|trim +"),
        "template",
    ),
    "thinking": (
        edited_template(r"assistant\n' }}", r"assistant\n<think>\n\n</think>\n\n' }}"),
        "template",
    ),
    "special_tokens_as_text": (control_tokens_as_text, "template"),
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
QUICK = ("template", "history", "special_tokens_as_text", "adapter_scale", "end_ignored")
AT_BEGINNING = {
    "bos_missing": edited_template("{{- bos_token }}", ""),
    "bos_added": edited_template("{{- bos_token }}", "{{- bos_token }}{{- bos_token }}"),
}


def names(report: dict) -> list[str]:
    return [finding["name"] for finding in report["findings"]]


def assert_found(report: dict, name: str) -> None:
    assert names(report) == [name], json.dumps(report)
    (finding,) = report["findings"]
    assert report["code"] == 1 and finding["mend"] and finding["evidence"] and finding["prompts"]
    assert len(finding["prompts"]) + report["same"] == report["prompts"]


# ---------------------------------------------------------------- right deployments


def test_a_merged_folder_is_right(verify: Verify, adapter: Path, merged: Path):
    report = verify(adapter, "--merged", merged)
    assert (
        names(report) == [] and report["code"] == 0 and report["same"] == report["prompts"] == 8
    ), json.dumps(report)
    assert set(report["compared"].values()) == {8} and report["shows_adapter"]


def test_it_says_where_the_base_would_have_passed(verify: Verify, adapter: Path, tmp_path: Path):
    weak = tmp_path / "weak"
    shutil.copytree(adapter, weak)
    changed(weak, "adapter_config.json", lora_alpha=1e-6)
    report = verify(weak, "--merged", BASE)
    assert report["code"] == 0 and not report["shows_adapter"]


def test_more_bits_than_needed_are_right(
    verify: Verify, adapter: Path, merged: Path, tmp_path: Path
):
    folder = deployment(merged, tmp_path / "float32", in_dtype(torch.float32))
    assert names(verify(adapter, "--merged", folder)) == []


@pytest.mark.slow
def test_transformers_server_is_right(
    verify: Verify, adapter: Path, merged: Path, transformers_server: str
):
    report = verify(adapter, "--endpoint", f"{transformers_server}/v1", "--served-model", merged)
    assert report["code"] == 0 and names(report) == [] and report["compared"]["prompt_lengths"] == 8


@pytest.mark.slow
@pytest.mark.skipif(
    not (importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf")),
    reason="needs llama.cpp's server (pip install xllamacpp gguf)",
)
def test_llama_cpp_is_right_with_a_merged_gguf_and_wrong_without_adapter(
    verify: Verify, adapter: Path, tmp_path: Path
):
    """`merge --format gguf`, read by llama.cpp itself; then the base's file in its place."""
    import stand_in_converter

    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text(
        Path(stand_in_converter.__file__).read_text(encoding="utf-8"), encoding="utf-8"
    )
    out = tmp_path / "gguf"
    words = [
        "--adapter",
        str(adapter),
        "--output-dir",
        str(out),
        "--format",
        "gguf",
        "--llama-cpp",
        str(tmp_path),
    ]
    assert finetune(["merge", *words]) == 0
    assert {path.name for path in out.iterdir()} == {
        "model.gguf",
        "Modelfile",
        "README.md",
        "chat_template.jinja",
    }
    stand_in_converter.write(BASE, tmp_path / "base.gguf", "bf16")
    for path, found in ((out / "model.gguf", []), (tmp_path / "base.gguf", ["adapter_left_out"])):
        with llama_server(path) as address:
            report = verify(adapter, "--endpoint", address)
        assert names(report) == found and report["deployment"]["engine"] == "llama.cpp", report
        assert report["compared"]["token_ids"] == 8 and report["compared"]["logprobs"] >= 4


# ---------------------------------------------------------------- wrong ones


@pytest.mark.parametrize("fault", QUICK)
def test_a_folder_with_a_fault_is_found(
    fault: str, verify: Verify, adapter: Path, merged: Path, tmp_path: Path
):
    change, name = FAULTS[fault]
    report = verify(adapter, "--merged", deployment(merged, tmp_path / fault, change))
    assert_found(report, name)
    (finding,) = report["findings"]
    assert finding["evidence"][0].startswith("prompt" if name == "template" else "answer")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_a_fault_is_found(
    fault: str,
    verify: Verify,
    adapter: Path,
    merged: Path,
    tmp_path: Path,
    transformers_server: str,
):
    """Seen from outside: answers and the lengths of prompts are all that this server shows."""
    change, name = FAULTS[fault]
    folder = deployment(merged, tmp_path / fault, change)
    report = verify(adapter, "--endpoint", transformers_server, "--served-model", folder)
    assert name in names(report) and report["code"] == 1, json.dumps(report)


@pytest.mark.parametrize("name", AT_BEGINNING)
def test_a_missing_and_a_doubled_bos_are_found(
    name: str, verify: Verify, begun_adapter: Path, begun_merged: Path, tmp_path: Path
):
    folder = deployment(begun_merged, tmp_path / name, AT_BEGINNING[name])
    report = verify(begun_adapter, "--merged", folder)
    assert_found(report, "template")
    place = 1 if name == "bos_missing" else 2
    assert f"prompt 1, token {place}: " in report["findings"][0]["evidence"][0]


def test_a_template_that_writes_todays_date_is_found(
    verify: Verify, adapter: Path, merged: Path, tmp_path: Path
):
    """Training writes a fixed one; the folder has the same template."""
    today = "{{- '<|im_start|>system\\nToday is ' + strftime_now('%d %B %Y') + '<|im_end|>\\n' }}"
    dated = edited_template(
        "{%- for message in messages %}", today + "{%- for message in messages %}"
    )
    trained = deployment(adapter, tmp_path / "trained", dated)
    report = verify(trained, "--merged", deployment(merged, tmp_path / "served", dated))
    assert_found(report, "template")


@pytest.fixture(scope="module")
def whole(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Merged in float32."""
    folder = tmp_path_factory.mktemp("merged") / "whole"
    words = ["--adapter", str(adapter), "--output-dir", str(folder), "--dtype", "float32"]
    assert finetune(["merge", *words]) == 0
    return folder


def test_as_many_bits_as_asked_for_are_right(verify: Verify, adapter: Path, whole: Path):
    assert names(verify(adapter, "--merged", whole, "--deployed-dtype", "float32")) == []


def test_fewer_bits_than_asked_for_are_found(verify: Verify, adapter: Path, tmp_path: Path):
    """Of the weights, or of the arithmetic. A number added to all of the head's changes no answer,
    but takes so many bits of bfloat16 that it shows with the kernels of every CPU.
    """

    def shifted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t.float() + 8.0 * (n == "lm_head.weight") for n, t in tensors.items()}

    def rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}

    base, tuned, whole = (tmp_path / name for name in ("base", "tuned", "whole"))
    deployment(BASE, base, weights(shifted))
    changed(base, "config.json", dtype="float32")
    shutil.copytree(adapter, tuned)
    changed(tuned, "adapter_config.json", base_model_name_or_path=str(base))
    assert (
        finetune(
            ["merge", "--adapter", str(tuned), "--output-dir", str(whole), "--dtype", "float32"]
        )
        == 0
    )
    assert names(verify(tuned, "--merged", whole, "--deployed-dtype", "float32")) == []
    for name, fault in (("weights", weights(rounded)), ("computed", in_dtype(torch.bfloat16))):
        folder = deployment(whole, tmp_path / name, fault)
        assert_found(verify(tuned, "--merged", folder, "--deployed-dtype", "float32"), "unknown")


def test_two_faults_are_both_found(verify: Verify, adapter: Path, merged: Path, tmp_path: Path):
    """Another template, and the base in the place of the merged model."""

    def both(folder: Path) -> None:
        for fault in ("history", "adapter_left_out"):
            FAULTS[fault][0](folder)

    report = verify(adapter, "--merged", deployment(merged, tmp_path / "both", both))
    assert names(report) == ["template", "adapter_left_out"] and report["code"] == 1


def test_other_weights_are_found_with_one_load_of_the_reference(
    verify: Verify, adapter: Path, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    load, loaded = reference.load_weights, []
    monkeypatch.setattr(
        reference, "load_weights", lambda *args, **more: loaded.append(args) or load(*args, **more)
    )

    def drawn(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return {
            n: t + (0.5 * t.float().std() * torch.randn(t.shape)).to(t.dtype)
            for n, t in tensors.items()
        }

    folder = deployment(merged, tmp_path / "drawn", weights(drawn))
    report = verify(adapter, "--merged", folder, "--deployed-dtype", "float32")
    assert names(report) == ["unknown"] and report["code"] == 1
    assert len(loaded) == 1
