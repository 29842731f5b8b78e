"""The loss of a loaded model per difficulty: over supervised tokens, by the microbatch schedule and the definition of
training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from finetune.commands.evaluate.scores import ModelScores
from finetune.data.collate import Answers
from finetune.data.preference.batches import AnswerBatches
from finetune.data.preference.samples import PreferenceSamples
from finetune.data.samples import Samples
from finetune.data.steps import Execution, LossGroups, StepBatches
from finetune.errors import FinetuneError
from finetune.modeling.attention import can_pack, choose_attention
from finetune.modeling.loss import ChunkedHead, make_chunked_head, microbatch_losses
from finetune.modeling.preference_loss import document_sums
from finetune.runtime import device as devices

SAMPLES_PER_BATCH = 64  # planned together, and one move of the progress bar
MICROBATCH_TOKENS = 2048
SAMPLES_PER_MICROBATCH = 4  # of padded microbatches


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
    """Add losses, targets and samples of the chosen samples to the model's scores; of pairs what they compare as.

    Args:
        chosen: int (n,), indices into `samples`.
        on_progress: called with the number of samples done since the last call.

    Raises:
        FinetuneError: one sample alone does not fit into the device's memory.
    """
    names = (*samples.difficulty_names, None)  # a sample without difficulty has -1, which is the last
    with _training_attention(model) as packing:
        longest = int(samples.lengths[chosen].max())
        execution = Execution(
            rank=0,
            world_size=1,
            token_budget=max(MICROBATCH_TOKENS, longest) if packing else None,
            samples_per_microbatch=None if packing else SAMPLES_PER_MICROBATCH,
        )
        batches_class = AnswerBatches if isinstance(samples, PreferenceSamples) else StepBatches
        microbatches = batches_class(
            samples,
            _Chosen(chosen),
            execution,
            difficulty_ids=samples.difficulties,
            groups=LossGroups(samples.difficulty_names),
            pad_token_id=pad_token_id,
        )
        head = make_chunked_head(model)
        for step in range(len(microbatches)):
            indices = microbatches.batches.indices(step)
            sums = _sums(model, microbatches, indices, head, longest)
            for difficulty in np.unique(samples.difficulties[indices]).tolist():
                score, members = scores.of(names[difficulty]), indices[samples.difficulties[indices] == difficulty]
                score.samples += len(members)
                score.loss_sum += float(sums[difficulty, 0])
                if isinstance(samples, PreferenceSamples):
                    score.targets += int(samples.first_supervised[members].sum())
                    score.pairs += len(members)
                    score.preferred += int(sums[difficulty, 1])
                    score.margin_sum += float(sums[difficulty, 2])
                else:
                    score.targets += int(samples.supervised_counts[members].sum())
            on_progress(len(indices))


def _sums(
    model: PreTrainedModel, step_batches: StepBatches, indices: np.ndarray, head: ChunkedHead | None, longest: int
) -> torch.Tensor:
    """What one batch adds to each difficulty, `(difficulties + 1, columns)`, the last for none; in smaller microbatches
    where the device's memory is short.

    Columns: losses; of pairs those of the chosen answers, how many have the higher mean log-probability, and by how
    much.
    """
    while True:
        sums = torch.zeros(len(step_batches.groups) + 1, 3, dtype=torch.float64)
        try:
            with torch.no_grad():
                for microbatch in step_batches.microbatches(indices, step_batches.execution):
                    losses = microbatch_losses(model, microbatch, model.device, head).double().cpu()
                    groups, columns = microbatch.groups, losses[:, None]
                    if microbatch.answers is not None:
                        groups, columns = microbatch.answers.groups, _compared(losses, microbatch.answers)
                    sums[:, : columns.shape[1]].index_add_(0, groups % len(sums), columns)
            return sums
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                raise
            smaller = step_batches.execution.smaller(longest)
            if smaller is None:
                raise FinetuneError(
                    f"a sample of {longest} tokens does not fit into the device's memory",
                    "evaluation",
                    "use a smaller --cutoff-len, --dtype bfloat16, or another device",
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
    """The attention that training uses on this device, for a while; whether microbatches may be packed under it."""
    before = model.config._attn_implementation
    attention = choose_attention(model.config)
    if attention is not None:
        model.set_attn_implementation(attention)
    try:
        yield can_pack(model.config)
    finally:
        model.set_attn_implementation(before)
