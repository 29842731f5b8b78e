"""Build a pretraining run: model from scratch or continued, rates, schedule, microbatches."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from finetune.batching.steps import InOrder, LossGroups, StepBatches
from finetune.config.fields import DataSource, source_names
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.schedules import ScheduleSettings, learning_rate_schedule, warmup_count
from finetune.data.corpus.windows import JoinedWindows, Windows
from finetune.errors import ConfigError
from finetune.modeling.attention import choose_attention
from finetune.modeling.experts import balance_coefficient
from finetune.modeling.loss import make_chunked_head
from finetune.modeling.pretrained import count_parameters
from finetune.modeling.scratch import make_empty_model, make_model
from finetune.planning.inputs import pretraining_workload
from finetune.planning.shapes import shape_of_config
from finetune.planning.traffic import flops_per_token, matrix_parameters
from finetune.planning.workload import Cluster
from finetune.runtime import device as devices
from finetune.runtime.device import Capabilities
from finetune.runtime.host import keep_freed_memory
from finetune.training.build import load_start_model, make_execution, speed_up
from finetune.training.metrics import ComputeCost
from finetune.training.optimizers import scaled_rates
from finetune.training.pretraining.prepare import PreparedTexts, source_weights
from finetune.training.pretraining.trainer import ContinuedTrainer, PretrainTrainer
from finetune.training.session import Session
from finetune.training.trainer import RunParts, StartReport, training_arguments

logger = logging.getLogger("finetune")


def build_pretraining(config: PretrainConfig, data: PreparedTexts, session: Session) -> RunParts:
    """Fill the parts of a pretraining run; the process group exists."""
    keep_freed_memory(config.device_type)
    able = devices.capabilities(config.device_type)
    execution = make_execution(session, samples_per_microbatch=config.device_batch_size)

    def step_batches(windows: Windows | JoinedWindows, batches: Any) -> StepBatches:
        groups = LossGroups()
        if isinstance(windows, JoinedWindows):
            names = source_names([DataSource(path=path) for path in config.train_data_path])
            groups = LossGroups(sources=names, source_starts=windows.source_starts)
        return StepBatches(
            windows,
            batches,
            execution,
            difficulty_ids=np.broadcast_to(np.int64(-1), (len(windows),)),
            groups=groups,
            pad_token_id=0,
        )

    valid = None
    if data.valid is not None:
        at_a_time = config.device_batch_size * session.world.world_size
        valid = step_batches(data.valid, InOrder(len(data.valid), at_a_time))
    total = data.batches.total_steps
    rates = None
    if config.model is None:
        rates = scaled_rates(
            config,
            width=data.model_config.hidden_size,
            worth_tokens=config.target_param_data_ratio
            * matrix_parameters(make_empty_model(data.model_config)),
            run_tokens=total * config.total_batch_size,
        )
    arguments = training_arguments(
        config,
        data,
        learning_rate=rates.matrix if rates is not None else config.learning_rate or 0.0,
    )
    # What is trained is held in float32, also if it is computed in 16 bits.
    if rates is None:
        model = load_start_model(config, arguments.device)
    else:
        model = _model_from_scratch(config, data)
    cost = _cost(config, data, session.world.world_size, able)
    layers = _speed_up(model, config, able)
    schedule = ScheduleSettings(
        total,
        warmup_count(config.warmup_steps, total),
        warmdown_ratio=config.warmdown_ratio,
        final_fraction=config.final_lr_fraction,
    )
    return RunParts(
        trainer_class=PretrainTrainer if rates is not None else ContinuedTrainer,
        config=config,
        data=data,
        session=session,
        arguments=arguments,
        model=model,
        step_batches=step_batches(data.train, data.batches),
        eval_step_batches=valid,
        learning_rate_factor=learning_rate_schedule(config.lr_scheduler, schedule),
        head=make_chunked_head(model, compiled=layers["compiled"]),
        rates=rates,
        cost=cost,
        layers=layers,
        report=_report,
    )


def _cost(
    config: PretrainConfig, data: PreparedTexts, world_size: int, able: Capabilities
) -> ComputeCost | None:
    """Return what a token costs, as the plan counts it; None if a continued model's sizes cannot be
    read.
    """
    peak = able.peak_flops if config.dtype != "float32" else None
    try:
        shape = shape_of_config(data.model_config.to_dict(), config.model or config.arch)
    except ConfigError as error:
        logger.info("the utilisation of the devices is not counted: %s", error.what)
        return None
    # Adapters cost less than all weights, and of a mixture a token passes some experts only.
    work = pretraining_workload(config, shape, Cluster(device_type="cpu"))
    return ComputeCost(flops_per_token(work), peak, devices=world_size)


def _speed_up(model: torch.nn.Module, config: PretrainConfig, able: Capabilities) -> dict[str, Any]:
    """Compile the model and switch to float8 where configured; return which of these are on, and
    what computes its layers and attention.
    """
    # float8 first: it replaces modules that the compiler would have seen as they were.
    fp8 = _use_fp8(model, config, able)
    # Adapters are computed as functions that the compiler cannot look into, and the balancing loss
    # of a mixture needs what its routers compute.
    compilable = config.finetuning == "full" and not balance_coefficient(model.config)
    compiled = able.compile and compilable if config.compile is None else config.compile
    if compiled:
        # In place (Module.compile): parameter names have no "_orig_mod." in front, and generation
        # can do without.
        model.compile()
    # The compiler fuses them itself, and cannot look into what others have made.
    fused_layers = "off" if compiled and config.fused_layers == "auto" else config.fused_layers
    return {
        "compiled": compiled,
        "fp8": fp8,
        **speed_up(model, config, fused_layers),
    }


def _model_from_scratch(config: PretrainConfig, data: PreparedTexts) -> PreTrainedModel:
    attention = choose_attention(data.model_config) or "sdpa"
    model = make_model(data.model_config, seed=config.seed, attention=attention)
    if data.tokenizer is not None:
        # As Trainer would, with a warning (trainer_utils._align_special_token). The embedding is
        # made already and has no padding_idx; the trainer unsets it again before it saves.
        model.config.pad_token_id = model.generation_config.pad_token_id = (
            data.tokenizer.pad_token_id
        )
    return model


def _use_fp8(model: torch.nn.Module, config: PretrainConfig, able: Capabilities) -> bool:
    """Run the blocks' matrix products in float8 if the device supports it; otherwise warn once."""
    if not config.fp8:
        return False
    if not able.fp8:
        logger.warning("--fp8 is ignored: %s has no float8 matrix products", able.name)
        return False
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            "torchao is not installed", "--fp8", "pip install torchao, or leave --fp8 out"
        ) from error
    # The head stays as it is: its products decide the loss, and softmax amplifies their rounding.
    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name("tensorwise"),
        module_filter_fn=lambda module, name: (
            "lm_head" not in name and all(n % 16 == 0 for n in module.weight.shape)
        ),
    )
    return True


