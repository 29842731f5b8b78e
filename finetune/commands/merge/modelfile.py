"""An Ollama Modelfile whose template writes what the chat template writes, shown on 50
conversations.

Ollama's templates are Go's text/template over .Messages, where texts of one role that follow one
another are joined, those of tools excepted. The pieces that stand around contents are read off the
chat template by rendering it, and written into one fixed form, which `render_go` renders. Chat
templates of another form (think blocks, the system text inside the first question) come out
otherwise, and get no Modelfile.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from finetune.data.encoding.spans import ChatTemplate
from finetune.data.formats import Message
from finetune.data.report import RecordProblem
from finetune.data.tools import Call

CONVERSATIONS = 50
TEXTS = (
    "What does a router do?",
    "请用一句话解释单点故障。",
    "Answer: 7 ms, 99.5%",
    "def f(x):\n    return {'a': [x, 1e-3]}",
    "10.0.0.0/8 — “quotes” ₂ 🙂",
    "{% if x %}{{ .Content }}{% endif %}",
    "a\n\n\nb",
    '"""',
    "0",
    "\\n \\t $HOME `ls`",
)
SPACED = ("  two spaces,\ttab\n", "\nline\n\n")
# Turns by their first letters, c for an answer that calls tools; before each a system turn may
# stand.
PLAIN = ("u", "uau", "uauau", "uauauau")
ORDERS = (*PLAIN, "uasu", "uct", "uctau", "ucttau")
_ROLES = {role[0]: role for role in ("system", "user", "assistant", "tool")}
_TAG, _GAT = r"<[^<>]*>|\[[^][]*\]", r">[^<>]*<|\][^][]*\["  # and as they are written backwards
_SYSTEM, _ONE, _ANSWER, _TWO, _RESULT = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"


@dataclass(frozen=True)
class Modelfile:
    """Its text; whether contents with white space around them, and other turns than `PLAIN` are as
    in training too.
    """

    text: str
    keeps_space: bool
    takes_all_turns: bool


