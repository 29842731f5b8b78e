"""`finetune completion bash|zsh|fish`: a script that completes commands, flags and their choices in
a shell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import ClassVar, Literal

from finetune.config.fields import Settings, flag, setting
from finetune.config.kinds import KINDS
from finetune.config.options import Options, read_options, typed_flags
from finetune.errors import ExitCode

# Flag -> its choices; none if other values are possible.
Flags = Mapping[str, tuple[str, ...]]


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
    """Print the script."""
    shell = read_options(CompletionOptions, argv).shell
    sys.stdout.write(
        {
            "bash": bash,
            "zsh": zsh,
            "fish": fish,
        }[shell](flags_of_commands())
    )
    return int(ExitCode.DONE)


def flags_of_commands() -> dict[str, Flags]:
    """Return the flags of every command, with those of runs if it takes them."""
    # Not imported above: it imports commands.
    table: Mapping[str, tuple[str, str]] = import_module("finetune.__main__").COMMANDS
    for module, _what in table.values():
        import_module(module)
    found = {name: _choices(kind.config_class) for name, kind in KINDS.items()}
    of_runs = {name: words for flags in found.values() for name, words in flags.items()}
    for options in _classes_of_options(Options):
        command = options.usage.split()[3]  # python -m finetune NAME ...
        takes_runs = "[flags of" in options.usage.lower()
        found[command] = {**(of_runs if takes_runs else {}), **_choices(options)}
    return {command: found[command] for command in table}


def _classes_of_options(base: type[Options]) -> Iterator[type[Options]]:
    """Yield the classes of options that belong to a command."""
    for found in base.__subclasses__():
        if hasattr(found, "usage"):
            yield found
        yield from _classes_of_options(found)


def _choices(settings: type[Settings]) -> Flags:
    choices = {}
    for name, found in typed_flags(settings).items():
        stands_alone = found.kinds == {"boolean"} and found.default != "true"
        words = found.switch_words if found.is_switch else found.choices
        choices[flag(name)] = () if stands_alone else words
    return choices


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
