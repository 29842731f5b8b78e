"""merge against peft's own adapted model: logits, tied embeddings, what is left behind, and what
users get wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from launching import environment
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.__main__ import main as finetune
from finetune.commands.merge import merging
from finetune.storage.run_folder import write_identity

IDS = torch.arange(7, 7 + 2 * 24).reshape(2, 24)
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make_adapter(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Make:
    """A peft adapter on the tiny model, with weights that change what it says, and the tokenizer
    beside it.
    """
    from peft import LoraConfig, get_peft_model

    def make(
        name: str = "adapter", *, scale: float = 1.0, folder: Path | None = None, **settings
    ) -> Path:
        folder = folder or tmp_path_factory.mktemp("adapters") / name
        torch.manual_seed(3)
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        lora = LoraConfig(
            r=4, init_lora_weights=False, **({"target_modules": "all-linear"} | settings)
        )
        adapted = get_peft_model(base, lora)
        with torch.no_grad():
            for parameter_name, parameter in adapted.named_parameters():
                if "lora_" in parameter_name:
                    parameter.mul_(0.3 * scale)
                elif parameter.requires_grad:  # of modules_to_save
                    parameter.add_(0.1 * torch.randn_like(parameter))
        adapted.save_pretrained(folder)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
        return folder

    return make


def adapted_logits(base: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    )
    return plain_logits(model)


def plain_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits.float()


def merge(adapter: Path, output: Path, *flags: str) -> int:
    return finetune(["merge", "--adapter", str(adapter), "--output-dir", str(output), *flags])


def assert_nothing_left(parent: Path, *expected: str) -> None:
    assert sorted(os.listdir(parent)) == sorted(expected)


# ---------------------------------------------------------------- the same model


PLAIN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, ids = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
assert not {"finetune", "peft"} & set(sys.modules)
with torch.no_grad():
    logits = model(input_ids=torch.tensor(ids), use_cache=False).logits
print(json.dumps([logits.tolist(), str(model.dtype), tokenizer("router 路由器")["input_ids"]]))
"""


