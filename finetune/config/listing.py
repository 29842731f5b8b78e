"""A configuration as text: run.yaml, which is itself a valid `--config`, and the listing of `--print-config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from finetune.config.fields import ordered_fields
from finetune.config.run_config import BaseConfig


@dataclass(frozen=True)
class Resolved:
    """A configuration, ready to run.

    Args:
        config: every value settled; its `model_fields_set` holds what somebody decided.
        origins: field -> where its value is from: `default`, a file, a flag, `derived from ...`.
        notes: what the user should be told; what is probably wrong begins with `warning: `.
        print_config: whether `--print-config` was given.
    """

    config: BaseConfig
    origins: dict[str, str]
    notes: list[str]
    print_config: bool = False


def to_yaml(config: BaseConfig) -> str:
    """The configuration as a run file.

    What follows from the number of processes is left out, so that the file means the same run on another machine.
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
        if type(config).model_fields[name].json_schema_extra["group"] != group:
            group = type(config).model_fields[name].json_schema_extra["group"]
            rows.append((f"# {group}", "", ""))
        rows += [(path, text, resolved.origins[name]) for path, text in _flat(name, values[name])]
    named, valued = (max(len(row[column]) for row in rows if row[1]) for column in (0, 1))
    lines = [f"{name:<{named}}  {value:<{valued}}  {origin}".rstrip() for name, value, origin in rows]
    return "\n".join(lines + ([""] if resolved.notes else []) + [f"- {note}" for note in resolved.notes]) + "\n"


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted path, text) of a value and what is nested in it."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{path}.{name}", inner)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, inner in enumerate(value):
            yield from _flat(f"{path}[{number}]", inner)
    elif isinstance(value, list):
        yield path, " ".join(map(_word, value)) or "none"
    else:
        yield path, _word(value)


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return str(value)
