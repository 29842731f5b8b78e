"""Resuming: on other devices, after changes, after a kill, and never by way of a pickle."""

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
from run_helpers import LAYOUTS, Materials, events

import finetune
from finetune.errors import StateError
from finetune.storage.checkpoint_files import list_checkpoints

STEPS = 9
TIMINGS = ("tokens_per_second", "samples_per_second", "step_seconds", "loader_wait_seconds")


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    return materials.settings(output_dir, **{"max_steps": STEPS, "save_steps": 3, **changes})


@pytest.fixture(scope="module")
def uninterrupted(materials: Materials) -> Callable[[str], Path]:
    """Output folder of the run on one process that nobody stopped, by what is trained."""

    def get(finetuning: str) -> Path:
        folder = materials.folder / f"uninterrupted-{finetuning}"
        if not folder.exists():
            run_helpers.train(settings(materials, folder, finetuning=finetuning))
        return folder

    return get


@pytest.fixture
def interrupted(materials: Materials, tmp_path: Path) -> Path:
    """A run on one process that was killed in step 8: checkpoints at 3 and 6, logs up to 7."""
    template = materials.folder / "interrupted"
    if not template.exists():
        killed = {"patch": run_patches.kill_self, "patch_arguments": (0, 8)}
        # Not in the background: steps here are shorter than a save.
        waits = settings(materials, template, async_save=False)
        assert run_helpers.start(waits, **killed).wait() == [-signal.SIGKILL]
        assert [folder.name[-1] for folder in list_checkpoints(template)] == ["3", "6"]
    return Path(shutil.copytree(template, tmp_path / "run"))


def step_records(output_dir: Path) -> list[dict[str, Any]]:
    records = run_helpers.lines(output_dir / "trainer_log.jsonl")
    return [{name: line[name] for name in line if name not in TIMINGS} for line in records]


