"""A run of another tool: options by name, from a YAML or JSON file, or from a command line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from finetune.commands.convert import axolotl, llama_factory, llama_factory_v1, ms_swift, trl
from finetune.commands.convert.accelerate_file import read_accelerate
from finetune.commands.convert.draft import Tool
from finetune.commands.convert.shell import Shell
from finetune.config.files import read_file, similar_files
from finetune.errors import ConfigError
from finetune.plain_text import mask_secrets

TOOLS: tuple[Tool, ...] = (
    llama_factory.TOOL,
    trl.TOOL,
    axolotl.TOOL,
    ms_swift.TOOL,
    llama_factory_v1.TOOL,
)
# Launcher options: processes in the run, processes per node, nodes.
_COUNTS = (("num_processes",), ("nproc_per_node", "num_gpus"), ("nnodes", "num_nodes"))
_FILES = (".yaml", ".yml", ".json")


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
    """Read the run of a file or a command line.

    Args:
        given: a file, a command line, or - for one on standard input.
        tool_name: None: the tool is recognized.

    Raises:
        ConfigError: it cannot be read, or belongs to no tool or to several.
    """
    path = Path(given)
    # Path.is_file raises where a command is longer than a name may be
    is_file = os.path.isfile(given)
    source = path.name if is_file else "a command line"
    if path.suffix.lower() in _FILES and (is_file or " " not in given):
        options, source = read_file(path), path.name
        tool, processes = None, _processes(_as_words(options), {})
    else:
        options, tool, processes = _read_command(_command_text(given, path))
    if tool_name is not None:
        tool = next(each for each in TOOLS if each.name == tool_name)
    if "distributed_type" in options and "compute_environment" in options:
        raise ConfigError(
            "this is a configuration of accelerate's launcher, not a run",
            source,
            "convert the command that names it with --config_file",
        )
    tool = tool or _recognize(options, source)
    return Run(tool, options, source, processes)


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
    """Return the options of the command in a shell script that trains, the tool that it names, and
    its number of processes.
    """
    shell = Shell(text.replace("\r\n", "\n"))
    words: list[str] = []
    scripts: list[tuple[list[str], int]] = []
    other: ConfigError | None = None
    for command in _readable_commands(shell):
        words += command
        if found := _start(command):
            tool, start, place = found
            options, processes = _launched(command, place, shell, tool, start)
            return options, tool, processes
        _refuse_megatron(command)
        other = other or _other_command(command)
        script = next((n for n, word in enumerate(command) if word.endswith(".py")), None)
        if script is not None and any(word.startswith("--") for word in command[script:]):
            scripts.append((command, script + 1))
    if other is not None:
        raise other
    if len(scripts) == 1:
        options, processes = _launched(*scripts[0], shell)
        return options, None, processes
    first = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    options = _options(words[first:])
    return options, None, _processes(_as_words(options), {})


def _launched(
    command: list[str], place: int, shell: Shell, tool: Tool | None = None, start: str = ""
) -> tuple[dict[str, Any], int | None]:
    """Return the options of a command, those of its launcher among them, and its processes.

    Args:
        place: where the options of the program begin.
        tool: whose command it is; None: a script of the user.
        start: how the tool's command begins.
    """
    # Behind -- a launcher's own options begin.
    own = command[place:]
    options = _options(own[: own.index("--")] if "--" in own else own)
    before = command[: place - len(start.split())]
    launcher = read_accelerate(before)
    counts = _as_words({"num_processes": launcher.pop("num_processes", "")})
    processes = _processes([*counts, *before, *_as_words(options), *own], shell.variables)
    if tool is None:
        return launcher | options, processes
    switches = {
        option: shell.variables[name] in ("1", "true", "True")
        for name, option in tool.environment.items()
        if name in shell.variables
    }
    return {
        **tool.starts[start],
        **launcher,
        **switches,
        **options,
    }, processes


def _readable_commands(shell: Shell) -> Iterator[list[str]]:
    """Yield the commands of a script, also if a line that is not ours has an apostrophe.

    Raises:
        ConfigError: such a line has options, and no command before or behind it trains.
    """
    unread = None
    while True:
        try:
            yield from shell.commands()
            break
        except ConfigError as error:
            start = shell.text.rfind("\n", 0, shell.place) + 1
            if "--" in shell.text[start:].partition("\n")[0] and unread is None:
                unread = error
            shell.skip_line()
    if unread is not None:
        raise unread


def _refuse_megatron(words: list[str]) -> None:
    for name, following in pairwise(words):
        if Path(name).name == "megatron" and re.fullmatch("sft|pt|rlhf", following):
            raise ConfigError(
                f"megatron {following} has options of its own, which are not read: lr,"
                " lr_warmup_fraction, min_lr, micro_batch_size and global_batch_size, for instance",
                "the command line",
                f"write the run as swift {following}, with learning_rate, warmup_ratio,"
                " per_device_train_batch_size and gradient_accumulation_steps",
            )


def _other_command(words: list[str]) -> ConfigError | None:
    """Return an error for a tool's command that does not train, whose options mean other things."""
    for name, following in pairwise(words):
        program = Path(name).name
        starts = [
            start for tool in TOOLS for start in tool.starts if start.startswith(f"{program} ")
        ]
        if starts and re.fullmatch(r"[a-z][a-z-]*", following):
            return ConfigError(
                f"{program} {following} does not train, or is not read",
                "the command line",
                f"convert one of {', '.join(starts)}",
            )
    return None


