"""`merge --format gguf`: the converter is run, its file compared, and what is wrong with it
found.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from deployments import changed
from launching import ROOT

from finetune.__main__ import main as finetune
from finetune.errors import ConfigError

BASE = ROOT / "data_samples" / "tiny-qwen3"
needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="needs the package gguf"
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    return folder


def converter(folder: Path, *changes: tuple[str, str]) -> Path:
    """The stand-in for llama.cpp's converter, maybe with a fault."""
    source = (ROOT / "tests" / "stand_in_converter.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    (folder / "convert_hf_to_gguf.py").write_text(source, encoding="utf-8")
    return folder


def merge(adapter: Path, output: Path, *flags: object) -> int:
    words = ["--adapter", adapter, "--output-dir", output, "--format", "gguf", *flags]
    return finetune(["merge", *map(str, words)])


@needs_gguf
def test_the_file_is_whole_and_has_its_modelfile(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LLAMA_CPP", str(converter(tmp_path)))
    assert merge(adapter, tmp_path / "out") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.gguf", "Modelfile", "README.md", "chat_template.jinja",
    }  # fmt: skip
    text = (tmp_path / "out" / "Modelfile").read_text(encoding="utf-8")
    assert (
        "FROM ./model.gguf" in text
        and 'PARAMETER stop """<|im_end|>"""' in text
        and "num_ctx 512" in text
    )


@needs_gguf
def test_an_end_that_is_not_the_bases_eos_is_the_files(adapter: Path, tmp_path: Path):
    """Chat ends with <|im_end|>, the base's documents with <|endoftext|>: the converter knows the
    latter alone.
    """
    from gguf import GGUFReader

    own = tmp_path / "own"
    shutil.copytree(adapter, own)
    changed(own, "tokenizer_config.json", eos_token="<|endoftext|>")
    assert merge(own, tmp_path / "out", "--llama-cpp", converter(tmp_path)) == 0
    fields = GGUFReader(tmp_path / "out" / "model.gguf").fields
    end = fields["tokenizer.ggml.eos_token_id"].contents()
    assert fields["tokenizer.ggml.tokens"].contents(end) == "<|im_end|>"
    text = (tmp_path / "out" / "Modelfile").read_text(encoding="utf-8")
    assert all(f'PARAMETER stop """{token}"""' in text for token in ("<|im_end|>", "<|endoftext|>"))
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "llama-server -m model.gguf" in card and "AutoModelForCausalLM" not in card


@needs_gguf
def test_an_eos_that_the_template_writes_elsewhere_is_refused_before_the_merge(
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    own = tmp_path / "own"
    shutil.copytree(adapter, own)
    changed(own, "tokenizer_config.json", eos_token="<|endoftext|>")
    template = own / "chat_template.jinja"
    template.write_text("{{- eos_token }}" + template.read_text(encoding="utf-8"), encoding="utf-8")
    tools = converter(tmp_path)
    monkeypatch.setattr("finetune.commands.merge.command.publish", None)
    assert merge(own, tmp_path / "out", "--llama-cpp", tools) == 2
    assert "writes <|endoftext|> as eos_token" in capsys.readouterr().err


@needs_gguf
@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        *(
            (kind, True)
            for kind in ("qwen3", "qwen3_5", "qwen3_5_moe", "gemma3", "llama", "mistral", "gpt_oss")
        ),
        *((kind, False) for kind in ("gpt_neox", "deepseek_v3", "glm4")),
    ],
)
def test_what_is_not_read_back_is_refused_by_its_name(kind: str, taken: bool, tmp_path: Path):
    """llama.cpp's names are not transformers'."""
    from transformers import AutoConfig

    from finetune.commands.merge.gguf import check_architecture

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    options = SimpleNamespace(trust_remote_code=False)
    with nullcontext() if taken else pytest.raises(ConfigError, match="cannot be read back"):
        check_architecture(str(tmp_path), options)


FAULTS = {
    "rope_theta is": ("writer.add_rope_freq_base(", "writer.add_rope_freq_base(2 * "),
    "its chat template is not the run's": (
        "tokenizer.chat_template)",
        "tokenizer.chat_template + ' ')",
    ),
    "token 7 is another one": (
        "writer.add_tokenizer_pre",
        "names[7] = 'x'; writer.add_tokenizer_pre",
    ),
    "the token that ends an answer": (
        "add_eos_token_id(tokenizer.eos_token_id)",
        "add_eos_token_id(7)",
    ),
    "its logits differ": (
        "data = gguf.quants.quantize(tensor",
        "data = gguf.quants.quantize(1.01 * tensor",
    ),
    "failed: ended by SIGKILL": (
        "known = json.loads",
        "import os; os.kill(os.getpid(), 9)\n    known = json.loads",
    ),
    "failed: wrote no file: half": (
        "known = json.loads",
        "print('half'); raise SystemExit(0)\n    known = json.loads",
    ),
    "failed: exit code 1: no such model": (
        "known = json.loads",
        "raise SystemExit('no such model')\n    known = json.loads",
    ),
}


@needs_gguf
@pytest.mark.parametrize("said", FAULTS)
def test_a_wrong_file_is_found_and_nothing_is_left(
    said: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tools = tmp_path / "tools"
    tools.mkdir()
    assert merge(adapter, tmp_path / "out", "--llama-cpp", converter(tools, FAULTS[said])) == 1
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["tools"]


@needs_gguf
def test_without_converter_or_reader_it_is_refused(
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", "")
    assert merge(adapter, tmp_path / "out") == 2
    assert "convert_hf_to_gguf.py is not there" in capsys.readouterr().err
    assert merge(adapter, tmp_path / "out", "--llama-cpp", tmp_path / "nowhere") == 2
    monkeypatch.setattr(
        "transformers.modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES", ["llama"]
    )
    assert merge(adapter, tmp_path / "out", "--llama-cpp", converter(tmp_path)) == 2
    assert "cannot be read back" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
