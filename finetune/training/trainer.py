"""RunTrainer: transformers.Trainer executing a list of global batches.

Trainer keeps the loop, accelerate the devices. Overridden are: where batches come from (one loader item is one
optimizer step), how a step is executed (training/executor.py), the loss, evaluation by the same plan and sums,
checkpoints (training/checkpointer.py), and what is logged. Private hooks that are overridden or called
(`_init_training_state`, `_prepare_for_training`, `_save_checkpoint`, `_get_grad_norm`, `_tr_loss`) are pinned by
tests/training/test_trainer_hooks.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from finetune.data.collate import Microbatch
from finetune.data.steps import StepBatch, StepBatches
from finetune.modeling.loss import ChunkedHead, microbatch_losses
from finetune.storage.durable_files import put_output
from finetune.storage.run_folder import SampleLog
from finetune.storage.run_log import RunLog
from finetune.training.checkpointer import Checkpointer
from finetune.training.control import Control, StopSignals
from finetune.training.difficulty_losses import DifficultyLosses
from finetune.training.executor import StepExecutor
from finetune.training.guards import NonFiniteGuard, SpikeDetector
from finetune.training.progress import Measured, ProgressLine, StepMeter
from finetune.training.state import TrainingState, whole_weights

logger = logging.getLogger("finetune")


@dataclass
class RunContext:
    """What a run has beside model and data; the same object on every rank, with rank 0's files on rank 0 only.

    Attributes:
        total_steps: optimizer steps of the whole run.
        resume_from: checkpoint folder that the run goes on from; None at its start.
        start_step: steps done there.
        difficulty_names: of the schedule; empty where samples have no difficulties.
        stage_name: step (0-based) -> name of the curriculum stage, for people; "" for none.
        learning_rate_factor: step (0-based) -> factor on the learning rate.
        epochs_per_step: passes over the data in one step.
    """

    total_steps: int
    resume_from: Path | None
    start_step: int
    difficulty_names: tuple[str, ...]
    stage_name: Callable[[int], str]
    learning_rate_factor: Callable[[int], float]
    epochs_per_step: float
    control: Control
    signals: StopSignals
    runlog: RunLog
    sample_log: SampleLog | None


class RunTrainer(Trainer):
    """Executes a run.

    Args:
        microbatches: the training steps on this rank.
        eval_step_batches: the validation batches on this rank; None without validation data.
        context: see `RunContext`.
        executor: makes the step executor once accelerate is there.
        sliced_state: full-parameter ZeRO-3, whose checkpoints are slices.
        num_workers: loader processes.
    """

    def __init__(
        self,
        *,
        step_batches: StepBatches,
        eval_step_batches: StepBatches | None,
        context: RunContext,
        executor: Callable[..., StepExecutor],
        head: ChunkedHead | None,
        sliced_state: bool,
        num_workers: int,
        **trainer_arguments: Any,
    ) -> None:
        super().__init__(train_dataset=step_batches, eval_dataset=eval_step_batches, **trainer_arguments)
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(_StepEnd(self))
        self.step_batches, self.eval_step_batches, self.context = step_batches, eval_step_batches, context
        self.head, self.sliced_state, self.num_workers = head, sliced_state, num_workers
        self.executor = executor(self.accelerator)
        self.executor.on_out_of_memory = self._log_out_of_memory
        self.meter = StepMeter()
        self.guard, self.spikes = NonFiniteGuard(), SpikeDetector()
        self.checkpointer: Checkpointer | None = None
        self.last_checkpoint = None if context.resume_from is None else context.resume_from.name
        self.stopped_by: str | None = None
        self.history: list[dict[str, Any]] = []
        self._progress: ProgressLine | None = None
        self._batch: StepBatch | None = None
        self._nonfinite = False
        self._difficulty_losses = DifficultyLosses(context.difficulty_names, self.args.device)

    # ------------------------------------------------------------------ the list of global batches

    def get_train_dataloader(self) -> DataLoader:
        """Steps from the first that is not done. Not prepared by accelerate: it would shard or skip what is exact."""
        return DataLoader(
            self.step_batches,
            batch_size=None,
            sampler=range(self.context.start_step, self.context.total_steps),
            num_workers=self.num_workers,
            collate_fn=_as_is,
            persistent_workers=False,
        )

    def set_initial_training_values(self, args, dataloader) -> tuple[int, int, int, int, int, int, int]:
        """One "epoch" as long as the run: epochs proper are a matter of the sampler."""
        total, remaining = self.context.total_steps, self.context.total_steps - self.context.start_step
        return 1, max(1, remaining), len(self.step_batches.samples), total, 1, max(1, remaining), total

    def _init_training_state(self, *arguments: Any) -> tuple[int, int]:
        epochs = super()._init_training_state(*arguments)
        self.state.global_step = self.context.start_step
        return epochs

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        with self.meter.waiting_for_data():
            batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        return batches, None

    # ------------------------------------------------------------------ optimizer, schedule, restored state

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """The schedule is a function of the step, so a resumed run starts it at its own step and restores nothing."""
        if self.lr_scheduler is None:
            start, factor = self.context.start_step, self.context.learning_rate_factor
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer, lambda step: factor(start + step)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.context.resume_from is not None:
            self.training_state().load_moments(self.context.resume_from)
        return prepared

    def training_state(self) -> TrainingState:
        return TrainingState(
            self.model,
            engine=self.model_wrapped if self.is_deepspeed_enabled else None,
            optimizer=None if self.is_deepspeed_enabled else self.optimizer.optimizer,
            sliced=self.sliced_state,
        )

    # ------------------------------------------------------------------ a step

    def training_step(self, model: torch.nn.Module, inputs: StepBatch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of all microbatches of a global batch; returns its loss (this rank's share times the ranks)."""
        model.train()
        result = self.executor.run(model, inputs)
        self._batch = inputs
        self._difficulty_losses.add(result.difficulty_losses, inputs.difficulty_tokens)
        if self.is_deepspeed_enabled:
            self._step_engine(model)
        return result.loss

    def _step_engine(self, engine: Any) -> None:
        """DeepSpeed's step, unless gradients are not finite.

        ZeRO-1/2 and float16 look for themselves; ZeRO-3 in float32 and bfloat16 would take NaN into the weights.
        """
        zero = engine.optimizer
        if hasattr(zero, "_overflow_clean_up") and not engine.fp16_enabled() and zero.has_overflow():
            zero._overflow_clean_up(zero.loss_scale)
            self._nonfinite = True
            return
        engine.step()
        self._nonfinite = bool(zero.overflow) and not engine.fp16_enabled()

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm, with or without clipping; where it is not finite the optimizer's step is made empty."""
        norm = super()._get_grad_norm(model, grad_norm)
        if self.is_deepspeed_enabled:
            return math.nan if self._nonfinite else norm
        self._nonfinite = not math.isfinite(float(norm))
        if self._nonfinite and self.accelerator.scaler is None:  # float16's scaler skips the step by itself
            self.optimizer.optimizer.zero_grad(set_to_none=True)  # AdamW passes over parameters without gradient
        return norm

    def end_of_step(self) -> None:
        """After the optimizer's step: guards, sample log, agreement on a stop."""
        batch, step = self._batch, self.state.global_step
        self.state.epoch = step * self.context.epochs_per_step
        self.meter.add_step(tokens=batch.tokens, samples=len(batch.indices))
        if self.context.sample_log is not None:
            self.context.sample_log.append(step, self._record_ids(batch))
        if self._nonfinite:
            logger.warning("step %d was skipped: loss or gradients are not finite", step)
            self.context.runlog.event("nonfinite", step=step, ids=self._record_ids(batch))
            self.guard.skipped(step, self.last_checkpoint)
        else:
            self.guard.fine()
        if self.context.control.any(self.context.signals.requested):
            names = self.context.control.gather(self.context.signals.name)
            self.stopped_by = next(str(name) for name in names if name)
            self.context.runlog.event("signal", step=step, name=self.stopped_by)
            self.control.should_save = self.control.should_training_stop = True
            self.control.should_evaluate = False

    def _record_ids(self, batch: StepBatch) -> list[int]:
        return [int(microbatch) for microbatch in self.step_batches.samples.record_ids[batch.indices]]

    def floating_point_ops(self, inputs: StepBatch) -> int:
        return 0  # Trainer's own count is 6N whatever is trained; ours is in planning/flops.py

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Over all validation targets: sums over a plan, not means of means."""
        with self.meter.paused():
            measured = self.evaluation(self.eval_step_batches if eval_dataset is None else eval_dataset)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluation(self, step_batches: StepBatches) -> dict[str, float]:
        """The loss of validation batches, overall and per difficulty. Every rank calls."""
        difficulties = step_batches.difficulties
        sums = torch.zeros(difficulties + 1, device=self.args.device)
        tokens, difficulty_tokens = 0, torch.zeros(difficulties, dtype=torch.int64)
        for batch, scored in self.scored(step_batches):
            tokens += batch.supervised_tokens
            difficulty_tokens += torch.from_numpy(batch.difficulty_tokens)
            for microbatch, losses in scored:
                sums.index_add_(0, microbatch.difficulties.to(self.args.device) % (difficulties + 1), losses)
        self._sum_over_ranks(sums)
        metrics = {"loss": float(sums.sum()) / tokens}
        for name, loss, count in zip(
            self.context.difficulty_names, sums.tolist(), difficulty_tokens.tolist(), strict=False
        ):
            if count:
                metrics[f"loss/{name}"] = loss / count
        return metrics

    def scored(
        self, step_batches: StepBatches
    ) -> Iterator[tuple[StepBatch, Iterator[tuple[Microbatch, torch.Tensor]]]]:
        """Each batch with this rank's microbatches of it and the losses of their targets, without gradients."""
        model = self.model_wrapped
        model.eval()

        def score(microbatch: Microbatch) -> tuple[Microbatch, torch.Tensor]:
            with torch.no_grad():
                return microbatch, microbatch_losses(model, microbatch, self.args.device, self.head)

        for step in range(len(step_batches)):
            batch = step_batches[step]
            yield batch, map(score, batch.microbatches)

    def _sum_over_ranks(self, tensor: torch.Tensor) -> None:
        if self.accelerator.num_processes > 1:
            dist.all_reduce(tensor)

    # ------------------------------------------------------------------ log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self._tr_loss.zero_()  # Trainer subtracts the sum from itself, which after a NaN leaves NaN for good
            self._add_step_facts(logs)
            record = {"step": self.state.global_step, **logs}
            self.context.runlog.step(record)
            self.history.append(record)
            self._show(logs)
        elif "eval_loss" in logs:
            self.context.runlog.event("eval", step=self.state.global_step, **logs)
            self.history.append({"step": self.state.global_step, **logs})
            logger.info("step %d  %s", self.state.global_step, "  ".join(f"{k} {v:.4f}" for k, v in logs.items()))
        super().log(logs, start_time)

    def _add_step_facts(self, logs: dict[str, float]) -> None:
        measured = self.meter.take()
        logs.update(measured.facts())
        logs.update(self.speed_facts(measured))
        logs.update(self._difficulty_losses.take(self._sum_over_ranks))
        if self.spikes.is_spike(logs["loss"]):
            ids = self._record_ids(self._batch)
            logger.warning("step %d: loss %.4f is a spike", self.state.global_step, logs["loss"])
            self.context.runlog.event("spike", step=self.state.global_step, loss=logs["loss"], ids=ids)

    def speed_facts(self, measured: Measured) -> dict[str, float]:
        """More facts for a line of the log, from what was measured since the last one."""
        return {}

    def line_facts(self, logs: dict[str, float]) -> str:
        """More facts for the line that people see."""
        return ""

    def _show(self, logs: dict[str, float]) -> None:
        if not self.is_world_process_zero():
            return
        step = self.state.global_step
        if self._progress is None:
            self._progress = ProgressLine(self.context.total_steps, step)
        self._progress.update(
            step,
            stage=self.context.stage_name(step - 1),
            loss=logs["loss"],
            tokens_per_second=logs["tokens_per_second"],
            more=self.line_facts(logs),
            eta_seconds=(self.context.total_steps - step) * logs["step_seconds"],
        )

    def close_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()

    def _log_out_of_memory(self, step: int, old, new, error: str) -> None:
        if self.eval_step_batches is not None:
            self.eval_step_batches.execution = new
        logger.warning("step %d ran out of memory (%s): %s -> %s", step + 1, error, old.describe(), new.describe())
        self.context.runlog.event("oom", step=step + 1, error=error, old=old.describe(), new=new.describe())

    # ------------------------------------------------------------------ save

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        with self.meter.paused():
            self.last_checkpoint = self.checkpointer.save(self.state.global_step, self.training_state())
        logger.info("saved %s", self.last_checkpoint)

    def write_model_files(self, folder: Path, state_folder: Path) -> None:
        """On rank 0: what makes a checkpoint usable as it is, into `folder`; the saved state is in `state_folder`."""
        raise NotImplementedError

    def output_weights(self) -> dict[str, torch.Tensor]:
        """The weights that the output is made of, whole, on rank 0's CPU. Every rank calls."""
        raise NotImplementedError

    def write_output(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """On rank 0: write the output and check it."""
        raise NotImplementedError

    def save_output(self, output_dir: Path) -> None:
        """Put the result into the run folder: written beside, reopened, then moved in. Every rank calls."""
        weights = self.output_weights()
        if self.is_world_process_zero():
            put_output(output_dir, lambda folder: self.write_output(folder, weights))
        self.context.control.barrier()

    def whole_weights(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers on rank 0's CPU, parameters in `dtype` (None: as they are). Every rank calls."""
        return whole_weights(self.model, dtype, keep=self.is_world_process_zero())


class _StepEnd(TrainerCallback):
    """Calls the trainer at the end of each step; callbacks added last run last, after Trainer's own flow decided."""

    def __init__(self, trainer: RunTrainer) -> None:
        self._end_of_step = trainer.end_of_step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._end_of_step()


def _as_is(item: StepBatch) -> StepBatch:
    return item
