"""Calls of tools in what a model writes: read back from the form that its chat template writes them
in.

Which form that is shows when the template writes a call: the reader that gets it back whole is the
one (`find_form`). Known are those of Qwen and Hermes, Qwen3-Coder, Llama 3, and Mistral's older and
newer one, each after the public template of its family. While an answer is written, what may be a
call is kept back; what is none in the end is text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.encoding.spans import ChatTemplate
from finetune.data.formats import Message
from finetune.data.report import RecordProblem
from finetune.data.tools import Call

_ID_CHARACTERS = string.ascii_letters + string.digits
_DECODER = json.JSONDecoder()
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\]")

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe": {"type": "string"}},
            "required": ["probe"],
        },
    },
}
_PROBE_CALL = Call("probe_tool", {"probe": "value"}, "probe0000")


class _NoCall(ValueError):
    """A text is no call of this form."""


@dataclass(frozen=True)
class CallForm:
    """How a family of models writes calls.

    Attributes:
        markers: what a call begins with; special tokens among them are text, for this.
        at_start: calls are the whole answer, so that only its beginning can be one.
        read: the text from a marker on -> calls. Raises ValueError for anything else.
    """

    name: str
    markers: tuple[str, ...]
    read: Callable[[str], list[Call]]
    at_start: bool = False
    others: tuple[str, ...] = ()  # special tokens that stand inside calls


def _call(value: Any, key: str) -> Call:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise _NoCall
    arguments = value.get(key, {})
    if not isinstance(arguments, Mapping):
        raise _NoCall
    identity = value.get("id")
    return Call(
        value["name"], arguments, identity if isinstance(identity, str) and identity else _new_id()
    )


def _new_id() -> str:
    """Nine letters and digits: Mistral's templates take no other."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


def _decoded(text: str, start: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, len(text) - len(text[start:].lstrip()))
    except (ValueError, RecursionError) as error:
        raise _NoCall from error


def _read_tagged(text: str) -> list[Call]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, one after another."""
    return [_call(json.loads(body), "arguments") for body in _bodies(text)]


def _read_coder(text: str) -> list[Call]:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, one after
    another.
    """
    calls = []
    for body in _bodies(text):
        found = _FUNCTION.fullmatch(body)
        if found is None:
            raise _NoCall
        arguments = {key: _plain_value(value) for key, value in _PARAMETER.findall(found[2])}
        calls.append(Call(found[1], arguments, _new_id()))
    return calls


def _plain_value(text: str) -> Any:
    """Texts stand there without quotes; everything else as JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def _bodies(text: str) -> list[str]:
    parts = text.split("<tool_call>")
    bodies = [part.rstrip().removesuffix("</tool_call>") for part in parts[1:]]
    if parts[0].strip() or any(not part.rstrip().endswith("</tool_call>") for part in parts[1:]):
        raise _NoCall
    return bodies


def _read_bare(text: str) -> list[Call]:
    """{"name": ..., "parameters": {...}}, several with a semicolon or white space between."""
    text = text.strip().removeprefix("<|python_tag|>")
    calls, place = [], 0
    while place < len(text):
        value, place = _decoded(text, place)
        if not isinstance(value, Mapping) or "parameters" not in value:
            raise _NoCall
        calls.append(_call(value, "parameters"))
        place += len(text[place:]) - len(text[place:].lstrip(" ;\n"))
    return calls


def _read_list(text: str) -> list[Call]:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]"""
    values, end = _decoded(text, len("[TOOL_CALLS]"))
    if not isinstance(values, list) or text[end:].strip():
        raise _NoCall
    return [_call(value, "arguments") for value in values]


def _read_named(text: str) -> list[Call]:
    """[TOOL_CALLS]NAME[ARGS]{...}, one after another."""
    calls = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        found = _NAMED.match(part)
        if found is None:
            raise _NoCall
        arguments, end = _decoded(part, found.end())
        if part[end:].strip():
            raise _NoCall
        calls.append(
            _call(
                {
                    "name": found[1],
                    "arguments": arguments,
                    "id": found[2],
                },
                "arguments",
            )
        )
    return calls


