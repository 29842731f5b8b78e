"""From files and flags to one configuration, with the origin of every value.

A value passes these modules in this order (the settings classes define the names):

1. `options.parse` and `files`, with `deepspeed`: text -> values with their sources;
2. `Resolution`: defaults < `--config` files in order < `--deepspeed` < flags < a Python caller's
  overrides; then the rules of the settings class resolve settings that depend on one another;
3. `options.validated`: pydantic checks the result, and its errors are made readable.

All errors are collected and reported together, before torch is imported and before anything is
written.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from finetune.config.base_config import BaseConfig
from finetune.config.fields import (
    HUB_PREFIXES,
    Precedence,
    Resolution,
    SourcedValue,
    ordered_fields,
    shown_of,
)
from finetune.config.files import add_deepspeed_file, add_file, add_values
from finetune.config.options import help_text, parse, shown, validated
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError

PATH_SETTINGS = (
    "output_dir",
    "cache_dir",
    "resume",
    "model",
    "tokenizer",
    "template",
    "data",
    "valid_data",
    "train_data_path",
    "valid_data_path",
)
_UNSET = re.compile(r"\$\{(\w+)\}")


def resolve_texts(resolution: Resolution) -> None:
    """Expand `~`, `$VAR` and `${VAR}` in every setting that names files or folders.

    A shell does not expand `--output-dir=~/out`, and a run file has no shell. A variable that is
    not set, a NUL character and half of a surrogate pair are noted as problems.
    """
    for name, sourced in list(resolution.values.items()):
        if any(map(_unusable, _texts_of(sourced.value))):
            what = f"{name} has a NUL character or half of a surrogate pair"
            resolution.refuse(what, [name], "write it as plain text")
            del resolution.values[name]
        elif name in PATH_SETTINGS:
            value = _expanded(sourced.value)
            resolution.values[name] = replace(sourced, value=value)
            for text in _texts_of(value):
                if unset := _UNSET.search(text):
                    what = f"{name} names the variable {unset[1]}, which is not set"
                    resolution.refuse(what, [name], "set it, or write the path itself")


def _expanded(value: Any) -> Any:
    if isinstance(value, str) and not value.startswith(HUB_PREFIXES):
        return os.path.expanduser(os.path.expandvars(value))
    if isinstance(value, list):
        return [_expanded(entry) for entry in value]
    if isinstance(value, Mapping) and "path" in value:  # an entry of data with more settings
        return {**value, "path": _expanded(value["path"])}
    return value


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts_of(name)
            yield from _texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_of(inner)


# Bytes of a path that are not UTF-8 are U+DC80 to U+DCFF in Python: those are real paths.
_UNUSABLE = re.compile("[\\0\\ud800-\\udc7f\\udd00-\\udfff]")


def _unusable(text: str) -> bool:
    return _UNUSABLE.search(text) is not None


@dataclass(frozen=True)
class Resolved:
    """A configuration, ready to run.

    Args:
        config: every value resolved; its `model_fields_set` holds what was given or derived.
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
    """Return the configuration of a command line.

    Args:
        arguments: what follows the command, e.g. `sys.argv[1:]`; None for none.
        overrides: values of a Python caller, above the flags.
        world_size: number of processes, for the batch sizes.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several.
        SystemExit: with 0, after `--help` was printed.
    """
    parsed = parse(list(arguments or ()), model_class)
    if parsed.help:
        sys.stdout.write(help_text(model_class))
        raise SystemExit(0)
    resolution = Resolution(model_class, world_size)
    resolution.add_defaults()
    for number, path in enumerate(parsed.config_files):
        add_file(resolution, path, Precedence.FILE + number)
    if parsed.deepspeed is not None and parsed.deepspeed.lower() == "none":
        none = SourcedValue(None, Precedence.DEEPSPEED, "--deepspeed")
        resolution.values["deepspeed"] = none
    elif parsed.deepspeed is not None:
        add_deepspeed_file(resolution, parsed.deepspeed, Precedence.DEEPSPEED)
    resolution.values |= parsed.values
    resolution.problems += parsed.problems
    add_values(resolution, overrides or {}, "override", Precedence.OVERRIDE)
    return _resolved(resolution, model_class, parsed.print_config)


