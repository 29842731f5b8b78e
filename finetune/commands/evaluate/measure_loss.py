"""The losses of a loaded model, sample by sample: over supervised tokens, by the microbatch
schedule and the definition of training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from finetune.batching.collate import Answers
from finetune.batching.steps import Execution, LossGroups, SampleSource, StepBatches
from finetune.errors import FinetuneError
from finetune.modeling.attention import can_pack, choose_attention
from finetune.modeling.loss import ChunkedHead, make_chunked_head, microbatch_losses
from finetune.modeling.preference_loss import document_sums
from finetune.runtime import device as devices
from finetune.runtime.terminal import console as terminal_console

SAMPLES_PER_BATCH = 64  # planned together, and one move of the progress bar
MICROBATCH_TOKENS = 2048
SAMPLES_PER_MICROBATCH = 4  # of padded microbatches


@dataclass(frozen=True)
class _Chosen:
    """Global batches of the chosen samples, in order; see `batching.steps.BatchSource`."""

    samples: np.ndarray

    @property
    def total_steps(self) -> int:
        return -(-len(self.samples) // SAMPLES_PER_BATCH)

    def indices(self, step: int) -> np.ndarray:
        return self.samples[step * SAMPLES_PER_BATCH : (step + 1) * SAMPLES_PER_BATCH]


def sample_sums(
    model: PreTrainedModel,
    samples: SampleSource,
    chosen: np.ndarray,
    batches_class: type[StepBatches],
    *,
    pad_token_id: int,
    on_progress: Callable[[int], None],
) -> np.ndarray:
    """What each chosen sample adds up to: float64 `(n, 3)`.

    Columns: its losses; of a pair those of the chosen answer, whether that one has the higher mean
    log-probability, and by how much.

    Args:
        chosen: int (n,), indices into `samples`, each once.
        on_progress: called with the number of samples done since the last call.

    Raises:
        FinetuneError: one sample alone does not fit into the device's memory.
    """
    found = np.empty((len(chosen), 3))
    # A group of losses is a sample: its place in the batch.
    places = np.full(len(samples), -1)
    places[chosen] = np.arange(len(chosen)) % SAMPLES_PER_BATCH
    with _training_attention(model) as packing:
        longest = int(samples.lengths[chosen].max())
        execution = Execution(
            rank=0,
            world_size=1,
            token_budget=max(MICROBATCH_TOKENS, longest) if packing else None,
            samples_per_microbatch=None if packing else SAMPLES_PER_MICROBATCH,
        )
        microbatches = batches_class(
            samples,
            _Chosen(chosen),
            execution,
            difficulty_ids=places,
            groups=LossGroups(tuple(map(str, range(SAMPLES_PER_BATCH)))),
            pad_token_id=pad_token_id,
        )
        head = make_chunked_head(model)
        for step in range(len(microbatches)):
            indices, start = microbatches.batches.indices(step), step * SAMPLES_PER_BATCH
            sums = _sums(model, microbatches, indices, head, longest)
            found[start : start + len(indices)] = sums[: len(indices)].numpy()
            on_progress(len(indices))
    return found


def _sums(
    model: PreTrainedModel,
    step_batches: StepBatches,
    indices: np.ndarray,
    head: ChunkedHead | None,
    longest: int,
) -> torch.Tensor:
    """The rows of one batch, `(SAMPLES_PER_BATCH, 3)`; in smaller microbatches where the device's
    memory is short.
    """
    while True:
        sums = torch.zeros(len(step_batches.groups), 3, dtype=torch.float64)
        try:
            with torch.no_grad():
                for microbatch in step_batches.microbatches(indices, step_batches.execution):
                    losses = microbatch_losses(model, microbatch, model.device, head).double().cpu()
                    groups, columns = microbatch.groups, losses[:, None]
                    if microbatch.answers is not None:
                        groups, columns = (
                            microbatch.answers.groups,
                            _compared(losses, microbatch.answers),
                        )
                    sums[:, : columns.shape[1]].index_add_(0, groups, columns)
            return sums
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                raise
            smaller = step_batches.execution.smaller(longest)
            if smaller is None:
                raise FinetuneError(
                    f"a sample of {longest} tokens does not fit into the device's memory",
                    "evaluation",
                    "use a smaller --cutoff-len (--max-seq-len of texts), --dtype bfloat16, or"
                    " another device",
                ) from error
        devices.empty_cache(model.device)
        step_batches.execution = smaller


def _compared(losses: torch.Tensor, answers: Answers) -> torch.Tensor:
    """The columns of each pair."""
    totals = document_sums(losses, answers.targets)
    means = totals / answers.counts
    margins = means[1::2] - means[0::2]
    return torch.stack([totals[0::2], (margins > 0).double(), margins], dim=1)


@contextmanager
def _training_attention(model: PreTrainedModel) -> Iterator[bool]:
    """The attention that training uses on this device, for a while; whether microbatches may be
    packed under it.
    """
    before = model.config._attn_implementation
    attention = choose_attention(model.config)
    if attention is not None:
        model.set_attn_implementation(attention)
    try:
        yield can_pack(model.config)
    finally:
        model.set_attn_implementation(before)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import Progress as Bars

    with Bars(console=terminal_console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total)
        yield lambda count: bars.advance(task, count)
