"""From a checked run to a trainer: arguments, DeepSpeed, model, adapter, rows, in the order that they need."""

from __future__ import annotations

import logging
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments

from finetune import device as devices
from finetune.config import RunConfig
from finetune.data.dataset import Samples
from finetune.data.steps import Execution, InOrder, StepRows
from finetune.device import LaunchWorld
from finetune.errors import FinetuneError
from finetune.modeling.loss import make_chunked_head
from finetune.modeling.pretrained import DTYPES, add_adapter, count_parameters, load_model
from finetune.training.arguments import training_arguments
from finetune.training.checkpoint import Checkpointer
from finetune.training.control import Control, StopSignals
from finetune.training.deepspeed_config import deepspeed_dict, zero_stage
from finetune.training.execution import StepExecutor, heaviest_row
from finetune.training.quiet import quiet_known_warnings
from finetune.training.schedules import learning_rate_factor, warmup_count
from finetune.training.session import Resume, Session, read_out_of_memory
from finetune.training.sft_trainer import SFTTrainer
from finetune.training.startup import plan_summary, print_table, startup_lines
from finetune.training.state import TrainingState
from finetune.training.trainer import RunContext

if TYPE_CHECKING:
    from finetune.sft import Prepared

logger = logging.getLogger("finetune")


def build_trainer(
    config: RunConfig,
    world: LaunchWorld,
    data: Prepared,
    start: Resume,
    session: Session,
    *,
    device_type: str,
    dtype: str,
) -> SFTTrainer:
    """Build the trainer of a fine-tuning run; the process group exists."""
    quiet_known_warnings()
    devices.use_fast_matmul(device_type)
    lora = config.finetuning == "lora"
    checkpointing = config.gradient_checkpointing
    arguments = training_arguments(
        config,
        device_type=device_type,
        dtype=dtype,
        total_steps=data.batches.total_steps,
        gradient_checkpointing=device_type != "cpu" if checkpointing is None else checkpointing,
        deepspeed=_deepspeed(config, world, dtype),
        resumed=start.step > 0,
    )
    model = _model(config, arguments, device_type, dtype)
    if start.folder is not None:
        TrainingState(model).load_weights(start.folder)
    head = make_chunked_head(model)
    context = _context(config, world, data, start, session)
    rows, eval_rows = _rows(config, world, data, session)

    def make_executor(accelerator: Any) -> StepExecutor:
        return StepExecutor(
            accelerator,
            rows,
            context.control,
            seed=config.seed,
            head=head,
            flat_reduce=lora,
            heaviest=heaviest_row(rows),
        )

    trainer = SFTTrainer(
        model=model,
        args=arguments,
        processing_class=data.tokenizer,
        lora=lora,
        compute_dtype=dtype,
        rows=rows,
        eval_rows=eval_rows,
        context=context,
        executor=make_executor,
        head=head,
        sliced_state=not lora and zero_stage(config) == 3,
        num_workers=config.dataloader_num_workers,
    )
    _check_world(trainer, config, world, device_type)
    trainer.checkpointer = Checkpointer(
        session.output_dir,
        context.control,
        rank=world.rank,
        world_size=world.world_size,
        metadata={"identity": data.identity, "versions": package_versions()},
        write_model_files=trainer.write_model_files,
        keep=config.save_total_limit,
        runlog=session.runlog,
        sample_log=session.sample_log,
    )
    _say_start(trainer, config, world, data, device_type, dtype)
    return trainer


def _deepspeed(config: RunConfig, world: LaunchWorld, dtype: str) -> dict[str, Any] | None:
    if not config.deepspeed:
        return None
    largest = 0
    if config.finetuning == "lora":
        from finetune.modeling.pretrained import load_model_config

        text = load_model_config(config.model, trust_remote_code=config.trust_remote_code).get_text_config()
        widths = [text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size]
        largest = config.lora_r * max(widths)
    return deepspeed_dict(config, world_size=world.world_size, dtype=dtype, largest_adapter_tensor=largest)


def _model(config: RunConfig, arguments: TrainingArguments, device_type: str, dtype: str) -> torch.nn.Module:
    if config.deepspeed:
        import deepspeed

        # After TrainingArguments (which registers the configuration) and before the model: else DeepSpeed takes the
        # world for one process.
        deepspeed.init_distributed(dist_backend=devices.DEVICE_KINDS[device_type].backend)
    lora = config.finetuning == "lora"
    # Without DeepSpeed, full training keeps float32 weights under autocast; DeepSpeed keeps float32 masters itself.
    model_dtype = DTYPES[dtype] if lora or config.deepspeed else torch.float32
    model = load_model(
        config, device_type=device_type, dtype=dtype, model_dtype=model_dtype, zero3=zero_stage(config) == 3
    )
    return add_adapter(model, config, one_dtype=bool(config.deepspeed)) if lora else model


