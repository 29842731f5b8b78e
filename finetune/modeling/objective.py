"""What a step minimizes: the token loss or a preference loss, behind one interface for the
executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from finetune.batching.collate import Microbatch
from finetune.batching.steps import StepBatch
from finetune.modeling.loss import ChunkedHead, microbatch_losses, sums_by_group


@dataclass(frozen=True)
class Scored:
    """The result of an objective for one microbatch.

    Attributes:
        total: scalar, part of the graph. Its sum over all microbatches of a step, divided by
            `Objective.denominator`, is the loss of the global batch, regardless of how the batch is
            split into microbatches.
        sums: `(Objective.sums,)`, without gradient: what the log adds up over microbatches, ranks
            and steps.
    """

    total: Tensor
    sums: Tensor


class Objective(Protocol):
    """The loss of a global batch as a sum over its microbatches."""

    def sums(self, groups: int) -> int:
        """Return the length of `Scored.sums` for this many groups of samples."""

    def denominator(self, batch: StepBatch) -> int:
        """Return what the summed totals of a global batch are divided by."""

    def begin(self, model: nn.Module, batch: StepBatch, microbatches: Sequence[Microbatch]) -> None:
        """Prepare for the microbatches of a step. Collective: every rank must call it, in the order
        of steps.

        Args:
            microbatches: this rank's, as they will be scored. All ranks have as many.
        """

    def score(
        self,
        model: nn.Module,
        microbatch: Microbatch,
        head: ChunkedHead | None,
        *,
        groups: int,
    ) -> Scored:
        """Score one microbatch that is on the model's device."""


class TokenLoss:
    """Cross-entropy of the targets; the sums are those of each group's targets."""

    def sums(self, groups: int) -> int:
        return groups

    def denominator(self, batch: StepBatch) -> int:
        return batch.supervised_tokens

    def begin(self, model: nn.Module, batch: StepBatch, microbatches: Sequence[Microbatch]) -> None:
        pass

    def score(
        self,
        model: nn.Module,
        microbatch: Microbatch,
        head: ChunkedHead | None,
        *,
        groups: int,
    ) -> Scored:
        losses = microbatch_losses(model, microbatch, microbatch.input_ids.device, head)
        sums = sums_by_group(losses.detach().float(), microbatch.groups, groups)
        return Scored(losses.sum(), sums)
