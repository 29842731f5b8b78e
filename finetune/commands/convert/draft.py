"""What becomes of the options of other tools (tables/*.toml), and the run file in the making."""

from __future__ import annotations

import math
import tomllib
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from finetune.errors import ConfigError

_FOLDER = Path(__file__).parent / "tables"
# Kinds of rows, in the order in which they are applied.
_KINDS = ("refused", "written", "unsupported", "harmless", "different")
# Words for "no value" that people write.
_NOTHING = (None, False, 0, "", "none", "None", "null", "no", [], {})


def is_nothing(value: Any) -> bool:
    """Return whether a value only means that something is not used."""
    return any(type(value) is type(nothing) and value == nothing for nothing in _NOTHING)


class Row(NamedTuple):
    """Options that are converted in the same way.

    Attributes:
        kind: one of
            - refused: no run file can be made
            - written: only the settings are written
            - unsupported: no counterpart, and it changes what is trained
            - harmless: no counterpart, and it only affects how a run is executed
            - different: it has another meaning here
        options: their names.
        reason: shown to people; {name}, {value} and the options' names in braces are filled in.
        fix: shown if the options are refused.
        only: values that the row applies to, even if they are the tool's default.
        off: values for what happens here anyway, if the row applies to all others. Values that mean
            "not used" count as well, except false if true is in `off`.
        when: option or setting -> values; it must have one of them.
        missing: options that must not be given. If one of them is in `options` too, the row
            applies to its absence.
        settings: our settings to write.
    """

    kind: str
    options: Sequence[str]
    reason: str = ""
    fix: str = ""
    only: Sequence[Any] = ()
    off: Sequence[Any] = ()
    when: Mapping[str, Sequence[Any]] = {}
    missing: Sequence[str] = ()
    settings: Mapping[str, Any] = {}

    def applies(self, name: str, known: Mapping[str, Any], given: Collection[str]) -> bool:
        """Return whether the row is about an option of a run.

        Args:
            name: one of the row's options.
            known: values of options, with the tool's defaults, and settings that are written.
            given: names of the options that the run itself gives.
        """
        if any(other in given for other in self.missing):
            return False
        if any(known.get(other) not in values for other, values in self.when.items()):
            return False
        value = known.get(name)
        if self.only:
            return value in self.only
        if name in self.missing:
            return True
        if name not in given and self.kind != "different":
            return False
        if value is False and self.kind == "unsupported" and any(off is True for off in self.off):
            return True
        return not is_nothing(value) and value not in self.off


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """Conversion of a tool's options.

    Attributes:
        rows: in the order in which they are applied.
        settings: option -> our setting that takes its value.
        always: our settings that are written in any case.
        common: option -> name by which code reads it, the same for all tools.
        code: other options that code reads, or that have no effect.
        defaults: the tool's value of options that are not given, if it affects what is trained or
            differs from ours.
        nulls: option -> its value if null is given and has a meaning; other nulls leave the tool's
            default.
    """

    rows: Sequence[Row] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, str] = field(default_factory=dict)
    code: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nulls: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def options(self) -> set[str]:
        """Names of the known options. One by which code reads another option is none itself."""
        in_rows = {name for row in self.rows for name in row.options}
        return {*self.code, *self.settings, *self.common, *in_rows} - {*self.common.values()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Tool(Table):
    """A tool that runs come from.

    Attributes:
        name: for `--from`.
        title: for people.
        version: from which the table was read.
        finish: converts what is not in the table.
        starts: how its command line begins -> options that this gives.
        aliases: other spelling -> option.
        environment: variable that is 0 or 1 -> option that it gives.
        degrees: options that say how many devices share every sample.
        data, pairs: tables for an entry of the run's data; `pairs` for preferences, where the
            tool describes them in another way.
    """

    name: str
    title: str
    version: str
    finish: Callable[[Draft], None]
    starts: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    degrees: Sequence[str] = ()
    data: Table = Table()
    pairs: Table = Table()


def load_tool(name: str, finish: Callable[[Draft], None]) -> Tool:
    """Load the table of a tool from tables/NAME.toml."""
    table = _with_rows(load(name))
    entries = {
        key: Table(**_with_rows(table.pop(key))) for key in ("data", "pairs") if key in table
    }
    return Tool(finish=finish, **table, **entries)


def load(name: str) -> dict[str, Any]:
    """Load tables/NAME.toml, in front of the table that it includes."""
    table = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    included = load(table.pop("include")) if "include" in table else {}
    for key, value in included.items():
        if isinstance(value, dict):
            table[key] = value | table.get(key, {})
        elif isinstance(value, list):
            table[key] = table.get(key, []) + value
    return table


def _with_rows(table: dict[str, Any]) -> dict[str, Any]:
    table["rows"] = [Row(kind, **row) for kind in _KINDS for row in table.pop(kind, ())]
    return table


class Named(NamedTuple):
    """An option that is named to people."""

    name: str
    value: Any
    reason: str


class Draft:
    """The result of a conversion so far.

    Attributes:
        options: the other tool's options, its defaults included, also by their common names.
        given: names of the options that the run gives a value.
        devices: devices of the run.
        sharing: how many of them share every sample there.
        settings: settings of ours.
        named: kind of a row -> options to name to people.
    """

    def __init__(self, tool: Tool, run: Mapping[str, Any], devices: int) -> None:
        self.tool = tool
        self.devices = devices
        self.settings: dict[str, Any] = {}
        self.named: dict[str, list[Named]] = {
            "unsupported": [],
            "different": [],
            "harmless": [],
        }
        known = {}
        for written, value in run.items():
            name = tool.aliases.get(written, written)
            positive = name.removeprefix("no_")
            if name in tool.options:
                known[name] = value
            elif positive in tool.options and value is True:
                # transformers' parser gives an option that is true by default a --no_ form.
                known[positive] = False
            elif not is_nothing(value):
                reason = f"not an option of {tool.title} that is known here: look it up"
                self.drop(written, value, reason)
        self.options = self.read(tool, known)
        self.given = {name for name, value in known.items() if value is not None}
        self.given |= {tool.common[name] for name in self.given if name in tool.common}
        self.sharing = math.prod(int(self.options.get(name) or 1) for name in tool.degrees)
        if self.sharing < 1 or devices % self.sharing:
            names = ", ".join(name for name in tool.degrees if self.options.get(name))
            what = f"{self.sharing} devices share every sample, and that does not divide {devices}"
            raise ConfigError(what, names, "say with --devices how many devices the run was on")

    def read(self, table: Table, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of options, with the tool's own where none is given."""
        options = {**table.defaults}
        for name, value in given.items():
            if value is not None:
                options[name] = value
            elif name in table.nulls:
                options[name] = table.nulls[name]
            elif not is_nothing(options.get(name)):
                self.note(name, "null", f"{options[name]} is written, which is the default there")
        for name, common in table.common.items():
            if name in options:
                options[common] = options[name]
        return options

    def apply_table(self) -> None:
        """Write the settings of the tool's table, and name what it names.

        Raises:
            ConfigError: the run cannot be one of ours.
        """
        self.settings.update(self.tool.always)
        for name, setting in self.tool.settings.items():
            if name in self.options:
                self.settings[setting] = self.options[name]
        self.apply_rows(self.tool, self.options, self.given)

    def apply_rows(
        self, table: Table, options: dict[str, Any], given: Collection[str], where: str = ""
    ) -> None:
        """Apply the rows of a table to options; `where` is put in front of names that are shown."""
        known = ChainMap(options, self.settings)
        for row in table.rows:
            for name in row.options:
                if not row.applies(name, known, given):
                    continue
                self.settings.update(row.settings)
                value = options.get(name, "not set")
                reason = row.reason.format_map(
                    {
                        **options,
                        "name": name,
                        "value": value,
                    }
                )
                if row.kind == "refused":
                    raise ConfigError(reason, name, row.fix)
                if reason:
                    self.named[row.kind].append(Named(where + name, value, reason))

    def drop(self, name: str, value: Any, reason: str, kind: str = "unsupported") -> None:
        """Name an option without a counterpart."""
        self.named[kind].append(Named(self.written(name), value, reason))

    def note(self, name: str, value: Any, reason: str) -> None:
        """Name an option that means something else here."""
        self.drop(name, value, reason, "different")

    def written(self, common: str) -> str:
        """Return the tool's own name of an option."""
        return next((name for name, other in self.tool.common.items() if other == common), common)


def convert(tool: Tool, run: Mapping[str, Any], devices: int) -> Draft:
    """Convert the options of a tool's run.

    Raises:
        ConfigError: the run cannot be one of ours, or its degrees do not divide the devices.
    """
    draft = Draft(tool, run, devices)
    tool.finish(draft)
    return draft