def _context(config: RunConfig, world: LaunchWorld, data: Prepared, start: Resume, session: Session) -> RunContext:
    total = data.batches.total_steps
    warmup = warmup_count(config.warmup_steps, total)
    stages = data.stages

    def stage_name(step: int) -> str:
        return f"stage {data.batches.stage(step) + 1}/{len(stages)}" if len(stages) > 1 else ""

    def factor(step: int) -> float:
        return learning_rate_factor(step, total_steps=total, warmup_steps=warmup, scheduler=config.lr_scheduler)

    return RunContext(
        total_steps=total,
        resume_from=start.folder,
        start_step=start.step,
        level_names=data.level_names,
        stage_name=stage_name,
        learning_rate_factor=factor,
        epochs_per_step=config.global_batch_size / len(data.train),
        control=Control(world.world_size, config.timeout_seconds),
        signals=StopSignals(),
        runlog=session.runlog,
        sample_log=session.sample_log,
    )


def _rows(config: RunConfig, world: LaunchWorld, data: Prepared, session: Session) -> tuple[StepRows, StepRows | None]:
    budget, samples_per_row = config.micro_batch_size * config.cutoff_len, config.micro_batch_size
    note = read_out_of_memory(session.output_dir)
    if note is not None:
        budget = min(budget, note.get("token_budget") or budget)
        samples_per_row = min(samples_per_row, note.get("samples_per_row") or samples_per_row)
        logger.warning("the last start ran out of memory at step %s: going on with smaller rows", note["step"])
    execution = Execution(
        world.rank,
        world.world_size,
        token_budget=budget if data.packing else None,
        samples_per_row=None if data.packing else samples_per_row,
    )

    def make(samples: Samples, batches: Any) -> StepRows:
        return StepRows(
            samples,
            batches,
            execution,
            level_ids=samples.levels,
            levels=len(data.level_names),
            pad_token_id=data.tokenizer.pad_token_id or 0,
        )

    valid = None if data.valid is None else make(data.valid, InOrder(len(data.valid), config.global_batch_size))
    return make(data.train, data.batches), valid


def _check_world(trainer: SFTTrainer, config: RunConfig, world: LaunchWorld, device_type: str) -> None:
    """Refuse to train as something else than what was asked for: all of these happen silently elsewhere."""
    accelerator = trainer.accelerator
    checks = [
        (
            accelerator.num_processes == world.world_size,
            f"{accelerator.num_processes} processes, not {world.world_size}",
        ),
        (accelerator.device.type == device_type, f"device {accelerator.device.type}, not {device_type}"),
        (
            (accelerator.distributed_type.value == "DEEPSPEED") == bool(config.deepspeed),
            f"DeepSpeed is {'not ' if config.deepspeed else ''}on, against the configuration",
        ),
    ]
    for right, what in checks:
        if not right:
            raise FinetuneError(f"accelerate set up {what}", "start of training", "report this with the launch command")


def package_versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "accelerate", "peft")}


def _say_start(
    trainer: SFTTrainer, config: RunConfig, world: LaunchWorld, data: Prepared, device_type: str, dtype: str
) -> None:
    """The start event, and on rank 0 the tables."""
    context, parameters = trainer.context, count_parameters(trainer.model)
    summary = plan_summary(trainer.rows, config)
    context.runlog.event(
        "start",
        step=context.start_step,
        total_steps=context.total_steps,
        device_type=device_type,
        world_size=world.world_size,
        dtype=dtype,
        zero_stage=zero_stage(config),
        global_batch_size=config.global_batch_size,
        rows=trainer.rows.execution.describe(),
        plan=asdict(summary),
        parameters=parameters,
        versions=package_versions(),
    )
    if context.resume_from is not None:
        context.runlog.event("resume", step=context.start_step, checkpoint=context.resume_from.name)
        logger.info("going on from %s", context.resume_from.name)
    if not world.is_main:
        return
    for title, samples in (("training data", data.train), ("validation data", data.valid)):
        if samples is not None:
            print_table(title, samples.report.lines())
    sharding = f"ZeRO-{zero_stage(config)}" if config.deepspeed else "DDP" if world.world_size > 1 else "none"
    facts = {
        "steps": f"{context.start_step + 1} to {context.total_steps}, {config.global_batch_size} samples each",
        "processes": f"{world.world_size} on {device_type}, {dtype}, sharding {sharding}",
        "trained parameters": f"{parameters['trainable']:,} of {parameters['total']:,}",
        "rows": trainer.rows.execution.describe(),
    }
    print_table("execution", startup_lines(summary, facts))
