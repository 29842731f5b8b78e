"""A token stream as samples: windows of `max_seq_len` targets, which training reads like any other samples.

A window holds one token more than it has targets: the model sees all but its last, and is to predict all but its first.
Windows follow one another without gap (the last token of one is the first of the next, so every token but the stream's
first is a target once a pass), or each begins where a document begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.data.corpus.token_shards import TokenShards
from finetune.errors import DataError


class Windows:
    """Windows of a token stream; a `data.steps.SampleSource`.

    Args:
        max_seq_len: targets of a window.
        document_aligned: begin every window at a document; tokens between a window's end and the next document are cut.
        limit: most windows, from the beginning; None for all.
        name: the setting that names the stream, for messages.

    Attributes:
        starts: int64 `(N,)`: the first token of each window.
        lengths: int32 `(N,)`: tokens that the model computes for each window, which are its targets too.
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
        self.stream, self.max_seq_len = stream, max_seq_len
        starts = (
            _aligned_starts(stream.documents, max_seq_len)
            if document_aligned
            else np.arange(0, max(0, stream.tokens - max_seq_len), max_seq_len, dtype=np.int64)
        )
        if not len(starts):
            raise DataError(
                f"{stream.tokens:,} tokens are not one window of {max_seq_len:,} targets (and the token before them)",
                where=name,
                fix=f"give more data, or lower --max-seq-len to at most {max(2, stream.tokens - 1):,}",
            )
        self.tokens = stream.tokens
        self.starts = starts[:limit]
        self.cut_tokens = stream.tokens - 1 - len(starts) * max_seq_len
        # One number seen N times, without memory.
        self.lengths = np.broadcast_to(np.int32(max_seq_len), self.starts.shape)
        self.supervised_counts = self.lengths
        self.record_ids = np.arange(len(self.starts), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[np.ndarray, None]:
        """int32 `(max_seq_len + 1,)`, and None: every token but the first is a target."""
        start = int(self.starts[index])
        return self.stream.slice(start, start + self.max_seq_len + 1), None


class JoinedWindows:
    """Windows of several streams, one stream after another; as `Windows` for whoever trains on them.

    Attributes:
        sources: int64 `(N,)`: the stream of each window, counted from 0.
        source_starts: the first window of each stream, and the number of windows.
    """

    def __init__(self, parts: Sequence[Windows]) -> None:
        self.parts = tuple(parts)
        counts = [len(part) for part in parts]
        self.sources = np.repeat(np.arange(len(parts), dtype=np.int64), counts)
        self._ends = np.cumsum(counts)
        self.source_starts = (0, *self._ends.tolist())
        self.tokens = sum(part.tokens for part in parts)
        self.cut_tokens = sum(part.cut_tokens for part in parts)
        self.lengths = np.broadcast_to(np.int32(parts[0].max_seq_len), self.sources.shape)
        self.supervised_counts = self.lengths
        self.record_ids = np.arange(len(self.sources), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> tuple[np.ndarray, None]:
        source = int(self.sources[index])
        return self.parts[source][index - int(self._ends[source]) + len(self.parts[source])]


def _aligned_starts(documents: np.ndarray, max_seq_len: int) -> np.ndarray:
    """The first document, then always the first document that begins where the last window has ended, or later.

    Windows overlap by the token that only the earlier one predicts, as without alignment.
    """
    total = int(documents[-1])
    starts = []
    document = 0
    while document < len(documents) - 1 and documents[document] + max_seq_len < total:
        starts.append(int(documents[document]))
        document = int(np.searchsorted(documents, starts[-1] + max_seq_len))
    return np.array(starts, dtype=np.int64)
