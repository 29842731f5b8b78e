"""From a corpus to a folder of token shards and their tokenizer: in three passes, resumed where it
was stopped.

1. Every document is read: what cannot be used is refused before anything is written, and the split
  is decided.
2. The tokenizer is trained on training documents (at most `TOKENIZER_TEXT_BYTES` of them), or taken
  over.
3. Every document becomes tokens; finished shards are kept through kills, by the positions in their
  headers.

Nothing here depends on how many processes work, where the files are, or how often the work was
stopped: the same documents in the same files and the same settings give the same bytes.
`prepare.json` records which settings and data a folder was started with, and whether it is
finished.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.corpus.documents import (
    Unit,
    check_parquet,
    documents_of,
    find_files,
    size_of,
    units_of,
)
from finetune.data.corpus.token_shards import (
    LIMIT_BYTES,
    PLAN_FILE,
    PLAN_FORMAT,
    PLAN_VERSION,
    SHARD_NAME,
    SPLITS,
    TOKENIZER_FOLDER,
    ShardKind,
    ShardWriter,
    TokenHeader,
    dtype_for,
    finished_shards,
    remove_unfinished,
)
from finetune.data.corpus.tokenizer import (
    DocumentEncoder,
    open_tokenizer,
    save_tokenizer,
    separator_of,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_of,
    without_special_tokens,
)
from finetune.data.report import ProblemLog, RecordProblem
from finetune.data.worker_pool import ordered_map, worker_count
from finetune.errors import DataError, FinetuneError, StateError
from finetune.storage.durable_files import is_still_open, read_bytes, replace_file
from finetune.storage.run_lock import CLAIM_NAME, LOCK_NAME, RunLock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("finetune")

TOKENIZER_TEXT_BYTES = 1 << 30
BYTES_PER_WORKER = 4 << 20  # below this, starting another process costs more than it saves
_LOCK_WAIT_SECONDS = 5.0
KEYS = 1 << 64
# Text of a unit that is encoded at a time: a row group may have gigabytes.
_ENCODED_BYTES = 8 << 20
_PLAN_TEMPORARY = f".{PLAN_FILE}.tmp"
_STARTED = {LOCK_NAME, CLAIM_NAME, _PLAN_TEMPORARY}  # what a folder without a plan may hold
_OURS = _STARTED | {PLAN_FILE, TOKENIZER_FOLDER, f".{TOKENIZER_FOLDER}.tmp"}

# Called with (what is being done, bytes of input done, bytes of input in all).
Progress = Callable[[str, int, int], None]
Splits = dict[str, list[TokenHeader]]  # "train" and "val" -> headers of the shards


@dataclass(frozen=True)
class PrepareSettings:
    """What the result depends on besides the documents."""

    vocab_size: int  # ids of the tokenizer to be trained
    # folder or hub id of one to take over; then `vocab_size` does not count
    tokenizer: str | None = None
    valid_fraction: float = 0.01  # share of the documents for validation
    seed: int = 42
    shard_tokens: int = 100_000_000  # maximum tokens of a shard
    text_field: str = "text"  # the field of JSON and parquet records that holds the text
    # leave out what cannot be used and count it, instead of refusing it
    drop_bad_rows: bool = False
    special_tokens: bool = False  # what looks like a special token in a document is one


@dataclass(frozen=True)
class Prepared:
    """The content of a prepared folder."""

    folder: Path
    scan: Scan
    tokenizer_hash: str
    vocabulary: int
    splits: Splits
    made: int  # how many shards this call made


def prepare_tokens(
    data: tuple[str, ...],
    folder: Path,
    settings: PrepareSettings,
    *,
    num_workers: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Prepared:
    """Make, or finish, or check the shards and the tokenizer of `data` in `folder`.

    Args:
        num_workers: processes; None: as many as cores, and fewer for little data.

    Raises:
        DataError: no documents, records without text, files that changed meanwhile, an unusable
            tokenizer.
        StateError: the folder holds something else, or was started with other data or settings.
        FinetuneError: a file could not be written, or a worker was killed: run again to resume.
    """
    with RunLock(folder, _LOCK_WAIT_SECONDS):
        try:
            return _CorpusPreparation(data, folder, settings, num_workers, progress).run()
        except OSError as error:
            raise FinetuneError(
                f"a file could not be read or written: {error.strerror or error}",
                str(error.filename or folder),
                "fix what the system names (free space, rights), and run the same command again: it"
                " resumes",
            ) from error


# ---------------------------------------------------------------- reading documents


@dataclass
class Scan:
    """The content of a unit or of a whole corpus."""

    documents: int = 0
    text_bytes: int = 0
    input_bytes: int = 0
    empty: int = 0
    records: int = 0
    below: int = 0  # documents whose split key is below the reader's bound
    lowest: int = KEYS  # split key
    highest: int = -1
    problems: ProblemLog = field(default_factory=ProblemLog)
    # of each unit; two readings agree, or its file was changed between them
    digests: list[bytes] = field(default_factory=list)

    def add(self, other: Scan) -> None:
        """Take in the scan of the next unit."""
        for name in ("documents", "text_bytes", "input_bytes", "empty", "records", "below"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lowest = min(self.lowest, other.lowest)
        self.highest = max(self.highest, other.highest)
        self.problems.merge(other.problems)
        self.digests += other.digests


@dataclass(frozen=True)
class UnitReader:
    """Reads the documents of units."""

    text_field: str
    seed: int
    bound: int  # documents whose split key is below this are for validation

    def read(
        self, unit: Unit, scan: Scan, number: int = 0
    ) -> Iterator[tuple[str, bytes, tuple[int, int]]]:
        """Yield (text, its UTF-8, its keys) of every document that has more than white space.

        Args:
            scan: an empty one, which has what the unit holds when all of it was read.
            number: the unit's, which orders the problems.
        """
        total = hashlib.sha256()
        for (path, line), found in documents_of(unit, self.text_field):
            scan.records += 1
            if isinstance(found, RecordProblem):
                scan.problems.add((number, scan.records), f"{path}:{line}" if line else path, found)
                continue
            if not found.strip():
                scan.empty += 1
                continue
            raw = found.encode()
            total.update(len(raw).to_bytes(8, "little") + raw)
            key, sampling_key = _document_keys(raw, self.seed)
            scan.documents += 1
            scan.text_bytes += len(raw)
            scan.below += key < self.bound
            scan.lowest = min(scan.lowest, key)
            scan.highest = max(scan.highest, key)
            yield found, raw, (key, sampling_key)
        scan.digests.append(total.digest())

    def scan(self, item: tuple[int, Unit]) -> Scan:
        """(number, unit) -> what the unit holds."""
        number, unit = item
        scan = Scan(input_bytes=size_of(unit))
        for _document in self.read(unit, scan, number):
            pass
        return scan


def _document_keys(text: bytes, seed: int) -> tuple[int, int]:
    """Two numbers in [0, 2^64) that follow from a document's content and the seed alone: for split
    and sampling.
    """
    content = hashlib.sha256(text).digest()
    digest = hashlib.sha256(content + seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def split_bound(fraction: float) -> int:
    """Documents whose split key is below this are for validation."""
    return int(fraction * KEYS)


def _final_bound(scan: Scan, fraction: float) -> int:
    """Return the bound with which neither split is empty, if there are two different documents.

    It differs from `split_bound` only where that would leave a split empty: then the document with
    the lowest key is for validation, or the one with the highest for training.
    """
    if fraction == 0 or scan.lowest == scan.highest:
        return 0
    if scan.below == 0:
        return scan.lowest + 1
    return scan.highest if scan.below == scan.documents else split_bound(fraction)


def tokenizer_texts(units: Iterable[Unit], reader: UnitReader, share: float) -> Iterator[str]:
    """Training documents for the tokenizer: that share of them, chosen by content and seed; none
    for validation.
    """
    for unit in units:
        for text, _, (split, sampling) in reader.read(unit, Scan()):
            if split >= reader.bound and sampling < share * KEYS:
                yield text


# number in its unit, whether it is for validation, ids
WantedDocument = tuple[int, bool, np.ndarray]


@dataclass
class EncodeJob:
    """(number, unit) -> digest of the unit's documents, and those that are wanted."""

    reader: UnitReader
    positions: list[tuple[int, int]]  # (unit, document) from which each split is wanted
    encoder: DocumentEncoder
    dtype: str

    def __call__(self, item: tuple[int, Unit]) -> tuple[bytes, list[WantedDocument]]:
        number, unit = item
        scan = Scan()
        places: list[tuple[int, bool]] = []
        encoded: list[np.ndarray] = []
        texts: list[str] = []
        text_bytes = 0
        for document, (text, raw, (key, _)) in enumerate(self.reader.read(unit, scan)):
            is_valid = key < self.reader.bound
            if (number, document) >= self.positions[is_valid]:
                places.append((document, is_valid))
                texts.append(text)
                text_bytes += len(raw)
            if text_bytes > _ENCODED_BYTES:
                encoded += self.encoder.encode(texts, self.dtype)
                texts, text_bytes = [], 0
        encoded += self.encoder.encode(texts, self.dtype)
        documents = [(*place, ids) for place, ids in zip(places, encoded, strict=True)]
        return scan.digests[0], documents