def _start(words: list[str]) -> tuple[Tool, str, int] | None:
    """Return the tool that the words start, by the longest start that fits, and where its options
    begin.
    """
    line = "\0".join([*words, ""])
    fitting = []
    for tool in TOOLS:
        for start in tool.starts:
            expected = re.escape(start.replace(" ", "\0"))
            if found := re.search(rf"(?:^|[\0/]){expected}\0", line):
                fitting.append((tool, start, line.count("\0", 0, found.end())))
    return max(fitting, key=lambda each: len(each[1]), default=None)


def _options(words: list[str]) -> dict[str, Any]:
    """Read `--name value...`, `--name=value`, `name=value`, and a file of options in front."""
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
    """Return a word as the number or truth that it writes; else itself."""
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


def _recognize(options: Mapping[str, Any], source: str) -> Tool:
    """Return the tool that knows most of the options; of equals, the one that alone knows most."""

    def knows(tool: Tool) -> tuple[int, int]:
        others = set().union(*(other.options for other in TOOLS if other is not tool))
        known = [name for name in options if tool.aliases.get(name, name) in tool.options]
        # `model` is ms-swift's, `base_model` is Axolotl's.
        return len(known), len(tool.options.intersection(options) - others)

    ranks = [knows(tool) for tool in TOOLS]
    best = max(ranks)
    if best[0] == 0 or ranks.count(best) > 1:
        names = ", ".join(tool.name for tool in TOOLS)
        raise ConfigError(
            "it cannot be told which tool this run is for", source, f"say --from {names}"
        )
    return TOOLS[ranks.index(best)]


def _as_words(options: Mapping[str, Any]) -> list[str]:
    """Write options as words of a command line."""
    return [f"--{name}={value}" for name, value in options.items()]


def _processes(words: Iterable[str], variables: Mapping[str, str]) -> int | None:
    """Return the number of processes that a command line and the environment request.

    The launcher's options are in front of the tool's name, or after it if the tool passes them on.

    Returns:
        None if no number is requested.
    """
    given = {name: variables.get(name.upper(), "") for name in ("nproc_per_node", "nnodes")}
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        given[name.lstrip("-").replace("-", "_").lower()] = value if equals else following
    counts = []
    for names in _COUNTS:
        numbers = (given[name] for name in names if name in given)
        counts.append(next((int(number) for number in numbers if number.isdecimal()), 0))
    processes, of_a_node, nodes = counts
    return processes or of_a_node * (nodes or 1) or None
