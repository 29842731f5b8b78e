"""Saves: by several ranks into one folder, and behind the training."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from thread_ranks import Meeting, ThreadControl

from finetune.errors import FinetuneError
from finetune.runtime.host import HostMeter, HostUse
from finetune.storage.checkpoint_files import (
    CheckpointWriter,
    list_checkpoints,
    rotate,
    verify,
)
from finetune.storage.run_folder import SampleLog
from finetune.storage.run_log import RunLog, read_jsonl_tolerant
from finetune.training import state
from finetune.training.checkpointer import Checkpointer
from finetune.training.control import Control
from finetune.training.state import HostCopies, Snapshot, TrainingState, write_tensors


class Training:
    """A model that is trained in place, as every run's is."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(7, 5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.steps = 0

    def train(self, steps: int) -> Training:
        while self.steps < steps:
            generator = torch.Generator().manual_seed(self.steps)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 7, generator=generator)).square().sum().backward()
            self.optimizer.step()
            self.steps += 1
        return self

    def state(self, form: Any = "whole") -> TrainingState:
        return TrainingState(self.model, optimizer=self.optimizer, form=form)


def model_files(weights: Callable[[], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    found = weights()
    return lambda folder: save_file(found, folder / "adapter_model.safetensors")


def no_files(weights: object) -> Callable[[Path], None]:
    return lambda folder: None


def checkpointer(
    folder: Path, control: Control | None = None, *, rank: int = 0, **changes: Any
) -> Checkpointer:
    folder.mkdir(exist_ok=True)
    control = Control(1) if control is None else control
    facts: dict[str, Any] = {"metadata": {"seed": 1}, "model_files": model_files, "keep": 2}
    facts |= {"behind": True, "runlog": RunLog(None), "sample_log": None} | changes
    return Checkpointer(folder, control, rank=rank, world_size=control.world_size, **facts)


def names(folder: Path) -> list[str]:
    return [checkpoint.name for checkpoint in list_checkpoints(folder)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Threads of saves wait before they write anything, until this is set."""
    go_on = threading.Event()
    plain = Snapshot.write

    def write(self: Snapshot, folder: Path) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(60)
        return plain(self, folder)

    monkeypatch.setattr(Snapshot, "write", write)
    return go_on


def test_a_save_behind_the_training_is_byte_for_byte_the_one_that_training_waits_for(
    tmp_path, held
):
    waited, behind = checkpointer(tmp_path / "waited"), checkpointer(tmp_path / "behind")
    for step in (3, 6):  # the second into the same buffers
        name = f"checkpoint-{step}"
        waited.save(step, Training().train(step).state(), wait=True)
        training = Training().train(step)
        held.clear()
        behind.save(step, training.state())
        training.train(step + 2)
        behind.poll()
        assert behind.last != name and not verify(tmp_path / "behind" / name).valid
        held.set()
        behind.finish()
        assert behind.last == name
        expected = contents(tmp_path / "waited" / name)
        assert contents(tmp_path / "behind" / name) == expected
        assert {"weights.safetensors", "moments.safetensors", "state.json"} < expected.keys()


def test_the_next_save_waits_and_the_last_one_is_waited_for(tmp_path, held, monkeypatch, caplog):
    """At most one is in progress; one that is waited for uses the copies' memory."""
    monkeypatch.setattr("finetune.training.checkpointer.NOTED_WAIT_SECONDS", 0.0)
    saver, training = checkpointer(tmp_path), Training().train(1)
    with saver, caplog.at_level(logging.INFO, "finetune"):
        saver.save(1, training.state())
        held.set()
        saver.save(2, training.train(2).state())
        assert saver.last == "checkpoint-1" and "step 2 waited" in caplog.text
        held.clear()
        threading.Timer(0.05, held.set).start()
        monkeypatch.setattr(TrainingState, "save", None)
        saver.save(3, training.train(3).state(), wait=True)
        assert saver.last == "checkpoint-3"
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert all(verify(folder).valid for folder in list_checkpoints(tmp_path))


def test_a_host_without_memory_for_the_copies_lets_training_wait(tmp_path, monkeypatch, caplog):
    saver, training = checkpointer(tmp_path), Training().train(1)
    state = training.state()
    needed = state.snapshot_bytes(0, 1)
    files = state.snapshot(HostCopies(), rank=0, world_size=1).files.values()
    assert needed == sum(tensor.nbytes for file in files for tensor in file.values())
    host = HostUse(None, 1.0, memory_used_bytes=0, memory_total_bytes=needed)
    monkeypatch.setattr(HostMeter, "look", lambda self: host)
    for step in (1, 2):
        saver.save(step, training.train(step).state())
        assert saver.last == f"checkpoint-{step}" and not saver._copies_made
    assert caplog.text.count("no memory for a copy of the state") == 1


def test_lines_of_later_steps_are_there_when_it_is_published_and_cut_on_resume(
    tmp_path, held, monkeypatch
):
    """Those up to its step are on the disk by then."""
    order: list[str] = []
    sync, publish = SampleLog.sync, CheckpointWriter.publish
    monkeypatch.setattr(SampleLog, "sync", lambda *given: order.append("sync") or sync(*given))
    written = lambda *given: order.append("publish") or publish(*given)  # noqa: E731
    monkeypatch.setattr(CheckpointWriter, "publish", written)
    with SampleLog(tmp_path / "samples.jsonl") as samples:
        order.clear()
        saver = checkpointer(tmp_path, sample_log=samples, runlog=RunLog(tmp_path))
        training = Training()
        for step in range(1, 5):
            samples.append(step, [step])
            training.train(step)
            if step == 2:
                saver.save(2, training.state())
        held.set()
        saver.finish()
    assert order == ["sync", "publish"]
    (event,) = read_jsonl_tolerant(tmp_path / "events.jsonl")
    assert (event["event"], event["step"], event["name"]) == ("checkpoint", 2, "checkpoint-2")
    with SampleLog(tmp_path / "samples.jsonl", resume_step=2) as samples:
        assert samples.kept_steps == [1, 2]


@pytest.mark.parametrize("fails", [None, "write", "publish"])
def test_ranks_agree_at_the_same_step(tmp_path, monkeypatch, fails):
    """Rank 1's thread takes three steps longer; only the threads that train ever meet."""
    meeting = Meeting(2)
    late, plain = threading.Event(), write_tensors

    def write(path: Path, tensors: Any) -> Any:
        if "00001" in path.name:
            assert late.wait(60)
            if fails == "write":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(path, tensors)

    def publish(*arguments: Any) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(state, "write_tensors", write)
    monkeypatch.setattr(Checkpointer, "_has_memory", lambda self, state: True)
    if fails == "publish":
        monkeypatch.setattr(CheckpointWriter, "publish", publish)

    def rank(number: int) -> tuple[int, str]:
        control = ThreadControl(meeting)
        saver = checkpointer(tmp_path, control, rank=number, model_files=no_files)
        training = Training().train(1)
        saver.save(1, training.state("parts"))
        for step in range(2, 40):
            training.train(step)
            if step == 4:
                late.set()
            try:
                saver.poll()
            except FinetuneError as error:
                return step, str(error)
            if saver.last is not None:
                return step, saver.last
            if step > 4:
                threading.Event().wait(0.05)
        raise AssertionError("nothing was published")

    (step, found), (other_step, other) = meeting.run(rank)
    assert step == other_step and step >= 4
    if fails is None:
        assert found == other == "checkpoint-1"
        slices = contents(tmp_path / "checkpoint-1").keys() - {"manifest.json", "state.json"}
        assert len(slices) == 4
    else:
        failed, other = (found, other) if fails == "publish" else (other, found)
        assert failed.startswith("checkpoint-1 could not be written")
        assert f"rank {int(fails == 'write')} could not save the checkpoint" in other
        assert os.listdir(tmp_path) == []


def test_what_a_kept_checkpoint_names_as_the_best_stays(tmp_path: Path) -> None:
    """Also the best of the older one: a run that has to go back to it must find it."""
    training, saver = Training(), checkpointer(tmp_path, keep=2, behind=False)
    kept = {4: [1, 3, 4], 6: [4, 5, 6], 8: [7, 8]}  # 3 is kept, and its best was 1
    for step, best in enumerate((1, 1, 1, 4, 4, 4, None, None), 1):
        saver.best = None if best is None else {"checkpoint": f"checkpoint-{best}"}
        saver.save(step, training.train(step).state())
        if step in kept:
            assert names(tmp_path) == [f"checkpoint-{number}" for number in kept[step]]
    saver.__exit__(None, None, None)
    assert rotate(tmp_path, 2, known_valid=()) == []