def _report(parts: RunParts) -> StartReport:
    config: Any = parts.config
    data: Any = parts.data
    rates, cost = parts.rates, parts.cost
    able = devices.capabilities(config.device_type)
    parameters = count_parameters(parts.model)
    shape = data.model_config.get_text_config()
    cut = data.train.cut_tokens / max(1, data.train.tokens)
    name = f"{config.model}, continued" if config.model else f"{config.arch}, depth {config.depth}"
    facts = {
        "model": (
            f"{name}: {shape.hidden_size} wide, {shape.num_attention_heads} heads, "
            f"vocabulary {shape.vocab_size:,}, {parameters['total']:,} parameters"
        ),
        "steps": (
            f"{parts.start.step + 1} to {data.batches.total_steps}, "
            f"{config.total_batch_size:,} tokens each "
            f"({config.global_batch_size:,} windows of {config.max_seq_len:,})"
        ),
        "training data": (
            f"{data.train.tokens:,} tokens, {data.passes:.2f} passes, {cut:.1%} of them cut"
        ),
        "processes": (
            f"{parts.session.world.world_size} on {able.name}, {config.dtype}"
            + "".join(f", {name}" for name, used in parts.layers.items() if used is True)
        ),
        "fused layers": parts.layers["fused layers"],
        "attention": parts.layers["attention"],
        "gradient accumulation": (
            f"{config.gradient_accumulation_steps} microbatches of "
            f"{config.device_batch_size} windows"
        ),
    }
    if isinstance(data.train, JoinedWindows):
        weights, passes = source_weights(config, data.train), data.batches.passes().values()
        facts["sources"] = "\n".join(
            f"{path}: {weight / sum(weights):.1%}, {repeated:.2f} passes"
            for path, weight, repeated in zip(config.train_data_path, weights, passes, strict=True)
        )
    if rates is not None:
        facts["learning rates"] = (
            f"matrices {rates.matrix:.3g} ({config.optimizer}), embedding {rates.embedding:.3g}, "
            f"head {rates.head:.3g}; decay {rates.decay:.3g}"
        )
    else:
        facts["trained parameters"] = f"{parameters['trainable']:,} ({config.finetuning})"
        facts["learning rate"] = (
            f"{config.learning_rate:.3g} (adamw); decay {config.weight_decay:.3g}"
        )
    if cost is not None:
        facts["arithmetic"] = f"{cost.flops_per_token / 1e6:,.1f} MFLOP a token"
    event = {
        "fused_layers": parts.layers["fused layers"],
        **{name: parts.layers[name] for name in ("compiled", "fp8", "attention")},
        "global_batch_size": config.global_batch_size,
        "total_batch_size": config.total_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "flops_per_token": None if cost is None else cost.flops_per_token,
        "peak_flops": None if cost is None else cost.peak_flops,
        "passes": data.passes,
    }
    return StartReport(facts, event)
