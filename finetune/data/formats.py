"""Convert records in the common formats to conversations, checked so that nothing wrong is silently
trained on.

- Alpaca (instruction, input, output): from the Stanford Alpaca data.
- ShareGPT (conversations of from/value): from FastChat.
- messages (role/content): from the OpenAI chat format.
- prompt and completion, as strings or as lists of messages, and plain text: from TRL.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetune.config.fields import did_you_mean
from finetune.data.report import RecordProblem
from finetune.data.tools import Call, Tools, match_results, read_calls, read_tools

LABEL_KEYS = ("label", "kto_tag")  # whether the answer of a record is a good one
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
# Parts of a content, as in OpenAI's protocols and transformers' input classes.
_PART_TYPES = frozenset(
    [f"{kind}{form}" for kind in ("image", "video", "audio") for form in ("", "_url")]
    + [f"input_{kind}" for kind in ("image", "video", "audio")]
)
# Where LLaVA's and LLaMA-Factory's data has one; only read as such in a record that has media.
_PLACEHOLDER = re.compile(r"<(?:image|video|audio)>\n?")
_CONTENT_KEYS = ("content", "value")
_TEXT_KEYS = (*_CONTENT_KEYS, "text", "messages", "conversations", "instruction", "prompt")


class MediaLeftOut(RecordProblem):
    """The record has media, and --on-media leaves such records out."""

    def __init__(self) -> None:
        super().__init__("has images, video or sound")


def holds_something(value: Any) -> bool:
    """Return whether a key has a value; some files write an empty list as a string."""
    return bool(value) and not (
        isinstance(value, str) and value.strip() in ("", "[]", "{}", "null")
    )


def _holds_media(value: Any) -> bool:
    """Like `holds_something`, but a list or struct without a value, which parquet has for a missing
    image, counts as empty.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        # A number is a pixel or a sound's sample, which may be 0.
        return any(isinstance(inner, (int, float)) or _holds_media(inner) for inner in value)
    return holds_something(value)


