"""What is known of failures: the entries of `entries/*.toml`, one for each way a cause shows.

docs/reference/diagnosis.md explains the fields for those who add an entry.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from finetune.commands.diagnose.prefilter import SHORTEST_WORD, fixed_words
from finetune.runtime.language import spoken

FOLDER = Path(__file__).parent / "entries"
# How surely a matching line means the cause, and the number that `--json` gives for it.
SURENESS = {"certain": 0.9, "likely": 0.7, "guess": 0.4}
# Between two parts of one message, at most. A `.*` in a pattern is limited to it: otherwise a long
# line that repeats the first part takes quadratic time.
GAP_CHARACTERS = 500
# `error code is 507015`, `runtime result = 507015`, `failed: 507015`
_RETURNED = (
    r"(?:code|result|failed|ret|[Cc]ode|errno|\])\W{{1,5}}(?:is\W{{1,3}})?(?:{numbers})(?!\d)"
)
# `EI0006: ...` and `Communication_Error_Get_Socket(EI0006): ...`
_CODE = r"(?<!\w){code}(?!\w)"


class Kind(IntEnum):
    """How near to the root of a failure an entry is.

    A nearer one that came no later explains a farther one.
    """

    MACHINE = 0  # the kernel, a device or the scheduler says what it did or what broke
    ROOT = 1  # says by itself what went wrong
    KILLED = 2  # a process was killed from outside: by whom is told elsewhere or nowhere
    VAGUE = 3  # says which part failed, not why
    # a failure of this process that no entry knows; of it and VAGUE the earlier one is nearer
    UNEXPLAINED = 4
    PEER_LOST = 5  # another process was seen to be gone: why is in its own log
    TIMEOUT = 6  # waiting for another process took too long: why may be anywhere
    CASCADE = 7  # how a process ended after something else had gone wrong


@dataclass(frozen=True, eq=False)
class Symptom:
    """One way in which a cause shows in a log: an entry.

    Attributes:
        cause: the id of the cause.
        id: the name by which the program asks for it, "" of most.
        match: regular expressions, searched in a line without its prefixes. Named groups become
            placeholders; a trailing `_` lets alternatives name the same value.
        codes: CANN's error codes, `EI0006`, as regular expressions.
        returns: numbers that calls of CANN returned, as regular expressions.
        frames: regular expressions of frames of which the traceback must have one.
        exceptions: of an entry in places.toml, a regular expression of the exception's name.
        kind: root, or which consequence.
        sure: how surely a matching line means the cause.
        when: a fact of the log without which the entry does not count: npu, cuda, server, training.
        outranks: causes that this one brings about, even as roots.
        needs: causes, or reasons that their lines name, of which it tells why; without one of them
            it is a warning like others.
        at_least: matching lines that it takes.
        differs: a group that must have different values, on different ranks or nodes.
        lasting: training continues in spite of it, so that a finished run proves nothing.
        reported_late: printed by someone who watches, so that its order in the log tells nothing.
        in_warnings: lines that call themselves a warning or information count too.
        by_order: of it and a failure that is no root, the earlier one is nearer.
        passing: one logged step after it, or a good end, shows that it was got over.
        until: a regular expression of a later line of the process that shows that it was got over.
        in_training: it affects a run only from the first step on.
        en, zh: `why`, what happened, and `do`, steps to take, the surest first, in both languages;
            `{name}` is a placeholder, and `[[...]]` is left out if one inside has no value.
        source: where these lines are known from. example: a line that this entry answers.
        clean: a line near it that no entry may answer.
    """

    cause: str
    en: Mapping[str, Any]
    zh: Mapping[str, Any]
    source: str
    id: str = ""
    match: Sequence[str] = ()
    codes: Sequence[str] = ()
    returns: Sequence[str] = ()
    frames: Sequence[str] = ()
    exceptions: str = ""
    kind: Kind = Kind.ROOT
    sure: str = "certain"
    when: str = ""
    outranks: Sequence[str] = ()
    needs: Sequence[str] = ()
    at_least: int = 1
    differs: str = ""
    lasting: bool = False
    reported_late: bool = False
    in_warnings: bool = False
    by_order: bool = False
    passing: bool = False
    until: str = ""
    in_training: bool = False
    example: str = ""
    clean: str = ""

    @property
    def confidence(self) -> float:
        return SURENESS[self.sure]

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        made = [*self.match, *(_CODE.format(code=code) for code in self.codes)]
        if self.returns:
            made.append(_RETURNED.format(numbers="|".join(self.returns)))
        return tuple(made)

    @cached_property
    def words(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """Fixed words, each with the pattern that can match a line in which it is."""
        compiled = []
        for pattern in self.patterns:
            bounded = re.sub(r"(?<!\\)\.\*", f".{{0,{GAP_CHARACTERS}}}", pattern)
            compiled += [(word, re.compile(bounded)) for word in fixed_words(pattern)]
        return tuple(compiled)

    def found_in(self, text: str, lowered: str) -> re.Match[str] | None:
        """Return the first pattern's match, None without one. `lowered` is `text.lower()`."""
        for word, pattern in self.words:
            if word in lowered and (found := pattern.search(text)):
                return found
        return None

    def texts(self) -> tuple[str, Sequence[str]]:
        """Return explanation and steps in the spoken language, not filled yet."""
        said = {"en": self.en, "zh": self.zh}[spoken()]
        return said["why"], said["do"]


