"""`finetune completion bash|zsh|fish`: a script that completes commands, flags and their choices in
a shell.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import ClassVar, Literal

from finetune.config.fields import setting
from finetune.config.flags import flags_of
from finetune.config.kinds import KINDS
from finetune.config.names import flag
from finetune.config.options import Options, read_options
from finetune.errors import ExitCode

# Flag -> its choices; none where other values are possible.
Flags = Mapping[str, tuple[str, ...]]
# `  --dtype auto|float32  Number format ...`; `  --config FILE...`; behind a wide head the
# description is a line below.
_FLAG_LINE = re.compile(r"^  (--[\w-]+)(?: (\S+))?", re.MULTILINE)


class CompletionOptions(Options):
    """The command line."""

    usage: ClassVar[str] = "python -m finetune completion bash|zsh|fish"
    summary: ClassVar[str] = (
        "Prints what completes `finetune` in a shell. For this shell, or in its start file for all"
        ' of them:\n  bash, zsh  eval "$(finetune completion bash)"\n  fish       finetune'
        " completion fish | source"
    )
    positional: ClassVar[tuple[str, ...]] = ("shell",)

    shell: Literal["bash", "zsh", "fish"] = setting(
        group="options", unit="bash|zsh|fish", description="Which shell."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    shell = read_options(CompletionOptions, argv).shell
    sys.stdout.write({"bash": bash, "zsh": zsh, "fish": fish}[shell](flags_of_commands()))
    return int(ExitCode.DONE)


def flags_of_commands() -> dict[str, Flags]:
    """The flags of every command, as its help lists them; with those of runs where it takes
    them.
    """
    # Not imported above: it imports commands.
    table: Mapping[str, tuple[str, str]] = import_module("finetune.__main__").COMMANDS
    of_runs = {
        flag(name): found.choices
        for kind in KINDS.values()
        for name, found in flags_of(kind.config_class).items()
    }
    found = {}
    for command, (module, _what) in table.items():
        said = io.StringIO()
        with redirect_stdout(said), suppress(SystemExit):
            import_module(module).main(["--help"])
        own = {name: _choices(value) for name, value in _FLAG_LINE.findall(said.getvalue())}
        takes_runs = re.search(r"flags\s+of\s+(training|the\s+run)", said.getvalue(), re.IGNORECASE)
        own = {**own, "--help": ()}
        found[command] = {**of_runs, **own} if takes_runs and command not in KINDS else own
    return found


def _choices(value: str) -> tuple[str, ...]:
    words = tuple(value.strip("[]").split("|"))
    return (
        words
        if len(words) > 1 and all(re.fullmatch(r"[a-z0-9_-]+", word) for word in words)
        else ()
    )


def bash(commands: Mapping[str, Flags]) -> str:
    choices, flags = [], []
    for command, found in commands.items():
        choices += [
            f'    "{command} {name}") words="{" ".join(words)}" ;;'
            for name, words in found.items()
            if words
        ]
        flags.append(f'      {command}) words="{" ".join(found)}" ;;')
    return "\n".join(
        [
            "_finetune() {",
            (
                '  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"'
                ' words=""'
            ),
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    words="{" ".join(commands)}"',
            "  else",
            '    case "${COMP_WORDS[1]} $before" in',
            *choices,
            "    esac",
            "  fi",
            '  case "$current" in -*)',
            '    case "${COMP_WORDS[1]}" in',
            *flags,
            "    esac ;;",
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _finetune finetune",
            "",
        ]
    )


def zsh(commands: Mapping[str, Flags]) -> str:
    return "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + bash(commands)


def fish(commands: Mapping[str, Flags]) -> str:
    lines = [f"complete -c finetune -n __fish_use_subcommand -f -a '{' '.join(commands)}'"]
    for command, found in commands.items():
        for name, words in found.items():
            given = f" -x -a '{' '.join(words)}'" if words else ""
            seen = f"__fish_seen_subcommand_from {command}"
            lines.append(f"complete -c finetune -n '{seen}' -l {name.removeprefix('--')}{given}")
    return "\n".join([*lines, ""])
