"""Which records of the data are trained on and which validate: a split by hash, and exact
duplicates left out.

A record is known by the hash of what it says, its turns and tools, whatever its other keys and its
form: equal ones are duplicates, and fall on one side of a split. Two different records of 64 bits
are taken for equal about once in a thousand billion pairs of ten million records (n * n / 2**65).
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from finetune.config.run_config import RunConfig
from finetune.data.formats import Conversation, Message
from finetune.data.preference.records import Preference
from finetune.data.problems import RecordProblem
from finetune.data.records import RecordReader
from finetune.errors import DataError
from finetune.storage.durable_files import replace_file

# Of a record that can be used: its number, hash of what it says, hash that decides its side,
# whether it is labelled.
KEYS = np.dtype([("record", "<i8"), ("content", "<u8"), ("split", "<u8"), ("labelled", "?")])


@dataclass(frozen=True)
class Selection:
    """What a set of samples has of its data files.

    Attributes:
        side: of the split.
        valid_split: below 1 the share of the records that validate, else their number; None: no
            split.
        split_by: key of a record whose equal values stay on one side.
        drop_duplicates: whether records that say the same as an earlier one are left out.
    """

    side: Literal["train", "valid"] = "train"
    valid_split: float | None = None
    split_by: str | None = None
    drop_duplicates: bool = False

    def __bool__(self) -> bool:
        """Whether anything is left out."""
        return self.valid_split is not None or self.drop_duplicates

    def options(self) -> dict[str, Any]:
        return asdict(self)

    def key(
        self, number: int, record: Mapping[str, Any], found: Conversation, reader: RecordReader
    ) -> tuple[int, int, int, bool]:
        """A record's entry of `KEYS`.

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
        """bool (N,) of uint64 (N,): those below a share of all hashes, or the smallest of them."""
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

    def save(self, path: Path, part_records: np.ndarray) -> None:
        """Beside what else the first pass found; `part_records` int64 (parts,)."""
        file = io.BytesIO()
        np.savez(file, mask=np.packbits(self.mask), part_records=part_records)
        replace_file(path, file.getvalue())


def chosen_in_parts(path: Path) -> list[np.ndarray]:
    """For each part the records that are taken, bool (records of the part,), as saved."""
    with np.load(path, allow_pickle=False) as saved:
        counts = saved["part_records"]
        mask = np.unpackbits(saved["mask"], count=int(counts.sum())).astype(bool)
    return np.split(mask, np.cumsum(counts)[:-1])


def content_hash(conversation: Conversation) -> int:
    """64 bits of what is trained; a record's side depends on it, so it stays as it is."""
    said: list[Any] = [_said(conversation.messages), [dict(tool) for tool in conversation.tools]]
    if isinstance(conversation, Preference):
        said += [_said(conversation.rejected), conversation.label]
    return _hash(said)


def _said(messages: Sequence[Message]) -> list[Any]:
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
    """What a run's training or validation has of its `data`."""
    return Selection(side, config.valid_split, config.split_by, config.drop_duplicates)


def _hash(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, default=_plain)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _as_text(group: Any) -> Any:
    """A number as CSV has it: 1, 1.0 (pandas, of a column that lacks some) and "1" are one
    group.
    """
    if isinstance(group, bool) or not isinstance(group, (int, float)):
        return group
    return str(int(group) if isinstance(group, int) or group.is_integer() else group)


def _plain(value: Any) -> Any:
    """What parquet has and JSON has not (dates, bytes), and mappings that are no dict."""
    return dict(value) if isinstance(value, Mapping) else str(value)
