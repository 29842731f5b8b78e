"""Two passes over the data files: records are checked, then rendered, tokenized and written in
shards.

Each pass is a stream of parts (see parts.py) through the same processes, with a few parts per
process in flight. So the memory in use does not grow with the data. The first pass finds bad
records, before anything is tokenized. The second pass finds records that only the chat template
rejects. The shards that the second pass has finished survive a kill (see samples.py).

The result does not depend on the number of processes, or on how often the work was stopped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.encoding.render import Rendered, Renderer
from finetune.data.formats import Conversation, MediaLeftOut
from finetune.data.parts import Part, parts_of
from finetune.data.preference.reader import PreferenceForm, reader_of
from finetune.data.reading.files import DataFile
from finetune.data.records import RecordReader, refuse_unmapped
from finetune.data.report import (
    NO_DIFFERENCE,
    NO_ROOM,
    DataReport,
    Pace,
    ProblemLog,
    RecordProblem,
)
from finetune.data.samples import ROW, SCRATCH, TOKEN_BYTES, SampleWriter
from finetune.data.selection import KEYS, Selection
from finetune.data.worker_pool import Apply, ordered_map, worker_count
from finetune.errors import DataError

logger = logging.getLogger("finetune")

BYTES_PER_WORKER = 2 << 20  # below this, starting another process costs more than it saves
NO_DIFFICULTY = -1

Lines = list[tuple[int, RecordProblem]]  # bad records by line


@dataclass(frozen=True)
class Wanted:
    """The records of a part that become samples, and where the part is."""

    first_record: int  # number in the data of the part's first record
    lines_before: int  # of the file, see `Part.read`
    chosen: np.ndarray | None = None  # bool (records of the part,); None: all that are good
    labeled_only: bool = False  # records without difficulty are left out


@dataclass
class Checked:
    """The checked records of a part; `report` has only what is known without tokens."""

    lines: int  # see `Part.read`; the lines of records are counted as it counts
    report: DataReport = field(default_factory=DataReport)
    problems: Lines = field(default_factory=list)
    unlabeled: list[int] = field(default_factory=list)  # lines of the records without difficulty
    columns: set[str] = field(default_factory=set)  # keys of the mapping that a record has
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, KEYS))  # if some are left out


@dataclass
class Tokenized:
    """The samples of a part."""

    records: int  # of the part, kept or not
    report: DataReport  # of what is kept; `dropped` has only NO_ROOM and NO_DIFFERENCE
    refused: Lines  # by the chat template or the renderer
    tokens: np.ndarray  # int32 (T,), of all samples one after the other
    supervised: np.ndarray  # bool (T,)
    rows: np.ndarray  # ROW (N,)


@dataclass
class PartJob:
    """The work of a process on a part: (part, None) -> Checked; (part, Wanted) -> Tokenized."""

    renderer: Renderer
    readers: Sequence[RecordReader]  # of each file
    difficulties: tuple[str, ...]
    selection: Selection

    def __call__(self, item: tuple[Part, Wanted | None]) -> Checked | Tokenized:
        part, wanted = item
        return self._check(part) if wanted is None else self._tokenize(part, wanted)

    def _check(self, part: Part) -> Checked:
        records, lines = part.read()
        checked = Checked(lines)
        report = checked.report
        report.records_read = len(records)
        reader = self.readers[part.file]
        keys = []
        for number, (line, record, found) in enumerate(reader.conversations(records, part.form)):
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
            report.placeholder_records += _has_placeholder(found)
            report.control_token_records += self.renderer.has_control_tokens(found)
            if found.difficulty is None:
                checked.unlabeled.append(line)
            else:
                report.difficulty_field_found = True
        checked.keys = np.array(keys, dtype=KEYS)
        return checked

    def _tokenize(self, part: Part, wanted: Wanted) -> Tokenized:
        """Raises DataError: a record that was chosen cannot be used any more."""
        records = part.read()[0]
        report = DataReport()
        refused: Lines = []
        rows: list[tuple[int, ...]] = []
        tokens = [np.zeros(0, np.int32)]
        supervised = [np.zeros(0, np.bool_)]
        numbers: Sequence[int] = range(len(records))
        if wanted.chosen is not None:
            numbers = np.flatnonzero(wanted.chosen).tolist()
        reader = self.readers[part.file]
        # As for the check: a record that is not chosen may be the one that shows the form.
        form = part.form or reader.form_shown(records)
        conversations = reader.conversations([records[number] for number in numbers], form)
        for number, (line, _record, found) in zip(numbers, conversations, strict=True):
            if isinstance(found, RecordProblem) or (
                wanted.labeled_only and found.difficulty is None
            ):
                if wanted.chosen is not None:
                    raise DataError(
                        f"record {number + 1} of a part was good when it was checked, and is not"
                        " any more",
                        where=str(part.path),
                        fix="leave the file unchanged, and start again",
                    )
                continue
            line += wanted.lines_before
            try:
                samples = self.renderer(found)
            except RecordProblem as problem:
                refused.append((line, problem))
                continue
            with_room = [sample for sample in samples if sample.supervised.any()]
            if not with_room:
                reason = NO_ROOM if samples else NO_DIFFERENCE
                report.dropped[reason] = report.dropped.get(reason, 0) + 1
                continue
            report.records_kept += 1
            level = NO_DIFFICULTY
            if found.difficulty is not None:
                level = self.difficulties.index(found.difficulty)
                counts = report.records_per_difficulty
                counts[found.difficulty] = counts.get(found.difficulty, 0) + 1
            for sample in with_room:
                _count(report, sample)
                rows.append(
                    (
                        wanted.first_record + number,
                        part.file,
                        line,
                        level,
                        len(sample.input_ids),
                        int(sample.supervised.sum()),
                        sample.first_length,
                        sample.first_targets,
                        sample.label,
                    )
                )
                tokens.append(sample.input_ids)
                supervised.append(sample.supervised)
        return Tokenized(
            len(records),
            report,
            refused,
            np.concatenate(tokens),
            np.concatenate(supervised),
            np.array(rows, dtype=ROW),
        )


# What a template engine would have filled in; code in an answer has other things in its braces.
_PLACEHOLDER = re.compile(r"\{\{ *[A-Za-z_]\w* *\}\}")


def _has_placeholder(found: Conversation) -> bool:
    """Return whether an answer that is trained holds a placeholder."""
    return any(
        turn.trained and turn.role == "assistant" and _PLACEHOLDER.search(turn.content)
        for turn in found.messages
    )


def _count(report: DataReport, sample: Rendered) -> None:
    """Count a sample that is kept."""
    report.samples += 1
    report.pairs += sample.first_length > 0
    report.good_answers += sample.label == 1
    report.bad_answers += sample.label == 0
    report.tokens += len(sample.input_ids)
    report.supervised_tokens += int(sample.supervised.sum())
    report.longest_tokens = max(report.longest_tokens, len(sample.input_ids))
    report.trimmed_records += sample.trimmed_tokens > 0
    report.trimmed_tokens += sample.trimmed_tokens
    report.dropped_turns += sample.dropped_turns
    report.cut_answers += sample.cut_answer
    report.cut_texts += sample.cut_text_tokens > 0
    report.cut_text_tokens += sample.cut_text_tokens
    report.unended_samples += not sample.ends
    report.off_prompt_samples += not sample.follows_prompt


@dataclass
class _Progress:
    """Progress of the second pass."""

    parts: int = 0
    records: int = 0
    report: DataReport = field(default_factory=DataReport)
    refused: ProblemLog = field(default_factory=ProblemLog)
    highest_id: int = 0

    @classmethod
    def after(cls, states: list[dict[str, Any]]) -> _Progress:
        """Return the progress when the last of these shards was finished."""
        if not states:
            return cls()
        state = {name: states[-1][name] for name in cls.__dataclass_fields__}
        state["report"] = DataReport(**state["report"])
        state["refused"] = ProblemLog(*state["refused"])
        return cls(**state)

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"report": asdict(self.report), "refused": self.refused.to_json()}


@dataclass
class Preparation:
    """One set of data files and how to make samples of them."""

    files: tuple[DataFile, ...]
    renderer: Renderer  # is sent to the processes that tokenize
    difficulties: tuple[str, ...] | None  # their names; None: difficulties are ignored
    difficulty_field: str  # the key that holds a record's difficulty
    drop_bad_records: bool  # leave bad records out and count them, instead of refusing them
    num_proc: int | None = None  # processes that tokenize; None: as many as pay
    selection: Selection = field(default_factory=Selection)  # which of the records
    on_media: str = "refuse"  # see RecordReader
    preference: PreferenceForm | None = None  # the records are of preferences

    def __post_init__(self) -> None:
        self.paths = tuple(file.path for file in self.files)
        make = reader_of(self.preference)
        self.readers = tuple(
            make(self.difficulties, self.difficulty_field, file.source, self.on_media)
            for file in self.files
        )

    def options(self) -> str:
        """Return what the samples depend on besides data, tokenizer and template, as JSON."""
        options: dict[str, Any] = {
            "cutoff_len": self.renderer.cutoff_len,
            "levels": self.difficulties,
            "difficulty_field": self.difficulty_field,
            "difficulties_of_files": [file.source.difficulty for file in self.files],
            "columns_of_files": [file.source.columns for file in self.files],
            "max_samples_of_files": [file.source.max_samples for file in self.files],
            "drop_bad_rows": self.drop_bad_records,
            "on_media": self.on_media,
            "train_thinking": self.renderer.train_thinking,
            **asdict(self.selection),
        }
        if self.preference is not None:
            options["preference"] = self.preference
        return json.dumps(options)

    def write_samples(self, folder: Path) -> dict[str, Any]:
        """Fill the folder with arrays; what a killed process finished there is kept.

        Returns: the meta data of the arrays; `files` are hashes that are known already.

        Raises:
            DataError: bad records (unless they are dropped), no records, or none left.
            FinetuneError: a process was killed: call again to resume.
        """
        names = self.difficulties or ()
        job = PartJob(self.renderer, self.readers, names, self.selection)
        self.input_bytes = sum(path.stat().st_size for path in self.paths)
        processes = worker_count(self.num_proc, self.input_bytes, BYTES_PER_WORKER)
        with (
            ordered_map(
                job, processes, start="fork", option="--preprocessing-num-workers"
            ) as apply,
            closing(SampleWriter(folder)) as writer,
        ):
            checked, wanted = self._check(apply)
            done = self._tokenize(apply, checked, wanted, writer, processes)
        report = self._complete(checked, done)
        content = writer.write_arrays(of_preferences=self.preference is not None)
        shutil.rmtree(folder / SCRATCH)
        return {
            "fingerprint": hashlib.sha256(json.dumps([content, names]).encode()).hexdigest(),
            "level_names": names,
            "report": asdict(report),
            "highest_id": done.highest_id,
            "shards": [[state["samples"], state["tokens"]] for state in writer.states],
            "files": {
                name: digest
                for state in writer.states
                for name, (_, digest) in state["files"].items()
                if not name.startswith(SCRATCH)
            },
        }

    # ------------------------------------------------------------------ first pass

    def _check(self, apply: Apply) -> tuple[DataReport, list[Wanted]]:
        """Find out what the records are, and refuse or count bad ones.

        Returns: the report of what is known without tokens; for each part what is wanted of it.
        """
        report, problems, unlabeled = DataReport(), ProblemLog(), ProblemLog()
        missing = RecordProblem(
            "no difficulty", f"other records have a '{self.difficulty_field}', this one has none"
        )
        pace = Pace("checking data", self.input_bytes)
        done_bytes = 0
        lines: Counter[int] = Counter()  # of each file so far
        columns: dict[int, set[str]] = {}
        keys: list[np.ndarray] = []
        places: list[tuple[int, int]] = []
        for (part, _), checked in apply(
            (part, None) for part in parts_of(self.paths, self.readers)
        ):
            before = lines[part.file]
            places.append((report.records_read, before))
            checked.keys["record"] += report.records_read
            keys.append(checked.keys)
            report.add(checked.report)
            columns.setdefault(part.file, set()).update(checked.columns)
            _note(problems, part, [(before + line, found) for line, found in checked.problems])
            if self.difficulties is not None:
                _note(unlabeled, part, [(before + line, missing) for line in checked.unlabeled])
            lines[part.file] += checked.lines
            done_bytes += part.size_bytes
            pace.at(done_bytes, report.records_read)
        if report.difficulty_field_found:
            problems.merge(unlabeled)
        if not report.records_read:
            raise DataError(
                "the data files hold no record",
                where=self._where(),
                fix="give --data files with records",
            )
        refuse_unmapped(self.readers, self.paths, columns)
        if not self.drop_bad_records:
            problems.refuse(report.records_read)
        report.dropped = dict(problems.counts)
        if problems.total + report.left_out_media == report.records_read:
            raise self._none_left(report)
        chosen: Sequence[np.ndarray | None] = [None] * len(places)
        if self.selection:
            where = f"{self.paths[0]}:1"
            selected = self.selection.choose(np.concatenate(keys), report.records_read, where)
            report.duplicates, report.other_side = selected.duplicates, selected.other_side
            chosen = np.split(selected.mask, [first for first, _ in places[1:]])
        return report, [
            Wanted(*place, mask, report.difficulty_field_found)
            for place, mask in zip(places, chosen, strict=True)
        ]

    # ------------------------------------------------------------------ second pass

    def _tokenize(
        self,
        apply: Apply,
        checked: DataReport,
        wanted: list[Wanted],
        writer: SampleWriter,
        processes: int,
    ) -> _Progress:
        done = _Progress.after(writer.states)
        if done.parts:
            what = "tokenized data: going on after %s of %s records, which are finished"
            logger.info(what, f"{done.records:,}", f"{checked.records_read:,}")
        pace = Pace("tokenizing data", checked.records_read, done.records)
        items = zip(parts_of(self.paths, self.readers), wanted, strict=True)
        for (part, _), tokenized in apply(islice(items, done.parts, None)):
            writer.add(tokenized.tokens, tokenized.supervised, tokenized.rows)
            _note(done.refused, part, tokenized.refused)
            done.parts += 1
            done.records += tokenized.records
            done.report.add(tokenized.report)
            done.highest_id = max(done.highest_id, int(tokenized.tokens.max(initial=0)))
            if writer.is_full:
                writer.finish(done.to_json())
            pace.at(done.records, done.records, TOKEN_BYTES * done.report.tokens)
        writer.finish(done.to_json())
        pace.finish(done.records, TOKEN_BYTES * done.report.tokens, processes)
        return done

    def _complete(self, report: DataReport, done: _Progress) -> DataReport:
        """Return the report of both passes; refuse records that the chat template rejects, or count
        them.
        """
        if not self.drop_bad_records:
            done.refused.refuse(report.records_read)
        cut_off = done.report.dropped
        done.report.dropped = dict(done.refused.counts)
        report.add(done.report)
        report.dropped |= cut_off
        if not report.samples:
            raise self._none_left(report)
        if report.difficulty_field_found:
            counts = report.records_per_difficulty
            report.records_per_difficulty = {
                name: counts.get(name, 0) for name in self.difficulties or ()
            }
        return report

    def _none_left(self, report: DataReport) -> DataError:
        """Return the error for records of which none is left, with the reasons."""
        counts = {
            **report.dropped,
            "duplicates": report.duplicates,
            "on the other side of the split": report.other_side,
            "with images, video or sound": report.left_out_media,
        }
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        return DataError(
            f"no record is left to train on ({reasons})",
            where=self._where(),
            fix=(
                "see the reasons; --on-bad-row refuse names the records, and a larger --cutoff-len"
                " gives answers room"
            ),
        )

    def _where(self) -> str:
        named = ", ".join(map(str, self.paths[:3]))
        return named if len(self.files) <= 3 else f"{named} and {len(self.files) - 3} more"


def _note(log: ProblemLog, part: Part, lines: Lines) -> None:
    """Note bad records of a part; their lines count from the beginning of the file."""
    for line, problem in lines:
        log.add((part.file, line), f"{part.path}:{line}", problem)
