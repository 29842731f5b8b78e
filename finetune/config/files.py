"""Configuration files: reading them, and sorting what one source gives - a file, a dict, an object
- into settings of ours and DeepSpeed's keys.

Files are JSON, YAML, or Python files of literal assignments, which are read and never executed. A
name given twice in one file is refused, because readers silently disagree on which one wins. A
DeepSpeed JSON is recognized by its keys: it has a `finetune` block, or mostly keys that only
DeepSpeed has. A relative path in a file is relative to the current folder, as DeepSpeed and
accelerate users expect.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from finetune.config.deepspeed import KNOWN, REMOVED, decides, split
from finetune.config.fields import (
    FOREIGN,
    OTHERWISE,
    Precedence,
    Resolution,
    Settings,
    SourcedValue,
    nearest,
    unknown_name,
)
from finetune.config.options import Parsed
from finetune.errors import ConfigError

BLOCK = "finetune"
# What other tools call the model and the data.
_OF_OTHER_TOOLS = (("model_name_or_path", "base_model"), ("dataset", "datasets", "dataset_name"))


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the names and values of a configuration file, nested as written.

    Raises:
        ConfigError: the file is missing, of another type, not readable, not valid, or gives a name
            twice.
    """
    path = Path(path)
    where, suffix = str(path), path.suffix.lower()
    readers = {
        ".json": _read_json,
        ".yaml": read_yaml,
        ".yml": read_yaml,
        ".py": _read_python,
    }
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        fix = similar_files(path)
        raise ConfigError("the configuration file does not exist", where, fix) from None
    except UnicodeDecodeError as error:
        what = f"the file is not UTF-8 (byte {error.start})"
        raise ConfigError(what, where, "save it as UTF-8") from None
    except ValueError as error:  # a NUL character, or half of a surrogate pair
        what = f"{where!r} is no path: {error}"
        raise ConfigError(what, "", "name a readable file") from None
    except OSError as error:
        what = f"the configuration file cannot be read: {error.strerror}"
        raise ConfigError(what, where, "name a readable file") from None
    if suffix not in readers:
        fix = f"its name must end in {', '.join(readers)}"
        raise ConfigError(f"{where} is no configuration file", where, fix)
    try:
        content = readers[suffix](text, where)
    except (RecursionError, MemoryError) as error:
        what = "the file is nested too deeply to be read"
        raise ConfigError(what, where, "flatten it") from error
    if not isinstance(content, dict):
        kind = "is empty" if content is None else f"holds a {type(content).__name__}"
        what = f"the file {kind}, not names and values"
        raise ConfigError(what, where, "write names and values")
    return content


def similar_files(path: Path) -> str:
    """Return the fix for a path that does not exist: the nearest name in its folder, or the folder
    that is missing.
    """
    start = "starts at the current folder"
    try:
        guess = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
    except OSError:
        return (
            f"the folder {path.parent} does not exist either; relative paths start at the current"
            " folder"
        )
    return f"did you mean {path.parent / guess}?" if guess else f"check the path; it {start}"


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
    """YAML with the numbers of YAML 1.2; a name given twice is refused."""

    where = ""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # What PyYAML raises for a value that does not fit its tag (`!!int ""`, `!!timestamp x`).
        except (AttributeError, IndexError, KeyError) as error:
            kind = node.tag.rpartition(":")[2]
            raise ConfigError(
                f"{str(node.value)[:40]!r} is no {kind}", self._line(node), "leave the tag out"
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise ConfigError(
                    f"the name {key.value!r} is not a text",
                    self._line(key),
                    "write the name as a text",
                )
            if key.value in seen:
                raise _given_twice(key.value, self._line(key))
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int:
        """Read an integer: `010` is 10 as in YAML 1.2, and not 8 as in YAML 1.1."""
        text = str(self.construct_scalar(node)).replace("_", "").lower()
        return int(text, 0) if text.lstrip("+-").startswith(("0x", "0o")) else int(text, 10)

    def _line(self, node: yaml.Node) -> str:
        return f"{self.where}:{node.start_mark.line + 1}"


# YAML 1.1, which PyYAML reads, takes 010 for 8, 1:30 for 90, and 2e-5 for a text.
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)

MAX_VALUES = 100_000  # of a settings file, aliases written out


