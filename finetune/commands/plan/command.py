"""`python -m finetune plan`: whether a run fits the machines it is meant for, and how long a step takes, before either
is booked. Computes from the configuration and the model's config.json; `--check RUN` compares with a run that was made.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.config.kinds import RunKind, kind_names, kind_of_arguments, run_kind
from finetune.config.names import flag
from finetune.config.resolution import resolve
from finetune.errors import ConfigError, ExitCode
from finetune.planning.inputs import Cluster, shape_for
from finetune.runtime.device import peak_flops
from finetune.runtime.language import pick_language

USAGE = """usage: python -m finetune plan [sft|pretrain] [--config FILE...] [FLAGS OF TRAINING] [THE MACHINES]
       python -m finetune plan --check RUN [THE MACHINES]

Says what a run needs of each device and each host, term by term, how long a step takes, the largest rows that fit, and
how to shard and offload. Needs no weights, no device and no network; writes nothing.

  --nodes N                 machines (default 1)
  --devices-per-node N      devices of each (default: those of this machine, else 1)
  --device-name NAME        e.g. 910B3, "H100 PCIe"; decides the peak and, where auto, the device type
  --device-memory SIZE      of one device, e.g. 64GiB (default: this machine's, where it has some)
  --host-memory SIZE        of one node, e.g. 512GiB (default: this machine's, where --devices-per-node is not given)
  --peak-tflops X           of one device, where the name is not in the table
  --efficiency X            share of the peak that is reached (default 0.4)
  --host-bandwidth SIZE     bytes a second between one device and its host (default: a copy measured here)
  --network-bandwidth SIZE  bytes a second that one device sends (default: unknown between devices)
  --model-config FILE       a config.json instead of the model's own
  --kind sft|pretrain       which command the configuration is for (default: by its names)
  --check RUN               compare with what that run folder logged
  --json                    one JSON object
  --lang en|zh              language (default: the locale's)
  The other flags are those of `python -m finetune sft --help` or `pretrain --help`.

Exit code: 0 it fits (or no memory was given), 1 it does not, or a --check missed by more than 15%; 2 wrong input.
"""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Raises:
        FinetuneError: the command line, configuration or model cannot be planned for; the caller prints it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        sys.stdout.write(USAGE)
        return int(ExitCode.DONE)
    options, words = _options(arguments)
    language = pick_language(options.lang)
    if options.check is not None:
        from finetune.commands.plan.check import check_run

        _refuse_words(words)
        checked = check_run(options.check, options.model_config)
        _say(checked.to_json() if options.json else checked.text(language))
        return int(ExitCode.DONE if checked.agrees else ExitCode.FAILED)
    from finetune.planning.plan import make_plan

    kind = run_kind(options.kind) if options.kind else kind_of_arguments(words)
    cluster = cluster_of(options)
    words = [*_unsaid(words, kind, options.model_config), *words]
    config = resolve(words, world_size=cluster.devices, model_class=kind.config_class).config
    if config.device_type != "auto":
        cluster = replace(cluster, device_type=config.device_type)
    plan = make_plan(config, shape_for(config, options.model_config), cluster, options.efficiency)
    _say(plan.to_json(language) if options.json else plan.text(language))
    return int(ExitCode.FAILED if plan.fits is False else ExitCode.DONE)


def _unsaid(words: Sequence[str], kind: RunKind, model_config: Path | None) -> list[str]:
    """Settings that a run must have and a plan can do without, where only flags describe the run."""
    parsed = kind.parse(words)
    if parsed.config_files or parsed.problems:
        return []
    required = [name for name, info in kind.config_class.model_fields.items() if info.is_required()]
    names = [name for name in required if name != "model" or model_config is not None]
    return [word for name in names if name not in parsed.values for word in (flag(name), "not-said")]


def _say(what: dict[str, Any] | str) -> None:
    text = what if isinstance(what, str) else json.dumps(what, ensure_ascii=False, indent=2)
    sys.stdout.write(text.rstrip("\n") + "\n")


def _refuse_words(words: Sequence[str]) -> None:
    if words:
        raise ConfigError(
            f"--check takes the run's own settings, and {words[0]} was given",
            "the command line",
            "leave it out; --model-config FILE is for a model that has moved",
        )


# ---------------------------------------------------------------- the machines


def bytes_of(text: str, where: str) -> int:
    """`64GiB`, `512 GB`, `1.5TiB` or plain bytes as a number.

    Raises:
        ConfigError: not a size above 0.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)(?:/s)?\s*", text)
    unit = UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None or float(match.group(1)) <= 0:
        raise ConfigError(f"{text!r} is not a size above 0", where, "write for example 64GiB, 512GB or 25GB")
    return int(float(match.group(1)) * unit)


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The planner's own options, and the words that are left for the training command."""
    kind = arguments[0] if arguments[0] in kind_names() else None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--kind", choices=kind_names(), default=kind)
    parser.add_argument("--json", action="store_true")
    for name in ("lang", "device-name", "device-memory", "host-memory", "host-bandwidth", "network-bandwidth"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    parser.add_argument("--nodes", "--nnodes", type=int, default=1)
    parser.add_argument("--devices-per-node", "--devices_per_node", "--nproc-per-node", type=int)
    parser.add_argument("--peak-tflops", "--peak_tflops", type=float)
    parser.add_argument("--efficiency", type=float, default=0.4)
    parser.add_argument("--model-config", "--model_config", type=Path)
    parser.add_argument("--check", type=Path)
    try:
        options, words = parser.parse_known_args(arguments[1:] if kind else arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}", "the command line", "see plan --help") from error
    for name in ("nodes", "devices_per_node", "peak_tflops", "efficiency"):
        value = getattr(options, name)
        if value is not None and not (value > 0 and (name != "efficiency" or value <= 1)):
            rule = "above 0 and at most 1" if name == "efficiency" else "above 0"
            raise ConfigError(f"{name} is {value}", flag(name), f"give a number {rule}")
    return options, words


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The machines that the options describe; what they leave open is taken from this machine where it is meant."""
    here = options.devices_per_node is None
    type_here, name_here, count_here, memory_here = _devices_here() if here else ("", "", 0, None)
    device = options.device_name or name_here
    kind = _type_of(device) if options.device_name else type_here or ("cpu" if here else "cuda")
    given = {
        name: bytes_of(value, flag(name))
        for name in ("device_memory", "host_memory", "host_bandwidth", "network_bandwidth")
        if (value := getattr(options, name)) is not None
    }
    host_memory = given.get("host_memory")
    if host_memory is None and here:
        from finetune.runtime.host import HostMeter

        host_memory = HostMeter().look().memory_total_bytes
    return Cluster(
        nodes=options.nodes,
        devices_per_node=options.devices_per_node or count_here or 1,
        device_type=kind,
        device_name=device,
        device_memory_bytes=given.get("device_memory", memory_here),
        host_memory_bytes=host_memory,
        peak_flops=options.peak_tflops * 1e12 if options.peak_tflops else peak_flops(device),
        network_bytes_per_second=given.get("network_bandwidth"),
        host_bytes_per_second=given.get("host_bandwidth"),
    )


def _type_of(name: str) -> str:
    words = name.lower()
    if "cpu" in words.split():
        return "cpu"
    return "npu" if "910" in words or "ascend" in words else "cuda"


def _devices_here() -> tuple[str, str, int, int | None]:
    """(type, name, count, memory in bytes) of this machine's accelerators; ("", "", 0, None) where there are none."""
    from finetune.runtime.smi import read_devices

    for report in read_devices():
        if report.devices:
            first = report.devices[0]
            return report.device_type, first.name or "", len(report.devices), first.total_bytes
    return "", "", 0, None
