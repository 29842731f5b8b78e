"""The options of a command, made from a schema as a run's settings are (`config.flags`).

A command declares a subclass of `Options` and calls `read_options`. Of a repeated flag the last
counts; lists are joined.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, TypeVar

from pydantic import ValidationError

from finetune.config.fields import Strict, setting
from finetune.config.flag_help import fitted, flag_lines
from finetune.config.flags import HELP, Parsed, flags_of, parse
from finetune.config.schema_errors import new_problems, problems_of
from finetune.errors import raise_problems
from finetune.runtime.language import pick_language, speak

AnyOptions = TypeVar("AnyOptions", bound="Options")


class Options(Strict):
    """The options of a command; a subclass adds fields, each a `setting(...)` whose group is one of
    `groups`.

    Attributes:
        usage: the line after "usage: "; the first words are the command.
        epilog: the help's last lines, e.g. what the exit code says.
        groups: headings of the help, in order.
        positional: fields that stand without a flag, in order.
        aliases: other spelling -> field.
    """

    usage: ClassVar[str]
    summary: ClassVar[str]
    epilog: ClassVar[str] = ""
    groups: ClassVar[tuple[str, ...]] = ("options", "output")
    positional: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[Mapping[str, str]] = {}


class SpokenOptions(Options):
    """The options of a command that speaks English and Chinese, to people and to programs."""

    # `json` itself is a method of pydantic's models.
    as_json: bool = setting(
        False, alias="json", group="output", description="Write JSON instead of text."
    )
    lang: Literal["en", "zh"] | None = setting(
        None,
        group="output",
        unit="en|zh",
        shown_default="the locale's",
        description="Language of the output.",
    )


def read_options(options_class: type[AnyOptions], arguments: Sequence[str] | None) -> AnyOptions:
    """The options of a command line; `--help` prints the help and exits.

    Args:
        arguments: what follows the command; None: the arguments of this process.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several.
        SystemExit: with 0, after the help.
    """
    return read_known_options(options_class, arguments, keep_rest=False)[0]


def read_known_options(
    options_class: type[AnyOptions], arguments: Sequence[str] | None, *, keep_rest: bool = True
) -> tuple[AnyOptions, list[str]]:
    """The same, of a command whose other arguments are a run's: the options, and those arguments in
    their order.
    """
    parsed = _parsed(
        options_class, sys.argv[1:] if arguments is None else arguments, keep_rest=keep_rest
    )
    if parsed.help:
        sys.stdout.write(options_help(options_class))
        raise SystemExit(0)
    problems, options = list(parsed.problems), None
    try:
        options = options_class.model_validate(
            {name: sourced.value for name, sourced in parsed.values.items()}
        )
    except ValidationError as error:
        problems += new_problems(problems_of(error, parsed.values, options_class), problems)
    raise_problems(problems)
    assert options is not None, "options that were not made without a problem that says why"
    if isinstance(options, SpokenOptions):
        speak(pick_language(options.lang))
    return options, parsed.rest


def _parsed(options_class: type[Options], arguments: Sequence[str], *, keep_rest: bool) -> Parsed:
    return parse(
        arguments,
        flags_of(options_class),
        options_class.aliases,
        extra=HELP,
        positional=options_class.positional,
        keep_rest=keep_rest,
        join_lists=True,
    )


def asks_for_json(options_class: type[SpokenOptions], arguments: Sequence[str]) -> bool:
    """Whether `--json` is set on a command line, whatever else of it is wrong."""
    found = _parsed(options_class, arguments, keep_rest=False).values.get("json")
    return found is not None and found.value is True


def options_help(options_class: type[Options]) -> str:
    lines = [*fitted(f"usage: {options_class.usage}"), "", *fitted(options_class.summary)]
    lines += flag_lines(
        options_class, options_class.groups, options_class.positional, short_switches=True
    )
    if options_class.epilog:
        lines += ["", *fitted(options_class.epilog)]
    return "\n".join(lines) + "\n"
