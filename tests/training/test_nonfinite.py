"""NaN and inf are never hidden and never reach the weights; loss spikes are told."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import run_patches
import torch
from run_helpers import LAYOUTS, Materials
from safetensors.torch import load_file

from finetune.training.guards import NONFINITE_LIMIT, SPIKE_WINDOW_STEPS

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("nonfinite"))


def saved_state(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint, by file and name."""
    folder = output_dir / f"checkpoint-{step}"
    return {
        f"{path.name}:{name}": tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


CASES: dict[str, tuple[int, dict[str, Any], tuple]] = {
    # name: processes, settings, (on rank, steps, factor, where)
    "one process": (1, {}, (0, (3,), NAN, "loss")),
    "one process, only gradients": (1, {}, (0, (3,), INF, "gradient")),
    "no clipping": (1, {"max_grad_norm": 0.0}, (0, (3,), NAN, "gradient")),
    "no clipping, ZeRO-2": (
        2,
        {"max_grad_norm": 0.0, **LAYOUTS["zero2"]},
        (1, (3,), NAN, "gradient"),
    ),
    "DDP, LoRA": (2, {}, (1, (3,), NAN, "loss")),
    "DDP, full": (2, {"finetuning": "full"}, (1, (3,), INF, "loss")),
    "ZeRO-2": (2, {"finetuning": "full", **LAYOUTS["zero2"]}, (1, (3,), NAN, "loss")),
    "ZeRO-3, offload": (2, LAYOUTS["zero3_offload"], (1, (3,), NAN, "loss")),
    "ZeRO-3, full, only gradients": (
        2,
        {"finetuning": "full", **LAYOUTS["zero3"]},
        (0, (3,), INF, "gradient"),
    ),
    "ZeRO-3, bfloat16": (2, {"dtype": "bfloat16", **LAYOUTS["zero3"]}, (0, (3,), NAN, "loss")),
}


# What others of them have too, in another combination.
MORE = ("no clipping, ZeRO-2", "DDP, full", "ZeRO-3, full, only gradients")


@pytest.mark.parametrize(
    ("processes", "changes", "spoiled"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name in MORE else ())
        for name, case in CASES.items()
    ],
)
def test_the_step_is_skipped_on_all_ranks_and_training_goes_on(
    materials, tmp_path, processes, changes, spoiled
):
    output_dir = tmp_path / "run"
    ranks = run_helpers.train(
        materials.settings(
            output_dir,
            save_steps=1,
            save_total_limit=9,
            max_steps=5,
            warmup_steps=0,
            lr_scheduler="linear",
            **changes,
        ),
        processes,
        patch=run_patches.spoil_losses,
        patch_arguments=spoiled,
        launched=True,
    )
    ids = run_helpers.sample_ids(output_dir)
    (event,) = run_helpers.events(output_dir, "nonfinite")
    assert event["step"] == 3 and event["ids"] == ids[2]
    assert "step 3 was skipped" in ranks.output()

    states = {step: saved_state(output_dir, step) for step in range(1, 6)}
    for state in states.values():
        assert all(tensor.isfinite().all() for tensor in state.values())
    assert not equal(states[1], states[2])
    assert equal(states[2], states[3]), "the skipped step left something in weights or moments"
    assert not equal(states[3], states[4])
    assert not equal(states[4], states[5])

    losses = run_helpers.losses(output_dir)
    # What is not finite is null in the log: JSON has no word for it.
    assert (losses[2] is not None) == (spoiled[3] == "gradient"), "the log must show what happened"
    assert None not in losses[:2] + losses[3:]
    norms = [record["grad_norm"] for record in run_helpers.lines(output_dir / "trainer_log.jsonl")]
    assert [norm is not None for norm in norms] == [True, True, False, True, True]
    rates = [
        record["learning_rate"] for record in run_helpers.lines(output_dir / "trainer_log.jsonl")
    ]
    assert rates == pytest.approx([1e-2 * (1 - step / 5) for step in range(5)]), (
        "the schedule is a function of the step"
    )


