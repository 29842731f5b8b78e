"""Optimizer steps: the microbatches of this rank, and what every rank knows of the global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from finetune.batching.collate import Answers, Microbatch, collate
from finetune.batching.microbatch_schedule import MicrobatchSchedule, schedule_microbatches


class SampleSource(Protocol):
    """What training needs from a data set; `data.dataset.Samples` is one, a token stream's windows
    are another.
    """

    lengths: np.ndarray  # int (N,): tokens of each sample that the model computes
    supervised_counts: np.ndarray  # int (N,): targets of each sample
    record_ids: np.ndarray  # int (N,): the input record each sample came from

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray | None]: ...


class BatchSource(Protocol):
    """The list of global batches: `batching.sampler.GlobalBatches` for training, `InOrder` for
    evaluation.
    """

    @property
    def total_steps(self) -> int: ...

    def indices(self, step: int) -> np.ndarray: ...


@dataclass(frozen=True)
class InOrder:
    """Every sample once, in order; the last batch holds what is left. For evaluation."""

    samples: int
    global_batch_size: int

    @property
    def total_steps(self) -> int:
        return -(-self.samples // self.global_batch_size)

    def indices(self, step: int) -> np.ndarray:
        start = step * self.global_batch_size
        return np.arange(start, min(start + self.global_batch_size, self.samples))


@dataclass(frozen=True)
class Execution:
    """How global batches are executed here: none of it changes what is trained."""

    rank: int
    world_size: int
    # maximum tokens of a packed microbatch; None if microbatches are padded
    token_budget: int | None
    samples_per_microbatch: int | None  # of a padded microbatch; None where microbatches are packed

    def plan(self, lengths: np.ndarray) -> MicrobatchSchedule:
        """Schedule a global batch of samples with these lengths, int `(G,)`."""
        return schedule_microbatches(
            lengths,
            self.world_size,
            token_budget=self.token_budget,
            samples_per_microbatch=self.samples_per_microbatch,
        )

    def smaller(self, longest_sample_tokens: int) -> Execution | None:
        """Half the budget (more microbatches, the same global batch); None if a microbatch holds
        one sample.
        """
        if self.token_budget is not None:
            budget = max(self.token_budget // 2, longest_sample_tokens)
            return replace(self, token_budget=budget) if budget < self.token_budget else None
        samples = (self.samples_per_microbatch or 1) // 2
        return replace(self, samples_per_microbatch=samples) if samples else None

    def describe(self) -> str:
        """Describe the microbatches for logs."""
        if self.token_budget is not None:
            return f"microbatches of at most {self.token_budget} tokens"
        return f"padded microbatches of {self.samples_per_microbatch} samples"


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step on one rank."""

    step: int  # 0-based
    # int64 `(global batch,)`: the samples of the whole global batch, the same on every rank
    indices: np.ndarray
    execution: Execution  # how the microbatches were cut
    microbatches: list[Microbatch]  # this rank's; every rank has as many
    tokens: int  # of the global batch, padding not counted
    supervised_tokens: int  # targets of the global batch: the denominator of the loss
    group_tokens: np.ndarray  # int64 `(groups,)`: targets of the global batch per `LossGroups`


@dataclass(frozen=True)
class LossGroups:
    """Groups by which losses are summed: difficulties or, with sources, each difficulty of each
    source.
    """

    difficulties: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    # the first sample of each source, and the number of samples
    source_starts: tuple[int, ...] = ()

    def __len__(self) -> int:
        difficulties = len(self.difficulties)
        return len(self.sources) * (difficulties + 1) if self.sources else difficulties

    def of(self, indices: np.ndarray, difficulty_ids: np.ndarray) -> np.ndarray:
        """Return the group of each sample: int64 like `indices`; -1 for none.

        Args:
            difficulty_ids: of these samples, -1 for none.
        """
        count = len(self.difficulties)
        if not self.sources:
            return np.where(difficulty_ids < count, difficulty_ids, -1).astype(np.int64)
        sources = np.searchsorted(self.source_starts, indices, side="right") - 1
        # Without difficulty: the last of its source.
        return sources * (count + 1) + difficulty_ids % (count + 1)

    def by_difficulty(self, values: Sequence[float]) -> dict[str, float]:
        """Sums over the groups of each difficulty, by its name."""
        sums = np.asarray(values)
        if self.sources:
            sums = self._table(values).sum(axis=0)[:-1]
        return dict(zip(self.difficulties, sums.tolist(), strict=True))

    def by_source(self, values: Sequence[float]) -> dict[str, float]:
        """Sums over the groups of each source, by its name; empty without sources."""
        if not self.sources:
            return {}
        sums = self._table(values).sum(axis=1)
        return dict(zip(self.sources, sums.tolist(), strict=True))

    def _table(self, values: Sequence[float]) -> np.ndarray:
        return np.asarray(values).reshape(len(self.sources), len(self.difficulties) + 1)


