"""What is done to each unit of a corpus: looked at once to know what there is, then turned into
tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from finetune.data.corpus.documents import Unit, documents_of
from finetune.data.corpus.tokenizer import DocumentEncoder
from finetune.data.problems import ProblemLog, RecordProblem

KEYS = 1 << 64
# Text of a unit that is encoded at a time: a row group may have gigabytes.
_ENCODED_BYTES = 8 << 20


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
        scan = Scan(input_bytes=sum(piece.size_bytes for piece in unit), problems=reader.problems)
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
    """The wanted documents of a unit."""

    digest: bytes
    ids: np.ndarray  # of all of them, one after another
    lengths: np.ndarray  # one per document, as are the next two
    ordinals: np.ndarray  # number in the unit
    is_valid: np.ndarray


@dataclass
class EncodeJob:
    """(unit, first wanted training document, first wanted validation document) -> UnitTokens."""

    text_field: str
    seed: int
    bound: int
    tokenizer_json: str
    separator_id: int
    dtype: str
    special_tokens: bool = False
    _encoder: DocumentEncoder | None = None

    def __call__(self, item: tuple[Unit, int, int]) -> UnitTokens:
        unit, *first_wanted = item
        if self._encoder is None:
            self._encoder = DocumentEncoder(
                self.tokenizer_json, self.separator_id, self.special_tokens
            )
        reader = UnitReader(self.text_field, self.seed)
        texts, text_bytes, encoded, ordinals, is_valid = [], 0, [], [], []
        for ordinal, (text, raw, (key, _)) in enumerate(reader.read(unit)):
            valid = key < self.bound
            if ordinal >= first_wanted[valid]:
                texts.append(text)
                ordinals.append(ordinal)
                is_valid.append(valid)
                text_bytes += len(raw)
            if text_bytes > _ENCODED_BYTES:
                encoded.append(self._encoder.encode(texts, self.dtype))
                texts, text_bytes = [], 0
        encoded.append(self._encoder.encode(texts, self.dtype))
        ids, lengths = (np.concatenate(parts) for parts in zip(*encoded, strict=True))
        return UnitTokens(
            reader.digest,
            ids,
            lengths,
            np.array(ordinals, dtype=np.int64),
            np.array(is_valid, dtype=bool),
        )


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
