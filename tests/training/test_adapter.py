"""What a run leaves is what peft and transformers load: the same logits, its tokenizer and template, no pickle."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launching import ROOT, environment
from safetensors.torch import load_file, save_file

from finetune.errors import FinetuneError
from finetune.modeling.adapter import check_adapter_file

IDS = torch.arange(7, 7 + 2 * 24).reshape(2, 24)
BARE = str(ROOT / "data_samples" / "tiny-qwen3")  # no pad token in its config.json


@dataclass(frozen=True)
class Trained:
    folder: Path
    logits: torch.Tensor  # of the model in the training process, at the end, for IDS
    base: Path
    log: str  # of transformers


@pytest.fixture(scope="module")
def train(tmp_path_factory, tiny_model: Path, tiny_data: Path) -> Callable[..., Trained]:
    """Run in this process; the logits are taken from the live model when the output is saved."""
    from finetune import run
    from finetune.training.trainer import SFTTrainer

    folder = tmp_path_factory.mktemp("adapter")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())

    def execute(name: str, **changes) -> Trained:
        seen: list[torch.Tensor] = []
        save_output = SFTTrainer.save_output

        def looking(self, output_dir: Path, best: Path | None) -> None:
            with torch.no_grad():
                seen.append(self.model.eval()(input_ids=IDS, use_cache=False).logits.float())
            save_output(self, output_dir, best)

        settings = {"model": str(tiny_model), "data": str(tiny_data), "device_type": "cpu"}
        settings |= {"output_dir": str(folder / name), "cache_dir": str(folder / "cache")}
        settings |= {"max_steps": 4, "save_steps": 2, "dtype": "float32", "report_to": "none"}
        settings |= {"global_batch_size": 6, "cutoff_len": 128, "learning_rate": 1e-2} | changes
        before = dict(os.environ)
        records.clear()
        logging.getLogger("transformers").addHandler(handler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SFTTrainer, "save_output", looking)
            result = run(settings)
        logging.getLogger("transformers").removeHandler(handler)
        assert result.state == "done" and dict(os.environ) == before
        return Trained(folder / name, seen[0], Path(settings["model"]), "\n".join(records))

    return execute


@pytest.fixture(scope="module")
def lora(train) -> Trained:
    return train("lora", lora_r=4, lora_alpha=12, lora_dropout=0.1)


@pytest.fixture(scope="module")
def full(train) -> Trained:
    return train("full", model=BARE, finetuning="full", learning_rate=1e-3)


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import PeftModel
from safetensors.torch import load_file, save_file
base, adapter, whole, ids, out = sys.argv[1:]
ids = load_file(ids)["ids"]
load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
adapted, full = PeftModel.from_pretrained(load(base), adapter).eval(), load(whole)
with torch.no_grad():
    logits = {"adapted": adapted(input_ids=ids).logits, "full": full(input_ids=ids).logits}
    with adapted.disable_adapter():
        logits["base"] = adapted(input_ids=ids).logits
    assert adapted.generate(input_ids=ids[:1], max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
    logits["merged"] = adapted.merge_and_unload()(input_ids=ids).logits
save_file(logits, out)
for folder in (adapter, whole):
    question = [{"role": "user", "content": "路由?"}]
    print(AutoTokenizer.from_pretrained(folder).apply_chat_template(question, tokenize=False, add_generation_prompt=True))
assert not [name for name in sys.modules if name.split(".")[0] == "finetune"], "finetune was imported"
"""


def test_peft_and_transformers_load_it_and_compute_our_logits(lora, full, tmp_path):
    """In a process that knows nothing of this package, not even where it is."""
    ids, out = tmp_path / "ids.safetensors", tmp_path / "logits.safetensors"
    save_file({"ids": IDS}, ids)
    words = [str(path) for path in (lora.base, lora.folder, full.folder, ids, out)]
    own = {"env": environment({"PYTHONPATH": None}), "cwd": tmp_path, "timeout": 120}
    command = [sys.executable, "-c", LOAD, *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False, **own)
    assert result.returncode == 0, result.stderr
    logits = load_file(out)
    torch.testing.assert_close(logits["adapted"], lora.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits["merged"], lora.logits, atol=1e-4, rtol=1e-4)
    assert (logits["base"] - lora.logits).abs().max() > 0.1, "the adapter changes nothing"
    torch.testing.assert_close(logits["full"], full.logits, atol=1e-5, rtol=1e-5)
    question = "<|im_start|>user\n路由?<|im_end|>\n<|im_start|>assistant\n"
    assert result.stdout.count(question) == 2


