"""NaN and inf are never hidden and never reach the weights; loss spikes are reported."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import run_patches
import torch
from run_helpers import LAYOUTS, Materials, events
from safetensors.torch import load_file

from finetune.training import guards
from finetune.training.guards import NONFINITE_LIMIT

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("nonfinite"))


def saved_state(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint, by file and name."""
    paths = sorted((output_dir / f"checkpoint-{step}").glob("*.safetensors"))
    tensors = [(path, load_file(path)) for path in paths]
    return {f"{path.name}:{name}": t for path, file in tensors for name, t in file.items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


FULL = {"finetuning": "full"}
CASES: dict[str, tuple[int, dict[str, Any], int, float, str]] = {
    # name: processes, settings, on rank, factor, where
    "no clipping": (1, {"max_grad_norm": 0.0}, 0, NAN, "gradient"),
    "DDP, LoRA": (2, {}, 1, NAN, "loss"),
    "ZeRO-2": (2, FULL | LAYOUTS["zero2"], 1, NAN, "loss"),
    "ZeRO-3, bfloat16": (2, {"dtype": "bfloat16", **LAYOUTS["zero3"]}, 0, NAN, "loss"),
}
MORE = {
    "no clipping, ZeRO-2": (2, {"max_grad_norm": 0.0, **LAYOUTS["zero2"]}, 1, NAN, "gradient"),
    "DDP, full": (2, FULL, 1, INF, "loss"),
    "ZeRO-3, full, only gradients": (2, FULL | LAYOUTS["zero3_offload"], 0, INF, "gradient"),
}


@pytest.mark.parametrize(
    ("processes", "changes", "on_rank", "factor", "where"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in MORE.items()),
    ],
)
def test_the_step_is_skipped_on_all_ranks_and_a_resume_right_after_it_changes_nothing(
    materials, tmp_path, processes, changes, on_rank, factor, where
):
    output_dir = tmp_path / "run"
    common = {"save_steps": 1, "save_total_limit": 9, "max_steps": 5, "warmup_steps": 0}
    common |= {"lr_scheduler": "linear", "lora_dropout": 0.3}
    settings = materials.settings(output_dir, **common, **changes)
    spoiled = {"patch": run_patches.spoil_losses, "patch_arguments": (on_rank, (3,), factor, where)}
    ranks = run_helpers.train(settings, processes, launched=True, **spoiled)
    (event,) = events(output_dir, "nonfinite")
    assert event["step"] == 3 and event["ids"] == run_helpers.sample_ids(output_dir)[2]
    assert "step 3 was skipped" in ranks.output()

    states = {step: saved_state(output_dir, step) for step in range(1, 6)}
    assert all(tensor.isfinite().all() for state in states.values() for tensor in state.values())
    assert [equal(states[step], states[step + 1]) for step in range(1, 5)] == [
        False,
        True,
        False,
        False,
    ]

    before = run_helpers.lines(output_dir / "trainer_log.jsonl")
    # What is not finite is null in the log: JSON has no word for it.
    finite = [True, True, False, True, True]
    assert [line["loss"] is not None for line in before] == (
        finite if where == "loss" else [True] * 5
    )
    assert [line["grad_norm"] is not None for line in before] == finite
    rates = [line["learning_rate"] for line in before]
    assert rates == pytest.approx([1e-2 * (1 - step / 5) for step in range(5)])

    for name in ("checkpoint-4", "checkpoint-5"):
        shutil.rmtree(output_dir / name)
    (output_dir / "status.json").unlink()
    run_helpers.train(settings, processes, launched=True)
    assert [event["step"] for event in events(output_dir, "resume")] == [3]
    after = run_helpers.lines(output_dir / "trainer_log.jsonl")
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert [line[name] for line in after] == [line[name] for line in before], name
    assert equal(saved_state(output_dir, 5), states[5])


