"""The best evaluation: kept, made the output, and the end of a run that gets no better; the same after any resume."""

from __future__ import annotations

import json
import math
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import run_patches
import torch
from run_helpers import Materials, events
from safetensors.torch import load_file

import finetune
from finetune.errors import FinetuneError
from finetune.storage.checkpoint_files import verify
from finetune.training.results import Best, read_best

pytestmark = pytest.mark.filterwarnings("ignore")
ADAPTER = "adapter_model.safetensors"
MATERIALS = {"records": 24}


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """A run that soon learns its 24 records by heart: the validation loss goes down, then up."""
    own = {"max_steps": 40, "learning_rate": 1e-1, "lr_scheduler": "constant", "keep_best": True}
    own |= {"eval_steps": 2, "save_steps": 3, "early_stopping": 4}
    own |= {"valid_data": str(materials.valid)}
    return materials.settings(output_dir, **(own | changes))


def test_the_rule() -> None:
    lowest, highest = {"keep": True, "higher": False}, {"keep": True, "higher": True}
    none = Best("eval_loss")
    assert none.after(0, 0.1, 0.1, **lowest) == none  # before the first step there is none to keep
    best = none.after(2, 3.0, 3.0, **lowest).after(4, 2.0, 2.0, **lowest)
    assert (best.value, best.step, best.since, best.checkpoint) == (2.0, 4, 0, "checkpoint-4")
    # a tie is no improvement, and NaN never one
    for step, value in ((6, 2.0), (8, math.nan), (10, 2.5)):
        best = best.after(step, value, value, **lowest)
    assert (best.step, best.since, best.evaluated) == (4, 3, 10)
    assert none.after(2, math.inf, math.inf, **lowest).value is None
    assert none.after(2, 1.0, 1.0, keep=False, higher=False).checkpoint is None

    right = Best("eval_exact_match/explain")  # more right answers are better
    for step, value, loss in ((2, 0.25, 1.0), (4, 0.5, 1.5), (6, 0.5, 1.5)):
        right = right.after(step, value, loss, **highest)
    assert (right.value, right.step, right.since) == (0.5, 4, 1)
    # as many right answers: the lower loss decides, if the checkpoint has it
    for value, loss, step in (
        *((0.25, 0.1, 4), (0.75, 9.0, 8)),
        *((0.5, 1.4, 8), (0.5, 1.6, 4), (0.5, math.nan, 4)),
    ):
        assert right.after(8, value, loss, **highest).step == step
    older = {name: value for name, value in asdict(right).items() if name != "loss"}
    assert read_best(right.metric, {"best": older}) == replace(right, loss=None)
    assert read_best(right.metric, {"best": older}).after(8, 0.5, 0.1, **highest).step == 4

    # Of another metric or other data; older checkpoints do not name their data.
    of_data, other = replace(best, data="a"), Best("eval_loss/explain")
    assert read_best(other.metric, {"best": asdict(best)}) == other
    for saved in (of_data, best):
        assert read_best("eval_loss", {"best": asdict(saved)}, "a") == of_data
    assert read_best("eval_loss", {"best": asdict(of_data)}, "b") == Best("eval_loss", data="b")


@pytest.fixture(scope="module")
def stopped_early(materials: Materials) -> Path:
    output_dir = materials.folder / "stopped-early"
    run_helpers.train(settings(materials, output_dir))
    return output_dir


def test_a_run_that_a_late_evaluation_ended_is_finished_and_more_patience_goes_on(
    materials, stopped_early, tmp_path
):
    """Stopped by a signal at the step whose evaluation ends it: that one follows on another number of
    processes, and once, not at every start.
    """
    output_dir = tmp_path / "late"
    (whole,), last = events(stopped_early, "early_stop"), run_helpers.status(stopped_early)["step"]
    stop = {"patch": run_patches.signal_self, "patch_arguments": (0, last, signal.SIGTERM)}
    run_helpers.train(settings(materials, output_dir), 2, expect=3, **stop)
    assert events(output_dir, "eval")[-1]["step"] == last - 2, "a batch system gives seconds"
    run_helpers.train(settings(materials, output_dir))
    (early,) = events(output_dir, "early_stop")
    assert (early["step"], early["best_step"]) == (last, whole["best_step"])
    assert early["best"] == pytest.approx(whole["best"], rel=1e-5)
    before = (output_dir / "events.jsonl").read_bytes()
    assert finetune.run(settings(materials, output_dir)).steps == last
    assert (output_dir / "events.jsonl").read_bytes() == before
    longer = finetune.run(settings(materials, output_dir, early_stopping=5, log_samples=False))
    assert events(output_dir, "resume")[-1]["step"] == last and longer.steps == last + 2


