"""`merge --format gguf`: the converter is run, and its file compared."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deployments import changed
from launching import ROOT

from finetune.__main__ import main as finetune
from finetune.commands.merge import gguf as making
from finetune.errors import FinetuneError

if importlib.util.find_spec("gguf") is None:
    pytest.skip("needs the package gguf", allow_module_level=True)
BASE = ROOT / "data_samples" / "tiny-qwen3"
STAND_IN = ROOT / "tests" / "stand_in_converter.py"


@pytest.fixture(scope="module")
def adapter(make_adapter: Callable[..., Path]) -> Path:
    return make_adapter(base=BASE, target_modules=["q_proj"])


@pytest.fixture
def documents(adapter: Path, tmp_path: Path) -> Path:
    """An adapter whose base ends documents with another token than answers."""
    own = shutil.copytree(adapter, tmp_path / "own")
    changed(own, "tokenizer_config.json", eos_token="<|endoftext|>")
    return own


def converter(folder: Path, source: str | None = None) -> Path:
    """A folder with a stand-in for llama.cpp's converter."""
    folder.mkdir(exist_ok=True)
    text = STAND_IN.read_text(encoding="utf-8") if source is None else source
    (folder / "convert_hf_to_gguf.py").write_text(text, encoding="utf-8")
    return folder


def write(folder: Path, *change: str) -> None:
    """Write the GGUF as the stand-in does, maybe with a fault."""
    source = STAND_IN.read_text(encoding="utf-8")
    if change:
        assert change[0] in source
        source = source.replace(*change)
    module: dict[str, Any] = {"__name__": "converter"}
    exec(compile(source, "converter", "exec", dont_inherit=True), module)
    module["write"](folder, folder / "model.gguf", "bf16")


def merge(adapter: Path, output: Path, *flags: object) -> int:
    words = ["--adapter", adapter, "--output-dir", output, "--format", "gguf", *flags]
    return finetune(["merge", *map(str, words)])


def test_the_file_is_whole_and_has_its_modelfile(adapter, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP", str(converter(tmp_path)))
    assert merge(adapter, tmp_path / "out") == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.gguf", "Modelfile", "README.md", "chat_template.jinja"}
    text = (tmp_path / "out" / "Modelfile").read_text(encoding="utf-8")
    for line in ("FROM ./model.gguf", 'PARAMETER stop """<|im_end|>"""'):
        assert line in text


def test_an_end_that_is_not_the_bases_eos_is_the_files(documents, tmp_path, monkeypatch):
    """The converter knows the base's end alone."""
    from gguf import GGUFReader

    monkeypatch.setattr(making, "convert", lambda folder, *_: write(folder))
    assert merge(documents, tmp_path / "out", "--llama-cpp", converter(tmp_path)) == 0
    fields = GGUFReader(tmp_path / "out" / "model.gguf").fields
    end = fields["tokenizer.ggml.eos_token_id"].contents()
    assert fields["tokenizer.ggml.tokens"].contents(end) == "<|im_end|>"
    text = (tmp_path / "out" / "Modelfile").read_text(encoding="utf-8")
    assert all(f'PARAMETER stop """{token}"""' in text for token in ("<|im_end|>", "<|endoftext|>"))
    assert "num_ctx 512" in text  # no more than the model takes
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "llama-server -m model.gguf" in card and "AutoModelForCausalLM" not in card


def test_an_eos_that_the_template_writes_elsewhere_is_refused_before_the_merge(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    template = documents / "chat_template.jinja"
    template.write_text("{{- eos_token }}" + template.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr("finetune.commands.merge.command.publish", None)
    assert merge(documents, tmp_path / "out", "--llama-cpp", converter(tmp_path)) == 2
    assert "writes <|endoftext|> as eos_token" in capsys.readouterr().err


# What is said -> a part of the converter, and what stands there instead.
FAULTS = {
    "rope_theta is": ("writer.add_rope_freq_base(", "writer.add_rope_freq_base(2 * "),
    "its chat template is not": ("tokenizer.chat_template)", "tokenizer.chat_template + ' ')"),
    "token 7 is another": ("writer.add_tokenizer_pre", "names[7] = 'x'; writer.add_tokenizer_pre"),
    "ends an answer": ("add_eos_token_id(tokenizer.eos_token_id)", "add_eos_token_id(7)"),
    "its logits differ": ("gguf.quants.quantize(tensor", "gguf.quants.quantize(1.01 * tensor"),
}


def test_a_wrong_file_is_found(tmp_path: Path):
    from transformers import AutoTokenizer

    folder = shutil.copytree(BASE, tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    for said, change in FAULTS.items():
        write(folder, *change)
        with pytest.raises(FinetuneError, match=said):
            making.check_gguf(folder, tokenizer, ends)


def test_a_converter_that_fails_is_quoted_and_nothing_is_left(adapter, tmp_path, capsys):
    tools = tmp_path / "tools"
    for source, said in {
        "import os; os.kill(os.getpid(), 9)": "failed: ended by SIGKILL",
        "print('half')": "failed: wrote no file: half",
    }.items():
        path = converter(tools, source) / "convert_hf_to_gguf.py"
        with pytest.raises(FinetuneError, match=said):
            making.convert(tmp_path, path, "float32")
    converter(tools, "raise SystemExit('no such model')")
    assert merge(adapter, tmp_path / "out", "--llama-cpp", tools) == 1
    assert "failed: exit code 1: no such model" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["tools"]


def test_without_converter_or_space_it_is_refused(adapter, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", "")
    assert merge(adapter, tmp_path / "out") == 2
    assert "convert_hf_to_gguf.py is not there" in capsys.readouterr().err
    assert merge(adapter, tmp_path / "out", "--llama-cpp", tmp_path / "nowhere") == 2
    # for the weights alone, and not for the file made of them
    free = (BASE / "model.safetensors").stat().st_size * 3 // 2
    monkeypatch.setattr("finetune.storage.durable_files.free_bytes", lambda path: free)
    assert merge(adapter, tmp_path / "out", "--llama-cpp", converter(tmp_path)) == 2
    assert "are free" in capsys.readouterr().err
    models = "transformers.modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES"
    monkeypatch.setattr(models, ["llama"])
    assert merge(adapter, tmp_path / "out", "--llama-cpp", tmp_path) == 2
    assert "cannot be read back" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
