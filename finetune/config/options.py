"""The options of a command: its words, made from a schema as a run's settings are (`config.flags`).

A command declares a subclass of `Options` and calls `read_options`. Of a repeated flag the last counts; lists are
joined.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, TypeVar

from pydantic import ValidationError, model_validator

from finetune.config.fields import Strict, rule_broken, setting
from finetune.config.flags import HELP, flag_lines, flags_of, parse
from finetune.config.rules import DEFAULT_LEVEL, Given, flag
from finetune.config.schema_errors import problems_of
from finetune.errors import raise_problems
from finetune.runtime.language import pick_language, speak

AnyOptions = TypeVar("AnyOptions", bound="Options")


class Options(Strict):
    """The options of a command; a subclass adds fields, each a `setting(...)` whose group is one of `groups`.

    Attributes:
        usage: the line after "usage: "; the first words are the command.
        summary: what the command does, in the help.
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

    @model_validator(mode="after")
    def _agree(self) -> Options:
        if problems := self.problems():
            raise rule_broken(problems)
        return self

    def problems(self) -> list[tuple[str, str]]:
        """Options that contradict one another, as `(what, fix)`."""
        return []


class SpokenOptions(Options):
    """The options of a command that speaks English and Chinese, to people and to programs."""

    # `json` itself is a method of pydantic's models.
    as_json: bool = setting(False, alias="json", group="output", description="Write JSON instead of text.")
    lang: Literal["en", "zh"] | None = setting(
        None, group="output", unit="en|zh", shown_default="the locale's", description="Language of what is said."
    )


def read_options(options_class: type[AnyOptions], arguments: Sequence[str] | None) -> AnyOptions:
    """The options of a command line; `--help` prints the help and exits.

    Args:
        arguments: the words after the command; None: those of this process.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several.
        SystemExit: with 0, after the help.
    """
    options, _rest = _read(options_class, arguments, keep_rest=False)
    return options


def read_known_options(
    options_class: type[AnyOptions], arguments: Sequence[str] | None
) -> tuple[AnyOptions, list[str]]:
    """The same, of a command whose other words are a run's: the options, and those words in their order."""
    return _read(options_class, arguments, keep_rest=True)


def _read(
    options_class: type[AnyOptions], arguments: Sequence[str] | None, *, keep_rest: bool
) -> tuple[AnyOptions, list[str]]:
    words = sys.argv[1:] if arguments is None else list(arguments)
    flags = flags_of(options_class)
    parsed = parse(
        words,
        flags,
        options_class.aliases,
        extra=HELP,
        positional=options_class.positional,
        keep_rest=keep_rest,
    )
    if parsed.help:
        sys.stdout.write(options_help(options_class))
        raise SystemExit(0)
    values = {
        name: Given(value, DEFAULT_LEVEL + 1, flag(name), typed) for name, (value, typed) in parsed.values.items()
    }
    problems = list(parsed.problems)
    options = None
    try:
        options = options_class.model_validate({name: given.value for name, given in values.items()})
    except ValidationError as error:
        guessed = {getattr(problem, "guess", None) for problem in problems}
        found = problems_of(error, values, options_class)
        problems += [problem for problem in found if getattr(problem, "guess", "") not in guessed]
    raise_problems(problems)
    assert options is not None, "options that were not made without a problem that says why"
    if isinstance(options, SpokenOptions):
        speak(pick_language(options.lang))
    return options, parsed.rest


def options_help(options_class: type[Options]) -> str:
    """The help: usage, what the command does, options by group, exit codes."""
    lines = [f"usage: {options_class.usage}", "", *options_class.summary.splitlines()]
    lines += flag_lines(options_class, options_class.groups, options_class.positional)
    if options_class.epilog:
        lines += ["", *options_class.epilog.splitlines()]
    return "\n".join(lines) + "\n"
