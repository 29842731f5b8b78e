"""A run as a process: its folder, lock, logs and process group, and how it ends. The same for every
kind of run.

The order: `Session(...)` decides where to start and writes nothing. Entering it takes the lock, on
rank 0. `process_group` connects the ranks. After `agree_on_run` all know that rank 0 holds the
folder; it checks that all have the same run, reads the checkpoint to resume from, and writes the
first files. `finish` writes how the run ended, or `__exit__` if it failed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from finetune.errors import ExitCode, FinetuneError, StateError
from finetune.runtime.launch_environment import LaunchWorld
from finetune.storage import durable_files
from finetune.storage.checkpoint_files import clean_staging, list_checkpoints, set_aside, verify
from finetune.storage.run_folder import (
    RunLock,
    RunState,
    SampleLog,
    list_anew,
    write_identity,
    write_status,
)
from finetune.storage.run_log import LOG_FILE_ONLY, RunLog, add_log_file
from finetune.storage.shared_storage import SEEN_WITHIN_SECONDS, is_shared
from finetune.training.control import Control, StopSignals
from finetune.training.results import EXIT_CODES
from finetune.training.resume import Resume, step_in

logger = logging.getLogger("finetune")

OUT_OF_MEMORY_NAME = "oom.json"


class Session:
    """Everything a run holds while it works; enters after every check has passed, so that a refused
    run writes nothing.

    Args:
        decide: returns where the run starts, given the names of damaged checkpoints with the reason
            (see resume.decide_resume); called again if the folder has changed meanwhile.

    Attributes:
        start: where the run starts; None where it is finished already: then it must not be entered.
        control: agreement between the ranks, from `agree_on_run` on.
        signals: requests to stop, received during training.
        runlog: events and steps; silent on ranks other than 0.
        sample_log: samples.jsonl if requested, on rank 0.
    """

    control: Control

    def __init__(
        self,
        output_dir: Path,
        world: LaunchWorld,
        *,
        identity: dict[str, Any],
        config_yaml: str,
        decide: Callable[[Mapping[str, str]], Resume | None],
        log_samples: bool,
    ) -> None:
        self.output_dir = output_dir
        self.world = world
        self._decide = decide
        # Before deciding: a checkpoint that appears in between must make them differ.
        self._checkpoints_seen = self._checkpoint_names()
        self._damaged: dict[str, str] = {}
        self.start = decide(self._damaged)
        self._identity = identity
        self._config_yaml = config_yaml
        self._log_samples = log_samples
        self._stack = contextlib.ExitStack()
        self._begun = False
        self.signals = StopSignals(launched=world.launched)
        self.runlog = RunLog(None)
        self.sample_log: SampleLog | None = None
        self.steps_done = self.start.step if self.start is not None else 0

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            if self.world.is_main:
                # The lock before everything: what follows changes the folder, and removes what
                # looks abandoned.
                stack.enter_context(RunLock(self.output_dir))
                list_anew(self.output_dir)
                self._decide_again()
                self._copy_log(stack)
            # Other ranks may not touch the folder yet: rank 0 may still wait for its lock, or not
            # get it.
            self._stack = stack.pop_all()
        return self

    def _checkpoint_names(self) -> list[str]:
        return (
            [folder.name for folder in list_checkpoints(self.output_dir)]
            if self.output_dir.is_dir()
            else []
        )

    def _decide_again(self) -> Resume:
        """The run that held the folder may have saved while this one waited for it, and ranks look
        at different times.

        Raises:
            StateError: it is finished meanwhile.
        """
        if self._checkpoint_names() != self._checkpoints_seen or self._damaged:
            self.start = self._decide(self._damaged)
        if self.start is None:
            raise StateError(
                "another process finished this run meanwhile",
                str(self.output_dir),
                "nothing is left to do",
            )
        self.steps_done = self.start.step
        return self.start

    def out_of_memory_note(self) -> dict[str, Any] | None:
        """Return the last out-of-memory note, the same on every rank: some nodes that share the
        folder may not see it yet.

        Every rank must call, after `agree_on_run`.
        """
        notes = [
            note
            for note in self.control.gather(read_out_of_memory(self.output_dir))
            if note is not None
        ]
        return min(
            notes,
            key=lambda note: note.get("token_budget") or note.get("samples_per_row") or 0,
            default=None,
        )

    def _set_aside_later_checkpoints(self, start: Resume) -> None:
        """After a step back to an earlier checkpoint, or with a changed run, later checkpoints are
        another training's.

        The run will reach their steps again and must not find its own work done there.
        """
        own = start.folder is None or start.folder.resolve().parent == self.output_dir.resolve()
        # If another run's checkpoint is resumed, one of its step here is another training's too.
        first = start.step + 1 if own else start.step
        later = [folder for folder in list_checkpoints(self.output_dir) if step_in(folder) >= first]
        for folder in later:
            if verify(folder, hashes=False).valid:
                set_aside(folder, f"the run resumes from step {start.step}")

    def agree_on_run(self, timeout_seconds: int) -> None:
        """The process group exists, so rank 0 holds the folder: other ranks may look at it and
        write logs into it.

        Args:
            timeout_seconds: the process group's, which agreement between ranks has as well.

        Raises:
            FinetuneError: on every rank, if they do not have the same run.
        """
        self.control = Control(self.world.world_size, timeout_seconds)
        if not self.world.is_main:
            self._copy_log(self._stack)
        # Ranks plan without communication: two nodes with different files would silently train on
        # different batches. The model's path may differ from node to node; "weights" identifies it.
        named = {"model"} if "weights" in self._identity else set()
        facts = {name: value for name, value in self._identity.items() if name not in named}
        self._see_the_same_checkpoints()
        start = self._decide_again()
        self.control.check_equal({**facts, "checkpoint": start.name})
        while start.folder is not None and (problem := self.problem_in(start.folder)) is not None:
            self._damaged[start.folder.name] = problem
            start = self._decide_again()
            self.control.check_equal({"checkpoint": start.name})
        if self.world.is_main:
            self._begin(start)

    def _see_the_same_checkpoints(self) -> None:
        """Wait until all ranks do: of nodes that share the folder over a network, one may see those
        of a minute ago.
        """
        for _ in range(int(SEEN_WITHIN_SECONDS)):
            if self.control.have_one(self._checkpoint_names()) or not self.control.any(
                is_shared(self.output_dir)
            ):
                return
            time.sleep(1.0)

    def problem_in(self, checkpoint: Path) -> str | None:
        """Return what is wrong with a checkpoint's content; the same on every rank, which all read
        their share of it.

        Every rank must call it.

        16 ranks that each read all of a 32B model's state would read 6 TB. What a rank will load is
        in its share.
        """
        share = partial(verify, checkpoint, reader=self.world.rank, readers=self.world.world_size)
        mine = self.control.together(share).result()
        everyone = self.control.gather([mine.why, mine.unread])
        for rank, (why, unread) in enumerate(everyone):
            # A mount that failed on one node is no reason to go back, which would lose steps.
            if unread:
                raise StateError(
                    f"rank {rank} cannot read the checkpoint: {why}",
                    str(checkpoint),
                    "see to that node's mount or the disk and start again; to go on from an older"
                    " checkpoint, move this one away",
                )
        return next((str(why) for why, _ in everyone if why), None)

    def _begin(self, start: Resume) -> None:
        """Write the first files: nothing can be refused any more."""
        # The identity before all: without it, what a kill leaves would be a foreign folder,
        # refused.
        write_identity(self.output_dir, self._identity)
        self._begun = True
        durable_files.replace_file(self.output_dir / "run.yaml", self._config_yaml.encode())
        clean_staging(self.output_dir)
        write_status(self.output_dir, "running", None, step=start.step, pid=os.getpid())
        self._set_aside_later_checkpoints(start)
        self.runlog = RunLog(self.output_dir, resume_step=start.step)
        self._stack.callback(self.runlog.close)
        for name, why in start.skipped:
            logger.warning("%s is skipped: %s", name, why)
            self.runlog.event("skipped_checkpoint", name=name, why=why)
        if self._log_samples:
            samples = SampleLog(self.output_dir / "samples.jsonl", resume_step=start.step)
            self.sample_log = self._stack.enter_context(samples)

    def _copy_log(self, stack: contextlib.ExitStack) -> None:
        handler = add_log_file(self.output_dir, self.world.rank)
        stack.callback(handler.close)
        stack.callback(logger.removeHandler, handler)

    def finish(
        self,
        state: RunState,
        *,
        step: int,
        exit_code: int | None = None,
        outcome: Mapping[str, Any] | None = None,
        peaks: Mapping[str, Any] | None = None,
        **status: Any,
    ) -> None:
        """Write how the run ended, with the code that the process ends with; on rank 0.

        Args:
            outcome: for the status and the event: the best evaluation, the step of the output.
            peaks: for the event: peak memory of each rank, and what was planned.
            status: for the status alone.
        """
        if self.world.is_main and self._begun:
            code = int(EXIT_CODES[state] if exit_code is None else exit_code)
            outcome = outcome or {}
            write_status(
                self.output_dir,
                state,
                code,
                step=step,
                **status,
                **outcome,
            )
            self.runlog.event(
                "end", state=state, exit_code=code, step=step, **(peaks or {}), **outcome
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any
    ) -> None:
        if error is not None:
            # Errors of others often begin with the offending value alone, so their type goes with
            # them.
            text = (
                str(error)
                if isinstance(error, FinetuneError)
                else f"{type(error).__name__}: {error}"
            )
            # the console gets it when the process ends
            logger.error("%s", text, extra=LOG_FILE_ONLY)
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            code = int(getattr(error, "exit_code", ExitCode.FAILED))
            try:
                self.finish(
                    "failed",
                    step=self.steps_done,
                    exit_code=code,
                    error=message,
                )
            except OSError as second:  # e.g. a full disk: the first error is the one to report
                logger.error("the run's end could not be written down: %s", second)
        self._stack.close()


@contextlib.contextmanager
def process_group(world: LaunchWorld, timeout_seconds: int, backend: str) -> Iterator[None]:
    """Make the run's process group if it has several processes; a barrier at its end ensures that
    none aborts.

    One that exists is used and left alone.
    """
    import torch.distributed as dist

    # Make the group here: TrainingArguments uses an existing group. Its own would have torch's 30
    # minutes instead of the requested timeout, because it passes no timeout for a CPU run
    # (transformers 5.23, _setup_devices).
    ours = world.world_size > 1 and not dist.is_initialized()
    if ours:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    try:
        yield
        # Only after a good end: a rank that fails must not wait for peers that are stuck in a
        # collective.
        if dist.is_initialized() and world.world_size > 1:
            dist.barrier()
    finally:
        if dist.is_initialized() and (ours or world.world_size == 1):
            dist.destroy_process_group()
        # Whether or not the group was ours: TrainingArguments made the state.
        _forget_accelerate()


def _forget_accelerate() -> None:
    """Reset accelerate's shared state, so that another run in this process starts clean."""
    # Its classes keep their state in class attributes. Every later run would have the first run's
    # device, number of processes and DeepSpeed.
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def read_out_of_memory(output_dir: Path) -> dict[str, Any] | None:
    """Return the last out-of-memory note of a sharded run.

    It is `{"step", "token_budget" or "samples_per_row", "error"}`.
    """
    path = output_dir / OUT_OF_MEMORY_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_out_of_memory(output_dir: Path, rank: int, **facts: Any) -> None:
    # Atomically: several ranks may run out of memory at the same time, and a launcher kills the
    # others meanwhile.
    content = (json.dumps(facts) + "\n").encode()
    durable_files.replace_file(output_dir / OUT_OF_MEMORY_NAME, content, writer=f".{rank}")
