"""Turn logits into scores whose argmax is the next token, with separate settings per sequence.

Sampling uses Gumbel noise (the argmax of log-probability plus noise samples from the distribution;
Gumbel, 1954). The noise of a token is a hash of (seed, position, token), computed on the device. An
answer therefore depends on its own seed only, not on the rest of the batch. A greedy sequence keeps
its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from finetune.inference.sampling import Draws, Sampling

SMALLEST_TEMPERATURE = 1e-6  # as good as 0
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class RunningSequence:
    """One sequence of a batch: its settings and random numbers, and its tokens so far (prompt, then
    answer).
    """

    sampling: Sampling
    draws: Draws
    history: Sequence[int]
    prompt_tokens: int

    def key(self) -> tuple[int, int]:
        """Return the key of its next token's random number."""
        return self.draws.key(len(self.history) - self.prompt_tokens)


def adjust(scores: torch.Tensor, sequences: Sequence[RunningSequence]) -> torch.Tensor:
    """Return float32 scores `(sequences, vocabulary)` whose argmax is the next token."""
    if scores.shape[0] != len(sequences):
        raise ValueError(f"logits of {scores.shape[0]} sequences for {len(sequences)} requests")
    scores = scores.to(torch.float32, copy=True)
    drawing = []
    for number, sequence in enumerate(sequences):
        if sequence.sampling.repetition_penalty != 1:
            _penalize(scores[number], sequence)
        if sequence.sampling.temperature > 0:
            drawing.append(number)
    if drawing:
        scores[drawing] = _draw(scores[drawing], [sequences[number] for number in drawing])
    return scores


def adjust_each(
    scores: torch.Tensor, sequences: Sequence[RunningSequence]
) -> tuple[torch.Tensor, dict[int, Exception]]:
    """Adjust scores, but keep those of a sequence that fails, and return its error.

    Requests of several clients share a batch: an error of one must not end the others.
    """
    try:
        return adjust(scores, sequences), {}
    # raised again below for the sequences that it belongs to
    except Exception:
        scores = scores.float()
        failed = {}
        for number, sequence in enumerate(sequences):
            one = slice(number, number + 1)
            try:
                scores[one] = adjust(scores[one], [sequence])
            except Exception as error:
                failed[number] = error
        return scores, failed


def _penalize(scores: torch.Tensor, sequence: RunningSequence) -> None:
    # The rule of transformers' RepetitionPenaltyLogitsProcessor (Keskar et al., 2019).
    seen = torch.tensor(sorted(set(sequence.history)), device=scores.device)
    penalty = sequence.sampling.repetition_penalty
    picked = scores[seen]
    scores[seen] = torch.where(picked < 0, picked * penalty, picked / penalty)


def _draw(scores: torch.Tensor, sequences: Sequence[RunningSequence]) -> torch.Tensor:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=scores.device).unsqueeze(1)

    # A temperature that float32 rounds to 0 would make every score infinite.
    temperatures = [
        max(sequence.sampling.temperature, SMALLEST_TEMPERATURE) for sequence in sequences
    ]
    scores = scores / column(temperatures, torch.float32)
    if any(sequence.sampling.top_k or sequence.sampling.top_p < 1 for sequence in sequences):
        every = scores.shape[1]
        top_k = column([sequence.sampling.top_k or every for sequence in sequences], torch.int64)
        top_p = column([sequence.sampling.top_p for sequence in sequences], torch.float32)
        ordered, order = scores.sort(dim=-1, descending=True)
        rank = torch.arange(every, device=scores.device)
        ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
        share = ordered.softmax(dim=-1)
        before = share.cumsum(dim=-1) - share
        ordered = ordered.masked_fill((before >= top_p) & (rank > 0), -torch.inf)
        scores = torch.full_like(scores, -torch.inf).scatter(1, order, ordered)
    return scores + gumbel([sequence.key() for sequence in sequences], scores)


def gumbel(keys: Sequence[tuple[int, int]], like: torch.Tensor) -> torch.Tensor:
    """Noise (sequences, vocabulary) from two 32-bit keys a sequence."""
    key = torch.tensor(keys, dtype=torch.int64, device=like.device)
    token = torch.arange(like.shape[1], dtype=torch.int64, device=like.device)
    number = _mix((_mix(token ^ key[:, :1]) + key[:, 1:]) & _MASK)
    # float32 is fine near 0 and coarse near 1, and the smallest number wins: so it is kept exact,
    # and below 1.
    uniform = ((number.float() + 0.5) / 2**32).clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(number: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of MurmurHash3 (Appleby, public domain) to 32-bit numbers in int64."""
    number = number ^ (number >> 16)
    number = (number * 0x85EBCA6B) & _MASK
    number = number ^ (number >> 13)
    number = (number * 0xC2B2AE35) & _MASK
    return number ^ (number >> 16)
