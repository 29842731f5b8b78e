"""Which records of the data are trained on and which validate: a split by hash, and exact
duplicates left out.

A record is identified by the hash of its content (turns and tools), regardless of its other keys
and its form. Equal records are duplicates, and fall on one side of a split. The hash has 64 bits.
Among ten million records, the probability that two different ones have the same hash is about 3 in
a million (n * n / 2**65).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from finetune.config.run_config import RunConfig
from finetune.data.formats import Conversation, Message
from finetune.data.preference.reader import Preference
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.errors import DataError

# Of a record that can be used: its number, hash of its content, hash that decides its side,
# whether it is labelled.
KEYS = np.dtype([("record", "<i8"), ("content", "<u8"), ("split", "<u8"), ("labelled", "?")])


@dataclass(frozen=True)
class Selection:
    """What a set of samples takes from its data files.

    Attributes:
        side: of the split.
        valid_split: below 1 the share of the records that validate, else their number; None: no
            split.
        split_by: key of a record whose equal values stay on one side.
        drop_duplicates: whether records that repeat an earlier one are left out.
    """

    side: Literal["train", "valid"] = "train"
    valid_split: float | None = None
    split_by: str | None = None
    drop_duplicates: bool = False

    def __bool__(self) -> bool:
        """Return whether anything is left out."""
        return self.valid_split is not None or self.drop_duplicates

    def key(
        self, number: int, record: Mapping[str, Any], found: Conversation, reader: RecordReader
    ) -> tuple[int, int, int, bool]:
        """Return a record's entry of `KEYS`.

        Raises:
            RecordProblem: it has nothing under `split_by`.
        """
        content = content_hash(found)
        if self.split_by is None:
            return number, content, content, found.difficulty is not None
        group = reader.value_of(record, self.split_by)
        # NaN, which pandas writes for what is missing
        if group is None or group == "" or group != group:
            raise RecordProblem("no group", f"no '{self.split_by}', which --split-by names")
        return number, content, _hash(_as_text(group)), found.difficulty is not None

    def choose(self, keys: np.ndarray, records: int, where: str) -> Chosen:
        """Take the records of this side.

        Args:
            keys: `KEYS` (N,) of all records that can be used, in order.
            records: how many there are with the others.
            where: the data, for messages.

        Raises:
            DataError: a side has no record.
        """
        if keys["labelled"].any():  # then a record without difficulty is not used
            keys = keys[keys["labelled"]]
        read = len(keys)
        if self.drop_duplicates:
            # the first of each, as the sort is stable
            firsts = np.unique(keys["content"], return_index=True)[1]
            keys = keys[np.sort(firsts)]
        different = len(keys)
        if self.valid_split is not None:
            validates = self._validates(keys["split"])
            if validates.all() or not validates.any():
                rest = "training" if validates.all() else "validation"
                raise DataError(
                    f"--valid-split {self.valid_split:g} leaves no record for {rest} of"
                    f" {different}",
                    where=where,
                    fix="give another share or number, or name validation files with --valid-data",
                )
            keys = keys[validates if self.side == "valid" else ~validates]
        mask = np.zeros(records, dtype=bool)
        mask[keys["record"]] = True
        return Chosen(mask, duplicates=read - different, other_side=different - len(keys))

    def _validates(self, hashes: np.ndarray) -> np.ndarray:
        """Return which hashes validate: those below a share of all possible hashes, or the
        smallest.

        Args:
            hashes: uint64 (N,).

        Returns:
            bool (N,).
        """
        assert self.valid_split is not None
        if self.valid_split < 1:
            return hashes < np.uint64(int(self.valid_split * 2**64))
        count = min(int(self.valid_split), len(hashes))
        return hashes <= np.partition(hashes, count - 1)[count - 1]


@dataclass(frozen=True)
class Chosen:
    """Records of all files that are taken."""

    mask: np.ndarray  # bool (records,)
    duplicates: int  # left out
    other_side: int  # of the split


def content_hash(conversation: Conversation) -> int:
    """64 bits of what is trained; a record's side depends on it, so it stays as it is."""
    content: list[Any] = [
        _turns(conversation.messages),
        [dict(tool) for tool in conversation.tools],
    ]
    if isinstance(conversation, Preference):
        content += [_turns(conversation.rejected), conversation.label]
    return _hash(content)


def _turns(messages: Sequence[Message]) -> list[Any]:
    """Return what is hashed of turns."""
    return [
        [
            turn.role,
            turn.content,
            turn.trained,
            turn.reasoning,
            [[call.name, call.arguments] for call in turn.calls],
        ]
        for turn in messages
    ]


def selection_of(config: RunConfig, side: Literal["train", "valid"] = "train") -> Selection:
    """Return what a run's training or validation takes from its `data`."""
    return Selection(side, config.valid_split, config.split_by, config.drop_duplicates)


def _hash(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, default=_plain)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _as_text(group: Any) -> Any:
    """Return a number as CSV has it: 1, 1.0 (pandas, of a column that lacks some) and "1" are one
    group.
    """
    if isinstance(group, bool) or not isinstance(group, (int, float)):
        return group
    return str(int(group) if isinstance(group, int) or group.is_integer() else group)


def _plain(value: Any) -> Any:
    """Convert what parquet has and JSON has not (dates, bytes), and mappings other than dicts."""
    return dict(value) if isinstance(value, Mapping) else str(value)
