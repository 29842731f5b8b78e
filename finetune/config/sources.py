"""An entry of `data`: files that are one source, how much of the training they are, and how their
records are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
)

from finetune.config.fields import Columns, Strict, Text, rule_broken

NATURAL = "natural"
HUB_PREFIXES = ("hub:", "modelscope:")  # of a data set by name (data/reading/hub_data.py)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _weight(value: Any) -> float | str:
    if value == NATURAL:
        return NATURAL
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise rule_broken(
            [
                (
                    f"a weight is {value!r}",
                    f"give a number above 0, or {NATURAL} for the source's size",
                )
            ]
        )
    return float(value)


def _weights(value: Any) -> Any:
    """A single weight is a list of one; on the command line numbers are texts."""
    if isinstance(value, str | int | float):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return tuple(
        float(one) if isinstance(one, str) and _NUMBER.fullmatch(one) else one for one in value
    )


Weight = Annotated[
    float | Literal["natural"],
    PlainValidator(_weight, json_schema_input_type=float | Literal["natural"]),
]
Weights = Annotated[
    tuple[Weight, ...],
    BeforeValidator(_weights, json_schema_input_type=list[float | Literal["natural"]]),
]


class DataSource(Strict):
    """One source of samples."""

    path: Text = Field(description="A file, folder or glob.")
    weight: Weight | None = Field(
        default=None, description="Its part of the samples; natural is the number of its samples."
    )
    columns: Columns | None = Field(
        default=None, description="Names of the format -> fields of the records."
    )
    difficulty: Text | None = Field(
        default=None, description="The difficulty of all its records, instead of their own."
    )

    @model_serializer(mode="wrap")
    def _given(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in values_of(self).items() if value is not None}


def _entries(value: Any) -> Any:
    """A single entry is a list of one; JSON and YAML lists become tuples."""
    if isinstance(value, str | dict | DataSource):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _kind(value: Any) -> str:
    return "source" if isinstance(value, dict | DataSource) else "path"


_Entry = Annotated[
    Annotated[Text, Tag("path")] | Annotated[DataSource, Tag("source")], Discriminator(_kind)
]
# Paths, and paths with more said of them. A path alone stays the text that it is, in run.yaml too.
DataEntries = Annotated[
    tuple[_Entry, ...], BeforeValidator(_entries, json_schema_input_type=str | list[str])
]


def as_sources(entries: Sequence[str | DataSource]) -> tuple[DataSource, ...]:
    """The entries of `data` or `valid_data` with a path alone written out."""
    return tuple(
        entry if isinstance(entry, DataSource) else DataSource(path=entry) for entry in entries
    )


def with_columns(
    sources: Sequence[DataSource], columns: Mapping[str, str] | None
) -> tuple[DataSource, ...]:
    """The sources with the columns of all where they do not have their own."""
    if columns is None:
        return tuple(sources)
    return tuple(
        (
            source
            if source.columns is not None
            else source.model_copy(update={"columns": dict(columns)})
        )
        for source in sources
    )


def weighted(
    entries: Sequence[str | DataSource], weights: Sequence[float | Literal["natural"]]
) -> tuple[DataSource, ...]:
    """The sources with their weights: as `data_weights` gives them, or the entries.

    All have one, or none has and they are not mixed (`source_problems`).
    """
    sources = as_sources(entries)
    if not weights:
        return sources
    return tuple(
        source.model_copy(update={"weight": w}) for source, w in zip(sources, weights, strict=True)
    )


def source_names(sources: Sequence[DataSource]) -> tuple[str, ...]:
    """A name for each, as short as tells them apart: a file's without suffix, the path, the path
    with a number.
    """
    paths = [source.path for source in sources]
    short = [Path(path).stem for path in paths]
    names = [
        name if short.count(name) == 1 and name else path
        for name, path in zip(short, paths, strict=True)
    ]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({names[:number].count(name) + 1})"
        for number, name in enumerate(names)
    )


def source_problems(
    data: Sequence[str | DataSource],
    weights: Sequence[float | Literal["natural"]],
    valid_data: Sequence[str | DataSource],
    difficulties: Sequence[str] | None,
) -> list[tuple[str, str]]:
    """What is wrong with the sources of a run, as `(what, fix)`.

    Args:
        difficulties: their names; None where they are not looked at.
    """
    found = []
    if weights and len(weights) != len(data):
        what = f"data_weights has {len(weights)} weights for {len(data)} entries of data"
        found.append((what, "give one weight for each, in the same order"))
    if weights and _any_weight(data):
        found.append(
            ("data_weights is given, and an entry of data has a weight", "keep one of the two")
        )
    unweighted = [source.path for source in as_sources(data) if source.weight is None]
    if unweighted and _any_weight(data):
        what = (
            f"{', '.join(unweighted)} in data {'have' if len(unweighted) > 1 else 'has'} no weight,"
            " and others have"
        )
        found.append((what, f"give each a number above 0, or {NATURAL} for its size"))
    if _any_weight(valid_data):
        found.append(
            (
                "an entry of valid_data has a weight",
                "remove it: each validation sample is evaluated once",
            )
        )
    for source in (*as_sources(data), *as_sources(valid_data)):
        if difficulties is not None and source.difficulty not in (None, *difficulties):
            what = (
                f"{source.path} has the difficulty {source.difficulty!r}, which the curriculum does"
                " not have"
            )
            found.append((what, f"give one of {', '.join(difficulties)}"))
    return found


def _any_weight(entries: Sequence[str | DataSource]) -> bool:
    return any(source.weight is not None for source in as_sources(entries))
