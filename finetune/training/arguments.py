"""Settings -> TrainingArguments: the one place where the two meet; and where Trainer calls a run
back.

Trainer, accelerate and DeepSpeed are all told micro-batch 1, accumulation 1: one loader item is one
optimizer step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from finetune.config.base_config import BaseConfig
from finetune.config.deepspeed import offloads
from finetune.runtime.device import DEVICE_KINDS

logger = logging.getLogger("finetune")

REPORTERS = ("tensorboard", "wandb", "swanlab", "trackio")


def reporters(report_to: str | tuple[str, ...]) -> list[str]:
    """Where to report: `auto` is TensorBoard when it is installed."""
    from importlib.util import find_spec

    if report_to == "auto":
        return ["tensorboard"] if find_spec("tensorboard") else []
    return [
        name
        for name in ([report_to] if isinstance(report_to, str) else report_to)
        if name != "none"
    ]


def training_arguments(
    config: BaseConfig,
    *,
    learning_rate: float,
    evaluates: bool,
    device_type: str,
    dtype: str,
    total_steps: int,
    gradient_checkpointing: bool,
    deepspeed: dict[str, Any] | None,
    resumed: bool,
    run_name: str | None = None,
) -> TrainingArguments:
    """Make the arguments; this also creates the process group (TrainingArguments does)."""
    arguments = TrainingArguments(
        output_dir=config.output_dir,
        use_cpu=device_type == "cpu",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=total_steps,
        learning_rate=learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
        # Without clipping the norm is still taken: not finite, it makes the step one that is
        # skipped.
        max_grad_norm=config.max_grad_norm or (0.0 if deepspeed else math.inf),
        optim=_optimizer_name(device_type, deepspeed),
        lr_scheduler_type="constant",  # RunTrainer sets the rates of each step
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        seed=config.seed,
        logging_strategy="steps",
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,  # it would replace a NaN loss by an average in the log
        # At save_steps, and at the last step; a run without save_steps saves at the last only.
        save_strategy="steps",
        save_steps=config.save_steps or total_steps,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=(config.eval_steps or total_steps) if evaluates else None,
        eval_on_start=evaluates and not resumed,
        activation_checkpointing=gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False},
        # Trainer's default for peft models is True: a graph walk per step
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        ddp_timeout=config.timeout_seconds,
        average_tokens_across_devices=False,  # the denominator is the global batch's
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        # TensorBoard is drawn by the run log (storage/curve_file.py).
        report_to=[name for name in reporters(config.report_to) if name != "tensorboard"] or "none",
        run_name=run_name or Path(config.output_dir).name,
        use_cache=True,  # Trainer writes this into the model's config; the forward is told not to
        disable_tqdm=True,
        log_level="warning",
        deepspeed=deepspeed,
    )
    _use_one_device(arguments)
    return arguments


def _optimizer_name(device_type: str, deepspeed: dict[str, Any] | None) -> str:
    # Offloaded, AdamW steps on the CPU, whose fused kernel takes a tenth of the time (20 million
    # parameters, one core: 15 ms instead of 161).
    fused = DEVICE_KINDS[device_type].fused_adamw or offloads(deepspeed, "optimizer")
    return "adamw_torch_fused" if fused else "adamw_torch"


def _use_one_device(arguments: TrainingArguments) -> None:
    """Of several that a process without a launcher sees: Trainer would wrap the model in
    DataParallel, which scatters a microbatch's tensors whatever they mean.
    """
    if arguments.n_gpu > 1:
        logger.warning(
            "this process sees %d devices and trains on one: start it with python -m finetune"
            " launch to use all, or make one visible",
            arguments.n_gpu,
        )
        arguments._n_gpu = 1


class StepEnd(TrainerCallback):
    """Calls the trainer at the end of each step."""

    # A callback, because Trainer has no method there to override; added last, so that it runs after
    # DefaultFlowCallback has decided whether to evaluate, save or stop, and can decide otherwise.

    def __init__(self, end_of_step: Callable[[], None]) -> None:
        self._end_of_step = end_of_step

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_of_step()
