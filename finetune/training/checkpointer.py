"""Checkpoints of a run: all ranks write, one publishes, and nothing older goes before the new one is verified.

What is inside `checkpoint-<step>`: the training state (training/state.py), for LoRA also the adapter as peft reads it,
and the manifest (storage/checkpoint_manifest.py). The sampler, the schedule and the random numbers have no state: they
are functions of the step.

Every failure is caught, told to all ranks and then raised on all: one that raised at once would leave the others
waiting in a collective until its timeout, and the run would end with their error instead of the cause.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from finetune.errors import FinetuneError
from finetune.runtime.parent_watchdog import progress
from finetune.storage import durable_files
from finetune.storage.checkpoint_files import CheckpointWriter, rotate
from finetune.storage.run_folder import SampleLog
from finetune.storage.run_log import RunLog
from finetune.training.control import Control
from finetune.training.state import TrainingState

logger = logging.getLogger("finetune")

MODEL_FILES_NAME = ".model-files"


class Checkpointer:
    """Saves the checkpoints of one run.

    Args:
        metadata: plain JSON facts for the manifest, the same on every rank.
        write_model_files: on rank 0, writes what makes the checkpoint usable as it is (a peft adapter) into the first
            folder that it is given, from the weights that were saved in the second.
        keep: valid checkpoints to keep, at least 2.
        verified: name of the checkpoint that this start has read and resumed from.
    """

    def __init__(
        self,
        run_folder: Path,
        control: Control,
        *,
        rank: int,
        world_size: int,
        metadata: dict[str, Any],
        write_model_files: Callable[[Path, Path], None],
        keep: int,
        runlog: RunLog,
        sample_log: SampleLog | None,
        verified: str | None = None,
    ) -> None:
        self.run_folder, self.control, self.rank, self.world_size = run_folder, control, rank, world_size
        self.metadata, self.write_model_files, self.keep = metadata, write_model_files, keep
        self.runlog, self.sample_log = runlog, sample_log
        self._verified = set() if verified is None else {verified}

    def save(self, step: int, state: TrainingState) -> str:
        """Save, publish, verify, then rotate. Every rank calls; returns the checkpoint's name.

        Raises:
            FinetuneError: on every rank, if any rank could not write or the result does not verify. What was there
                before is still there.
        """
        progress.begin_save(self.control.timeout_seconds)
        # One name for the staging folder on all ranks, and never one that a killed save has left.
        token = self.control.token()
        with CheckpointWriter(self.run_folder, step, token) as writer:
            records, failure = self._write(writer, state)
            # After every rank has sealed its files: the manifest names all of them. As text, because exceptions that
            # hold locks or tensors cannot be sent.
            reports = self.control.gather((records, None if failure is None else str(failure)))
            # Its own first, so that this rank's traceback shows the cause.
            if failure is not None:
                raise failure
            self._raise_first([report for _, report in reports])
            everything = {name: record for records, _ in reports for name, record in records.items()}
            name, problem = self._publish(writer, everything)
        # The others wait until the checkpoint is published: what they train on from here could be lost before it.
        outcome = self.control.share((name, None if problem is None else str(problem)))
        if problem is not None:
            raise problem
        self._raise_first([outcome[1]])
        return str(outcome[0])

    def _write(self, writer: CheckpointWriter, state: TrainingState) -> tuple[dict[str, Any], Exception | None]:
        try:
            # Every rank, though not every rank writes: tensors are gathered inside.
            names = state.save(writer.folder, rank=self.rank, world_size=self.world_size)
            if self.rank == 0:
                names += self._add_model_files(writer.folder)
            return writer.seal(names), None
        except (OSError, SafetensorError, FinetuneError) as error:
            # Raised by the caller once the other ranks know. Anything else is a bug: it must end this process at once,
            # because the other ranks are in a collective that this one has left.
            return {}, error

    def _add_model_files(self, folder: Path) -> list[str]:
        """Write them beside and move them in; returns their names.

        The other ranks write into the same folder at the same time, and safetensors under names that do not stay: what
        is new in it is not all ours.
        """
        own = folder / MODEL_FILES_NAME
        own.mkdir()
        self.write_model_files(own, folder)
        names = sorted(durable_files.walk_files(own)[0])
        for path in sorted(own.iterdir()):
            os.rename(path, folder / path.name)
        own.rmdir()
        return names

    def _publish(self, writer: CheckpointWriter, records: dict[str, Any]) -> tuple[str, Exception | None]:
        if self.rank != 0:
            return "", None
        try:
            # Before the checkpoint appears: a resumed run expects a line for each of its steps.
            if self.sample_log is not None:
                self.sample_log.sync()
            folder = writer.publish(records, self.metadata)
            self._verified.add(folder.name)
            # After publish has verified it; `keep` counts valid ones only, so a damaged disk never costs the last.
            removed = rotate(self.run_folder, self.keep, known_valid=self._verified)
        except (OSError, FinetuneError) as error:  # raised by the caller once the other ranks know
            return "", error
        size_bytes = sum(int(record["size_bytes"]) for record in records.values())
        self.runlog.event("checkpoint", step=writer.step, name=folder.name, size_bytes=size_bytes, removed=removed)
        return folder.name, None

    @staticmethod
    def _raise_first(problems: list[str | None]) -> None:
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise FinetuneError(f"rank {rank} could not save the checkpoint: {problem}")