def resolve_object(
    source: BaseConfig | Mapping[str, Any] | str | os.PathLike[str],
    world_size: int,
    model_class: type[BaseConfig] = RunConfig,
) -> Resolved:
    """Return the configuration of what a Python caller gave to `finetune.run`, with the same
    checks.

    Args:
        source: a configuration object, a dict in the form of a run file or a DeepSpeed JSON, or the
            path of a file.
        world_size: number of processes, for the batch sizes.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several.
    """
    resolution = Resolution(model_class, world_size)
    resolution.add_defaults()
    if isinstance(source, str | os.PathLike):
        add_file(resolution, Path(source), Precedence.FILE)
    elif isinstance(source, model_class):
        values, label = source.model_dump(include=source.model_fields_set), model_class.__name__
        add_values(resolution, values, label, Precedence.FILE)
    elif isinstance(source, Mapping):
        add_values(resolution, source, "the dict", Precedence.FILE)
    else:
        what = f"a configuration cannot be made of a {type(source).__name__}"
        fix = f"give a {model_class.__name__}, a dict, or the path of a file"
        raise ConfigError(what, "", fix)
    return _resolved(resolution, model_class)


def _resolved(
    resolution: Resolution, model_class: type[BaseConfig], print_config: bool = False
) -> Resolved:
    """Resolve what depends on one another, and check the result."""
    assert resolution.world_size >= 1, f"world_size is {resolution.world_size}"
    resolve_texts(resolution)
    for rule in model_class.rules:
        rule(resolution)
    config = validated(model_class, resolution)
    config.model_fields_set.difference_update(model_class.machine_fields)
    origins = {}
    for name, info in model_class.model_fields.items():
        sourced, depends_on = resolution.values.get(name), shown_of(info).get("depends_on")
        origins[name] = "default" if sourced is None else sourced.origin
        if sourced is None and depends_on:
            value = getattr(config, depends_on)
            stem = "" if isinstance(value, str) else f"{depends_on} "
            origins[name] = f"default for {stem}{value}"
    return Resolved(config, origins, resolution.notes, print_config)


def to_yaml(config: BaseConfig, decided: Mapping[str, Any] | None = None) -> str:
    """Return the configuration as a run file.

    Settings that follow from the number of processes are left out, so that the file means the same
    run on another machine.

    Args:
        decided: values of settings that were auto.
    """
    values = config.model_dump(mode="json", exclude=set(config.machine_fields))
    values |= decided or {}
    ordered = {name: values[name] for name in ordered_fields(type(config)) if name in values}
    return yaml.safe_dump(
        ordered,
        sort_keys=False,
        allow_unicode=True,
        width=120,
    )


def format_config(resolved: Resolved) -> str:
    """Return every value with its origin, aligned, by group; then the notes."""
    fields, values = type(resolved.config).model_fields, resolved.config.model_dump(mode="json")
    rows: list[tuple[str, str, str]] = []
    previous = ""
    for name in ordered_fields(type(resolved.config)):
        group = shown_of(fields[name])["group"]
        if group != previous:
            rows.append((f"# {group}", "", ""))
            previous = group
        rows += [(path, text, resolved.origins[name]) for path, text in _flat(name, values[name])]
    named, valued = (max(len(row[column]) for row in rows if row[1]) for column in (0, 1))
    lines = [
        f"{name:<{named}}  {value:<{valued}}  {origin}".rstrip() for name, value, origin in rows
    ]
    if resolved.notes:
        lines += ["", *(f"- {note}" for note in resolved.notes)]
    return "\n".join(lines) + "\n"


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) of a value and what is nested in it."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{path}.{name}", inner)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            yield from _flat(f"{path}[{number}]", inner)
    else:
        yield path, shown(value)
