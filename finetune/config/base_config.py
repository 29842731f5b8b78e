"""The settings that every type of run has: output, optimizer, device, saving, evaluation and log.

The classes of settings are pure: they read no file and no environment variable and import no torch.
They alone decide which values are allowed; `resolution` combines files, flags and DeepSpeed's keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from finetune.config.fields import (
    NpuTuning,
    Positive,
    Problem,
    Recompute,
    Reporters,
    Rule,
    Settings,
    Text,
    Warmup,
    batch_setting,
    data_setting,
    device_setting,
    flag,
    logging_setting,
    optimizer_setting,
    preparation_setting,
    saving_setting,
)
from finetune.config.schedules import PretrainingScheduleName, described
from finetune.runtime.device import DeviceType
from finetune.runtime.launch_environment import npu_variables


class BaseConfig(Settings):
    """The settings that fine-tuning and pretraining share; a subclass adds its own.

    Attributes:
        rules: resolve settings that depend on one another.
        machine_fields: settings that follow from the number of processes: resolved for this
            machine, never written to run.yaml.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()
    machine_fields: ClassVar[frozenset[str]] = frozenset()

    output_dir: Text = data_setting(
        ..., "Folder that receives everything the run writes.", unit="folder"
    )
    warmup_steps: Warmup = optimizer_setting(
        0.03, "Linear warm-up; below 1 it is a fraction of the steps.", unit="steps"
    )
    weight_decay: float = optimizer_setting(0.0, "Decoupled weight decay of AdamW.", ge=0)
    max_grad_norm: float = optimizer_setting(
        1.0, "Gradients are clipped to this norm; 0 turns clipping off.", ge=0
    )
    adam_beta1: float = optimizer_setting(0.9, "AdamW's decay of the first moment.", ge=0, lt=1)
    adam_beta2: float = optimizer_setting(0.999, "AdamW's decay of the second moment.", ge=0, lt=1)
    adam_epsilon: float = optimizer_setting(1e-8, "AdamW's term against division by zero.", gt=0)
    lr_scheduler: PretrainingScheduleName = optimizer_setting(
        "cosine", f"Learning rate after the warm-up. {described(pretraining=True)}."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = device_setting(
        "auto", "Number format of the forward pass; auto takes the device's best."
    )
    device_type: DeviceType = device_setting(
        "auto", "Device; auto takes the first there is of npu, cuda, mps, cpu."
    )
    gradient_checkpointing: Recompute = device_setting(
        "auto",
        "Recompute activations in the backward pass instead of keeping them; auto by the memory"
        " there is.",
    )
    npu_tuning: NpuTuning = device_setting(
        "none",
        "Against a host that is too slow for its NPUs: core-binding (CPU_AFFINITY_CONF=2),"
        " task-queue (TASK_QUEUE_ENABLE=2, which may need more memory).",
        min_length=1,
        unit="none|core-binding,task-queue",
    )
    hccl_buffer_mb: Positive | None = device_setting(
        None,
        "Size of the two buffers of an HCCL communicator (HCCL_BUFFSIZE).",
        unit="MB",
        shown_default="HCCL's, 200",
    )
    fused_layers: Literal["auto", "off", "liger", "compile", "npu"] = device_setting(
        "auto",
        "Who computes RMSNorm, rotary position embedding and SwiGLU; auto takes liger-kernel or"
        " torch.compile on CUDA, torch_npu on NPU, and what does not agree with torch's own at the"
        " start is not used.",
    )
    timeout_seconds: int = device_setting(
        1800, "Longest wait for another process before giving up.", ge=1, unit="seconds"
    )
    deepspeed: dict[str, Any] | None = device_setting(
        None,
        "DeepSpeed's own keys; where one of its numbers is also ours it says auto, and ours"
        " counts.",
    )
    seed: int = batch_setting(42, "Seed of everything but the curriculum.", ge=0, lt=2**32)
    save_steps: int = saving_setting(
        100, "Steps between checkpoints; 0: only the last step.", ge=0, unit="steps"
    )
    save_total_limit: int = saving_setting(
        2, "Newest checkpoints to keep, at least 2.", ge=2, unit="checkpoints"
    )
    keep_best: bool = saving_setting(
        False, "Keep the checkpoint with the best validation value, and take the result from it."
    )
    async_save: bool = saving_setting(
        True,
        "Write checkpoints while training goes on, from a copy in host memory; the last one at"
        " once.",
    )
    resume: Text = saving_setting(
        "auto",
        "auto continues the run in output_dir, never starts anew, FOLDER continues that"
        " checkpoint.",
        unit="auto|never|FOLDER",
    )
    allow_data_change: bool = saving_setting(
        False, "Resume even if the data, schedule or tokenizer changed."
    )
    eval_steps: int = logging_setting(
        0,
        "Steps between evaluations; 0 evaluates before the first and after the last step only.",
        ge=0,
        unit="steps",
    )
    early_stopping: int = logging_setting(
        0,
        "End the run after so many evaluations without a better one; 0: never.",
        ge=0,
        unit="evaluations",
    )
    logging_steps: int = logging_setting(
        1, "Steps between lines of the training log.", ge=1, unit="steps"
    )
    report_to: Reporters = logging_setting(
        "auto",
        "Trackers beside the run's own log; auto takes TensorBoard where it is installed.",
        min_length=1,
    )
    log_samples: bool = logging_setting(
        False, "Write the record ids of every step to samples.jsonl."
    )
    dataloader_num_workers: int = preparation_setting(
        0, "Processes that prepare microbatches ahead.", ge=0, unit="processes"
    )
    preprocessing_num_workers: Positive | None = preparation_setting(
        None,
        "Processes that tokenize before the run.",
        unit="processes",
        shown_default="by the number of cores",
    )
    cache_dir: Text | None = preparation_setting(
        None, "Folder for tokenized data.", unit="folder", shown_default="~/.cache/finetune/samples"
    )

    @property
    def base_model(self) -> str | None:
        """Folder or hub name of the model whose weights the run starts from; None if it creates its
        own.
        """
        return None

    @property
    def trains_all_weights(self) -> bool:
        """Whether every weight is trained, so that each has gradients and moments and is in every
        checkpoint.
        """
        return True

    @property
    def validates(self) -> bool:
        """Whether there is data to evaluate on."""
        raise AttributeError(f"{type(self).__name__} does not say whether it has validation data")

    @property
    def followed_metric(self) -> str:
        """The metric that decides which evaluation is the best, by its name in the log."""
        return "eval_loss"

    @property
    def metrics(self) -> dict[str, bool]:
        """Metrics that can decide the best evaluation: name -> whether higher is better."""
        return {"loss": False}

    @property
    def npu_variables(self) -> dict[str, tuple[str, str]]:
        """Environment variables that the run asks for on NPUs: name -> (value, why)."""
        return npu_variables(
            () if self.npu_tuning == "none" else self.npu_tuning, self.hccl_buffer_mb
        )

    @property
    def tokens_per_step(self) -> int:
        """Maximum tokens of an optimizer step, over all devices."""
        raise AttributeError(f"{type(self).__name__} does not say how many tokens a step has")

    @property
    def tokens_per_microbatch(self) -> int:
        """Maximum tokens that one device holds at a time."""
        raise AttributeError(f"{type(self).__name__} does not say how many tokens a microbatch has")

    def describe_batch(self, world_size: int) -> tuple[str, dict[str, int]]:
        """Return how a global batch is split over the processes: a description, and its numbers."""
        raise AttributeError(f"{type(self).__name__} does not describe its batch")

    def problems(self) -> Iterator[Problem]:
        if self.report_to != "auto" and "none" in self.report_to and len(self.report_to) > 1:
            yield f"report_to is {', '.join(self.report_to)}", "give none alone, or leave it out"
        zero = (self.deepspeed or {}).get("zero_optimization") or {}
        if self.deepspeed and isinstance(zero, dict) and not zero.get("stage"):
            yield (
                "deepspeed has no ZeRO stage, and finetune uses DeepSpeed for ZeRO",
                "set zero_optimization.stage to 1, 2 or 3, or train without DeepSpeed (--deepspeed"
                " none)",
            )
        for name in ("keep_best", "early_stopping"):
            given = getattr(self, name)
            if given and not self.validates:
                what = f"{name} is {str(given).lower()}, and there is no validation data"
                yield what, f"give validation data, or leave {flag(name)} out"
            elif given and not self.eval_steps:
                yield (
                    f"{name} is {str(given).lower()}, and eval_steps 0 evaluates at the beginning"
                    " and the end only",
                    "set --eval-steps to a number of steps below the run's",
                )
