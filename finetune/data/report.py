"""Report on the records: errors of single records, the counts in the start-up table with their
warnings, and the progress of a long preparation.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.errors import DataError
from finetune.runtime.progress import format_seconds
from finetune.storage.durable_files import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger("finetune")

LOG_EVERY_SECONDS = 30.0
LISTED_RECORDS = 10  # bad records that an error names; the rest are counted


NOT_UTF8 = "not UTF-8"


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


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
        """Number of bad records."""
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
        """Return the arguments for `ProblemLog(*...)`, as plain JSON."""
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
        by_kind = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
        more = self.total - len(shown)
        listed = "\n".join(shown)
        rest = f"\n    ... and {more} more" if more else ""
        named = (
            "name their keys (--columns prompt=question,response=answer), "
            if self.counts["unknown format"]
            else ""
        )
        if self.counts[NOT_UTF8]:
            named += "save the file as UTF-8 (iconv -f GBK -t UTF-8, if it is Chinese), "
        raise DataError(
            f"{self.total} of {records_read} records cannot be trained on"
            f" ({by_kind}):\n{listed}{rest}",
            fix=(
                f"{named}correct these records, or pass --on-bad-row drop to train without them"
                " (they are counted)"
            ),
        )

    def _shorten(self) -> None:
        self.first = sorted(self.first)[:LISTED_RECORDS]


# Why a record that is right has no sample.
NO_ROOM = "no room for an answer within cutoff_len"
NO_DIFFERENCE = "answers equal within cutoff_len"


@dataclass
class DataReport:
    """Counts over one set of data files; a record mostly becomes one sample."""

    records_read: int = 0
    records_kept: int = 0  # with at least one sample
    samples: int = 0  # more than `records_kept` where a template asks for one per answer
    tokens: int = 0
    supervised_tokens: int = 0  # targets among them
    longest_tokens: int = 0  # of the longest sample
    trimmed_records: int = 0  # samples whose prompt lost its middle to the cutoff
    trimmed_tokens: int = 0  # tokens lost so
    cut_answers: int = 0  # samples whose answer was too long and lost its end
    dropped_turns: int = 0  # answers left out from the ends of long conversations
    dropped: dict[str, int] = field(default_factory=dict)  # records not kept, by reason
    duplicates: int = 0  # records not kept because they repeat an earlier one
    other_side: int = 0  # records not kept because they are on the other side of the split
    left_out_media: int = 0  # records not kept because they have images, video or sound
    without_media: int = 0  # records read without theirs
    # Kept records, in the order of the difficulties; empty if difficulties are ignored.
    records_per_difficulty: dict[str, int] = field(default_factory=dict)
    difficulty_field_found: bool = False  # whether any record has a difficulty
    unended_samples: int = 0  # samples in which no whole answer ends with a special token
    # samples with an answer that does not follow the template's own generation prompt
    off_prompt_samples: int = 0
    cut_texts: int = 0  # plain texts that lost their end to the cutoff
    cut_text_tokens: int = 0  # tokens lost so
    pairs: int = 0  # samples of two answers
    good_answers: int = 0  # samples with a label that is true
    bad_answers: int = 0  # samples with one that is false
    placeholder_records: int = 0  # records with {{name}} or the like in an answer
    control_token_records: int = 0  # records whose text spells a special token of the tokenizer

    def add(self, other: DataReport) -> None:
        """Take in the counts of further records."""
        for name, value in vars(other).items():
            own = getattr(self, name)
            if name == "longest_tokens":
                total = max(own, value)
            elif isinstance(value, dict):
                total = dict(Counter(own) + Counter(value))
            else:
                total = own or value if isinstance(value, bool) else own + value
            setattr(self, name, total)

    def warnings(self) -> list[str]:
        """Return warnings about what works but is probably wrong, each with its fix."""
        equal = self.dropped.get(NO_DIFFERENCE, 0)
        found = [  # (shown where this is not zero, text)
            (
                self.unended_samples,
                f"{self.unended_samples} of {self.samples} samples train no end-of-turn token, so"
                " the model will not learn to stop there: the chat template writes no special token"
                " of this tokenizer behind an answer, and eos_token_id of the model's"
                " generation_config.json names none that begins the next turn; add the token at"
                " which the model stops there, or pass --template with a template that writes one",
            ),
            (
                self.off_prompt_samples,
                f"{self.off_prompt_samples} of {self.samples} samples train answers that do not"
                " follow the chat template's generation prompt (it opens a think block that the"
                " records do not have, for instance), so inference will start differently; give"
                " the records reasoning, or pass a --template whose prompt fits",
            ),
            (
                self.control_token_records,
                f"{self.control_token_records} of {self.records_read} records spell special tokens"
                " of the tokenizer in their text, which are read as such; remove them unless they"
                " are meant",
            ),
            (
                equal,
                f"{equal} of {self.records_read} pairs differ only behind the cutoff and are left"
                " out; a larger --cutoff-len keeps them",
            ),
            (
                self.cut_answers,
                f"{self.cut_answers} of {self.samples} samples lost the end of an answer to the"
                " cutoff; a larger --cutoff-len keeps them whole",
            ),
        ]
        return [text for shown, text in found if shown]

    def lines(self) -> list[tuple[str, str]]:
        """Return the table's lines as (name, value) strings; counts of problems are left out if
        they are zero.
        """
        answers = self.good_answers + self.bad_answers
        share = self.supervised_tokens / self.tokens if self.tokens else 0.0
        one_per_answer = f"{self.samples:,} (one per answer where the template asks for it)"
        trimmed = f"{self.trimmed_records:,} ({self.trimmed_tokens:,} tokens)"
        turns = f"{self.dropped_turns:,} (ends of long conversations)"
        optional = [  # (shown where this is not zero, name, value)
            (self.samples - self.records_kept, "samples", one_per_answer),
            (self.pairs, "pairs", f"{self.pairs:,}"),
            (answers, "labels", f"{self.good_answers:,} true, {self.bad_answers:,} false"),
            (self.trimmed_records, "prompts trimmed", trimmed),
            (self.dropped_turns, "turns dropped", turns),
            (self.cut_answers, "answers cut", f"{self.cut_answers:,}"),
            (self.cut_texts, "texts cut", f"{self.cut_texts:,} ({self.cut_text_tokens:,} tokens)"),
            *((1, f"dropped: {reason}", f"{count:,}") for reason, count in self.dropped.items()),
            (self.left_out_media, "left out: images, video or sound", f"{self.left_out_media:,}"),
            (self.without_media, "read without images, video or sound", f"{self.without_media:,}"),
            (
                self.placeholder_records,
                "answers with {{name}} or the like",
                f"{self.placeholder_records:,}",
            ),
            (self.duplicates, "duplicates dropped", f"{self.duplicates:,}"),
            (self.other_side, "on the other side of the split", f"{self.other_side:,}"),
        ]
        return [
            ("records read", f"{self.records_read:,}"),
            ("records kept", f"{self.records_kept:,}"),
            *((name, value) for shown, name, value in optional if shown),
            ("tokens", f"{self.tokens:,} (longest sample {self.longest_tokens:,})"),
            ("supervised tokens", f"{self.supervised_tokens:,} ({share:.1%})"),
            *(
                (f"difficulty {name}", f"{records:,} ({records / max(self.records_kept, 1):.1%})")
                for name, records in self.records_per_difficulty.items()
            ),
        ]

    def table(self, title: str = "data") -> Table:
        """Return the start-up table, for rich."""
        from rich.table import Table

        table = Table(title=title, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in self.lines():
            table.add_row(name, value)
        return table


class Pace:
    """Logs how far a preparation is, how fast it goes and when it will be done, now and then.

    Args:
        what: the job, for people.
        total: how much there is to do, in bytes of input or in records.
        done_before: records that an earlier start has finished.
    """

    def __init__(self, what: str, total: int, done_before: int = 0) -> None:
        self._what = what
        self._total = total
        self._done_before = done_before
        self._begin = self._logged = time.monotonic()

    def at(self, done: int, records: int, written_bytes: int | None = None) -> None:
        """Log a line if it is time to.

        Args:
            done: how much of the total, in its unit.
            records: how many records.
        """
        now = time.monotonic()
        if now - self._logged < LOG_EVERY_SECONDS:
            return
        self._logged = now
        left = (now - self._begin) * (self._total - done) / max(done - self._done_before, 1)
        facts = self._facts(records, written_bytes, now)
        logger.info(
            "%s: %.0f%%, %s, %s left",
            self._what,
            100 * done / self._total,
            facts,
            format_seconds(left),
        )

    def finish(self, records: int, written_bytes: int, processes: int) -> None:
        """Log the final figures."""
        now = time.monotonic()
        facts, seconds = self._facts(records, written_bytes, now), format_seconds(now - self._begin)
        logger.info("%s: done in %s by %d processes, %s", self._what, seconds, processes, facts)

    def _facts(self, records: int, written_bytes: int | None, now: float) -> str:
        rate = (records - self._done_before) / max(now - self._begin, 1e-9)
        size = (
            ""
            if written_bytes is None
            else f", {format_bytes(round(written_bytes / max(records, 1)))} a record"
        )
        return f"{records:,} records, {rate:,.0f} records/s{size}"
