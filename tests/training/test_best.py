"""The best evaluation: kept, made the output, and the end of a run that gets no better; the same
after any resume.
"""

from __future__ import annotations

import json
import math
import re
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
from finetune.errors import ConfigError, FinetuneError
from finetune.storage.checkpoint_files import list_checkpoints
from finetune.training.results import Best, read_best

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("best"), records=24)


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """A run that soon learns its 24 records by heart: the validation loss goes down, then up."""
    own = {
        "max_steps": 40,
        "learning_rate": 1e-1,
        "lr_scheduler": "constant",
        "valid_data": str(materials.valid),
        "eval_steps": 2,
        "save_steps": 3,
        "keep_best": True,
        "early_stopping": 4,
    }
    return materials.settings(output_dir, **(own | changes))


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["eval_loss"] for event in events(folder, "eval")}


# -------------------------------------------------------------------------------- which is the best


def test_the_rule() -> None:
    lowest, highest = {"keep": True, "higher": False}, {"keep": True, "higher": True}
    best = Best("eval_loss").after(0, 0.1, 0.1, **lowest)  # before the first step: none to keep
    assert best == Best("eval_loss")
    best = best.after(2, 3.0, 3.0, **lowest).after(4, 2.0, 2.0, **lowest)
    assert (best.value, best.step, best.since, best.checkpoint) == (2.0, 4, 0, "checkpoint-4")
    # a tie is no improvement, and NaN never one
    for step, value in ((6, 2.0), (8, math.nan), (10, 2.5)):
        best = best.after(step, value, value, **lowest)
    assert (best.step, best.since, best.evaluated) == (4, 3, 10)
    for none in (math.nan, math.inf):
        assert Best("eval_loss").after(2, none, none, **lowest).value is None
    assert Best("eval_loss").after(2, 1.0, 1.0, keep=False, higher=False).checkpoint is None
    for metric in ("eval_exact_match", "eval_exact_match/explain"):  # more right answers are better
        right = (
            Best(metric)
            .after(2, 0.25, 1.0, **highest)
            .after(4, 0.5, 1.5, **highest)
            .after(6, 0.5, 1.5, **highest)
        )
        assert (right.value, right.step, right.since) == (0.5, 4, 1)
        assert (
            right.after(8, 0.25, 0.1, **highest).since == 2
            and right.after(8, 0.75, 9.0, **highest).step == 8
        )
        # As many right answers: the lower loss decides, where the checkpoint says it.
        assert (tie := right.after(8, 0.5, 1.4, **highest)).step == 8 and (tie.since, tie.loss) == (
            0,
            1.4,
        )
        assert (
            right.after(8, 0.5, math.nan, **highest).step
            == right.after(8, 0.5, 1.6, **highest).step
            == 4
        )
        older = {name: value for name, value in asdict(right).items() if name != "loss"}
        assert read_best(metric, {"best": older}) == replace(right, loss=None)
        assert read_best(metric, {"best": older}).after(8, 0.5, 0.1, **highest).step == 4
    assert read_best("eval_loss", {"best": asdict(best)}) == best
    # of another metric
    assert read_best("eval_loss/explain", {"best": asdict(best)}) == Best("eval_loss/explain")
    # Losses of other data are not compared; older checkpoints do not say which they were.
    of_data = replace(best, data="a")
    assert read_best("eval_loss", {"best": asdict(of_data)}, "a") == of_data
    assert read_best("eval_loss", {"best": asdict(best)}, "a") == of_data
    assert read_best("eval_loss", {"best": asdict(of_data)}, "b") == Best("eval_loss", data="b")
    assert read_best("eval_loss", {}) == Best("eval_loss")


# --------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def stopped_early(materials: Materials) -> Path:
    output_dir = materials.folder / "stopped-early"
    run_helpers.train(settings(materials, output_dir))
    return output_dir