def test_a_whole_model(full: Trained):
    assert not (full.folder / "adapter_config.json").exists()
    before, after = (load_file(f / "model.safetensors") for f in (full.base, full.folder))
    assert after.keys() == before.keys()
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())
    # The tokenizer's pad token would be an embedding that does not train in what is trained from it.
    configs = [json.loads((f / "config.json").read_text()) for f in (full.base, full.folder)]
    assert configs[0].get("pad_token_id") == configs[1].get("pad_token_id")
    assert "PAD/BOS/EOS" not in full.log, "a warning about which nothing is to be done"


def test_no_pickle_anywhere_and_every_file_can_be_shared(lora: Trained):
    known = {".json", ".jsonl", ".safetensors", ".yaml", ".jinja", ".log"}
    files = [p for p in lora.folder.rglob("*") if p.is_file() and p.name != ".lock"]
    assert files and {path.suffix for path in files} <= known
    shared = (path for path in files if path.suffix in (".json", ".safetensors"))
    assert len({path.stat().st_mode & 0o777 for path in shared}) == 1, "only the owner can read"


def test_a_template_and_the_compute_dtype_are_saved(train):
    """Weights are trained in float32 and written in bfloat16."""
    from transformers import AutoTokenizer

    changes = {"template": "alpaca", "max_steps": 1, "save_steps": 0, "dtype": "bfloat16"}
    folder = train("template", finetuning="full", **changes).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What?"}]
    shown = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert shown == f"{tokenizer.bos_token}### Instruction:\nWhat?\n\n### Response:\n"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def adapter(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


A, B = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"
GOOD = {A: torch.ones(2, 3), B: torch.ones(5, 2)}
SHAPES = {A: (2, 3), B: (5, 2)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({**GOOD, A: torch.ones(0)}, f"empty tensor: {A}"),
        ({}, "no tensor at all"),
        ({A: GOOD[A]}, f"{B} as None"),
        ({**GOOD, A: torch.ones(3, 3)}, rf"{A} as \(3, 3\), not \(2, 3\)"),
        ({**GOOD, B: torch.zeros(5, 2)}, "every lora_B of the saved adapter is zero"),
    ],
    ids=["an empty A", "nothing", "a missing B", "a wrong shape", "untrained"],
)
def test_a_broken_adapter_is_refused(tensors: dict, message: str, tmp_path: Path):
    check_adapter_file(adapter(tmp_path, GOOD), SHAPES)
    with pytest.raises(FinetuneError, match=message) as caught:
        check_adapter_file(adapter(tmp_path, tensors), SHAPES)
    assert "do not use this adapter" in caught.value.fix
    if "zero" in message:  # after a warm-up step without learning rate
        check_adapter_file(tmp_path, SHAPES, trained=False)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FinetuneError, match="cannot be read"):
        check_adapter_file(tmp_path)


def test_a_run_whose_saved_adapter_is_empty_fails(train, monkeypatch, lora: Trained):
    """ZeRO-3 has made such files in more than one package."""
    from finetune.training import trainer

    def hollow(path: Path, tensors: dict) -> None:
        save_file({name: torch.ones(0) for name in tensors}, path)

    monkeypatch.setattr(trainer, "write_tensors", hollow)
    with pytest.raises(FinetuneError, match="empty tensor"):
        train("hollow")
    folder = lora.folder.parent / "hollow"
    assert not list(folder.glob("checkpoint-*"))
    assert not (folder / "adapter_model.safetensors").exists()
    assert "empty tensor" in json.loads((folder / "status.json").read_text())["error"]