def test_transformers_alone_loads_what_was_merged(
    tiny_model: Path, make_adapter: Make, tmp_path: Path
):
    """In a process that imports neither this package nor peft, and from another folder."""
    adapter, output = make_adapter(), tmp_path / "merged"
    assert merge(adapter, output) == 0
    variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(output), json.dumps(IDS.tolist())],
        env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logits, dtype, ids = json.loads(done.stdout)
    expected = adapted_logits(tiny_model, adapter)
    assert (
        dtype == "torch.float32"
        and ids == AutoTokenizer.from_pretrained(tiny_model)("router 路由器")["input_ids"]
    )
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-4, atol=1e-4)
    base = plain_logits(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
    assert (base - expected).abs().max() > 0.1  # else this would show nothing
    assert (output / "chat_template.jinja").read_bytes() == (
        adapter / "chat_template.jinja"
    ).read_bytes()
    settings = json.loads((output / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in settings["eos_token_id"]
    assert not any(
        path.suffix in (".bin", ".pt", ".pkl") or "adapter" in path.name
        for path in output.iterdir()
    )
    assert_nothing_left(tmp_path, "merged")


HEAD_OR_EMBEDDING = {
    "neither": {"target_modules": ["q_proj", "down_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["lm_head", "embed_tokens"]},
    "trained_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained_embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
}


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize("name", HEAD_OR_EMBEDDING)
def test_tied_embeddings_stay_right(
    name: str, tiny_model: Path, make_adapter: Make, tmp_path: Path
):
    """The tiny model's head is its embedding: what an adapter changes at one end must not come out
    at the other.
    """
    assert json.loads((tiny_model / "config.json").read_text())["tie_word_embeddings"]
    adapter, output = make_adapter(name, **HEAD_OR_EMBEDDING[name]), tmp_path / "merged"
    assert merge(adapter, output) == 0
    merged = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    torch.testing.assert_close(
        plain_logits(merged), adapted_logits(tiny_model, adapter), rtol=1e-4, atol=1e-4
    )
    tied = json.loads((output / "config.json").read_text())["tie_word_embeddings"]
    assert (
        tied
        == (name in ("neither", "dora"))
        == ("lm_head.weight" not in load_file(output / "model.safetensors"))
    )
    if name in ("head", "trained_head"):
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        assert torch.equal(merged.get_input_embeddings().weight, base.get_input_embeddings().weight)


def test_other_dtypes(tiny_model: Path, make_adapter: Make, tmp_path: Path):
    adapter, output = make_adapter(), tmp_path / "merged"
    assert merge(adapter, output, "--dtype", "bfloat16", "--model", str(tiny_model)) == 0
    assert {tensor.dtype for tensor in load_file(output / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.bfloat16
    # A base in bfloat16 stays so, and is rounded once: as if it had been added in float64.
    again = tmp_path / "again"
    assert merge(adapter, again, "--model", str(output)) == 0
    base, merged = (load_file(folder / "model.safetensors") for folder in (output, again))
    lora = load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    down, up = (lora[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
    scale = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"] / 4
    exact = (base[f"{name}.weight"].double() + scale * up @ down).bfloat16()
    differing = (merged[f"{name}.weight"] != exact).float().mean()
    assert differing < 1e-3  # where float32's rounding falls on the other side of a tie
    # In float32 nothing is rounded to the base's 16 bits.
    whole = tmp_path / "whole"
    assert merge(adapter, whole, "--model", str(output), "--dtype", "float32") == 0
    found = load_file(whole / "model.safetensors")[f"{name}.weight"].double()
    exact = base[f"{name}.weight"].double() + scale * up @ down
    assert (found - exact).norm() < 1e-6 * exact.norm()


def test_sft_goes_on_from_a_merged_model(make_adapter: Make, tiny_data: Path, tmp_path: Path):
    from finetune import run

    assert merge(make_adapter(), tmp_path / "merged") == 0
    before = dict(os.environ)
    result = run(
        {
            "model": str(tmp_path / "merged"),
            "data": str(tiny_data),
            "output_dir": str(tmp_path / "run"),
            "cache_dir": str(tmp_path / "cache"),
            "device_type": "cpu",
            "max_steps": 1,
            "global_batch_size": 2,
            "report_to": "none",
        }
    )
    os.environ.clear()
    os.environ.update(before)
    assert result.state == "done" and result.steps == 1


# ---------------------------------------------------------------- the card


def test_the_card_tells_of_the_run_and_nothing_of_the_machine(
    make_adapter: Make, tiny_model: Path, tmp_path: Path
):
    run = make_adapter(folder=tmp_path / "my-run")
    write_identity(
        run, {"kind": "sft", "total_steps": 4, "data": "ab12" * 16, "schedule": "cd34" * 16}
    )
    secret = "hf_" + "x" * 30
    settings = {
        "model": str(tiny_model),
        "data": [str(tmp_path / "rows.jsonl")],
        "valid_data": ["held_out.jsonl"],
        "output_dir": str(run),
        "learning_rate": 2e-4,
        "use_curriculum": True,
        "curriculum": {
            "levels": ["easy", "a|b"],
            "stages": [{"until": 0.5, "mix": [9, 1]}, {"until": 1.0, "mix": [1, 1]}],
        },
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
    for line in (
        "library_name: ",
        "# merged",
        "| learning_rate | 0.0002 |",
        "| trained on | rows.jsonl |",
        "| held out | held_out.jsonl |",
        f"| data fingerprint | {'ab12' * 16} |",
        "| progress | easy | a\\|b |",
        "| up to 50% | 9 | 1 |",
        "| difficulty | step 0 | step 4 |",
        "| all | 2.5000 | 1.5000 |",
        "| easy | 2.2500 | 1.2500 |",
        "Logits differ by",
    ):
        assert line in card, line
    written = b"".join(
        path.read_bytes()
        for path in (tmp_path / "merged").iterdir()
        if path.suffix != ".safetensors"
    )
    for private in (secret, str(tmp_path), str(tiny_model.parent)):
        assert private.encode() not in written


def test_the_card_without_a_run(make_adapter: Make, tmp_path: Path):
    assert merge(make_adapter(), tmp_path / "merged") == 0
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert "not that of a run" in card and "| r | 4 |" in card and "nan" not in card


# ---------------------------------------------------------------- what fails leaves nothing


def test_a_merge_that_lost_the_adapter_is_found(
    make_adapter: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(merging, "_merge", lambda adapted, adapter: adapted.unload())
    assert merge(make_adapter(), tmp_path / "merged") == 1
    assert "self-test failed: logits" in capsys.readouterr().err
    assert_nothing_left(tmp_path)


def test_a_wrong_number_in_the_file_is_found(
    make_adapter: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """One weight of the written file is off: it is the files that are tested."""
    right = merging._merge

    def spoil(adapted, adapter):
        model = right(adapted, adapter)
        model.model.layers[0].mlp.down_proj.weight[0, 0] += 1
        return model

    monkeypatch.setattr(merging, "_merge", spoil)
    assert merge(make_adapter(), tmp_path / "merged") == 1
    assert_nothing_left(tmp_path)


def test_another_template_is_found(make_adapter: Make, tmp_path: Path, capsys):
    """A file with Windows line ends is read with others: what is written is not the adapter's
    template.
    """
    adapter = make_adapter()
    template = adapter / "chat_template.jinja"
    template.write_bytes(template.read_bytes() + b"{#-\r\n-#}")
    assert merge(adapter, tmp_path / "merged") == 1
    assert "byte by byte" in capsys.readouterr().err
    assert_nothing_left(tmp_path)


def test_an_adapter_smaller_than_the_rounding_is_not_lost_in_silence(
    make_adapter: Make, tmp_path: Path, capsys
):
    adapter = make_adapter(scale=0.01)
    assert merge(adapter, tmp_path / "merged", "--dtype", "bfloat16") == 1
    said = capsys.readouterr().err
    assert "what it learned would be lost" in said and "--dtype float32" in said
    assert_nothing_left(tmp_path)
    assert merge(adapter, tmp_path / "merged") == 0


def test_a_full_disk_leaves_nothing(
    make_adapter: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    adapter = make_adapter()
    with monkeypatch.context() as patch:
        patch.setattr(merging.durable_files, "free_bytes", lambda path: 10)
        assert merge(adapter, tmp_path / "a") == 2
    assert "are free" in capsys.readouterr().err

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging, "write_card", full)
    assert merge(adapter, tmp_path / "b") == 1
    assert "No space left" in capsys.readouterr().err
    assert_nothing_left(tmp_path)


# ---------------------------------------------------------------- refused


def test_nothing_is_overwritten(make_adapter: Make, tmp_path: Path, capsys):
    adapter = make_adapter()
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").touch()
    for place in (taken, taken / "thesis.tex"):
        assert merge(adapter, place) == 2
        assert "nothing is overwritten" in capsys.readouterr().err
    assert os.listdir(taken) == ["thesis.tex"]
    assert_nothing_left(tmp_path, "taken")
    (tmp_path / "empty").mkdir()
    assert merge(adapter, tmp_path / "empty") == 0  # takes an empty folder's place


def test_what_cannot_be_merged_is_refused(
    make_adapter: Make, tiny_model: Path, tmp_path: Path, capsys
):
    from peft import PromptTuningConfig, get_peft_model

    assert merge(tmp_path, tmp_path / "merged") == 2
    assert "no adapter is there" in capsys.readouterr().err
    prompt = tmp_path / "prompt"
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    get_peft_model(
        base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ).save_pretrained(prompt)
    assert merge(prompt, tmp_path / "merged") == 2
    assert "PROMPT_TUNING cannot be merged" in capsys.readouterr().err
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    for path in tiny_model.iterdir():
        (quantized / path.name).symlink_to(path)
    config = json.loads((tiny_model / "config.json").read_text())
    (quantized / "config.json").unlink()
    (quantized / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
    )
    assert merge(make_adapter(), tmp_path / "merged", "--model", str(quantized)) == 2
    assert "are quantized" in capsys.readouterr().err
    assert_nothing_left(tmp_path, "prompt", "quantized")
