"""The trainers: transformers.Trainer executing a list of global batches, and fine-tuning's.

Trainer runs the loop (`Trainer._inner_training_loop`), and accelerate handles the devices.
Overridden are:

- where batches come from: one loader item is one optimizer step
- how a step is executed (training/executor.py)
- the loss, and evaluation by the same schedule and sums
- checkpoints (training/checkpointer.py)
- the log (training/metrics.py)

Comments about other packages refer to transformers 5.23, accelerate 1.15 and DeepSpeed 0.19.8.
Their private hooks that are overridden or called here (`_prepare_for_training`, `_get_grad_norm`,
...) are pinned by tests/training/test_trainer_hooks.py.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from finetune.batching.collate import Microbatch
from finetune.batching.steps import Execution, StepBatch, StepBatches, as_is
from finetune.config.base_config import BaseConfig
from finetune.config.deepspeed import offloads, zero_stage
from finetune.errors import ConfigError
from finetune.modeling.adapter import check_adapter_file
from finetune.modeling.experts import MixtureLoss, balance_coefficient, find_experts
from finetune.modeling.loss import ChunkedHead, microbatch_losses, sums_by_group
from finetune.modeling.objective import Objective, TokenLoss
from finetune.modeling.pretrained import DTYPES
from finetune.modeling.quantization import NOTE_NAME, quantization_of
from finetune.runtime.device import DEVICE_KINDS, read_later
from finetune.runtime.parent_watchdog import progress
from finetune.storage.checkpoint_files import step_of
from finetune.storage.run_folder import put_output
from finetune.training.checkpointer import Checkpointer
from finetune.training.executor import StepExecutor, largest_microbatch
from finetune.training.guards import (
    NonFiniteGuard,
    SpikeDetector,
    StepOutcomes,
    StillGuard,
    step_engine,
)
from finetune.training.metrics import (
    METRICS,
    ComputeCost,
    ConsoleProgress,
    Metric,
    StepMeter,
    mean_losses,
)
from finetune.training.optimizers import (
    Rates,
    StepSchedule,
    make_small_optimizer,
    set_apart,
    skip_where,
)
from finetune.training.results import Evaluations
from finetune.training.state import (
    Form,
    TrainingState,
    read_description,
    trainable,
    whole_weights,
    with_saved,
    write_tensors,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.training.prepare import PreparedRun
    from finetune.training.resume import Resume
    from finetune.training.session import Session

logger = logging.getLogger("finetune")


def package_versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "accelerate", "peft")}


@dataclass(frozen=True)
class StartReport:
    """What a kind of run reports at the start, besides what all report.

    Attributes:
        facts: lines of the table about execution.
        event: fields of the start event.
        tables: title -> lines of further tables, which are shown first.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    event: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, list[tuple[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Everything that a trainer is made of. A kind of run fills it; the trainer receives it whole.

    Attributes:
        config: the final settings (training/execute.py).
        arguments: made before the model; see `training_arguments`.
        model: as it is loaded or made, not wrapped yet.
        learning_rate_factor: step (0-based) -> factor on the learning rate.
        step_batches: the training steps on this rank.
        eval_step_batches: the validation batches on this rank; None without validation data.
        head: computes losses chunk by chunk; None if the model has its own way.
        rates: of pretraining from scratch, scaled; None for kinds with one learning rate.
        cost: for the utilization in the log; None if it is not counted.
        layers: who computes the model's layers and attention, and whether it is compiled.
        report: what the start reports.
    """

    trainer_class: type[RunTrainer]
    config: BaseConfig
    data: PreparedRun
    session: Session
    arguments: TrainingArguments
    model: torch.nn.Module
    step_batches: StepBatches
    eval_step_batches: StepBatches | None = None
    learning_rate_factor: Callable[[int], float] = lambda step: 1.0
    head: ChunkedHead | None = None
    rates: Rates | None = None
    cost: ComputeCost | None = None
    layers: Mapping[str, Any] = field(default_factory=dict)
    report: Callable[[RunParts], StartReport] = lambda parts: StartReport()

    @property
    def start(self) -> Resume:
        """Where this start of the run begins."""
        assert self.session.start is not None, "a finished run builds nothing"
        return self.session.start

    @property
    def lora(self) -> bool:
        """Whether an adapter is trained."""
        return getattr(self.config, "finetuning", "full") == "lora"

    @property
    def state_form(self) -> Form:
        """The form of the run's checkpoints (training/state.py)."""
        # LoRA's trainable weights are small enough to be saved whole, and peft can then read a
        # checkpoint as it is.
        if self.lora:
            return "whole"
        return "slices" if zero_stage(self.config) == 3 else "parts"


def reporters(report_to: str | tuple[str, ...]) -> list[str]:
    """Return the experiment trackers: `auto` is TensorBoard if it is installed."""
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
    data: PreparedRun,
    *,
    learning_rate: float,
    deepspeed: dict[str, Any] | None = None,
) -> TrainingArguments:
    """Translate the final settings for Trainer, the one place where the two meet.

    Call it before the model is loaded: TrainingArguments registers DeepSpeed's configuration.
    Trainer, accelerate and DeepSpeed are all given micro-batch 1 and accumulation 1: one loader
    item is one optimizer step.

    Args:
        learning_rate: of a step whose factor is 1; `StepSchedule` sets that of each step.
        deepspeed: its configuration; None without DeepSpeed.
    """
    total_steps = data.batches.total_steps
    evaluates = data.valid is not None
    arguments = TrainingArguments(
        output_dir=config.output_dir,
        use_cpu=config.device_type == "cpu",
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
        optim=_optimizer_name(config.device_type, deepspeed),
        bf16=config.dtype == "bfloat16",
        fp16=config.dtype == "float16",
        seed=config.seed,
        logging_strategy="steps",
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,  # it would replace a NaN loss by an average in the log
        # At save_steps, and at the last step; a run without save_steps saves at the last only.
        save_strategy="steps",
        save_steps=config.save_steps or total_steps,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=(config.eval_steps or total_steps) if evaluates else None,
        activation_checkpointing=config.gradient_checkpointing is True,
        activation_checkpointing_kwargs={"use_reentrant": False},
        # Trainer's default for peft models is True: a graph walk per step
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        ddp_timeout=config.timeout_seconds,
        average_tokens_across_devices=False,  # the denominator is the global batch's
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        # TensorBoard is drawn by the run log (storage/run_log.py, by `make_trainer`).
        report_to=[name for name in reporters(config.report_to) if name != "tensorboard"] or "none",
        run_name=getattr(config, "wandb_run_name", None) or Path(config.output_dir).name,
        use_cache=True,  # Trainer writes this into the model's config; the forward overrides it
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
    """Train on one device if a process without a launcher sees several: Trainer would wrap the
    model in DataParallel, which scatters the tensors of a microbatch regardless of their meaning.
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


class RunTrainer(Trainer):
    """Executes a run. Makes its executor, checkpointer and evaluations of the parts."""

    # Narrower than Trainer's own annotations: there is always a model, and only a tokenizer.
    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase | None
    optimizer: Any  # torch's, then accelerate's wrapper around it, or DeepSpeed's
    lr_scheduler: Any  # a StepSchedule
    metrics: Sequence[Metric] = METRICS  # what a line of the log has
    _batch: StepBatch  # of the step in progress

    def __init__(self, parts: RunParts) -> None:
        self.settings: Any = parts.config  # narrower in each class
        self.session = parts.session
        self.start = parts.start
        batches = parts.data.batches
        self.total_steps: int = batches.total_steps
        self.learning_rate_factor = parts.learning_rate_factor
        self.epochs_per_step = batches.global_batch_size / len(parts.data.train)
        self.evaluations = Evaluations(
            parts.config,
            parts.data,
            self.start,
            output_dir=parts.session.output_dir,
            control=parts.session.control,
            runlog=parts.session.runlog,
        )
        parts.arguments.eval_on_start = self.evaluations.is_due(self.start.step)
        super().__init__(
            model=parts.model,
            args=parts.arguments,
            train_dataset=parts.step_batches,
            eval_dataset=parts.eval_step_batches,
            processing_class=parts.data.tokenizer,
        )
        # Trainer adds the first with disable_tqdm, the second without: both would write over our
        # progress line.
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(StepEnd(self.end_of_step))
        self.step_batches = parts.step_batches
        self.eval_step_batches = parts.eval_step_batches
        self.head = parts.head
        self.lora = parts.lora
        self.state_form = parts.state_form
        self.executor = StepExecutor(
            self.accelerator,
            parts.step_batches,
            self.session.control,
            seed=parts.config.seed,
            head=parts.head,
            flat_reduce=parts.lora,
            largest=largest_microbatch(parts.step_batches),
            objective=self.make_objective(parts),
            on_out_of_memory=self._log_out_of_memory,
        )
        session, world = parts.session, parts.session.world
        self.checkpointer = Checkpointer(
            session.output_dir,
            session.control,
            rank=world.rank,
            world_size=world.world_size,
            local_world_size=world.local_world_size,
            metadata={"identity": parts.data.identity, "versions": package_versions()},
            model_files=self.model_files,
            keep=parts.config.save_total_limit,
            runlog=session.runlog,
            sample_log=session.sample_log,
            last=None if self.start.folder is None else self.start.folder.name,
            verified=self.evaluations.resumed_here,
            best=self.evaluations.facts(),
            behind=parts.config.async_save,
        )
        sums = self.executor.objective.sums(len(parts.step_batches.groups))
        self.meter = StepMeter(parts.step_batches.groups, sums, self.args.device, parts.cost)
        self.guard = NonFiniteGuard()
        self.spikes = SpikeDetector()
        self.outcomes = StepOutcomes()
        self.still = StillGuard()
        self.stopped_by: str | None = None
        self.measured: dict[str, Any] = {}  # by the last line of the log and the last evaluation
        self.console = ConsoleProgress(batches)
        # the step in progress, evaluated when it has to be known
        self._nonfinite: Callable[[], bool] = lambda: False

    def make_objective(self, parts: RunParts) -> Objective:
        """Return what is minimized."""
        coefficient = balance_coefficient(self.model.config)
        is_compiled = parts.layers.get("compiled", False)
        if is_compiled and coefficient:
            raise ConfigError(
                "a compiled model cannot show its router's probabilities, which the balancing loss"
                " of its configuration needs",
                "--compile",
                "leave it out, or set output_router_logits to false in the model's config.json",
            )
        if is_compiled or not find_experts(self.model):
            return TokenLoss()
        objective = MixtureLoss(self.model, coefficient)
        self.metrics = (
            *self.metrics,
            lambda interval: objective.facts(interval.sums, interval.steps),
        )
        return objective

    # ------------------------------------------------------------------ the list of global batches

    def get_train_dataloader(self) -> DataLoader:
        """Steps from the first that is not done."""
        # Trainer's own would be prepared by accelerate, which gives each rank a part of the items
        # and, on resume, reads and drops what is done. Here each item holds this rank's part
        # already, and the sampler begins where it must.
        return DataLoader(
            self.step_batches,
            batch_size=None,
            sampler=self._steps_left(),
            num_workers=self.settings.dataloader_num_workers,
            collate_fn=as_is,
            persistent_workers=False,
        )

    def _steps_left(self) -> Iterator[int]:
        # A generator, as an evaluation before the first of them may say that there are none.
        if not self.evaluations.enough:
            yield from range(self.start.step, self.total_steps)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader
    ) -> tuple[int, int, int, int, int, int, int]:
        """One "epoch" as long as the run."""
        # Trainer's own takes the loader's length for an epoch, and would plan several of them for a
        # resumed run, whose loader holds what is left. Passes over the data are the sampler's
        # matter. A test pins the order of the seven.
        total = self.total_steps
        remaining = max(1, total - self.start.step)
        return 1, remaining, len(self.step_batches.samples), total, 1, remaining, total

    def _init_training_state(self, *arguments: Any) -> tuple[int, int]:
        epochs = super()._init_training_state(*arguments)
        # Here and not later: the loop remembers this number as the step of the last line of the
        # log, and divides the summed loss by the distance to it.
        self.state.global_step = self.start.step
        return epochs

    def get_batch_samples(
        self, epoch_iterator: Iterator[StepBatch], num_batches: int, device: torch.device
    ) -> tuple[list[StepBatch], None]:
        """Trainer's own would also count targets by `labels`; None instead of the number: the batch
        has it.
        """
        with self.meter.waiting_for_data():
            batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        return batches, None

    # ---------------------------------------------------------- optimizer, schedule, restored state

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, DataLoader]:
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        # After super: moments are in the optimizer that it creates and wraps (DeepSpeed: in the
        # engine). Trainer never gets a checkpoint to resume from: it would look for its own files,
        # and unpickle them.
        if self.start.folder is not None:
            self.training_state().load_moments(self.start.folder)
        return prepared

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> StepSchedule:
        """Make the schedule, a function of the step; the optimizer is wrapped by now."""
        self.lr_scheduler = StepSchedule(self.optimizer, self.learning_rate_factor)
        return self.lr_scheduler

    def training_state(self) -> TrainingState:
        return TrainingState(
            self.model,
            engine=self.model_wrapped if self.is_deepspeed_enabled else None,
            optimizer=None if self.is_deepspeed_enabled else self.optimizer.optimizer,
            scaler=None if self.is_deepspeed_enabled else self.accelerator.scaler,
            form=self.state_form,
        )

    # ------------------------------------------------------------------ a step

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of all microbatches of a global batch.

        Args:
            inputs: a `StepBatch`, where Trainer has a dict of tensors.

        Returns:
            this rank's share of the batch's loss times the ranks: Trainer logs the mean over ranks.
        """
        progress.begin_step(self.session.control.timeout_seconds)
        model.train()  # evaluation leaves it in eval mode
        self.lr_scheduler.set(inputs.step)
        self.still.before_step(self.model)
        result = self.executor.run(model, inputs)
        self._batch = inputs
        self.meter.add_step(inputs, result.sums)
        if self.is_deepspeed_enabled:
            skipped = step_engine(model)
            self._nonfinite = lambda: skipped
        return result.loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Return the gradient norm, with or without clipping; where it is not finite the
        optimizer's step is made empty.
        """
        # The last hook before `optimizer.step()`. DeepSpeed has stepped by now, and a skipped step
        # leaves the norm of the step before.
        norm = super()._get_grad_norm(model, grad_norm)
        if self.is_deepspeed_enabled:
            return math.nan if self._nonfinite() else norm
        # else an overflow is the loss scaler at work, which skips by itself
        if self.accelerator.scaler is None:
            found = (~torch.isfinite(norm)).float()
            read = read_later(found)
            self._nonfinite = lambda: bool(read())
            if not skip_where(self.optimizer.optimizer, found) and self._nonfinite():
                # AdamW leaves out parameters without gradient
                self.optimizer.optimizer.zero_grad(set_to_none=True)
        return norm

    def end_of_step(self) -> None:
        """Advance the save in progress, run guards, write the sample log, and agree on a stop."""
        progress.end_step()
        # First: a save that failed for want of room gives back what it has taken before the logs
        # need it.
        self.checkpointer.poll()
        batch, step = self._batch, self.state.global_step
        # the loop's own counts our one "epoch"
        self.state.epoch = step * self.epochs_per_step
        if self.session.sample_log is not None:
            self.session.sample_log.append(step, self._record_ids(batch))
        self.outcomes.add(step, batch, self._nonfinite)
        self.still.after_step(self.model, self._get_learning_rate(), self.session.control.any)
        # Agreed in every step: signals reach ranks at different times, and a rank that saved alone
        # would wait for the others in the checkpoint's collectives.
        stopping = self.session.control.any(self.session.signals.requested)
        # What is logged, evaluated or saved of this step must not come before how it went.
        control = self.control
        control.should_log |= step == self.state.max_steps  # the last loss, at any interval
        due = (
            control.should_log
            or control.should_save
            or control.should_evaluate
            or control.should_training_stop
        )
        for number, trained, skipped in self.outcomes.read(all_of_them=due or stopping):
            self._note_outcome(number, trained, skipped=skipped)
        if stopping:
            self.note_stop()
            self.control.should_save = self.control.should_training_stop = True
            # a batch system gives seconds, not an evaluation's minutes
            self.control.should_evaluate = False

    def note_stop(self) -> None:
        """Log which signal any rank received. Every rank must call it."""
        self.stopped_by = next(
            str(name) for name in self.session.control.gather(self.session.signals.name) if name
        )
        self.session.runlog.event("signal", step=self.state.global_step, name=self.stopped_by)

    def _note_outcome(self, step: int, batch: StepBatch, *, skipped: bool) -> None:
        if not skipped:
            self.guard.fine()
            return
        logger.warning("step %d was skipped: loss or gradients are not finite", step)
        self.session.runlog.event("nonfinite", step=step, ids=self._record_ids(batch))
        self.checkpointer.finish()  # on all ranks alike, and the guard may be about to end the run
        self.guard.skipped(step, self.checkpointer.last)

    def _record_ids(self, batch: StepBatch) -> list[int]:
        return [int(number) for number in self.step_batches.samples.record_ids[batch.indices]]

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # Trainer's own count is 6N even for an adapter; ours is in planning/traffic.py

    def store_flos(self) -> None:
        # Trainer's own gathers that count from all ranks, and waits for the device, at every line
        # of the log
        pass

    # ------------------------------------------------------------------ evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Over all validation targets: sums over microbatches, not means of means."""
        step_batches: Any = self.eval_step_batches if eval_dataset is None else eval_dataset
        with self.meter.paused():
            # No step ends meanwhile, and so nothing would be published for as long as it takes.
            self.checkpointer.finish()
            measured = self.evaluation(step_batches)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(dict(metrics))
        self.evaluations.note(self.state.global_step, metrics, self.control)
        self.checkpointer.best = self.evaluations.facts()
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def evaluation(self, step_batches: StepBatches) -> dict[str, float]:
        """Return the loss of validation batches, overall, per difficulty and per source. Every rank
        must call it.
        """
        groups, total, tokens = step_batches.groups, 0.0, 0
        sums = torch.zeros(len(groups), dtype=torch.float64)
        group_tokens = np.zeros(len(groups), dtype=np.int64)
        for batch, scored in self.scored(step_batches):
            tokens += batch.supervised_tokens
            group_tokens += batch.group_tokens
            for microbatch, losses in scored:
                precise = losses.cpu().double()  # millions of targets are added up
                total += float(precise.sum())
                sums += sums_by_group(precise, microbatch.groups, len(sums))
        total, *of_groups = self.session.control.sum([total, *sums.tolist()])
        return {"loss": total / tokens} | mean_losses(groups, of_groups, group_tokens.tolist())

    def scored(
        self, step_batches: StepBatches
    ) -> Iterator[tuple[StepBatch, Iterator[tuple[Microbatch, torch.Tensor]]]]:
        """Each batch with this rank's microbatches of it and the losses of their targets, without
        gradients.
        """
        # what training calls too (DDP, DeepSpeed's engine), so that both compute alike
        model = self.model_wrapped
        model.eval()
        compiled = self.head is not None and self.head.compiled

        def score(microbatch: Microbatch) -> tuple[Microbatch, torch.Tensor]:
            progress.mark()
            whole = step_batches.filled(microbatch) if compiled else microbatch
            with torch.no_grad():
                losses = microbatch_losses(model, whole, self.args.device, self.head)
            return microbatch, losses[: len(microbatch.targets)]

        for step in range(len(step_batches)):
            batch = step_batches[step]
            yield batch, map(score, batch.microbatches)

    def _sum_over_ranks(self, tensor: torch.Tensor) -> None:
        if self.accelerator.num_processes > 1:
            dist.all_reduce(tensor)

    # ------------------------------------------------------------------ log

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        # Called with a training step's loss, with an evaluation's (from `evaluate`), and once at
        # the end of training with a summary that only the other reporters get.
        step = self.state.global_step
        if "loss" in logs:
            # Trainer subtracts the sum from itself, which after a NaN leaves NaN for good
            self._tr_loss.zero_()
            interval = self.meter.take(self._sum_over_ranks)
            for metric in self.metrics:
                logs.update(metric(interval))
            if self.spikes.is_spike(logs["loss"]):
                logger.warning("step %d: loss %.4f is a spike", step, logs["loss"])
                ids = self._record_ids(self._batch)
                self.session.runlog.event(
                    "spike",
                    step=step,
                    loss=logs["loss"],
                    ids=ids,
                )
            self.still.line(logs["loss"])
            self.session.runlog.step({"step": step, **logs})
            if self.is_world_process_zero():
                self.console.show(step, logs)
        elif "eval_loss" in logs:
            self.session.runlog.event("eval", step=step, **logs)
            facts = (
                f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in logs.items()
            )
            logger.info("step %d  %s", step, "  ".join(facts))
        self.measured.update({} if "train_loss" in logs else {"step": step, **logs})
        super().log(logs, start_time)
        # Trainer keeps every line, which nothing reads: a kilobyte a step for weeks
        self.state.log_history.clear()
        self.session.runlog.curves(step, logs)

    def _log_out_of_memory(self, step: int, old: Execution, new: Execution, error: str) -> None:
        # Evaluation makes no gradients, but the same microbatches: what did not fit would hardly
        # fit there.
        if self.eval_step_batches is not None:
            self.eval_step_batches.execution = new
        logger.warning(
            "step %d ran out of memory (%s): %s -> %s",
            step + 1,
            error,
            old.describe(),
            new.describe(),
        )
        self.session.runlog.event(
            "oom", step=step + 1, error=error, old=old.describe(), new=new.describe()
        )

    # ------------------------------------------------------------------ save

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        # Trainer's own pickles the optimizer, scheduler and random states, and removes old
        # checkpoints before anything has checked the new one.
        with self.meter.paused():
            # The last one is waited for: there is nothing to train meanwhile.
            wait = self.control.should_training_stop
            self.checkpointer.save(self.state.global_step, self.training_state(), wait=wait)

    def model_files(self, weights: Callable[[], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
        """On rank 0: what writes files that make a checkpoint usable as it is, made of the whole
        `weights` by name.
        """
        raise NotImplementedError

    def output_weights(self) -> dict[str, torch.Tensor]:
        """Return the output's weights, whole, on rank 0's CPU. Every rank must call it."""
        raise NotImplementedError

    def write_output(
        self, folder: Path, weights: dict[str, torch.Tensor], saved: Path | None
    ) -> None:
        """On rank 0: write the output and check it.

        Args:
            saved: the checkpoint that the weights are of; None: of the model as it is.
        """
        raise NotImplementedError

    def save_output(self, output_dir: Path, best: Path | None = None) -> None:
        """Put the result into the run folder: written next to it, reopened, then moved in.

        Every rank must call it.

        Args:
            best: the checkpoint that it is made of; None: the weights as they are.
        """
        progress.begin_save(self.session.control.timeout_seconds)
        weights, main = self.output_weights(), self.is_world_process_zero()

        def write_files(folder: Path) -> None:
            self.write_output(folder, weights if best is None else with_saved(best, weights), best)

        write = partial(put_output, output_dir, write_files)
        # The others must not end, and have a launcher tear the run down, while rank 0 writes.
        self.session.control.together(write if main else lambda: None).result()

    def whole_weights(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers on rank 0's CPU, parameters in `dtype` (None: as they are).
        Every rank must call it.
        """
        return whole_weights(self.model, dtype, keep=self.is_world_process_zero())


class SFTTrainer(RunTrainer):
    """Fine-tunes with or without LoRA; the output is a peft adapter or a whole model."""

    processing_class: PreTrainedTokenizerBase  # there is always one

    def __init__(self, parts: RunParts) -> None:
        super().__init__(parts)
        # answers validation prompts and scores the answers; None if none are generated
        self.ask: Callable[..., dict[str, float]] | None = parts.data.ask
        self.own_padding = getattr(self.model.config, "pad_token_id", None)
        if (padding := getattr(self.processing_class, "pad_token_id", None)) is not None:
            # As Trainer would, with a warning about which nothing is to be done
            # (trainer_utils.align_special_tokens).
            for found in (
                self.model.config.get_text_config(),
                getattr(self.model, "generation_config", None),
            ):
                if found is not None:
                    found.pad_token_id = padding

    def evaluation(self, step_batches: StepBatches) -> dict[str, float]:
        """Return the losses and, if answers are generated, the share that is right. Every rank
        must call it.
        """
        found = super().evaluation(step_batches)
        if self.ask is None:
            return found
        execution, control = step_batches.execution, self.session.control
        model: Any = self.model
        longest = int(self.step_batches.samples.lengths.max())
        return found | self.ask(
            self.model_wrapped,
            model.get_base_model() if self.lora else model,
            rank=execution.rank,
            world_size=execution.world_size,
            tokens_at_once=execution.token_budget
            or longest * (execution.samples_per_microbatch or 1),
            gather=control.gather,
            # ZeRO-3 gathers weights in each forward, so all ranks make as many.
            going=control.any if hasattr(next(model.parameters()), "ds_id") else bool,
        )

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        made = self.optimizer is None
        if made and self.settings.optimizer != "adamw":
            decayed = set(self.get_decay_parameter_names(self.model))
            groups: list[dict[str, Any]] = [
                {
                    "params": [
                        p for name, p in trainable(self.model) if (name in decayed) == decays
                    ],
                    "weight_decay": self.args.weight_decay if decays else 0.0,
                }
                for decays in (True, False)
            ]
            self.optimizer = make_small_optimizer(
                self.settings.optimizer, self.model, groups, self.args
            )
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        # LoRA+: the B matrices at a multiple of the rate (Hayou et al. 2024, arXiv:2402.12354).
        ratio = getattr(self.settings, "lora_plus_ratio", None) if self.lora else None
        if made and ratio is not None:
            ups = {
                id(parameter)
                for name, parameter in self.model.named_parameters()
                if "lora_B" in name
            }
            set_apart(optimizer, ups, ratio)
        return optimizer

    def model_files(self, weights: Callable[[], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
        """Write the adapter as peft reads it, and the tokenizer: a LoRA run's checkpoint is a
        complete adapter folder.
        """
        write_model = self._adapter_files(weights()) if self.lora else None

        def write(folder: Path) -> None:
            if write_model is not None:
                write_model(folder)
            self.processing_class.save_pretrained(folder)

        return write

    def _adapter_files(
        self, weights: dict[str, torch.Tensor], saved: Path | None = None
    ) -> Callable[[Path], None]:
        """Return what writes and checks an adapter.

        Args:
            saved: the checkpoint that the weights are of; None: of the model as it is.
        """
        write, shapes = adapter_writer(self.model, weights), adapter_shapes(self.model)
        if saved is None:
            step, taken = self.state.global_step, self.training_state().optimizer_step()
        else:
            step, taken = step_of(saved.name) or 0, read_description(saved)["optimizer_step"]
        # It has learned if steps were taken, and not skipped, at a learning rate above zero (a
        # warm-up's first has none).
        idle = sum(self.learning_rate_factor(number) == 0 for number in range(min(step, 10_000)))

        def write_and_check(folder: Path) -> None:
            write(folder)
            check_adapter_file(folder, shapes, trained=bool(taken > idle))

        return write_and_check

    def output_weights(self) -> dict[str, torch.Tensor]:
        """Float32 masters of an adapter; a whole model in the compute dtype."""
        if self.lora:
            return self.training_state().collect_weights(keep=self.is_world_process_zero())
        return self.whole_weights(DTYPES["bfloat16"] if self.settings.dtype == "bfloat16" else None)

    def write_output(
        self, folder: Path, weights: dict[str, torch.Tensor], saved: Path | None
    ) -> None:
        if self.lora:
            self._adapter_files(weights, saved)(folder)
        else:
            # Trainer has copied the tokenizer's pad token there, where it would become a
            # padding_idx: an embedding that does not train in a run from this model. And it may be
            # the token that ends answers.
            self.model.config.pad_token_id = self.own_padding
            self.model.save_pretrained(folder, state_dict=weights)
            # save_pretrained names the dtype of the model in memory.
            path = folder / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            config["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
            content = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            path.write_text(content, encoding="utf-8")
        self.processing_class.save_pretrained(folder)


def adapter_writer(model: Any, weights: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    """Return a function that writes an adapter's files into a folder, without reading the model.

    They are adapter_config.json and adapter_model.safetensors, and of a quantised base what it was
    held in.

    Args:
        model: a peft model.
        weights: its trainable ones, by parameter name.
    """
    from peft import get_peft_model_state_dict

    lora = copy.copy(model.peft_config["default"])
    # As PeftModel.save_pretrained does: an adapter is frozen when it is loaded, unless the loader
    # asks to train it.
    lora.inference_mode = True
    # Not PeftModel.save_pretrained: it takes the tensors from the model, and under ZeRO-3 those are
    # empty there.
    adapter = get_peft_model_state_dict(model, state_dict=_under_all_names(model, weights))
    quantization = quantization_of(model)

    def write(folder: Path) -> None:
        lora.save_pretrained(folder)
        if quantization != "none":
            (folder / NOTE_NAME).write_text(
                json.dumps({"quantization": quantization}) + "\n", encoding="utf-8"
            )
        write_tensors(
            folder / "adapter_model.safetensors",
            {name: tensor.contiguous() for name, tensor in adapter.items()},
        )

    return write


def adapter_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return what a complete adapter file holds: for every trained parameter, its name there and
    its whole shape.
    """
    from peft import get_peft_model_state_dict

    empty = {
        name: torch.empty(getattr(parameter, "ds_shape", parameter.shape), device="meta")
        for name, parameter in trainable(model)
    }
    adapter = get_peft_model_state_dict(model, state_dict=_under_all_names(model, empty))
    return {name: tuple(tensor.shape) for name, tensor in adapter.items()}


def _under_all_names(
    model: torch.nn.Module, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Trained weights under each of their names, as peft looks for them: tied modules have one
    weight.
    """
    names = {id(parameter): name for name, parameter in trainable(model)}
    every = model.named_parameters(remove_duplicate=False)
    return {
        name: weights[names[id(parameter)]] for name, parameter in every if id(parameter) in names
    }
