"""PreferenceTrainer: SFTTrainer on pairs of answers, or on answers with labels."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from finetune.data.preference.batches import AnswerBatches
from finetune.data.steps import InOrder, StepBatches
from finetune.runtime.parent_watchdog import progress
from finetune.training.metrics import Interval, model_flops_utilisation, speed, target_share
from finetune.training.preferences.objective import PreferenceObjective, preference_facts
from finetune.training.preferences.reference import Table, log_probabilities
from finetune.training.preferences.reference_point import ReferencePoint
from finetune.training.preferences.saved_reference import SavedReference
from finetune.training.sft_trainer import SFTTrainer

logger = logging.getLogger("finetune")


class PreferenceTrainer(SFTTrainer):
    """Trains on preferences, with or without LoRA.

    Args:
        saved_reference: where the log-probabilities of the model before the run are kept; None where they are not
            needed, or asked of the model with its adapter off.
    """

    step_batches: AnswerBatches
    eval_step_batches: AnswerBatches | None

    def __init__(self, *, saved_reference: SavedReference | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        assert isinstance(self.executor.objective, PreferenceObjective)
        self.objective: PreferenceObjective = self.executor.objective
        self.saved_reference = saved_reference
        self._tables: dict[str, Table] = {}
        if self.objective.config.loss == "kto":
            assert self.objective.reference is not None
            self.objective.point = ReferencePoint(
                self.step_batches, self.objective.reference, self.head, self.context.control, self.args.device
            )
        self.metrics = (speed, model_flops_utilisation, self._shares, self._compared)

    # ------------------------------------------------------------------ log

    def _shares(self, interval: Interval) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for prefix, by in (("", interval.groups.by_difficulty), ("source_", interval.groups.by_source)):
            counts = by(interval.group_tokens)
            for name in counts:
                facts |= target_share(prefix, name, counts)
        return facts

    def _compared(self, interval: Interval) -> dict[str, Any]:
        found = preference_facts(interval.sums, interval.groups, self.objective.config)
        del found["loss"]  # the line has it, of all samples
        return found

    # ------------------------------------------------------------------ evaluation

    def evaluation(self, step_batches: StepBatches) -> dict[str, float]:
        """Loss, accuracy, margin and log-probabilities of validation samples; some of them by difficulty and source."""
        assert isinstance(step_batches, AnswerBatches)
        groups = len(step_batches.groups)
        reference = self._tables["valid"] if self.saved_reference is not None else self.objective.reference
        objective = replace(self.objective, samples=step_batches.samples, reference=reference)
        sums = torch.zeros(objective.sums(groups), dtype=torch.float64)
        model = self.model_wrapped
        model.eval()
        with torch.no_grad():
            for step in range(len(step_batches)):
                batch = step_batches[step]
                objective.begin(model, batch)
                for microbatch in batch.microbatches:
                    progress.mark()
                    scored = objective.score(model, microbatch.to(self.args.device), self.head, groups=groups)
                    sums += scored.sums.cpu().double()
        return preference_facts(self.context.control.sum(sums.tolist()), step_batches.groups, objective.config)

    # ------------------------------------------------------------------ what the model said before the run

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, DataLoader]:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # After super: under ZeRO-3 only DeepSpeed's engine can run a forward.
        if self.saved_reference is not None:
            self._tables = {side: Table(values) for side, values in self._reference_values().items()}
            self.objective.reference = self._tables["train"]
        return prepared

    def _reference_values(self) -> dict[str, torch.Tensor]:
        """Float32 `(samples, documents of one)` by side, on the device: read on rank 0, or computed by all."""
        assert self.saved_reference is not None
        control, documents = self.context.control, self.objective.config.documents_per_sample
        sides = {"train": self.step_batches, "valid": self.eval_step_batches}
        known = {side: batches for side, batches in sides.items() if batches is not None}
        values = {
            side: torch.zeros(len(batches.samples), documents, device=self.args.device)
            for side, batches in known.items()
        }
        main = self.is_world_process_zero()
        shapes = {side: tuple(table.shape) for side, table in values.items()}
        found = self.saved_reference.find(shapes) if main else None
        if control.share(found is not None):
            for side, table in values.items():
                if found is not None:
                    table.copy_(found[side])
                if self.accelerator.num_processes > 1:
                    dist.broadcast(table, 0)
        else:
            self.saved_reference.check_fresh()
            logger.info("asking the model before its first step about %d samples", sum(map(len, values.values())))
            for side, batches in known.items():
                self._ask(batches, values[side])
        if main:
            self.saved_reference.store({side: table.cpu() for side, table in values.items()})
        return values

    def _ask(self, step_batches: AnswerBatches, table: torch.Tensor) -> None:
        """Fill the table with what the model says now. Every rank calls."""
        samples, device = step_batches.samples, self.args.device
        in_order = InOrder(len(samples), self.objective.config.global_batch_size)
        for step in range(in_order.total_steps):
            for microbatch in step_batches.microbatches(in_order.indices(step), step_batches.execution):
                progress.mark()
                here = microbatch.to(device)
                said = log_probabilities(self.model_wrapped, here, self.head)
                assert here.answers is not None
                table[here.answers.samples] = said.view(-1, table.shape[1]).to(table.dtype)
        self._sum_over_ranks(table)
