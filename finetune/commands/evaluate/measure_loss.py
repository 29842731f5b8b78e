"""The losses of a loaded model, sample by sample, over supervised tokens, with the microbatch
schedule and the loss of training.
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

SAMPLES_PER_BATCH = 64  # planned together; a step of the progress bar
MICROBATCH_TOKENS = 2048
SAMPLES_PER_MICROBATCH = 4  # of padded microbatches


@dataclass(frozen=True)
class _Chosen:
    """Global batches of the chosen samples, in order: a `batching.steps.BatchSource`."""

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
    """Sum the losses of each chosen sample.

    Args:
        chosen: int `(n,)`, indices into `samples`, each once.
        on_progress: called with the number of samples done since the last call.

    Returns:
        float64 `(n, 3)`: the summed losses (for a pair, the chosen answer's), whether a pair's
        chosen answer has the higher mean log-probability, and the margin.

    Raises:
        FinetuneError: a single sample does not fit into the device's memory.
    """
    found = np.empty((len(chosen), 3))
    # Losses are grouped by sample: the group is the sample's position in the batch.
    positions = np.full(len(samples), -1)
    positions[chosen] = np.arange(len(chosen)) % SAMPLES_PER_BATCH
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
            difficulty_ids=positions,
            groups=LossGroups(tuple(map(str, range(SAMPLES_PER_BATCH)))),
            pad_token_id=pad_token_id,
        )
        head = make_chunked_head(model)
        for step in range(len(microbatches)):
            indices = microbatches.batches.indices(step)
            start = step * SAMPLES_PER_BATCH
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
    """Return the rows of one batch, `(SAMPLES_PER_BATCH, 3)`. If memory runs out, use smaller
    microbatches from here on.
    """
    while True:
        sums = torch.zeros(len(step_batches.groups), 3, dtype=torch.float64)
        try:
            with torch.no_grad():
                for microbatch in step_batches.microbatches(indices, step_batches.execution):
                    losses = microbatch_losses(model, microbatch, model.device, head).double().cpu()
                    if microbatch.answers is None:
                        sums[:, 0].index_add_(0, microbatch.groups, losses)
                    else:
                        pairs = _compare_pairs(losses, microbatch.answers)
                        sums.index_add_(0, microbatch.answers.groups, pairs)
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


def _compare_pairs(losses: torch.Tensor, answers: Answers) -> torch.Tensor:
    """Return the columns of each pair, `(pairs, 3)`."""
    totals = document_sums(losses, answers.targets)
    means = totals / answers.counts
    margins = means[1::2] - means[0::2]
    return torch.stack([totals[0::2], (margins > 0).double(), margins], dim=1)


@contextmanager
def _training_attention(model: PreTrainedModel) -> Iterator[bool]:
    """Use the attention of training on this device; yield whether it allows packed microbatches."""
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
    """Show a progress bar if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import Progress as Bars

    with Bars(console=terminal_console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total)
        yield lambda count: bars.advance(task, count)
