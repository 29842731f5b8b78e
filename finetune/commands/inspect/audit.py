"""`python -m finetune inspect --audit`: duplicates, scripts, and what the data shares with held-out
data, as a table or as JSON.

Streams of parts go through processes, as in preparation. Of each record that can be used some 30
bytes are held, and 112 bytes of MinHash are on disk while the audit lasts.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.commands.inspect.ngrams import BANDS, SCRIPTS, band_keys, words_of
from finetune.config.run_config import RunConfig
from finetune.data.cache import default_cache_dir
from finetune.data.formats import Conversation
from finetune.data.parts import Part, parts_of
from finetune.data.passes import BYTES_PER_WORKER
from finetune.data.reading.files import DataFile, expand_sources
from finetune.data.records import RecordReader
from finetune.data.report import Pace, RecordProblem
from finetune.data.samples import Samples
from finetune.data.selection import content_hash
from finetune.data.worker_pool import ordered_map, worker_count
from finetune.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

OVERLAP_WORDS = 13  # Brown et al. 2020 (GPT-3), appendix C
# an n-gram of more held-out records than this is a form of words, not a leak
COMMON_GRAM_RECORDS = 10
EXAMPLES = 5


@dataclass
class Found:
    """Results of the passes below for one part, by name; `rows` and `lines` are for records that
    have a text.
    """

    file: int
    records: int
    lines_read: int  # see `Part.read`
    rows: np.ndarray  # int64 (N,), from 0 in the part
    lines: np.ndarray  # int64 (N,)
    values: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class AuditJob:
    """What a pass computes: (part, which of its records) -> Found."""

    what: str  # "duplicates", "held out" or "overlap"
    files: Sequence[DataFile]
    readers: Sequence[RecordReader]
    grams: np.ndarray | None = None  # uint64 (G,), sorted: those of held-out data

    def __call__(self, item: tuple[Part, np.ndarray | None]) -> Found:
        part, chosen = item
        records, lines_read = part.read()
        texts = list(self._texts(part, records, chosen))
        rows, lines = np.array([text[:2] for text in texts], dtype=np.int64).reshape(-1, 2).T
        found = Found(part.file, len(records), lines_read, rows, lines)
        words = words_of([text for _, _, text, _ in texts])
        if self.what == "duplicates":
            hashes = [content_hash(conversation) for *_, conversation in texts if conversation]
            near, keys = band_keys(words)
            found.values = {
                "content": np.array(hashes, np.uint64),
                "near": near,
                "keys": keys,
                "scripts": np.bincount(words.scripts, minlength=len(SCRIPTS)),
            }
            return found
        grams, owners = words.ngrams(OVERLAP_WORDS)
        if self.grams is not None:
            places = np.searchsorted(self.grams, grams)
            hits = np.append(self.grams, np.uint64(0))[places] == grams
            hits &= places < len(self.grams)
            grams, owners = places[hits], owners[hits]
        found.values = {"grams": grams, "owners": owners}
        return found

    def _texts(
        self, part: Part, records: list[tuple[int, Any]], chosen: np.ndarray | None
    ) -> Iterator[tuple[int, int, str, Conversation | None]]:
        """Number in the part, line, text, and what the record is read as.

        The text is questions and answers; of a benchmark's record that is no conversation all texts
        that it has.
        """
        conversations = self.readers[part.file].conversations(records, part.form)
        for number, (line, record, found) in enumerate(conversations):
            if chosen is not None and not chosen[number]:
                continue
            if not isinstance(found, RecordProblem):
                spoken = (message.content for message in found.messages if message.role != "system")
                yield number, line, "\n".join(spoken), found
            elif self.what == "held out" and not isinstance(record, RecordProblem):
                yield number, line, "\n".join(_strings(record)), None


@dataclass
class Rows:
    """The records of a reading that have a text, in order."""

    files: Sequence[DataFile]
    file: list[np.ndarray] = field(default_factory=list)
    line: list[np.ndarray] = field(default_factory=list)
    count: int = 0
    part_records: list[int] = field(default_factory=list)
    lines_read: Counter[int] = field(default_factory=Counter)  # by file

    def add(self, found: Found) -> int:
        """Take the records of the next part; return how many came before them."""
        before = self.count
        self.file.append(np.full(len(found.rows), found.file, dtype=np.int32))
        self.line.append(found.lines + self.lines_read[found.file])
        self.lines_read[found.file] += found.lines_read
        self.count += len(found.rows)
        self.part_records.append(found.records)
        return before

    def places(self, rows: Iterable[int]) -> list[str]:
        """`file:line` of some of them."""
        files, lines = np.concatenate(self.file), np.concatenate(self.line)
        return [f"{self.files[files[row]].path}:{lines[row]}" for row in rows]


@dataclass
class HeldOut:
    """Data that must not be trained on: its n-grams, those that are common in it left out."""

    name: str
    rows: Rows
    grams: np.ndarray  # uint64 (G,), sorted
    pairs: np.ndarray  # int64 (P, 2): index of an n-gram, row that has it; by n-gram


@dataclass
class Audit:
    """The passes over one set of training files."""

    files: tuple[DataFile, ...]
    readers: tuple[RecordReader, ...]
    num_proc: int | None  # processes; None: as many as pay
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = Rows(self.files)

    def duplicates(self, scratch: Path) -> dict[str, Any]:
        """Exact and near duplicates of earlier records, and the records by script; comes first.

        Args:
            scratch: a folder with room for 112 bytes a record.
        """
        contents = [np.zeros(0, dtype=np.uint64)]
        near = [np.zeros(0, dtype=np.int64)]
        scripts = np.zeros(len(SCRIPTS), dtype=np.int64)
        with tempfile.TemporaryFile(dir=scratch) as file:
            for found in self._pass(AuditJob("duplicates", self.files, self.readers)):
                before = self.rows.add(found)
                contents.append(found.values["content"])
                near.append(found.values["near"] + before)
                scripts += found.values["scripts"]
                file.write(found.values["keys"].tobytes())
            file.flush()
            compared = nearest = np.concatenate(near)
            if len(compared):
                keys = np.memmap(file, np.uint64, "r", shape=(len(compared), BANDS))
                nearest = compared[_earliest(keys)]
        exact = _first_equal(np.concatenate(contents))
        is_exact = exact != np.arange(len(exact))
        is_near = (nearest != compared) & ~is_exact[compared]

        def examples(rows: np.ndarray, others: np.ndarray) -> list[list[str]]:
            return [self.rows.places(pair) for pair in np.stack([rows, others], 1)[:EXAMPLES]]

        return {
            "scripts": {
                name: count for name, count in zip(SCRIPTS, scripts.tolist(), strict=True) if count
            },
            "exact_duplicates": int(is_exact.sum()),
            "exact_examples": examples(np.flatnonzero(is_exact), exact[is_exact]),
            "near_duplicates": int(is_near.sum()),
            "near_examples": examples(compared[is_near], nearest[is_near]),
        }

    def held_out(
        self, name: str, files: tuple[DataFile, ...] | None, record_ids: np.ndarray | None = None
    ) -> HeldOut:
        """Return the n-grams of files or, if `files` is None, of these training records."""
        readers = self.readers
        if files is None:
            files = self.files
        else:
            on_media = readers[0].on_media
            readers = tuple(RecordReader(source=file.source, on_media=on_media) for file in files)
        rows, grams, owners = Rows(files), [], []
        for found in self._pass(AuditJob("held out", files, readers), record_ids):
            before = rows.add(found)
            grams.append(found.values["grams"])
            owners.append(found.values["owners"] + before)
        if not rows.count:
            raise DataError(
                "has no record to compare with", where=name, fix="name a file with records"
            )
        unique, numbers = np.unique(np.concatenate(grams), return_inverse=True)
        pairs = np.unique(np.stack([numbers.reshape(-1), np.concatenate(owners)], axis=1), axis=0)
        common = np.bincount(pairs[:, 0], minlength=len(unique)) > COMMON_GRAM_RECORDS
        pairs = pairs[~common[pairs[:, 0]]]
        return HeldOut(name, rows, unique, pairs)

    def overlap(self, held_out: HeldOut, record_ids: np.ndarray | None) -> dict[str, Any]:
        """What of the held-out records is in the training records with these numbers; `duplicates`
        came before.
        """
        job = AuditJob("overlap", self.files, self.readers, held_out.grams)
        first = np.full(len(held_out.grams), -1, dtype=np.int64)  # training row that has it
        wanted = np.zeros(len(held_out.grams), dtype=bool)
        wanted[held_out.pairs[:, 0]] = True
        training, rows = 0, Rows(self.files)
        for found in self._pass(job, record_ids):
            before = rows.add(found)
            grams, owners = found.values["grams"], found.values["owners"]
            grams, owners = grams[wanted[grams]], owners[wanted[grams]]
            training += len(np.unique(owners))
            fresh, at = np.unique(grams, return_index=True)
            is_first = first[fresh] < 0
            first[fresh[is_first]] = owners[at[is_first]] + before
        seen = held_out.pairs[first[held_out.pairs[:, 0]] >= 0]
        found_rows, at = np.unique(seen[:, 1], return_index=True)
        matches = np.stack([found_rows, first[seen[at, 0]]], axis=1)
        return {
            "name": held_out.name,
            "records": held_out.rows.count,
            "found": len(found_rows),
            "training_records": training,
            "examples": [
                [*held_out.rows.places([own]), *rows.places([other])]
                for own, other in matches[:EXAMPLES]
            ],
        }

    def _pass(self, job: AuditJob, record_ids: np.ndarray | None = None) -> Iterator[Found]:
        """Do a job on each part of its files, or on these of the training records in them."""
        paths = [file.path for file in job.files]
        chosen: Iterable[np.ndarray | None] = itertools.repeat(None)
        if record_ids is not None:
            counts = self.rows.part_records
            mask = np.zeros(sum(counts), dtype=bool)
            mask[record_ids] = True
            chosen = np.split(mask, np.cumsum(counts)[:-1])
        total_bytes = sum(path.stat().st_size for path in paths)
        pace = Pace(f"auditing data ({job.what})", total_bytes)
        processes = worker_count(self.num_proc, total_bytes, BYTES_PER_WORKER)
        done_bytes = done = 0
        with ordered_map(
            job, processes, start="fork", option="--preprocessing-num-workers"
        ) as apply:
            for (part, _), found in apply(zip(parts_of(paths, job.readers), chosen, strict=False)):
                done_bytes += part.size_bytes
                done += found.records
                pace.at(done_bytes, done)
                yield found


def _first_equal(hashes: np.ndarray) -> np.ndarray:
    """Return, for each entry, the index of the first equal entry, int64 (N,)."""
    _, firsts, numbers = np.unique(hashes, return_index=True, return_inverse=True)
    return firsts[numbers.reshape(-1)]


def _earliest(keys: np.ndarray) -> np.ndarray:
    """Return, for each row of uint64 (N, BANDS), the first row that shares a band with it, int64
    (N,).
    """
    earliest = np.arange(len(keys))
    for band in range(BANDS):
        earliest = np.minimum(earliest, _first_equal(np.array(keys[:, band])))
    return earliest


def _strings(value: Any) -> Iterator[str]:
    """All texts in a record, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_strings, value.values()))
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_strings, value))


