"""An Ollama Modelfile whose template writes what the chat template writes, shown on 50 conversations.

Ollama's templates are Go's text/template over .System and .Messages, where texts of one role that follow one another
are joined. The pieces that stand around contents are read off the chat template by rendering it, and written into one
fixed form, which `render_go` renders. Chat templates of another form (think blocks, the system text inside the first
question) come out otherwise, and get no Modelfile.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.formats import Message
from finetune.data.problems import RecordProblem
from finetune.data.spans import ChatTemplate

CONVERSATIONS = 50
TEXTS = (
    "What does a router do?", "请用一句话解释单点故障。", "Answer: 7 ms, 99.5%",
    "def f(x):\n    return {'a': [x, 1e-3]}",
    "10.0.0.0/8 — “quotes” ₂ 🙂", "{% if x %}{{ .Content }}{% endif %}", "a\n\n\nb", '"""', "0", "\\n \\t $HOME `ls`",
)  # fmt: skip
SPACED = ("  two spaces,\ttab\n", "\nline\n\n")
_SYSTEM, _ONE, _ANSWER, _TWO = "\ue000", "\ue001", "\ue002", "\ue003"


@dataclass(frozen=True)
class Modelfile:
    """Its text; whether contents with white space around them are written as in training too."""

    text: str
    keeps_space: bool


def write_modelfile(
    template: ChatTemplate, *, file_name: str, begins: bool, context_tokens: int | None, ends: Sequence[str]
) -> Modelfile | None:
    """The Modelfile of a GGUF file, or None where no template of Ollama's was shown to be equal.

    Args:
        begins: whether the engine itself puts the first token (BOS) before a prompt.
        context_tokens: Ollama's num_ctx; None leaves it to Ollama.
        ends: texts of the tokens that end an answer.
    """
    first = template.tokenizer.bos_token if begins else ""
    if first and not writes_first(template, first):
        return None  # the engine would begin with a token that training has not seen there
    try:
        source = go_template(template, first)
    except (RecordProblem, ValueError):
        return None
    keeps_space = _equal(template, source, first, TEXTS + SPACED)
    if not keeps_space and not _equal(template, source, first, TEXTS):
        return None
    shown = "" if keeps_space else ", of contents without white space around them"
    lines = [
        f"# The template was compared with the model's chat template on {CONVERSATIONS} conversations{shown}.",
        f"FROM ./{file_name}",
        f'TEMPLATE """{source}"""',
        *(f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}" for end in ends),
        *([] if context_tokens is None else [f"PARAMETER num_ctx {context_tokens}"]),
        "PARAMETER repeat_penalty 1",
    ]
    return Modelfile("\n".join(lines) + "\n", keeps_space)


def writes_first(template: ChatTemplate, first: str) -> bool:
    """Whether the chat template begins a prompt with this token, as text."""
    try:
        return template.render([Message("user", _ONE)], generation_prompt=True).startswith(first)
    except RecordProblem:
        return False


def go_template(template: ChatTemplate, first: str) -> str:
    """The chat template in Go's language, by what it writes around contents.

    Raises:
        RecordProblem: it takes no question.
        ValueError: it cannot be of this form.
    """
    user, answer, last = Message("user", _ONE), Message("assistant", _ANSWER), Message("user", _TWO)
    before, opening = _around(template, [user], first)
    _, before_answer, before_next, _ = _around(template, [user, answer, last], first)
    # What stands before a first question may be a system turn of the template's own.
    same = os.path.commonprefix([before[::-1], before_next[::-1]])[::-1]
    default, behind_answer = before.removesuffix(same), before_next.removesuffix(same)
    turns = {"user": (same, ""), "assistant": (before_answer, behind_answer)}
    try:
        before_system, between, _ = _around(template, [Message("system", _SYSTEM), user], first)
    except RecordProblem:  # no system turns
        pass
    else:
        turns["system"] = (before_system, _without(between, same))
    for piece in (default, opening, *itertools.chain(*turns.values())):
        # Go's lexer takes the first two of `{{{`.
        if "{{" in piece or piece.endswith("{") or '"""' in piece:
            raise ValueError("a piece of the template that Go or Ollama would read")
    branches = [f'if eq .Role "{role}" }}}}{a}{{{{ .Content }}}}{b}' for role, (a, b) in turns.items()]
    lead = f"{{{{ if not .System }}}}{default}{{{{ end }}}}" if default else ""
    return f"{lead}{{{{ range .Messages }}}}{{{{ {'{{ else '.join(branches)}{{{{ end }}}}{{{{ end }}}}{opening}"


