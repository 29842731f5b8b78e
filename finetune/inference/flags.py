"""Flags that `chat` and `serve` share. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from finetune.inference.sampling import Sampling
from finetune.runtime.device import DEVICE_KINDS


def make_parser(
    command: str, description: str, epilog: str | None = None, *, several_adapters: bool = False
) -> argparse.ArgumentParser:
    """A parser with the flags that say which model, and where it runs."""
    parser = argparse.ArgumentParser(
        prog=f"python -m finetune {command}", description=description, epilog=epilog, allow_abbrev=False
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", metavar="FOLDER|ID", help="a model, the output or a checkpoint of a run, an adapter, or a hub id"
    )
    several: dict[str, Any] = {"nargs": "+", "action": "extend"} if several_adapters else {}
    model.add_argument(
        "--adapter", metavar="FOLDER|ID", help="a LoRA adapter for --model; without --model on its base", **several
    )
    model.add_argument("--template", metavar="NAME|FILE", help="chat template, where the model has none of its own")
    model.add_argument(
        "--device-type", default="auto", choices=("auto", *DEVICE_KINDS), help="default: auto, the best there is"
    )
    model.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16"), help="default: auto"
    )
    model.add_argument("--context-tokens", type=int, metavar="N", help="most tokens of a conversation with its answer")
    model.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    return parser


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for `Sampling`; what is not given is as the model's own settings say."""
    sampling = parser.add_argument_group("sampling", "what is not given is as the model's generation_config.json says")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0 takes the likeliest token always")
    sampling.add_argument("--top-p", type=float, metavar="X", help="draw from the likeliest tokens with this share")
    sampling.add_argument("--top-k", type=int, metavar="N", help="draw from this many likeliest tokens; 0 for all")
    sampling.add_argument("--repetition-penalty", type=float, metavar="X", help="1 for none")
    sampling.add_argument("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer")
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")


def sampling_changes(options: argparse.Namespace) -> dict[str, Any]:
    """The given ones of the sampling flags, checked.

    Raises:
        ConfigError: a value out of its range.
    """
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens", "seed")
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    Sampling(**changes)
    return changes


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """Flags may be written with underscores: `--max_new_tokens=5` is `--max-new-tokens=5`."""
    words = []
    for word in arguments:
        name, equals, value = word.partition("=")
        words.append(name.replace("_", "-") + equals + value if name.startswith("--") else word)
    return words