# ---------------------------------------------------------------- the preparation


@dataclass
class _CorpusPreparation:
    data: tuple[str, ...]
    folder: Path
    settings: PrepareSettings
    num_workers: int | None
    progress: Progress

    def __post_init__(self) -> None:
        self.begun = _read_plan(self.folder)
        # our own files are no data, even if the output folder is inside the data folder
        inside = self.folder.resolve()
        self.files = tuple(
            path for path in find_files(self.data) if inside not in path.resolve().parents
        )
        self.input_bytes = sum(path.stat().st_size for path in self.files)
        self.workers = worker_count(self.num_workers, self.input_bytes, BYTES_PER_WORKER)
        bound = split_bound(self.settings.valid_fraction)
        self.reader = UnitReader(self.settings.text_field, self.settings.seed, bound)

    def run(self) -> Prepared:
        """Check, scan, train the tokenizer and encode, each as far as it is not done yet."""
        check_parquet(
            [path for path in self.files if path.suffix.lower() == ".parquet"],
            self.settings.text_field,
        )
        borrowed = None
        if self.settings.tokenizer is not None:
            borrowed = open_tokenizer(self.settings.tokenizer)
        settings = self._settings_of_result(borrowed)
        if self.begun is not None:
            self.begun.check_settings(self.folder, settings)
        self.scan = self._scan()
        self._check_scan()
        corpus = {
            "sha256": hashlib.sha256(b"".join(self.scan.digests)).hexdigest(),
            "documents": self.scan.documents,
            "bytes": self.scan.text_bytes,
            "empty": self.scan.empty,
            "dropped": self.scan.problems.total,
        }
        self.plan = _Plan(settings, corpus)  # as long as it is not finished
        if self.begun is None:
            self.plan.write(self.folder)
        else:
            self.begun.check_corpus(self.folder, corpus)
        self.reader = replace(
            self.reader, bound=_final_bound(self.scan, self.settings.valid_fraction)
        )
        tokenizer = self._tokenizer(borrowed)
        vocabulary = vocabulary_of(tokenizer)
        kind = ShardKind(
            dtype_for(vocabulary),
            vocabulary,
            tokenizer_hash(tokenizer),
            separator_of(tokenizer),
            self.settings.shard_tokens,
        )
        splits = {split: finished_shards(self.folder, split, kind) for split in SPLITS}
        found = sum(map(len, splits.values()))
        if self.begun is None or not self.begun.is_whole(splits):
            splits = self._make_shards(tokenizer, kind, splits)
            replace(self.plan, finished=_finished(kind, splits)).write(self.folder)
        made = sum(map(len, splits.values())) - found
        return Prepared(self.folder, self.scan, kind.tokenizer_hash, vocabulary, splits, made)

    def _scan(self) -> Scan:
        """Read all documents once."""
        total = Scan()
        with ordered_map(self.reader.scan, self.workers) as apply:
            for _, scan in apply(enumerate(units_of(self.files))):
                total.add(scan)
                self.progress("reading", total.input_bytes, self.input_bytes)
        return total

    def _check_scan(self) -> None:
        """Refuse what cannot be used, or warn of what was dropped.

        Raises:
            DataError: bad records (unless they are dropped), or no document.
        """
        scan = self.scan
        dropped = scan.problems.total
        if not self.settings.drop_bad_rows:
            scan.problems.refuse(scan.records)
        if not scan.documents:
            also = f" ({dropped} were dropped)" if dropped else ""
            raise DataError(
                f"there is no document with text in {len(self.files)} files{also}",
                "--data",
                "give files with text; in records, --text-field names the field that holds it",
            )
        if dropped:
            logger.warning(
                "%d of %d records were dropped: %s",
                dropped,
                scan.records,
                dict(scan.problems.counts),
            )
        if scan.lowest == scan.highest and self.settings.valid_fraction:
            logger.warning(
                "there is only one document, so there is no validation split: every part of a text"
                " file above 1 MiB, or every record of a JSONL file, would be a document of its own"
            )

    def _settings_of_result(self, borrowed: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """Return the settings that the result depends on; a tokenizer counts by what it does, not
        by its path.
        """
        kept = asdict(self.settings)
        del kept["drop_bad_rows"]  # the documents that are left are compared
        if not self.settings.special_tokens:
            del kept["special_tokens"]  # folders from before this setting existed do not have it
        if borrowed is not None:
            kept |= {"tokenizer": tokenizer_hash(borrowed), "vocab_size": None}
        return kept

    def _tokenizer(self, borrowed: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
        """Open the tokenizer of the folder, and make it first if it is missing.

        Args:
            borrowed: the tokenizer that --tokenizer names; None to train one.

        Raises:
            StateError: the folder has another tokenizer than `borrowed`.
        """
        folder = self.folder / TOKENIZER_FOLDER
        if not folder.is_dir():
            save_tokenizer(borrowed if borrowed is not None else self._train(), folder)
        tokenizer = open_tokenizer(folder)  # what training will load, not what was in memory
        if borrowed is not None and tokenizer_hash(tokenizer) != tokenizer_hash(borrowed):
            raise StateError(
                "the tokenizer in the output folder is not that of --tokenizer",
                str(folder),
                "remove that folder, or choose another --output-dir",
            )
        return tokenizer

    def _train(self) -> PreTrainedTokenizerBase:
        """Train a tokenizer on training documents."""
        self.progress("training the tokenizer", 0, self.input_bytes)
        share = min(1.0, TOKENIZER_TEXT_BYTES / self.scan.text_bytes)
        texts = tokenizer_texts(self._counted_units(), self.reader, share)
        if self.settings.special_tokens:
            # they have their own ids and must not be merged from pieces
            texts = map(without_special_tokens, texts)
        return train_tokenizer(texts, self.settings.vocab_size)

    def _counted_units(self) -> Iterator[Unit]:
        """Yield all units, and report the progress."""
        done = 0
        for unit in units_of(self.files):
            yield unit
            done += size_of(unit)
            self.progress("training the tokenizer", done, self.input_bytes)

    def _make_shards(
        self, tokenizer: PreTrainedTokenizerBase, kind: ShardKind, splits: Splits
    ) -> Splits:
        """Make what is missing after the finished shards, and return all."""
        if self.begun is not None and self.begun.finished is not None:
            # the folder must not look complete while it is repaired
            self.plan.write(self.folder)
        for split, kept in splits.items():
            remove_unfinished(self.folder, split, len(kept))
        writers = [ShardWriter(self.folder, split, kind, splits[split]) for split in SPLITS]
        encoder = DocumentEncoder(
            tokenizer.backend_tokenizer.to_str(), kind.separator_id, self.settings.special_tokens
        )
        positions = [writer.position for writer in writers]
        job = EncodeJob(self.reader, positions, encoder, kind.dtype)
        with ExitStack() as stack:
            for writer in writers:
                stack.callback(writer.close)
            apply = stack.enter_context(ordered_map(job, self.workers))
            items = islice(enumerate(units_of(self.files)), min(positions)[0], None)
            done = 0
            for (number, unit), (digest, documents) in apply(items):
                if digest != self.scan.digests[number]:
                    raise DataError(
                        "a file was changed while it was prepared",
                        ", ".join(dict.fromkeys(str(part.path) for part in unit)),
                        "leave the files alone meanwhile; prepare into another --output-dir, or"
                        " delete this one",
                    )
                for document, is_valid, ids in documents:
                    writers[is_valid].add(ids, number, document)
                done += size_of(unit)
                self.progress("encoding", done, self.input_bytes)
            for writer in writers:
                writer.finish()
        return {writer.split: writer.headers for writer in writers}


# ---------------------------------------------------------------- prepare.json


def _finished(kind: ShardKind, splits: Splits) -> dict[str, Any]:
    """Return what the plan of a finished folder records."""
    facts: dict[str, Any] = {
        "tokenizer_hash": kind.tokenizer_hash,
        "vocabulary": kind.vocabulary,
        "separator_id": kind.separator_id,
    }
    for split, headers in splits.items():
        facts[split] = {
            "shards": len(headers),
            "documents": sum(header.documents for header in headers),
            "tokens": sum(header.tokens for header in headers),
        }
    return facts


@dataclass(frozen=True)
class _Plan:
    """What determines a folder's content."""

    settings: dict[str, Any]  # those that the result depends on, by name
    corpus: dict[str, Any]  # its SHA-256, documents and bytes
    finished: dict[str, Any] | None = None  # what there is; None until everything is written

    def write(self, folder: Path) -> None:
        """Put the plan into its folder, replacing an older one."""
        content = {
            "format": PLAN_FORMAT,
            "version": PLAN_VERSION,
            **asdict(self),
        }
        replace_file(folder / PLAN_FILE, (json.dumps(content, indent=1) + "\n").encode())

    def is_whole(self, splits: Splits) -> bool:
        """Return whether these shards are all that the finished folder had."""
        return self.finished is not None and all(
            self.finished[split]["shards"] == len(headers) for split, headers in splits.items()
        )

    def check_settings(self, folder: Path, now: dict[str, Any]) -> None:
        """StateError: the folder was started with other settings."""
        before = self.settings
        changed = [
            f"{name} was {before.get(name)}, now {now.get(name)}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise StateError(
                f"the output folder was begun with other settings: {'; '.join(changed)}",
                str(folder),
                "give the same settings to resume it, or choose another --output-dir",
            )

    def check_corpus(self, folder: Path, now: dict[str, Any]) -> None:
        """StateError: the folder was started with other documents."""
        if self.corpus != now:
            raise StateError(
                f"the output folder was begun with other data: {_described(self.corpus)} then,"
                f" {_described(now)} now",
                str(folder),
                "give the same --data (the order of the files counts), or choose another"
                " --output-dir",
            )


def _described(corpus: dict[str, Any]) -> str:
    """Describe a corpus in a message."""
    return (
        f"{corpus.get('documents')} documents of {corpus.get('bytes')} bytes"
        f" ({str(corpus.get('sha256'))[:8]})"
    )


def _read_plan(folder: Path) -> _Plan | None:
    """Read the plan of a folder; None for an empty one.

    Raises:
        StateError: the folder holds other things, or a damaged plan.
    """
    names = {path.name for path in folder.iterdir() if not is_still_open(path.name)}
    begun = PLAN_FILE in names
    ours = _OURS if begun else _STARTED
    others = sorted(name for name in names - ours if not (begun and SHARD_NAME.fullmatch(name)))
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise StateError(
            f"the output folder already holds other things: {', '.join(others[:3])}{more}",
            str(folder),
            "choose another --output-dir",
        )
    if not begun:
        return None
    try:
        content = json.loads(read_bytes(folder / PLAN_FILE, LIMIT_BYTES))
        known = (content.pop("format"), content.pop("version")) == (PLAN_FORMAT, PLAN_VERSION)
        plan = _Plan(**content)
        known = known and isinstance(plan.settings, dict) and isinstance(plan.corpus, dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise StateError(
            f"{PLAN_FILE} is damaged, or of another version",
            str(folder),
            "delete the folder, or choose another",
        )
    return plan
