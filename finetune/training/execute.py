"""Execute a prepared run: decide its final settings, build, train, and save the result.

Here the settings become final: `final_settings` makes them of what was requested, what was decided
with the device and the data, and what the memory of the devices allows. Nothing changes them
afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config.base_config import BaseConfig
from finetune.config.kinds import RunKind
from finetune.errors import ConfigError, ExitCode, FinetuneError
from finetune.planning.auto import (
    choose_execution,
    lowest_memory_choice,
    open_settings,
    with_values,
)
from finetune.planning.finished_run import peaks_of, planned_of_run, read_events
from finetune.planning.workload import Cluster
from finetune.runtime import device as devices
from finetune.runtime.host import HostMeter, peak_host_bytes
from finetune.storage import durable_files
from finetune.storage.run_folder import RunState
from finetune.training.build import make_trainer, quiet_known_warnings
from finetune.training.control import StoppedBeforeTraining
from finetune.training.executor import StepOutOfMemory, cannot_shrink_error
from finetune.training.prepare import PreparedRun
from finetune.training.results import RunResult
from finetune.training.session import Session, process_group, write_out_of_memory
from finetune.training.trainer import RunTrainer

logger = logging.getLogger("finetune")

# Errors of storage that is full, over quota, broken, or no longer mounted.
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN}


class OutOfMemoryError(FinetuneError):
    """A sharded run ran out of device memory; started again it resumes with smaller
    microbatches.
    """

    exit_code = ExitCode.OUT_OF_MEMORY


def execute(
    kind: RunKind,
    requested: BaseConfig,
    decided: Mapping[str, Any],
    data: PreparedRun,
    session: Session,
    *,
    backend: str,
) -> RunResult:
    """Execute a run whose folder this process holds.

    Args:
        requested: the settings of flags and files; some may say auto.
        decided: values of some of them, by name, with `device_type` and `dtype`.
        data: the result of the kind's `prepare`.
        backend: of the process group.
    """
    device_type, timeout_seconds = decided["device_type"], requested.timeout_seconds
    with process_group(session.world, timeout_seconds, backend):
        session.agree_on_run(timeout_seconds)
        config = final_settings(kind, requested, decided, data, session)
        quiet_known_warnings()
        devices.use_fast_matmul(device_type)
        trainer = make_trainer(kind.build(config, data, session))
        return train_and_save(trainer, session)


def final_settings(
    kind: RunKind,
    requested: BaseConfig,
    decided: Mapping[str, Any],
    data: PreparedRun,
    session: Session,
) -> BaseConfig:
    """Return the settings with a value wherever they were auto. The result is the same on every
    rank.

    Values that are decided already are used. Settings that only affect how the run is executed are
    chosen by the memory that is free now.
    """
    device_type = decided["device_type"]
    if not open_settings(requested):
        return with_values(requested, decided)
    world, host = session.world, HostMeter().look()
    free = (
        devices.free_memory_bytes(device_type, world.local_rank),
        host.memory_total_bytes - host.memory_used_bytes,
    )
    of_devices, of_hosts = zip(*session.control.gather(free), strict=True)
    cluster = Cluster(
        nodes=max(1, world.world_size // world.local_world_size),
        devices_per_node=world.local_world_size,
        device_type=device_type,
        device_memory_bytes=None if None in of_devices else min(of_devices),
        host_memory_bytes=min(of_hosts),
        peak_flops=devices.capabilities(device_type).peak_flops,
    )
    # The note first: every rank must ask for it, whether or not a plan can be made.
    out_of_memory = session.out_of_memory_note() is not None
    try:
        chosen = choose_execution(
            requested,
            kind.shape(requested),
            cluster,
            decided=decided,
            step_tokens=float(data.train.lengths.mean()) * data.batches.global_batch_size,
            out_of_memory=out_of_memory,
            workload=kind.workload,
        )
    except ConfigError as error:  # a model whose sizes the planner cannot read
        logger.info("no plan can be made of this model: %s", error.what)
        chosen = lowest_memory_choice(requested, device_type, decided)
    logger.log(logging.WARNING if chosen.fits is False else logging.INFO, "%s", chosen.reason)
    session.runlog.event("execution", chosen=chosen.values, reason=chosen.reason)
    return chosen.config


def train_and_save(trainer: RunTrainer, session: Session) -> RunResult:
    """Train to the end or to a signal.

    Raises:
        OutOfMemoryError: under DDP buckets or ZeRO, after `oom.json` was written for the next
            start.
        FinetuneError: what stopped the training, with the last good checkpoint.
    """
    # Until the output is written: a signal in between must not leave half of it.
    with session.signals, _storage_errors(trainer, session):
        try:
            with contextlib.suppress(StoppedBeforeTraining), trainer.checkpointer:
                trainer.train()
        except StepOutOfMemory as error:
            raise _out_of_memory(trainer, session, str(error)) from error
        finally:
            trainer.console.close()
            session.steps_done = trainer.state.global_step
        state: RunState = "stopped" if trainer.stopped_by is not None else "done"
        steps, outcome = trainer.state.global_step, trainer.evaluations.best.outcome()
        output_step = None
        if state == "done":
            best = _best_checkpoint(trainer, session)
            output_step = steps if best is None else trainer.evaluations.best.step
            trainer.save_output(session.output_dir, best)
            outcome |= {"output_step": output_step}
        session.finish(
            state,
            step=steps,
            outcome=outcome,
            peaks=_peaks(trainer, session),
            checkpoint=trainer.checkpointer.last,
        )
    if state == "stopped":
        saved = trainer.checkpointer.last or "no checkpoint"
        logger.warning(
            "stopped by %s at step %d; %s is saved; the same command resumes the run",
            trainer.stopped_by,
            steps,
            saved,
        )
    return RunResult(
        session.output_dir, state, steps, trainer.measured, trainer.start.step, output_step
    )


def _best_checkpoint(trainer: RunTrainer, session: Session) -> Path | None:
    """Return the checkpoint that the output is made of; None for the weights as they are now.

    Every rank must call it.

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


