"""Which patterns can match a line: every alternative of a pattern has fixed characters in a row."""

from __future__ import annotations

import re

# A line without the fixed characters of an alternative never meets its regular expression.
SHORTEST_WORD = 3
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)
_GROUP_BEGINS = re.compile(r"\?(?:P<\w+>|[a-z]*:)")


def fixed_words(pattern: str) -> list[str]:
    """Return for each alternative its longest run of plain characters, in lower case.

    Text that the pattern matches contains one of them. If an alternative has no such run, those of
    a group that must match are taken.

    Raises:
        ValueError: an alternative has no run of `SHORTEST_WORD` characters.
    """
    words: list[str] = []
    for runs, groups in _alternatives(_TOKEN.findall(pattern)):
        longest = max(runs, key=len).lower()
        if len(longest) >= SHORTEST_WORD:
            words.append(longest)
            continue
        within = [found for group in groups if (found := _words_or_none(group))]
        if not within:
            raise ValueError(
                f"no {SHORTEST_WORD} plain characters in a row in an alternative of {pattern!r}"
            )
        words += max(within, key=lambda found: min(map(len, found)))
    return words


def _words_or_none(pattern: str) -> list[str] | None:
    try:
        return fixed_words(pattern)
    except ValueError:
        return None


def _alternatives(tokens: list[str]) -> list[tuple[list[str], list[str]]]:
    """Of each alternative the runs of plain characters outside of groups, and the groups that have
    to match.
    """
    alternatives: list[tuple[list[str], list[str]]] = [([""], [])]
    depth, begun = 0, 0
    for position, token in enumerate(tokens):
        runs, groups = alternatives[-1]
        depth += (token == "(") - (token == ")")
        plain = token[1:] if len(token) == 2 and not token[1].isalnum() else token
        if token == "(" and depth == 1:
            begun = position + 1
        elif token == ")" and depth == 0:
            group, after = (
                "".join(tokens[begun:position]),
                "".join(tokens[position + 1 : position + 2]),
            )
            begins = _GROUP_BEGINS.match(group)
            if (
                (begins or not group.startswith("?"))
                and after not in ("?", "*")
                and not after.startswith("{0")
            ):
                groups.append(group[begins.end() :] if begins else group)
        if depth == 0 and token == "|":
            alternatives.append(([""], []))
        elif depth == 0 and len(plain) == 1 and token not in ".^$*+?()":
            runs[-1] += plain
        else:
            if token in ("?", "*") or token.startswith("{"):
                runs[-1] = runs[-1][:-1]  # the character before it may be absent
            runs.append("")
    return alternatives