class StepBatches(torch.utils.data.Dataset):
    """Map-style: step (0-based) -> `StepBatch` for this rank. All ranks make the same schedule
    without communication.

    Args:
        difficulty_ids: int `(N,)`: difficulty of each sample in the schedule, -1 for none.
        groups: what losses are summed by.
    """

    def __init__(
        self,
        samples: SampleSource,
        batches: BatchSource,
        execution: Execution,
        *,
        difficulty_ids: np.ndarray,
        groups: LossGroups,
        pad_token_id: int,
    ) -> None:
        self.samples = samples
        self.batches = batches
        self.execution = execution
        self.difficulty_ids = difficulty_ids
        self.groups = groups
        self.pad_token_id = pad_token_id

    def __len__(self) -> int:
        return self.batches.total_steps

    def __getitem__(self, step: int) -> StepBatch:
        indices = self.batches.indices(step)
        supervised = self.samples.supervised_counts[indices]
        groups = self._groups_of(indices)
        known = groups >= 0
        group_tokens = np.bincount(groups[known], supervised[known], minlength=len(self.groups))
        return StepBatch(
            step=step,
            indices=indices,
            execution=self.execution,
            microbatches=list(self.microbatches(indices, self.execution)),
            tokens=int(self.samples.lengths[indices].sum()),
            supervised_tokens=int(supervised.sum()),
            group_tokens=group_tokens.astype(np.int64),
        )

    def microbatches(self, indices: np.ndarray, execution: Execution) -> Iterator[Microbatch]:
        """This rank's microbatches of the global batch `indices`; the execution changes after
        out-of-memory.
        """
        for positions in self.plan(indices, execution).of_rank(execution.rank):
            yield self.microbatch(indices[positions], packing=execution.token_budget is not None)

    def plan(self, indices: np.ndarray, execution: Execution) -> MicrobatchSchedule:
        """Return the microbatches of the global batch `indices`, of all ranks."""
        return execution.plan(self.tokens_of(indices, packing=execution.token_budget is not None))

    def tokens_of(self, indices: np.ndarray, *, packing: bool) -> np.ndarray:
        """Return how many tokens each sample takes of a microbatch, int `(n,)`, without padding to
        the length of other samples.
        """
        return self.samples.lengths[indices]

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.samples.lengths.max())

    def filled(self, microbatch: Microbatch) -> Microbatch:
        """Fill a microbatch of windows up to as many lines as all others; the losses of the added
        lines come last.

        The last microbatch of an evaluation has fewer lines, or none. A compiled model would be
        compiled again for it, with dynamic sizes, and training would use that model too.
        """
        count = self.execution.samples_per_microbatch
        window = self.samples[0]
        if count is None or window[1] is not None:
            return microbatch
        whole = collate([(*window, -1)] * count, packing=False, pad_token_id=self.pad_token_id)
        if len(microbatch.targets) == 0:
            return whole
        missing = count - len(microbatch.input_ids)

        def joined(ours: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            return torch.cat([ours, more[: missing * len(more) // count]])

        return replace(
            microbatch,
            input_ids=joined(microbatch.input_ids, whole.input_ids),
            position_ids=joined(microbatch.position_ids, whole.position_ids),
            targets=joined(microbatch.targets, whole.targets),
            groups=joined(microbatch.groups, whole.groups),
        )

    def _groups_of(self, indices: np.ndarray) -> np.ndarray:
        return self.groups.of(indices, self.difficulty_ids[indices])

    def microbatch(self, indices: np.ndarray, *, packing: bool) -> Microbatch:
        """Make the microbatch of these samples."""
        pairs = zip(indices.tolist(), self._groups_of(indices).tolist(), strict=True)
        members = [(*self.samples[index], group) for index, group in pairs]
        return collate(members, packing=packing, pad_token_id=self.pad_token_id)


def as_is(item: Any) -> Any:
    """Return an item unchanged, for loaders. Not a lambda: spawned loader processes must find
    it by name.
    """
    return item


class AnswerSource(SampleSource, Protocol):
    """What preference training needs from a data set; `PreferenceSamples` is one."""

    # int (N,): tokens of a pair's first document; 0 where a sample is one document
    first_lengths: np.ndarray
    first_supervised: np.ndarray  # int (N,): targets of that document
    labels: np.ndarray  # int (N,): 1 for a good answer, 0 for a bad one, -1 for a pair

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...


class AnswerBatches(StepBatches):
    """The steps of a run on preferences."""

    samples: AnswerSource

    def tokens_of(self, indices: np.ndarray, *, packing: bool) -> np.ndarray:
        lengths = self.samples.lengths[indices]
        if packing:
            return lengths
        # Padded, the documents of a pair are two lines, as long as the longer of them.
        first = self.samples.first_lengths[indices]
        return np.where(first > 0, 2 * np.maximum(first, lengths - first), lengths)

    def microbatch(self, indices: np.ndarray, *, packing: bool) -> Microbatch:
        """Make the microbatch of these samples; a pair is two documents, the chosen answer's
        first.
        """
        groups = self._groups_of(indices)
        documents = []
        for index, group in zip(indices.tolist(), groups.tolist(), strict=True):
            ids, supervised = self.samples[index]
            first = int(self.samples.first_lengths[index])
            if first:
                documents.append((ids[:first], supervised[:first], group))
            documents.append((ids[first:], supervised[first:], group))
        targets = tuple(int(supervised[1:].sum()) for _, supervised, _ in documents)
        answers = Answers(
            targets=targets,
            counts=torch.tensor(targets, dtype=torch.int64),
            samples=torch.from_numpy(indices.astype(np.int64)),
            groups=torch.from_numpy(groups.astype(np.int64)),
            labels=torch.from_numpy(self.samples.labels[indices].astype(np.int64)),
        )
        return replace(
            collate(documents, packing=packing, pad_token_id=self.pad_token_id), answers=answers
        )
