"""Build a run: from final settings and prepared data to the trainer. What every kind has in common,
then fine-tuning on conversations and preferences; texts are in pretraining/build.py.

A kind fills `RunParts` (trainer.py), and `make_trainer` makes the trainer of it.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from finetune.batching.microbatch_schedule import PlanSummary, summarise
from finetune.batching.mixing import source_line
from finetune.batching.steps import Execution, InOrder, LossGroups, StepBatches
from finetune.config.base_config import BaseConfig
from finetune.config.deepspeed import deepspeed_dict, offloads, zero_stage
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.run_config import RunConfig
from finetune.config.schedules import ScheduleSettings, learning_rate_schedule, warmup_count
from finetune.data.samples import Samples
from finetune.errors import FinetuneError
from finetune.modeling.adapter import add_adapter
from finetune.modeling.attention_check import check_attention
from finetune.modeling.layers import fuse_layers
from finetune.modeling.lora import fuse_lora
from finetune.modeling.loss import ChunkedHead, make_chunked_head
from finetune.modeling.pretrained import DTYPES, count_parameters, load_model
from finetune.runtime import device as devices
from finetune.runtime.terminal import console as terminal_console
from finetune.training.executor import looked_at_steps
from finetune.training.operators import load_shared_memory_operator
from finetune.training.prepare import PreparedConversations
from finetune.training.session import Session
from finetune.training.state import TrainingState
from finetune.training.trainer import (
    RunParts,
    RunTrainer,
    SFTTrainer,
    StartReport,
    package_versions,
    reporters,
    training_arguments,
)

logger = logging.getLogger("finetune")

# Global batches that are planned for the table: enough for the mean, cheap for a run of any length.
SUMMARISED_STEPS = 50
# (message pattern, category)
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


def make_trainer(parts: RunParts) -> RunTrainer:
    """Make the trainer of a run and report the start. Every rank must call it."""
    # Ranks plan and name tensors without communication: with other packages or microbatches they
    # would silently diverge.
    session, execution = parts.session, parts.step_batches.execution
    session.control.check_equal({**package_versions(), "packing": execution.describe()})
    # Before Trainer wraps the model: DeepSpeed copies its float32 masters from these weights (see
    # state.py).
    if parts.start.folder is not None:
        TrainingState(parts.model).load_weights(parts.start.folder)
    trained = count_parameters(parts.model)["trainable"]
    trainer = parts.trainer_class(parts)
    _check_world(trainer, parts)
    _check_ties(trainer, trained)
    if "tensorboard" in reporters(parts.config.report_to):
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
        curves = Path(folder) if folder else session.output_dir / "tensorboard"
        session.runlog.draw_curves(curves.expanduser())
    _report_start(parts)
    return trainer


def make_execution(
    session: Session, *, token_budget: int | None = None, samples_per_microbatch: int | None = None
) -> Execution:
    """Decide how global batches are executed here: in smaller microbatches than requested if the
    last start ran out of memory.

    Args:
        token_budget: of a packed microbatch; None without packing.
        samples_per_microbatch: of a padded one; None with packing.
    """
    note = session.out_of_memory_note()
    if note is not None:
        if token_budget is not None:
            token_budget = min(token_budget, note.get("token_budget") or token_budget)
        if samples_per_microbatch is not None:
            samples_per_microbatch = min(
                samples_per_microbatch, note.get("samples_per_row") or samples_per_microbatch
            )
        logger.warning(
            "the last start ran out of memory at step %s: this one takes smaller microbatches",
            note["step"],
        )
    return Execution(
        session.world.rank,
        session.world.world_size,
        token_budget=token_budget,
        samples_per_microbatch=samples_per_microbatch,
    )


def speed_up(
    model: torch.nn.Module, config: BaseConfig, fused_layers: str | None = None
) -> dict[str, str]:
    """Let the device's own functions compute layers and attention, if they agree with torch's.

    Args:
        fused_layers: as `--fused-layers`, instead of the setting.

    Returns: who computes each, for the table about execution.
    """
    dtype, tokens = DTYPES[config.dtype], config.tokens_per_microbatch
    fused = fuse_layers(
        model,
        fused_layers or config.fused_layers,
        device_type=config.device_type,
        dtypes=[dtype, next(model.parameters()).dtype],
        tokens=tokens,
    )
    attention = check_attention(
        model,
        config.fused_layers,
        device_type=config.device_type,
        dtype=dtype,
        tokens=tokens,
    )
    return {"fused layers": fused, "attention": attention}


def _check_world(trainer: RunTrainer, parts: RunParts) -> None:
    """Refuse to train as something else than what was requested: all of these happen silently
    elsewhere.
    """
    accelerator, config, world = trainer.accelerator, parts.config, parts.session.world
    checks = [
        (
            accelerator.num_processes == world.world_size,
            f"{accelerator.num_processes} processes, not {world.world_size}",
        ),
        (
            accelerator.device.type == config.device_type,
            f"device {accelerator.device.type}, not {config.device_type}",
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


def _check_ties(trainer: RunTrainer, trained: int) -> None:
    # Trainer.__init__ has moved the model to its device by now, where a tied weight may have become
    # two.
    if count_parameters(trainer.model)["trainable"] != trained:
        raise FinetuneError(
            "tied weights came apart on the move to the"
            f" {trainer.args.device.type} device: each would train on its own",
            "start of training",
            "report this with your versions; until then train a model whose embeddings are not"
            " tied",
        )


def _report_start(parts: RunParts) -> None:
    """Log the start event and, on rank 0, show the tables."""
    config, start, session = parts.config, parts.start, parts.session
    report, summary = parts.report(parts), plan_summary(config, parts.step_batches)
    session.runlog.event(
        "start",
        step=start.step,
        total_steps=parts.data.batches.total_steps,
        device_type=config.device_type,
        world_size=session.world.world_size,
        rows=parts.step_batches.execution.describe(),
        plan=asdict(summary),
        parameters=count_parameters(parts.model),
        versions=package_versions(),
        dtype=config.dtype,
        zero_stage=zero_stage(config),
        **report.event,
    )
    if start.folder is not None:
        session.runlog.event("resume", step=start.step, checkpoint=start.name)
        logger.info("resuming from %s", start.name)
    if session.world.is_main:
        for title, lines in report.tables.items():
            print_table(title, lines)
        print_table("execution", startup_lines(summary, report.facts))


def plan_summary(config: Any, step_batches: StepBatches) -> PlanSummary:
    """Plan an even choice of the run's steps, for the table: microbatches, packing efficiency,
    imbalance and padding.
    """
    execution = step_batches.execution
    packing = execution.token_budget is not None
    lengths = [
        step_batches.tokens_of(step_batches.batches.indices(step), packing=packing)
        for step in looked_at_steps(step_batches, most=SUMMARISED_STEPS)
    ]
    return summarise(
        lengths,
        execution.world_size,
        token_budget=execution.token_budget or 0,
        # of a packed run, to compare with
        samples_per_microbatch=execution.samples_per_microbatch or config.samples_per_microbatch,
        packing=packing,
    )


def startup_lines(summary: PlanSummary, facts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the table's lines about execution, as (name, value) texts."""
    fewest, mean, most = summary.rows_per_rank
    counts = f"{fewest}" if fewest == most else f"{fewest} to {most}, {mean:.1f} on average"
    return [
        *facts.items(),
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


# ------------------------------------------------------------ conversations and preferences


def build_fine_tuning(
    config: RunConfig,
    data: PreparedConversations,
    session: Session,
    *,
    trainer_class: type[RunTrainer] = SFTTrainer,
    batches_class: type[StepBatches] = StepBatches,
    head_class: type[ChunkedHead] = ChunkedHead,
) -> RunParts:
    """Fill the parts of a run that starts from a model and its tokenizer; the process group exists.

    DeepSpeed requires this order (transformers 5.23, DeepSpeed 0.19.8). First, TrainingArguments
    registers the configuration: HfDeepSpeedConfig, a weak reference that from_pretrained reads to
    decide whether to load under zero.Init. Then `deepspeed.init_distributed` makes its process
    group. Only then does `from_pretrained` partition the weights that it loads. `load_model`
    checks that it did.
    """
    execution = make_execution(
        session,
        token_budget=config.tokens_per_microbatch if data.packing else None,
        samples_per_microbatch=None if data.packing else config.samples_per_microbatch,
    )

    def step_batches(samples: Samples, batches: Any, sources: tuple[str, ...]) -> StepBatches:
        return batches_class(
            samples,
            batches,
            execution,
            difficulty_ids=samples.difficulties,
            groups=LossGroups(data.difficulty_names, sources, samples.source_starts),
            pad_token_id=data.padding_id,
        )

    valid = None
    if data.valid is not None:
        in_order = InOrder(len(data.valid), data.batches.global_batch_size)
        valid = step_batches(data.valid, in_order, data.valid_source_names)
    deepspeed = _deepspeed(config, data, session) if config.deepspeed else None
    arguments = training_arguments(
        config, data, learning_rate=float(config.learning_rate), deepspeed=deepspeed
    )
    if config.deepspeed:
        _init_deepspeed(config.device_type)
    model = load_start_model(config, arguments.device, data.trained_token_ids)
    layers = speed_up(model, config)
    steps = data.batches.total_steps
    schedule = ScheduleSettings(steps, warmup_count(config.warmup_steps, steps))
    return RunParts(
        trainer_class=trainer_class,
        config=config,
        data=data,
        session=session,
        arguments=arguments,
        model=model,
        step_batches=step_batches(data.train, data.batches, data.source_names),
        eval_step_batches=valid,
        learning_rate_factor=learning_rate_schedule(config.lr_scheduler, schedule),
        head=make_chunked_head(model, head_class),
        layers=layers,
        report=_report,
    )


def _report(parts: RunParts) -> StartReport:
    config: Any = parts.config
    data: Any = parts.data
    world = parts.session.world
    parameters = count_parameters(parts.model)
    sharding = "DDP" if world.world_size > 1 else "none"
    if config.deepspeed:
        sharding = f"ZeRO-{zero_stage(config)}"
    samples = (("training data", data.train), ("validation data", data.valid))
    tables = {title: side.report.lines() for title, side in samples if side is not None}
    if draws := data.batches.source_draws():
        tables["sources"] = [(source.name, source_line(source)) for source in draws]
    return StartReport(
        facts={
            "steps": (
                f"{parts.start.step + 1} to {data.batches.total_steps},"
                f" {config.global_batch_size} samples each"
            ),
            "processes": (
                f"{world.world_size} on {config.device_type}, {config.dtype}, sharding {sharding}"
            ),
            **parts.layers,
            "trained parameters": f"{parameters['trainable']:,} of {parameters['total']:,}",
            "microbatches": parts.step_batches.execution.describe(),
        },
        event={
            "fused_layers": parts.layers["fused layers"],
            "global_batch_size": config.global_batch_size,
        },
        tables=tables,
    )


def _deepspeed(config: RunConfig, data: PreparedConversations, session: Session) -> dict[str, Any]:
    # Adapters stay whole under ZeRO-3 (stage3_param_persistence_threshold): gathering each for
    # every use would cost more in messages than it saves in memory.
    largest = 0
    if config.finetuning == "lora":
        text = data.model_config.get_text_config()
        widths = [
            text.hidden_size,
            getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        ]
        largest = config.lora_r * max(widths)
    pin = devices.can_pin(config.device_type)
    if (
        not pin
        and config.device_type != "cpu"
        and any(offloads(config.deepspeed, what) for what in ("param", "optimizer"))
    ):
        logger.warning(
            "what is offloaded is not pinned, so copies hold up the device: this process may lock"
            " less than %d MiB. Fix: ulimit -l unlimited (docker run --ulimit memlock=-1)",
            devices.LEAST_LOCKED_BYTES >> 20,
        )
    return deepspeed_dict(
        config,
        world_size=session.world.world_size,
        dtype=config.dtype,
        largest_adapter_tensor=largest,
        pin=pin,
    )


def _init_deepspeed(device_type: str) -> None:
    import deepspeed

    # init_distributed loads it as well, but waits for ever for the lock of a process that was
    # killed meanwhile.
    load_shared_memory_operator()
    # For a CPU run accelerate's PartialState knows only torch's group and does not make DeepSpeed's
    # wrapper of it. The model is loaded under zero.Init, which would then assume a world of one
    # process and partition nothing.
    deepspeed.init_distributed(dist_backend=devices.DEVICE_KINDS[device_type].backend)


def load_start_model(
    config: RunConfig | PretrainConfig, device: torch.device, token_ids: Sequence[int] = ()
) -> torch.nn.Module:
    """Load the model that the run starts from, with its adapter.

    Args:
        token_ids: tokens whose embeddings are trained with the adapter.
    """
    lora = config.finetuning == "lora"
    # Without DeepSpeed, full training keeps float32 weights under autocast: AdamW's updates are
    # lost in 16 bits. DeepSpeed keeps float32 masters itself. LoRA's base is not trained.
    model_dtype = DTYPES[config.dtype] if lora or config.deepspeed else torch.float32
    model = load_model(
        config,
        model_dtype=model_dtype,
        zero3=zero_stage(config) == 3,
        quantization=getattr(config, "quantization", "none"),
        device=device,
    )
    if not lora:
        return model
    adapted = add_adapter(model, config, one_dtype=bool(config.deepspeed), token_ids=token_ids)
    if config.fused_lora:
        fuse_lora(adapted)
    return adapted