def read_yaml(text: str, where: str) -> Any:
    """Read YAML with the numbers of YAML 1.2; errors are ConfigError."""
    loader = None
    try:
        loader = _Loader(text)
        loader.where = where
        content = loader.get_single_data()
        if _count_values(content, {}) > MAX_VALUES:
            raise ValueError(f"its aliases stand for more than {MAX_VALUES:,} values")
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


def _count_values(value: Any, counts: dict[int, int | None]) -> int:
    """Count the values of a tree whose aliases are shared objects, each object once.

    Args:
        counts: the counts of the blocks and lists so far by identity; None while one is counted.

    Raises:
        ValueError: a block contains itself.
    """
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) in counts:
        count = counts[id(value)]
        if count is None:
            raise ValueError("an alias makes a block contain itself")
        return count
    counts[id(value)] = None
    parts = value.values() if isinstance(value, dict) else value
    count = 1 + sum(_count_values(part, counts) for part in parts)
    counts[id(value)] = count
    return count


def _read_python(text: str, where: str) -> dict[str, Any]:
    """Return the literals that are assigned to names. Nothing is executed; anything else is refused
    with its line.
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
        match statement:
            case ast.Expr(value=ast.Constant()):  # a docstring, or a string used as a comment
                continue
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                if name in values:
                    raise _given_twice(name, line)
                values[name] = _literal(value, line)
            case _:
                what = (
                    "a Python configuration file may only assign values to names; it is read, never"
                    " executed"
                )
                fix = "write `name = value` with a number, text, True, False, None, list or dict"
                raise ConfigError(what, line, fix)
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
    """Return a literal as JSON would hold it: tuples become lists; what JSON cannot express is
    refused.
    """
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(entry) for name, entry in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"{value!r} has no counterpart in JSON")


def given_values(parsed: Parsed, model_class: type[Settings]) -> dict[str, Any]:
    """Return what the files and flags of a command line set, before anything is resolved."""
    resolution = Resolution(model_class)
    for path in parsed.config_files:
        add_file(resolution, path, Precedence.FILE)
    given = resolution.values | parsed.values
    return {name: sourced.value for name, sourced in given.items()}


def add_file(resolution: Resolution, path: str | Path, precedence: int) -> None:
    """Add the values of a `--config` file. Every error in it becomes a problem."""
    content = _read(resolution, path)
    if content is None:
        return
    theirs = [next((name for name in names if name in content), None) for names in _OF_OTHER_TOOLS]
    if all(theirs):
        what = f"this is a run file of another tool: it has {theirs[0]} and {theirs[1]}"
        fix = f"python -m finetune convert {path} --output NEW.yaml makes a run file of it"
        resolution.problems.append(ConfigError(what, str(path), fix))
        resolution.unread = True
        return
    add_values(resolution, content, str(path), precedence)


def add_deepspeed_file(resolution: Resolution, path: str, precedence: int) -> None:
    """Add a `--deepspeed` file: DeepSpeed's keys, and the numbers among them that are ours."""
    keys = _read_deepspeed(resolution, path)
    if keys is not None:
        _add_deepspeed(resolution, keys, path, path, {}, precedence)


def add_values(
    resolution: Resolution, content: Mapping[str, Any], label: str, precedence: int
) -> None:
    """Add the names and values of one source, sorted into ours and DeepSpeed's.

    Args:
        label: the source in messages.
    """
    fields, aliases = resolution.model_class.model_fields, resolution.model_class.aliases
    names = {*fields, *aliases}
    problems = resolution.problems
    in_block = is_deepspeed(content, names)
    own, keys = content, content.get("deepspeed")
    prefix, where = f"{label}: ", f"{label}: deepspeed"
    if in_block:
        own, prefix, where = content.get(BLOCK, {}), f"{label}: {BLOCK}.", label
        keys = {name: value for name, value in content.items() if name != BLOCK}
        for name in [name for name in keys if name in names and name not in KNOWN]:
            what, fix = f"{name} is not a DeepSpeed key", f'move it into the "{BLOCK}" block'
            problems.append(ConfigError(what, f"{label}: {name}", fix))
            del keys[name]
        if not isinstance(own, Mapping):
            fix = f'write "{BLOCK}": {{...}} with settings in it'
            problems.append(ConfigError(f"the {BLOCK} block is {own!r}", f"{label}: {BLOCK}", fix))
            own = {}
    elif isinstance(keys, str | os.PathLike):
        where = os.fspath(keys)
        keys = _read_deepspeed(resolution, where)
    ours: dict[str, SourcedValue] = {}
    for written, value in own.items():
        name = aliases.get(written, written)
        location = f"{prefix}{written}"
        if name == "deepspeed" and not in_block:
            continue
        if name in fields and name != "deepspeed":
            ours[name] = SourcedValue(plain_paths(value), precedence, label, location)
        elif name != "kind" or not resolution.model_class.command.endswith(f".{value}"):
            problems.append(
                _not_a_setting(name, value, location, resolution.model_class, in_block=in_block)
            )
    resolution.values |= ours
    if isinstance(keys, Mapping) and keys:
        _add_deepspeed(resolution, keys, label, where, ours, precedence)
    elif keys is not None and not isinstance(keys, Mapping):
        fix = "give DeepSpeed's keys, the path of a DeepSpeed JSON, or null"
        problems.append(ConfigError(f"deepspeed is {keys!r}", label, fix))
    elif not in_block and "deepspeed" in content:
        resolution.values["deepspeed"] = SourcedValue(None, precedence, label)


