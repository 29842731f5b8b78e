"""What the model said before the run, which it is compared with; a second model is never in memory.

With an adapter it is the same model with the adapter off, asked microbatch by microbatch. A model
that is trained whole is asked once, before its first step; a run that resumes reads what was said
then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from finetune.batching.collate import Microbatch
from finetune.modeling.lora import adapter_off
from finetune.modeling.loss import ChunkedHead, microbatch_losses
from finetune.modeling.preference_loss import document_sums


class Reference(Protocol):
    """The model before the run."""

    def log_probabilities(
        self, model: torch.nn.Module, microbatch: Microbatch, head: ChunkedHead | None
    ) -> torch.Tensor:
        """`(documents,)`: of the answers of a microbatch that is on the device, without
        gradient.
        """


class AdapterOff:
    """The model that is trained, without its adapter and without dropout."""

    def log_probabilities(
        self, model: torch.nn.Module, microbatch: Microbatch, head: ChunkedHead | None
    ) -> torch.Tensor:
        with adapter_off(model):
            return log_probabilities(model, microbatch, head)


class Table:
    """What was said before the first step.

    Args:
        values: float32 `(samples, documents of one)`, where the microbatches are.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def log_probabilities(
        self, model: torch.nn.Module, microbatch: Microbatch, head: ChunkedHead | None
    ) -> torch.Tensor:
        assert microbatch.answers is not None
        return self.values[microbatch.answers.samples].flatten()


def log_probabilities(
    model: torch.nn.Module, microbatch: Microbatch, head: ChunkedHead | None
) -> torch.Tensor:
    """`(documents,)`: what a model says of the answers now, without dropout and without
    gradient.
    """
    assert microbatch.answers is not None
    with torch.no_grad(), _evaluating(model):
        losses = microbatch_losses(model, microbatch, microbatch.input_ids.device, head)
        return -document_sums(losses, microbatch.answers.targets)


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
