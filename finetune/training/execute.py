"""The last step of a run: train, save the result, write how it ended. Where a run comes from:
training/run.py.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path

from finetune.errors import ExitCode, FinetuneError
from finetune.planning.finished_run import peaks_of, planned_of_run, read_events
from finetune.runtime import device as devices
from finetune.runtime.host import peak_host_bytes
from finetune.storage import durable_files
from finetune.storage.run_folder import RunState
from finetune.training.control import StoppedBeforeTraining
from finetune.training.executor import StepOutOfMemory, cannot_shrink_error
from finetune.training.results import RunResult
from finetune.training.session import Session, write_out_of_memory
from finetune.training.trainer import RunTrainer

logger = logging.getLogger("finetune")

# What storage answers that is full, over quota, broken, or no longer mounted.
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN}


class OutOfMemoryError(FinetuneError):
    """A sharded run ran out of device memory; started again it resumes with smaller
    microbatches.
    """

    exit_code = ExitCode.OUT_OF_MEMORY


def train_and_save(trainer: RunTrainer, session: Session) -> RunResult:
    """Train to the end or to a signal.

    Raises:
        OutOfMemoryError: under DDP buckets or ZeRO, after `oom.json` was written for the next
            start.
        FinetuneError: what stopped the training, with the last good checkpoint.
    """
    # Until the output is written: a signal that comes then must not leave half of it.
    with trainer.context.signals, _storage_errors(trainer, session):
        try:
            with contextlib.suppress(StoppedBeforeTraining), trainer.checkpointer:
                trainer.train()
        except StepOutOfMemory as error:
            raise _out_of_memory(trainer, session, str(error)) from error
        finally:
            trainer.console.close()
            session.steps_done = trainer.state.global_step
        state: RunState = "stopped" if trainer.stopped_by is not None else "done"
        steps, told = trainer.state.global_step, trainer.evaluations.best.told()
        output_step = None
        if state == "done":
            best = _best_checkpoint(trainer, session)
            output_step = steps if best is None else trainer.evaluations.best.step
            trainer.save_output(session.output_dir, best)
            told |= {"output_step": output_step}
        peaks = {**_peaks(trainer), **_planned_peaks(session)}
        session.finish(
            state, step=steps, checkpoint=trainer.checkpointer.last, told={**peaks, **told}, **told
        )
    if state == "stopped":
        saved = trainer.checkpointer.last or "no checkpoint"
        logger.warning("stopped by %s at step %d; %s is saved", trainer.stopped_by, steps, saved)
    start = trainer.context.start_step
    return RunResult(session.output_dir, state, steps, trainer.measured, start, output_step)


def _best_checkpoint(trainer: RunTrainer, session: Session) -> Path | None:
    """The checkpoint that the output is made of; None: the weights as they are now. Every rank
    calls.

    Raises:
        FinetuneError: its content was changed.
    """
    best = trainer.evaluations.best
    if (
        not trainer.evaluations.keep
        or best.checkpoint is None
        or best.step == trainer.state.global_step
    ):
        return None
    folder = session.output_dir / best.checkpoint
    if (problem := session.problem_in(folder)) is not None:
        raise FinetuneError(
            f"the best checkpoint cannot be made the output: {problem}",
            str(folder),
            "start the same command with --keep-best false: the output is then made of the last"
            " step",
        )
    return folder


def _planned_peaks(session: Session) -> dict[str, dict[str, int]]:
    """What `plan` says of the same, on rank 0: here torch and the model's code are loaded, which
    readers spare.
    """
    if not session.world.is_main:
        return {}
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # Training is over. Still registered, ZeRO-3 would partition the empty model that is planned
    # with, and wait for the other ranks to do so too.
    unset_hf_deepspeed_config()
    try:
        return {
            "planned_peak_bytes": peaks_of(
                *planned_of_run(session.output_dir, read_events(session.output_dir))
            )
        }
    # of a model that cannot be planned for, mostly; and the run itself is done
    except Exception as error:
        logger.debug("the memory of this run is not planned: %s", error)
        return {}


def _peaks(trainer: RunTrainer) -> dict[str, list[int | None]]:
    """The most memory of each rank so far, by rank, on its device and its host. Every rank
    calls.
    """
    mine: tuple[int | None, int | None] = (
        devices.peak_memory_bytes(trainer.args.device),
        peak_host_bytes(),
    )
    of_device, of_host = zip(*trainer.context.control.gather(mine), strict=True)
    return {"peak_device_bytes": list(of_device), "peak_host_bytes": list(of_host)}


@contextlib.contextmanager
def _storage_errors(trainer: RunTrainer, session: Session) -> Iterator[None]:
    """Say what became of the run where its folder's storage fails."""
    try:
        yield
    except Exception as error:
        cause = durable_files.os_error_in(error)  # safetensors has its own kind
        if cause is None or cause.errno not in _STORAGE_ERRORS:
            raise
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        last = trainer.checkpointer.last or "the start, as there is no checkpoint yet"
        raise FinetuneError(
            f"the run folder's disk {'is full' if full else 'or mount failed'}: {cause.strerror}",
            where=str(session.output_dir),
            fix=(
                f"{'free some space on it' if full else 'see to it'}, then start the same command"
                f" again; it resumes from {last}"
            ),
        ) from error


def _out_of_memory(trainer: RunTrainer, session: Session, error: str) -> FinetuneError:
    """The error to raise, after a smaller execution was written for the next start (where there is
    one).
    """
    # On whichever rank it happened: the others are in a collective with it and cannot be asked.
    old = trainer.step_batches.execution
    new = old.smaller(trainer.step_batches.longest)
    step = trainer.state.global_step + 1
    if new is None:
        return cannot_shrink_error(
            trainer.step_batches, step - 1, error, rehearsed=trainer.executor.largest is not None
        )
    write_out_of_memory(
        session.output_dir,
        session.world.rank,
        step=step,
        token_budget=new.token_budget,
        samples_per_row=new.samples_per_microbatch,
        old=old.describe(),
        error=error,
    )
    session.runlog.event("oom", step=step, error=error, old=old.describe(), new=new.describe())
    return OutOfMemoryError(
        f"out of memory at step {step} ({old.describe()}): {error}",
        where=str(session.output_dir),
        fix=f"start the same command again: it resumes with {new.describe()} and the same training",
    )
