"""Reading configuration files: JSON, YAML, and Python files of literal assignments, which are read
and never executed.

A file gives names and values; what they mean is decided elsewhere. A name given twice in one file
is refused, because every reader silently takes another of the two.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import yaml

from finetune.config.names import nearest
from finetune.errors import ConfigError


def read_file(path: str | Path) -> dict[str, Any]:
    """The names and values of a configuration file, nested as written.

    Raises:
        ConfigError: the file is missing, of another kind, not readable, not valid, or gives a name
            twice.
    """
    path = Path(path)
    readers = {".json": _read_json, ".yaml": _read_yaml, ".yml": _read_yaml, ".py": _read_python}
    text, read = _read_text(path), readers.get(path.suffix.lower())
    if read is None:
        raise ConfigError(
            f"{path} is no configuration file",
            str(path),
            f"its name must end in {', '.join(readers)}",
        )
    try:
        content = read(text, str(path))
    except (RecursionError, MemoryError) as error:
        raise ConfigError(
            "the file is nested too deeply to be read", str(path), "flatten it"
        ) from error
    if not isinstance(content, dict):
        kind = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise ConfigError(
            f"the file {kind}, not names and values", str(path), "write names and values"
        )
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            "the configuration file does not exist", str(path), similar_files(path)
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the file is not UTF-8 (byte {error.start})", str(path), "save it as UTF-8"
        ) from None
    except OSError as error:
        what = f"the configuration file cannot be read: {error.strerror}"
        raise ConfigError(what, str(path), "name a readable file") from None


def similar_files(path: Path) -> str:
    """A remedy for a path that does not exist: the nearest name in its folder, or the folder that
    is missing.
    """
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return (
            f"the folder {path.parent} does not exist either; relative paths start at the current"
            " folder"
        )
    guess = nearest(path.name, names)
    return (
        f"did you mean {path.parent / guess}?"
        if guess
        else "check the path; it starts at the current folder"
    )


def _given_twice(name: object, where: str) -> ConfigError:
    return ConfigError(f"{name!r} is given twice in one block", where, "keep one of them")


def _read_json(text: str, where: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        block: dict[str, Any] = {}
        for name, value in items:
            if name in block:
                raise _given_twice(name, where)
            block[name] = value
        return block

    def constant(name: str) -> Any:
        raise ConfigError(f"{name} is not a number that JSON knows", where, "write a finite number")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip() if text.strip() else ""
        hint = "fix the JSON"
        if "//" in line or "#" in line or line.startswith("/*"):
            hint = "JSON has no comments: remove them, or write the file as YAML"
        elif "double quotes" in error.msg or "Illegal trailing comma" in error.msg:
            hint = "fix the JSON: names stand in double quotes, and no comma follows the last entry"
        what = f"not valid JSON: {error.msg} at column {error.colno}"
        raise ConfigError(what, f"{where}:{error.lineno}", hint) from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(
            f"not a number that can be read: {error}", where, "write a shorter number"
        ) from None


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: `2e-5` is a number, and a name given twice is refused."""

    where = ""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            line = f"{self.where}:{key.start_mark.line + 1}"
            if key.tag != "tag:yaml.org,2002:str":
                raise ConfigError(
                    f"the name {key.value!r} is not a text", line, "write the name as a text"
                )
            if key.value in seen:
                raise _given_twice(key.value, line)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 2e-5 for a text, because it has no dot; everybody who writes a learning rate means
# the number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read_yaml(text: str, where: str) -> Any:
    loader = None
    try:
        loader = _Loader(text)
        loader.where = where
        content = loader.get_single_data()
        # raises ValueError where an alias makes a block contain itself
        json.dumps(content, default=str)
        return content
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(
            f"not valid YAML: {error.problem or error.context}", where + line, "fix the YAML"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {error}", where, "fix the YAML") from None
    finally:
        if loader is not None:
            loader.dispose()


def _read_python(text: str, where: str) -> dict[str, Any]:
    """Assignments of literals to names; anything else is refused with its line. Nothing is
    executed.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        raise ConfigError(f"not valid Python: {error.msg}", where + line, "fix the line") from None
    except ValueError as error:
        raise ConfigError(f"not valid Python: {error}", where, "fix the file") from None
    values: dict[str, Any] = {}
    for statement in tree.body:
        line = f"{where}:{statement.lineno}"
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring, or a text used as a comment
        target = value = None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign):
            target, value = statement.target, statement.value
        if not isinstance(target, ast.Name) or value is None:
            what = (
                "a Python configuration file may only assign values to names; it is read, never"
                " executed"
            )
            fix = "write `name = value` with a number, text, True, False, None, list or dict"
            raise ConfigError(what, line, fix)
        if target.id in values:
            raise _given_twice(target.id, line)
        values[target.id] = _literal(value, line)
    return values


def _literal(node: ast.expr, line: str) -> Any:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Dict):
            names = [key.value for key in inner.keys if isinstance(key, ast.Constant)]
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                raise _given_twice(repeated, line)
    try:
        return _plain(ast.literal_eval(node))
    except (ValueError, TypeError):
        what = f"{ast.unparse(node)[:80]} is not a literal value; the file is read, never executed"
        fix = "write the value itself: a number, text, True, False, None, list or dict"
        raise ConfigError(what, line, fix) from None


def _plain(value: Any) -> Any:
    """Literals as JSON would hold them: tuples become lists; what JSON has no word for is
    refused.
    """
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(entry) for name, entry in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"{value!r} has no counterpart in JSON")
