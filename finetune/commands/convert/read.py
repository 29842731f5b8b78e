"""What a run of another tool says: options by name, from a YAML or JSON file, or from a command line."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

from finetune.commands.convert import axolotl, llama_factory, ms_swift, trl
from finetune.commands.convert.draft import Tool
from finetune.commands.diagnose.findings import mask_secrets
from finetune.config.config_files import read_file, similar_files
from finetune.errors import ConfigError

TOOLS: tuple[Tool, ...] = (llama_factory.TOOL, trl.TOOL, axolotl.TOOL, ms_swift.TOOL)
_FILES = (".yaml", ".yml", ".json")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.S)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def read_run(given: str, tool_name: str | None) -> tuple[Tool, dict[str, Any], str]:
    """The tool, its options as they are written, and what to call the source.

    Args:
        given: a file, a command line, or - for one on standard input.
        tool_name: None: the tool is recognised.

    Raises:
        ConfigError: it cannot be read, or belongs to no tool or to several.
    """
    path = Path(given)
    if path.suffix.lower() in _FILES and (path.is_file() or " " not in given):
        options, named = read_file(path), None
        source = path.name
    else:
        text = _command_text(given, path)
        options, named = _read_command(text)
        source = path.name if path.is_file() else "a command line"
    tool = named if tool_name is None and named is not None else _pick(options, tool_name, source)
    return tool, options, source


def _command_text(given: str, path: Path) -> str:
    if given == "-":
        return sys.stdin.read()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if " " in given.strip():
        return given
    raise ConfigError("there is no such file, and it is no command line", given, similar_files(path))


def _read_command(text: str) -> tuple[dict[str, Any], Tool | None]:
    """The options of the command in a shell script that trains, and the tool that it names."""
    text = re.sub(r"\\\r?\n", " ", text)
    variables: dict[str, str] = {}
    for line in text.splitlines():
        words = _words(line)
        while words and (found := _ASSIGNMENT.fullmatch(words[0] if words[0] != "export" else " ".join(words[:2]))):
            variables[found[1]] = found[2]
            words = words[2 if words[0] == "export" else 1 :]
        words = [_VARIABLE.sub(lambda name: variables.get(name[1] or name[2], name[0]), word) for word in words]
        for tool in TOOLS:
            for start, said in tool.starts.items():
                place = _place(words, start)
                if place is not None:
                    return {**said, **_options(words[place:])}, tool
    flags = [word for line in text.splitlines() for word in _words(line)]
    first = next((number for number, word in enumerate(flags) if word.startswith("--")), len(flags))
    return _options(flags[first:]), None


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError(f"not a command line: {error}", mask_secrets(line.strip())[:60], "close the quotes") from None


def _place(words: list[str], start: tuple[str, ...]) -> int | None:
    """Where the options begin behind the words that start a tool."""
    for number in range(len(words) - len(start) + 1):
        pairs = zip(words[number:], start, strict=False)
        if all(word == wanted or word.endswith(f"/{wanted}") for word, wanted in pairs):
            return number + len(start)
    return None


def _options(words: list[str]) -> dict[str, Any]:
    """`--name value...`, `--name=value`, `name=value`, and a file of options in front of them."""
    options: dict[str, Any] = {}
    name = None
    for word in words:
        pair = re.fullmatch(r"(?:--)?([A-Za-z][\w.-]*)=(.*)", word, re.S)
        if word in ("&", "&&", "|", "||", ";", ">", ">>", "2>&1", "&>"):
            break
        if pair and (word.startswith("--") or name is None):
            options[pair[1].replace("-", "_")], name = _value(pair[2]), None
        elif re.fullmatch(r"--[A-Za-z][\w-]*", word):
            name = word[2:].replace("-", "_")
            options[name] = True
        elif name is None and Path(word).suffix.lower() in _FILES:
            options |= read_file(word)
        elif name is None:
            raise ConfigError(f"{word!r} belongs to no option", "the command line", "write --name value")
        elif options[name] is True:
            options[name] = _value(word)
        else:
            before = options[name]
            options[name] = [*(before if isinstance(before, list) else [before]), _value(word)]
    if isinstance(given := options.pop("config", None), str):
        options = {**read_file(given), **options}
    return options


def _value(word: str) -> Any:
    """A word as the number or truth that it writes; else itself."""
    lower = word.lower()
    if lower in ("true", "false"):
        return lower == "true"
    if lower in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _pick(options: dict[str, Any], name: str | None, source: str) -> Tool:
    if name is not None:
        return next(tool for tool in TOOLS if tool.name == name)
    known = {tool: sum(tool.aliases.get(each, each) in tool.options for each in options) for tool in TOOLS}
    # A tool's own words count: `model` is ms-swift's, `base_model` is Axolotl's.
    own = {
        tool: sum(
            each in tool.options and not any(each in other.options for other in TOOLS if other is not tool)
            for each in options
        )
        for tool in TOOLS
    }
    best = max(TOOLS, key=lambda tool: (known[tool], own[tool]))
    if not known[best] or sum((known[tool], own[tool]) == (known[best], own[best]) for tool in TOOLS) > 1:
        names = ", ".join(tool.name for tool in TOOLS)
        raise ConfigError("it cannot be told which tool this run is for", source, f"say --from {names}")
    return best
