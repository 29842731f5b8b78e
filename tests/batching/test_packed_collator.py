"""PackedCollator: a packed sequence is its rows one by one, with any model and loop of
transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import make_model, tiny_config

from finetune import PackedCollator

ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
    {"input_ids": [9, 10, 11], "labels": [-100, 10, 11]},
    {"input_ids": [12, 13, 14, 15, 16, 17, 18]},
]


def loss_and_gradient(
    model: torch.nn.Module, batches: list[dict[str, Any]], targets: int
) -> tuple[float, Any]:
    """Of the sum of losses over so many targets."""
    model.zero_grad()
    losses = [model(**batch, num_items_in_batch=targets).loss for batch in batches]
    sum(losses).backward()  # type: ignore[union-attr]
    return sum(loss.item() for loss in losses), [
        p.grad.clone() for p in model.parameters() if p.grad is not None
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_loss_and_gradients_are_those_of_the_rows_one_by_one(
    model_type: str, attention: str
) -> None:
    model = make_model(tiny_config(model_type), attention).train().requires_grad_(True)
    collate, targets = PackedCollator(), 2 + 2 + 6
    packed = loss_and_gradient(model, [collate(ROWS)], targets)
    alone = loss_and_gradient(model, [collate([row]) for row in ROWS], targets)
    assert packed[0] == pytest.approx(alone[0], rel=1e-5)
    for ours, wanted in zip(packed[1], alone[1], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)


def test_labels_that_are_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="the input_ids of the same places"):
        PackedCollator()([{"input_ids": [1, 2], "labels": [-100, 3]}])


def test_a_row_without_tokens_is_refused() -> None:
    for row in ({"input_ids": []}, {"input_ids": [], "labels": []}):
        with pytest.raises(ValueError, match="input_ids are empty"):
            PackedCollator()([{"input_ids": [1, 2]}, row])
