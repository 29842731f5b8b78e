"""From a corpus to a folder of token shards and their tokenizer: in three passes, resumed where it
was stopped.

1. Every document is looked at: what cannot be used is refused before anything is written, and the
  split is decided.
2. The tokenizer is trained on training documents (at most `TOKENIZER_TEXT_BYTES` of them), or taken
  over.
3. Every document becomes tokens; finished shards are kept through kills, by the positions in their
  headers.

Nothing here depends on how many processes work, on where files lie, or on how often the work was
stopped: the same documents in the same files and the same settings give the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.corpus.documents import Unit, find_files, units_of
from finetune.data.corpus.parquet_files import check_parquet
from finetune.data.corpus.passes import (
    EncodeJob,
    Scan,
    ScanJob,
    UnitTokens,
    final_bound,
    split_bound,
    tokenizer_texts,
)
from finetune.data.corpus.shard_header import TOKENIZER_FOLDER, TokenHeader, dtype_for
from finetune.data.corpus.shard_plan import Plan, read_plan
from finetune.data.corpus.shard_writer import (
    SPLITS,
    ShardKind,
    ShardWriter,
    finished_shards,
    remove_unfinished,
)
from finetune.data.corpus.tokenizer import (
    open_tokenizer,
    save_tokenizer,
    separator_of,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_of,
    without_special_tokens,
)
from finetune.data.corpus.worker_pool import ordered_map
from finetune.errors import DataError, FinetuneError, StateError
from finetune.runtime.host import usable_cores
from finetune.storage.run_lock import RunLock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("finetune")

TOKENIZER_TEXT_BYTES = 1 << 30
# Below this, starting another process costs more than it saves.
BYTES_PER_WORKER = 4 << 20
_LOCK_WAIT_SECONDS = 5.0

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
    shard_tokens: int = 100_000_000  # most tokens of a shard
    text_field: str = "text"  # the field of JSON and parquet records that holds the text
    # leave out what cannot be used and count it, instead of refusing it
    drop_bad_rows: bool = False
    special_tokens: bool = False  # what looks like a special token in a document is one


@dataclass(frozen=True)
class Prepared:
    """What lies in the folder."""

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
        StateError: the folder holds something else, or was begun with other data or settings.
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
        # what we wrote ourselves is no data, where the folder lies in that of the data
        inside = folder.resolve()
        self.files = tuple(
            path for path in find_files(data) if inside not in path.resolve().parents
        )
        self.input_bytes = sum(path.stat().st_size for path in self.files)
        self.num_workers = num_workers or max(
            1, min(usable_cores(), self.input_bytes // BYTES_PER_WORKER)
        )

    def run(self) -> Prepared:
        check_parquet(
            [path for path in self.files if path.suffix.lower() == ".parquet"],
            self.settings.text_field,
        )
        borrowed = (
            open_tokenizer(self.settings.tokenizer) if self.settings.tokenizer is not None else None
        )
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
            for scan in apply(enumerate(units_of(self.files))):
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
        """The settings that the result depends on; a tokenizer counts by what it does, not by where
        it lies.
        """
        kept = asdict(self.settings)
        del kept["drop_bad_rows"]  # the documents that are left are compared
        if not self.settings.special_tokens:
            del kept["special_tokens"]  # as in folders that were begun before there was a choice
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
        units = self._counted(units_of(self.files), "training the tokenizer")
        texts = tokenizer_texts(
            units, self.settings.text_field, self.settings.seed, self.bound, share
        )
        if self.settings.special_tokens:
            # they are ids of their own, not to be merged from pieces
            texts = map(without_special_tokens, texts)
        return train_tokenizer(texts, self.settings.vocab_size)

    def _counted(self, units: Iterator[Unit], what: str) -> Iterator[Unit]:
        done = 0
        for unit in units:
            yield unit
            done += sum(piece.size_bytes for piece in unit)
            self.progress(what, done, self.input_bytes)

    # ------------------------------------------------------------------ the tokens

    def _make_shards(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kind: ShardKind,
        splits: dict[str, list[TokenHeader]],
    ) -> dict[str, list[TokenHeader]]:
        """Make what is missing after the finished shards, and return all."""
        if self.begun is not None and self.begun.finished is not None:
            # nobody may take the folder for whole while it is repaired
            self.plan.write(self.folder)
        for split, kept in splits.items():
            remove_unfinished(self.folder, split, kept)
        writers = {
            split: ShardWriter(self.folder, split, kind, kept) for split, kept in splits.items()
        }
        self._encode(tokenizer, kind, writers)
        return {split: writer.headers for split, writer in writers.items()}

    def _encode(
        self, tokenizer: PreTrainedTokenizerBase, kind: ShardKind, writers: dict[str, ShardWriter]
    ) -> None:
        job = EncodeJob(
            self.settings.text_field,
            self.settings.seed,
            self.bound,
            tokenizer.backend_tokenizer.to_str(),
            kind.separator_id,
            kind.dtype,
            self.settings.special_tokens,
        )
        begin = min(writer.position[0] for writer in writers.values())
        with ExitStack() as stack:
            for writer in writers.values():
                stack.callback(writer.close)
            apply = stack.enter_context(ordered_map(job, self.num_workers))
            done = 0
            for number, (unit, tokens) in enumerate(
                self._unit_tokens(apply, writers, begin), begin
            ):
                if tokens.digest != self.scan.digests[number]:
                    raise _changed(unit)
                _write(writers, number, tokens)
                done += sum(piece.size_bytes for piece in unit)
                self.progress("encoding", done, self.input_bytes)
            for writer in writers.values():
                writer.finish()

    def _unit_tokens(
        self,
        apply: Callable[..., Iterator[UnitTokens]],
        writers: dict[str, ShardWriter],
        begin: int,
    ) -> Iterator[tuple[Unit, UnitTokens]]:
        """The units from `begin` on with their tokens; of the units before a split's position, none
        of that split.
        """
        starts = [writers[split].position for split in SPLITS]
        numbered = enumerate(islice(units_of(self.files), begin, None), begin)
        wanted = (
            (unit, *(_first_wanted(number, start) for start in starts)) for number, unit in numbered
        )
        return zip(islice(units_of(self.files), begin, None), apply(wanted), strict=True)


def _kind(tokenizer: PreTrainedTokenizerBase, shard_tokens: int) -> ShardKind:
    ids = vocabulary_of(tokenizer)
    return ShardKind(
        dtype_for(ids), ids, tokenizer_hash(tokenizer), separator_of(tokenizer), shard_tokens
    )


def _finished(kind: ShardKind, splits: dict[str, list[TokenHeader]]) -> dict[str, Any]:
    """What the plan says when all is there."""
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


def _first_wanted(number: int, start: tuple[int, int]) -> int:
    """The first document of unit `number` that is still to be written, for a split that resumes at
    `start`.
    """
    unit, document = start
    return document if number == unit else 0 if number > unit else np.iinfo(np.int64).max


def _write(writers: dict[str, ShardWriter], number: int, tokens: UnitTokens) -> None:
    stops = np.cumsum(tokens.lengths)
    for length, stop, ordinal, valid in zip(
        tokens.lengths.tolist(),
        stops.tolist(),
        tokens.ordinals.tolist(),
        tokens.is_valid.tolist(),
        strict=True,
    ):
        writers[SPLITS[valid]].add(tokens.ids[stop - length : stop], number, ordinal)


def _changed(unit: Unit) -> DataError:
    return DataError(
        "a file was changed while it was prepared",
        ", ".join(dict.fromkeys(piece.path for piece in unit)),
        "leave the files alone meanwhile; prepare into another --output-dir, or delete this one",
    )
