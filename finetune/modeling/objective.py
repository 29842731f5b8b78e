"""What a step minimises, so that whoever executes steps need not know: the token loss, or one of
preferences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from finetune.batching.collate import Microbatch
from finetune.batching.steps import StepBatch
from finetune.modeling.loss import ChunkedHead, microbatch_losses, sums_by_group


@dataclass(frozen=True)
class Scored:
    """What an objective says of one microbatch.

    Attributes:
        total: scalar, part of the graph. Its sum over all microbatches of a step, by
            `Objective.denominator`, is the loss of the global batch, however the microbatches are
            cut.
        sums: `(Objective.sums,)`, without gradient: what the log adds up over microbatches, ranks
            and steps.
    """

    total: torch.Tensor
    sums: torch.Tensor


class Objective(Protocol):
    """The loss of a global batch as a sum over its microbatches."""

    def sums(self, groups: int) -> int:
        """How many numbers `Scored.sums` has, with so many groups of samples."""

    def denominator(self, batch: StepBatch) -> int:
        """What the summed totals of a global batch are divided by."""

    def begin(self, model: torch.nn.Module, batch: StepBatch) -> None:
        """Before the microbatches of a step, in the order of steps. Every rank calls."""

    def score(
        self,
        model: torch.nn.Module,
        microbatch: Microbatch,
        head: ChunkedHead | None,
        *,
        groups: int,
    ) -> Scored:
        """One microbatch that is on the model's device."""


class TokenLoss:
    """Cross-entropy of the targets; its sums are those of each group's targets."""

    def sums(self, groups: int) -> int:
        return groups

    def denominator(self, batch: StepBatch) -> int:
        return batch.supervised_tokens

    def begin(self, model: torch.nn.Module, batch: StepBatch) -> None:
        pass

    def score(
        self,
        model: torch.nn.Module,
        microbatch: Microbatch,
        head: ChunkedHead | None,
        *,
        groups: int,
    ) -> Scored:
        losses = microbatch_losses(model, microbatch, microbatch.input_ids.device, head)
        return Scored(
            losses.sum(), sums_by_group(losses.detach().float(), microbatch.groups, groups)
        )
