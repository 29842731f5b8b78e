"""A run file in the making: settings of ours, and what of the other tool's has none, or means
something else here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from finetune.errors import ConfigError

# Words for "no value" that people write.
_NOTHING = (None, False, 0, "", "none", "None", "null", "no", [], {})


class Lost(NamedTuple):
    """An option without a counterpart.

    Attributes:
        trains: whether it changes what is trained, and not only how.
        off: values that say what happens here anyway; those that say nothing are so too, but false
            where true is one.
    """

    why: str
    trains: bool
    off: tuple[Any, ...] = ()

    def says(self, value: Any) -> bool:
        """Whether this value differs from what happens here."""
        if value is False and self.trains and any(other is True for other in self.off):
            return True
        return not is_nothing(value) and value not in self.off


class Read(NamedTuple):
    """An option that the tool's `finish` reads, with others."""


READ = Read()
Option = str | Lost | Read


class Named(NamedTuple):
    """An option that is named to people."""

    name: str
    value: Any
    why: str


@dataclass
class Draft:
    """What a conversion comes to.

    Attributes:
        values: settings of ours, by name.
        trained: options without counterpart that change what is trained.
        executed: those that only say how.
        differs: options that mean something else here.
        sharing: devices that share every sample there.
    """

    values: dict[str, Any] = field(default_factory=dict)
    trained: list[Named] = field(default_factory=list)
    executed: list[Named] = field(default_factory=list)
    differs: list[Named] = field(default_factory=list)
    sharing: int = 1

    def lose(self, name: str, value: Any, why: str, *, trains: bool) -> None:
        (self.trained if trains else self.executed).append(Named(name, value, why))

    def note(self, name: str, value: Any, why: str) -> None:
        self.differs.append(Named(name, value, why))


@dataclass(frozen=True, eq=False)
class Tool:
    """A tool that runs come from.

    Attributes:
        name: for `--from`.
        title: for people.
        options: name -> what becomes of it.
        defaults: its own value of options that are not given, where the value decides what is
            trained or ours differs.
        finish: what several options say together; gets all values, those that were given, the
            draft, and devices.
        starts: what its command line begins with -> options that this says.
        aliases: other spelling -> option.
        environment: variable that is 0 or 1 -> option that it says.
        degrees: options that say how many devices share every sample.
        nulls: option -> its value where null is given and says something; other nulls leave the
            tool's own default.
    """

    name: str
    title: str
    options: Mapping[str, Option]
    defaults: Mapping[str, Any]
    finish: Callable[[dict[str, Any], set[str], Draft, int], None]
    starts: Mapping[tuple[str, ...], Mapping[str, Any]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    nulls: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    degrees: tuple[str, ...] = ()


def lost(
    why: str, names: str, *, trains: bool = False, off: tuple[Any, ...] = ()
) -> dict[str, Option]:
    """The same said of several options, their names with spaces between."""
    return dict.fromkeys(names.split(), Lost(why, trains, off))


def read(names: str) -> dict[str, Option]:
    """Options that `finish` reads, their names with spaces between."""
    return dict.fromkeys(names.split(), READ)


def is_nothing(value: Any) -> bool:
    """Whether a value only says that something is not used."""
    return any(type(value) is type(nothing) and value == nothing for nothing in _NOTHING)


def convert(tool: Tool, given: Mapping[str, Any], devices: int) -> Draft:
    """The draft of a tool's run.

    Raises:
        ConfigError: the run cannot be one of ours, or its degrees do not divide the devices.
    """
    draft, known = Draft(), {}
    for written, value in given.items():
        name = tool.aliases.get(written, written)
        if name not in tool.options:
            draft.lose(
                written,
                value,
                f"not an option of {tool.title} that is known here: look it up",
                trains=True,
            )
        else:
            known[name] = value
    nulls = [name for name, value in known.items() if value is None]
    for name in nulls:
        if name not in tool.nulls and not is_nothing(default := tool.defaults.get(name)):
            draft.note(name, "null", f"{default} is written, which is the default there")
    values = {
        **tool.defaults,
        **{name: value for name, value in known.items() if value is not None},
    }
    values |= {name: tool.nulls[name] for name in nulls if name in tool.nulls}
    for name, value in values.items():
        option = tool.options[name]
        if isinstance(option, Lost):
            if name in known and option.says(value):
                draft.lose(name, value, option.why, trains=option.trains)
        elif isinstance(option, str):
            draft.values[option] = value
    draft.sharing = math.prod(int(values.get(name) or 1) for name in tool.degrees)
    if draft.sharing < 1 or devices % draft.sharing:
        names = ", ".join(name for name in tool.degrees if values.get(name))
        what = f"{draft.sharing} devices share every sample, and that does not divide {devices}"
        raise ConfigError(what, names, "say with --devices how many devices the run was on")
    tool.finish(values, set(known), draft, devices)
    return draft
