"""Logits -> scores whose argmax is the token to take, for rows with settings of their own.

Drawing is done with Gumbel noise (argmax of log-probability plus noise draws from the distribution; Gumbel, 1954). The
noise of a token is a hash of (seed, position, token), computed on the device: so an answer depends on its own seed
only, not on who else is in the batch, and a greedy row keeps its logits as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from finetune.inference.sampling import Draws, Sampling

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Row:
    """One row of logits: its settings and random numbers, and the tokens before it (prompt, then answer)."""

    sampling: Sampling
    draws: Draws
    history: Sequence[int]
    prompt_tokens: int


def adjust(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Float scores (rows, vocabulary); the argmax of each row of the result is its next token."""
    if scores.shape[0] != len(rows):
        raise ValueError(f"{scores.shape[0]} rows of logits for {len(rows)} requests")
    for number, row in enumerate(rows):
        if row.sampling.repetition_penalty != 1:
            scores = scores.clone()
            _penalise(scores[number], row)
    drawing = [number for number, row in enumerate(rows) if row.sampling.temperature > 0]
    if not drawing:
        return scores
    drawn = _draw(scores[drawing], [rows[number] for number in drawing])
    if len(drawing) == len(rows):
        return drawn
    scores = scores.clone()
    scores[drawing] = drawn
    return scores


def _penalise(scores: torch.Tensor, row: Row) -> None:
    # The rule of transformers' RepetitionPenaltyLogitsProcessor (Keskar et al., 2019).
    seen = torch.tensor(sorted(set(row.history)), device=scores.device)
    penalty = row.sampling.repetition_penalty
    picked = scores[seen]
    scores[seen] = torch.where(picked < 0, picked * penalty, picked / penalty)


def _draw(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=scores.device).unsqueeze(1)

    scores = scores.float() / column([row.sampling.temperature for row in rows], torch.float32)
    if any(row.sampling.top_k or row.sampling.top_p < 1 for row in rows):
        every = scores.shape[1]
        top_k = column([row.sampling.top_k or every for row in rows], torch.int64)
        top_p = column([row.sampling.top_p for row in rows], torch.float32)
        ordered, order = scores.sort(dim=-1, descending=True)
        rank = torch.arange(every, device=scores.device)
        ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
        share = ordered.softmax(dim=-1)
        before = share.cumsum(dim=-1) - share
        ordered = ordered.masked_fill((before >= top_p) & (rank > 0), -torch.inf)
        scores = torch.full_like(scores, -torch.inf).scatter(1, order, ordered)
    return scores + gumbel([row.draws.key(len(row.history) - row.prompt_tokens) for row in rows], scores)


def gumbel(keys: Sequence[tuple[int, int]], like: torch.Tensor) -> torch.Tensor:
    """Noise (rows, vocabulary) from two 32-bit keys a row."""
    key = torch.tensor(keys, dtype=torch.int64, device=like.device)
    token = torch.arange(like.shape[1], dtype=torch.int64, device=like.device)
    number = _mix((_mix(token ^ key[:, :1]) + key[:, 1:]) & _MASK)
    # float32 is fine near 0 and coarse near 1, and the smallest number wins: so it is kept exact, and below 1.
    uniform = ((number.float() + 0.5) / 2**32).clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(number: torch.Tensor) -> torch.Tensor:
    """The finalizer of MurmurHash3 (Appleby, public domain) on 32-bit numbers held in int64."""
    number = number ^ (number >> 16)
    number = (number * 0x85EBCA6B) & _MASK
    number = number ^ (number >> 13)
    number = (number * 0xC2B2AE35) & _MASK
    return number ^ (number >> 16)
