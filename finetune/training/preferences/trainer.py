"""PreferenceTrainer: SFTTrainer on pairs of answers, or on answers with labels."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from finetune.batching.collate import Microbatch
from finetune.batching.steps import AnswerBatches, BatchSource, InOrder, StepBatches
from finetune.data import cache
from finetune.data.samples import Samples
from finetune.runtime.parent_watchdog import progress
from finetune.runtime.progress import ProgressLine
from finetune.training.control import StoppedBeforeTraining
from finetune.training.metrics import Interval, model_flops_utilisation, speed, target_share
from finetune.training.preferences.objective import (
    PreferenceObjective,
    ReferencePoint,
    all_mismatched_pairs,
    mismatched_microbatches,
    preference_facts,
)
from finetune.training.preferences.reference import (
    MISMATCHED,
    AdapterOff,
    Reference,
    SavedReference,
    Side,
    Table,
    log_probabilities,
)
from finetune.training.trainer import RunParts, SFTTrainer

logger = logging.getLogger("finetune")


class PreferenceTrainer(SFTTrainer):
    """Trains on preferences, with or without LoRA."""

    step_batches: AnswerBatches
    eval_step_batches: AnswerBatches | None
    objective: PreferenceObjective

    def __init__(self, parts: RunParts) -> None:
        super().__init__(parts)
        # By side; none if they are not needed, or computed with the adapter off.
        self.saved_references: dict[str, SavedReference] = {}
        if self.settings.needs_reference and not self.lora:
            self.saved_references = _saved_references(parts)
        self._tables: dict[str, Table] = {}
        if self.objective.config.loss == "kto" and self.objective.reference is not None:
            self.objective.point = self._point(self.objective.reference)
        self.metrics = (speed, model_flops_utilisation, self._shares, self._compared)

    def make_objective(self, parts: RunParts) -> PreferenceObjective:
        adapter_off = parts.lora and self.settings.needs_reference
        reference = AdapterOff() if adapter_off else None
        self.objective = PreferenceObjective(self.settings, parts.data.train, reference)
        return self.objective

    # ------------------------------------------------------------------ log

    def _shares(self, interval: Interval) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for prefix, by in (
            ("", interval.groups.by_difficulty),
            ("source_", interval.groups.by_source),
        ):
            counts = by(interval.group_tokens.tolist())
            for name in counts:
                facts |= target_share(prefix, name, counts)
        return facts

    def _compared(self, interval: Interval) -> dict[str, Any]:
        found = preference_facts(interval.sums, interval.groups, self.objective.config)
        del found["loss"]  # the line has it, of all samples
        return found

    # ------------------------------------------------------------------ evaluation

    def evaluation(self, step_batches: StepBatches) -> dict[str, float]:
        """Loss, accuracy, margin and log-probabilities of validation samples; some of them by
        difficulty and source.
        """
        assert isinstance(step_batches, AnswerBatches)
        groups = len(step_batches.groups)
        objective = replace(self.objective, samples=step_batches.samples)
        if self.saved_references:
            self._compare_with_tables(objective, "valid")
        sums = torch.zeros(objective.sums(groups), dtype=torch.float64)
        model = self.model_wrapped
        model.eval()
        with torch.no_grad():
            for step in range(len(step_batches)):
                batch = step_batches[step]
                objective.begin(model, batch, batch.microbatches)
                for microbatch in batch.microbatches:
                    progress.mark()
                    scored = objective.score(
                        model, microbatch.to(self.args.device), self.head, groups=groups
                    )
                    sums += scored.sums.cpu().double()
        return preference_facts(
            self.session.control.sum(sums.tolist()), step_batches.groups, objective.config
        )

    # ----------------------------------------------------------- the model before the run

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, DataLoader]:
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        # After super: under ZeRO-3 only DeepSpeed's engine can run a forward.
        for side, saved in self.saved_references.items():
            self._tables[side] = Table(self._reference_values(saved))
        if self.saved_references:
            self._compare_with_tables(self.objective, "train")
        return prepared

    def _compare_with_tables(self, objective: PreferenceObjective, side: str) -> None:
        objective.reference = self._tables[side]
        if (mismatched := self.saved_references.get(side + MISMATCHED)) is not None:
            objective.point = self._point(self._tables[side + MISMATCHED], mismatched.pairs)

    def _point(self, reference: Reference, pairs: np.ndarray | None = None) -> ReferencePoint:
        return ReferencePoint(
            self.step_batches,
            reference,
            self.head,
            self.session.control,
            self.args.device,
            self.settings.cutoff_len,
            pairs,
        )

    def _reference_values(self, saved: SavedReference) -> torch.Tensor:
        """Float32 `(samples, documents of one)`, on the device: read on rank 0, or computed by all.

        NaN for samples that no step draws.

        Raises:
            StateError: they are nowhere, and the model has been trained since.
            StoppedBeforeTraining: a signal came.
        """
        main = self.is_world_process_zero()
        found = saved.find() if main else ""
        why = self.session.control.share(found if isinstance(found, str) else "")
        if why:
            if not saved.fresh:
                raise saved.refusal(why)
            answer = "stopping before the first step, without a checkpoint"
            with self.session.signals.answered(answer):
                values = self._ask(saved)
        else:
            values = torch.empty(
                len(saved.drawn),
                self.objective.config.documents_per_sample,
                device=self.args.device,
            )
            if isinstance(found, torch.Tensor):
                values.copy_(found)
            if self.accelerator.num_processes > 1:
                dist.broadcast(values, 0)
        if main:
            saved.store(values.cpu())
        return values

    def _ask(self, saved: SavedReference) -> torch.Tensor:
        """Compute the log-probabilities of the samples that are drawn. Every rank must call it."""
        drawn, config, device = saved.drawn, self.objective.config, self.args.device
        samples = np.flatnonzero(drawn)
        what = "samples" if saved.pairs is None else "prompts with the answers of other samples"
        logger.info("asking the model before its first step about %d %s", len(samples), what)
        asked = torch.zeros(len(drawn), config.documents_per_sample, device=device)
        in_order = InOrder(len(samples), config.global_batch_size)
        total, began = in_order.total_steps, time.monotonic()
        with contextlib.ExitStack() as stack:
            line = None
            if self.is_world_process_zero():
                line = ProgressLine(total, counted="reference")
                stack.callback(line.close)
            for step in range(total):
                for microbatch in self._questions(saved, samples[in_order.indices(step)]):
                    progress.mark()
                    here = microbatch.to(device)
                    said = log_probabilities(self.model_wrapped, here, self.head)
                    assert here.answers is not None
                    asked[here.answers.samples] = said.view(-1, asked.shape[1]).to(asked.dtype)
                if self.session.control.any(self.session.signals.requested):
                    self.note_stop()
                    raise StoppedBeforeTraining
                if line is not None:
                    left_seconds = (time.monotonic() - began) / (step + 1) * (total - step - 1)
                    line.update(
                        step + 1, stage="", facts="before the first step", eta_seconds=left_seconds
                    )
        self._sum_over_ranks(asked)
        asked[torch.from_numpy(~drawn).to(device)] = torch.nan
        return asked

    def _questions(self, saved: SavedReference, numbers: np.ndarray) -> Iterator[Microbatch]:
        """Return this rank's microbatches of samples, or of mismatched pairs, by their numbers."""
        batches = self.step_batches if saved.side.startswith("train") else self.eval_step_batches
        assert batches is not None
        if saved.pairs is None:
            return batches.microbatches(numbers, batches.execution)
        pairs = saved.pairs[numbers]
        cutoff_len = self.settings.cutoff_len
        return mismatched_microbatches(batches, batches.samples, pairs, numbers, cutoff_len)


