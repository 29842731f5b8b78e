"""Microbatches as tensors: what one device takes in one forward, with its document boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from finetune.runtime.device import DEVICE_KINDS


@dataclass(frozen=True)
class Answers:
    """What a preference loss needs in addition to a microbatch's targets: S samples with D
    documents, in order.

    A pair has two documents, the chosen answer's first; a record with a label has one.
    """

    targets: tuple[int, ...]  # `(D,)`: targets of each document
    counts: torch.Tensor  # int64 `(D,)`: the same, where the losses are
    samples: torch.Tensor  # int64 `(S,)`: their numbers in the data
    groups: torch.Tensor  # int64 `(S,)`: of `LossGroups`; -1 for none
    labels: torch.Tensor  # int64 `(S,)`: 1 for a good answer, 0 for a bad one, -1 for a pair


@dataclass(frozen=True)
class Microbatch:
    """One microbatch, made as CPU tensors.

    T is the number of tokens in a packed microbatch. A padded microbatch has S samples, each a row
    of T tokens. n is the number of targets. The inputs of the model's forward are made here once:
    computing them from these tensors on the device would make the host wait.
    """

    input_ids: torch.Tensor  # int64 `(1, T)` packed or `(S, T)` padded
    position_ids: torch.Tensor  # int64, the same shape; restarts at 0 in each document
    # Where the *next* token is a target, so that its logits are needed. Packed: int64 `(n,)`,
    # positions in the sequence (a mask has as many entries as the host can only know by waiting for
    # the device). Padded: bool, the shape of input_ids, because samples have different numbers of
    # targets. None: everywhere, and the last tokens of the samples, which are only targets, are not
    # among the inputs.
    keep: torch.Tensor | None
    targets: torch.Tensor  # int64 `(n,)`: the next tokens there, in row-major order
    # int64 `(n,)`: what each target's loss is summed by, of `LossGroups`; -1 for none
    groups: torch.Tensor
    # tokens of each document of a packed microbatch; None for a padded one
    document_lengths: tuple[int, ...] | None
    # int32 `(documents + 1,)`: their running sum, where there are lengths
    cu_seq_lens: torch.Tensor | None = None
    answers: Answers | None = None  # of preferences

    @property
    def tokens(self) -> int:
        """Tokens that the device computes, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> Microbatch:
        """Return the microbatch on `device`; neither host nor device waits for the copies."""
        # Page-locked first, if that makes a copy asynchronous: CUDA stages other memory through its
        # own buffer, torch_npu waits for the stream after each copy. Not in the loader, because
        # microbatches of evaluation, rehearsal and retries do not come through one. torch keeps the
        # few pages for the next microbatch.
        kind = DEVICE_KINDS.get(device.type)
        pinned = kind is not None and kind.pinned_copies

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if pinned and tensor.device.type == "cpu":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        def moved(holder: Microbatch | Answers) -> dict[str, Any]:
            tensors = [
                (name, value)
                for name, value in vars(holder).items()
                if isinstance(value, torch.Tensor)
            ]
            return {name: move(tensor) for name, tensor in tensors}

        answers = self.answers
        if answers is not None:
            answers = replace(answers, **moved(answers))
        return replace(self, **moved(self), answers=answers)

    def model_inputs(self, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of the model's forward, on `device`."""
        here = self.to(device)
        inputs: dict[str, Any] = {
            "input_ids": here.input_ids,
            "position_ids": here.position_ids,
            "use_cache": False,
        }
        if here.keep is not None:
            inputs["logits_to_keep"] = here.keep
        if here.document_lengths is not None:
            longest = max(here.document_lengths)
            inputs |= {
                "document_lengths": here.document_lengths,
                "cu_seq_lens_q": here.cu_seq_lens,
                "cu_seq_lens_k": here.cu_seq_lens,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        return inputs


# input_ids int32 (t,); supervised bool (t,), or None: every token but the first is a target; group
Sample = tuple[np.ndarray, np.ndarray | None, int]


def collate(samples: Sequence[Sample], *, packing: bool, pad_token_id: int) -> Microbatch:
    """Make the microbatch of these samples, in their order; no samples make the empty one.

    The empty microbatch has two tokens and no targets: it keeps every rank at the same number of
    forwards and backwards (collectives match), and its loss is 0.
    """
    if not samples:
        padding = np.full(2, pad_token_id, dtype=np.int32)
        samples = [(padding, np.zeros(2, dtype=bool), -1)]
    masks = [supervised for _, supervised, _ in samples if supervised is not None]
    if not masks:
        return _whole(samples)
    lines = [ids for ids, _, _ in samples]
    kept = [np.append(mask[1:], False) for mask in masks]
    targets = [line[1:][mask[1:]] for line, mask in zip(lines, masks, strict=True)]
    return _joined(
        lines,
        kept,
        targets,
        [group for _, _, group in samples],
        packing=packing,
        pad_token_id=pad_token_id,
    )


def collate_windows(
    windows: Sequence[tuple[np.ndarray, np.ndarray, int]], *, packing: bool, pad_token_id: int
) -> Microbatch:
    """Collate windows of any length, whose last tokens are only targets and not among the
    inputs.
    """
    return _joined(
        [ids[:-1] for ids, _, _ in windows],
        [mask[1:] for _, mask, _ in windows],
        [ids[1:][mask[1:]] for ids, mask, _ in windows],
        [group for _, _, group in windows],
        packing=packing,
        pad_token_id=pad_token_id,
    )


def _joined(
    lines: list[np.ndarray],
    kept: list[np.ndarray],
    targets: list[np.ndarray],
    groups: list[int],
    *,
    packing: bool,
    pad_token_id: int,
) -> Microbatch:
    """Make the microbatch of samples.

    Args:
        lines: int32 `(t,)` for each sample: its input ids.
        kept: bool `(t,)` for each sample: whether the next token is a target.
        targets: int32 `(n,)` for each sample: these targets.
        groups: of each sample, see `LossGroups`.
    """
    join = _packed if packing else _padded
    keep = join(kept, False)
    lengths = [len(line) for line in lines]
    return Microbatch(
        input_ids=_tensor(join(lines, pad_token_id)),
        position_ids=_tensor(join([np.arange(length) for length in lengths], 0)),
        keep=_tensor(np.flatnonzero(keep)) if packing else torch.from_numpy(keep),
        targets=_tensor(np.concatenate(targets)),
        groups=_tensor(np.repeat(groups, [len(of_line) for of_line in targets])),
        document_lengths=tuple(lengths) if packing else None,
        cu_seq_lens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) if packing else None,
    )


def _whole(samples: Sequence[Sample]) -> Microbatch:
    """Return the padded microbatch of windows of one length, in which every token but the first is
    a target.
    """
    block = _tensor(np.stack([ids for ids, _, _ in samples]))
    inputs = block[:, :-1]
    targets = block[:, 1:]
    groups = np.array([group for _, _, group in samples])
    return Microbatch(
        input_ids=inputs.contiguous(),
        position_ids=torch.arange(inputs.shape[1]).expand_as(inputs).contiguous(),
        keep=None,
        targets=targets.flatten(),
        groups=_tensor(np.repeat(groups, inputs.shape[1])),
        document_lengths=None,
    )


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _packed(lines: list[np.ndarray], fill: Any) -> np.ndarray:
    return np.concatenate(lines)[None, :]


def _padded(lines: list[np.ndarray], fill: Any) -> np.ndarray:
    longest = max(len(line) for line in lines)
    block = np.full((len(lines), longest), fill, dtype=lines[0].dtype)
    for number, line in enumerate(lines):
        block[number, : len(line)] = line
    return block


IGNORED = -100  # a label that has no loss


class PackedCollator:
    """Joins rows into one sequence without padding. Positions restart in each row, which keeps the
    rows' attention separate.

    A row has `input_ids` and, if not every token is trained, `labels` with -100 for tokens that are
    not. With `sdpa`, `flex_attention` and `eager` attention, transformers identifies the documents
    by their positions; see `transformers.masking_utils`. Loss and gradients then match those of the
    rows one by one, weighted by their targets. They do not if layers carry a state from row to row,
    as Mamba's and LFM2's do (the trainers here keep LFM2's separate).

    A call returns `input_ids`, `position_ids` and `labels`, int64 `(1, T)`, and `use_cache` False:
    with a cache, transformers ignores positions.

    Raises:
        ValueError: a row has no tokens, or its labels are not its own tokens.

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
