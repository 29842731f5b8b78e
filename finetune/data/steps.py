"""One item = one optimizer step: the rows of this rank, and what every rank knows about the whole global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from finetune.batching.execution_plan import ExecutionPlan, plan_rows
from finetune.data.collate import Row, collate


class SampleSource(Protocol):
    """What training needs of a data set; `data.dataset.Samples` is one, a token stream's windows are another."""

    lengths: np.ndarray  # int (N,): tokens of each sample that the model computes
    supervised_counts: np.ndarray  # int (N,): targets of each sample
    row_ids: np.ndarray  # int (N,): the input row each sample came from

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray | None]: ...


class BatchSource(Protocol):
    """The list of global batches: `batching.sampler.GlobalBatches` for training, `InOrder` for evaluation."""

    total_steps: int

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
    """How global batches are executed here: none of it changes what is trained.

    Attributes:
        token_budget: most tokens of a packed row; None where rows are padded.
        samples_per_row: samples of a padded row; None where rows are packed.
    """

    rank: int
    world_size: int
    token_budget: int | None
    samples_per_row: int | None

    def plan(self, lengths: np.ndarray) -> ExecutionPlan:
        return plan_rows(lengths, self.world_size, token_budget=self.token_budget, samples_per_row=self.samples_per_row)

    def smaller(self, longest_sample_tokens: int) -> Execution | None:
        """Half the budget (more rows, the same global batch); None at the floor, where a row holds one sample."""
        if self.samples_per_row is not None:
            return replace(self, samples_per_row=self.samples_per_row // 2) if self.samples_per_row > 1 else None
        budget = max(self.token_budget // 2, longest_sample_tokens)
        return replace(self, token_budget=budget) if budget < self.token_budget else None

    def describe(self) -> str:
        if self.token_budget is not None:
            return f"rows of at most {self.token_budget} tokens"
        return f"padded rows of {self.samples_per_row} samples"


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step on one rank.

    Attributes:
        step: 0-based.
        indices: int64 `(global batch,)`: the samples of the whole global batch, the same on every rank.
        execution: how the rows were cut.
        rows: this rank's rows; every rank has as many.
        tokens: tokens of the global batch, padding not counted.
        supervised_tokens: targets of the global batch: the denominator of the loss.
        level_tokens: int64 `(levels,)`: targets of the global batch per level.
    """

    step: int
    indices: np.ndarray
    execution: Execution
    rows: list[Row]
    tokens: int
    supervised_tokens: int
    level_tokens: np.ndarray


class StepRows(torch.utils.data.Dataset):
    """Map-style: step (0-based) -> `StepBatch` for this rank. Every rank computes the same plan without talking.

    Args:
        level_ids: int `(N,)`: level of each sample in the schedule, -1 for none.
        levels: how many levels the schedule has.
    """

    def __init__(
        self,
        samples: SampleSource,
        batches: BatchSource,
        execution: Execution,
        *,
        level_ids: np.ndarray,
        levels: int,
        pad_token_id: int,
    ) -> None:
        self.samples, self.batches, self.execution = samples, batches, execution
        self.level_ids, self.levels, self.pad_token_id = level_ids, levels, pad_token_id

    def __len__(self) -> int:
        return self.batches.total_steps

    def __getitem__(self, step: int) -> StepBatch:
        indices = self.batches.indices(step)
        supervised = self.samples.supervised_counts[indices]
        level_ids = self.level_ids[indices]
        level_tokens = np.bincount(level_ids[level_ids >= 0], supervised[level_ids >= 0], minlength=self.levels)
        return StepBatch(
            step=step,
            indices=indices,
            execution=self.execution,
            rows=list(self.rows(indices, self.execution)),
            tokens=int(self.samples.lengths[indices].sum()),
            supervised_tokens=int(supervised.sum()),
            level_tokens=level_tokens.astype(np.int64),
        )

    def rows(self, indices: np.ndarray, execution: Execution) -> Iterator[Row]:
        """This rank's rows of the global batch `indices` under an execution (another budget after out-of-memory)."""
        plan = execution.plan(self.samples.lengths[indices])
        for positions in plan.rows[execution.rank]:
            yield self.row(indices[positions], packing=execution.token_budget is not None)

    def row(self, indices: np.ndarray, *, packing: bool) -> Row:
        members = [(*self.samples[int(index)], int(self.level_ids[index])) for index in indices]
        return collate(members, packing=packing, pad_token_id=self.pad_token_id)
