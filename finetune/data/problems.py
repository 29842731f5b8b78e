"""What is wrong with a record, and the list of such records that a person can correct them by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from finetune.errors import DataError

LISTED_RECORDS = 10  # bad records that an error names; the rest are counted


class RecordProblem(Exception):
    """One record cannot be used.

    Args:
        kind: a few words that are the same for all records with this problem; reports count by it.
        detail: what is special about this record; names keys, types and roles, never the record's
            text.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class ProblemLog:
    """The bad records of one reading: the first ten as file:line with the reason, all of them
    counted by reason.
    """

    def __init__(self, counts: Mapping[str, int] | None = None, first: Iterable[Any] = ()) -> None:
        self.counts: Counter[str] = Counter(counts)
        self.first: list[tuple[tuple[int, int], str]] = [
            ((file, line), text) for (file, line), text in first
        ]

    def add(self, file_and_line: tuple[int, int], location: str, problem: RecordProblem) -> None:
        """Note a problem; (file number, line) orders the list, `location` is file:line for
        people.
        """
        self.counts[problem.kind] += 1
        self.first.append((file_and_line, f"{location}: {problem}"))
        if len(self.first) > 4 * LISTED_RECORDS:
            self._shorten()

    @property
    def total(self) -> int:
        """How many bad records there are."""
        return sum(self.counts.values())

    @property
    def lines(self) -> list[str]:
        """The first ten in the order of the files, as `file:line: reason`."""
        self._shorten()
        return [line for _, line in self.first]

    def merge(self, other: ProblemLog) -> None:
        """Add the problems of another list."""
        self.counts.update(other.counts)
        self.first += other.first

    def to_json(self) -> list[Any]:
        """As plain JSON, for `ProblemLog(*...)`."""
        self._shorten()
        return [dict(self.counts), self.first]

    def refuse(self, records_read: int) -> None:
        """Raise if there is any bad record.

        Raises:
            DataError: with the first ten as file:line and the total.
        """
        if not self.total:
            return
        shown, before = [], ""
        for line in dict.fromkeys(self.lines):  # records of an array may share a line
            location, _, reason = line.partition(": ")
            shown.append(f"    {location}: {'as above' if reason == before else reason}")
            before = reason
        more = self.total - len(shown)
        listed = "\n".join(shown)
        rest = f"\n    ... and {more} more" if more else ""
        named = (
            "name their keys (--columns prompt=question,response=answer), "
            if self.counts["unknown format"]
            else ""
        )
        raise DataError(
            f"{self.total} of {records_read} records cannot be trained on"
            f" ({_by_kind(self.counts)}):\n{listed}{rest}",
            fix=(
                f"{named}correct these records, or pass --on-bad-row drop to train without them"
                " (they are counted)"
            ),
        )

    def _shorten(self) -> None:
        self.first = sorted(self.first)[:LISTED_RECORDS]


def _by_kind(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
