"""Remove nulls that Arrow adds to records with tools.

A struct column has every key in every row, so a call of one function also has the arguments of all
others, each null. Parquet, `datasets` folders and hub data sets have such nulls; JSON Lines has
not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyarrow import Schema

Record = dict[str, Any]

_TOOL_KEYS = ("tools", "functions")


def may_have_fillers(schema: Schema) -> bool:
    """Return whether a column holds tools or calls as structs, and not as JSON text."""
    text = str(schema)
    return "struct<" in text and any(key in text for key in ("arguments", *_TOOL_KEYS))


def without_fillers(record: Record) -> Record:
    """Return the record without nulls in descriptions of tools, and without nulls that are no
    arguments.

    A null argument stays if the function's own schema allows null for it.
    """
    tools = {key: _without_nulls(record[key]) for key in _TOOL_KEYS if key in record}
    schemas: dict[str, Any] = {}
    for listed in tools.values():
        for tool in listed if isinstance(listed, list) else []:
            function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schemas[function["name"]] = function.get("parameters")
    return {
        key: tools[key] if key in tools else _with_given_arguments(value, schemas)
        for key, value in record.items()
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _with_given_arguments(value: Any, schemas: Mapping[str, Any]) -> Any:
    """Return the value, in which each call has only the arguments that it was given."""
    if isinstance(value, list):
        return [_with_given_arguments(part, schemas) for part in value]
    if not isinstance(value, Mapping):
        return value
    name, arguments = value.get("name"), value.get("arguments")
    if isinstance(name, str) and isinstance(arguments, Mapping):
        return {**value, "arguments": _given(arguments, schemas.get(name))}
    return {key: _with_given_arguments(part, schemas) for key, part in value.items()}


def _given(value: Any, schema: Any) -> Any:
    """Arguments without the nulls that their schema does not allow."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, list):
        return [_given(part, schema.get("items")) for part in value]
    if not isinstance(value, Mapping):
        return value
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    return {
        key: _given(part, properties.get(key))
        for key, part in value.items()
        if part is not None or _allows_null(properties.get(key))
    }


def _allows_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    types = schema.get("type")
    if types == "null" or (isinstance(types, list) and "null" in types) or schema.get("nullable"):
        return True
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return any(_allows_null(choice) for choice in choices)