def _is_media_part(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    if kind is None:  # Qwen-VL's own form: {"image": "cat.png"}; a turn or record has text, too
        return not any(part.get(key) is not None for key in _TEXT_KEYS) and any(
            _holds_media(part.get(key)) for key in MEDIA_KEYS
        )
    return isinstance(kind, str) and kind in _PART_TYPES


def has_media(value: Any) -> bool:
    """Return whether a record, or one of its turns or contents, has media."""
    if isinstance(value, (list, tuple)):
        return any(map(has_media, value))
    if not isinstance(value, Mapping):
        return False
    if _is_media_part(value) or any(_holds_media(value.get(key)) for key in MEDIA_KEYS):
        return True
    return any(has_media(inner) for inner in value.values() if isinstance(inner, (list, tuple)))


def without_media(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record without media and without their placeholders in its strings."""
    return {key: _stripped(value) for key, value in record.items() if key not in MEDIA_KEYS}


def _stripped(value: Any) -> Any:
    """Remove media, and the placeholders for them, from a value of a record."""
    if isinstance(value, str):
        return _PLACEHOLDER.sub("", value)
    if isinstance(value, (list, tuple)):
        return [
            _stripped(one)
            for one in value
            if not (isinstance(one, Mapping) and _is_media_part(one))
        ]
    if not isinstance(value, Mapping):
        return value
    if value.get("type", "text") == "text" and isinstance(value.get("text"), str):
        return {**value, "text": _stripped(value["text"])}
    # Of a turn only its content: arguments of calls and results of tools stay as they are.
    kept = {key: inner for key, inner in value.items() if key not in MEDIA_KEYS}
    return kept | {key: _stripped(kept[key]) for key in _CONTENT_KEYS if key in kept}


_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function"), "tool"),
    "function_call": "assistant",  # its text is the call
}
# Parts of a record that nothing here trains, and how to keep their content. Refused if they hold
# something: without them the record would mean something else.
_MEDIA = (
    "only text is trained: --on-media drop-row leaves such records out, drop-media trains their"
    " text"
)
_NOT_READ_OF_RECORD = dict.fromkeys(MEDIA_KEYS, _MEDIA)
_NOT_READ_OF_TURN = {
    **_NOT_READ_OF_RECORD,
    "reasoning_details": "give its text as 'reasoning_content'",
    "function_calls": "give it as 'tool_calls'",
    "functions": "give it as 'tools' of the record",
}
# Names of the reasoning before an answer in servers and data sets: DeepSeek, vLLM, gpt-oss.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MAY_FOLLOW = {
    None: ("system", "user", "text"),
    "text": (),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


@dataclass(frozen=True)
class Message:
    """One turn."""

    # system, user, assistant or tool; text: a plain text, all of which is trained, and which is the
    # only message
    role: str
    content: str
    # False for an answer with `"weight": 0`; without meaning for the other roles
    trained: bool = True
    # what the assistant thought before it answered, for templates that read `reasoning_content`
    reasoning: str = ""
    calls: tuple[Call, ...] = ()  # of tools, by the assistant, behind the content
    call_id: str = ""  # of the call that this turn of a tool answers
    name: str = ""  # of the tool


ReadTurns = Callable[[Mapping[str, Any], str], list[Message]]  # of (record, key)


@dataclass(frozen=True)
class Conversation:
    """The content of one record: turns in a legal order, ending with an answer, and the difficulty
    if the record has one.
    """

    messages: tuple[Message, ...]
    difficulty: str | None = None
    tools: Tools = ()  # that may be called
    had_media: bool = False  # which were taken out

    @property
    def plain_text(self) -> str | None:
        """Return the text of a plain-text record, which is trained without chat template."""
        return self.messages[0].content if self.messages[0].role == "text" else None


def detect_format(record: Any, columns: Container[str] = ()) -> str:
    """Which of `FORMATS` a record has, by its key; of `columns`, which a mapping names, if there is
    a key among them.

    Raises:
        RecordProblem: the record is not an object, or has none of the keys.
    """
    if not isinstance(record, Mapping):
        raise RecordProblem("wrong type", f"the record is {kind_of(record)}, not an object")
    known = {name: key for name, (key, _reader) in FORMATS.items()}
    known = {name: key for name, key in known.items() if key in columns} or known
    for name, key in known.items():
        if record.get(key) is not None:
            return name
    keys = ", ".join(sorted(map(str, record))[:8]) or "none"
    needed = " or ".join(f"'{key}' ({name})" for name, key in known.items())
    raise RecordProblem(
        "unknown format", f"keys are {keys}; a record needs {needed}{_if_preference(record)}"
    )


def to_conversation(
    record: Mapping[str, Any],
    format_name: str,
    difficulties: Sequence[str] | None = None,
    difficulty_field: str = "difficulty",
) -> Conversation:
    """Read one record of a format (see `detect_format`); without `difficulties`, difficulties are
    ignored.

    Raises:
        RecordProblem: anything that makes the record unfit for training, by kind.
    """
    key, reader = FORMATS[format_name]
    if record.get(key) is None:
        raise RecordProblem(
            "unknown format", f"no '{key}', which the records before it in this file have"
        )
    refuse_media(record)
    try:
        messages = checked(reader(record, key))
    except RecordProblem as problem:
        if problem.kind == "no answer":
            detail = problem.detail + _if_preference(record)
            raise RecordProblem(problem.kind, detail) from problem
        raise
    return Conversation(
        tuple(messages), difficulty_of(record, difficulties, difficulty_field), tools_of(record)
    )


def checked(messages: Sequence[Message]) -> list[Message]:
    """Turns in a legal order with contents that can be trained, results with the id and name of
    their call.

    Raises:
        RecordProblem: they are not.
    """
    _check_order(messages)
    for number, message in enumerate(messages, 1):
        if message.role in _EMPTY and not message.content.strip() and not message.calls:
            raise RecordProblem(_EMPTY[message.role], f"turn {number}")
        try:
            (message.reasoning + message.content).encode()
        except UnicodeEncodeError:
            raise RecordProblem(
                "not UTF-8", f"turn {number} holds half of a surrogate pair"
            ) from None
    return with_matched_results(messages)


def tools_of(record: Mapping[str, Any]) -> Tools:
    """Return the tools that may be called.

    Raises:
        RecordProblem: as `read_tools`, or under two keys.
    """
    tools = read_tools(record.get("tools"), "'tools'")
    functions = read_tools(record.get("functions"), "'functions'")
    if tools and functions:
        raise RecordProblem("unsupported key", "the record has 'tools' and 'functions'")
    return tools or functions


def with_matched_results(messages: Sequence[Message]) -> list[Message]:
    """Results with the id and name of their call; the calls of the last turn have no results yet.

    Raises:
        RecordProblem: a call without result, a result of no call, an id that comes twice.
    """
    found = list(messages)
    for number, message in enumerate(messages[:-1]):
        if not message.calls:
            continue
        following = messages[number + 1 :]
        results = itertools.takewhile(lambda other: other.role == "tool", following)
        calls = match_results(message.calls, [result.call_id for result in results], number + 1)
        for place, call in enumerate(calls, number + 1):
            found[place] = replace(found[place], call_id=call.id, name=call.name)
    return found


def _alpaca(record: Mapping[str, Any], key: str) -> list[Message]:
    if record.get("output") is None:
        raise RecordProblem("no answer", "no 'output'")
    return [*alpaca_prompt(record), Message("assistant", _text(record, "output"))]


def alpaca_prompt(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages before the answer of an alpaca record."""
    parts = [_text(record, "instruction"), _text(record, "input")]
    messages = leading_system(record)
    history = record.get("history")
    if history is not None and not isinstance(history, (list, tuple)):
        raise RecordProblem("wrong type", f"'history' is {kind_of(history)}, not a list of pairs")
    for pair in history or ():
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise RecordProblem(
                "wrong type", "'history' must be a list of [question, answer] pairs of texts"
            )
        question, answer = pair
        messages += [Message("user", question), Message("assistant", answer)]
    return [*messages, Message("user", "\n".join(part for part in parts if part))]


def _prompt_completion(record: Mapping[str, Any], key: str) -> list[Message]:
    """Convert a question and its answer, or TRL's conversational form, whose prompt is context with
    all its answers.
    """
    answer_keys = [name for name in ("completion", "response") if record.get(name) is not None]
    if not answer_keys:
        raise RecordProblem("no answer", "no 'completion' or 'response'")
    if len(answer_keys) > 1:
        raise RecordProblem("two answers", "'completion' and 'response'")
    (answer_key,) = answer_keys
    prompt = record[key]
    completion = record[answer_key]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [*leading_system(record), Message("user", prompt), Message("assistant", completion)]
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RecordProblem(
            "wrong type", f"of '{key}' and '{answer_key}' one is a text and one is none"
        )
    context = [replace(message, trained=False) for message in read_turns(record, key)]
    return context + read_turns({answer_key: completion}, answer_key, len(context))


def _if_preference(record: Mapping[str, Any]) -> str:
    """Return a hint about a record for another kind of run."""
    if record.get("chosen") is None:
        return ""
    return ", but 'chosen': a pair of answers, for python -m finetune.dpo"


def leading_system(record: Mapping[str, Any]) -> list[Message]:
    """Return the system message of a column: an empty one there means none. A system *turn* may be
    empty and stays.
    """
    system = _text(record, "system")
    return [Message("system", system)] if system else []


def read_turns(record: Mapping[str, Any], key: str, before: int = 0) -> list[Message]:
    """Return the turns of a list after the record's system message and the `before` turns that
    precede it.
    """
    turns = record[key]
    if isinstance(turns, str):  # as JSON, which columns of CSV and Parquet often hold
        with contextlib.suppress(ValueError, RecursionError):
            turns = json.loads(turns)
    if not isinstance(turns, (list, tuple)):
        raise RecordProblem("wrong type", f"'{key}' is {kind_of(turns)}, not a list of turns")
    if not turns:
        raise RecordProblem("no answer", f"'{key}' is empty")
    messages = [
        _turn(turn, f"{key}[{number}]", before + number) for number, turn in enumerate(turns)
    ]
    leading = leading_system(record)
    if leading and messages[0].role == "system":
        raise RecordProblem("two system texts", f"a 'system' column and a system turn in '{key}'")
    return leading + messages


def _turn(turn: Any, where: str, number: int) -> Message:
    """Read one turn.

    Args:
        where: its place in the record, for messages.
        number: of the turn in the conversation, for ids of calls.
    """
    if not isinstance(turn, Mapping):
        raise RecordProblem("wrong type", f"{where} is {kind_of(turn)}, not an object")
    role_key, content_key = "role", "content"
    if turn.get("role") is None:
        role_key, content_key = "from", "value"
    given = turn.get(role_key)
    if not isinstance(given, str):
        raise RecordProblem("wrong type", f"{where} has no role (a text under 'role' or 'from')")
    role = _ROLES.get(given.lower())
    if role is None:
        raise RecordProblem("unknown role", f"{where} is by {given!r}{did_you_mean(given, _ROLES)}")
    _refuse_unread(turn, _NOT_READ_OF_TURN, where)
    weight_key = "weight" if turn.get("weight") is not None else "loss_weight"
    weight = turn.get(weight_key)
    if weight not in (None, 0, 1):
        raise RecordProblem("wrong type", f"{where}: '{weight_key}' must be 0 or 1")
    calls = _calls(turn, given, content_key, where, number)
    content = "" if given.lower() == "function_call" else turn.get(content_key)
    reasoning = _reasoning(turn, where)
    if isinstance(content, (list, tuple)):
        if role == "assistant" and not reasoning:
            thoughts = [part for part in content if _is_part(part, "reasoning")]
            reasoning = "".join(_part(part, where) for part in thoughts)
            content = [part for part in content if not _is_part(part, "reasoning")]
        content = "".join(_part(part, where) for part in content)
    if content is None and role == "assistant":
        if not calls:
            raise RecordProblem("no answer", f"{where} has no '{content_key}'")
        content = ""
    if not isinstance(content, str):
        raise RecordProblem(
            "wrong type", f"{where}: '{content_key}' is {kind_of(content)}, not a text"
        )
    if role == "assistant":
        return Message(role, content, weight != 0, reasoning, calls)
    if role == "tool":
        return Message(role, content, call_id=_text(turn, "tool_call_id"), name=_text(turn, "name"))
    return Message(role, content)


def _reasoning(turn: Mapping[str, Any], where: str) -> str:
    """Return the reasoning of a turn, under any of its names."""
    found = {key: text for key in _REASONING_KEYS if (text := _text(turn, key))}
    if len(set(found.values())) > 1:
        names = " and ".join(map(repr, found))
        raise RecordProblem("unsupported key", f"{where} has {names}, which differ; keep one")
    return next(iter(found.values()), "")


def _calls(
    turn: Mapping[str, Any], given: str, content_key: str, where: str, number: int
) -> tuple[Call, ...]:
    """Return the calls of a turn, from one of its keys or from ShareGPT's `function_call` turn."""
    keys = [key for key in ("tool_calls", "function_call") if turn.get(key)]
    if given.lower() == "function_call":
        keys.append(content_key)
    if not keys:
        return ()
    if len(keys) > 1 or _ROLES[given.lower()] != "assistant":
        raise RecordProblem(
            "unsupported key", f"{where} is by {given!r} and has {' and '.join(keys)}"
        )
    calls = read_calls(turn[keys[0]], f"{where}.{keys[0]}", number)
    if not calls:
        raise RecordProblem("no answer", f"{where} calls nothing")
    return calls


def refuse_media(record: Mapping[str, Any]) -> None:
    """Raise RecordProblem where the record has keys of images, video or sound."""
    _refuse_unread(record, _NOT_READ_OF_RECORD, "the record")


def _refuse_unread(holder: Mapping[str, Any], unread: Mapping[str, str], where: str) -> None:
    """Raise RecordProblem if a record or turn has a key that is not read.

    Args:
        unread: these keys, each with its fix.
    """
    for key, fix in unread.items():
        if holds_something(holder.get(key)):
            raise RecordProblem("unsupported key", f"{where} has '{key}'; {fix}")


def _is_part(part: Any, kind: str) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == kind


def _part(part: Any, where: str) -> str:
    """Return the text of a content's part: under `text`, or under `value` (LLaMA-Factory v1)."""
    if _is_part(part, "text") or _is_part(part, "reasoning"):
        text = part.get("text", part.get("value"))
        if isinstance(text, str):
            return text
    if has_media(part):
        kind = part.get("type") or next(key for key in MEDIA_KEYS if part.get(key) is not None)
        raise RecordProblem("unsupported key", f"{where} has a part of type {kind!r}; {_MEDIA}")
    kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
    if kind == "text":
        raise RecordProblem("wrong type", f"{where}: a content part of type 'text' has no text")
    raise RecordProblem(
        "wrong type", f"{where}: a content part is {kind!r}, only parts of type 'text' are trained"
    )


# name -> (the key it is known by, what reads a record of it). A format is added here; the first
# that fits counts.
FORMATS: dict[str, tuple[str, ReadTurns]] = {
    "messages": ("messages", read_turns),
    "sharegpt": ("conversations", read_turns),
    "alpaca": ("instruction", _alpaca),
    "prompt-completion": ("prompt", _prompt_completion),
    "text": ("text", lambda record, key: [Message("text", _text(record, key))]),
}
_EMPTY = {
    "user": "empty question",
    "assistant": "empty answer",
    "text": "empty text",
}
_TRAINED_ROLES = ("assistant", "text")


def _text(record: Mapping[str, Any], key: str) -> str:
    """Return the string under a key; empty if the record has none."""
    value = record.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RecordProblem("wrong type", f"'{key}' is {kind_of(value)}, not a text")
    return value


def _check_order(messages: Sequence[Message]) -> None:
    """System first if at all, then question and answer in turn; tool results between answers; an
    answer last.
    """
    answers = [message for message in messages if message.role in _TRAINED_ROLES]
    if not answers:
        raise RecordProblem("no answer", "no turn is by the assistant")
    before = None
    for number, message in enumerate(messages):
        if message.role not in _MAY_FOLLOW[before]:
            position = f"after {before}" if before else "at the start"
            raise RecordProblem(
                "roles out of order", f"turn {number + 1} is {message.role}, {position}"
            )
        before = message.role
    if before not in _TRAINED_ROLES:
        raise RecordProblem(
            "no answer", f"the last turn is by the {before}, and nothing answers it"
        )
    if not any(answer.trained for answer in answers):
        raise RecordProblem("no answer", "every answer has weight 0")


def difficulty_of(
    record: Mapping[str, Any], difficulties: Sequence[str] | None, difficulty_field: str
) -> str | None:
    """Return the difficulty that a record names.

    Raises:
        RecordProblem: another type, or none of `difficulties`.
    """
    value = record.get(difficulty_field)
    if difficulties is None or value is None or value == "":
        return None
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise RecordProblem(
            "wrong type", f"'{difficulty_field}' is {kind_of(value)}, not a difficulty's name"
        )
    difficulty = str(value).strip()
    if difficulty not in difficulties:
        raise RecordProblem(
            "unknown difficulty",
            f"{difficulty[:60]!r}, not one of"
            f" {', '.join(difficulties)}{did_you_mean(difficulty, difficulties)}",
        )
    return difficulty


_KINDS = {
    type(None): "null",
    bool: "true/false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
}


def kind_of(value: Any) -> str:
    """Return the JSON type of a value, for messages."""
    if isinstance(value, Mapping):
        return "an object"
    return _KINDS.get(type(value), type(value).__name__)
