"""Tokens of an answer -> text, piece by piece: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class AnswerText:
    """The text of one answer as it grows. Special tokens are left out.

    The pieces together are the whole text, which is what the tokenizer decodes from all tokens at once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decode = DecodeStream([], skip_special_tokens=True)
        self._stops = tuple(stops)
        self._longest_stop = max(map(len, self._stops), default=0)
        self._ids: list[int] = []
        self._given = 0  # characters handed out
        self.text = ""
        self.stopped = False  # a stop text came

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; what may be the beginning of a character or a stop text is kept back."""
        self._ids.extend(token_ids)
        fresh = "".join(self._decode.step(self._tokenizer.backend_tokenizer, token) or "" for token in token_ids)
        return self._hand_out(self.text + fresh, keep_back=True)

    def finish(self) -> str:
        """What was kept back."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        # Bytes that never became a character appear only here, as U+FFFD.
        return self._hand_out(whole if whole.startswith(self.text) else self.text, keep_back=False)

    def _hand_out(self, text: str, *, keep_back: bool) -> str:
        if self.stopped:
            return ""
        search_from = max(0, len(self.text) - self._longest_stop)
        self.text = text
        found = [place for stop in self._stops if (place := text.find(stop, search_from)) >= 0]
        if found:
            self.stopped = True
            self.text = text[: min(found)]
            end = len(self.text)
        else:
            end = len(text) - (self._possible_stop() if keep_back else 0)
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _possible_stop(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops if len(stop) > length):
                return length
        return 0
