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
"""

from __future__ import annotations

import hashlib
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
from finetune.data.corpus.shard_writer import (
    SPLITS,
    Plan,
    ShardKind,
    ShardWriter,
    finished_shards,
    read_plan,
    remove_unfinished,
)
from finetune.data.corpus.token_shards import TOKENIZER_FOLDER, TokenHeader, dtype_for
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
from finetune.storage.run_lock import RunLock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("finetune")

TOKENIZER_TEXT_BYTES = 1 << 30
BYTES_PER_WORKER = 4 << 20  # below this, starting another process costs more than it saves
_LOCK_WAIT_SECONDS = 5.0
KEYS = 1 << 64
# Text of a unit that is encoded at a time: a row group may have gigabytes.
_ENCODED_BYTES = 8 << 20

# Called with (what is being done, bytes of input done, bytes of input in all).
Progress = Callable[[str, int, int], None]


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
    """What the folder holds."""

    folder: Path
    scan: Scan
    tokenizer_hash: str
    vocabulary: int
    splits: dict[str, list[TokenHeader]]  # "train" and "val" -> headers of the shards
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
            return _Preparation(data, folder, settings, num_workers, progress).run()
        except OSError as error:
            raise FinetuneError(
                f"a file could not be read or written: {error.strerror or error}",
                str(error.filename or folder),
                "fix what the system names (free space, rights), and run the same command again: it"
                " resumes",
            ) from error


def document_keys(text: bytes, seed: int) -> tuple[int, int]:
    """Two numbers in [0, 2^64) that follow from a document's content and the seed alone: for split
    and sampling.
    """
    content = hashlib.sha256(text).digest()
    digest = hashlib.sha256(content + seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


@dataclass
class UnitReader:
    """Reads a unit's documents, and knows afterwards what was read."""

    text_field: str
    seed: int
    empty: int = 0
    problems: ProblemLog = field(default_factory=ProblemLog)
    records: int = 0
    # over the documents; two readings of one unit agree, or its file was changed between them
    digest: bytes = b""

    def read(self, unit: Unit, number: int = 0) -> Iterator[tuple[str, bytes, tuple[int, int]]]:
        """(text, its UTF-8, its keys) of every document that has more than white space."""
        total = hashlib.sha256()
        for (path, line), found in documents_of(unit, self.text_field):
            self.records += 1
            if isinstance(found, RecordProblem):
                self.problems.add((number, self.records), f"{path}:{line}" if line else path, found)
                continue
            if not found.strip():
                self.empty += 1
                continue
            raw = found.encode()
            total.update(len(raw).to_bytes(8, "little") + raw)
            yield found, raw, document_keys(raw, self.seed)
        self.digest = total.digest()


