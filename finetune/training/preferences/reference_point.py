"""KTO's reference point: what the model says more than before of answers to other prompts, over the global batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from finetune.data.preference.batches import AnswerBatches, AnswerSource
from finetune.data.steps import InOrder, LossGroups
from finetune.modeling.loss import ChunkedHead
from finetune.runtime import device as devices
from finetune.runtime.parent_watchdog import progress
from finetune.training.control import Control
from finetune.training.preferences.reference import Reference, log_probabilities


class Mismatched:
    """Each prompt of a global batch with the answer of the sample after it, of the last with the first's.

    A document is at most as long as the longest sample: of a longer one the answer loses its end.
    """

    def __init__(self, samples: AnswerSource, indices: np.ndarray) -> None:
        known = [samples[index] for index in indices.tolist()]
        longest = int(samples.lengths.max())
        begins = [int(supervised.argmax()) for _, supervised in known]  # where the answer does, as far as it is trained
        self._documents = []
        for number, (ids, _) in enumerate(known):
            other = (number + 1) % len(known)
            parts = (ids[: begins[number]], known[other][0][begins[other] :])
            masks = (np.zeros(begins[number], dtype=bool), known[other][1][begins[other] :])
            self._documents.append((np.concatenate(parts)[:longest], np.concatenate(masks)[:longest]))
        self.lengths = np.array([len(ids) for ids, _ in self._documents], dtype=np.int32)
        self.supervised_counts = np.array([mask.sum() for _, mask in self._documents], dtype=np.int32)
        self.record_ids = samples.record_ids[indices]
        self.labels = samples.labels[indices]
        self.first_lengths = self.first_supervised = np.zeros_like(self.lengths)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._documents[index]


@dataclass(frozen=True)
class ReferencePoint:
    """z0 of arXiv 2402.01306, section 4.1; the same on every rank, however microbatches are cut."""

    step_batches: AnswerBatches
    reference: Reference
    head: ChunkedHead | None
    control: Control
    device: torch.device

    def of(self, model: torch.nn.Module, samples: AnswerSource, indices: np.ndarray) -> float:
        """Of a global batch; 0 where it has one sample. Every rank calls.

        Raises:
            torch.OutOfMemoryError: on every rank, where memory did not suffice on one.
        """
        if len(indices) < 2:
            return 0.0
        found, error = 0.0, ""
        try:
            found = self._sum(model, Mismatched(samples, indices))
        except Exception as caught:  # devices raise types of their own
            if not devices.is_out_of_memory(caught):
                raise
            error = str(caught).splitlines()[0]
        # The others must hear of it here: they would wait for this rank's part of the mean.
        total, failed = self.control.sum([found, float(bool(error))])
        if failed:
            raise torch.OutOfMemoryError(error or "out of memory on another rank")
        return max(0.0, total / len(indices))

    def _sum(self, model: torch.nn.Module, mismatched: Mismatched) -> float:
        """Of this rank's part of the global batch."""
        execution, everything = self.step_batches.execution, np.arange(len(mismatched))
        batches = AnswerBatches(
            mismatched,
            InOrder(len(mismatched), len(mismatched)),
            execution,
            difficulty_ids=np.full(len(mismatched), -1),
            groups=LossGroups(),
            pad_token_id=self.step_batches.pad_token_id,
        )
        total = torch.zeros((), device=self.device)
        for microbatch in batches.microbatches(everything, execution):
            progress.mark()
            here = microbatch.to(self.device)
            now = log_probabilities(model, here, self.head)
            total += (now - self.reference.log_probabilities(model, here, self.head)).sum()
        return float(total)
