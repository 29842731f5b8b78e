"""One source of settings - a file, a dict, an object - as names, values and places.

A DeepSpeed JSON is told from a run file by its keys: it has a `finetune` block, or mostly keys that only DeepSpeed has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.config.deepspeed_keys import KNOWN, REMOVED
from finetune.config.deepspeed_numbers import is_said, split
from finetune.config.names import FOREIGN, OTHERWISE, nearest, unknown_name
from finetune.config.rules import Given
from finetune.config.run_config import BaseConfig
from finetune.config.sources import read_file
from finetune.errors import ConfigError

BLOCK = "finetune"


@dataclass
class Layer:
    """What one source says.

    Args:
        values: field -> value with its level, origin and place.
        unread: whether the source could not be read at all, so that nothing is known of what it sets.
    """

    values: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)
    unread: bool = False


def layer_of_file(path: str | Path, level: int, model_class: type[BaseConfig]) -> Layer:
    """The layer of a `--config` file; never raises for what is wrong with it."""
    try:
        content = read_file(path)
    except ConfigError as error:
        return Layer(problems=[error], unread=True)
    return layer_of(content, str(path), level, model_class)


def layer_of_deepspeed_file(path: str, level: int, model_class: type[BaseConfig]) -> Layer:
    """The layer of a `--deepspeed` file: DeepSpeed's keys and the numbers among them that are ours."""
    layer = Layer()
    content = _read_deepspeed(path, layer)
    if content is not None:
        _add_deepspeed(layer, content, path, path, {}, level, model_class)
    return layer


def layer_of(content: Mapping[str, Any], label: str, level: int, model_class: type[BaseConfig]) -> Layer:
    """The layer of the names and values of one source.

    Args:
        content: as read; not changed.
        label: the source in messages and as the origin of its values.
        level: its precedence.
    """
    layer = Layer()
    names = {*model_class.model_fields, *model_class.aliases}
    if is_deepspeed(content, names):
        own, prefix = content.get(BLOCK, {}), f"{BLOCK}."
        keys = {name: value for name, value in content.items() if name != BLOCK}
        _refuse_misplaced(layer, own, keys, label, names)
        own = own if isinstance(own, Mapping) else {}
    else:
        own, prefix, keys = content, "", content.get("deepspeed")
    if isinstance(keys, str | os.PathLike):
        where, keys = os.fspath(keys), _read_deepspeed(os.fspath(keys), layer)
    else:
        where = label if prefix else f"{label}: deepspeed"
    ours = _own_values(layer, own, label, prefix, model_class)
    layer.values.update({name: Given(value, level, label, place) for name, (value, place) in ours.items()})
    if isinstance(keys, Mapping) and keys:
        _add_deepspeed(layer, keys, label, where, ours, level, model_class)
    elif keys is not None and not isinstance(keys, Mapping):
        fix = "give DeepSpeed's keys, the path of a DeepSpeed JSON, or null"
        layer.problems.append(ConfigError(f"deepspeed is {keys!r}", label, fix))
    elif not prefix and "deepspeed" in content:
        layer.values["deepspeed"] = Given(None, level, label)
    return layer


def is_deepspeed(content: Mapping[str, Any], names: Any) -> bool:
    """Whether names and values are a DeepSpeed configuration rather than a run file of ours."""
    if BLOCK in content:
        return True
    theirs = {*KNOWN, *REMOVED[""]}
    only_theirs = sum(name in theirs and name not in names for name in content)
    not_theirs = sum(name not in theirs and (name in names or name in {*FOREIGN, *OTHERWISE}) for name in content)
    if only_theirs or not_theirs:
        return only_theirs >= not_theirs
    if any(name in names for name in content):
        return False
    # Nothing known at all: a slip in one of the two. Take the one whose names are nearer.
    return any(nearest(str(name), theirs) and not nearest(str(name), names) for name in content)


def _refuse_misplaced(layer: Layer, own: Any, keys: dict[str, Any], label: str, names: Any) -> None:
    """Settings of ours beside DeepSpeed's keys, and DeepSpeed's keys inside our block. Takes the former out."""
    for name in [name for name in keys if name in names and name not in KNOWN]:
        fix = f'move it into the "{BLOCK}" block'
        layer.problems.append(ConfigError(f"{name} is not a DeepSpeed key", f"{label}: {name}", fix))
        del keys[name]
    if not isinstance(own, Mapping):
        fix = f'write "{BLOCK}": {{...}} with settings in it'
        layer.problems.append(ConfigError(f"the {BLOCK} block is {own!r}", f"{label}: {BLOCK}", fix))


def _own_values(
    layer: Layer, own: Mapping[str, Any], label: str, prefix: str, model_class: type[BaseConfig]
) -> dict[str, tuple[Any, str]]:
    """Our name -> (value, place); unknown names become problems of the layer."""
    names = model_class.model_fields
    values = {}
    for written, value in own.items():
        place = f"{label}: {prefix}{written}"
        name = model_class.aliases.get(written, written)
        if name == "deepspeed":
            if prefix:
                fix = "remove it: the file around the block is the DeepSpeed configuration"
                layer.problems.append(ConfigError(f"deepspeed inside the {BLOCK} block", place, fix))
        elif name in names:
            values[name] = (plain(value), place)
        elif name in KNOWN and name not in {*FOREIGN, *OTHERWISE}:
            fix = (
                f'move it out of the "{BLOCK}" block, to the top level'
                if prefix
                else 'move it into a "deepspeed" block'
            )
            layer.problems.append(ConfigError(f"{name} is a DeepSpeed key, not a setting", place, fix))
        else:
            layer.problems.append(unknown_name(str(name), place, names, flags=False))
    return values


def plain(value: Any) -> Any:
    """Paths as texts, because a Python caller may give them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _read_deepspeed(path: str, layer: Layer) -> dict[str, Any] | None:
    """DeepSpeed's keys in a file; None, and a problem of the layer, where there are none to be had."""
    try:
        content = read_file(path)
    except ConfigError as error:
        layer.problems.append(error)
        layer.unread = True
        return None
    if BLOCK in content:
        layer.notes.append(f"the {BLOCK} block of {path} is not read: the file is given as deepspeed, not as --config")
    return {name: value for name, value in content.items() if name != BLOCK}


def _add_deepspeed(
    layer: Layer,
    keys: Mapping[str, Any],
    label: str,
    where: str,
    ours: Mapping[str, tuple[Any, str]],
    level: int,
    model_class: type[BaseConfig],
) -> None:
    """Add DeepSpeed's keys, and its numbers where our side does not give them."""
    parts = split(keys, where, ours)
    layer.notes += parts.notes
    layer.problems += parts.problems
    for name, (value, place) in parts.numbers.items():
        if name not in model_class.model_fields:
            fix = f'write "auto", or remove it; {model_class.command} has other settings for this'
            layer.problems.append(ConfigError(f"{name} has no counterpart in {model_class.command}", place, fix))
        elif name not in ours or not is_said(ours[name][0]):
            layer.values[name] = Given(value, level, place)
    layer.values["deepspeed"] = Given(parts.deepspeed, level, label)