def _around(template: ChatTemplate, messages: Sequence[Message], first: str) -> list[str]:
    """What is written before, between and after the contents, the token that begins the prompt left out."""
    text = template.render(messages, generation_prompt=True)
    parts = re.split("|".join(message.content for message in messages), _without_first(text, first))
    if len(parts) != len(messages) + 1:
        raise ValueError("contents that are written twice or not at all")
    return parts


def _without(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError("turns whose frame depends on the turns before")
    return text.removesuffix(end)


def _without_first(text: str, first: str) -> str:
    return text.removeprefix(first) if first else text


# ---------------------------------------------------------------- the proof


def conversations(texts: Sequence[str], count: int = CONVERSATIONS) -> Iterator[list[Message]]:
    """Of one to four questions, every second one with a system turn; always the same ones."""
    chooser = random.Random(0)
    for number in range(count):
        system = [Message("system", chooser.choice(texts))] if number % 2 else []
        turns = 2 * (number // 2 % 4) + 1
        yield [*system, *(Message(("user", "assistant")[turn % 2], chooser.choice(texts)) for turn in range(turns))]


def _equal(template: ChatTemplate, source: str, first: str, texts: Sequence[str]) -> bool:
    for messages in conversations(texts):
        try:
            expected = template.render(messages, generation_prompt=True)
        except RecordProblem:
            if messages[0].role != "system":
                return False
            continue  # a template without system turns: Ollama's has none either
        system = "\n\n".join(message.content for message in messages if message.role == "system")
        turns = [{"Role": message.role, "Content": message.content} for message in messages]
        if render_go(source, {"System": system, "Messages": turns}) != _without_first(expected, first):
            return False
    return True


_ACTION = re.compile(r"{{(.*?)}}", re.DOTALL)
_ROLE = re.compile(r'(?:else )?if eq \.Role "(\w+)"')


def render_go(source: str, data: Mapping[str, Any]) -> str:
    """What Go's text/template makes of a template of the form that `go_template` writes.

    Raises:
        ValueError: an action that it does not write.
    """
    parts = _ACTION.split(source)  # text, action, text, ...
    written: list[str] = []
    _render(parts, 0, data, written)
    return "".join(written)


def _action(between: str) -> str:
    """Without the space on both sides.

    Raises:
        ValueError: it has none: Go would read something else than `go_template` has written.
    """
    if len(between) < 2 or between[0] + between[-1] != "  ":
        raise ValueError(f"{between!r} is not of the form that is written here")
    return between[1:-1]


def _render(parts: Sequence[str], place: int, data: Mapping[str, Any], written: list[str]) -> int:
    """Write from a text on, to the action that ends the block or begins its other branch; the place of that action."""
    while True:
        written.append(parts[place])
        place += 1
        if place == len(parts):
            return place
        action = _action(parts[place])
        if action == ".Content":
            written.append(data["Content"])
        elif action == "range .Messages":
            begin, ended = place, place
            for turn in data["Messages"]:
                ended = _render(parts, begin + 1, turn, written)
            place = ended if data["Messages"] else _render(parts, begin + 1, {"Role": "", "Content": ""}, [])
        elif action == "if not .System" or _ROLE.fullmatch(action) and not action.startswith("else"):
            place = _branches(parts, place, data, written)
        elif action == "end" or action.startswith("else if"):
            return place
        else:
            raise ValueError(f"{action} is not of the form that is written here")
        place += 1


def _branches(parts: Sequence[str], place: int, data: Mapping[str, Any], written: list[str]) -> int:
    """Write the first branch whose condition holds; the place of the `end`."""
    done = False
    while (action := _action(parts[place])) != "end":
        role = _ROLE.fullmatch(action)
        holds = not done and (data["Role"] == role[1] if role else not data["System"])
        place = _render(parts, place + 1, data, written if holds else [])
        done = done or holds
    return place