def _saved_references(parts: RunParts) -> dict[str, SavedReference]:
    """Return what is saved of the model before the run, by side.

    The list of global batches shows in advance which answers KTO's reference point is of.
    """
    config: Any = parts.config
    data: Any = parts.data
    start = parts.start
    samples_cache = (
        Path(config.cache_dir).expanduser() if config.cache_dir else cache.default_cache_dir()
    )
    found: dict[str, SavedReference] = {}

    def add(side: Side, content: str, drawn: np.ndarray, pairs: np.ndarray | None = None) -> None:
        found[side] = SavedReference(
            side=side,
            parts={
                "weights": data.identity["weights"],
                "data": content,
                "dtype": config.dtype,
            },
            drawn=drawn,
            folder=parts.session.output_dir,
            others=() if start.folder is None else (start.folder.parent,),
            cache_dir=samples_cache / "reference",
            fresh=start.step == 0,
            pairs=pairs,
        )

    def add_mismatched(side: Side, samples: Samples, batches: BatchSource) -> None:
        pairs = all_mismatched_pairs(batches, len(samples))
        # no global batch has two samples: the reference point is 0 and nothing is asked
        if len(pairs):
            digest = hashlib.sha256(pairs.tobytes()).hexdigest()
            content = f"{samples.fingerprint}:{digest}:{config.cutoff_len}"
            add(side, content, np.ones(len(pairs), dtype=bool), pairs)

    add("train", data.train.fingerprint, data.batches.drawn())
    if config.loss == "kto":
        add_mismatched("train-mismatched", data.train, data.batches)
    if data.valid is not None:
        add("valid", data.valid.fingerprint, np.ones(len(data.valid), dtype=bool))
        if config.loss == "kto":
            in_order = InOrder(len(data.valid), config.global_batch_size)
            add_mismatched("valid-mismatched", data.valid, in_order)
    return found
