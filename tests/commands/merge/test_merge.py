"""merge against peft's own adapted model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.__main__ import main as finetune
from finetune.commands.merge import merging
from finetune.storage.run_folder import write_identity

IDS = torch.arange(7, 7 + 2 * 24).reshape(2, 24)


@pytest.fixture(scope="module")
def adapter(make_adapter) -> Path:
    return make_adapter()


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapted_logits(base: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel

    return plain_logits(PeftModel.from_pretrained(load(base), adapter))


def plain_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits.float()


def merge(adapter: Path, output: Path, *flags: str) -> int:
    return finetune(["merge", "--adapter", str(adapter), "--output-dir", str(output), *flags])


def test_transformers_takes_what_was_merged(tiny_model: Path, adapter: Path, tmp_path: Path):
    output = tmp_path / "merged"
    assert merge(adapter, output) == 0
    assert os.listdir(tmp_path) == ["merged"]
    merged = AutoModelForCausalLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    expected = adapted_logits(tiny_model, adapter)
    assert merged.dtype == torch.float32
    torch.testing.assert_close(plain_logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert (plain_logits(load(tiny_model)) - expected).abs().max() > 0.1  # else it shows nothing
    assert tokenizer("router 路由器") == AutoTokenizer.from_pretrained(tiny_model)("router 路由器")
    templates = [(folder / "chat_template.jinja").read_bytes() for folder in (output, adapter)]
    assert templates[0] == templates[1]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in json.loads((output / "generation_config.json").read_text())["eos_token_id"]
    assert not [path for path in output.iterdir() if path.suffix in (".bin", ".pt", ".pkl")]
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "not that of a run" in card and "| r | 4 |" in card and "nan" not in card


HEAD_OR_EMBEDDING = {
    "neither": {"target_modules": ["q_proj", "down_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["lm_head", "embed_tokens"]},
    "trained_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
}


@pytest.mark.parametrize("name", HEAD_OR_EMBEDDING)
def test_tied_embeddings_stay_right(name: str, tiny_model: Path, make_adapter, tmp_path: Path):
    """The tiny model's head is its embedding: a change of one must not change the other."""
    adapter, output = make_adapter(**HEAD_OR_EMBEDDING[name]), tmp_path / "merged"
    assert merge(adapter, output) == 0
    merged, expected = load(output), adapted_logits(tiny_model, adapter)
    torch.testing.assert_close(plain_logits(merged), expected, rtol=1e-4, atol=1e-4)
    tied = name in ("neither", "dora")
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] == tied
    assert ("lm_head.weight" not in load_file(output / "model.safetensors")) == tied
    if name in ("head", "trained_head"):
        own, before = (model.get_input_embeddings().weight for model in (merged, load(tiny_model)))
        assert torch.equal(own, before)