def _peaks(trainer: RunTrainer, session: Session) -> dict[str, Any]:
    """Return the peak memory of each rank so far, by rank, on its device and its host.

    On rank 0 also return the peak that `plan` computes for the run. It is computed here because
    torch and the model's code are loaded already, so readers of the log need not load them.

    Collective: every rank must call it.
    """
    mine = (devices.peak_memory_bytes(trainer.args.device), peak_host_bytes())
    of_device, of_host = zip(*session.control.gather(mine), strict=True)
    peaks: dict[str, Any] = {
        "peak_device_bytes": list(of_device),
        "peak_host_bytes": list(of_host),
    }
    if not session.world.is_main:
        return peaks
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # Training is over. Still registered, ZeRO-3 would partition the empty model that is planned
    # with, and wait for the other ranks to do so too.
    unset_hf_deepspeed_config()
    try:
        planned = planned_of_run(session.output_dir, read_events(session.output_dir))
        return peaks | {"planned_peak_bytes": peaks_of(*planned)}
    # of a model that cannot be planned for, mostly; and the run itself is done
    except Exception as error:
        logger.debug("the memory of this run is not planned: %s", error)
        return peaks


@contextlib.contextmanager
def _storage_errors(trainer: RunTrainer, session: Session) -> Iterator[None]:
    """Raise an error that states what became of the run if its folder's storage fails."""
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
    """Return the error to raise, after writing a smaller execution for the next start, if there is
    one.
    """
    # Written on the rank that ran out: the others are in a collective with it and cannot be asked.
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
    session.runlog.event(
        "oom",
        step=step,
        error=error,
        old=old.describe(),
        new=new.describe(),
    )
    return OutOfMemoryError(
        f"out of memory at step {step} ({old.describe()}): {error}",
        where=str(session.output_dir),
        fix=f"start the same command again: it resumes with {new.describe()} and the same training",
    )