@dataclass
class Scan:
    """What a unit, or a whole corpus, holds."""

    documents: int = 0
    text_bytes: int = 0
    input_bytes: int = 0
    empty: int = 0
    records: int = 0
    below: int = 0  # documents whose split key is below the bound that was asked for
    lowest: int = KEYS  # split key
    highest: int = -1
    problems: ProblemLog = field(default_factory=ProblemLog)
    digests: list[bytes] = field(default_factory=list)

    def add(self, other: Scan) -> None:
        """Take in the scan of the next unit."""
        for name in ("documents", "text_bytes", "input_bytes", "empty", "records", "below"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lowest, self.highest = min(self.lowest, other.lowest), max(self.highest, other.highest)
        self.problems.merge(other.problems)
        self.digests += other.digests

    @property
    def sha256(self) -> str:
        """The content of the corpus, in order, as 64 hexadecimal digits."""
        return hashlib.sha256(b"".join(self.digests)).hexdigest()


@dataclass
class ScanJob:
    """(number, unit) -> Scan of it."""

    text_field: str
    seed: int
    bound: int

    def __call__(self, item: tuple[int, Unit]) -> Scan:
        number, unit = item
        reader = UnitReader(self.text_field, self.seed)
        scan = Scan(input_bytes=size_of(unit), problems=reader.problems)
        for _, raw, (key, _) in reader.read(unit, number):
            scan.documents += 1
            scan.text_bytes += len(raw)
            scan.below += key < self.bound
            scan.lowest, scan.highest = min(scan.lowest, key), max(scan.highest, key)
        scan.empty, scan.records, scan.digests = reader.empty, reader.records, [reader.digest]
        return scan


def split_bound(fraction: float) -> int:
    """Documents whose split key is below this are for validation."""
    return int(fraction * KEYS)


def final_bound(scan: Scan, fraction: float) -> int:
    """The bound with which neither split is empty, where there are two different documents at all.

    It differs from `split_bound` only where that would leave a split empty: then the document with
    the lowest key is for validation, or the one with the highest for training.
    """
    if fraction == 0 or scan.lowest == scan.highest:
        return 0
    if scan.below == 0:
        return scan.lowest + 1
    return scan.highest if scan.below == scan.documents else split_bound(fraction)


@dataclass(frozen=True)
class UnitTokens:
    """The wanted documents of a unit: number in the unit, whether it is for validation, ids."""

    digest: bytes
    documents: list[tuple[int, bool, np.ndarray]]


@dataclass
class EncodeJob:
    """(number, unit) -> UnitTokens."""

    text_field: str
    seed: int
    bound: int
    positions: list[tuple[int, int]]  # (unit, document) from which each split is wanted
    tokenizer_json: str
    separator_id: int
    dtype: str
    special_tokens: bool
    _encoder: DocumentEncoder | None = None

    def __call__(self, item: tuple[int, Unit]) -> UnitTokens:
        number, unit = item
        reader = UnitReader(self.text_field, self.seed)
        places: list[tuple[int, bool]] = []
        encoded: list[np.ndarray] = []
        texts: list[str] = []
        text_bytes = 0
        for document, (text, raw, (key, _)) in enumerate(reader.read(unit)):
            is_valid = key < self.bound
            if (number, document) >= self.positions[is_valid]:
                places.append((document, is_valid))
                texts.append(text)
                text_bytes += len(raw)
            if text_bytes > _ENCODED_BYTES:
                encoded += self._encode(texts)
                texts, text_bytes = [], 0
        encoded += self._encode(texts)
        documents = [(*place, ids) for place, ids in zip(places, encoded, strict=True)]
        return UnitTokens(reader.digest, documents)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if self._encoder is None:
            self._encoder = DocumentEncoder(
                self.tokenizer_json, self.separator_id, self.special_tokens
            )
        ids, lengths = self._encoder.encode(texts, self.dtype)
        return np.split(ids, np.cumsum(lengths))[:-1]


def tokenizer_texts(
    units: Iterable[Unit], text_field: str, seed: int, bound: int, share: float
) -> Iterator[str]:
    """Training documents for the tokenizer: that share of them, chosen by content and seed; none
    for validation.
    """
    for unit in units:
        for text, _, (split, sampling) in UnitReader(text_field, seed).read(unit):
            if split >= bound and sampling < share * KEYS:
                yield text


class _Preparation:
    def __init__(
        self,
        data: tuple[str, ...],
        folder: Path,
        settings: PrepareSettings,
        num_workers: int | None,
        progress: Progress,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.progress = progress
        self.begun = read_plan(folder)
        # our own files are no data, even if the output folder is inside the data folder
        inside = folder.resolve()
        self.files = tuple(
            path for path in find_files(data) if inside not in path.resolve().parents
        )
        self.input_bytes = sum(path.stat().st_size for path in self.files)
        self.num_workers = worker_count(num_workers, self.input_bytes, BYTES_PER_WORKER)

    def run(self) -> Prepared:
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
        self.plan = Plan(settings, self._corpus())  # as long as it is not finished
        if self.begun is None:
            self.plan.write(self.folder)
        else:
            self.begun.check_corpus(self.folder, self.plan.corpus)
        self.bound = final_bound(self.scan, self.settings.valid_fraction)
        tokenizer = self._tokenizer(borrowed)
        kind = _kind(tokenizer, self.settings.shard_tokens)
        splits = {split: finished_shards(self.folder, split, kind) for split in SPLITS}
        found = sum(map(len, splits.values()))
        if self.begun is None or not self.begun.is_whole(splits):
            splits = self._make_shards(tokenizer, kind, splits)
            replace(self.plan, finished=_finished(kind, splits)).write(self.folder)
        made = sum(map(len, splits.values())) - found
        return Prepared(self.folder, self.scan, kind.tokenizer_hash, kind.vocabulary, splits, made)

    # ------------------------------------------------------------------ the documents

    def _scan(self) -> Scan:
        total = Scan()
        job = ScanJob(
            self.settings.text_field, self.settings.seed, split_bound(self.settings.valid_fraction)
        )
        with ordered_map(job, self.num_workers) as apply:
            for _, scan in apply(enumerate(units_of(self.files))):
                total.add(scan)
                self.progress("reading", total.input_bytes, self.input_bytes)
        return total

    def _check_scan(self) -> None:
        scan = self.scan
        if not self.settings.drop_bad_rows:
            scan.problems.refuse(scan.records)
        if not scan.documents:
            also = f" ({scan.problems.total} were dropped)" if scan.problems.total else ""
            raise DataError(
                f"there is no document with text in {len(self.files)} files{also}",
                "--data",
                "give files with text; in records, --text-field names the field that holds it",
            )
        if dropped := scan.problems.total:
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

    def _corpus(self) -> dict[str, Any]:
        return {
            "sha256": self.scan.sha256,
            "documents": self.scan.documents,
            "bytes": self.scan.text_bytes,
            "empty": self.scan.empty,
            "dropped": self.scan.problems.total,
        }

    def _settings_of_result(self, borrowed: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """The settings that the result depends on; a tokenizer counts by what it does, not by its
        path.
        """
        kept = asdict(self.settings)
        del kept["drop_bad_rows"]  # the documents that are left are compared
        if not self.settings.special_tokens:
            del kept["special_tokens"]  # folders from before this setting existed do not have it
        if borrowed is not None:
            kept |= {"tokenizer": tokenizer_hash(borrowed), "vocab_size": None}
        return kept

    # ------------------------------------------------------------------ the tokenizer

    def _tokenizer(self, borrowed: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
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
        self.progress("training the tokenizer", 0, self.input_bytes)
        share = min(1.0, TOKENIZER_TEXT_BYTES / self.scan.text_bytes)
        texts = tokenizer_texts(
            self._counted_units(), self.settings.text_field, self.settings.seed, self.bound, share
        )
        if self.settings.special_tokens:
            # they have their own ids and must not be merged from pieces
            texts = map(without_special_tokens, texts)
        return train_tokenizer(texts, self.settings.vocab_size)

    def _counted_units(self) -> Iterator[Unit]:
        done = 0
        for unit in units_of(self.files):
            yield unit
            done += size_of(unit)
            self.progress("training the tokenizer", done, self.input_bytes)

    # ------------------------------------------------------------------ the tokens

    def _make_shards(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kind: ShardKind,
        splits: dict[str, list[TokenHeader]],
    ) -> dict[str, list[TokenHeader]]:
        """Make what is missing after the finished shards, and return all."""
        if self.begun is not None and self.begun.finished is not None:
            # the folder must not look complete while it is repaired
            self.plan.write(self.folder)
        for split, kept in splits.items():
            remove_unfinished(self.folder, split, len(kept))
        writers = [ShardWriter(self.folder, split, kind, splits[split]) for split in SPLITS]
        job = EncodeJob(
            self.settings.text_field,
            self.settings.seed,
            self.bound,
            [writer.position for writer in writers],
            tokenizer.backend_tokenizer.to_str(),
            kind.separator_id,
            kind.dtype,
            self.settings.special_tokens,
        )
        with ExitStack() as stack:
            for writer in writers:
                stack.callback(writer.close)
            apply = stack.enter_context(ordered_map(job, self.num_workers))
            begin = min(job.positions)[0]
            done = 0
            for (number, unit), tokens in apply(
                islice(enumerate(units_of(self.files)), begin, None)
            ):
                if tokens.digest != self.scan.digests[number]:
                    raise _changed(unit)
                for document, is_valid, ids in tokens.documents:
                    writers[is_valid].add(ids, number, document)
                done += size_of(unit)
                self.progress("encoding", done, self.input_bytes)
            for writer in writers:
                writer.finish()
        return {writer.split: writer.headers for writer in writers}


def _kind(tokenizer: PreTrainedTokenizerBase, shard_tokens: int) -> ShardKind:
    ids = vocabulary_of(tokenizer)
    return ShardKind(
        dtype_for(ids), ids, tokenizer_hash(tokenizer), separator_of(tokenizer), shard_tokens
    )


def _finished(kind: ShardKind, splits: dict[str, list[TokenHeader]]) -> dict[str, Any]:
    """What the plan of a finished folder records."""
    facts: dict[str, Any] = {
        name: getattr(kind, name) for name in ("tokenizer_hash", "vocabulary", "separator_id")
    }
    for split, headers in splits.items():
        facts[split] = {
            "shards": len(headers),
            "documents": sum(header.documents for header in headers),
            "tokens": sum(header.tokens for header in headers),
        }
    return facts


def _changed(unit: Unit) -> DataError:
    return DataError(
        "a file was changed while it was prepared",
        ", ".join(dict.fromkeys(str(part.path) for part in unit)),
        "leave the files alone meanwhile; prepare into another --output-dir, or delete this one",
    )