def test_a_run_ends_early_and_its_best_is_the_output(
    materials: Materials, stopped_early: Path
) -> None:
    measured = losses(stopped_early)
    trained = {step: value for step, value in measured.items() if step}
    best = min(trained, key=trained.__getitem__)
    (event,), (end,) = events(stopped_early, "early_stop"), events(stopped_early, "end")
    last = best + 2 * 4
    assert list(measured) == list(range(0, last + 1, 2)) and 2 < last < 40, measured
    told = {"metric": "eval_loss", "best": trained[best], "best_step": best}
    assert {**event, "time": 0, "event": ""} == {
        "step": last,
        "evaluations": 4,
        **told,
        "time": 0,
        "event": "",
    }
    assert end["state"] == "done" and end["exit_code"] == 0 and end["output_step"] == best
    status = run_helpers.status(stopped_early)
    assert (status["step"], status["best_step"], status["output_step"]) == (last, best, best)
    folder = stopped_early / f"checkpoint-{best}"
    output, kept = (
        load_file(stopped_early / "adapter_model.safetensors"),
        load_file(folder / "adapter_model.safetensors"),
    )
    assert output.keys() == kept.keys() and all(
        torch.equal(output[name], kept[name]) for name in kept
    )
    newest = load_file(list_checkpoints(stopped_early)[-1] / "adapter_model.safetensors")
    assert any(not torch.equal(output[name], newest[name]) for name in newest)


def test_a_run_that_ended_early_is_finished(materials: Materials, stopped_early: Path) -> None:
    before = (stopped_early / "events.jsonl").read_bytes()
    ranks = run_helpers.train(settings(materials, stopped_early))
    assert "this run is finished" in ranks.output()
    steps = run_helpers.status(stopped_early)["step"]
    assert finetune.run(settings(materials, stopped_early)).steps == steps < 40
    assert (stopped_early / "events.jsonl").read_bytes() == before


def test_more_patience_goes_on_where_it_ended(
    materials: Materials, stopped_early: Path, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(stopped_early, tmp_path / "again"))
    last = run_helpers.status(stopped_early)["step"]
    run_helpers.train(settings(materials, again, early_stopping=5, log_samples=False))
    assert events(again, "resume")[-1]["step"] == last
    assert run_helpers.status(again)["step"] == last + 2


@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGKILL), (2, signal.SIGTERM)])
def test_the_same_after_a_resume(
    materials: Materials, stopped_early: Path, tmp_path: Path, processes: int, number: int
) -> None:
    """Killed between its saves; or asked to stop at a step whose evaluation then comes first, on
    other devices.
    """
    output_dir = tmp_path / "resumed"
    best = events(stopped_early, "early_stop")[0]["best_step"]
    step = best + 3 if number == signal.SIGKILL else best + 4
    options = {"patch": run_patches.signal_self, "patch_arguments": (0, step, number)}
    ranks = run_helpers.start(
        settings(materials, output_dir, async_save=False), processes, **options
    )
    assert ranks.wait() == ([-number] if number == signal.SIGKILL else [3] * processes), (
        ranks.output()
    )
    run_helpers.train(settings(materials, output_dir))
    (early,), (uninterrupted,) = (
        events(output_dir, "early_stop"),
        events(stopped_early, "early_stop"),
    )
    assert (early["step"], early["best_step"]) == (
        uninterrupted["step"],
        uninterrupted["best_step"],
    )
    assert early["best"] == pytest.approx(uninterrupted["best"], rel=1e-5)
    first, second = (
        run_helpers.result_weights(output_dir),
        run_helpers.result_weights(stopped_early),
    )
    for name in first:
        torch.testing.assert_close(
            first[name],
            second[name],
            rtol=1e-3 if processes > 1 else 0,
            atol=0 if processes == 1 else 1e-4,
        )


def test_a_run_that_a_late_evaluation_ended_is_finished(
    materials: Materials, stopped_early: Path, tmp_path: Path
) -> None:
    """Stopped by a signal at the step whose evaluation ends it: that one is made up for once, not
    at every start.
    """
    output_dir = tmp_path / "late"
    last = run_helpers.status(stopped_early)["step"]
    options = {"patch": run_patches.signal_self, "patch_arguments": (0, last, signal.SIGTERM)}
    run_helpers.train(settings(materials, output_dir), expect=3, **options)
    run_helpers.train(settings(materials, output_dir))
    assert (
        run_helpers.status(output_dir)["step"] == last
        and len(events(output_dir, "early_stop")) == 1
    )
    before = (output_dir / "events.jsonl").read_bytes()
    assert "this run is finished" in run_helpers.train(settings(materials, output_dir)).output()
    assert (output_dir / "events.jsonl").read_bytes() == before
    run_helpers.train(settings(materials, output_dir, early_stopping=5, log_samples=False))
    assert run_helpers.status(output_dir)["step"] == last + 2, "more patience goes on"


