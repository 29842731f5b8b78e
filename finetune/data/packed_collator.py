"""Packed sequences for any loop whose model is one of transformers: a collator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from finetune.data.collate import Sample, collate

IGNORED = -100  # a label that has no loss


class PackedCollator:
    """Joins rows into one sequence without padding; positions restart in each, which keeps their
    attention apart.

    A row has `input_ids` and, where not every token is trained, `labels` with -100 for those that
    are not. transformers tells the documents by their positions, with `sdpa`, `flex_attention` and
    `eager` attention; see `transformers.masking_utils`. Loss and gradients are then those of the
    rows one by one, weighted by their targets; not where layers carry a state from row to row, as
    Mamba's and LFM2's do (the trainers here keep LFM2's apart).

    Returns, called: `input_ids`, `position_ids` and `labels`, int64 `(1, T)`; `use_cache` False:
        with a cache, positions are not looked at.

    Raises:
        ValueError: a row has no tokens, or labels are not its own tokens.

    >>> from finetune import PackedCollator
    >>> rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9]}]
    >>> batch = PackedCollator()(rows)
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 0, 1]], [[-100, 6, 7, -100, 9]])
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        microbatch = collate([_sample(row) for row in rows], packing=True, pad_token_id=0)
        assert microbatch.keep is not None, "a packed microbatch names its targets' places"
        labels = torch.full_like(microbatch.input_ids, IGNORED)
        labels[0, microbatch.keep + 1] = microbatch.targets
        return {
            "input_ids": microbatch.input_ids,
            "position_ids": microbatch.position_ids,
            "labels": labels,
            "use_cache": False,
        }


def _sample(row: Mapping[str, Any]) -> Sample:
    ids = np.asarray(row["input_ids"], dtype=np.int32)
    if not ids.size:
        raise ValueError("input_ids are empty: leave such rows out")
    labels = np.asarray(row["labels"] if row.get("labels") is not None else ids)
    trained = labels != IGNORED
    if labels.shape != ids.shape or (labels[trained] != ids[trained]).any():
        raise ValueError("labels must be the input_ids of the same places, or -100")
    return ids, trained, -1