SLOW_LAYOUTS = [pytest.param(name, marks=pytest.mark.slow) for name in ("zero2", "zero3")]


@pytest.mark.parametrize("layout", ["plain", *SLOW_LAYOUTS])
def test_a_checkpoint_before_the_first_good_step_is_saved(materials, tmp_path, layout):
    """As float16's first steps may go, whose scale comes down: the adapter is as it began. And between
    lines of the log, where the host reads how a step went when the next is done, events are right too.
    """
    output_dir = tmp_path / "run"
    common = {"save_steps": 2, "save_total_limit": 9, "max_steps": 6, "logging_steps": 50}
    spoiled = {
        "patch": run_patches.spoil_losses,
        "patch_arguments": (0, (1, 2, 5), NAN, "gradient"),
    }
    settings = materials.settings(output_dir, **common, **LAYOUTS[layout])
    run_helpers.train(settings, launched=True, **spoiled)
    ids = run_helpers.sample_ids(output_dir)
    skipped = [(event["step"], event["ids"]) for event in events(output_dir, "nonfinite")]
    assert skipped == [(step, ids[step - 1]) for step in (1, 2, 5)]
    saved = run_helpers.result_weights(output_dir / "checkpoint-2")
    assert not any(tensor.any() for name, tensor in saved.items() if "lora_B" in name)
    assert run_helpers.status(output_dir)["state"] == "done"


@pytest.mark.parametrize(
    ("processes", "layout"), [(1, "plain"), pytest.param(2, "zero3", marks=pytest.mark.slow)]
)
def test_at_the_limit_the_run_stops_and_names_the_last_good_checkpoint(
    materials, tmp_path, processes, layout
):
    """Also where it was resumed from; a good step between starts the count again."""
    output_dir, last = tmp_path / "run", 5 + NONFINITE_LIMIT  # the limit's step and one more
    changes = {"save_steps": 3, "max_steps": 40, "logging_steps": 50, **LAYOUTS[layout]}
    settings = materials.settings(output_dir, **changes)
    spoiled = {"patch": run_patches.spoil_losses, "expect": 1, "launched": True}
    spoiled["patch_arguments"] = (processes - 1, (2, *range(5, 99)), NAN)
    ranks = run_helpers.train(settings, processes, **spoiled)
    skipped = [event["step"] for event in events(output_dir, "nonfinite")]
    assert skipped == [2, *range(5, last)]
    assert len(run_helpers.sample_ids(output_dir)) == last
    # What was saved meanwhile holds the weights of step 4, which are good.
    newest = max(output_dir.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    named = f"the last good checkpoint is {newest.name}"
    assert named in ranks.output()
    state = saved_state(output_dir, int(newest.name.split("-")[1]))
    assert all(tensor.isfinite().all() for tensor in state.values())
    status = run_helpers.status(output_dir)
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 1, last)
    assert f"{NONFINITE_LIMIT} steps in a row" in status["error"]
    again = run_helpers.train(settings | {"save_steps": 0}, processes, **spoiled)
    assert named in again.output()


def short_window(rank: int, steps: int, spike: int) -> None:
    guards.SpikeDetector.__init__.__defaults__ = (steps,)
    run_patches.spoil_losses(rank, 0, (spike - steps - 1, spike), 30.0)


def test_spikes_are_reported_with_the_ids_of_their_step(materials, tmp_path):
    """Once the window is full; a spike is trained on all the same."""
    output_dir, spike = tmp_path / "run", 12
    settings = materials.settings(output_dir, max_steps=spike + 1, learning_rate=1e-6)
    patch = {"patch": short_window, "patch_arguments": (8, spike)}
    assert f"step {spike}: loss" in run_helpers.train(settings, **patch).output()
    (event,) = events(output_dir, "spike")
    assert event["step"] == spike and event["loss"] == run_helpers.losses(output_dir)[spike - 1]
    assert event["ids"] == run_helpers.sample_ids(output_dir)[spike - 1]
