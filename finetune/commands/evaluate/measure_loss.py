"""The loss of a loaded model per level: over supervised tokens, by the plan and the definition that training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from finetune.commands.evaluate.scores import ModelScores
from finetune.data.samples import Samples
from finetune.data.steps import Execution, StepRows
from finetune.errors import FinetuneError
from finetune.modeling.attention import can_pack, choose_attention
from finetune.modeling.loss import ChunkedHead, make_chunked_head, row_losses
from finetune.runtime import device as devices

SAMPLES_PER_BATCH = 64  # planned together, and one move of the progress bar
ROW_TOKENS = 2048
SAMPLES_PER_ROW = 4  # of padded rows


@dataclass(frozen=True)
class _Chosen:
    """Global batches of the chosen samples, in order; see `data.steps.BatchSource`."""

    samples: np.ndarray

    @property
    def total_steps(self) -> int:
        return -(-len(self.samples) // SAMPLES_PER_BATCH)

    def indices(self, step: int) -> np.ndarray:
        return self.samples[step * SAMPLES_PER_BATCH : (step + 1) * SAMPLES_PER_BATCH]


def add_losses(
    scores: ModelScores,
    model: PreTrainedModel,
    samples: Samples,
    chosen: np.ndarray,
    *,
    pad_token_id: int,
    on_progress: Callable[[int], None],
) -> None:
    """Add losses, targets and samples of the chosen samples to the model's scores.

    Args:
        chosen: int (n,), indices into `samples`.
        on_progress: called with the number of samples done since the last call.

    Raises:
        FinetuneError: one sample alone does not fit into the device's memory.
    """
    names = (*samples.level_names, None)  # a sample without level has -1, which is the last
    with _training_attention(model) as packing:
        longest = int(samples.lengths[chosen].max())
        execution = Execution(
            rank=0,
            world_size=1,
            token_budget=max(ROW_TOKENS, longest) if packing else None,
            samples_per_row=None if packing else SAMPLES_PER_ROW,
        )
        rows = StepRows(
            samples,
            _Chosen(chosen),
            execution,
            level_ids=samples.levels,
            levels=len(samples.level_names),
            pad_token_id=pad_token_id,
        )
        head = make_chunked_head(model)
        for step in range(len(rows)):
            indices = rows.batches.indices(step)
            sums = _sums(model, rows, indices, head, longest)
            for level in np.unique(samples.levels[indices]).tolist():
                score, members = scores.of(names[level]), indices[samples.levels[indices] == level]
                score.samples += len(members)
                score.targets += int(samples.supervised_counts[members].sum())
                score.loss_sum += float(sums[level])
            on_progress(len(indices))


def _sums(
    model: PreTrainedModel, rows: StepRows, indices: np.ndarray, head: ChunkedHead | None, longest: int
) -> torch.Tensor:
    """Sums of the losses of one batch per level, the last for none; smaller rows where the device's memory is short."""
    while True:
        sums = torch.zeros(rows.levels + 1, dtype=torch.float64)
        try:
            with torch.no_grad():
                for row in rows.rows(indices, rows.execution):
                    losses = row_losses(model, row, model.device, head).double().cpu()
                    sums.index_add_(0, row.levels % (rows.levels + 1), losses)
            return sums
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                raise
            smaller = rows.execution.smaller(longest)
            if smaller is None:
                raise FinetuneError(
                    f"a sample of {longest} tokens does not fit into the device's memory",
                    "evaluation",
                    "use a smaller --cutoff-len, --dtype bfloat16, or another device",
                ) from error
        devices.empty_cache(model.device)
        rows.execution = smaller


@contextmanager
def _training_attention(model: PreTrainedModel) -> Iterator[bool]:
    """The attention that training uses on this device, for a while; whether rows may be packed under it."""
    before = model.config._attn_implementation
    attention = choose_attention(model.config, model.device.type, model.dtype)
    if attention is not None:
        model.set_attn_implementation(attention)
    try:
        yield can_pack(model.config)
    finally:
        model.set_attn_implementation(before)
