"""A token stream as samples: windows of `max_seq_len` targets, which training reads like any other
samples.

A window holds one token more than it has targets: the model reads all but the last token, and
predicts all but the first. There are three ways to cut windows. They may follow one another without
gap: the last token of one is the first of the next, so every token but the stream's first is a
target once a pass. Or each begins where a document begins. Or each is filled with documents that
fit.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from finetune.config.pretrain_config import PretrainConfig
from finetune.data.corpus.token_shards import TokenShards
from finetune.errors import DataError

# A length and how many documents of it a window takes, in the order that it takes them.
Pattern = list[tuple[int, int]]


def pack_best_fit(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign documents to windows.

    Args:
        lengths: int `(documents,)`: tokens of each document, at least 1.
        size: tokens of a window.

    Returns:
        The documents, int32 or int64 `(placed,)`, window after window; the last of a window may be
        cut. And where the documents of each window begin among them, then `placed`: int64
        `(windows + 1,)`.
    """
    # numpy sorts 16-bit numbers by radix, in one pass.
    clipped = np.minimum(lengths, size).astype(np.uint16 if size < 1 << 16 else np.int64)
    by_length = np.argsort(clipped, kind="stable").astype(
        np.int32 if len(lengths) < 1 << 31 else np.int64, copy=False
    )
    counts = np.bincount(clipped, minlength=size + 1)
    # of each length, the place of its next document in `by_length`
    following = (np.cumsum(counts) - counts).tolist()
    left = counts.tolist()
    present = np.flatnonzero(counts).tolist()  # the lengths that are left, rising
    members, widths, repeats = [by_length[:0]], [], []
    while pattern := _next_pattern(present, left, size):
        uses: Counter[int] = Counter()
        for length, number in pattern:
            uses[length] += number
        windows = min(left[length] // number for length, number in uses.items())
        columns = []
        for length, number in pattern:
            first = following[length]
            following[length] += windows * number
            columns.append(by_length[first : following[length]].reshape(windows, number))
        for length, number in uses.items():
            left[length] -= windows * number
            if not left[length]:
                del present[bisect_left(present, length)]
        members.append(np.concatenate(columns, axis=1).ravel())
        widths.append(sum(uses.values()))
        repeats.append(windows)
    ends = np.cumsum(np.repeat(widths, repeats), dtype=np.int64)
    firsts = np.concatenate([[0], ends]).astype(np.int64)
    return np.concatenate(members), firsts


def _next_pattern(present: list[int], left: list[int], size: int) -> Pattern:
    """Return the document lengths that fill the next window.

    They fill later windows too, as long as enough documents with each length are left.

    Returns:
        Empty if the remaining documents fill no window.
    """
    pattern: Pattern = []
    room = size
    shorter = len(present)
    while room and (shorter := bisect_right(present, room, 0, shorter) - 1) >= 0:
        length = present[shorter]
        number = min(room // length, left[length])
        pattern.append((length, number))
        room -= length * number
    if not room:
        return pattern
    taken = dict(pattern)
    shortest = next((length for length in present if left[length] > taken.get(length, 0)), None)
    if shortest is None:
        return []
    if pattern and pattern[-1][0] == shortest:
        return [*pattern[:-1], (shortest, taken[shortest] + 1)]
    return [*pattern, (shortest, 1)]


logger = logging.getLogger("finetune")

MUCH_CUT = 0.5  # nanochat's loader cuts a third of its texts


class Windows:
    """Windows of a token stream; a `batching.steps.SampleSource`.

    Args:
        max_seq_len: targets of a window.
        document_aligned: begin every window at a document; tokens between a window's end and the
            next document are cut.
        limit: most windows, from the beginning; None for all.
        name: the setting that names the stream, for messages.

    Attributes:
        starts: int64 `(N,)`: the first token of each window.
        lengths: int32 `(N,)`: tokens that the model computes for each window, which are its targets
            too.
        tokens: of the whole stream.
        cut_tokens: tokens that are no target of any window.

    Raises:
        DataError: not even one window.
    """

    def __init__(
        self,
        stream: TokenShards,
        max_seq_len: int,
        *,
        document_aligned: bool = False,
        limit: int | None = None,
        name: str = "token files",
    ) -> None:
        self.stream = stream
        self.max_seq_len = max_seq_len
        if document_aligned:
            starts = _aligned_starts(stream.documents, max_seq_len)
        else:
            end = max(0, stream.tokens - max_seq_len)
            starts = np.arange(0, end, max_seq_len, dtype=np.int64)
        self.starts = starts[:limit]
        self.cut_tokens = stream.tokens - 1 - len(starts) * max_seq_len
        self._count(len(self.starts), name)

    def _count(self, windows: int, name: str) -> None:
        """Set the attributes that follow from the number of windows."""
        if not windows:
            raise DataError(
                f"{self.stream.tokens:,} tokens are not one window of {self.max_seq_len:,} targets"
                " (and the token before them)",
                where=name,
                fix=(
                    "give more data, or lower --max-seq-len to at most"
                    f" {max(2, self.stream.tokens - 1):,}"
                ),
            )
        self.tokens = self.stream.tokens
        # One number seen N times, without memory.
        self.lengths = np.broadcast_to(np.int32(self.max_seq_len), (windows,))
        self.supervised_counts = self.lengths
        self.record_ids = np.arange(windows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.record_ids)

    def __getitem__(self, index: int) -> tuple[np.ndarray, None]:
        """int32 `(max_seq_len + 1,)`, and None: every token but the first is a target."""
        start = int(self.starts[index])
        return self.stream.slice(start, start + self.max_seq_len + 1), None


class BestFitWindows(Windows):
    """Windows that each begin with a document's separator and are filled as `pack_best_fit`
    does; otherwise as `Windows`.

    No token is in two windows. `cut_tokens` are those in none.
    """

    def __init__(self, stream: TokenShards, max_seq_len: int, *, name: str = "token files") -> None:
        self.stream = stream
        self.max_seq_len = max_seq_len
        self._documents, self._firsts = pack_best_fit(np.diff(stream.documents), max_seq_len + 1)
        self.cut_tokens = stream.tokens - (len(self._firsts) - 1) * (max_seq_len + 1)
        self._count(len(self._firsts) - 1, name)

    def __getitem__(self, index: int) -> tuple[np.ndarray, None]:
        starts = self.stream.documents
        parts = []
        room = self.max_seq_len + 1
        for document in self._documents[self._firsts[index] : self._firsts[index + 1]]:
            start = int(starts[document])
            stop = min(int(starts[document + 1]), start + room)
            parts.append(self.stream.slice(start, stop))
            room -= stop - start
        return np.concatenate(parts), None


class JoinedWindows:
    """Windows of several streams, one stream after another; to training
    they look like `Windows`.

    Attributes:
        sources: int64 `(N,)`: the stream of each window, counted from 0.
        source_starts: the first window of each stream, and the number of windows.
    """

    def __init__(self, parts: Sequence[Windows]) -> None:
        self.parts = tuple(parts)
        counts = [len(part) for part in parts]
        self.sources = np.repeat(np.arange(len(parts), dtype=np.int64), counts)
        self.source_starts = (0, *itertools.accumulate(counts))
        self.tokens = sum(part.tokens for part in parts)
        self.cut_tokens = sum(part.cut_tokens for part in parts)
        self.lengths = np.broadcast_to(np.int32(parts[0].max_seq_len), self.sources.shape)
        self.supervised_counts = self.lengths
        self.record_ids = np.arange(len(self.sources), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> tuple[np.ndarray, None]:
        source = int(self.sources[index])
        return self.parts[source][index - self.source_starts[source]]


def training_windows(config: PretrainConfig, **known: Any) -> Windows | JoinedWindows:
    """Make the windows that a run trains on: with weights each entry is a separate stream, without
    weights all are one.

    Args:
        known: what `TokenShards` is to check the files against.

    Raises:
        DataError: no window; or they are to begin at documents, and the files do not say where
            those do.
    """
    if config.data_weights:
        parts = [_windows_of((path,), config, known) for path in config.train_data_path]
        windows: Windows | JoinedWindows = JoinedWindows(parts)
    else:
        windows = _windows_of(config.train_data_path, config, known)
    cut = windows.cut_tokens / windows.tokens
    if config.windows != "stream" and cut > MUCH_CUT:
        logger.warning(
            "%.0f%% of the training tokens are cut by --windows %s: the documents are longer than"
            " the windows of %d tokens. Fix: --windows stream, or a larger --max-seq-len",
            100 * cut,
            config.windows,
            config.max_seq_len,
        )
    return windows


def _windows_of(source: Sequence[str], config: PretrainConfig, known: dict[str, Any]) -> Windows:
    """Make the windows of one stream, as --windows asks.

    Raises:
        DataError: windows are to begin at documents, and the files do not show where those begin.
    """
    stream = TokenShards(source, split="train", **known)
    kind, name = config.windows, "--train-data-path"
    if kind != "stream":
        for path, header in zip(stream.paths, stream.headers, strict=True):
            if not header.sha256 or header.separator_id is None:
                raise DataError(
                    "the file does not say where its documents begin, or they begin with no token"
                    " of their own",
                    where=str(path),
                    fix="prepare the texts with python -m finetune prepare, or take --windows"
                    " stream",
                )
    if kind == "best-fit":
        return BestFitWindows(stream, config.max_seq_len, name=name)
    return Windows(stream, config.max_seq_len, document_aligned=kind == "document", name=name)


def _aligned_starts(documents: np.ndarray, max_seq_len: int) -> np.ndarray:
    """Return the starts of windows: the first document, then always the first document that begins
    at or after the end of the last window.

    Windows overlap by the token that only the earlier one predicts, as without alignment.
    """
    total = int(documents[-1])
    starts = []
    document = 0
    while document < len(documents) - 1 and documents[document] + max_seq_len < total:
        starts.append(int(documents[document]))
        document = int(np.searchsorted(documents, starts[-1] + max_seq_len))
    return np.array(starts, dtype=np.int64)
