"""What a run leaves is what peft and transformers load: the same logits, its tokenizer and
template, no pickle.
"""

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


@dataclass(frozen=True)
class Trained:
    folder: Path
    logits: torch.Tensor  # of the model in the training process, at the end, for IDS
    settings: dict


@pytest.fixture(scope="module")
def train(tmp_path_factory, tiny_model: Path, tiny_data: Path) -> Callable[..., Trained]:
    """Run in this process; the logits are taken from the live model at the moment the output is
    saved.
    """
    from finetune import run
    from finetune.training.trainer import SFTTrainer

    folder = tmp_path_factory.mktemp("adapter")
    made: dict[str, Trained] = {}

    def execute(name: str, **changes) -> Trained:
        if name in made:
            return made[name]
        seen: list[torch.Tensor] = []
        save_output = SFTTrainer.save_output

        def looking(self, output_dir: Path, best: Path | None) -> None:
            with torch.no_grad():
                seen.append(self.model.eval()(input_ids=IDS, use_cache=False).logits.float())
            save_output(self, output_dir, best)

        settings = {
            "model": str(tiny_model),
            "data": str(tiny_data),
            "output_dir": str(folder / name),
            "cache_dir": str(folder / "cache"),
            "device_type": "cpu",
            "dtype": "float32",
            "max_steps": 4,
            "save_steps": 2,
            "global_batch_size": 6,
            "cutoff_len": 128,
            "learning_rate": 1e-2,
            "report_to": "none",
        } | changes
        before = dict(os.environ)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SFTTrainer, "save_output", looking)
            result = run(settings)
        os.environ.clear()
        os.environ.update(before)
        assert result.state == "done"
        made[name] = Trained(folder / name, seen[0], settings)
        return made[name]

    return execute


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
kind, base, folder, ids, out = sys.argv[1:]
source = folder if kind == "model" else base
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
if kind == "adapter":
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, folder)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
    merged = merged.merge_and_unload().eval()
from safetensors.torch import load_file, save_file
ids = load_file(ids)["ids"]
with torch.no_grad():
    logits = {"logits": model.eval()(input_ids=ids).logits}
    if kind == "adapter":
        logits["merged"] = merged(input_ids=ids).logits
        with model.disable_adapter():
            logits["base"] = model(input_ids=ids).logits
