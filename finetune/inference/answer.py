"""One answer while it is written: its tokens become text, piece by piece, for a listener or as a
stream.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from finetune.data.tools import Call
from finetune.errors import FinetuneError
from finetune.inference.engine import Engine
from finetune.inference.tool_calls import CallReader

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class Answer:
    """One answer."""

    text: str  # without special tokens, stop text and calls
    token_ids: tuple[int, ...]  # what was generated, with the end token where there is one
    finish_reason: str  # "stop" (an end token or stop text), "tool_calls", "length", or "cancelled"
    prompt_tokens: int
    completion_tokens: int
    calls: tuple[Call, ...] = ()  # of tools


class GenerationError(FinetuneError):
    """An answer ended by a failure of the model or device."""


# (piece of text, the answer when it is over, the error when it failed)
OnPiece = Callable[[str, "Answer | None", "GenerationError | None"], None]


class AnswerText:
    """The text of one answer as it grows: whole characters only, no special tokens, and nothing of
    a stop text.

    The pieces together are the whole text, which is what the tokenizer decodes from all tokens at
    once.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str] = (),
        shown: frozenset[str] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        # Special tokens that are text here. A decoder leaves out all of them or none, so the others
        # are kept from it.
        self._hidden = frozenset()
        if shown:
            known = tokenizer.added_tokens_decoder.items()
            special = {
                number for number, token in known if token.special and str(token) not in shown
            }
            own = set(tokenizer.all_special_ids) - set(
                tokenizer.convert_tokens_to_ids(sorted(shown))
            )
            self._hidden = frozenset(special | own)
        self._skip = not shown
        self._decode = DecodeStream([], skip_special_tokens=self._skip)
        self._stops = tuple(stops)
        self._longest_stop = max(map(len, self._stops), default=0)
        self._ids: list[int] = []
        self._given = 0  # characters handed out
        self.text = ""
        self.stopped = False  # a stop text came

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; what may be the beginning of a character or a stop
        text is kept back.
        """
        token_ids = [token for token in token_ids if token not in self._hidden]
        self._ids.extend(token_ids)
        fresh = "".join(
            self._decode.step(self._tokenizer.backend_tokenizer, token) or "" for token in token_ids
        )
        return self._hand_out(self.text + fresh, keep_back=True)

    def finish(self) -> str:
        """What was kept back."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        # Bytes that never became a character appear only here, as U+FFFD.
        return self._hand_out(whole if whole.startswith(self.text) else self.text, keep_back=False)

    def _hand_out(self, text: str, *, keep_back: bool) -> str:
        if self.stopped:
            return ""
        search_from = max(0, len(self.text) - self._longest_stop)
        self.text = text
        found = [start for stop in self._stops if (start := text.find(stop, search_from)) >= 0]
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
            if any(
                stop.startswith(self.text[-length:]) for stop in self._stops if len(stop) > length
            ):
                return length
        return 0


class Generation:
    """One answer being written; `calls` reads those of tools from it. `on_piece` is called in the
    engine's thread.
    """

    def __init__(
        self,
        engine: Engine,
        stop_ids: frozenset[int],
        prompt_tokens: int,
        text: AnswerText,
        on_piece: OnPiece,
        calls: CallReader | None = None,
    ) -> None:
        self._calls = calls
        self._said = ""
        self.identity = uuid.uuid4().hex
        self.prompt_tokens = prompt_tokens
        self._engine = engine
        self._stop_ids = stop_ids
        self._text = text
        self._on_piece = on_piece
        self._ids: list[int] = []
        self._lock = threading.Lock()
        self._over = False

    def cancel(self) -> None:
        """Stop writing; ends with finish_reason "cancelled" unless it is over already."""
        with self._lock:
            if self._over:
                return
            self._end("", "cancelled")
        self._engine.cancel(self.identity)

    def receive(self, token_ids: Sequence[int], finished: bool, error: str | None) -> None:
        """The engine's listener."""
        with self._lock:
            if self._over:
                return
            if error is not None:
                self._over = True
                failure = GenerationError(
                    f"the answer failed: {error}", "generation", "try again; see the log"
                )
                self._on_piece("", None, failure)
                return
            self._ids.extend(token_ids)
            piece = self._text.add(token_ids)
            if self._text.stopped:
                self._end(piece, "stop")
                self._engine.cancel(self.identity)
            elif finished:
                ended = bool(self._ids) and self._ids[-1] in self._stop_ids
                self._end(piece, "stop" if ended else "length")
            elif piece := self._say(piece):
                self._on_piece(piece, None, None)

    def _say(self, piece: str) -> str:
        """What of a piece is none of a call's."""
        said = piece if self._calls is None else self._calls.add(piece)
        self._said += said
        return said

    def _end(self, piece: str, reason: str) -> None:
        self._over = True
        piece = self._say(piece + self._text.finish())
        if self._text.stopped and reason != "cancelled":  # what was kept back completed a stop text
            reason = "stop"
        calls: tuple[Call, ...] = ()
        if self._calls is not None:
            rest = self._calls.finish()
            piece, self._said, calls = piece + rest, self._said + rest, tuple(self._calls.calls)
            if calls:  # templates write a line's end between what is said and a call
                self._said = self._said.rstrip()
                reason = "tool_calls" if reason == "stop" else reason
        text = self._text.text if self._calls is None else self._said
        answer = Answer(text, tuple(self._ids), reason, self.prompt_tokens, len(self._ids), calls)
        self._on_piece(piece, answer, None)


class AnswerStream(Iterator[str]):
    """Pieces of text as they come; `answer` is there after the last. Leaving early cancels."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.generation: Generation | None = None
        self._pieces: queue.SimpleQueue[tuple[str, Answer | None, GenerationError | None]] = (
            queue.SimpleQueue()
        )

    def put(self, piece: str, answer: Answer | None, error: GenerationError | None) -> None:
        self._pieces.put((piece, answer, error))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """Raises: GenerationError if the answer failed."""
        if self.answer is not None:
            raise StopIteration
        piece, answer, error = self._pieces.get()
        if error is not None:
            raise error
        self.answer = answer
        if answer is not None and not piece:
            raise StopIteration
        return piece

    def cancel(self) -> None:
        """Stop the answer; the pieces end soon after."""
        if self.generation is not None:
            self.generation.cancel()
