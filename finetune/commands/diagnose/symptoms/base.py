"""What a symptom rule is. The rules themselves are data, in the other files of this folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from finetune.runtime.language import Text

# A rule's shortest piece of fixed text: lines without it are passed over before any regular expression is tried.
SHORTEST_WORD = 4


class Kind(IntEnum):
    """How near to the root of a failure a symptom is. A nearer one that came no later explains a farther one away."""

    ROOT = 0  # says by itself what went wrong
    UNEXPLAINED = 1  # a failure of this process that no rule knows
    PEER_LOST = 2  # another process was seen to be gone: why is in its own log
    WAITED = 3  # a wait for another process ran out: why it did not come may be anywhere
    AFTERMATH = 4  # how a process ended after something else had gone wrong


@dataclass(frozen=True)
class Symptom:
    """One way in which a cause shows in a log.

    Attributes:
        cause: the id of the cause; several symptoms may have the same.
        patterns: regular expressions, searched in a line without its prefixes. Named groups become placeholders.
        kind: root, or which consequence.
        confidence: 0 to 1: how surely a line that matches means this cause.
        explanation: what happened; `{name}` is a placeholder, `[[...]]` is left out where one inside has no value.
        fix: what to do about it, as instructions.
        source: where the form of these lines is known from.
        explains: causes that this one brings about even as roots.
        at_least: matching lines it takes.
        lasting: training goes on in spite of it, so that later steps are no proof of health.
        in_warnings: lines that call themselves a warning or information count too.
    """

    cause: str
    patterns: tuple[str, ...]
    explanation: Text
    fix: Text
    kind: Kind = Kind.ROOT
    confidence: float = 0.9
    source: str = ""
    explains: tuple[str, ...] = ()
    at_least: int = 1
    lasting: bool = False
    in_warnings: bool = False

    @cached_property
    def _compiled(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        return tuple((word, re.compile(p)) for p in self.patterns for word in fixed_words(p))

    def match(self, text: str, lowered: str) -> re.Match[str] | None:
        """The first pattern that matches, None without one. `lowered` is `text.lower()`."""
        for word, pattern in self._compiled:
            if word in lowered and (found := pattern.search(text)):
                return found
        return None


def fixed_words(pattern: str) -> list[str]:
    """For each alternative of a regular expression its longest run of plain characters, in lower case.

    Text that the pattern matches holds one of them. Groups count as unknown text.

    Raises:
        ValueError: an alternative has no run of `SHORTEST_WORD` characters.
    """
    words = []
    for alternative in _alternatives(pattern):
        runs = _plain_runs(alternative)
        longest = max(runs, key=len, default="")
        if len(longest) < SHORTEST_WORD:
            raise ValueError(f"no {SHORTEST_WORD} plain characters in a row in {alternative!r} of {pattern!r}")
        words.append(longest.lower())
    return words


def grams(text: str) -> Iterator[str]:
    """All runs of `SHORTEST_WORD` characters in a text."""
    return (text[start : start + SHORTEST_WORD] for start in range(len(text) - SHORTEST_WORD + 1))


def rarest(found: Iterable[str]) -> str:
    """The run of characters that other text holds least often: what to look for first in a line."""
    return max(found, key=lambda gram: sum(_COMMON.find(letter) % 99 for letter in gram))


_COMMON = " etaoinsrhldcumfpgwybvkxjqz"  # English, most frequent first
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)


def _alternatives(pattern: str) -> list[str]:
    depth, parts = 0, [""]
    for token in _TOKEN.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def _plain_runs(alternative: str) -> list[str]:
    depth, runs = 0, [""]
    for token in _TOKEN.findall(alternative):
        depth += (token == "(") - (token == ")")
        plain = token[1:] if len(token) == 2 and not token[1].isalnum() else token
        if depth == 0 and len(plain) == 1 and token not in ".^$*+?()|":
            runs[-1] += plain
            continue
        if token in ("?", "*") or token.startswith("{"):
            runs[-1] = runs[-1][:-1]  # the character before it may be absent
        runs.append("")
    return runs


_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def fill(template: str, values: Mapping[str, object]) -> str:
    """Put values into `{name}` placeholders; a `[[part]]` with a name that has no value is left out.

    Raises:
        KeyError: a placeholder outside `[[...]]` has no value.
    """

    def part(match: re.Match[str]) -> str:
        try:
            return match[1].format_map(values)
        except KeyError:
            return ""

    return "".join(
        piece.format_map(values) if number % 2 == 0 else part(re.fullmatch("(.*)", piece, re.DOTALL))
        for number, piece in enumerate(_OPTIONAL.split(template))
    )