@pytest.mark.parametrize(("processes", "layout"), [(1, "plain"), (2, "zero2")])
def test_resumed_right_after_a_skipped_step_it_is_the_same_training(
    materials, tmp_path, processes, layout
):
    """Ids, rates, losses and bits: under ZeRO-2 too, whose schedule is not moved on by a step that
    was skipped.
    """
    spoiled = {
        "patch": run_patches.spoil_losses,
        "patch_arguments": (processes - 1, (3,), NAN),
        "launched": True,
    }
    changes = {
        "save_steps": 1,
        "save_total_limit": 9,
        "max_steps": 5,
        "warmup_steps": 0,
        "lora_dropout": 0.3,
    }
    whole, resumed = (
        materials.settings(tmp_path / name, **changes, **LAYOUTS[layout])
        for name in ("whole", "resumed")
    )
    run_helpers.train(whole, processes, **spoiled)
    run_helpers.train(resumed, processes, **spoiled)
    for step in (4, 5):
        shutil.rmtree(tmp_path / "resumed" / f"checkpoint-{step}")
    for name in ("adapter_model.safetensors", "status.json"):
        (tmp_path / "resumed" / name).unlink()
    run_helpers.train(resumed, processes, launched=True)
    assert [event["step"] for event in run_helpers.events(tmp_path / "resumed", "resume")] == [3]
    first, second = (
        run_helpers.lines(tmp_path / name / "trainer_log.jsonl") for name in ("whole", "resumed")
    )
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert [line[name] for line in first] == [line[name] for line in second], name
    assert equal(saved_state(tmp_path / "whole", 5), saved_state(tmp_path / "resumed", 5))


@pytest.mark.parametrize("layout", ["plain", "zero2", "zero3"])
def test_a_checkpoint_before_the_first_good_step_is_saved(materials, tmp_path, layout):
    """As float16's first steps may go, whose scale comes down: the adapter is as it began, and
    nothing is wrong.
    """
    output_dir = tmp_path / "run"
    run_helpers.train(
        materials.settings(
            output_dir, save_steps=1, save_total_limit=9, max_steps=4, **LAYOUTS[layout]
        ),
        patch=run_patches.spoil_losses,
        patch_arguments=(0, (1, 2), NAN, "gradient"),
        launched=True,
    )
    assert [event["step"] for event in run_helpers.events(output_dir, "nonfinite")] == [1, 2]
    saved = run_helpers.result_weights(output_dir / "checkpoint-2")
    assert not any(tensor.any() for name, tensor in saved.items() if "lora_B" in name)
    assert run_helpers.status(output_dir)["state"] == "done"


