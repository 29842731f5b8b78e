"""One answer while it is generated: its tokens become text, piece by piece, for a callback or as a
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
from finetune.inference.tool_calls import CallReader, possible_beginning

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


# (piece of text, the answer once it is complete, the error if it failed)
OnPiece = Callable[[str, "Answer | None", "GenerationError | None"], None]


class AnswerText:
    """The text of one answer as it grows: whole characters only, no special tokens except `shown`,
    and nothing of a stop text.

    The pieces joined are what the tokenizer decodes from all tokens together.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str] = (),
        shown: frozenset[str] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        # A decoder leaves out all special tokens or none. If some are part of the text, the others
        # are kept from it.
        self._hidden: set[int] = set()
        if shown:
            for number, token in tokenizer.added_tokens_decoder.items():
                if token.special:
                    self._hidden.add(number)
            self._hidden.update(tokenizer.all_special_ids)
            self._hidden.difference_update(tokenizer.convert_tokens_to_ids(sorted(shown)))
        self._skip = not shown
        self._decode = DecodeStream([], skip_special_tokens=self._skip)
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._given = 0  # characters handed out
        self.text = ""
        self.stopped = False  # a stop text came

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete. What may be the beginning of a character or
        of a stop text is kept back.
        """
        token_ids = [token for token in token_ids if token not in self._hidden]
        self._ids.extend(token_ids)
        fresh = "".join(
            self._decode.step(self._tokenizer.backend_tokenizer, token) or "" for token in token_ids
        )
        return self._hand_out(self.text + fresh, keep_back=True)

    def finish(self, *, is_cut: bool = False) -> str:
        """Return what was kept back; of a cut answer without the bytes that begin a character."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        # Bytes that never became a character appear only here, as U+FFFD.
        is_torn = is_cut and not whole[len(self.text) :].strip("\ufffd")
        if is_torn or not whole.startswith(self.text):
            whole = self.text
        return self._hand_out(whole, keep_back=False)

    def _hand_out(self, text: str, *, keep_back: bool) -> str:
        if self.stopped:
            return ""
        starts = [text.index(stop) for stop in self._stops if stop in text]
        self.stopped = bool(starts)
        self.text = text[: min(starts)] if starts else text
        end = len(self.text)
        if keep_back and not self.stopped:
            end -= possible_beginning(text, self._stops)
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece


class Generation:
    """One answer in progress.

    Args:
        on_piece: called in the engine's thread.
        calls: reads tool calls from the text.
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
        self._shown = ""  # text handed out, without calls
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
        """Stop; the finish_reason is "cancelled" unless the answer is complete already."""
        with self._lock:
            if self._over:
                return
            self._end("", "cancelled")
        self._engine.cancel(self.identity)

    def receive(self, token_ids: Sequence[int], finished: bool, error: str | None) -> None:
        """Receive tokens as the engine's listener."""
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
            elif piece := self._without_calls(piece):
                self._on_piece(piece, None, None)

    def _without_calls(self, piece: str) -> str:
        """Return the part of a piece that does not belong to a tool call."""
        if self._calls is not None:
            piece = self._calls.add(piece)
        self._shown += piece
        return piece

    def _end(self, piece: str, reason: str) -> None:
        self._over = True
        piece = self._without_calls(piece + self._text.finish(is_cut=reason == "length"))
        if self._text.stopped and reason != "cancelled":  # what was kept back completed a stop text
            reason = "stop"
        calls: tuple[Call, ...] = ()
        if self._calls is not None:
            rest = self._calls.finish()
            piece += rest
            self._shown += rest
            calls = tuple(self._calls.calls)
        if calls:  # templates write a line break between the text and a call
            self._shown = self._shown.rstrip()
            reason = "tool_calls" if reason == "stop" else reason
        ids = tuple(self._ids)
        answer = Answer(self._shown, ids, reason, self.prompt_tokens, len(ids), calls)
        self._on_piece(piece, answer, None)


class AnswerStream(Iterator[str]):
    """Pieces of text as they are generated; `answer` is set after the last."""

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

    def finish(self) -> Answer:
        """Wait for the complete answer.

        Raises:
            GenerationError: the answer failed.
        """
        for _piece in self:
            pass
        assert self.answer is not None
        return self.answer

    def cancel(self) -> None:
        """Stop the answer; the stream ends soon after."""
        if self.generation is not None:
            self.generation.cancel()
