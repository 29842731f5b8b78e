"""What a symptom rule is. The rules themselves are data, in the other files of this folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from finetune.runtime.language import _

# Every alternative of a pattern has this many fixed characters in a row; lines without them never meet the regular
# expression: 200 MB of mixed log lines take 68 s instead of 270 s (one core).
SHORTEST_WORD = 4


class Kind(IntEnum):
    """How near to the root of a failure a symptom is. A nearer one that came no later explains a farther one away."""

    ROOT = 0  # says by itself what went wrong
    UNEXPLAINED = 1  # a failure of this process that no rule knows
    PEER_LOST = 2  # another process was seen to be gone: why is in its own log
    TIMEOUT = 3  # waiting for another process took too long: why it did not come may be anywhere
    CASCADE = 4  # how a process ended after something else had gone wrong


@dataclass(frozen=True)
class Symptom:
    """One way in which a cause shows in a log.

    Attributes:
        cause: the id of the cause; several symptoms may have the same.
        patterns: regular expressions, searched in a line without its prefixes. Named groups become placeholders.
        explanation: what happened; `{name}` is a placeholder, `[[...]]` is left out where one inside has no value.
        fix: what to do about it, as instructions.
        more_fix: advice after `fix`, shared with other symptoms.
        kind: root, or which consequence.
        confidence: 0 to 1: how surely a line that matches means this cause.
        source: where the form of these lines is known from.
        explains: causes that this one brings about even as roots.
        at_least: matching lines it takes.
        lasting: training continues in spite of it, so that later steps are no proof of health.
        in_warnings: lines that call themselves a warning or information count too.
        restart_cures: starting the same command again can cure the cause, e.g. as our run starts smaller.
    """

    cause: str
    patterns: tuple[str, ...]
    explanation: str
    fix: str
    more_fix: str = ""
    kind: Kind = Kind.ROOT
    confidence: float = 0.9
    source: str = ""
    explains: tuple[str, ...] = ()
    at_least: int = 1
    lasting: bool = False
    in_warnings: bool = False
    restart_cures: bool = False

    @cached_property
    def _compiled(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        return tuple((word, re.compile(p)) for p in self.patterns for word in fixed_words(p))

    def match(self, text: str, lowered: str) -> re.Match[str] | None:
        """The first pattern that matches, None without one. `lowered` is `text.lower()`."""
        for word, pattern in self._compiled:
            if word in lowered and (found := pattern.search(text)):
                return found
        return None

    def texts(self) -> tuple[str, str]:
        """Explanation and all advice in the spoken language, not filled yet."""
        return _(self.explanation), " ".join(_(text) for text in (self.fix, self.more_fix) if text)


_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)


def fixed_words(pattern: str) -> list[str]:
    """For each alternative of a regular expression its longest run of plain characters, in lower case.

    Text that the pattern matches holds one of them. Groups count as unknown text.

    Raises:
        ValueError: an alternative has no run of `SHORTEST_WORD` characters.
    """
    depth, alternatives = 0, [[""]]
    for token in _TOKEN.findall(pattern):
        runs = alternatives[-1]
        depth += (token == "(") - (token == ")")
        plain = token[1:] if len(token) == 2 and not token[1].isalnum() else token
        if depth == 0 and token == "|":
            alternatives.append([""])
        elif depth == 0 and len(plain) == 1 and token not in ".^$*+?()":
            runs[-1] += plain
        else:
            if token in ("?", "*") or token.startswith("{"):
                runs[-1] = runs[-1][:-1]  # the character before it may be absent
            runs.append("")
    words = [max(runs, key=len).lower() for runs in alternatives]
    if min(map(len, words)) < SHORTEST_WORD:
        raise ValueError(f"no {SHORTEST_WORD} plain characters in a row in an alternative of {pattern!r}")
    return words


_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def fill(template: str, values: Mapping[str, object]) -> str:
    """Put values into `{name}` placeholders; a `[[part]]` with a name that has no value is left out.

    Raises:
        KeyError: a placeholder outside `[[...]]` has no value.
    """
    filled = []
    for number, piece in enumerate(_OPTIONAL.split(template)):
        try:
            filled.append(piece.format_map(values))
        except KeyError:
            if number % 2 == 0:  # outside of [[...]]
                raise
    return "".join(filled)
