"""KTO's reference point: what the model says more than before of answers to other prompts, over the
global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from finetune.batching.collate import Microbatch
from finetune.batching.steps import AnswerBatches, AnswerSource, BatchSource, InOrder, LossGroups
from finetune.modeling.loss import ChunkedHead
from finetune.runtime import device as devices
from finetune.runtime.parent_watchdog import progress
from finetune.training.control import Control
from finetune.training.preferences.reference import Reference, log_probabilities


def mismatched_pairs(indices: np.ndarray, total: int) -> np.ndarray:
    """int64 `(batch,)`: each sample of a global batch with the one after it, of the last with the
    first.

    Args:
        total: samples there are; a pair's number is that of the prompt's sample x total + that of
            the answer's.
    """
    return indices.astype(np.int64) * total + np.roll(indices, -1)


def all_mismatched_pairs(batches: BatchSource, total: int) -> np.ndarray:
    """int64, sorted: the pairs of all steps, each once."""
    steps = map(batches.indices, range(batches.total_steps))
    found = [mismatched_pairs(indices, total) for indices in steps if len(indices) > 1]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *found]))


def mismatched_microbatches(
    like: AnswerBatches, samples: AnswerSource, pairs: np.ndarray, numbers: np.ndarray
) -> Iterator[Microbatch]:
    """This rank's microbatches of prompts with answers to others, cut as those of the run.

    Args:
        numbers: int `(pairs,)`, what their answers are numbered by.
    """
    mismatched, everything = Mismatched(samples, pairs), np.arange(len(pairs))
    batches = AnswerBatches(
        mismatched,
        InOrder(len(mismatched), len(mismatched)),
        like.execution,
        difficulty_ids=np.full(len(mismatched), -1),
        groups=LossGroups(),
        pad_token_id=like.pad_token_id,
    )
    named = torch.from_numpy(numbers)
    for microbatch in batches.microbatches(everything, like.execution):
        assert microbatch.answers is not None
        yield replace(
            microbatch,
            answers=replace(microbatch.answers, samples=named[microbatch.answers.samples]),
        )


class Mismatched:
    """Prompts with the answers of other samples, by `mismatched_pairs`.

    A document is at most as long as the longest sample: of a longer one the answer loses its end.
    """

    def __init__(self, samples: AnswerSource, pairs: np.ndarray) -> None:
        prompts, answers = np.divmod(pairs, len(samples))
        known = {
            index: samples[index]
            for index in np.unique(np.concatenate([prompts, answers])).tolist()
        }
        longest = int(samples.lengths.max())
        # Where the answer begins, as far as it is trained.
        begins = {index: int(supervised.argmax()) for index, (_, supervised) in known.items()}
        self._documents = []
        for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
            (ids, _), (other_ids, other_supervised) = known[prompt], known[answer]
            parts = (ids[: begins[prompt]], other_ids[begins[answer] :])
            masks = (np.zeros(begins[prompt], dtype=bool), other_supervised[begins[answer] :])
            self._documents.append(
                (np.concatenate(parts)[:longest], np.concatenate(masks)[:longest])
            )
        self.lengths = np.array([len(ids) for ids, _ in self._documents], dtype=np.int32)
        self.supervised_counts = np.array(
            [mask.sum() for _, mask in self._documents], dtype=np.int32
        )
        self.record_ids = samples.record_ids[prompts]
        self.labels = samples.labels[prompts]
        self.first_lengths = self.first_supervised = np.zeros_like(self.lengths)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._documents[index]


@dataclass(frozen=True)
class ReferencePoint:
    """z0 of arXiv 2402.01306, section 4.1; the same on every rank, however microbatches are cut.

    Attributes:
        pairs: those that the reference knows, by its numbers; None where it is asked about any.
    """

    step_batches: AnswerBatches
    reference: Reference
    head: ChunkedHead | None
    control: Control
    device: torch.device
    pairs: np.ndarray | None = None

    def of(self, model: torch.nn.Module, samples: AnswerSource, indices: np.ndarray) -> float:
        """Of a global batch; 0 where it has one sample. Every rank calls.

        Raises:
            torch.OutOfMemoryError: on every rank, where memory did not suffice on one.
        """
        if len(indices) < 2:
            return 0.0
        found, error = 0.0, ""
        try:
            found = self._sum(model, samples, indices)
        except Exception as caught:  # devices raise types of their own
            if not devices.is_out_of_memory(caught):
                raise
            error = str(caught).splitlines()[0]
        # The others must hear of it here: they would wait for this rank's part of the mean.
        total, failed = self.control.sum([found, float(bool(error))])
        if failed:
            raise torch.OutOfMemoryError(error or "out of memory on another rank")
        return max(0.0, total / len(indices))

    def _sum(self, model: torch.nn.Module, samples: AnswerSource, indices: np.ndarray) -> float:
        """Of this rank's part of the global batch."""
        pairs = mismatched_pairs(indices, len(samples))
        numbers = (
            np.arange(len(pairs)) if self.pairs is None else np.searchsorted(self.pairs, pairs)
        )
        total = torch.zeros((), device=self.device)
        for microbatch in mismatched_microbatches(self.step_batches, samples, pairs, numbers):
            progress.mark()
            here = microbatch.to(self.device)
            now = log_probabilities(model, here, self.head)
            total += (now - self.reference.log_probabilities(model, here, self.head)).sum()
        return float(total)
