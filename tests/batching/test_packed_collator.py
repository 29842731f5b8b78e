"""PackedCollator: a packed sequence is its rows one by one, with any model of transformers."""

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


def test_loss_and_gradients_are_those_of_the_rows_one_by_one() -> None:
    model = make_model(tiny_config("qwen3"), "sdpa").train().requires_grad_(True)
    found = []
    for batches in ([ROWS], [[row] for row in ROWS]):
        model.zero_grad()
        made = (PackedCollator()(batch) for batch in batches)
        loss = sum(model(**batch, num_items_in_batch=2 + 2 + 6).loss for batch in made)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for packed, alone in zip(*found, strict=True):
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-6)


def test_rows_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ValueError, match="the input_ids of the same places"):
        PackedCollator()([{"input_ids": [1, 2], "labels": [-100, 3]}])
    with pytest.raises(ValueError, match="input_ids are empty"):
        PackedCollator()([{"input_ids": [1, 2]}, {"input_ids": []}])