def audit_data(
    config: RunConfig, train: Samples, valid: Samples | None, benchmarks: Sequence[str]
) -> dict[str, Any]:
    """Audit a run's data; return the result as plain JSON.

    Args:
        train: the samples of the training side, bad records dropped.
        valid: the samples of the validation side of a split.
        benchmarks: files that must not be in the data, in addition to the run's validation data.
    """
    files = expand_sources(config.sources)
    levels = config.curriculum.levels if config.use_curriculum else None
    readers = tuple(
        RecordReader(levels, config.difficulty_field, file.source, config.on_media)
        for file in files
    )
    audit = Audit(files, readers, config.preprocessing_num_workers)
    scratch = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()
    found = audit.duplicates(scratch)
    held_out = []
    if config.valid_data:
        validation = expand_sources(config.valid_sources)
        held_out.append(audit.held_out("the validation data", validation))
    if valid is not None:
        name = f"the validation side of --valid-split {config.valid_split}"
        held_out.append(audit.held_out(name, None, np.unique(valid.record_ids)))
    held_out += [audit.held_out(name, expand_sources([name])) for name in benchmarks]
    training = np.unique(train.record_ids) if valid is not None or config.drop_duplicates else None
    report = train.report
    left_out = {"images, video or sound": report.left_out_media} if report.left_out_media else {}
    return {
        "files": [str(file.path) for file in files],
        "records": report.records_read,
        "unusable": report.dropped | left_out,
        "cutoff_len": config.cutoff_len,
        "over_cutoff": {
            "prompts_trimmed": report.trimmed_records,
            "turns_dropped": report.dropped_turns,
            "answers_cut": report.cut_answers,
            "texts_cut": report.cut_texts,
        },
        **found,
        "overlap_words": OVERLAP_WORDS,
        "overlap": [audit.overlap(one, training) for one in held_out],
    }


