"""Checkpoints of a run: all ranks write, one publishes, and nothing older goes before the new one
is verified.

What is inside `checkpoint-<step>`: the training state (training/state.py), for LoRA also the
adapter as peft reads it, and the manifest (storage/checkpoint_files.py). The sampler, the
schedule and the random numbers have no state: they are functions of the step.

A save has two parts. Each rank writes its files (hashed, synced). When all ranks have written
theirs, rank 0 publishes them, verifies and rotates. A thread does both parts in the background,
from a copy of the state that is made at the end of the step.

The threads run no collective. Two threads on one group would mix up its messages. With a separate
group, the main threads could not learn of a failure at the same step on every rank. So the main
thread gathers tensors while it copies them, and ranks agree in `poll`, which every rank calls at
the end of every step. The save continues when the threads of all ranks are done. A written
checkpoint is therefore published at the end of a step, at most one step late. While training waits,
the ranks query one another every second: no collective takes as long as a file.

Every failure is caught, reported to all ranks and then raised on all of them. A rank that raised
immediately would leave the others waiting in a collective until its timeout. The run would then end
with their error instead of the cause.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from finetune.errors import FinetuneError
from finetune.planning.memory import USABLE_SHARE
from finetune.runtime.host import HostMeter
from finetune.runtime.parent_watchdog import progress
from finetune.storage import durable_files
from finetune.storage.checkpoint_files import CheckpointWriter, rotate
from finetune.storage.run_folder import SampleLog
from finetune.storage.run_log import RunLog
from finetune.training.control import Control
from finetune.training.state import HostCopies, Records, TrainingState

logger = logging.getLogger("finetune")

MODEL_FILES_NAME = ".model-files"
# A wait for the save before that is worth a line.
NOTED_WAIT_SECONDS = 0.1

WriteFiles = Callable[[Path], None]
Write = Callable[[CheckpointWriter], Records]


@dataclass
class _Saving:
    """The save in progress.

    Attributes:
        entered: holds the entered writer, which explains an error and removes the staging folder.
        work: this rank's result: the records of its files; then, while `publishing`, the
            checkpoint's name, on rank 0.
        behind: whether training continues meanwhile.
    """

    writer: CheckpointWriter
    entered: contextlib.ExitStack
    work: Future[Any]
    behind: bool
    publishing: bool = False


class Checkpointer:
    """Saves the checkpoints of one run.

    A context manager around the training. On exit it finishes the save in progress, or abandons it
    if training failed.

    Args:
        metadata: plain JSON facts for the manifest, the same on every rank.
        model_files: on rank 0, returns a function that writes the files that make the checkpoint
            usable as it is (a peft adapter) into a folder. Called between steps with a function
            that returns the saved weights by parameter name.
        keep: newest valid checkpoints to keep, at least 2; for each, the checkpoint that it names
            as the best is kept too.
        last: name of the checkpoint that this start resumed from.
        verified: the same, if it is in this run folder.
        best: best of the evaluations so far, for the manifest.
        behind: save in the background if the host has memory for a copy of the state.

    Attributes:
        last: name of the last checkpoint that was published, or resumed from.
    """

    def __init__(
        self,
        run_folder: Path,
        control: Control,
        *,
        rank: int,
        world_size: int,
        metadata: dict[str, Any],
        model_files: Callable[[Callable[[], dict[str, torch.Tensor]]], WriteFiles],
        keep: int,
        runlog: RunLog,
        sample_log: SampleLog | None,
        last: str | None = None,
        verified: str | None = None,
        best: dict[str, Any] | None = None,
        behind: bool = False,
        local_world_size: int = 1,
    ) -> None:
        self.run_folder = run_folder
        self.control = control
        self.rank = rank
        self.world_size = world_size
        self.metadata = metadata
        self.model_files = model_files
        self.keep = keep
        self.runlog = runlog
        self.sample_log = sample_log
        self.local_world_size = local_world_size
        self.last = last
        self.best = best
        self._verified = set() if verified is None else {verified}
        self._behind = behind
        self._memory_asked = False
        self._copies = HostCopies()
        self._copies_made = False
        self._saving: _Saving | None = None
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        durable_files.new_file_mode()

    # -------------------------------------------------------------- every rank calls, between steps

    def save(self, step: int, state: TrainingState, *, wait: bool = False) -> None:
        """Begin to save, or save, where the run does so or `wait` is set: publish, verify, then
        rotate.

        Raises:
            FinetuneError: on every rank, if any rank could not write or the result does not verify,
                here or, behind the training, in a later call of any method. What was there before
                is still there.
        """
        self._wait_for_last(step)
        progress.begin_save(self.control.timeout_seconds)
        behind = self._behind and not wait and self._has_memory(state)
        # One name for the staging folder on all ranks, and never one that a killed save has left.
        token = self.control.token()
        with contextlib.ExitStack() as entered:
            writer = entered.enter_context(CheckpointWriter(self.run_folder, step, token))
            # Reuse memory that was allocated for copies, even if training does not continue
            # meanwhile: `save` would allocate more. Ranks may differ in whether they have any: each
            # branch has its own exchange between ranks.
            self._copies_made |= behind
            if self._copies_made:
                work = self._do(behind, self._copied(state), writer)
            else:
                work = self._write_state(writer, state)
            self._saving = _Saving(writer, entered, work, behind)
            self._saving.entered = entered.pop_all()
        if not behind:
            self.finish()

    def poll(self) -> None:
        """Advance the save if all ranks are done with a part of it. Raises as `save` does."""
        if self._saving is not None and not self.control.any(not self._saving.work.done()):
            self._go_on(self._saving)

    def finish(self) -> None:
        """Wait until the save in progress has ended. Raises as `save` does."""
        while self._saving is not None:
            self.control.wait_for(self._saving.work)
            self._go_on(self._saving)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.finish() if kind is None else self._leave()
        finally:
            self._threads.shutdown()
            self._copies.clear()

    # ------------------------------------------------------------------ parts of a save

    def _wait_for_last(self, step: int) -> None:
        began, last = time.monotonic(), self._saving
        self.finish()
        waited = time.monotonic() - began
        if last is not None and waited >= NOTED_WAIT_SECONDS:
            logger.info(
                "step %d waited %.1f s for the checkpoint of step %d",
                step,
                waited,
                last.writer.step,
            )

    def _has_memory(self, state: TrainingState) -> bool:
        """Return whether every node's memory holds the copies of its ranks. Asked once: then they
        stay.
        """
        if not self._memory_asked:
            self._memory_asked = True
            host = HostMeter().look()
            # What a plan calls usable, of what is free while training: what a step needs was used
            # and is still held, or is needed again.
            free = host.memory_total_bytes * USABLE_SHARE - host.memory_used_bytes
            needed = state.snapshot_bytes(self.rank, self.world_size)
            needed *= 1 if state.form == "whole" else self.local_world_size
            if self.control.any(needed > free):
                self._behind = False
                logger.warning(
                    "training waits for its checkpoints: the host has no memory for a copy of the"
                    " state (%s here, %s free); --async-save false says so from the start",
                    durable_files.format_bytes(needed),
                    durable_files.format_bytes(max(0, int(free))),
                )
        return self._behind

    def _copied(self, state: TrainingState) -> Write:
        """Copy the state; what writes it, with rank 0's model files."""
        snapshot = state.snapshot(self._copies, rank=self.rank, world_size=self.world_size)
        if self.rank != 0:
            return lambda writer: snapshot.write(writer.folder)
        write_model = self.model_files(lambda: snapshot.files["weights.safetensors"])
        return lambda writer: (
            snapshot.write(writer.folder) | self._add_model_files(writer, write_model)
        )

    def _write_state(self, writer: CheckpointWriter, state: TrainingState) -> Future[Records]:
        """Write it without a copy: gathered here, as every rank takes part in that, and written by
        a thread.
        """
        done: Future[Records] = Future()
        weights = writer.folder / "weights.safetensors"
        try:
            records = state.save(
                writer.folder,
                rank=self.rank,
                world_size=self.world_size,
                do=lambda work: self.control.together(work).result(),
            )
            if self.rank == 0:
                records |= self._add_model_files(
                    writer, self.model_files(lambda: load_file(weights))
                )
            done.set_result(records)
        except (OSError, SafetensorError, FinetuneError) as error:
            # Raised once the other ranks know. Anything else is a bug: it must end this process at
            # once, because the other ranks are in a collective that this one has left.
            done.set_exception(error)
        return done

    def _do(self, behind: bool, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Let the thread do it, or wait with all ranks until it is done."""
        if behind:
            return self._threads.submit(work, *arguments)
        return self.control.together(partial(work, *arguments))

    def _go_on(self, saving: _Saving) -> None:
        """Start the next part of a save whose last part is done on this rank.

        Collective: every rank must call it.
        """
        self._saving = None
        failure = saving.work.exception()
        with saving.entered as entered:
            # As text, because exceptions that hold locks or tensors cannot be sent.
            told = (
                None if failure is not None else saving.work.result(),
                None if failure is None else str(failure),
            )
            reports = self.control.gather(told)
            # Its own first, so that this rank's traceback shows the cause.
            if failure is not None:
                raise failure
            for rank, (_, problem) in enumerate(reports):
                if problem is not None:
                    raise FinetuneError(f"rank {rank} could not save the checkpoint: {problem}")
            if not saving.publishing:
                # After every rank has sealed its files: the manifest names all of them.
                everything = {
                    name: record for records, _ in reports for name, record in records.items()
                }
                saving.work = self._do(saving.behind, self._publish, saving.writer, everything)
                saving.publishing = True
                saving.entered = entered.pop_all()
                self._saving = saving
                return
        self.last = str(reports[0][0])
        logger.info("saved %s", self.last)

    def _publish(self, writer: CheckpointWriter, records: dict[str, Any]) -> str:
        if self.rank != 0:
            return ""
        # Before the checkpoint appears: a resumed run expects a line for each of its steps (and
        # cuts those of later ones, which may be there already).
        if self.sample_log is not None:
            self.sample_log.sync()
        # No evaluation comes between a save and its publishing: it waits for that.
        folder = writer.publish(
            records, self.metadata | ({} if self.best is None else {"best": self.best})
        )
        self._verified.add(folder.name)
        # After publish has verified it; `keep` counts valid ones only, so a damaged disk never
        # costs the last.
        removed = rotate(self.run_folder, self.keep, known_valid=self._verified)
        size_bytes = sum(int(record["size_bytes"]) for record in records.values())
        self.runlog.event(
            "checkpoint", step=writer.step, name=folder.name, size_bytes=size_bytes, removed=removed
        )
        return folder.name

    def _add_model_files(self, writer: CheckpointWriter, write_model: WriteFiles) -> Records:
        """Write the model files to their own folder and move them in.

        Other ranks write into the same checkpoint folder at the same time.
        """
        own = writer.folder / MODEL_FILES_NAME
        own.mkdir()
        write_model(own)
        names = sorted(durable_files.walk_files(own)[0])
        for path in sorted(own.iterdir()):
            os.rename(path, writer.folder / path.name)
        own.rmdir()
        return writer.seal(names)

    def _leave(self) -> None:
        """Training failed on this rank: the others may be anywhere and cannot be asked.

        What this rank's thread does is waited for, and on one rank the save finished. Of several, a
        save that is not published yet is given up; the next start removes what it has written.
        """
        if self._saving is None:
            return
        step = self._saving.writer.step
        wait([self._saving.work])
        try:
            if self.control.world_size == 1:
                self.finish()
            elif not self._saving.publishing:
                logger.warning("checkpoint-%d was still being written and is given up", step)
        except (OSError, FinetuneError) as error:  # the error of the training is the one to raise
            logger.error("%s", error)