def test_the_output_of_a_run_killed_before_it_was_written(materials, stopped_early, tmp_path):
    status = run_helpers.status(stopped_early)
    unfinished = Path(shutil.copytree(stopped_early, tmp_path / "again"))
    (unfinished / "status.json").write_text(
        json.dumps(status | {"state": "running", "exit_code": None})
    )
    (unfinished / ADAPTER).unlink()
    best = Path(shutil.copytree(unfinished, unfinished.parent / "damaged"))
    weights = best / f"checkpoint-{status['best_step']}" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(FinetuneError, match="the best checkpoint cannot be made the output"):
        finetune.run(settings(materials, best))
    assert finetune.run(settings(materials, best, keep_best=False)).output_step == status["step"]

    assert finetune.run(settings(materials, unfinished)).steps == status["step"]
    assert len(events(unfinished, "early_stop")) == 1
    assert (unfinished / ADAPTER).read_bytes() == (stopped_early / ADAPTER).read_bytes()


def test_an_output_made_of_a_step_without_a_rate(materials: Materials, tmp_path: Path) -> None:
    """The warm-up's first step has none, and is the best if the second one does harm: lora_B is zero."""
    changes = {"max_steps": 2, "warmup_steps": 1, "learning_rate": 10.0, "eval_steps": 1}
    result = finetune.run(settings(materials, tmp_path / "run", early_stopping=0, **changes))
    assert result.output_step == 1
    output = load_file(tmp_path / "run" / ADAPTER)
    assert not any(tensor.any() for name, tensor in output.items() if "lora_B" in name)


@pytest.mark.slow
def test_all_parameters_of_the_best(materials: Materials, tmp_path: Path) -> None:
    """The output is what a run whose last step was the best one would have written."""
    output_dir, until = tmp_path / "run", tmp_path / "until"
    # Nothing that depends on the number of steps, which differs.
    changes = {"use_curriculum": False, "warmup_steps": 0, **run_helpers.LAYOUTS["zero3"]}
    changes |= {"finetuning": "full", "learning_rate": 3e-2}
    run_helpers.train(settings(materials, output_dir, **changes), 2)
    best = events(output_dir, "end")[0]["output_step"]
    assert best < run_helpers.status(output_dir)["step"]
    assert verify(output_dir / f"checkpoint-{best}").valid
    changes |= {"max_steps": best, "early_stopping": 0, "keep_best": False, "eval_steps": 0}
    run_helpers.train(settings(materials, until, **changes), 2)
    first, second = (run_helpers.result_weights(folder) for folder in (output_dir, until))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"valid_data": ()}, "there is no validation data"),
        ({"eval_steps": 0}, "eval_steps 0 evaluates at the beginning and the end only"),
        ({"eval_steps": 40}, "the only evaluation is after the last of 40 steps"),
        ({"best_metric": "loss/nobody"}, "best_metric is loss/nobody, which no evaluation has"),
        ({"best_metric": "loss/topology"}, "no validation record is of difficulty"),
    ],
)
def test_what_cannot_be_followed_is_refused(materials, tmp_path, changes, words):
    explain = [line for line in materials.valid.read_text().splitlines() if '"explain"' in line]
    (tmp_path / "explain.jsonl").write_text("\n".join(explain) + "\n")
    given = {"valid_data": str(tmp_path / "explain.jsonl")} | changes
    with pytest.raises(FinetuneError, match=words):
        finetune.run(settings(materials, tmp_path / "run", **given))
    assert not (tmp_path / "run").exists()


def test_the_last_step_is_logged_however_rare_logging_is(materials, tmp_path):
    """Files of other tools have `logging_steps: 10`, and a first run has fewer steps."""
    finetune.run(materials.settings(tmp_path / "run", max_steps=3, logging_steps=50))
    (line,) = run_helpers.lines(tmp_path / "run" / "trainer_log.jsonl")
    assert line["step"] == 3 and math.isfinite(line["loss"])
