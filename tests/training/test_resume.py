"""Going on: on other devices, after changes, past damaged checkpoints, and never by way of a
pickle.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import run_patches
import torch
from run_helpers import LAYOUTS, Materials

from finetune.storage.checkpoint_files import list_checkpoints, newest_valid

STEPS = 9
TIMINGS = ("tokens_per_second", "samples_per_second", "step_seconds", "loader_wait_seconds")


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("resume"))


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    return materials.settings(output_dir, **{"max_steps": STEPS, "save_steps": 3, **changes})


@pytest.fixture(scope="module")
def uninterrupted(materials: Materials):
    """Output folder of the run on one process that nobody stopped, by what is trained."""
    made: dict[str, Path] = {}

    def get(finetuning: str) -> Path:
        if finetuning not in made:
            made[finetuning] = materials.folder / f"uninterrupted-{finetuning}"
            run_helpers.train(settings(materials, made[finetuning], finetuning=finetuning))
        return made[finetuning]

    return get


@pytest.fixture
def interrupted(materials: Materials, tmp_path: Path) -> Path:
    """A run on one process that was killed in step 8: checkpoints at 3 and 6, logs up to 7, and no
    word of an end.
    """
    template = materials.folder / "interrupted"
    if not template.exists():
        killed = {"patch": run_patches.kill_self, "patch_arguments": (0, 8)}
        # Not behind the training, whose steps here are shorter than a save.
        waits = settings(materials, template, async_save=False)
        assert run_helpers.start(waits, **killed).wait() == [-signal.SIGKILL]
        assert [folder.name for folder in list_checkpoints(template)] == [
            "checkpoint-3",
            "checkpoint-6",
        ]
    return Path(shutil.copytree(template, tmp_path / "run"))


def step_records(output_dir: Path) -> list[dict[str, Any]]:
    records = run_helpers.lines(output_dir / "trainer_log.jsonl")
    return [
        {name: value for name, value in record.items() if name not in TIMINGS} for record in records
    ]


def assert_same_run(output_dir: Path, other: Path) -> None:
    """Everything but the times, bit by bit."""
    assert (output_dir / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    assert step_records(output_dir) == step_records(other)
    first, second = run_helpers.result_weights(output_dir), run_helpers.result_weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------- other devices


@pytest.mark.parametrize(
    ("finetuning", "executions"),
    [
        (
            "lora",
            [
                (2, {"micro_batch_size": 2, **LAYOUTS["zero3_offload"]}),
                (1, {"micro_batch_size": 4, "packing": False, "fused_lora": False}),
                (2, {"micro_batch_size": 1, **LAYOUTS["plain"]}),
            ],
        ),
        (
            "full",
            [
                (2, {"micro_batch_size": 1, **LAYOUTS["zero3"]}),
                (1, {"micro_batch_size": 4}),
                (2, {"micro_batch_size": 2, "packing": False, **LAYOUTS["zero2"]}),
            ],
        ),
    ],
    ids=["lora", "full"],
)
def test_two_then_one_then_two_processes(
    materials, uninterrupted, tmp_path, finetuning, executions
):
    """Other processes, micro-batch, packing, ZeRO stage and LoRA path after each stop: the same
    training.
    """
    output_dir = tmp_path / "run"
    for number, (processes, changes) in enumerate(executions):
        last = number == len(executions) - 1
        stop = (
            {}
            if last
            else {
                "patch": run_patches.signal_self,
                "patch_arguments": (0, 3 * number + 3, signal.SIGTERM),
            }
        )
        wanted = settings(materials, output_dir, finetuning=finetuning, save_steps=0, **changes)
        run_helpers.train(wanted, processes, expect=0 if last else 3, **stop)
    assert [event["step"] for event in run_helpers.events(output_dir, "resume")] == [3, 6]
    reference = uninterrupted(finetuning)
    assert run_helpers.sample_ids(output_dir) == run_helpers.sample_ids(reference)
    losses, wanted_losses = run_helpers.losses(output_dir), run_helpers.losses(reference)
    # 1e-4 is asked for the last
    assert run_helpers.largest_relative_difference(wanted_losses, losses) < 1e-5
    expected = run_helpers.result_weights(reference)
    for name, tensor in run_helpers.result_weights(output_dir).items():
        difference = (tensor.double() - expected[name].double()).norm()
        assert difference <= 1e-3 * expected[name].double().norm(), name


@pytest.mark.parametrize(("processes", "layout"), [(1, "plain"), (2, "zero3")])
def test_dropout_is_the_same_after_a_resume(materials, tmp_path, processes, layout):
    """Each microbatch draws by its place in the schedule, which a start does not change."""
    changes = {"lora_dropout": 0.3, "save_steps": 0, "max_steps": 6, **LAYOUTS[layout]}
    whole, stopped = (
        settings(materials, tmp_path / name, **changes) for name in ("whole", "stopped")
    )
    without = settings(materials, tmp_path / "without", **(changes | {"lora_dropout": 0.0}))
    run_helpers.train(whole, processes)
    signal_at_3 = {"patch": run_patches.signal_self, "patch_arguments": (0, 3, signal.SIGTERM)}
    run_helpers.train(stopped, processes, expect=3, **signal_at_3)
    run_helpers.train(stopped, processes)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    run_helpers.train(without, processes)
    assert run_helpers.losses(tmp_path / "without") != run_helpers.losses(tmp_path / "whole"), (
        "there is no dropout"
    )


# ---------------------------------------------------------------- logs


def test_logs_of_a_killed_run_end_up_as_if_nothing_had_happened(
    materials, uninterrupted, interrupted
):
    """Steps after the checkpoint are written again, torn last lines are cut."""
    assert len(run_helpers.lines(interrupted / "trainer_log.jsonl")) == 7
    for name, torn in (
        ("trainer_log.jsonl", '{"step": 8, "lo'),
        ("samples.jsonl", '{"step": 8, "ids": [1, 2'),
    ):
        with (interrupted / name).open("a") as file:
            file.write(torn)
    run_helpers.train(settings(materials, interrupted))
    assert [event["step"] for event in run_helpers.events(interrupted, "resume")] == [6]
    assert_same_run(interrupted, uninterrupted("lora"))


def test_a_finished_run_started_again_is_left_alone(materials, uninterrupted, tmp_path):
    output_dir = Path(shutil.copytree(uninterrupted("lora"), tmp_path / "run"))
    before = content(output_dir)
    ranks = run_helpers.train(settings(materials, output_dir), 2)
    assert "finished" in ranks.output()
    assert content(output_dir) == before


def test_going_back_to_an_older_checkpoint(materials, uninterrupted, interrupted):
    """The newer one is set aside, not taken for the work of this start."""
    run_helpers.train(settings(materials, interrupted, resume=str(interrupted / "checkpoint-3")))
    assert run_helpers.events(interrupted, "resume")[-1]["step"] == 3
    assert_same_run(interrupted, uninterrupted("lora"))


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the lock and console copies."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock" and path.parent.name != "logs"
    }


# ---------------------------------------------------------------- changes


def other_record(materials: Materials, folder: Path) -> dict[str, Any]:
    lines = materials.data.read_text(encoding="utf-8").splitlines(keepends=True)
    changed = folder / "changed.jsonl"
    changed.write_text(
        "".join([lines[0].replace('"output": "', '"output": "no '), *lines[1:]]), encoding="utf-8"
    )
    return {"data": str(changed)}


def other_tokenizer(materials: Materials, folder: Path) -> dict[str, Any]:
    model = Path(shutil.copytree(materials.model, folder / "model"))
    template = model / "chat_template.jinja"
    template.write_text(
        template.read_text(encoding="utf-8").replace("helpful", "helpless"), encoding="utf-8"
    )
    return {"model": str(model)}


CHANGES: dict[str, tuple[Callable[[Materials, Path], dict[str, Any]], str]] = {
    # what changes, and the name that the message must show
    "data": (other_record, "data:"),
    "tokenizer": (other_tokenizer, "data:"),
    "schedule": (
        lambda *_: {"curriculum": {"stages": [{"until": 1.0, "mix": [1.0, 1.0, 1.0]}]}},
        "schedule:",
    ),
    "global batch": (
        lambda *_: {"global_batch_size": 4},
        "global_batch_size: 8 in the folder, 4 now",
    ),
    "learning rate": (
        lambda *_: {"learning_rate": 2e-3},
        "learning_rate: 0.01 in the folder, 0.002 now",
    ),
}


@pytest.mark.parametrize(("change", "shown"), CHANGES.values(), ids=CHANGES.keys())
def test_another_training_is_refused_and_allowed_on_demand(
    materials, interrupted, tmp_path, change, shown
):
    before = content(interrupted)
    changed = settings(materials, interrupted, **change(materials, tmp_path))
    ranks = run_helpers.train(changed, expect=2)
    assert shown in ranks.output() and "--allow-data-change" in ranks.output()
    assert content(interrupted) == before, "a refused run must not write"

    run_helpers.train(changed, arguments=["--allow-data-change"])
    assert run_helpers.events(interrupted, "resume")[-1]["step"] == 6
    assert len(run_helpers.losses(interrupted)) == STEPS
    assert run_helpers.status(interrupted)["state"] == "done"


# ---------------------------------------------------------------- damage


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def bit_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = (truncated, bit_flipped, emptied, Path.unlink)


@pytest.mark.parametrize("damage", DAMAGES, ids=["truncated", "bit-flipped", "emptied", "deleted"])
def test_every_file_of_the_newest_checkpoint_damaged_one_by_one(interrupted, damage):
    newest = interrupted / "checkpoint-6"
    names = [str(path.relative_to(newest)) for path in sorted(newest.rglob("*")) if path.is_file()]
    assert {
        "weights.safetensors",
        "moments.safetensors",
        "adapter_model.safetensors",
        "state.json",
    } <= set(names)
    for name in names:
        original = (newest / name).read_bytes()
        damage(newest / name)
        found, skipped = newest_valid(interrupted)
        assert found == interrupted / "checkpoint-3", name
        assert [path.name for path, _ in skipped] == ["checkpoint-6"]
        (newest / name).write_bytes(original)
    assert newest_valid(interrupted) == (newest, [])


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (bit_flipped, "moments.safetensors"),
        (truncated, "weights.safetensors"),
        (Path.unlink, "tokenizer.json"),
    ],
    ids=["bit-flipped moments", "truncated weights", "deleted tokenizer"],
)
def test_a_run_passes_over_a_damaged_checkpoint_and_says_so(
    materials, uninterrupted, interrupted, damage, name
):
    damage(interrupted / "checkpoint-6" / name)
    ranks = run_helpers.train(settings(materials, interrupted))
    assert run_helpers.events(interrupted, "resume")[-1]["checkpoint"] == "checkpoint-3"
    (event,) = run_helpers.events(interrupted, "skipped_checkpoint")
    assert event["name"] == "checkpoint-6" and name in event["why"]
    assert "checkpoint-6 is skipped" in ranks.output()
    assert_same_run(interrupted, uninterrupted("lora"))


def test_without_a_valid_checkpoint_the_run_begins_anew(materials, uninterrupted, interrupted):
    for folder in list_checkpoints(interrupted):
        emptied(folder / "weights.safetensors")
    run_helpers.train(settings(materials, interrupted))
    assert {event["name"] for event in run_helpers.events(interrupted, "skipped_checkpoint")} == {
        "checkpoint-3",
        "checkpoint-6",
    }
    assert run_helpers.events(interrupted, "resume") == []
    assert_same_run(interrupted, uninterrupted("lora"))


# ---------------------------------------------------------------- pickles

PICKLES = (
    "training_args.bin optimizer.pt optimizer.bin scheduler.pt scaler.pt rng_state.pth"
    " rng_state_0.pth rng_state_1.pth pytorch_model.bin pytorch_model-00001-of-00001.bin"
    " adapter_model.bin adapter_model.pt model.pt model.bin model.pth state.pkl trainer_state.pt"
    " custom_checkpoint_0.pkl random_states_0.pkl sampler.bin latest mp_rank_00_model_states.pt"
    " zero_pp_rank_0_mp_rank_00_optim_states.pt weights.pt moments.pt data.pkl"
)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_no_pickle_is_ever_opened(materials, uninterrupted, interrupted, tmp_path):
    """At every name that a checkpoint of any framework could have, in the run folder, in and beside
    checkpoints.
    """
    marker, record = tmp_path / "exploded", tmp_path / "opened"
    bomb = pickle.dumps(Bomb(marker))
    zipped = tmp_path / "bomb.pt"
    torch.save({"state": Bomb(marker)}, zipped)
    model = Path(shutil.copytree(materials.model, tmp_path / "model"))
    folders = [
        interrupted,
        interrupted / "checkpoint-6",  # a valid one with foreign files in it
        interrupted / "checkpoint-7",  # newer, and nothing but pickles
        interrupted / "checkpoint-6" / "global_step6",
        interrupted / "global_step7",
        interrupted / ".staging-8-abc",
        model,
    ]
    salted = set()
    for folder in folders:
        folder.mkdir(exist_ok=True)
        for number, name in enumerate(PICKLES.split()):
            shutil.copy(zipped, folder / name) if number % 2 else (folder / name).write_bytes(bomb)
            salted.add(os.path.realpath(folder / name))
    # What other frameworks look for to find a pickle by.
    (interrupted / "checkpoint-7" / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}})
    )
    (interrupted / "checkpoint-7" / "trainer_state.json").write_text(json.dumps({"global_step": 7}))

    wanted = settings(materials, interrupted, model=str(model))
    identity = json.loads((interrupted / "run_identity.json").read_text())
    (interrupted / "run_identity.json").write_text(json.dumps(identity | {"model": str(model)}))
    watched = {
        "patch": run_patches.watch_opened_files,
        "patch_arguments": (str(tmp_path), str(record)),
    }
    run_helpers.train(wanted, **watched)
    opened = set(record.read_text().splitlines())
    assert any(path.endswith("state.json") for path in opened), "the hook saw nothing"
    assert not opened & salted
    assert not marker.exists()
    assert_same_run(interrupted, uninterrupted("lora"))

    with pytest.raises(FileExistsError):  # the trap works
        marker.mkdir()
        pickle.loads(bomb)