def is_deepspeed(content: Mapping[str, Any], names: set[str]) -> bool:
    """Return whether names and values are a DeepSpeed configuration rather than a run file of ours.

    Args:
        names: of our settings.
    """
    if BLOCK in content:
        return True
    theirs, foreign = {*KNOWN, *REMOVED[""]}, {*FOREIGN, *OTHERWISE}
    only_theirs = sum(name in theirs and name not in names for name in content)
    not_theirs = sum(name not in theirs and (name in names or name in foreign) for name in content)
    if only_theirs or not_theirs:
        return only_theirs >= not_theirs
    if any(name in names for name in content):
        return False
    # No name is known: there is a typo in one of the two. Take the one whose names are nearer.
    return any(nearest(str(name), theirs) and not nearest(str(name), names) for name in content)


def _not_a_setting(
    name: str, value: Any, location: str, model_class: type[Settings], *, in_block: bool
) -> ConfigError:
    """Return the problem of a name that is not a setting where it is written."""
    if name == "kind":
        fix = f"start that kind of run, or remove the line: this is {model_class.command}"
        return ConfigError(f"kind is {value!r}", location, fix)
    if name == "deepspeed":
        fix = "remove it: the file around the block is the DeepSpeed configuration"
        return ConfigError(f"deepspeed inside the {BLOCK} block", location, fix)
    if name in KNOWN and name not in {*FOREIGN, *OTHERWISE}:
        fix = 'move it into a "deepspeed" block'
        if in_block:
            fix = f'move it out of the "{BLOCK}" block, to the top level'
        return ConfigError(f"{name} is a DeepSpeed key, not a setting", location, fix)
    return unknown_name(str(name), location, model_class.model_fields, flags=False)


def plain_paths(value: Any) -> Any:
    """Return a value with strings for the paths that a Python caller may give."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: plain_paths(inner) for name, inner in value.items()}
    return [plain_paths(entry) for entry in value] if isinstance(value, list | tuple) else value


def _read(resolution: Resolution, path: str | Path) -> dict[str, Any] | None:
    """Return the content of a file, or None and a problem if it cannot be read."""
    try:
        return read_file(path)
    except ConfigError as error:
        resolution.problems.append(error)
        resolution.unread = True
        return None


def _read_deepspeed(resolution: Resolution, path: str) -> dict[str, Any] | None:
    content = _read(resolution, path)
    if content is None or BLOCK not in content:
        return content
    resolution.notes.append(
        f"the {BLOCK} block of {path} is not read: the file is given as deepspeed, not as --config"
    )
    return {name: value for name, value in content.items() if name != BLOCK}


def _add_deepspeed(
    resolution: Resolution,
    keys: Mapping[str, Any],
    label: str,
    where: str,
    ours: Mapping[str, SourcedValue],
    precedence: int,
) -> None:
    """Add DeepSpeed's keys, and the numbers among them that `ours` does not give."""
    numbers, handed_on = split(keys, where, ours, resolution)
    for name, (value, location) in numbers.items():
        if name not in resolution.model_class.model_fields:
            command = resolution.model_class.command
            what = f"{name} has no counterpart in {command}"
            fix = f'write "auto", or remove it; {command} has other settings for this'
            resolution.problems.append(ConfigError(what, location, fix))
        elif name not in ours or not decides(ours[name].value):
            resolution.values[name] = SourcedValue(value, precedence, location)
    resolution.values["deepspeed"] = SourcedValue(handed_on, precedence, label)
