"""Text -> tokens with exact character offsets, so that a span of text is a span of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.spans import Turn
from finetune.errors import DataError


@dataclass(frozen=True)
class Encoded:
    """T tokens of a text. `starts` and `ends` are character offsets, int64 (T,); `ids` int32
    (T,).
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Encoder:
    """A tokenizer as a function from text to tokens, special tokens in the text included and none
    added.

    The whole text is tokenized once. Where a token would straddle the beginning of a trained span,
    the text is cut there and both sides are tokenized alone: at inference the prompt is tokenized
    alone too, so the model meets exactly the prompt's tokens, and every target is a whole token of
    the answer. A token that runs past the *end* of a trained span with white space only (an
    end-of-turn token that swallows the newline after it, a "." fused with a newline) is the
    answer's last token and stays whole; one that takes other text with it is cut like the first. A
    tokenizer for which cutting changes the text (one that writes a space before every piece) keeps
    its straddling token as part of the prompt: it is not trained.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"{type(tokenizer).__name__} gives no character offsets: answers cannot be told"
                " from prompts exactly",
                where=str(tokenizer.name_or_path),
                fix="use the model's tokenizer.json (a tokenizer of the 'tokenizers' library)",
            )
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        # The post-processor adds special tokens, which templates write themselves; some trim spaces
        # off the offsets.
        backend.post_processor = None
        self._backend = backend

    def encode(self, text: str, turns: Sequence[Turn] = (), cut_at: int | None = None) -> Encoded:
        """Tokenize `text` so that no token straddles a trained turn's boundary (see the class's
        text).

        Args:
            cut_at: a character to cut at in any case: what is behind it has no part in the tokens
                before it.
        """
        whole = self._piece(text, 0)
        cuts = _straddled(text, whole, turns)
        if cut_at is not None:
            cuts = sorted({*cuts, cut_at})
        if not cuts:
            return whole
        pieces = [
            self._piece(text[a:b], a) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)
        ]
        names = ("ids", "starts", "ends")
        cut = Encoded(
            *(np.concatenate([getattr(piece, name) for piece in pieces]) for name in names)
        )
        return cut if self._text(cut.ids) == self._text(whole.ids) else whole

    def _piece(self, text: str, offset: int) -> Encoded:
        encoding = self._backend.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + offset
        return Encoded(np.array(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])

    def _text(self, ids: np.ndarray) -> str:
        return self._backend.decode(ids.tolist(), skip_special_tokens=False)


def _straddled(text: str, encoded: Encoded, turns: Sequence[Turn]) -> list[int]:
    """The boundaries of turns that lie inside a token and must be cut at, in order."""
    cuts = set()
    for turn in turns:
        if ((encoded.starts < turn.start) & (turn.start < encoded.ends)).any():
            cuts.add(turn.start)
        over = (encoded.starts < turn.end) & (encoded.ends > _past_space(text, turn.end))
        if over.any():
            cuts.add(turn.end)
    return sorted(cuts)


def trained_tokens(text: str, encoded: Encoded, turns: Sequence[Turn]) -> list[np.ndarray]:
    """For each turn the indices of its tokens, int64, in order."""
    spans = []
    for turn in turns:
        inside = (
            (encoded.starts >= turn.start)
            & (encoded.starts < turn.end)
            & (encoded.starts < encoded.ends)
        )
        spans.append(np.flatnonzero(inside & (encoded.ends <= _past_space(text, turn.end))))
    return spans


def _past_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
