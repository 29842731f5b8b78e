"""Rows -> tensors: what one device takes in one forward, with its document boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Row:
    """One row as CPU tensors. T tokens of a packed row; S samples of a padded row, each a line of T; n targets.

    Attributes:
        input_ids: int64 `(1, T)` packed or `(S, T)` padded.
        position_ids: int64, the same shape; restarts at 0 in each document.
        keep: bool, the same shape; True where the *next* token is a target (so its logits are needed). None: all are,
            and the last tokens of the samples, which are only targets, are not among the inputs.
        targets: int64 `(n,)`: the next tokens there, in row-major order.
        levels: int64 `(n,)`: level of each target's sample; -1 where samples have none.
        document_lengths: tokens of each document of a packed row; None for a padded row.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    keep: torch.Tensor | None
    targets: torch.Tensor
    levels: torch.Tensor
    document_lengths: tuple[int, ...] | None

    @property
    def tokens(self) -> int:
        """Tokens that the device computes, padding included."""
        return self.input_ids.numel()

    def model_inputs(self, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of the model's forward, moved to `device`."""
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids.to(device, non_blocking=True),
            "position_ids": self.position_ids.to(device, non_blocking=True),
            "use_cache": False,
        }
        if self.keep is not None:
            inputs["logits_to_keep"] = self.keep.to(device, non_blocking=True)
        if self.document_lengths is not None:
            bounds = np.concatenate([[0], np.cumsum(self.document_lengths)])
            cu_seq_lens = torch.from_numpy(bounds.astype(np.int32)).to(device, non_blocking=True)
            longest = max(self.document_lengths)
            inputs |= {
                "document_lengths": self.document_lengths,
                "cu_seq_lens_q": cu_seq_lens,
                "cu_seq_lens_k": cu_seq_lens,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        return inputs


# input_ids int32 (t,); supervised bool (t,), or None: every token but the first is a target; level
Sample = tuple[np.ndarray, np.ndarray | None, int]


def collate(samples: Sequence[Sample], *, packing: bool, pad_token_id: int) -> Row:
    """Make the row of these samples, in their order; no samples make the empty row: two tokens without targets.

    The empty row keeps every rank at the same number of forwards and backwards (collectives match), and its loss is 0.
    """
    if not samples:
        ids = np.full(2, pad_token_id, dtype=np.int32)
        samples = [(ids, np.zeros(2, dtype=bool), -1)]
    if samples[0][1] is None:
        return _whole(samples)
    kept = [np.append(supervised[1:], False) for _, supervised, _ in samples]
    targets = np.concatenate([ids[1:][supervised[1:]] for ids, supervised, _ in samples])
    levels = np.concatenate([np.full(keep.sum(), level) for keep, (_, _, level) in zip(kept, samples, strict=True)])
    shape_row = _packed if packing else _padded
    ids = [ids for ids, _, _ in samples]
    return Row(
        input_ids=_tensor(shape_row(ids, pad_token_id)),
        position_ids=_tensor(shape_row([np.arange(len(line)) for line in ids], 0)),
        keep=torch.from_numpy(shape_row(kept, False)),
        targets=_tensor(targets),
        levels=_tensor(levels),
        document_lengths=tuple(len(line) for line in ids) if packing else None,
    )


def _whole(samples: Sequence[Sample]) -> Row:
    """The padded row of windows of one length, in which every token but the first is a target."""
    block = _tensor(np.stack([ids for ids, _, _ in samples]))
    inputs, targets = block[:, :-1], block[:, 1:]
    return Row(
        input_ids=inputs.contiguous(),
        position_ids=torch.arange(inputs.shape[1]).expand_as(inputs).contiguous(),
        keep=None,
        targets=targets.flatten(),
        levels=_tensor(np.repeat([level for _, _, level in samples], inputs.shape[1])),
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