def write_modelfile(
    template: ChatTemplate,
    *,
    file_name: str,
    begins: bool,
    context_tokens: int | None,
    ends: Sequence[str],
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
    sources = [
        source for closes in (True, False) if (source := go_template(template, first, closes))
    ]
    forms = itertools.product((ORDERS, PLAIN), (TEXTS + SPACED, TEXTS), sources)
    shown = next(
        (form for form in forms if _equal(template, form[2], first, form[1], form[0])), None
    )
    values = None if shown is None else _quoted(shown[2], *ends)
    if shown is None or values is None:
        return None
    keeps_space, takes_all_turns = SPACED[0] in shown[1], shown[0] == ORDERS
    limits = "" if keeps_space else ", of contents without white space around them"
    limits += "" if takes_all_turns else ", without tools and later system turns: those may differ"
    lines = [
        (
            f"# The template was compared with the model's chat template on {CONVERSATIONS}"
            f" conversations{limits}."
        ),
        f"FROM ./{file_name}",
        f"TEMPLATE {values[0]}",
        *(f"PARAMETER stop {value}" for value in values[1:]),
        *([] if context_tokens is None else [f"PARAMETER num_ctx {context_tokens}"]),
        "PARAMETER repeat_penalty 1",
    ]
    return Modelfile("\n".join(lines) + "\n", keeps_space, takes_all_turns)


def _quoted(*texts: str) -> list[str] | None:
    """Values of a Modelfile, None where one cannot stand there: Ollama takes all between the
    quotes, knows no escapes, and drops what is not printable.
    """
    if any('"""' in text or not re.sub(r"[\t\n\r]", "", text).isprintable() for text in texts):
        return None
    return [f'"""{text}"""' for text in texts]


def writes_first(template: ChatTemplate, first: str) -> bool:
    """Whether the chat template begins a prompt with this token, as text."""
    try:
        return template.render([Message("user", _ONE)], generation_prompt=True).startswith(first)
    except RecordProblem:
        return False


def go_template(template: ChatTemplate, first: str, closes: bool) -> str | None:
    """The chat template in Go's language, by what it writes around contents; None where it cannot
    be of this form.

    Args:
        closes: whether an answer ends with what is behind it where it is the last turn; else with
            what does not belong to every question.
    """
    try:
        return _go_template(template, first, closes)
    except (RecordProblem, ValueError):
        return None


def _go_template(template: ChatTemplate, first: str, closes: bool) -> str:
    user, answer, last = Message("user", _ONE), Message("assistant", _ANSWER), Message("user", _TWO)
    before, behind = _around(template, [user], first)
    bare = template.render([user]).partition(_ONE)[2]
    behind_user = _common_start(behind, bare)
    opening = _behind(behind, behind_user)
    _, to_answer, to_next, _ = _around(template, [user, answer, last], first)
    if closes:
        behind_answer = _before(_around(template, [user, answer], first)[-1], opening)
        head = _behind(to_next, behind_answer)
    else:
        head = _common_start(before[::-1], to_next[::-1], _GAT)[::-1]
        behind_answer = _before(to_next, head)
    # What stands before a first question may be a system turn of the template's own.
    default, lead = _before(before, head), ""
    turns = {
        "user": (head, behind_user),
        "assistant": (_behind(to_answer, behind_user), behind_answer),
    }
    with suppress(RecordProblem):  # no system turns
        before_system, between, _ = _around(template, [Message("system", _SYSTEM), user], first)
        turns["system"] = (before_system, _before(between, head))
        # none later on, or what begins the prompt is not known
        with suppress(RecordProblem, ValueError):
            *_, to_system, _, _ = _around(
                template, [user, answer, Message("system", _SYSTEM), last], first
            )
            later = _behind(to_system, behind_answer)
            lead = _before(before_system, later)
            default = _behind(default, lead)
            turns["system"] = (later, turns["system"][1])
    with suppress(RecordProblem, ValueError):  # no results of tools, or in no frame of their own
        *_, to_result, behind_result = _around(
            template, [user, answer, Message("tool", _RESULT)], first
        )
        turns["tool"] = (_behind(to_result, behind_answer), _before(behind_result, opening))
    for piece in (lead, default, opening, *itertools.chain(*turns.values())):
        if "{{" in piece or piece.endswith("{"):  # Go's lexer takes the first two of `{{{`
            raise ValueError("a piece of the template that Go would read")
    branches = [
        f'if eq .Role "{role}" }}}}{a}{{{{ .Content }}}}{b}' for role, (a, b) in turns.items()
    ]
    lead += f"{{{{ {_FIRST} }}}}{default}{{{{ end }}}}" if default else ""
    return (
        f"{lead}{{{{ range .Messages }}}}{{{{ {'{{ else '.join(branches)}{{{{ end }}}}{{{{ end"
        f" }}}}{opening}"
    )


def _around(template: ChatTemplate, messages: Sequence[Message], first: str) -> list[str]:
    """What is written before, between and after the contents, the token that begins the prompt left
    out.
    """
    text = _without_first(template.render(messages, generation_prompt=True), first)
    parts = re.split("|".join(message.content for message in messages), text)
    if len(parts) != len(messages) + 1:
        raise ValueError("contents that are written twice or not at all")
    return parts


def _common_start(one: str, other: str, tag: str = _TAG) -> str:
    """The longest common start that ends within no tag of either."""
    length = len(os.path.commonprefix([one, other]))
    for found in itertools.chain(re.finditer(tag, one), re.finditer(tag, other)):
        if found.start() < length < found.end():
            length = found.start()
    return one[:length]


def _before(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError("turns whose frame depends on the turns before")
    return text.removesuffix(end)


def _behind(text: str, start: str) -> str:
    if not text.startswith(start):
        raise ValueError("turns whose frame depends on the turns behind")
    return text.removeprefix(start)


def _without_first(text: str, first: str) -> str:
    return text.removeprefix(first) if first else text


# ---------------------------------------------------------------- the proof


def conversations(texts: Sequence[str], orders: Sequence[str] = ORDERS) -> Iterator[list[Message]]:
    """Without end, of all orders, every second one with a system turn first; always the same
    ones.
    """
    chooser = random.Random(0)
    for number in itertools.count():
        order = "s" * (number % 2) + orders[number // 2 % len(orders)]
        calls = tuple(
            Call("ping", {"host": "r1"}, f"c{result}") for result in range(order.count("t"))
        )
        yield [
            (
                Message("assistant", "", calls=calls)
                if letter == "c"
                else Message(_ROLES[letter], chooser.choice(texts))
            )
            for letter in order
        ]


def _equal(
    template: ChatTemplate,
    source: str,
    first: str,
    texts: Sequence[str],
    orders: Sequence[str] = ORDERS,
) -> bool:
    """Whether both write the same for the first conversations that the chat template takes."""
    compared = 0
    for messages in conversations(texts, orders):
        try:
            expected = template.render(messages, generation_prompt=True)
        except RecordProblem:
            if {message.role for message in messages} <= {"user", "assistant"}:
                return False
            continue  # a template without such turns: Ollama's has none either
        turns = [{"Role": message.role, "Content": message.content} for message in messages]
        if render_go(source, {"Messages": turns}) != _without_first(expected, first):
            return False
        compared += 1
        if compared == CONVERSATIONS:
            return True
    return False


_ACTION = re.compile(r"{{(.*?)}}", re.DOTALL)
_FIRST = 'if ne (index .Messages 0).Role "system"'
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
    """Write from a text on, to the action that ends the block or begins its other branch; the place
    of that action.
    """
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
            place = (
                ended
                if data["Messages"]
                else _render(parts, begin + 1, {"Role": "", "Content": ""}, [])
            )
        elif action == _FIRST or _ROLE.fullmatch(action) and not action.startswith("else"):
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
        holds = not done and (
            data["Role"] == role[1] if role else data["Messages"][0]["Role"] != "system"
        )
        place = _render(parts, place + 1, data, written if holds else [])
        done = done or holds
    return place
