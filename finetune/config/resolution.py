"""From files and flags to one configuration, with the origin of every value.

A value goes one way through these modules and returns to none of them (the schemas of 5 say which
names there are):

1. `config_files`, `flags`: text -> names and values;
2. `config_sources`, with `deepspeed_keys` and `deepspeed_settings`: those of one source -> sourced
  values;
3. `precedence`: defaults < files of `--config` in order < `--deepspeed` < flags < overrides of a
  Python caller;
4. `rules`, `pretrain_rules`: what depends on one another is resolved;
5. `base_config`, `run_config`, `pretrain_config`: the result is validated; `schema_errors` says
  what is wrong with it.

A relative path in a file is relative to the current folder, as DeepSpeed and accelerate users
expect. Everything wrong is collected and reported together, before torch is imported and before
anything is written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from finetune.config.base_config import BaseConfig
from finetune.config.config_sources import (
    ConfigSource,
    source_of_deepspeed_file,
    source_of_file,
    source_of_values,
)
from finetune.config.fields import ordered_fields, shown_of
from finetune.config.flag_help import help_text
from finetune.config.flags import Parsed, flags_of, parse, shown
from finetune.config.precedence import Precedence, Resolution, SourcedValue
from finetune.config.run_config import RunConfig
from finetune.config.schema_errors import new_problems, problems_of
from finetune.errors import ConfigError, raise_problems


@dataclass(frozen=True)
class Resolved:
    """A configuration, ready to run.

    Args:
        config: every value resolved; its `model_fields_set` holds what somebody decided.
        origins: field -> where its value is from: `default`, a file, a flag, `derived from ...`.
        notes: what the user should know; what is probably wrong begins with `warning: `.
        print_config: whether `--print-config` was given.
    """

    config: BaseConfig
    origins: dict[str, str]
    notes: list[str]
    print_config: bool = False


def resolve(
    arguments: Sequence[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    world_size: int,
    model_class: type[BaseConfig] = RunConfig,
) -> Resolved:
    """The configuration of a command line.

    Args:
        arguments: what follows the command, e.g. `sys.argv[1:]`; None for none.
        overrides: values of a Python caller, above the flags.
        world_size: number of processes, for the batch sizes.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several.
        SystemExit: with 0, after `--help` was printed.
    """
    parsed = parse(list(arguments or ()), flags_of(model_class), model_class.aliases)
    if parsed.help:
        sys.stdout.write(help_text(model_class))
        raise SystemExit(0)
    sources = [
        *(
            source_of_file(path, Precedence.FILE + n, model_class)
            for n, path in enumerate(parsed.config_files)
        ),
        _deepspeed_source(parsed, model_class),
        ConfigSource(parsed.values, problems=parsed.problems),
        source_of_values(overrides or {}, "override", Precedence.OVERRIDE, model_class),
    ]
    return _resolve(sources, world_size, model_class, parsed.print_config)


def resolve_object(
    source: BaseConfig | Mapping[str, Any] | str | os.PathLike[str],
    world_size: int,
    model_class: type[BaseConfig] = RunConfig,
) -> Resolved:
    """The configuration of what a Python caller gave to `finetune.run`, under the same checks.

    Args:
        source: a configuration object, a dict in the form of a run file or a DeepSpeed JSON, or the
            path of a file.
        world_size: number of processes, for the batch sizes.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several.
    """
    if isinstance(source, model_class):
        values = source.model_dump(include=source.model_fields_set)
        found = source_of_values(values, model_class.__name__, Precedence.FILE, model_class)
    elif isinstance(source, Mapping):
        found = source_of_values(source, "the dict", Precedence.FILE, model_class)
    elif isinstance(source, str | os.PathLike):
        found = source_of_file(Path(source), Precedence.FILE, model_class)
    else:
        what = f"a configuration cannot be made of a {type(source).__name__}"
        raise ConfigError(what, "", f"give a {model_class.__name__}, a dict, or the path of a file")
    return _resolve([found], world_size, model_class)


def _deepspeed_source(parsed: Parsed, model_class: type[BaseConfig]) -> ConfigSource:
    if parsed.deepspeed is None:
        return ConfigSource()
    if parsed.deepspeed.lower() == "none":
        return ConfigSource({"deepspeed": SourcedValue(None, Precedence.DEEPSPEED, "--deepspeed")})
    return source_of_deepspeed_file(parsed.deepspeed, Precedence.DEEPSPEED, model_class)


def _resolve(
    sources: Sequence[ConfigSource],
    world_size: int,
    model_class: type[BaseConfig],
    print_config: bool = False,
) -> Resolved:
    """Let the later sources win, resolve what depends on one another, and check the result."""
    assert world_size >= 1, f"world_size is {world_size}"
    fields = model_class.model_fields.items()
    defaults = {
        name: info.default for name, info in fields if info.default is not PydanticUndefined
    }
    values = {
        name: SourcedValue(value, Precedence.DEFAULT, "default") for name, value in defaults.items()
    }
    for source in sources:
        values.update(source.values)
    resolution = Resolution(values, world_size, defaults)
    for rule in model_class.rules:
        rule(resolution)
    problems = [problem for source in sources for problem in source.problems] + resolution.problems
    config, more = _validate(resolution, model_class)
    problems += new_problems(more, problems, unread=any(source.unread for source in sources))
    raise_problems(problems)
    assert config is not None, "a configuration that was not made without a problem that says why"
    notes = [note for source in sources for note in source.notes] + resolution.notes
    config.model_fields_set.difference_update(model_class.machine_fields)
    return Resolved(config, _origins(config, resolution), notes, print_config)


def _validate(
    resolution: Resolution, model_class: type[BaseConfig]
) -> tuple[BaseConfig | None, list[ConfigError]]:
    decided = {
        name: sourced.value
        for name, sourced in resolution.values.items()
        if sourced.precedence > Precedence.DEFAULT or name in resolution.derived
    }
    try:
        return model_class.model_validate(decided), []
    except ValidationError as error:
        return None, problems_of(error, resolution.values, model_class)


def _origins(config: BaseConfig, resolution: Resolution) -> dict[str, str]:
    origins = {}
    for name, info in type(config).model_fields.items():
        sourced, depends_on = resolution.values.get(name), shown_of(info).get("depends_on")
        origins[name] = "default" if sourced is None else sourced.origin
        if sourced is None and depends_on:
            value = getattr(config, depends_on)
            origins[name] = (
                f"default for {value}"
                if isinstance(value, str)
                else f"default for {depends_on} {value}"
            )
    return origins


def to_yaml(config: BaseConfig) -> str:
    """The configuration as a run file.

    What follows from the number of processes is left out, so that the file means the same run on
    another machine.
    """
    values = config.model_dump(mode="json", exclude=set(config.machine_fields))
    ordered = {name: values[name] for name in ordered_fields(type(config)) if name in values}
    return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=120)


def format_config(resolved: Resolved) -> str:
    """Every value with its origin, aligned, by group; then the notes."""
    config = resolved.config
    values = config.model_dump(mode="json")
    rows: list[tuple[str, str, str]] = []
    group = ""
    for name in ordered_fields(type(config)):
        previous, group = group, shown_of(type(config).model_fields[name])["group"]
        if group != previous:
            rows.append((f"# {group}", "", ""))
        rows += [(path, text, resolved.origins[name]) for path, text in _flat(name, values[name])]
    named, valued = (max(len(row[column]) for row in rows if row[1]) for column in (0, 1))
    lines = [
        f"{name:<{named}}  {value:<{valued}}  {origin}".rstrip() for name, value, origin in rows
    ]
    return (
        "\n".join(
            lines + ([""] if resolved.notes else []) + [f"- {note}" for note in resolved.notes]
        )
        + "\n"
    )


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted path, text) of a value and what is nested in it."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{path}.{name}", inner)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            yield from _flat(f"{path}[{number}]", inner)
    else:
        yield path, shown(value)
