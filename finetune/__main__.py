"""`python -m finetune COMMAND`: the table of commands. A command's module is imported when it is
called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from finetune.errors import ExitCode, FinetuneError
from finetune.runtime.terminal import plain_streams

# name: (module with `main(arguments) -> exit code`, what it does)
COMMANDS = {
    "sft": ("finetune.sft", "fine-tune a model on questions and answers"),
    "prepare": (
        "finetune.commands.prepare.command",
        "turn text into token shards and a tokenizer, for pretraining",
    ),
    "pretrain": (
        "finetune.pretrain",
        "train a model from scratch, or go on with one, on plain text",
    ),
    "dpo": ("finetune.dpo", "train on pairs of answers, or on answers with labels"),
    "doctor": (
        "finetune.commands.doctor.command",
        "find what would keep a run from starting on this machine",
    ),
    "launch": (
        "finetune.commands.launch.command",
        "start a run on all devices of the nodes, and look after it",
    ),
    "plan": (
        "finetune.commands.plan.command",
        "say whether a run fits, how long it takes, how to shard it",
    ),
    "chat": ("finetune.commands.chat.command", "talk to a model in the terminal"),
    "serve": ("finetune.commands.serve.command", "serve a model: OpenAI protocol and chat page"),
    "eval": (
        "finetune.commands.evaluate.command",
        "loss and exact answers per difficulty, base against adapter",
    ),
    "merge": (
        "finetune.commands.merge.command",
        "merge an adapter into its base model, tested, with a model card",
    ),
    "verify": (
        "finetune.commands.verify.command",
        "compare a deployed model with the one that was trained",
    ),
    "convert": (
        "finetune.commands.convert.command",
        "make a run file of another tool's run: LLaMA-Factory, TRL ...",
    ),
    "inspect": ("finetune.commands.inspect.command", "show records with the trained tokens marked"),
    "curriculum": (
        "finetune.commands.curriculum.command",
        "show the curriculum's plan before training",
    ),
    "diagnose": ("finetune.commands.diagnose.command", "say why a run failed, from its logs"),
    "monitor": (
        "finetune.commands.monitor.command",
        "watch a run: progress, curves, devices, warnings",
    ),
    "report": ("finetune.commands.report.command", "write one HTML file about a run"),
    "clean": (
        "finetune.commands.clean.command",
        "list, and with --yes end, what runs left behind on this machine",
    ),
    "completion": (
        "finetune.commands.completion.command",
        "print what completes flags in bash, zsh and fish",
    ),
    "checkpoints": (
        "finetune.commands.checkpoints.command",
        "list a run's checkpoints and whether they are valid",
    ),
}
# What other tools call them.
_ELSEWHERE = {
    "train": "sft",
    "export": "merge",
    "infer": "chat",
    "api": "serve",
    "rlhf": "dpo",
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, *rest = arguments
    if name == "--version":
        from finetune.version import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        from finetune.config.fields import nearest

        known = _ELSEWHERE.get(name) or nearest(name, COMMANDS)
        hint = f"; did you mean {known}?" if known else ";"
        if name.startswith("-"):
            hint = ": flags follow their command;"
        print(
            f"[ERROR] unknown command {name!r}{hint} `python -m finetune --help` lists the"
            " commands",
            file=sys.stderr,
        )
        return int(ExitCode.REFUSED)
    with plain_streams():
        from finetune.storage.durable_files import explain_full_disk

        try:
            with explain_full_disk():
                return import_module(COMMANDS[name][0]).main(rest)
        except FinetuneError as error:
            print(f"[ERROR] {error}", file=sys.stderr)
            return int(error.exit_code)


def _help() -> str:
    lines = [f"  {name:<12} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: python -m finetune COMMAND [--help] ...", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
