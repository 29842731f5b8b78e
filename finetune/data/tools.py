"""Tools in records: what may be called, calls, and which result answers which call.

Two common forms are read. The OpenAI chat format has `tools`, `tool_calls` and `tool` turns (and
its older `functions` and `function_call`). ShareGPT has `tools` as a string, with turns by
`function_call` and `observation`, as LLaMA-Factory reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.report import RecordProblem

Tools = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Call:
    """One call of a function. Results name it by its id; where a record gives none, it is made of
    its place.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str

    def for_template(self, *, as_text: bool = False) -> dict[str, Any]:
        """Return the call for chat templates, with the arguments as an object or a JSON string."""
        arguments = arguments_text(self.arguments) if as_text else dict(self.arguments)
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON; half of a surrogate pair stays escaped."""
    text = json.dumps(dict(arguments), ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(dict(arguments))
    return text


def read_tools(given: Any, where: str) -> Tools:
    """Return the functions that may be called.

    Each is `{"type": "function", "function": {"name": ...}}`.

    Args:
        given: a list of such objects, or of their `function` values only; or such a list as JSON.

    Raises:
        RecordProblem: it has another type, a name is missing, or two have the same name.
    """
    listed = _json(given, where) if isinstance(given, str) and given.strip() else given
    if not listed:
        return ()
    if not isinstance(listed, (list, tuple)):
        raise RecordProblem("wrong type", f"{where} is no list of functions")
    tools = tuple(_tool(tool, f"{where}[{number}]") for number, tool in enumerate(listed))
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RecordProblem("tool named twice", where)
    return tools


def _tool(given: Any, where: str) -> Mapping[str, Any]:
    """Read one tool, in the form with `function` or without."""
    function = _function(given, f"{where} is no function with a name")
    if given.get("type", "function") != "function":
        raise RecordProblem(
            "unsupported key", f"{where} is of type {given['type']!r}; only functions are called"
        )
    return given if given is not function else {"type": "function", "function": given}


def _function(given: Any, problem: str) -> Mapping[str, Any]:
    """Return the value of `function`, or the whole object; it must have a name."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if isinstance(function, Mapping):
        name = function.get("name")
        if isinstance(name, str) and name:
            return function
    raise RecordProblem("wrong type", problem)


def read_calls(given: Any, where: str, turn: int) -> tuple[Call, ...]:
    """Read the calls of one turn: a list, a single call, or either as JSON.

    Args:
        turn: number of the turn, for ids that the record does not give.

    Raises:
        RecordProblem: it has another type, a name is missing, arguments are not an object, or an id
            is not a string.
    """
    listed = _json(given, where) if isinstance(given, str) else given
    if not listed:
        return ()
    if isinstance(listed, Mapping):
        listed = [listed]
    if not isinstance(listed, (list, tuple)):
        raise RecordProblem("wrong type", f"{where} is no list of calls")
    return tuple(
        _call(call, f"{where}[{number}]", turn, number) for number, call in enumerate(listed)
    )


def _call(given: Any, where: str, turn: int, number: int) -> Call:
    """Read one call."""
    function = _function(given, f"{where} has no name of a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where}.arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RecordProblem("wrong type", f"{where}.arguments is no object")
    identity = given.get("id")
    if identity is not None and not isinstance(identity, str):
        raise RecordProblem("wrong type", f"{where}.id is not a text")
    # Nine letters and digits, because Mistral's templates take no other.
    made = f"c{turn % 100_000:05d}{number % 1000:03d}"
    return Call(function["name"], arguments, identity or made)


def _json(text: str, where: str) -> Any:
    """Parse a string that must be JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RecordProblem("broken JSON", f"{where} is a text, and not JSON") from None


def match_results(calls: Sequence[Call], ids: Sequence[str], turn: int) -> list[Call]:
    """Return the call that each result after a turn answers: by its id, or in order if no result
    has an id.

    Raises:
        RecordProblem: a call without result, a result of no call, or an id that comes twice.
    """
    where = f"the calls of turn {turn}"
    known = {call.id: call for call in calls}
    given = [identity for identity in ids if identity]
    if len(known) < len(calls) or len(set(given)) < len(given):
        raise RecordProblem("duplicate id", where)
    if not given:
        found = list(calls[: len(ids)])
    elif len(given) == len(ids) and set(ids) <= known.keys():
        found = [known[identity] for identity in ids]
    else:
        raise RecordProblem(
            "result of no call", f"a result after turn {turn} has an id that no call of it has"
        )
    if len(ids) != len(calls):
        kind = "result of no call" if len(ids) > len(calls) else "call without result"
        raise RecordProblem(kind, f"{where}: {len(calls)}, with {len(ids)} results")
    return found


def written_out(call: Call, text: str) -> bool:
    """Return whether a text without white space has the call: its name and every value of its
    arguments.
    """
    return squeezed(call.name) in text and all(
        any(form in text for form in _forms(value)) for value in _leaves(call.arguments)
    )


def _leaves(value: Any) -> list[Any]:
    """List the keys and values in a nested value."""
    if isinstance(value, Mapping):
        return [*value, *(leaf for part in value.values() for leaf in _leaves(part))]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _forms(value: Any) -> list[str]:
    """Return a name, text or number as templates may write it: as it is, or as in JSON with or
    without escapes.
    """
    forms = [str(value), json.dumps(value, ensure_ascii=False), json.dumps(value)]
    return [squeezed(form.removeprefix('"').removesuffix('"')) for form in forms]


def squeezed(text: str) -> str:
    """Remove white space."""
    return "".join(text.split())


def protocol_calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return calls in the form of the OpenAI protocol: the arguments as a JSON string."""
    return [call.for_template(as_text=True) for call in calls]
