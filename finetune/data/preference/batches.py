"""Microbatches of preferences: a pair is one sample of two documents, which lie side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from finetune.data.collate import Answers, Microbatch, collate
from finetune.data.steps import SampleSource, StepBatches


class AnswerSource(SampleSource, Protocol):
    """What training on preferences needs of a data set; `PreferenceSamples` is one."""

    # int (N,): tokens of a pair's first document; 0 where a sample is one document
    first_lengths: np.ndarray
    first_supervised: np.ndarray  # int (N,): targets of that document
    labels: np.ndarray  # int (N,): 1 for a good answer, 0 for a bad one, -1 for a pair

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...


class AnswerBatches(StepBatches):
    """The steps of a run on preferences."""

    samples: AnswerSource

    def tokens_of(self, indices: np.ndarray, *, packing: bool) -> np.ndarray:
        lengths, first = self.samples.lengths[indices], self.samples.first_lengths[indices]
        # Padded, the documents of a pair are two lines, as long as the longer of them.
        return (
            lengths
            if packing
            else np.where(first > 0, 2 * np.maximum(first, lengths - first), lengths)
        )

    def microbatch(self, indices: np.ndarray, *, packing: bool) -> Microbatch:
        groups, documents = self._groups_of(indices), []
        for index, group in zip(indices.tolist(), groups.tolist(), strict=True):
            ids, supervised = self.samples[index]
            first = int(self.samples.first_lengths[index])
            cuts = [0, first, len(ids)] if first else [0, len(ids)]
            documents += [
                (ids[begin:end], supervised[begin:end], group)
                for begin, end in zip(cuts, cuts[1:], strict=False)
            ]
        targets = tuple(int(supervised[1:].sum()) for _, supervised, _ in documents)
        answers = Answers(
            targets=targets,
            counts=torch.tensor(targets, dtype=torch.int64),
            samples=torch.from_numpy(indices.astype(np.int64)),
            groups=torch.from_numpy(groups.astype(np.int64)),
            labels=torch.from_numpy(self.samples.labels[indices].astype(np.int64)),
        )
        return replace(
            collate(documents, packing=packing, pad_token_id=self.pad_token_id), answers=answers
        )