def print_audit(result: dict[str, Any], console: Console) -> None:
    """Print the table, and a few places below it."""
    from rich.table import Table

    table = Table(title="audit", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    records = result["records"]

    def add(name: str, count: int) -> None:
        table.add_row(name, f"{count:,} ({count / max(records, 1):.1%})")

    table.add_row("records", f"{records:,}")
    for reason, count in result["unusable"].items():
        add(f"unusable: {reason}", count)
    for name, count in result["over_cutoff"].items():
        add(f"over {result['cutoff_len']:,} tokens: {name.replace('_', ' ')}", count)
    add("exact duplicates", result["exact_duplicates"])
    add("near duplicates", result["near_duplicates"])
    for script, count in sorted(result["scripts"].items(), key=lambda entry: -entry[1]):
        add(f"script: {script}", count)
    for overlap in result["overlap"]:
        table.add_row(
            f"shared with {overlap['name']}",
            f"{overlap['found']:,} of its {overlap['records']:,} by"
            f" {overlap['training_records']:,}",
        )
    console.print(table)
    shared = [pair for overlap in result["overlap"] for pair in overlap["examples"]]
    for words, pairs in (
        ("says the same as", result["exact_examples"]),
        ("says nearly the same as", result["near_examples"]),
        ("is found in", shared),
    ):
        for one, other in pairs:
            console.print(f"{one} {words} {other}", markup=False, soft_wrap=True)
