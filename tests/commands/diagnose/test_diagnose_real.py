"""Runs of this package that really fail, each with its cause."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import run_helpers
from run_helpers import Materials

from finetune.commands.diagnose.command import diagnose_logs


def causes(*paths: Path) -> list[str]:
    return [finding.cause for finding in diagnose_logs(paths)]


def assert_cause(cause: str, paths: list[Path]) -> None:
    findings = diagnose_logs(paths)
    texts = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in paths]
    assert [finding.cause for finding in findings] == [cause], "\n".join(texts)


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("diagnose"))


def rows(folder: Path, line: str) -> dict[str, str]:
    """Data with one line between good ones."""
    good = json.dumps({"instruction": "what", "output": "that"})
    (folder / "bad.jsonl").write_text(f"{good}\n{line}\n{good}\n", encoding="utf-8")
    return {"data": str(folder / "bad.jsonl")}


def model_cut_short(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def more_tokens_than_embeddings(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<new-{number}>" for number in range(64)])
    tokenizer.save_pretrained(model)


NO_OUTPUT, NO_COMMA = '{"instruction": "q", "answer": "a"}', '{"instruction": "q" "output": "a"}'
NEW_TOKEN = '{"instruction": "<new-3>", "output": "a"}'
# What a run of one's own has: settings, or what makes them in a folder.
OWN: dict[str, Any] = {
    "model_not_found": {"model": "/tmp/no-model"},
    "dataset_missing_field": lambda folder: rows(folder, NO_OUTPUT),
    "dataset_bad_json": lambda folder: rows(folder, NO_COMMA),
    "explained_by_run": {"lora_target_modules": ["no_such_layer"]},
    "hub_offline": {"model": "an-owner/a-model-that-is-not-cached"},
    "cuda_driver_mismatch": {"device_type": "cuda"},
    "torch_npu_missing_or_mismatch": {"device_type": "npu"},
    "nan_loss": {"learning_rate": 1e30, "max_steps": 40, "max_grad_norm": 0},
    "deepspeed_batch_assert": {"global_batch_size": 7, "gradient_accumulation_steps": 4},
    "checkpoint_corrupt": {"change": model_cut_short},
    "tokenizer_vocab_mismatch": lambda folder: {
        "change": more_tokens_than_embeddings,
        **rows(folder, NEW_TOKEN),
    },
}


@pytest.mark.parametrize("cause", OWN)
def test_own_run(cause, materials, tmp_path):
    changes = dict(OWN[cause](tmp_path) if callable(OWN[cause]) else OWN[cause])
    if change := changes.pop("change", None):
        changes["model"] = str(shutil.copytree(materials.model, tmp_path / "model"))
        change(tmp_path / "model")
    ranks = run_helpers.start(materials.settings(tmp_path / "run", **changes))
    assert ranks.wait() != [0], ranks.output()
    assert_cause(cause, ranks.log_paths)
    if cause == "nan_loss":
        assert causes(tmp_path / "run") == ["nan_loss"]


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_run_that_was_ended(how, materials, tmp_path):
    ranks = run_helpers.start(materials.settings(tmp_path / "run", max_steps=2000))
    log = tmp_path / "run" / "trainer_log.jsonl"
    run_helpers.wait_for(
        lambda: log.exists() and log.read_bytes().count(b"\n"), what="the first step"
    )
    assert causes(tmp_path / "run") == []  # it runs
    if how == "killed":
        ranks.kill()
        assert causes(tmp_path / "run") == ["peer_died"]
        return
    run_helpers.send(ranks.pids, signal.SIGTERM)
    assert ranks.wait() == [3], ranks.output()
    assert_cause("preempted", ranks.log_paths)
    assert causes(tmp_path / "run") == ["preempted"]
