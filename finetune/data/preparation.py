"""The work behind `prepare_samples`: data files in parts -> checked -> rendered, tokenized and
written in shards.

Two passes over the data, each a stream of parts (see parts.py) through the same processes, with a
few parts a process under way: what is held in memory does not grow with the data. Records that are
bad are found by the first pass, before anything is tokenized; records that only the chat template
refuses, by the second. What the first pass found and the shards that the second has finished are
kept through a kill (see sample_shards.py).

Nothing in the result depends on how many processes work, or on how often the work was stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.corpus.worker_pool import ordered_map
from finetune.data.encoding.render import Renderer
from finetune.data.pace import Pace
from finetune.data.parts import Part, parts_of
from finetune.data.passes import Checked, Lines, PartJob, Tokenized, Wanted
from finetune.data.preference.records import PreferenceForm, reader_of
from finetune.data.problems import LISTED_RECORDS, ProblemLog, RecordProblem
from finetune.data.reading.sources import DataFile
from finetune.data.records import RecordReader, refuse_unmapped
from finetune.data.report import DataReport
from finetune.data.sample_shards import SCRATCH, TOKEN_BYTES, ShardWriter, write_arrays
from finetune.data.selection import Selection, chosen_in_parts
from finetune.errors import DataError
from finetune.runtime.host import usable_cores
from finetune.storage.durable_files import replace_file

logger = logging.getLogger("finetune")

_MOST_PROCESSES = 64
_BYTES_PER_PROCESS = 2 << 20  # below this, starting another process costs more than it saves
_CHECKED_FILE = "checked.json"

_CHOSEN_FILE = "chosen.npz"

Apply = Callable[[Iterable[tuple[Part, Wanted | None]]], Iterator[Any]]


def processes_for(paths: Sequence[Path], num_proc: int | None) -> int:
    """As many processes as are asked for, or pay."""
    input_bytes = sum(path.stat().st_size for path in paths)
    return num_proc or max(
        1, min(usable_cores(), _MOST_PROCESSES, input_bytes // _BYTES_PER_PROCESS)
    )


@dataclass
class Preparation:
    """One set of data files and how to make samples of them."""

    files: tuple[DataFile, ...]
    renderer: Renderer  # is sent to the processes that tokenize
    difficulties: tuple[str, ...] | None  # their names; None: difficulties are not looked at
    difficulty_field: str  # the key that holds a record's difficulty
    drop_bad_records: bool  # leave bad records out and count them, instead of refusing them
    num_proc: int | None = None  # processes that tokenize; None: as many as pay
    selection: Selection = field(default_factory=Selection)  # which of the records
    on_media: str = "refuse"  # see RecordReader
    preference: PreferenceForm | None = None  # the records are of preferences

    def options(self) -> str:
        """What the samples depend on besides data, tokenizer and template, as JSON."""
        options: dict[str, Any] = {
            "cutoff_len": self.renderer.cutoff_len,
            "levels": self.difficulties,
            "difficulty_field": self.difficulty_field,
            "drop_bad_rows": self.drop_bad_records,
        }
        set_difficulties = [file.source.difficulty for file in self.files]
        if self.difficulties is not None and any(set_difficulties):
            options["difficulties_of_files"] = set_difficulties
        columns = [file.source.columns for file in self.files]
        if any(columns):
            options["columns_of_files"] = columns
        if self.selection:
            options |= self.selection.options()
        if self.on_media != "refuse":
            options["on_media"] = self.on_media
        if not self.renderer.train_thinking:
            options["train_thinking"] = False
        if self.preference is not None:
            options["preference"] = self.preference
        return json.dumps(options)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.files)

    @property
    def readers(self) -> tuple[RecordReader, ...]:
        """How the records of each file are read."""
        make = reader_of(self.preference)
        return tuple(
            make(self.difficulties, self.difficulty_field, file.source, self.on_media)
            for file in self.files
        )

    def write_samples(self, folder: Path) -> dict[str, Any]:
        """Fill the folder with arrays, and return what belongs beside them; `files` are hashes that
        are known already.

        A folder that a killed process left is gone on with.

        Raises:
            DataError: bad records (unless they are dropped), no records, or none left.
            FinetuneError: a process was killed: call again to go on.
        """
        job = PartJob(self.renderer, self.readers, self.difficulties, self.selection)
        processes = processes_for(self.paths, self.num_proc)
        (folder / SCRATCH).mkdir(exist_ok=True)
        with ordered_map(
            job, processes, start="fork", option="--preprocessing-num-workers"
        ) as apply:
            checked = self._check(apply, folder / SCRATCH / _CHECKED_FILE)
            with closing(ShardWriter(folder)) as writer:
                chosen = (
                    chosen_in_parts(folder / SCRATCH / _CHOSEN_FILE)
                    if self.selection
                    else itertools.repeat(None)
                )
                done = self._tokenize(apply, checked, chosen, writer, processes)
        report = self._complete(checked, done)
        content = write_arrays(folder, writer.states, of_preferences=self.preference is not None)
        shutil.rmtree(folder / SCRATCH)
        names = list(self.difficulties or ())
        hashes = {
            name: digest for state in writer.states for name, digest in state["files"].items()
        }
        return {
            "fingerprint": hashlib.sha256(json.dumps([content, names]).encode()).hexdigest(),
            "level_names": names,
            "report": asdict(report),
            "highest_id": done.highest_id,
            "shards": [[state["samples"], state["tokens"]] for state in writer.states],
            "files": {
                name: digest for name, digest in hashes.items() if not name.startswith(SCRATCH)
            },
        }

    # ------------------------------------------------------------------ first pass

    def _check(self, apply: Apply, kept: Path) -> DataReport:
        """What the records are; refuse bad ones or count them."""
        if kept.is_file():
            return DataReport(**json.loads(kept.read_bytes()))
        report, problems, unlabelled = DataReport(), ProblemLog(), ProblemLog()
        missing = RecordProblem(
            "no difficulty", f"other records have a '{self.difficulty_field}', this one has none"
        )
        pace = Pace("checking data", sum(path.stat().st_size for path in self.paths))
        place, input_bytes = _Place(), 0
        columns: dict[int, set[str]] = {}
        keys: list[np.ndarray] = []
        counts: list[int] = []
        for checked in apply((part, None) for part in parts_of(self.paths, self.readers)):
            before = place.at(checked)
            checked.keys["record"] += report.records_read
            keys.append(checked.keys)
            counts.append(checked.report.records_read)
            report.add(checked.report)
            columns.setdefault(checked.part.file, set()).update(checked.columns)
            self._note(problems, checked.part, before, checked.problems)
            if self.difficulties is not None and checked.unlabelled:
                listed, rest = (
                    checked.unlabelled[:LISTED_RECORDS],
                    checked.unlabelled[LISTED_RECORDS:],
                )
                self._note(unlabelled, checked.part, before, [(line, missing) for line in listed])
                # of data without difficulties that is every record
                unlabelled.counts[missing.kind] += len(rest)
            input_bytes += checked.part.size_bytes
            pace.at(input_bytes, report.records_read)
        if report.difficulty_field_found:
            problems.merge(unlabelled)
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
        if self.selection:
            self._choose(
                report, np.concatenate(keys), np.array(counts), kept.with_name(_CHOSEN_FILE)
            )
        replace_file(kept, json.dumps(asdict(report)).encode())
        return report

    def _choose(
        self, report: DataReport, keys: np.ndarray, part_records: np.ndarray, kept: Path
    ) -> None:
        """Which records are taken, for the second pass; what is left out is counted."""
        chosen = self.selection.choose(keys, report.records_read, f"{self.paths[0]}:1")
        chosen.save(kept, part_records)
        report.duplicates, report.other_side = chosen.duplicates, chosen.other_side

    # ------------------------------------------------------------------ second pass

    def _tokenize(
        self,
        apply: Apply,
        checked: DataReport,
        chosen: Iterable[np.ndarray | None],
        writer: ShardWriter,
        processes: int,
    ) -> _Done:
        done = _Done.after(writer.states)
        if done.parts:
            what = "tokenized data: going on after %s of %s records, which are finished"
            logger.info(what, f"{done.place.records:,}", f"{checked.records_read:,}")
        pace = Pace("tokenizing data", checked.records_read, done.place.records)
        parts = islice(
            zip(parts_of(self.paths, self.readers), chosen, strict=False), done.parts, None
        )
        for tokenized in apply(
            (part, Wanted(checked.difficulty_field_found, mask)) for part, mask in parts
        ):
            done.take(tokenized, writer)
            self._note(done.refused, tokenized.part, done.lines_before, tokenized.refused)
            if writer.is_full:
                writer.finish(done.to_json())
            pace.at(done.place.records, done.place.records, TOKEN_BYTES * done.report.tokens)
        writer.finish(done.to_json())
        pace.finish(done.place.records, TOKEN_BYTES * done.report.tokens, processes)
        return done

    def _complete(self, checked: DataReport, done: _Done) -> DataReport:
        """The report of both passes; refuse what the chat template does not take, or count it."""
        if not self.drop_bad_records:
            done.refused.refuse(checked.records_read)
        report, cut_off = checked, done.report.dropped
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

    # ------------------------------------------------------------------ what is said of records

    def _none_left(self, report: DataReport) -> DataError:
        counts = report.dropped | {
            "duplicates": report.duplicates,
            "on the other side of the split": report.other_side,
        }
        counts["with images, video or sound"] = report.left_out_media
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        return DataError(
            f"no record is left to train on ({reasons})",
            where=self._where(),
            fix=(
                "see the reasons; --on-bad-row refuse names the records, and a larger --cutoff-len"
                " gives answers room"
            ),
        )

    def _note(self, log: ProblemLog, part: Part, lines_before: int, lines: Lines) -> None:
        for line, problem in lines:
            place = lines_before + line
            log.add((part.file, place), f"{part.path}:{place}", problem)

    def _where(self) -> str:
        named = ", ".join(map(str, self.paths[:3]))
        return named if len(self.files) <= 3 else f"{named} and {len(self.files) - 3} more"


@dataclass
class _Place:
    """How far the parts of the data were taken."""

    file: int = -1
    lines: int = 0  # of that file, see `Part.read`
    records: int = 0  # of all files

    def at(self, result: Checked | Tokenized) -> int:
        """Go on by a part; return how many lines of its file came before it."""
        if result.part.file != self.file:
            self.file = result.part.file
            self.lines = 0
        before = self.lines
        self.lines += result.lines
        return before


@dataclass
class _Done:
    """What the second pass has behind it."""

    parts: int = 0
    place: _Place = field(default_factory=_Place)
    report: DataReport = field(default_factory=DataReport)
    refused: ProblemLog = field(default_factory=ProblemLog)
    highest_id: int = 0
    lines_before: int = 0  # the part that was taken last

    @classmethod
    def after(cls, states: list[dict[str, Any]]) -> _Done:
        """As it was when the last of these shards was finished."""
        if not states:
            return cls()
        kept = states[-1]
        report, refused = DataReport(**kept["report"]), ProblemLog(*kept["refused"])
        return cls(kept["parts"], _Place(**kept["place"]), report, refused, kept["highest_id"])

    def to_json(self) -> dict[str, Any]:
        report, place = asdict(self.report), asdict(self.place)
        return {
            "parts": self.parts,
            "place": place,
            "report": report,
            "refused": self.refused.to_json(),
            "highest_id": self.highest_id,
        }

    def take(self, part: Tokenized, writer: ShardWriter) -> None:
        """Give the part's samples to the writer, with records and lines counted through the
        data.
        """
        self.lines_before = self.place.at(part)
        part.facts["row"] += self.place.records
        part.facts["line"] += self.lines_before
        writer.add(part.facts, tokens=part.tokens, supervised=part.supervised)
        self.parts += 1
        self.place.records += part.records
        self.report.add(part.report)
        self.highest_id = max(self.highest_id, int(part.tokens.max(initial=0)))
