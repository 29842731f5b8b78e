"""The command line of `launch`: its own options, the kind of run, and the run's unchanged flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from finetune.config.fields import Text, flag, setting
from finetune.config.kinds import KINDS
from finetune.config.options import Options, flags_of, read_options
from finetune.runtime.language import pick_language, speak

DEFAULT_RESTARTS = 3


def _from_environment(unit: str, default: str, description: str) -> Any:
    return setting(
        None,
        group="options",
        unit=unit,
        shown_default=default,
        description=description,
    )


class LaunchOptions(Options):
    usage: ClassVar[str] = (
        f"python -m finetune launch [options] {'|'.join(KINDS)} [flags of the run]"
    )
    summary: ClassVar[str] = (
        "Start a run on this machine's devices, or on one of several nodes, and look after it."
    )
    epilog: ClassVar[str] = (
        "Exit code: the run's (0 done, 1 failed, 2 refused, 3 stopped with a checkpoint, 4 out of"
        " memory after\nthe last restart); 128 + n where signal n came before training began. See"
        " docs/guides/launching.md."
    )
    positional: ClassVar[tuple[str, ...]] = ("kind",)
    aliases: ClassVar[dict[str, str]] = {"nproc_per_node": "nproc"}

    kind: Text = setting(
        group="options", unit="|".join(KINDS), description="What to run; its flags follow."
    )
    nproc: Text | None = _from_environment(
        "N|auto",
        "NPROC_PER_NODE, else auto",
        "Processes on this node; auto: its visible devices, 1 on a CPU.",
    )
    nnodes: int | None = _from_environment("N", "NNODES, Slurm's, else 1", "Nodes.")
    node_rank: int | None = _from_environment("N", "NODE_RANK, Slurm's", "This node, from 0.")
    master_addr: Text | None = _from_environment(
        "HOST", "MASTER_ADDR, Slurm's", "Node 0 as all nodes reach it."
    )
    master_port: int | None = _from_environment(
        "PORT",
        "MASTER_PORT, else 29500",
        "Port of the rendezvous; with one node, the next free of ten if it is taken.",
    )
    max_restarts: int | None = _from_environment(
        "N",
        f"MAX_RESTARTS, else {DEFAULT_RESTARTS}",
        "Attempts after the first, for failures that one can cure.",
    )
    log_dir: Text | None = _from_environment(
        "FOLDER", "FINETUNE_LOG_DIR, else logs", "Where the log goes."
    )
    lang: Literal["en", "zh"] | None = setting(
        None,
        group="output",
        unit="en|zh",
        shown_default="the locale's",
        description="Language of the messages.",
    )
    dry_run: bool = setting(
        False, group="output", description="Show what would be started, and start nothing."
    )

    def problems(self) -> list[tuple[str, str]]:
        if self.kind in KINDS:
            return []
        return [(f"{self.kind!r} is no kind of run", f"write {' or '.join(KINDS)}, then its flags")]


def read_launch_options(arguments: Sequence[str] | None) -> tuple[LaunchOptions, list[str]]:
    """Return the options and the flags of the run; from now on messages are in the language of
    `--lang`.

    Raises:
        ConfigError: as of `read_options`.
        SystemExit: with 0, after the help of the launch.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    valued = {flag(name) for name, found in flags_of(LaunchOptions).items() if not found.is_switch}
    before = ["", *(word.replace("_", "-") for word in given)]
    kinds = [n for n, word in enumerate(given) if word in KINDS and before[n] not in valued]
    end = kinds[0] + 1 if kinds else len(given)
    options = read_options(LaunchOptions, given[:end])
    speak(pick_language(options.lang))
    return options, given[end:]
