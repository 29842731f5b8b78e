"""One source of settings - a file, a dict, an object - as names and sourced values.

A DeepSpeed JSON is told from a run file by its keys: it has a `finetune` block, or mostly keys that
only DeepSpeed has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.config.base_config import BaseConfig
from finetune.config.config_files import read_file
from finetune.config.deepspeed_keys import KNOWN, REMOVED
from finetune.config.deepspeed_settings import decides, split
from finetune.config.names import FOREIGN, OTHERWISE, nearest, unknown_name
from finetune.config.precedence import SourcedValue
from finetune.errors import ConfigError

BLOCK = "finetune"
# What other tools call the model and the data.
_OF_OTHER_TOOLS = (("model_name_or_path", "base_model"), ("dataset", "datasets", "dataset_name"))


@dataclass
class ConfigSource:
    """What one source gives."""

    values: dict[str, SourcedValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)
    unread: bool = False  # it could not be read at all, so that nothing is known of what it sets


def source_of_file(
    path: str | Path, precedence: int, model_class: type[BaseConfig]
) -> ConfigSource:
    """A `--config` file; never raises for what is wrong with it."""
    try:
        content = read_file(path)
    except ConfigError as error:
        return ConfigSource(problems=[error], unread=True)
    theirs = [next((name for name in names if name in content), None) for names in _OF_OTHER_TOOLS]
    if all(theirs):
        fix = f"python -m finetune convert {path} --output NEW.yaml makes a run file of it"
        wrong = ConfigError(
            f"this is a run file of another tool: it has {theirs[0]} and {theirs[1]}",
            str(path),
            fix,
        )
        return ConfigSource(problems=[wrong], unread=True)
    return source_of_values(content, str(path), precedence, model_class)


def source_of_deepspeed_file(
    path: str, precedence: int, model_class: type[BaseConfig]
) -> ConfigSource:
    """A `--deepspeed` file: DeepSpeed's keys, and the numbers among them that are ours."""
    source = ConfigSource()
    content = _read_deepspeed(path, source)
    if content is not None:
        _add_deepspeed(source, content, path, path, {}, precedence, model_class)
    return source


def source_of_values(
    content: Mapping[str, Any], label: str, precedence: int, model_class: type[BaseConfig]
) -> ConfigSource:
    """The names and values of one source, `label` in messages, sorted into ours and DeepSpeed's."""
    source = ConfigSource()
    names = {*model_class.model_fields, *model_class.aliases}
    keys: Any
    if is_deepspeed(content, names):
        own, prefix = content.get(BLOCK, {}), f"{BLOCK}."
        keys = {name: value for name, value in content.items() if name != BLOCK}
        _refuse_misplaced(source, own, keys, label, names)
        own = own if isinstance(own, Mapping) else {}
    else:
        own, prefix, keys = content, "", content.get("deepspeed")
    if isinstance(keys, str | os.PathLike):
        where, keys = os.fspath(keys), _read_deepspeed(os.fspath(keys), source)
    else:
        where = label if prefix else f"{label}: deepspeed"
    ours = _own_values(source, own, label, prefix, model_class)
    for name, (value, location) in ours.items():
        source.values[name] = SourcedValue(value, precedence, label, location)
    if isinstance(keys, Mapping) and keys:
        _add_deepspeed(source, keys, label, where, ours, precedence, model_class)
    elif keys is not None and not isinstance(keys, Mapping):
        fix = "give DeepSpeed's keys, the path of a DeepSpeed JSON, or null"
        source.problems.append(ConfigError(f"deepspeed is {keys!r}", label, fix))
    elif not prefix and "deepspeed" in content:
        source.values["deepspeed"] = SourcedValue(None, precedence, label)
    return source