def assert_same_run(output_dir: Path, other: Path) -> None:
    """Everything but the times, bit by bit."""
    assert (output_dir / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    assert step_records(output_dir) == step_records(other)
    run_helpers.assert_same_training(output_dir, other)


# Other processes, micro-batch, packing, ZeRO stage and LoRA path after each stop.
LORA = [
    (2, {"micro_batch_size": 2, **LAYOUTS["zero3_offload"]}),
    (1, {"micro_batch_size": 4, "packing": False, "fused_lora": False}),
    (2, {"micro_batch_size": 1}),
]
FULL = [
    (2, {"micro_batch_size": 1, **LAYOUTS["zero3"]}),
    (1, {"micro_batch_size": 4}),
    (2, {"micro_batch_size": 2, "packing": False, **LAYOUTS["zero2"]}),
]


@pytest.mark.parametrize(("finetuning", "executions"), [("lora", LORA), ("full", FULL)])
def test_two_then_one_then_two_processes(
    materials, uninterrupted, tmp_path, finetuning, executions
):
    output_dir, reference = tmp_path / "run", uninterrupted(finetuning)
    for number, (processes, changes) in enumerate(executions, 1):
        stop = {"patch": run_patches.signal_self}
        stop |= {"patch_arguments": (0, 3 * number, signal.SIGTERM)}
        wanted = settings(materials, output_dir, finetuning=finetuning, save_steps=0, **changes)
        run_helpers.train(wanted, processes, **({} if number == 3 else {"expect": 3, **stop}))
    assert [event["step"] for event in events(output_dir, "resume")] == [3, 6]
    assert run_helpers.sample_ids(output_dir) == run_helpers.sample_ids(reference)
    for ours, theirs in zip(step_records(output_dir), step_records(reference), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)  # 1e-4 is promised
        groups = [name for name in theirs if name.startswith("loss/")]
        assert groups and [ours[name] for name in groups] == pytest.approx(
            [theirs[name] for name in groups], rel=1e-4
        )
    expected = run_helpers.result_weights(reference)
    for name, tensor in run_helpers.result_weights(output_dir).items():
        difference = (tensor.double() - expected[name].double()).norm()
        assert difference <= 1e-3 * expected[name].double().norm(), name


def test_logs_of_a_killed_run_end_up_as_if_nothing_had_happened(
    materials, uninterrupted, interrupted
):
    """Steps after the checkpoint are written again, torn last lines are cut."""
    assert len(run_helpers.lines(interrupted / "trainer_log.jsonl")) == 7
    for name, torn in (("trainer_log", '{"step": 8, "lo'), ("samples", '{"step": 8, "ids": [1, 2')):
        with (interrupted / f"{name}.jsonl").open("a") as file:
            file.write(torn)
    run_helpers.train(settings(materials, interrupted))
    assert [event["step"] for event in events(interrupted, "resume")] == [6]
    assert_same_run(interrupted, uninterrupted("lora"))


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the lock and console copies."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path): path.read_bytes() for path in paths if path.parent.name != "logs"}


def test_another_training_is_refused_and_allowed_on_demand(materials, interrupted, tmp_path):
    first, *rest = materials.data.read_text(encoding="utf-8").splitlines(keepends=True)
    data = tmp_path / "changed.jsonl"
    first = first.replace('"output": "', '"output": "no ')
    data.write_text("".join([first, *rest]), encoding="utf-8")
    model = Path(shutil.copytree(materials.model, tmp_path / "model"))
    template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    (model / "chat_template.jinja").write_text(template.replace("helpful", "x"), encoding="utf-8")
    before = content(interrupted)
    for shown, change in (
        ("data:", {"data": str(data)}),
        ("data:", {"model": str(model)}),
        ("schedule:", {"curriculum": {"stages": [{"until": 1.0, "mix": [1.0, 1.0, 1.0]}]}}),
        ("global_batch_size: 8 in the folder, 4 now", {"global_batch_size": 4}),
    ):
        with pytest.raises(StateError, match=f"(?s){shown}.*--allow-data-change"):
            finetune.run(settings(materials, interrupted, **change))
        assert content(interrupted) == before, "a refused run must not write"
    changed = settings(materials, interrupted, data=str(data), global_batch_size=4)
    run_helpers.train(changed, arguments=["--allow-data-change"])
    assert events(interrupted, "resume")[-1]["step"] == 6
    assert len(run_helpers.losses(interrupted)) == STEPS


# One of each way of writing a pickle, and of each place where a framework looks for one.
PICKLES = (
    "training_args.bin optimizer.pt rng_state.pth pytorch_model.bin adapter_model.bin state.pkl"
    " pytorch_model-00001-of-00001.bin trainer_state.pt weights.pt moments.pt latest"
    " mp_rank_00_model_states.pt"
)


def test_no_pickle_is_ever_opened(materials, uninterrupted, interrupted, tmp_path):
    """In the run folder, in and beside checkpoints."""
    marker, record, zipped = tmp_path / "exploded", tmp_path / "opened", tmp_path / "bomb.pt"
    bomb = pickle.dumps(run_patches.Bomb(marker))
    torch.save({"state": run_patches.Bomb(marker)}, zipped)
    model = Path(shutil.copytree(materials.model, tmp_path / "model"))
    # checkpoint-6 is valid, with foreign files in it; 7 is newer, and nothing but pickles
    places = ". checkpoint-6 checkpoint-7 checkpoint-6/global_step6 global_step7 .staging-8-abc"
    salted = set()
    for folder in [model, *(interrupted / place for place in places.split())]:
        folder.mkdir(exist_ok=True)
        for number, name in enumerate(PICKLES.split()):
            shutil.copy(zipped, folder / name) if number % 2 else (folder / name).write_bytes(bomb)
            salted.add(os.path.realpath(folder / name))
    # What other frameworks look for to find a pickle by.
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    foreign = {"pytorch_model.bin.index.json": index, "trainer_state.json": {"global_step": 7}}
    for name, facts in foreign.items():
        (interrupted / "checkpoint-7" / name).write_text(json.dumps(facts))

    identity = interrupted / "run_identity.json"
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"model": str(model)}))
    watched = {"patch": run_patches.watch_opened_files}
    watched |= {"patch_arguments": (str(tmp_path), str(record))}
    run_helpers.train(settings(materials, interrupted, model=str(model)), **watched)
    opened = set(record.read_text().splitlines())
    assert any(path.endswith("state.json") for path in opened), "the hook saw nothing"
    assert not opened & salted and not marker.exists()
    assert_same_run(interrupted, uninterrupted("lora"))
    marker.mkdir()
    with pytest.raises(FileExistsError):  # the trap works
        pickle.loads(bomb)
