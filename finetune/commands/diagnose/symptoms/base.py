"""What a symptom rule is. The rules themselves are data, in the other files of this folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from finetune.runtime.language import _

# Every alternative of a pattern has this many fixed characters in a row: a line without them never
# meets the regular expression. 8 MB of log lines that all differ, a third of them about failures,
# take 7 s on one core.
SHORTEST_WORD = 3
# Names under which the kernel knows the processes of a run; it kills others too, and reports their
# faults.
OURS = (
    r"(?:[Pp]ython|pt_|torchrun|deepspeed|accelerate|ray|train|finetune|conda|node_?\d|bash\b|sh\b)"
)


class Kind(IntEnum):
    """How near to the root of a failure a symptom is. A nearer one that came no later explains a
    farther one away.
    """

    MACHINE = 0  # the kernel, a device or the scheduler says what it did or what broke
    ROOT = 1  # says by itself what went wrong
    KILLED = 2  # a process was killed from outside: by whom is told elsewhere or nowhere
    VAGUE = 3  # says which part failed, not why
    # a failure of this process that no rule knows; of it and VAGUE the earlier one is nearer
    UNEXPLAINED = 4
    PEER_LOST = 5  # another process was seen to be gone: why is in its own log
    TIMEOUT = 6  # waiting for another process took too long: why it did not come may be anywhere
    CASCADE = 7  # how a process ended after something else had gone wrong


@dataclass(frozen=True)
class Symptom:
    """One way in which a cause shows in a log.

    Attributes:
        cause: the id of the cause; several symptoms may have the same.
        patterns: regular expressions, searched in a line without its prefixes. Named groups become
            placeholders.
        explanation: what happened; `{name}` is a placeholder, `[[...]]` is left out where one
            inside has no value.
        fix: what to do about it, as instructions.
        more_fix: advice after `fix`, shared with other symptoms.
        kind: root, or which consequence.
        confidence: 0 to 1: how surely a line that matches means this cause.
        source: where the form of these lines is known from.
        explains: causes that this one brings about even as roots.
        at_least: matching lines it takes.
        lasting: training continues in spite of it, so that a finished run is no proof of health.
        reported_late: printed by someone who watches, after what it brought about: order in the log
            tells nothing.
        differs: a named group: the lines count only where it has different values, on different
            ranks or nodes.
        in_warnings: lines that call themselves a warning or information count too.
        needs: causes, or reasons that their lines name, of which it tells why: without one of them
            in the logs it is a warning like others. Of one that is `lasting`, too, training that
            goes on proves nothing.
        by_order: of it and a failure that is no root (KILLED to UNEXPLAINED) the earlier is nearer.
        passing: one logged step of training after it, or an end that went well, shows that it was
            got over.
        in_training: it does something to a run only from the first step on.
        restart_cures: starting the same command again can cure the cause, e.g. as our run starts
            smaller.
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
    reported_late: bool = False
    differs: str = ""
    in_warnings: bool = False
    needs: tuple[str, ...] = ()
    by_order: bool = False
    passing: bool = False
    in_training: bool = False
    restart_cures: bool = False

    @cached_property
    def _compiled(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        compiled = []
        for pattern in self.patterns:
            # "A .*B" is searched to the end of the line from every A: a long line of As would take
            # quadratic time.
            bounded = re.compile(re.sub(r"(?<!\\)\.\*", f".{{0,{GAP_CHARACTERS}}}", pattern))
            compiled += [(word, bounded) for word in fixed_words(pattern)]
        return tuple(compiled)

    def match(self, text: str, lowered: str) -> re.Match[str] | None:
        """The first pattern that matches, None without one. `lowered` is `text.lower()`."""
        for word, pattern in self._compiled:
            if word in lowered and (found := pattern.search(text)):
                return found
        return None

    def texts(self) -> tuple[str, str]:
        """Explanation and all advice in the spoken language, not filled yet."""
        return _(self.explanation), " ".join(_(text) for text in (self.fix, self.more_fix) if text)


GAP_CHARACTERS = 500  # between two parts of one message, at most
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)
_GROUP_BEGINS = re.compile(r"\?(?:P<\w+>|[a-z]*:)")


def fixed_words(pattern: str) -> list[str]:
    """For each alternative of a regular expression its longest run of plain characters, in lower
    case.

    Text that the pattern matches holds one of them. Where the alternative has no such run, those of
    a group in it that must be there are taken.

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


def cann(*codes: str) -> str:
    """A pattern of CANN's error codes: `EI0006: ...` and `Communication_Error_Get_Socket(EI0006):
    ...`.
    """
    return "|".join(rf"(?<!\w){code}(?!\w)" for code in codes)


def returned(code: str) -> str:
    """A pattern of a code returned by CANN: `error code is 507015`, `runtime result = 507015`,
    `failed: 507015`.
    """
    return rf"(?:code|result|failed|ret|[Cc]ode|errno|\])\W{{1,5}}(?:is\W{{1,3}})?{code}(?!\d)"


def ended_by(signal: int, name: str) -> tuple[str, ...]:
    """Patterns of a process that a signal ended, as shells, Python, MPI, Slurm, containers and
    launchers say it.
    """
    code = rf"(?:-{signal}|{128 + signal})(?!\d)"
    return (
        rf"[Ee]xit ?(?:code|status)(?: is| of"
        rf"| was)?\W{{1,8}}{code}(?:.*\(pid: (?P<pid>\d+)\))?(?:.*local_rank: \d+ \(pid: (?P<pid_>\d+)\))?",
        rf"exited with (?:exit )?(?:code|status)?\W{{0,3}}{code}|non-zero exit status {code}",
        rf"[Rr]eturn ?code\W{{1,4}}{code}",
        rf"Signal {signal} \({name}\)(?: received by PID (?P<pid>\d+))?",
        rf"Signals\.{name}\b(?=: {signal}>)|signal {name}\b|on signal {signal} \(|killed by signal {signal}\b",
        rf"code=killed, status={signal}/|signal\W{{1,3}}{signal} ?\({name}|signal {signal} \({name}",
    )


_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def fill(template: str, values: Mapping[str, object]) -> str:
    """Put values into `{name}` placeholders; a `[[part]]` with a name that has no value is left
    out.

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