@dataclass(frozen=True)
class Knowledge:
    """All entries, and the words by which those of a line are found.

    Attributes:
        titles: what each cause is called, by language.
        restart_cures: causes that starting the same command again can cure.
    """

    titles: Mapping[str, Mapping[str, str]]
    restart_cures: frozenset[str]
    symptoms: Sequence[Symptom]
    named: Mapping[str, Symptom]
    words: Mapping[str, Mapping[str, Sequence[int]]] = field(repr=False)

    def possible(self, lowered: str) -> list[Symptom]:
        """Return the entries of which a word is in a line (in lower case), in their order."""
        ends = len(lowered) - SHORTEST_WORD + 1
        starts = self.words.keys() & {lowered[at : at + SHORTEST_WORD] for at in range(ends)}
        numbers = {
            number
            for start in starts
            for word, found in self.words[start].items()
            if word in lowered
            for number in found
        }
        return [self.symptoms[number] for number in sorted(numbers)]


@cache
def knowledge() -> Knowledge:
    """Read the entries.

    Raises:
        TypeError, ValueError, KeyError: an entry has an unknown field, value or pattern.
    """
    causes = _read("causes")
    titles = {name: given["title"] for name, given in causes.items()}
    cured = frozenset(name for name, given in causes.items() if given.get("restart_cures"))
    symptoms = [
        _symptom(cause, entry, table["source"])
        for table in (_read(path.stem) for path in sorted(FOLDER.glob("*.toml")))
        for cause, entries in table.items()
        if isinstance(entries, list)
        for entry in entries
    ]
    words: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, symptom in enumerate(symptoms):
        for word in {word for pattern in symptom.patterns for word in fixed_words(pattern)}:
            words[word[:SHORTEST_WORD]][word].append(number)
    named = {symptom.id: symptom for symptom in symptoms if symptom.id}
    return Knowledge(titles, cured, symptoms, named, words)


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def _symptom(cause: str, entry: Mapping[str, Any], source: str) -> Symptom:
    kind = Kind[entry.get("kind", "root").upper()]
    given = {"cause": cause, "source": source, "sure": _SURE.get(kind, "certain")}
    return Symptom(**{**given, **entry, "kind": kind})


# How sure an entry of a kind is that says nothing else.
_SURE = {
    Kind.VAGUE: "likely",
    Kind.KILLED: "likely",
    Kind.CASCADE: "guess",
    Kind.UNEXPLAINED: "guess",
}

_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def fill(template: str, values: Mapping[str, object]) -> str:
    """Put values into `{name}`; a `[[part]]` with a name that has no value is left out.

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
