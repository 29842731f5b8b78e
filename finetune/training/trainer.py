"""RunTrainer: transformers.Trainer executing a list of global batches.

Trainer keeps the loop (`Trainer._inner_training_loop`), accelerate the devices. Overridden are:
where batches come from (one loader item is one optimizer step), how a step is executed
(training/executor.py), the loss, evaluation by the same schedule and sums, checkpoints
(training/checkpointer.py), and the log (training/metrics.py). What the comments say of others is of
transformers 5.23, accelerate 1.15 and DeepSpeed 0.19.8. Their private hooks that are overridden or
called here (`_prepare_for_training`, `_get_grad_norm`, ...) are pinned by
tests/training/test_trainer_hooks.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from finetune.batching.collate import Microbatch
from finetune.batching.steps import Execution, StepBatch, StepBatches, as_is
from finetune.modeling.loss import ChunkedHead, microbatch_losses, sums_by_group
from finetune.runtime.device import read_later
from finetune.runtime.parent_watchdog import progress
from finetune.storage.run_folder import put_output
from finetune.training.arguments import StepEnd
from finetune.training.checkpointer import Checkpointer
from finetune.training.control import RunContext
from finetune.training.executor import StepExecutor
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
    line_facts,
    mean_losses,
)
from finetune.training.optimizers import skip_where
from finetune.training.results import Evaluations
from finetune.training.state import Form, TrainingState, whole_weights, with_saved

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("finetune")


class RunTrainer(Trainer):
    """Executes a run.

    Args:
        step_batches: the training steps on this rank.
        eval_step_batches: the validation batches on this rank; None without validation data.
        make_executor: makes the step executor once accelerate is there.
        state_form: of its checkpoints (training/state.py).
        num_workers: loader processes.
        cost: for the utilisation in the log; None where it is not counted.
    """

    # Narrower than Trainer's own annotations: there is always a model, and never an image
    # processor.
    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase | None
    optimizer: Any  # torch's, then accelerate's wrapper around it, or DeepSpeed's
    checkpointer: Checkpointer  # given once the model is known, as the next (build.make_trainer)
    evaluations: Evaluations
    metrics: Sequence[Metric] = METRICS  # what a line of the log has
    _batch: StepBatch  # of the step under way
    _learning_rate: float  # of its first group

    def __init__(
        self,
        *,
        step_batches: StepBatches,
        eval_step_batches: StepBatches | None,
        context: RunContext,
        make_executor: Callable[[Accelerator], StepExecutor],
        head: ChunkedHead | None,
        state_form: Form,
        num_workers: int,
        cost: ComputeCost | None = None,
        **trainer_arguments: Any,
    ) -> None:
        super().__init__(
            train_dataset=step_batches, eval_dataset=eval_step_batches, **trainer_arguments
        )
        # Trainer adds the first with disable_tqdm, the second without: both would write over our
        # progress line.
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(StepEnd(self.end_of_step))
        self.step_batches = step_batches
        self.eval_step_batches = eval_step_batches
        self.context = context
        self.head = head
        self.state_form = state_form
        self.num_workers = num_workers
        self.executor = make_executor(self.accelerator)
        self.executor.on_out_of_memory = self._log_out_of_memory
        sums = self.executor.objective.sums(len(step_batches.groups))
        self.meter = StepMeter(step_batches.groups, sums, self.args.device, cost)
        self.guard = NonFiniteGuard()
        self.spikes = SpikeDetector()
        self.outcomes = StepOutcomes()
        self.still = StillGuard()
        self.stopped_by: str | None = None
        self.measured: dict[str, Any] = {}  # by the last line of the log and the last evaluation
        self.console = ConsoleProgress(context)
        # the step under way, asked when it has to be known
        self._nonfinite: Callable[[], bool] = lambda: False

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
            num_workers=self.num_workers,
            collate_fn=as_is,
            persistent_workers=False,
        )

    def _steps_left(self) -> Iterator[int]:
        # A generator, as an evaluation before the first of them may say that there are none.
        if not self.evaluations.enough:
            yield from range(self.context.start_step, self.context.total_steps)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader
    ) -> tuple[int, int, int, int, int, int, int]:
        """One "epoch" as long as the run."""
        # Trainer's own takes the loader's length for an epoch, and would plan several of them for a
        # resumed run, whose loader holds what is left. Passes over the data are the sampler's
        # matter. A test pins the order of the seven.
        total, remaining = (
            self.context.total_steps,
            self.context.total_steps - self.context.start_step,
        )
        return (
            1,
            max(1, remaining),
            len(self.step_batches.samples),
            total,
            1,
            max(1, remaining),
            total,
        )

    def _init_training_state(self, *arguments: Any) -> tuple[int, int]:
        epochs = super()._init_training_state(*arguments)
        # Here and not later: the loop remembers this number as the step of the last line of the
        # log, and divides the summed loss by the distance to it.
        self.state.global_step = self.context.start_step
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
        # After super: moments live in the optimizer that it creates and wraps (DeepSpeed: in the
        # engine). Trainer is never told of a checkpoint to resume from: it would look for its own
        # files, and unpickle them.
        if self.context.resume_from is not None:
            self.training_state().load_moments(self.context.resume_from)
        return prepared

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
        progress.begin_step(self.context.control.timeout_seconds)
        model.train()  # evaluation leaves it in eval mode
        self._set_learning_rate(inputs.step)
        self.still.before_step(self.model)
        result = self.executor.run(model, inputs)
        self._batch = inputs
        self.meter.add_step(inputs, result.sums)
        if self.is_deepspeed_enabled:
            skipped = step_engine(model)
            self._nonfinite = lambda: skipped
        return result.loss

    def _set_learning_rate(self, step: int) -> None:
        """The rates of a step (0-based): the schedule is a function of it."""
        # Not in a scheduler: it would count its calls, and is not called after a step that was
        # skipped (ZeRO-1/2, float16). Trainer's own, which is constant, notes the initial rates and
        # puts them back after each step; groups are the same objects in DeepSpeed's optimizer and
        # the one below it.
        factor = self.context.learning_rate_factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self._learning_rate = float(self.optimizer.param_groups[0]["lr"])

    def _get_learning_rate(self) -> float:
        return self._learning_rate  # Trainer would ask the scheduler, which is constant

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm, with or without clipping; where it is not finite the optimizer's step
        is made empty.
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
        """After the optimizer's step: the save under way, guards, sample log, agreement on a
        stop.
        """
        progress.end_step()
        # First: a save that failed for want of room gives back what it has taken before the logs
        # need it.
        self.checkpointer.poll()
        batch, step = self._batch, self.state.global_step
        # the loop's own counts our one "epoch"
        self.state.epoch = step * self.context.epochs_per_step
        if self.context.sample_log is not None:
            self.context.sample_log.append(step, self._record_ids(batch))
        self.outcomes.add(step, batch, self._nonfinite)
        self.still.after_step(self.model, self._learning_rate, self.context.control.any)
        # Agreed in every step: signals reach ranks at different times, and a rank that saved alone
        # would wait for the others in the checkpoint's collectives.
        stopping = self.context.control.any(self.context.signals.requested)
        # What is logged, evaluated or saved of this step must not come before how it went.
        control = self.control
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
        """Log which signal came to any rank. Every rank calls."""
        self.stopped_by = next(
            str(name) for name in self.context.control.gather(self.context.signals.name) if name
        )
        self.context.runlog.event("signal", step=self.state.global_step, name=self.stopped_by)

    def _note_outcome(self, step: int, batch: StepBatch, *, skipped: bool) -> None:
        if not skipped:
            self.guard.fine()
            return
        logger.warning("step %d was skipped: loss or gradients are not finite", step)
        self.context.runlog.event("nonfinite", step=step, ids=self._record_ids(batch))
        self.checkpointer.finish()  # on all ranks alike, and the guard may be about to end the run
        self.guard.skipped(step, self.checkpointer.last)

    def _record_ids(self, batch: StepBatch) -> list[int]:
        return [int(number) for number in self.step_batches.samples.record_ids[batch.indices]]

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # Trainer's own count is 6N whatever is trained; ours is in planning/traffic.py

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
        self.checkpointer.best = self.evaluations.best.facts()
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def evaluation(self, step_batches: StepBatches) -> dict[str, float]:
        """The loss of validation batches, overall, per difficulty and per source. Every rank
        calls.
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
        total, *of_groups = self.context.control.sum([total, *sums.tolist()])
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
            logs.update(line_facts(self.meter.take(self._sum_over_ranks), self.metrics))
            self._look_for_spike(step, logs["loss"])
            self.still.line(logs["loss"])
            self.context.runlog.step({"step": step, **logs})
            if self.is_world_process_zero():
                self.console.show(step, logs)
        elif "eval_loss" in logs:
            self.context.runlog.event("eval", step=step, **logs)
            facts = (
                f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in logs.items()
            )
            logger.info("step %d  %s", step, "  ".join(facts))
        self.measured.update({} if "train_loss" in logs else {"step": step, **logs})
        super().log(logs, start_time)
        # Trainer keeps every line, which nothing reads: a kilobyte a step for weeks
        self.state.log_history.clear()
        self.context.runlog.curves(step, logs)

    def _look_for_spike(self, step: int, loss: float) -> None:
        if self.spikes.is_spike(loss):
            logger.warning("step %d: loss %.4f is a spike", step, loss)
            self.context.runlog.event(
                "spike", step=step, loss=loss, ids=self._record_ids(self._batch)
            )

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
        self.context.runlog.event(
            "oom", step=step + 1, error=error, old=old.describe(), new=new.describe()
        )

    # ------------------------------------------------------------------ save

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        # Trainer's own pickles the optimizer, scheduler and random states, and removes old
        # checkpoints before anything has looked at the new one.
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
        """The weights that the output is made of, whole, on rank 0's CPU. Every rank calls."""
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
        """Put the result into the run folder: written beside, reopened, then moved in. Every rank
        calls.

        Args:
            best: the checkpoint that it is made of; None: the weights as they are.
        """
        progress.begin_save(self.context.control.timeout_seconds)
        weights, main = self.output_weights(), self.is_world_process_zero()

        def write_files(folder: Path) -> None:
            self.write_output(folder, weights if best is None else with_saved(best, weights), best)

        write = partial(put_output, output_dir, write_files)
        # The others must not end, and have a launcher tear the run down, while rank 0 writes.
        self.context.control.together(write if main else lambda: None).result()

    def whole_weights(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers on rank 0's CPU, parameters in `dtype` (None: as they are).
        Every rank calls.
        """
        return whole_weights(self.model, dtype, keep=self.is_world_process_zero())