@pytest.mark.parametrize(
    ("processes", "layout"), [(1, "plain"), pytest.param(2, "zero3", marks=pytest.mark.slow)]
)
def test_at_the_limit_the_run_stops_and_names_the_last_good_checkpoint(
    materials, tmp_path, processes, layout
):
    output_dir = tmp_path / "run"
    steps = NONFINITE_LIMIT + 6
    settings = materials.settings(output_dir, save_steps=3, max_steps=steps, **LAYOUTS[layout])
    spoiled = {
        "patch": run_patches.spoil_losses,
        "patch_arguments": (processes - 1, range(5, 99), NAN),
    }
    ranks = run_helpers.train(settings, processes, expect=1, launched=True, **spoiled)
    # Steps 5 to 14 are skipped; what was saved meanwhile holds the weights of step 4, which are
    # good.
    assert len(run_helpers.events(output_dir, "nonfinite")) == NONFINITE_LIMIT
    newest = max(output_dir.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert f"the last good checkpoint is {newest.name}" in ranks.output()
    assert all(
        tensor.isfinite().all()
        for tensor in saved_state(output_dir, int(newest.name.split("-")[1])).values()
    )
    status = run_helpers.status(output_dir)
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert f"{NONFINITE_LIMIT} steps in a row" in status["error"]


@pytest.mark.parametrize(
    "changes", [{}, {"deepspeed": run_helpers.deepspeed_keys(2)}], ids=["plain", "ZeRO-2"]
)
def test_between_lines_of_the_log_nothing_is_different(materials, tmp_path, changes):
    """The host reads how a step went when the next is done; events, checkpoints and the limit are
    of the right step.
    """
    output_dir = tmp_path / "run"
    settings = materials.settings(
        output_dir, max_steps=8, logging_steps=50, save_steps=4, save_total_limit=9, **changes
    )
    spoiled = {
        "patch": run_patches.spoil_losses,
        "patch_arguments": (0, (1, 4, 6), NAN),
        "launched": True,
    }
    run_helpers.train(settings, **spoiled)
    ids = run_helpers.sample_ids(output_dir)
    events = run_helpers.events(output_dir, "nonfinite")
    assert [(event["step"], event["ids"]) for event in events] == [
        (step, ids[step - 1]) for step in (1, 4, 6)
    ]
    logged = tmp_path / "logged"
    run_helpers.train(settings | {"output_dir": str(logged), "logging_steps": 1}, **spoiled)
    for step in (4, 8):
        assert equal(saved_state(output_dir, step), saved_state(logged, step))


def test_the_limit_is_seen_a_step_late_at_most_between_lines_of_the_log(materials, tmp_path):
    output_dir = tmp_path / "run"
    spoiled = {"patch": run_patches.spoil_losses, "patch_arguments": (0, range(3, 99), NAN)}
    settings = materials.settings(output_dir, max_steps=40, logging_steps=50)
    run_helpers.train(settings, expect=1, **spoiled)
    skipped = [event["step"] for event in run_helpers.events(output_dir, "nonfinite")]
    assert skipped == list(range(3, 3 + NONFINITE_LIMIT))
    # the limit's step and one more
    assert len(run_helpers.sample_ids(output_dir)) == 3 + NONFINITE_LIMIT


def test_a_resumed_run_names_the_checkpoint_that_it_went_on_from(materials, tmp_path):
    output_dir = tmp_path / "run"
    steps = NONFINITE_LIMIT + 6
    settings = materials.settings(output_dir, max_steps=steps, save_steps=4)
    run_helpers.train(
        settings, 1, patch=run_patches.signal_self, patch_arguments=(0, 4, 15), expect=3
    )
    ranks = run_helpers.train(
        settings | {"save_steps": 0},
        1,
        expect=1,
        patch=run_patches.spoil_losses,
        patch_arguments=(0, range(5, 99), NAN),
    )
    assert "the last good checkpoint is checkpoint-4" in ranks.output()


def test_a_good_step_between_resets_the_count(materials, tmp_path):
    output_dir = tmp_path / "run"
    bad = [step for step in range(2, 2 * NONFINITE_LIMIT + 1) if step != NONFINITE_LIMIT]
    run_helpers.train(
        materials.settings(output_dir, max_steps=2 * NONFINITE_LIMIT),
        1,
        expect=1,
        patch=run_patches.spoil_losses,
        patch_arguments=(0, bad, NAN),
    )
    skipped = [event["step"] for event in run_helpers.events(output_dir, "nonfinite")]
    assert skipped == bad  # 8 in a row, one good step, then 10


def test_spikes_are_told_with_the_ids_of_their_step(materials, tmp_path):
    """The window is full after 128 steps; a spike is trained on all the same."""
    output_dir = tmp_path / "run"
    spike = SPIKE_WINDOW_STEPS + 3
    ranks = run_helpers.train(
        materials.settings(
            output_dir, max_steps=spike + 3, learning_rate=1e-4, global_batch_size=4
        ),
        1,
        patch=run_patches.spoil_losses,
        patch_arguments=(0, (10, spike), 30.0),
    )
    (event,) = run_helpers.events(output_dir, "spike")
    assert event["step"] == spike
    assert event["ids"] == run_helpers.sample_ids(output_dir)[spike - 1]
    assert event["loss"] == run_helpers.losses(output_dir)[spike - 1]
    assert f"step {spike}: loss" in ranks.output()
    assert run_helpers.status(output_dir)["state"] == "done"