def test_a_run_killed_before_its_output_is_written_ends_with_the_same(
    materials: Materials, stopped_early: Path, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(stopped_early, tmp_path / "again"))
    status = json.loads((again / "status.json").read_text())
    (again / "status.json").write_text(
        json.dumps({**status, "state": "running", "exit_code": None})
    )
    (again / "adapter_model.safetensors").unlink()
    run_helpers.train(settings(materials, again))
    assert (
        len(events(again, "early_stop")) == 1
        and run_helpers.status(again)["step"] == status["step"]
    )
    assert (again / "adapter_model.safetensors").read_bytes() == (
        stopped_early / "adapter_model.safetensors"
    ).read_bytes()


def test_an_output_made_of_a_step_without_a_rate(materials: Materials, tmp_path: Path) -> None:
    """The warm-up's first step has none, and is the best where the second one does harm: all of
    lora_B is zero.
    """
    output_dir = tmp_path / "run"
    changes = {
        "max_steps": 2,
        "warmup_steps": 1,
        "learning_rate": 10.0,
        "eval_steps": 1,
        "early_stopping": 0,
    }
    run_helpers.train(settings(materials, output_dir, **changes))
    assert (
        run_helpers.status(output_dir)["output_step"] == 1
        and losses(output_dir)[2] > losses(output_dir)[1]
    )
    output = load_file(output_dir / "adapter_model.safetensors")
    assert not any(tensor.any() for name, tensor in output.items() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "zero2", "zero3"])
def test_all_parameters_of_the_best(materials: Materials, tmp_path: Path, layout: str) -> None:
    """The output is what a run whose last step was the best one would have written."""
    from finetune.storage.checkpoint_files import verify

    output_dir = tmp_path / "run"
    # Nothing that depends on the number of steps, which differs.
    changes = {"use_curriculum": False, "warmup_steps": 0, **run_helpers.LAYOUTS[layout]}
    changes |= {"finetuning": "full", "learning_rate": 3e-2}
    run_helpers.train(settings(materials, output_dir, **changes), 2)
    best = events(output_dir, "end")[0]["output_step"]
    assert (
        best < run_helpers.status(output_dir)["step"]
        and verify(output_dir / f"checkpoint-{best}").valid
    )
    until = tmp_path / "until"
    run_helpers.train(
        settings(
            materials,
            until,
            **changes,
            max_steps=best,
            early_stopping=0,
            keep_best=False,
            eval_steps=0,
        ),
        2,
    )
    first, second = run_helpers.result_weights(output_dir), run_helpers.result_weights(until)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


def test_a_damaged_best_is_not_made_the_output(
    materials: Materials, stopped_early: Path, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(stopped_early, tmp_path / "again"))
    status = json.loads((again / "status.json").read_text())
    (again / "status.json").write_text(
        json.dumps({**status, "state": "running", "exit_code": None})
    )
    weights = again / f"checkpoint-{status['best_step']}" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    ranks = run_helpers.train(settings(materials, again), expect=1)
    assert "the best checkpoint cannot be made the output" in ranks.output()
    run_helpers.train(settings(materials, again, keep_best=False))
    assert run_helpers.status(again)["output_step"] == status["step"]


# ----------------------------------------------------------------------------- refused before start


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"valid_data": ()}, "there is no validation data"),
        ({"eval_steps": 0}, "eval_steps 0 evaluates at the beginning and the end only"),
        ({"eval_steps": 40}, "the only evaluation is after the last of 40 steps"),
        ({"best_metric": "loss/nobody"}, "best_metric is loss/nobody, which no evaluation has"),
        (
            {"best_metric": "loss/topology", "valid_data": "explain.jsonl"},
            "no validation record is of difficulty",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(
    materials: Materials, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    import finetune

    if changes.get("valid_data"):
        lines = [
            line
            for line in materials.valid.read_text().splitlines()
            if json.loads(line)["difficulty"] == "explain"
        ]
        (tmp_path / "explain.jsonl").write_text("\n".join(lines) + "\n")
        changes = {**changes, "valid_data": str(tmp_path / "explain.jsonl")}
    with pytest.raises((ConfigError, FinetuneError), match=words):
        finetune.run(settings(materials, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_the_last_step_is_logged_however_rare_logging_is(
    materials: Materials, tmp_path: Path
) -> None:
    """Files of other tools write `logging_steps: 10`, and a first run has fewer steps."""
    rare = materials.settings(tmp_path / "run", max_steps=3, logging_steps=50)
    said = run_helpers.train(rare).output()
    (line,) = run_helpers.lines(tmp_path / "run" / "trainer_log.jsonl")
    assert line["step"] == 3 and math.isfinite(line["loss"])
    assert re.search(rf"step 3/3 .*loss {line['loss']:.4f}", said)
