"""A conversation: its turns, and a file to keep it in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.report import RecordProblem
from finetune.data.tools import Call, protocol_calls, read_calls
from finetune.errors import DataError, StateError
from finetune.storage.durable_files import read_bytes, replace_file, write_new

FORM, VERSION = "finetune-conversation", 1
_LARGEST_BYTES = 16 << 20
_TURN_KEYS = ("role", "content", "tool_calls", "tool_call_id")


@dataclass
class ChatSession:
    """A system prompt and the turns after it, in the order user, assistant, user, ...

    An answer may call tools: their results follow, and then the next answer.
    """

    system: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that the model receives."""
        return (
            [{"role": "system", "content": self.system}, *self.turns]
            if self.system
            else list(self.turns)
        )

    def ask(self, question: str) -> None:
        self.turns.append({"role": "user", "content": question})

    def answer(self, text: str, calls: Sequence[Call] = ()) -> None:
        self.turns.append({"role": "assistant", "content": text})
        if calls:
            self.turns[-1]["tool_calls"] = protocol_calls(calls)

    def result(self, call: Call, text: str) -> None:
        """Add the result of a called tool."""
        self.turns.append(
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": text,
            }
        )

    def take_back(self) -> None:
        """Forget the last question, which got no answer, with the calls and results after it."""
        while self.turns and self.turns.pop()["role"] != "user":
            pass

    def reset(self) -> None:
        """Forget the turns; the system prompt stays."""
        self.turns.clear()

    def save(self, path: Path, *, model: str) -> None:
        """Write the conversation; only a file that holds one already is replaced.

        Raises:
            StateError: `path` holds something else, or it cannot be written.
        """
        record = {
            "form": FORM,
            "version": VERSION,
            "model": model,
            "messages": self.messages,
        }
        data = (json.dumps(record, ensure_ascii=False, indent=2) + "\n").encode()
        try:
            if path.exists():
                ChatSession.load(path)  # raises for anything else
                replace_file(path, data)
            else:
                write_new(path, data)
        except DataError as error:
            raise StateError(
                "another file is there, and it is kept", str(path), "choose another name"
            ) from error
        except OSError as error:
            raise StateError(
                f"cannot be written: {error.strerror}", str(path), "choose another folder"
            ) from error

    @classmethod
    def load(cls, path: Path) -> ChatSession:
        """Raises DataError: no such file, or not a conversation."""
        fix = "give a file that /save has written"
        try:
            record = json.loads(read_bytes(path, _LARGEST_BYTES))
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", str(path), fix) from error
        except (ValueError, RecursionError) as error:  # not JSON or not UTF-8
            raise DataError("not a conversation", str(path), fix) from error
        if (
            not isinstance(record, dict)
            or record.get("form") != FORM
            or record.get("version") != VERSION
        ):
            raise DataError("not a conversation", str(path), fix)
        messages = record.get("messages")
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise DataError("its messages are not texts with roles", str(path), fix)
        system, turns = "", messages
        if messages and messages[0]["role"] == "system":
            system, turns = messages[0]["content"], messages[1:]
        if not _in_order(turns):
            raise DataError("its turns are not questions and answers in order", str(path), fix)
        return cls(
            system, [{name: turn[name] for name in _TURN_KEYS if name in turn} for turn in turns]
        )


def _is_message(message: Any) -> bool:
    is_text = isinstance(message, dict) and isinstance(message.get("content"), str)
    is_text = is_text and isinstance(message.get("tool_call_id", ""), str)
    return is_text and message.get("role") in ("system", "user", "assistant", "tool")


def _in_order(turns: list[dict[str, Any]]) -> bool:
    """Return whether each question has its answer, after the results of earlier calls."""
    expected, called = "user", set()
    for turn in turns:
        role = turn["role"]
        if role != expected:
            return False
        if role == "assistant":
            try:
                called = {call.id for call in read_calls(turn.get("tool_calls"), "tool_calls", 0)}
            except RecordProblem:
                return False
        elif role == "tool":
            if turn.get("tool_call_id") not in called:
                return False
            called.remove(turn["tool_call_id"])
        expected = "tool" if called else "user" if role == "assistant" else "assistant"
    return expected == "user"
