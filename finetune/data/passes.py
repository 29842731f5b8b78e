"""What is done to each part of the data, in any process: its records are checked; then they become
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from finetune.data.encoding.render import Rendered, Renderer
from finetune.data.media import MediaLeftOut
from finetune.data.parts import Part
from finetune.data.problems import RecordProblem
from finetune.data.records import RecordReader
from finetune.data.report import NO_DIFFERENCE, NO_ROOM, DataReport
from finetune.data.selection import KEYS, Selection
from finetune.errors import DataError

NO_DIFFICULTY = -1

# What is known of a sample besides its tokens: number of its record, number and line of its file,
# index of its difficulty, tokens, targets; for the rest see `Rendered`.
SAMPLE_FACTS = np.dtype(
    [
        ("row", "<i8"),
        ("file", "<i4"),
        ("line", "<i8"),
        ("level", "<i2"),
        ("length", "<i4"),
        ("targets", "<i4"),
    ]
    + [("first_length", "<i4"), ("first_targets", "<i4"), ("label", "<i1")]
)

Lines = list[tuple[int, RecordProblem]]  # lines of bad records, counted as `Part.read` counts them


@dataclass
class Checked:
    """What the records of a part are; `report` has only what is known without tokens."""

    part: Part
    lines: int  # see `Part.read`
    report: DataReport = field(default_factory=DataReport)
    problems: Lines = field(default_factory=list)
    unlabelled: list[int] = field(default_factory=list)  # lines of the records without difficulty
    columns: set[str] = field(default_factory=set)  # keys of the mapping that a record has
    # where some are to be left out; from 0
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, KEYS))


@dataclass(frozen=True)
class Wanted:
    """Of which records of a part samples are made."""

    labelled_only: bool  # those without difficulty are left out
    chosen: np.ndarray | None = None  # bool (records of the part,); None: all that are good


@dataclass
class Tokenized:
    """The samples of a part. In `facts` records count from 0, and lines as in `Part.read`."""

    part: Part
    records: int
    lines: int
    report: DataReport  # of what is kept; `dropped` has only NO_ROOM and NO_DIFFERENCE
    refused: Lines  # by the chat template or the renderer
    facts: np.ndarray  # SAMPLE_FACTS (N,)
    tokens: np.ndarray  # int32 (T,), of all samples one after the other
    supervised: np.ndarray  # bool (T,)


@dataclass
class PartJob:
    """(part, None) -> Checked; (part, which of its records) -> Tokenized."""

    renderer: Renderer
    readers: Sequence[RecordReader]  # of each file
    difficulties: tuple[str, ...] | None
    selection: Selection

    def __call__(self, item: tuple[Part, Wanted | None]) -> Checked | Tokenized:
        part, wanted = item
        return self._check(part) if wanted is None else self._tokenize(part, wanted)

    def _check(self, part: Part) -> Checked:
        part_records, lines = part.read()
        checked = Checked(_named(part), lines)
        report = checked.report
        report.records_read = len(part_records)
        reader = self.readers[part.file]
        keys = []
        for number, (line, record, found) in enumerate(
            reader.conversations(part_records, part.form)
        ):
            checked.columns |= reader.mapped_in(record)
            try:
                if isinstance(found, RecordProblem):
                    raise found
                if self.selection:
                    keys.append(self.selection.key(number, record, found, reader))
            except MediaLeftOut:
                report.left_out_media += 1
                continue
            except RecordProblem as problem:
                checked.problems.append((line, problem))
                continue
            report.without_media += found.had_media
            report.control_token_records += self.renderer.has_control_tokens(found)
            if found.difficulty is None:
                checked.unlabelled.append(line)
            else:
                report.difficulty_field_found = True
        checked.keys = np.array(keys, dtype=KEYS)
        return checked

    def _tokenize(self, part: Part, wanted: Wanted) -> Tokenized:
        """Raises DataError: a record that was chosen cannot be used any more."""
        part_records, lines = part.read()
        kept = _Kept(self.difficulties or ())
        refused: Lines = []
        numbers = (
            range(len(part_records))
            if wanted.chosen is None
            else np.flatnonzero(wanted.chosen).tolist()
        )
        reader = self.readers[part.file]
        # As for the check: a record that is not chosen may be the one that shows the form.
        form = part.form or reader.form_shown(part_records)
        records = reader.conversations([part_records[number] for number in numbers], form)
        for number, (line, _record, found) in zip(numbers, records, strict=True):
            if isinstance(found, RecordProblem) or (
                wanted.labelled_only and found.difficulty is None
            ):
                if wanted.chosen is not None:
                    what = (
                        f"record {number + 1} of a part was good when it was checked, and is not"
                        " any more"
                    )
                    raise DataError(
                        what, where=str(part.path), fix="leave the file unchanged, and start again"
                    )
                continue
            try:
                samples = self.renderer(found)
            except RecordProblem as problem:
                refused.append((line, problem))
                continue
            kept.add(samples, number, part.file, line, found.difficulty)
        facts = np.array(kept.facts, dtype=SAMPLE_FACTS)
        tokens, supervised = (np.concatenate(arrays) for arrays in (kept.tokens, kept.supervised))
        return Tokenized(
            _named(part), len(part_records), lines, kept.report, refused, facts, tokens, supervised
        )


class _Kept:
    """The samples of a part that are kept, and what the report says of them."""

    def __init__(self, difficulties: tuple[str, ...]) -> None:
        self._levels = {None: NO_DIFFICULTY} | {
            name: number for number, name in enumerate(difficulties)
        }
        self.report = DataReport()
        self.facts: list[tuple[int, ...]] = []
        self.tokens = [np.zeros(0, np.int32)]
        self.supervised = [np.zeros(0, np.bool_)]

    def add(
        self, samples: list[Rendered], row: int, file: int, line: int, difficulty: str | None
    ) -> None:
        """Take the samples of a record that have a target."""
        report = self.report
        with_room = [sample for sample in samples if sample.supervised.any()]
        if not with_room:
            reason = NO_ROOM if samples else NO_DIFFERENCE
            report.dropped[reason] = report.dropped.get(reason, 0) + 1
            return
        report.records_kept += 1
        if difficulty is not None:
            report.records_per_difficulty[difficulty] = (
                report.records_per_difficulty.get(difficulty, 0) + 1
            )
        for sample in with_room:
            length, targets = len(sample.input_ids), int(sample.supervised.sum())
            of_preference = (sample.first_length, sample.first_targets, sample.label)
            self.facts.append(
                (row, file, line, self._levels[difficulty], length, targets, *of_preference)
            )
            self.tokens.append(sample.input_ids)
            self.supervised.append(sample.supervised)
            report.samples += 1
            report.pairs += sample.first_length > 0
            report.good_answers += sample.label == 1
            report.bad_answers += sample.label == 0
            report.tokens += length
            report.supervised_tokens += targets
            report.longest_tokens = max(report.longest_tokens, length)
            report.trimmed_records += sample.trimmed_tokens > 0
            report.trimmed_tokens += sample.trimmed_tokens
            report.dropped_turns += sample.dropped_turns
            report.cut_answers += sample.cut_answer
            report.cut_texts += sample.cut_text_tokens > 0
            report.cut_text_tokens += sample.cut_text_tokens
            report.unended_samples += not sample.ends
            report.off_prompt_samples += not sample.follows_prompt


def _named(part: Part) -> Part:
    """The part without its records: it goes back through a pipe."""
    return Part(part.file, part.path, part.size_bytes)