# The first that reads back what a template writes is the template's.
FORMS = (
    CallForm(
        "tagged JSON (Qwen, Hermes)", ("<tool_call>",), _read_tagged, others=("</tool_call>",)
    ),
    CallForm(
        "tagged functions (Qwen3-Coder)", ("<tool_call>",), _read_coder, others=("</tool_call>",)
    ),
    CallForm("list (Mistral)", ("[TOOL_CALLS]",), _read_list),
    CallForm(
        "named arguments (Mistral)", ("[TOOL_CALLS]",), _read_named, others=("[ARGS]", "[CALL_ID]")
    ),
    CallForm("bare JSON (Llama 3)", ("<|python_tag|>", "{"), _read_bare, at_start=True),
)


def find_form(template: ChatTemplate) -> CallForm | None:
    """Return the form in which a chat template writes calls; None if it writes none, or uses
    another form.
    """
    bound = template.with_tools((_PROBE_TOOL,))
    messages = [Message("user", "Probe."), Message("assistant", "", calls=(_PROBE_CALL,))]
    try:
        prompt, text = bound.render(messages[:1], generation_prompt=True), bound.render(messages)
    except RecordProblem:
        return None
    if not text.startswith(prompt):
        return None
    written = text[len(prompt) :]
    for form in FORMS:
        for stop in template.stops(written):
            reader = CallReader(form)
            said = reader.add(written[:stop]) + reader.finish()
            found = [(call.name, call.arguments) for call in reader.calls]
            if not said.strip() and found == [(_PROBE_CALL.name, _PROBE_CALL.arguments)]:
                return form
    return None


def shown_tokens(form: CallForm, template: ChatTemplate) -> frozenset[str]:
    """Special tokens that are part of calls: without them they could not be read."""
    return frozenset({*form.markers, *form.others} & set(template.specials))


def _check_sendable(call: Call) -> None:
    """Raise ValueError for a call that the protocol cannot carry: half a character in its name, or
    a number that JSON does not have (NaN, 1e999).
    """
    f"{call.name}{call.id}".encode()
    json.dumps(dict(call.arguments), allow_nan=False)


class CallReader:
    """Separates the text of an answer from the calls that follow it, while it is generated.

    Attributes:
        calls: the calls that were read, after `finish`.
    """

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._held = ""
        self._is_call = False
        self._begun = False
        self.calls: list[Call] = []

    def add(self, piece: str) -> str:
        """Return the text so far that certainly belongs to no call."""
        self._held += piece
        if self._is_call:
            return ""
        start = self._start()
        if start is None:
            start = len(self._held) - self._possible_marker()
        else:
            self._is_call = True
        text = self._held[:start]
        self._held = self._held[start:]
        self._begun = self._begun or bool(text.strip())
        return text

    def finish(self) -> str:
        """Return what was kept back and is no call."""
        held, self._held = self._held, ""
        if not self._is_call:
            return held
        try:
            calls = self._form.read(held)
            for call in calls:
                _check_sendable(call)
        except (ValueError, RecursionError):
            return held
        self.calls = calls
        return ""

    def _start(self) -> int | None:
        if self._form.at_start:
            beginning = self._held.lstrip()
            if self._begun or not beginning.startswith(self._form.markers):
                return None
            return len(self._held) - len(beginning)
        found = [self._held.index(marker) for marker in self._form.markers if marker in self._held]
        return min(found, default=None)

    def _possible_marker(self) -> int:
        """Return how many characters at the end may be the beginning of a marker. At the start of
        an answer, white space before it counts too.
        """
        if self._form.at_start:
            beginning = self._held.lstrip()
            matches = any(marker.startswith(beginning) for marker in self._form.markers)
            return len(self._held) if matches and not self._begun else 0
        return possible_beginning(self._held, self._form.markers)


def possible_beginning(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of one of the marks."""
    longest = max(map(len, marks), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