tokenizer = AutoTokenizer.from_pretrained(folder)
print(tokenizer.apply_chat_template([{"role": "user", "content": "路由?"}], tokenize=False, add_generation_prompt=True))
answer = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
assert answer.shape[1] > ids.shape[1]
save_file(logits, out)
assert not [name for name in sys.modules if name.split(".")[0] == "finetune"], "finetune was imported"
"""


def load_elsewhere(
    kind: str, trained: Trained, tmp_path: Path, folder: Path | None = None
) -> tuple[dict, str]:
    """Logits and a rendered question from a process that knows nothing of this package, not even
    where it is.
    """
    save_file({"ids": IDS}, tmp_path / "ids.safetensors")
    out = tmp_path / "logits.safetensors"
    words = [
        kind,
        trained.settings["model"],
        str(folder or trained.folder),
        str(tmp_path / "ids.safetensors"),
        str(out),
    ]
    result = subprocess.run(
        [sys.executable, "-c", LOAD, *words],
        env=environment({"PYTHONPATH": None}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return load_file(out), result.stdout


def test_transformers_has_no_warning_about_which_nothing_is_to_be_done(
    train, caplog: pytest.LogCaptureFixture
):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        # no pad token in its config.json
        train("quiet", model=str(ROOT / "data_samples" / "tiny-qwen3"), max_steps=1)
    finally:
        logger.removeHandler(caplog.handler)
    assert "PAD/BOS/EOS" not in caplog.text


def test_peft_loads_the_adapter_and_computes_our_logits(train, tmp_path: Path):
    trained = train("lora")
    logits, question = load_elsewhere("adapter", trained, tmp_path)
    torch.testing.assert_close(logits["logits"], trained.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits["merged"], trained.logits, atol=1e-4, rtol=1e-4)
    assert (logits["base"] - trained.logits).abs().max() > 0.1, "the adapter changes nothing"
    assert "<|im_start|>user\n路由?<|im_end|>\n<|im_start|>assistant\n" in question


def test_transformers_loads_the_whole_model(train, tmp_path: Path):
    trained = train("full", finetuning="full", learning_rate=1e-3)
    logits, question = load_elsewhere("model", trained, tmp_path)
    torch.testing.assert_close(logits["logits"], trained.logits, atol=1e-5, rtol=1e-5)
    assert "<|im_start|>assistant\n" in question
    assert not (trained.folder / "adapter_config.json").exists()
    before = load_file(Path(trained.settings["model"]) / "model.safetensors")
    after = load_file(trained.folder / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())
    # The tokenizer's pad token would be an embedding that does not train in whatever is trained
    # from it.
    settings = [
        json.loads((Path(f) / "config.json").read_text())
        for f in (trained.settings["model"], trained.folder)
    ]
    assert settings[1].get("pad_token_id") == settings[0].get("pad_token_id")


def test_a_checkpoint_is_an_adapter_folder_of_its_own(train):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trained = train("lora")
    base = AutoModelForCausalLM.from_pretrained(trained.settings["model"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, trained.folder / "checkpoint-4").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=IDS).logits, trained.logits, atol=1e-5, rtol=1e-5
        )
    early = load_file(trained.folder / "checkpoint-2" / "adapter_model.safetensors")
    late = load_file(trained.folder / "checkpoint-4" / "adapter_model.safetensors")
    assert early.keys() == late.keys() and any(
        not torch.equal(early[name], late[name]) for name in early
    )


def test_the_adapter_is_what_was_asked_for(train):
    trained = train(
        "two targets",
        lora_r=4,
        lora_alpha=12,
        lora_target_modules=["q_proj", "down_proj"],
        lora_dropout=0.1,
    )
    config = json.loads((trained.folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 12, 0.1)
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj"]
    assert (config["task_type"], config["inference_mode"]) == ("CAUSAL_LM", True)
    assert config["base_model_name_or_path"] == trained.settings["model"]
    tensors = load_file(trained.folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2  # layers x modules x (A, B)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert {min(tensor.shape) for tensor in tensors.values()} == {4}


def test_all_linear_leaves_out_the_head(train):
    names = load_file(train("lora").folder / "adapter_model.safetensors")
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_no_pickle_anywhere_and_every_file_can_be_shared(train):
    for trained in (train("lora"), train("full", finetuning="full", learning_rate=1e-3)):
        files = [path for path in trained.folder.rglob("*") if path.is_file()]
        assert files
        pickles = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".npz", ".ckpt"}
        assert not [path for path in files if path.suffix in pickles]
        known = {".json", ".jsonl", ".safetensors", ".yaml", ".jinja", ".log"}
        assert {path.suffix for path in files if path.name != ".lock"} <= known
        modes = {
            oct(path.stat().st_mode & 0o777)
            for path in files
            if path.suffix in (".json", ".safetensors")
        }
        assert len(modes) == 1, "weights that only their owner can read"


def test_a_template_that_was_given_is_saved_with_the_tokenizer(train):
    from transformers import AutoTokenizer

    trained = train("template", template="alpaca", max_steps=1, save_steps=0, learning_rate=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(trained.folder)
    question = [{"role": "user", "content": "What?"}]
    shown = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert shown == f"{tokenizer.bos_token}### Instruction:\nWhat?\n\n### Response:\n"


# ---------------------------------------------------------------- reopening


def adapter(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


A, B = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"
GOOD = {A: torch.ones(2, 3), B: torch.ones(5, 2)}
SHAPES = {A: (2, 3), B: (5, 2)}


def test_a_good_adapter_is_accepted(tmp_path: Path):
    check_adapter_file(adapter(tmp_path, GOOD), SHAPES)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({**GOOD, A: torch.ones(0)}, f"empty tensor: {A}"),
        ({**GOOD, B: torch.ones(0, 2)}, f"empty tensor: {B}"),
        ({}, "no tensor at all"),
        ({A: GOOD[A]}, f"{B} as None"),
        ({**GOOD, A: torch.ones(3, 3)}, rf"{A} as \(3, 3\), not \(2, 3\)"),
        ({**GOOD, B: torch.zeros(5, 2)}, "every lora_B of the saved adapter is zero"),
    ],
    ids=["an empty A", "an empty B", "nothing", "a missing B", "a wrong shape", "untrained"],
)
def test_a_broken_adapter_is_refused(tensors: dict, message: str, tmp_path: Path):
    with pytest.raises(FinetuneError, match=message) as caught:
        check_adapter_file(adapter(tmp_path, tensors), SHAPES)
    assert "do not use this adapter" in caught.value.fix


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_an_unreadable_adapter_is_refused(name: str, damage: str, tmp_path: Path):
    path = adapter(tmp_path, GOOD) / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        path.unlink()
    with pytest.raises(FinetuneError, match="cannot be read"):
        check_adapter_file(tmp_path)


def test_a_warm_up_step_without_learning_rate_is_no_failure(tmp_path: Path):
    check_adapter_file(adapter(tmp_path, {**GOOD, B: torch.zeros(5, 2)}), SHAPES, trained=False)


def test_a_run_whose_saved_adapter_is_empty_fails(train, monkeypatch: pytest.MonkeyPatch):
    """ZeRO-3 has made such files in more than one package; here the run ends with exit code 1 and
    says so.
    """
    from finetune.training import trainer

    def hollow(path: Path, tensors: dict) -> None:
        save_file({name: torch.ones(0) for name in tensors}, path)

    monkeypatch.setattr(trainer, "write_tensors", hollow)
    with pytest.raises(FinetuneError, match="empty tensor") as caught:
        train("hollow")
    assert caught.value.exit_code == 1
    folder = Path(train("lora").folder).parent / "hollow"
    assert not (folder / "adapter_model.safetensors").exists() and not list(
        folder.glob("checkpoint-*")
    )
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1) and "empty tensor" in status[
        "error"
    ]
