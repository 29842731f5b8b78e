"""Records of a file one by one as conversations, with the data's own keys read as those that our
formats know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.config.fields import DataSource
from finetune.data.formats import (
    LABEL_KEYS,
    Conversation,
    MediaLeftOut,
    detect_format,
    has_media,
    kind_of,
    to_conversation,
    without_media,
)
from finetune.data.reading.files import read_records
from finetune.data.report import RecordProblem
from finetune.errors import DataError


@dataclass(frozen=True)
class RecordReader:
    """How records are read.

    Attributes:
        difficulties: their names; None: difficulties are ignored.
        difficulty_field: the key that holds a record's difficulty.
        on_media: "refuse" finds records with media wrong, "drop-row" leaves them out, "drop-media"
            reads their text.
        source: the entry of `data`, with its names for the keys of our formats and the difficulty
            that all its records have.
    """

    difficulties: Sequence[str] | None = None
    difficulty_field: str = "difficulty"
    source: DataSource | None = None
    on_media: str = "refuse"

    @property
    def columns(self) -> Mapping[str, str]:
        """Key of our formats -> the data's own key; others have their own names."""
        return (self.source.columns if self.source else None) or {}

    @property
    def max_samples(self) -> int | None:
        """Number of records to read from a file; None for all."""
        return self.source.max_samples if self.source else None

    def file(self, path: Path) -> Iterator[tuple[int, Any, Conversation | RecordProblem]]:
        """`(line, record, conversation or what is wrong with it)` of a file. Errors are
        `read_records`'s.
        """
        return self.conversations(read_records(path, self.max_samples))

    def conversations(
        self, records: Iterable[tuple[int, Any]], form: str | None = None
    ) -> Iterator[tuple[int, Any, Conversation | RecordProblem]]:
        """Do the same for some records of one file.

        Args:
            form: the file's format, if an earlier record has shown it.
        """
        for line, record in records:
            try:
                if isinstance(record, RecordProblem):
                    raise record
                record = self._renamed(record)
                form = form or self._form_of(record)
                found: Conversation | RecordProblem = self._conversation(record, form)
            except RecordProblem as problem:
                found = problem
            yield line, record, found

    def _conversation(self, record: Mapping[str, Any], form: str) -> Conversation:
        """Read a record, with its media left out or refused and the difficulty of its source."""
        had_media = self.on_media != "refuse" and has_media(record)
        if had_media and self.on_media == "drop-row":
            raise MediaLeftOut
        if had_media:
            record = without_media(record)
        difficulty = self.source.difficulty if self.source else None
        if difficulty is None or self.difficulties is None:
            found = self._to_conversation(record, form, self.difficulties)
        else:
            found = replace(self._to_conversation(record, form, None), difficulty=difficulty)
        return replace(found, had_media=True) if had_media else found

    def _to_conversation(
        self, record: Mapping[str, Any], form: str, difficulties: Sequence[str] | None
    ) -> Conversation:
        """Read a record without media."""
        for key in LABEL_KEYS:
            if record.get(key) is False:
                raise RecordProblem(
                    "a rejected answer",
                    f"'{key}' is false: python -m finetune.dpo --loss kto trains on answers with"
                    " labels; leave the key out to train on every answer",
                )
        return to_conversation(record, form, difficulties, self.difficulty_field)

    def _detect(self, record: Mapping[str, Any]) -> str:
        return detect_format(record, self.columns)

    def form_shown(self, records: Iterable[tuple[int, Any]]) -> str | None:
        """Return the format of the first record that has one."""
        for _, record in records:
            try:
                if not isinstance(record, RecordProblem):
                    return self._form_of(self._renamed(record))
            except RecordProblem:
                continue
        return None

    def _form_of(self, record: Mapping[str, Any]) -> str:
        """Return the format of a record with the names that our formats know.

        Raises:
            RecordProblem: it has none.
        """
        try:
            return self._detect(record)
        except RecordProblem as problem:
            if not self.columns:
                raise
            mapped = ", ".join(f"{ours}={theirs}" for ours, theirs in self.columns.items())
            raise RecordProblem(problem.kind, f"{problem.detail}; --columns has {mapped}") from None

    def mapped_in(self, record: Any) -> set[str]:
        """Return the keys of the mapping that a record, as `conversations` gives it, has."""
        return set(self.columns) & record.keys() if isinstance(record, Mapping) else set()

    def value_of(self, record: Mapping[str, Any], name: str) -> Any:
        """Return what a record, as `conversations` yields it, has under a key of the data.

        None if it has nothing there, or if the mapping gives this name to another key.
        """
        if name in self.columns and name not in self.columns.values():
            return None
        names = {theirs: ours for ours, theirs in self.columns.items()}
        return record.get(names.get(name, name))

    def _renamed(self, record: Any) -> Mapping[str, Any]:
        """Return the record with the names that our formats know.

        Raises:
            RecordProblem: it is not an object.
        """
        if not isinstance(record, Mapping):
            raise RecordProblem("wrong type", f"the record is {kind_of(record)}, not an object")
        if not self.columns:
            return record
        left_out = {*self.columns, *self.columns.values()}
        kept = {name: value for name, value in record.items() if name not in left_out}
        return kept | {ours: record[name] for ours, name in self.columns.items() if name in record}


def refuse_unmapped(
    readers: Sequence[RecordReader], paths: Sequence[Path], found: Mapping[int, set[str]]
) -> None:
    """Refuse columns that no record of the files that share them has.

    Args:
        found: by number of the file, what `mapped_in` returns for its records.

    Raises:
        DataError: there are such columns.
    """
    shared: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for file, reader in enumerate(readers):
        shared.setdefault(tuple(reader.columns.items()), []).append(file)
    for columns, files in shared.items():
        seen = set().union(*(found.get(file, set()) for file in files))
        for ours, theirs in columns:
            if ours not in seen:
                raise DataError(
                    f"no record has '{theirs}', which --columns reads as '{ours}'",
                    where=f"{paths[files[0]]}:1",
                    fix=f"write {ours}= and the key that the records have, or leave it out",
                )
