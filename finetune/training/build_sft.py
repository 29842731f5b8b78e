"""From a checked fine-tuning run to a trainer: arguments, DeepSpeed, model, adapter, microbatches,
in that order.

Under DeepSpeed the order is forced (transformers 5.23, DeepSpeed 0.19.8): TrainingArguments
registers the configuration, `deepspeed.init_distributed` makes its process group, and only then
`from_pretrained` partitions what it loads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from finetune.batching.mixing import source_line
from finetune.batching.steps import InOrder, LossGroups, StepBatches
from finetune.config.deepspeed import deepspeed_dict, offloads, zero_stage
from finetune.config.run_config import RunConfig
from finetune.config.schedules import ScheduleSettings, learning_rate_schedule, warmup_count
from finetune.data.dataset import Samples
from finetune.modeling.lora import fuse_lora
from finetune.modeling.loss import ChunkedHead, make_chunked_head
from finetune.modeling.pretrained import DTYPES, add_adapter, count_parameters, load_model
from finetune.planning.inputs import recomputes
from finetune.runtime import device as devices
from finetune.runtime.launch_environment import LaunchWorld
from finetune.training.arguments import training_arguments
from finetune.training.build import (
    AnyTrainer,
    choose_layers,
    make_context,
    make_execution,
    make_trainer,
    plan_summary,
    quiet_known_warnings,
    say_start,
)
from finetune.training.control import RunContext
from finetune.training.operators import load_shared_memory_operator
from finetune.training.prepare_sft import Prepared, token_ids
from finetune.training.resume import Resume
from finetune.training.session import Session
from finetune.training.sft_trainer import SFTTrainer
from finetune.training.state import TrainingState
from finetune.training.trainer import RunTrainer

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
    place = Place(world, session, start, device_type, dtype)
    return build_as(SFTTrainer, config, data, place)


@dataclass(frozen=True)
class Place:
    """Where a run is built: this process, the run's folder, where it starts, and what it computes
    on and in.
    """

    world: LaunchWorld
    session: Session
    start: Resume
    device_type: str
    dtype: str


def build_as(
    trainer_class: type[AnyTrainer],
    config: RunConfig,
    data: Prepared,
    place: Place,
    *,
    batches_class: type[StepBatches] = StepBatches,
    head_class: type[ChunkedHead] = ChunkedHead,
    **own: Any,
) -> AnyTrainer:
    """The trainer of a run that starts from a model and its tokenizer; the process group exists.

    Args:
        own: further arguments of the class.
    """
    arguments = _arguments(config, data, place)
    model, layers = _loaded(config, data, place, arguments.device)
    step_batches, eval_step_batches = _step_batches(config, data, place, batches_class)
    lora = config.finetuning == "lora"
    trainer = make_trainer(
        trainer_class,
        config,
        data,
        place.world,
        place.session,
        model=model,
        arguments=arguments,
        context=_context(config, data, place),
        step_batches=step_batches,
        eval_step_batches=eval_step_batches,
        head=make_chunked_head(model, head_class),
        flat_reduce=lora,
        device_type=place.device_type,
        processing_class=data.tokenizer,
        lora=lora,
        compute_dtype=place.dtype,
        optimizer_name=config.optimizer,
        lora_plus_ratio=config.lora_plus_ratio if lora else None,
        # LoRA's trainable weights are small enough to be saved whole, and peft can then read a
        # checkpoint as it is.
        state_form="whole" if lora else "slices" if zero_stage(config) == 3 else "parts",
        **own,
    )
    _say_start(trainer, config, data, place, layers)
    return trainer


def _arguments(config: RunConfig, data: Prepared, place: Place) -> TrainingArguments:
    device_type, dtype = place.device_type, place.dtype
    quiet_known_warnings()
    devices.use_fast_matmul(device_type)
    # First of all: it registers DeepSpeed's configuration (HfDeepSpeedConfig.__init__: a weak
    # reference, which from_pretrained asks whether to load under zero.Init). Registered later,
    # ZeRO-3 would load the whole model on every rank; that it did not, load_model checks.
    return training_arguments(
        config,
        learning_rate=float(config.learning_rate),  # auto was resolved with the data
        evaluates=config.validates,
        device_type=device_type,
        dtype=dtype,
        total_steps=data.batches.total_steps,
        gradient_checkpointing=recomputes(config, device_type),
        deepspeed=_deepspeed(config, place.world, device_type, dtype),
        resumed=place.start.step > 0,
    )


def _loaded(
    config: RunConfig, data: Prepared, place: Place, device: torch.device
) -> tuple[torch.nn.Module, dict[str, str]]:
    """The model as the run starts or as it was saved, and who computes its layers and its
    attention.
    """
    device_type, dtype = place.device_type, place.dtype
    model = _model(config, device_type, dtype, device, token_ids(config, data.tokenizer))
    fused, attention = choose_layers(
        model, config, config.fused_layers, device_type=device_type, dtype=dtype
    )
    # Before Trainer wraps the model: DeepSpeed copies its float32 masters from these weights (see
    # state.py).
    if place.start.folder is not None:
        TrainingState(model).load_weights(place.start.folder)
    return model, {"fused layers": fused, "attention": attention}


def _deepspeed(
    config: RunConfig, world: LaunchWorld, device_type: str, dtype: str
) -> dict[str, Any] | None:
    if not config.deepspeed:
        return None
    # Adapters stay whole under ZeRO-3 (stage3_param_persistence_threshold): gathering each for
    # every use would cost more in messages than it saves in memory.
    largest = 0
    if config.finetuning == "lora":
        from finetune.modeling.model_config import load_model_config

        text = load_model_config(
            config.model, trust_remote_code=config.trust_remote_code
        ).get_text_config()
        widths = [
            text.hidden_size,
            getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        ]
        largest = config.lora_r * max(widths)
    pin = devices.can_pin(device_type)
    if (
        not pin
        and device_type != "cpu"
        and any(offloads(config.deepspeed, what) for what in ("param", "optimizer"))
    ):
        logger.warning(
            "what is offloaded is not pinned, so copies hold up the device: this process may lock"
            " less than %d MiB. Fix: ulimit -l unlimited (docker run --ulimit memlock=-1)",
            devices.LEAST_LOCKED_BYTES >> 20,
        )
    return deepspeed_dict(
        config, world_size=world.world_size, dtype=dtype, largest_adapter_tensor=largest, pin=pin
    )


def _model(
    config: RunConfig, device_type: str, dtype: str, device: torch.device, token_ids: Sequence[int]
) -> torch.nn.Module:
    if config.deepspeed:
        import deepspeed

        # init_distributed loads it as well, but waits for ever for the lock of a process that was
        # killed meanwhile.
        load_shared_memory_operator()
        # For a CPU run accelerate's PartialState knows torch's group only, and leaves DeepSpeed's
        # wrapper of it unmade; zero.Init, under which the model is loaded, would take the world for
        # one process and partition nothing.
        deepspeed.init_distributed(dist_backend=devices.DEVICE_KINDS[device_type].backend)
    lora = config.finetuning == "lora"
    # Without DeepSpeed, full training keeps float32 weights under autocast: AdamW's updates are
    # lost in 16 bits. DeepSpeed keeps float32 masters itself. LoRA's base is not trained.
    model_dtype = DTYPES[dtype] if lora or config.deepspeed else torch.float32
    model = load_model(
        config,
        model_dtype=model_dtype,
        zero3=zero_stage(config) == 3,
        quantization=config.quantization,
        device=device,
    )
    if not lora:
        return model
    adapted = add_adapter(model, config, one_dtype=bool(config.deepspeed), token_ids=token_ids)
    if config.fused_lora:
        fuse_lora(adapted)
    return adapted


def _context(config: RunConfig, data: Prepared, place: Place) -> RunContext:
    total = data.batches.total_steps
    settings = ScheduleSettings(total, warmup_count(config.warmup_steps, total))
    stages = data.stages

    def stage_name(step: int) -> str:
        return f"stage {data.batches.stage(step) + 1}/{len(stages)}" if len(stages) > 1 else ""

    return make_context(
        data,
        place.world,
        place.start,
        place.session,
        learning_rate_factor=learning_rate_schedule(config.lr_scheduler, settings),
        epochs_per_step=data.batches.global_batch_size / len(data.train),
        stage_name=stage_name,
    )


def _step_batches(
    config: RunConfig, data: Prepared, place: Place, batches_class: type[StepBatches]
) -> tuple[StepBatches, StepBatches | None]:
    execution = make_execution(
        place.world,
        place.session,
        packing=data.packing,
        token_budget=config.tokens_per_microbatch,
        samples_per_microbatch=config.samples_per_microbatch,
    )

    def make(samples: Samples, batches: Any, sources: tuple[str, ...]) -> StepBatches:
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
        valid = make(data.valid, in_order, data.valid_source_names)
    return make(data.train, data.batches, data.source_names), valid


def _say_start(
    trainer: RunTrainer, config: RunConfig, data: Prepared, place: Place, layers: dict[str, str]
) -> None:
    world, parameters, start = (
        place.world,
        count_parameters(trainer.model),
        trainer.context.start_step,
    )
    sharding = (
        f"ZeRO-{zero_stage(config)}"
        if config.deepspeed
        else "DDP"
        if world.world_size > 1
        else "none"
    )
    summary = plan_summary(
        trainer.step_batches,
        token_budget=config.tokens_per_microbatch,
        samples_per_microbatch=config.samples_per_microbatch,
    )
    reports = (("training data", data.train), ("validation data", data.valid))
    tables = {title: samples.report.lines() for title, samples in reports if samples is not None}
    if draws := data.batches.source_draws():
        tables["sources"] = [(source.name, source_line(source)) for source in draws]
    say_start(
        trainer,
        world,
        summary,
        tables=tables,
        facts={
            "steps": (
                f"{start + 1} to {trainer.context.total_steps}, {config.global_batch_size} samples"
                " each"
            ),
            "processes": (
                f"{world.world_size} on {place.device_type}, {place.dtype}, sharding {sharding}"
            ),
            **layers,
            "trained parameters": f"{parameters['trainable']:,} of {parameters['total']:,}",
            "microbatches": trainer.step_batches.execution.describe(),
        },
        dtype=place.dtype,
        fused_layers=layers["fused layers"],
        zero_stage=zero_stage(config),
        global_batch_size=config.global_batch_size,
    )
