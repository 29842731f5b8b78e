"""What a run of another tool says: options by name, from a YAML or JSON file, or from a command
line.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

from finetune.commands.convert import axolotl, llama_factory, ms_swift, trl
from finetune.commands.convert.draft import Tool
from finetune.commands.convert.launchers import as_words, processes_of, without_launcher
from finetune.config.files import read_file, similar_files
from finetune.errors import ConfigError
from finetune.plain_text import mask_secrets

TOOLS: tuple[Tool, ...] = (llama_factory.TOOL, trl.TOOL, axolotl.TOOL, ms_swift.TOOL)
_FILES = (".yaml", ".yml", ".json")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.S)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class Run(NamedTuple):
    """A run of another tool as it is written.

    Attributes:
        options: its options and their values.
        source: what to call the file or command.
        processes: the number that its launcher is given; None: it is given none.
    """

    tool: Tool
    options: dict[str, Any]
    source: str
    processes: int | None = None


def read_run(given: str, tool_name: str | None) -> Run:
    """The run that a file or a command line says.

    Args:
        given: a file, a command line, or - for one on standard input.
        tool_name: None: the tool is recognised.

    Raises:
        ConfigError: it cannot be read, or belongs to no tool or to several.
    """
    path = Path(given)
    # Path.is_file raises where a command is longer than a name may be
    is_file = os.path.isfile(given)
    source = path.name if is_file else "a command line"
    if path.suffix.lower() in _FILES and (is_file or " " not in given):
        options = read_file(path)
        tool = _pick(options, tool_name, path.name)
        return Run(
            tool, without_launcher(options, tool), path.name, processes_of(as_words(options), {})
        )
    options, named, processes = _read_command(_command_text(given, path))
    tool = named if tool_name is None and named is not None else _pick(options, tool_name, source)
    return Run(tool, without_launcher(options, tool), source, processes)


def _command_text(given: str, path: Path) -> str:
    try:
        if given == "-":
            return sys.stdin.read()
        if os.path.isfile(given):
            return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the text is not UTF-8 (byte {error.start})", given, "name a script or YAML file"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the file cannot be read: {error.strerror}", given, "name a readable file"
        ) from None
    if " " in given.strip():
        return given
    raise ConfigError(
        "there is no such file, and it is no command line", given, similar_files(path)
    )


def _read_command(text: str) -> tuple[dict[str, Any], Tool | None, int | None]:
    """The options of the command in a shell script that trains, the tool that it names, and its
    number of processes.
    """
    variables: dict[str, str] = {}
    lines: list[list[str]] = []
    unread, following = None, 1
    for line in re.split(r"(?<!\\)\n", text.replace("\r\n", "\n")):
        number, following = following, following + line.count("\n") + 1
        line = line.replace("\\\n", " ")
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:  # an apostrophe in another line of a script
            if "--" in line:
                # The line is not shown: it may hold a key.
                unread = unread or ConfigError(
                    f"not a command line: {error}", f"line {number}", "close the quotes"
                )
            continue
        words = _assign(words, variables)
        lines.append(words)
        if found := _start(words):
            tool, start, place = found
            switches = {
                option: variables[name] in ("1", "true", "True")
                for name, option in tool.environment.items()
                if name in variables
            }
            own = words[place:]
            # Behind -- a launcher's own options begin.
            options = _options(own[: own.index("--")] if "--" in own else own)
            return (
                {**tool.starts[start], **switches, **options},
                tool,
                processes_of([*words[: place - len(start)], *as_words(options), *own], variables),
            )
    if unread is not None:
        raise unread
    flags = [word for words in lines for word in words]
    first = next((number for number, word in enumerate(flags) if word.startswith("--")), len(flags))
    options = _options(flags[first:])
    return options, None, processes_of(as_words(options), {})


def _assign(words: list[str], variables: dict[str, str]) -> list[str]:
    """Keep the assignments in front of a command; the command, with the values of variables in
    their place.
    """

    def filled(word: str) -> str:
        return _VARIABLE.sub(lambda name: variables.get(name[1] or name[2], name[0]), word)

    while words and (
        found := _ASSIGNMENT.fullmatch(words[0] if words[0] != "export" else " ".join(words[:2]))
    ):
        variables[found[1]] = filled(found[2])
        words = words[2 if words[0] == "export" else 1 :]
    return [filled(word) for word in words]


def _start(words: list[str]) -> tuple[Tool, tuple[str, ...], int] | None:
    """The tool that the words start, by the longest start that fits, and where its options
    begin.
    """
    fitting = [
        (tool, start, place)
        for tool in TOOLS
        for start in tool.starts
        if (place := _place(words, start)) is not None
    ]
    return max(fitting, key=lambda found: len(" ".join(found[1])), default=None)


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
            what = f"{mask_secrets(repr(word))} belongs to no option"
            raise ConfigError(what, "the command line", "write --name value")
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
    known = {
        tool: sum(tool.aliases.get(each, each) in tool.options for each in options)
        for tool in TOOLS
    }
    # A tool's own words count: `model` is ms-swift's, `base_model` is Axolotl's.
    own = {
        tool: sum(
            each in tool.options
            and not any(each in other.options for other in TOOLS if other is not tool)
            for each in options
        )
        for tool in TOOLS
    }
    best = max(TOOLS, key=lambda tool: (known[tool], own[tool]))
    if (
        not known[best]
        or sum((known[tool], own[tool]) == (known[best], own[best]) for tool in TOOLS) > 1
    ):
        names = ", ".join(tool.name for tool in TOOLS)
        raise ConfigError(
            "it cannot be told which tool this run is for", source, f"say --from {names}"
        )
    return best
