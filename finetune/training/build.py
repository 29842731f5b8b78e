"""From checked data and a model to a trainer: what fine-tuning and pretraining build the same
way.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from transformers import TrainingArguments

from finetune.batching.microbatch_schedule import PlanSummary, summarise
from finetune.batching.steps import BatchSource, Execution, StepBatches
from finetune.config.base_config import BaseConfig
from finetune.errors import FinetuneError
from finetune.modeling.attention_check import check_attention
from finetune.modeling.layer_check import fuse_layers
from finetune.modeling.loss import ChunkedHead
from finetune.modeling.objective import Objective
from finetune.modeling.pretrained import DTYPES, count_parameters
from finetune.runtime import device as devices
from finetune.runtime.launch_environment import LaunchWorld
from finetune.runtime.terminal import console as terminal_console
from finetune.storage.checkpoint_files import verify
from finetune.training.arguments import reporters
from finetune.training.checkpointer import Checkpointer
from finetune.training.control import RunContext, StopSignals
from finetune.training.executor import (
    LOOKED_AT_SAMPLES,
    StepExecutor,
    largest_microbatch,
    looked_at_steps,
)
from finetune.training.results import Best, Evaluations, read_best
from finetune.training.resume import Resume, metadata_of
from finetune.training.session import Session
from finetune.training.trainer import RunTrainer

logger = logging.getLogger("finetune")

# Global batches that are planned for the table: enough for the mean, cheap for a run of any length.
SUMMARISED_STEPS = 50
# (message pattern, category, why it is no news)
KNOWN_WARNINGS = (
    # DeepSpeed 0.19.8 calls them by their old names, hundreds of times a step under ZeRO-3.
    (r"`torch\.distributed\.all_gather_into_tensor` is deprecated", FutureWarning),
    (r"`torch\.distributed\.reduce_scatter_tensor` is deprecated", FutureWarning),
    # accelerate 1.15 and transformers 5.23 know no other name for it; a model here has no buffers
    # that ranks change.
    (r"`broadcast_buffers` is deprecated", FutureWarning),
    # peft 0.21 asks transformers 5.23 by the old name, once per model.
    (r"`is_gradient_checkpointing` is deprecated", FutureWarning),
    # DeepSpeed's init_distributed, whose process group knows no device; each rank has chosen its
    # own by then.
    (r"barrier\(\): using the device under current context", UserWarning),
    # FlashAttention 3 takes the place of torch's kernels by torch's own switch
    # (modeling/attention_check.py).
    (r"Warning only once for all operators", UserWarning),
)

AnyTrainer = TypeVar("AnyTrainer", bound=RunTrainer)


class PreparedRun(Protocol):
    """What both kinds of run know before a model exists."""

    @property
    def batches(self) -> BatchSource: ...

    @property
    def identity(self) -> dict[str, Any]: ...


def make_context(
    data: PreparedRun,
    world: LaunchWorld,
    start: Resume,
    session: Session,
    *,
    learning_rate_factor: Callable[[int], float],
    epochs_per_step: float,
    stage_name: Callable[[int], str] = lambda step: "",
) -> RunContext:
    return RunContext(
        total_steps=data.batches.total_steps,
        resume_from=start.folder,
        start_step=start.step,
        stage_name=stage_name,
        learning_rate_factor=learning_rate_factor,
        epochs_per_step=epochs_per_step,
        control=session.control,
        signals=StopSignals(launched=world.launched),
        runlog=session.runlog,
        sample_log=session.sample_log,
    )


def make_execution(
    world: LaunchWorld,
    session: Session,
    *,
    packing: bool,
    token_budget: int,
    samples_per_microbatch: int,
) -> Execution:
    """How global batches are executed here; smaller than asked for where the last start ran out of
    memory.
    """
    note = session.out_of_memory_note()
    if note is not None:
        token_budget = min(token_budget, note.get("token_budget") or token_budget)
        samples_per_microbatch = min(
            samples_per_microbatch, note.get("samples_per_row") or samples_per_microbatch
        )
        logger.warning(
            "the last start ran out of memory at step %s: this one takes smaller microbatches",
            note["step"],
        )
    return Execution(
        world.rank,
        world.world_size,
        token_budget=token_budget if packing else None,
        samples_per_microbatch=None if packing else samples_per_microbatch,
    )


def choose_layers(
    model: torch.nn.Module, config: BaseConfig, wanted: str, *, device_type: str, dtype: str
) -> tuple[str, str]:
    """Let the device's own functions compute layers and attention, where they agree; who computes
    each.

    Args:
        wanted: of the layers, as `--fused-layers`, which the attention goes by as it is.
    """
    fused = fuse_layers(
        model,
        wanted,
        device_type=device_type,
        compiles=devices.capabilities(device_type).compile,
        dtypes=[DTYPES[dtype], next(model.parameters()).dtype],
        tokens=config.tokens_per_microbatch,
    )
    attention = check_attention(
        model,
        config.fused_layers,
        device_type=device_type,
        dtype=DTYPES[dtype],
        tokens=config.tokens_per_microbatch,
    )
    return fused, attention


def make_trainer(
    trainer_class: type[AnyTrainer],
    config: BaseConfig,
    data: PreparedRun,
    world: LaunchWorld,
    session: Session,
    *,
    model: torch.nn.Module,
    arguments: TrainingArguments,
    context: RunContext,
    step_batches: StepBatches,
    head: ChunkedHead | None,
    flat_reduce: bool,
    device_type: str,
    objective: Objective | None = None,
    **own: Any,
) -> AnyTrainer:
    """The trainer with its executor and checkpointer, on what was asked for.

    Args:
        flat_reduce: see `StepExecutor`.
        objective: what is minimised; None for the token loss.
        own: further arguments of the class.
    """
    make_executor = partial(
        StepExecutor,
        step_batches=step_batches,
        control=context.control,
        seed=config.seed,
        head=head,
        flat_reduce=flat_reduce,
        largest=largest_microbatch(step_batches),
        objective=objective,
    )
    # Ranks plan and name tensors without communication: other packages or microbatches would part
    # them in silence.
    context.control.check_equal(
        {**package_versions(), "packing": step_batches.execution.describe()}
    )
    trained = count_parameters(model)["trainable"]
    held_out = getattr(own.get("eval_step_batches"), "samples", None)
    best = _best_so_far(config, context, session.output_dir, _compared_data(config, held_out))
    arguments.eval_on_start = arguments.eval_on_start or _lacks_evaluation(
        config, context, best, session
    )
    trainer = trainer_class(
        model=model,
        args=arguments,
        step_batches=step_batches,
        context=context,
        make_executor=make_executor,
        head=head,
        num_workers=config.dataloader_num_workers,
        **own,
    )
    _check_world(trainer, config, world, device_type)
    _check_ties(trainer, trained, device_type)
    if "tensorboard" in reporters(config.report_to):
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or session.output_dir / "tensorboard"
        session.runlog.draw_curves(Path(folder).expanduser())
    trainer.checkpointer = _checkpointer(trainer, config, data, world, session)
    trainer.evaluations = _evaluations(config, context, best)
    trainer.checkpointer.best = None if best.evaluated is None else best.facts()
    return trainer


def _checkpointer(
    trainer: RunTrainer, config: BaseConfig, data: PreparedRun, world: LaunchWorld, session: Session
) -> Checkpointer:
    context = trainer.context
    return Checkpointer(
        session.output_dir,
        context.control,
        rank=world.rank,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        metadata={"identity": data.identity, "versions": package_versions()},
        model_files=trainer.model_files,
        keep=config.save_total_limit,
        runlog=session.runlog,
        sample_log=session.sample_log,
        last=None if context.resume_from is None else context.resume_from.name,
        verified=_resumed_here(context, session.output_dir),
        behind=config.async_save,
    )


def _evaluations(config: BaseConfig, context: RunContext, best: Best) -> Evaluations:
    higher = config.metrics[best.metric.removeprefix("eval_").partition("/")[0]]
    return Evaluations(
        best, context, higher=higher, keep=config.keep_best, patience=config.early_stopping
    )


def _compared_data(config: BaseConfig, held_out: Any) -> str | None:
    """What evaluations are of, where it is known: those of other data, or of other answers, are not
    compared.
    """
    fingerprint = getattr(held_out, "fingerprint", None)
    if fingerprint is None or not config.followed_metric.startswith("eval_exact_match"):
        return fingerprint
    # A setting at its default is left out: checkpoints from before there was one go on.
    fields = type(config).model_fields
    others = {name: getattr(config, name) for name in ("answer_field", "max_new_tokens")}
    changed = [
        f":{name}={value}" for name, value in others.items() if value != fields[name].default
    ]
    return f"{fingerprint}:{getattr(config, 'eval_generate', None)}{''.join(changed)}"


def _best_so_far(
    config: BaseConfig, context: RunContext, output_dir: Path, data: str | None
) -> Best:
    """The best evaluation before the checkpoint of this folder that the run resumes from. Every
    rank calls.

    Args:
        data: fingerprint of the validation data, where it has one.
    """
    # Of another folder's checkpoint neither the best one nor this one is here to be kept.
    own = _resumed_here(context, output_dir)
    best = read_best(
        config.followed_metric, metadata_of(context.resume_from if own is not None else None), data
    )
    if config.keep_best and best.value is not None:
        if best.checkpoint is None or not verify(output_dir / best.checkpoint, hashes=False).valid:
            logger.warning(
                "the best checkpoint, of step %d, is not here: the best is looked for anew",
                best.step,
            )
            best = Best(best.metric, data=data)
    elif best.checkpoint is not None:
        best = replace(best, checkpoint=None)
    return Best(**context.control.share(best.facts()))


def _lacks_evaluation(
    config: BaseConfig, context: RunContext, best: Best, session: Session
) -> bool:
    """Whether a signal stopped the run at a step that it had to evaluate, so that this start makes
    up for it.
    """
    if _resumed_here(context, session.output_dir) is None:
        return False
    step, follows = context.start_step, config.keep_best or config.early_stopping
    due = step % config.eval_steps == 0 if config.eval_steps else False
    return bool(
        follows and step and best.evaluated != step and (due or step == context.total_steps)
    )


def _resumed_here(context: RunContext, output_dir: Path) -> str | None:
    """Name of the checkpoint of this folder that the run resumes from, whose content was
    verified.
    """
    folder = context.resume_from
    return (
        folder.name
        if folder is not None and folder.resolve().parent == output_dir.resolve()
        else None
    )


def _check_world(
    trainer: RunTrainer, config: BaseConfig, world: LaunchWorld, device_type: str
) -> None:
    """Refuse to train as something else than what was asked for: all of these happen silently
    elsewhere.
    """
    accelerator = trainer.accelerator
    checks = [
        (
            accelerator.num_processes == world.world_size,
            f"{accelerator.num_processes} processes, not {world.world_size}",
        ),
        (
            accelerator.device.type == device_type,
            f"device {accelerator.device.type}, not {device_type}",
        ),
        (
            (accelerator.distributed_type.value == "DEEPSPEED") == bool(config.deepspeed),
            f"DeepSpeed is {'not ' if config.deepspeed else ''}on, against the configuration",
        ),
    ]
    for right, what in checks:
        if not right:
            raise FinetuneError(
                f"accelerate set up {what}",
                "start of training",
                "report this with the launch command",
            )


def _check_ties(trainer: RunTrainer, trained: int, device_type: str) -> None:
    # Trainer.__init__ has moved the model to its device by now, where a tied weight may have become
    # two.
    if count_parameters(trainer.model)["trainable"] != trained:
        raise FinetuneError(
            f"tied weights came apart on the move to the {device_type} device: each would train on"
            " its own",
            "start of training",
            "report this with your versions; until then train a model whose embeddings are not"
            " tied",
        )


def package_versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "accelerate", "peft")}


def say_start(
    trainer: RunTrainer,
    world: LaunchWorld,
    summary: PlanSummary,
    *,
    tables: Mapping[str, list[tuple[str, str]]],
    facts: dict[str, str],
    **event: Any,
) -> None:
    """The start event, and on rank 0 the tables.

    Args:
        tables: title -> lines, before the table about execution.
        facts: lines of that table.
        event: further facts of the event.
    """
    context = trainer.context
    context.runlog.event(
        "start",
        step=context.start_step,
        total_steps=context.total_steps,
        device_type=trainer.accelerator.device.type,
        world_size=world.world_size,
        rows=trainer.step_batches.execution.describe(),
        plan=asdict(summary),
        parameters=count_parameters(trainer.model),
        versions=package_versions(),
        **event,
    )
    if context.resume_from is not None:
        context.runlog.event("resume", step=context.start_step, checkpoint=context.resume_from.name)
        logger.info("resuming from %s", context.resume_from.name)
    if not world.is_main:
        return
    for title, lines in tables.items():
        print_table(title, lines)
    print_table("execution", startup_lines(summary, facts))


def plan_summary(
    step_batches: StepBatches, *, token_budget: int, samples_per_microbatch: int
) -> PlanSummary:
    """Microbatches, packing efficiency, imbalance and padding of an even choice of the run's steps.

    Args: token_budget, samples_per_microbatch: of the way of making microbatches that the run does
        not take, to compare.
    """
    packing = step_batches.execution.token_budget is not None
    lengths = [
        step_batches.tokens_of(step_batches.batches.indices(step), packing=packing)
        for step in looked_at_steps(step_batches, LOOKED_AT_SAMPLES, most=SUMMARISED_STEPS)
    ]
    return summarise(
        lengths,
        step_batches.execution.world_size,
        token_budget=step_batches.execution.token_budget or token_budget,
        samples_per_microbatch=step_batches.execution.samples_per_microbatch
        or samples_per_microbatch,
        packing=step_batches.execution.token_budget is not None,
    )


def startup_lines(summary: PlanSummary, facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The table's lines about execution, as (name, value) texts."""
    fewest, mean, most = summary.rows_per_rank
    counts = f"{fewest}" if fewest == most else f"{fewest} to {most}, {mean:.1f} on average"
    return [
        *((name, str(value)) for name, value in facts.items()),
        ("microbatches per process and step", counts),
        ("tokens per step", f"{summary.tokens:,.0f}"),
        ("packing efficiency", f"{summary.fill:.0%}"),
        ("largest microbatch", f"{summary.heaviest_row_tokens:,} tokens"),
        ("imbalance over processes", f"{summary.imbalance:.3f}"),
        ("padding here", f"{summary.padding_share:.0%} of computed tokens"),
        ("padding of a padded run", f"{summary.padded_padding_share:.0%}"),
    ]


def print_table(title: str, lines: list[tuple[str, str]]) -> None:
    """Print a two-column table to stderr."""
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("how much", justify="right")
    for name, value in lines:
        table.add_row(name, value)
    terminal_console(stderr=True).print(table)


def quiet_known_warnings() -> None:
    """Filter the warnings above, and transformers' bar for reading weights (the run has its own
    progress).
    """
    from transformers.utils import logging as transformers_logging

    for message, category in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    transformers_logging.disable_progress_bar()
