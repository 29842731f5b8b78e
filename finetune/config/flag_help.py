"""The help of flags, made from the schema and as wide as the terminal, and the table that freezes
flags.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from finetune.config.base_config import BaseConfig
from finetune.config.fields import GROUPS, Strict
from finetune.config.flags import EXTRA, ONLY_IN_FILES, flags_of
from finetune.config.names import flag

WIDEST = 118
_INDENT = 38
_SOURCES = """\
Values come from the defaults, then the files of --config in order, then the flags; the later wins.
Flags may be written with - or _, as --flag value or --flag=value. Of a repeated flag the last counts.
A relative path is relative to the current folder, in files too."""


def help_width() -> int:
    """Columns of a line of help: the terminal's, 118 where it is wider or there is none."""
    return max(60, min(WIDEST, shutil.get_terminal_size((WIDEST + 1, 24)).columns - 1))


def fitted(text: str) -> list[str]:
    """The lines of a text as they are where all fit; else its paragraphs filled, and indented lines
    by themselves.
    """
    lines, width = text.splitlines(), help_width()
    if all(len(line) <= width for line in lines):
        return lines
    result = []
    for indented, group in groupby(lines, lambda line: not line or line.startswith(" ")):
        for part in group if indented else [" ".join(group)]:
            usage = part.startswith("usage:")
            spaces = " " * (11 if usage else len(part) - len(part.lstrip()) + 4 * indented)
            result += textwrap.wrap(
                part,
                width,
                subsequent_indent=spaces,
                break_long_words=False,
                break_on_hyphens=False,
            ) or [""]
    return result


def help_text(model_class: type[BaseConfig]) -> str:
    flags = flags_of(model_class)
    lines = [
        f"usage: {model_class.command} [--config FILE...] [--flag value ...]",
        "",
        *fitted(_SOURCES),
    ]
    lines += ["", "configuration"]
    for name, (unit, description) in EXTRA.items():
        lines += _entry(f"{flag(name)} {unit}".strip(), description)
    lines += flag_lines(model_class, GROUPS)
    if "curriculum" in flags:
        lines += [
            "",
            *fitted(
                "curriculum.levels and curriculum.stages (until, mix, ramp) are set in a file."
            ),
        ]
    return "\n".join(lines) + "\n"


def flag_lines(
    model_class: type[Strict],
    groups: Iterable[str],
    positional: Sequence[str] = (),
    *,
    short_switches: bool = False,
) -> list[str]:
    """The flags of each group, with units and defaults.

    Args:
        positional: fields that stand without a flag.
        short_switches: of a switch that is off by default show only the flag and what it does.
    """
    aliases: Mapping[str, str] = getattr(model_class, "aliases", {})
    required = {
        info.alias or name for name, info in model_class.model_fields.items() if info.is_required()
    }
    flags, lines = flags_of(model_class), []
    for group in groups:
        members = [
            found
            for found in flags.values()
            if found.group == group and found.name not in ONLY_IN_FILES
        ]
        lines += ["", group] if members else []
        for found in members:
            default = "required" if found.name in required else f"default {found.default}"
            others = ", ".join(flag(other) for other, name in aliases.items() if name == found.name)
            also = f"; also {others}" if others else ""
            head = (
                found.metavar if found.name in positional else f"{flag(found.name)} {found.metavar}"
            )
            if short_switches and found.kinds == {"boolean"} and found.default == "false":
                head, default, also = flag(found.name), "", also.removeprefix("; ")
            notes = f" [{default}{also}]" if default or also else ""
            lines += _entry(head, found.description + notes)
    return lines


def _entry(head: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, help_width() - _INDENT, break_on_hyphens=False)
    if len(head) + 4 > _INDENT:
        return [f"  {head}", *(" " * _INDENT + line for line in wrapped)]
    return [f"  {head:<{_INDENT - 2}}{wrapped[0]}", *(" " * _INDENT + line for line in wrapped[1:])]


def flag_table(model_class: type[BaseConfig]) -> str:
    """One line per flag: name, types, default. A test compares it with the committed list of
    flags.
    """
    required = {
        info.alias or name for name, info in model_class.model_fields.items() if info.is_required()
    }
    rows: Iterable[tuple[str, str, str]] = [
        *((flag(name), unit or "alone", "-") for name, (unit, _) in EXTRA.items()),
        *(
            (
                flag(found.name),
                found.expected,
                "required" if found.name in required else found.default,
            )
            for found in flags_of(model_class).values()
            if found.name not in ONLY_IN_FILES
        ),
        *(
            (flag(other), f"the same as {flag(name)}", "-")
            for other, name in model_class.aliases.items()
        ),
    ]
    return "".join(f"{name}  {kind}  [{default}]\n" for name, kind, default in sorted(rows))
