"""Windows of a token stream: which tokens, which targets; and the loss of a row of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.batching.collate import collate
from finetune.batching.steps import Execution, InOrder, LossGroups, StepBatches
from finetune.data.corpus.windows import BestFitWindows, Windows, pack_best_fit
from finetune.errors import DataError
from finetune.modeling.loss import microbatch_losses
from finetune.modeling.scratch import make_model, scratch_config


@dataclass
class Stream:
    """Token i is i."""

    tokens: int
    starts: list[int] = field(default_factory=lambda: [0])

    @property
    def documents(self) -> np.ndarray:
        return np.array([*self.starts, self.tokens], dtype=np.int64)

    def slice(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.tokens
        return np.arange(start, stop, dtype=np.int32)


@settings(deadline=None)
@given(st.integers(2, 400), st.integers(2, 40))
def test_every_token_but_the_first_is_a_target_once(tokens: int, length: int):
    if tokens <= length:
        with pytest.raises(DataError, match="not one window"):
            Windows(Stream(tokens), length)
        return
    windows = Windows(Stream(tokens), length)
    targets = np.concatenate([windows[i][0][1:] for i in range(len(windows))])
    assert targets.tolist() == list(range(1, len(windows) * length + 1))
    assert windows.cut_tokens == tokens - 1 - len(targets) < length
    assert (windows.lengths == length).all() and (windows.supervised_counts == length).all()


@settings(deadline=None)
@given(st.data())
def test_aligned_windows_begin_at_documents(data):
    starts = sorted({0, *data.draw(st.lists(st.integers(1, 299), max_size=40))})
    length = data.draw(st.integers(2, 60))
    windows = Windows(Stream(300, starts), length, document_aligned=True)
    assert windows.starts[0] == 0
    for number, start in enumerate(windows.starts.tolist()):
        assert windows[number][0].tolist() == list(range(start, start + length + 1))
    # By hand: the next is the first document at or behind the end.
    for before, after in itertools.pairwise(windows.starts.tolist()):
        assert after == min(start for start in starts if start >= before + length)
    assert windows.cut_tokens == 299 - len(windows) * length


@settings(deadline=None)
@given(st.data())
def test_best_fit_windows_are_whole_documents_but_for_the_last(data):
    starts = sorted({0, *data.draw(st.lists(st.integers(1, 299), max_size=40))})
    length = data.draw(st.integers(2, 60))
    windows = BestFitWindows(Stream(300, starts), length)
    documents = [list(range(*ends)) for ends in itertools.pairwise([*starts, 300])]
    packed, firsts = pack_best_fit(np.array(list(map(len, documents))), length + 1)
    assert len(windows) == len(windows.lengths) == len(firsts) - 1
    for number, (first, last) in enumerate(itertools.pairwise(firsts)):
        row = sum((documents[document] for document in packed[first:last]), [])
        assert windows[number][0].tolist() == row[: length + 1]
    assert windows.cut_tokens == 300 - len(windows) * (length + 1)


def step_batches(windows: Any, order: Any, *, rank=0, world=1, per_row=2) -> StepBatches:
    return StepBatches(
        windows,
        order,
        Execution(rank, world, token_budget=None, samples_per_microbatch=per_row),
        difficulty_ids=np.full(len(windows), -1),
        groups=LossGroups(),
        pad_token_id=0,
    )


def test_a_row_of_windows_and_the_first_of_them():
    assert Windows(Stream(101), 10, limit=3).starts.tolist() == [0, 10, 20]
    windows = [(np.arange(start, start + 5, dtype=np.int32), None, -1) for start in (0, 10)]
    row = collate(windows, packing=False, pad_token_id=0)
    assert row.input_ids.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert row.targets.tolist() == [1, 2, 3, 4, 11, 12, 13, 14]
    assert row.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert row.keep is None and "logits_to_keep" not in row.model_inputs(torch.device("cpu"))


def test_a_last_batch_that_is_not_full_is_filled_for_a_compiled_model():
    """Sums and counts are those of the windows alone; and all have one shape."""
    model = make_model(scratch_config("qwen3", 1, vocab_size=64, max_seq_len=8), seed=0)
    windows = Windows(Stream(5 * 8 + 1), 8)
    lengths = set()
    for rank in range(2):
        batches = step_batches(windows, InOrder(5, 4), rank=rank, world=2)
        for microbatch in batches[0].microbatches + batches[1].microbatches:
            filled, found = batches.filled(microbatch), []
            assert filled.input_ids.shape == (2, 8)
            for each in (microbatch, filled):
                with torch.no_grad():
                    losses = microbatch_losses(model, each, torch.device("cpu"), None)
                found.append(losses[: len(microbatch.targets)])
            torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
            lengths.add(len(microbatch.targets))
    assert lengths == {0, 8, 16}
    # Packed and supervised microbatches are left as they are.
    ids, mask = np.arange(6, dtype=np.int32), np.arange(6) % 3 > 0
    microbatch = collate([(ids, mask, 0)], packing=False, pad_token_id=0)
    assert step_batches([(ids, mask)], InOrder(1, 1)).filled(microbatch) is microbatch
