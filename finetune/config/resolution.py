"""From files and flags to one configuration, with the origin of every value.

Precedence: defaults < the files of `--config` in order < `--deepspeed` < flags < overrides of a Python caller. A
relative path in a file is relative to the current folder, as DeepSpeed and accelerate users expect. Everything wrong is
collected and reported together, before torch is imported and before anything is written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from finetune.config.flags import Parsed, flags_of, help_text, parse
from finetune.config.layers import Layer, layer_of, layer_of_deepspeed_file, layer_of_file
from finetune.config.listing import Resolved, format_config, to_yaml
from finetune.config.names import UnknownName
from finetune.config.paths import check_paths
from finetune.config.rules import DEFAULT_LEVEL, Given, Settling
from finetune.config.run_config import BaseConfig, RunConfig
from finetune.config.schema_errors import problems_of
from finetune.errors import ConfigError, raise_problems

__all__ = ["Resolved", "check_paths", "format_config", "resolve", "resolve_object", "to_yaml"]


def resolve(
    arguments: Sequence[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    world_size: int,
    model_class: type[BaseConfig] = RunConfig,
) -> Resolved:
    """The configuration of a command line.

    Args:
        arguments: the words after the command, e.g. `sys.argv[1:]`; None for none.
        overrides: values of a Python caller, above the flags.
        world_size: number of processes, for the batch sizes.
        model_class: the configuration to make.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several.
        SystemExit: with 0, after `--help` was printed.
    """
    parsed = parse(list(arguments or ()), flags_of(model_class), model_class.aliases)
    if parsed.help:
        sys.stdout.write(help_text(model_class))
        raise SystemExit(0)
    layers = [layer_of_file(path, level, model_class) for level, path in enumerate(parsed.config_files, 1)]
    layers.append(_deepspeed_layer(parsed, len(layers) + 1, model_class))
    by_flag = len(layers) + 1
    layers.append(_flag_layer(parsed, by_flag))
    layers.append(layer_of(overrides or {}, "override", by_flag + 1, model_class))
    return _settle(layers, by_flag, world_size, model_class, parsed.print_config)


def resolve_object(
    source: BaseConfig | Mapping[str, Any] | str | os.PathLike[str],
    world_size: int,
    model_class: type[BaseConfig] = RunConfig,
) -> Resolved:
    """The configuration of what a Python caller gave to `finetune.run`, under the same checks.

    Args:
        source: a configuration object, a dict in the form of a run file or a DeepSpeed JSON, or the path of a file.
        world_size: number of processes, for the batch sizes.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several.
    """
    if isinstance(source, model_class):
        layer = layer_of(source.model_dump(include=source.model_fields_set), model_class.__name__, 1, model_class)
    elif isinstance(source, Mapping):
        layer = layer_of(source, "the dict", 1, model_class)
    elif isinstance(source, str | os.PathLike):
        layer = layer_of_file(Path(source), 1, model_class)
    else:
        raise ConfigError(
            f"a configuration cannot be made of a {type(source).__name__}",
            "",
            f"give a {model_class.__name__}, a dict, or the path of a file",
        )
    return _settle([layer], 2, world_size, model_class)


def _deepspeed_layer(parsed: Parsed, level: int, model_class: type[BaseConfig]) -> Layer:
    if parsed.deepspeed is None:
        return Layer()
    if parsed.deepspeed.lower() == "none":
        return Layer({"deepspeed": Given(None, level, "--deepspeed")})
    return layer_of_deepspeed_file(parsed.deepspeed, level, model_class)


def _flag_layer(parsed: Parsed, level: int) -> Layer:
    values = {
        name: Given(value, level, "--" + name.replace("_", "-"), typed)
        for name, (value, typed) in parsed.values.items()
    }
    return Layer(values, problems=parsed.problems)


def _settle(
    layers: Sequence[Layer],
    by_flag: int,
    world_size: int,
    model_class: type[BaseConfig],
    print_config: bool = False,
) -> Resolved:
    """Let the later layers win, settle what depends on one another, and check the result."""
    assert world_size >= 1, f"world_size is {world_size}"
    fields = model_class.model_fields.items()
    defaults = {name: info.default for name, info in fields if info.default is not PydanticUndefined}
    values = {name: Given(value, DEFAULT_LEVEL, "default") for name, value in defaults.items()}
    for layer in layers:
        values.update(layer.values)
    settling = Settling(values, world_size, by_flag, defaults)
    for rule in model_class.rules:
        rule(settling)
    problems = [problem for layer in layers for problem in layer.problems] + settling.problems
    config, more = _validate(settling, model_class)
    problems += _new_problems(more, problems, unread=any(layer.unread for layer in layers))
    raise_problems(problems)
    assert config is not None, "a configuration that was not made without a problem that says why"
    notes = [note for layer in layers for note in layer.notes] + settling.notes
    config.model_fields_set.difference_update(model_class.machine_fields)
    return Resolved(config, _origins(config, settling), notes, print_config)


def _validate(settling: Settling, model_class: type[BaseConfig]) -> tuple[BaseConfig | None, list[ConfigError]]:
    decided = {
        name: given.value
        for name, given in settling.values.items()
        if given.level > DEFAULT_LEVEL or name in settling.derived
    }
    try:
        return model_class.model_validate(decided), []
    except ValidationError as error:
        return None, problems_of(error, settling.values, model_class)


def _new_problems(found: list[ConfigError], said: list[ConfigError], *, unread: bool) -> list[ConfigError]:
    """Problems of the model that are not consequences of those already said.

    A field is not called missing where its name was misspelt, or where a file that may set it could not be read.
    """
    told = {problem.what for problem in said}
    guessed = {problem.guess for problem in said if isinstance(problem, UnknownName)}
    return [
        problem
        for problem in found
        if problem.what not in told and not (isinstance(problem, UnknownName) and (unread or problem.guess in guessed))
    ]


def _origins(config: BaseConfig, settling: Settling) -> dict[str, str]:
    origins = {}
    for name, info in type(config).model_fields.items():
        given = settling.values.get(name)
        depends_on = info.json_schema_extra.get("depends_on")
        if given is not None:
            origins[name] = given.origin
        elif depends_on:
            value = getattr(config, depends_on)
            origins[name] = f"default for {value}" if isinstance(value, str) else f"default for {depends_on} {value}"
        else:
            origins[name] = "default"
    return origins