def is_deepspeed(content: Mapping[str, Any], names: Any) -> bool:
    """Whether names and values are a DeepSpeed configuration rather than a run file of ours."""
    if BLOCK in content:
        return True
    theirs = {*KNOWN, *REMOVED[""]}
    only_theirs = sum(name in theirs and name not in names for name in content)
    not_theirs = sum(
        name not in theirs and (name in names or name in {*FOREIGN, *OTHERWISE}) for name in content
    )
    if only_theirs or not_theirs:
        return only_theirs >= not_theirs
    if any(name in names for name in content):
        return False
    # Nothing known at all: a slip in one of the two. Take the one whose names are nearer.
    return any(nearest(str(name), theirs) and not nearest(str(name), names) for name in content)


def _refuse_misplaced(
    source: ConfigSource, own: Any, keys: dict[str, Any], label: str, names: Any
) -> None:
    """Settings of ours beside DeepSpeed's keys, and DeepSpeed's keys inside our block. Takes the
    former out.
    """
    for name in [name for name in keys if name in names and name not in KNOWN]:
        fix = f'move it into the "{BLOCK}" block'
        source.problems.append(
            ConfigError(f"{name} is not a DeepSpeed key", f"{label}: {name}", fix)
        )
        del keys[name]
    if not isinstance(own, Mapping):
        fix = f'write "{BLOCK}": {{...}} with settings in it'
        source.problems.append(
            ConfigError(f"the {BLOCK} block is {own!r}", f"{label}: {BLOCK}", fix)
        )


def _own_values(
    source: ConfigSource,
    own: Mapping[str, Any],
    label: str,
    prefix: str,
    model_class: type[BaseConfig],
) -> dict[str, tuple[Any, str]]:
    """Our name -> (value, location); unknown names become problems of the source."""
    names = model_class.model_fields
    values = {}
    for written, value in own.items():
        location = f"{label}: {prefix}{written}"
        name = model_class.aliases.get(written, written)
        if name == "kind":
            if not model_class.command.endswith(f".{value}"):
                fix = f"start that kind of run, or remove the line: this is {model_class.command}"
                source.problems.append(ConfigError(f"kind is {value!r}", location, fix))
        elif name == "deepspeed":
            if prefix:
                fix = "remove it: the file around the block is the DeepSpeed configuration"
                source.problems.append(
                    ConfigError(f"deepspeed inside the {BLOCK} block", location, fix)
                )
        elif name in names:
            values[name] = (plain(value), location)
        elif name in KNOWN and name not in {*FOREIGN, *OTHERWISE}:
            out = f'move it out of the "{BLOCK}" block, to the top level'
            fix = out if prefix else 'move it into a "deepspeed" block'
            source.problems.append(
                ConfigError(f"{name} is a DeepSpeed key, not a setting", location, fix)
            )
        else:
            source.problems.append(unknown_name(str(name), location, names, flags=False))
    return values


def plain(value: Any) -> Any:
    """Paths as texts, because a Python caller may give them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _read_deepspeed(path: str, source: ConfigSource) -> dict[str, Any] | None:
    """DeepSpeed's keys in a file; None, and a problem of the source, where there are none to be
    had.
    """
    try:
        content = read_file(path)
    except ConfigError as error:
        source.problems.append(error)
        source.unread = True
        return None
    if BLOCK in content:
        source.notes.append(
            f"the {BLOCK} block of {path} is not read: the file is given as deepspeed, not as"
            " --config"
        )
    return {name: value for name, value in content.items() if name != BLOCK}


def _add_deepspeed(
    source: ConfigSource,
    keys: Mapping[str, Any],
    label: str,
    where: str,
    ours: Mapping[str, tuple[Any, str]],
    precedence: int,
    model_class: type[BaseConfig],
) -> None:
    """Add DeepSpeed's keys, and its numbers where our side does not give them."""
    parts = split(keys, where, ours)
    source.notes += parts.notes
    source.problems += parts.problems
    for name, (value, location) in parts.numbers.items():
        if name not in model_class.model_fields:
            fix = f'write "auto", or remove it; {model_class.command} has other settings for this'
            source.problems.append(
                ConfigError(f"{name} has no counterpart in {model_class.command}", location, fix)
            )
        elif name not in ours or not decides(ours[name][0]):
            source.values[name] = SourcedValue(value, precedence, location)
    source.values["deepspeed"] = SourcedValue(parts.deepspeed, precedence, label)