def test_other_dtypes(tiny_model: Path, adapter: Path, tmp_path: Path):
    output = tmp_path / "merged"
    assert merge(adapter, output, "--dtype", "bfloat16", "--model", str(tiny_model)) == 0
    base = load_file(output / "model.safetensors")
    assert {tensor.dtype for tensor in base.values()} == {torch.bfloat16}
    # A base in bfloat16 stays so, and is rounded once: as if it had been added in float64.
    assert merge(adapter, tmp_path / "again", "--model", str(output)) == 0
    merged = load_file(tmp_path / "again" / "model.safetensors")
    lora = load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    down, up = (lora[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
    scale = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"] / 4
    exact = base[f"{name}.weight"].double() + scale * up @ down
    differing = (merged[f"{name}.weight"] != exact.bfloat16()).float().mean()
    assert differing < 1e-3  # where float32's rounding falls on the other side of a tie
    # In float32 nothing is rounded to the base's 16 bits.
    whole = tmp_path / "whole"
    assert merge(adapter, whole, "--model", str(output), "--dtype", "float32") == 0
    found = load_file(whole / "model.safetensors")[f"{name}.weight"].double()
    assert (found - exact).norm() < 1e-6 * exact.norm()


CARD = """
library_name: 
# merged
| learning_rate | 0.0002 |
| trained on | rows.jsonl |
| held out | held_out.jsonl |
| data fingerprint | ab12 |
| progress | easy | a\\|b |
| up to 50% | 9 | 1 |
| difficulty | step 0 | step 4 |
| all | 2.5000 | 1.5000 |
| easy | 2.2500 | 1.2500 |
Logits differ by
"""  # noqa: W291


def test_the_card_tells_of_the_run_and_nothing_of_the_machine(make_adapter, tiny_model, tmp_path):
    run = make_adapter(folder=tmp_path / "my-run")
    write_identity(run, {"kind": "sft", "total_steps": 4, "data": "ab12", "schedule": "cd34"})
    secret = "hf_" + "x" * 30
    stages = [{"until": 0.5, "mix": [9, 1]}, {"until": 1.0, "mix": [1, 1]}]
    settings = {
        "model": str(tiny_model),
        "data": [str(tmp_path / "rows.jsonl")],
        "valid_data": ["held_out.jsonl"],
        "output_dir": str(run),
        "learning_rate": 2e-4,
        "use_curriculum": True,
        "curriculum": {"levels": ["easy", "a|b"], "stages": stages},
        "deepspeed": {"wandb": {"api_key": secret}, "comet": {"token": secret}},
        "cache_dir": str(tmp_path),
    }
    (run / "run.yaml").write_text(yaml.safe_dump(settings))
    events = [
        {"event": "eval", "time": 1.0, "step": 0, "eval_loss": 2.5, "eval_loss/easy": 2.25},
        {"event": "eval", "time": 2.0, "step": 4, "eval_loss": 1.5, "eval_loss/easy": 1.25},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert merge(run, tmp_path / "merged") == 0
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert not [line for line in CARD.strip().splitlines() if line not in card], card
    files = [path for path in (tmp_path / "merged").iterdir() if path.suffix != ".safetensors"]
    written = b"".join(path.read_bytes() for path in files)
    for private in (secret, str(tmp_path), str(tiny_model.parent)):
        assert private.encode() not in written


@pytest.mark.parametrize("added", [None, 1.0, float("nan")], ids=str)
def test_a_wrong_number_in_the_files_is_found(added, adapter, tmp_path, monkeypatch, capsys):
    """The adapter is lost, or one weight of the written file is off."""
    right = merging._merge

    def spoil(adapted, adapter):
        if added is None:
            return adapted.unload()
        model = right(adapted, adapter)
        model.model.layers[0].mlp.down_proj.weight[0, 0] += added
        return model

    monkeypatch.setattr(merging, "_merge", spoil)
    assert merge(adapter, tmp_path / "merged") == 1
    assert "self-test failed: logits" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_another_template_and_a_lost_adapter_are_found(make_adapter, tmp_path: Path, capsys):
    """A template with Windows line ends, and an adapter smaller than the rounding."""
    adapter = make_adapter(scale=0.01)
    assert merge(adapter, tmp_path / "merged", "--dtype", "bfloat16") == 1
    said = capsys.readouterr().err
    assert "what it learned would be lost" in said and "--dtype float32" in said
    template = adapter / "chat_template.jinja"
    template.write_bytes(template.read_bytes() + b"{#-\r\n-#}")
    assert merge(adapter, tmp_path / "merged") == 1
    assert "byte by byte" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing(adapter, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(merging.durable_files, "free_bytes", lambda path: 10)
        assert merge(adapter, tmp_path / "a") == 2
    assert "are free" in capsys.readouterr().err

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging, "write_card", full)
    assert merge(adapter, tmp_path / "b") == 1
    assert "No space left" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_nothing_is_overwritten(adapter: Path, tmp_path: Path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").touch()
    for place in (taken, taken / "thesis.tex"):
        assert merge(adapter, place) == 2
        assert "nothing is overwritten" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert merge(adapter, tmp_path / "empty") == 0  # takes an empty folder's place


def test_what_cannot_be_merged_is_refused(adapter: Path, tiny_model: Path, tmp_path: Path, capsys):
    from peft import PromptTuningConfig, get_peft_model

    assert merge(tmp_path, tmp_path / "merged") == 2
    assert "no adapter is there" in capsys.readouterr().err
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(load(tiny_model), prompt).save_pretrained(tmp_path / "prompt")
    assert merge(tmp_path / "prompt", tmp_path / "merged") == 2
    assert "PROMPT_TUNING cannot be merged" in capsys.readouterr().err
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = json.loads((tiny_model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (quantized / "config.json").write_text(json.dumps(config))
    assert merge(adapter, tmp_path / "merged", "--model", str(quantized)) == 2
    assert "are quantized" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["prompt", "quantized"]
