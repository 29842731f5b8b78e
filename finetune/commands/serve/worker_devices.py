"""Which devices a server's workers get. Asked in a process of its own, so that the server needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune.errors import ConfigError
from finetune.runtime.device import DEVICE_KINDS

_PROBE = (
    "import json, sys\n"
    "from finetune.runtime.device import choose_device_type, device_count, probe_torch_npu\n"
    "from finetune.errors import FinetuneError\n"
    "try:\n"
    "    probe_torch_npu()\n"
    "    kind = choose_device_type(sys.argv[1])\n"
    "    print(json.dumps({'type': kind, 'count': device_count(kind)}))\n"
    "except FinetuneError as error:\n"
    "    print(json.dumps({'what': error.what, 'where': error.where, 'fix': error.fix}))\n"
)


@dataclass(frozen=True)
class WorkerDevices:
    """Device type, variables that give each worker its own device, and threads of a CPU worker."""

    device_type: str
    environments: Sequence[Mapping[str, str]]
    cpu_threads: int | None


def worker_devices(requested: str, num_gpus: int | None, num_workers: int | None) -> WorkerDevices:
    """Devices for as many workers as are wanted.

    Raises:
        ConfigError: the type is not here, or has fewer devices.
    """
    device_type, count = ("cpu", None) if requested == "cpu" else _probe(requested)
    if device_type == "cpu":
        if num_gpus is not None:
            raise ConfigError(
                f"--num-gpus {num_gpus}, but the device is the CPU", "--num-gpus", "use --num-workers for CPU processes"
            )
        wanted = num_workers or 1
        threads = max(1, (os.cpu_count() or 1) // wanted)
        return WorkerDevices(device_type, [{} for _ in range(wanted)], threads)
    wanted = num_gpus or num_workers or 1
    if count is not None and wanted > count:
        raise ConfigError(
            f"{wanted} workers on {count} {device_type} device(s)", "--num-gpus", f"use at most --num-gpus {count}"
        )
    return WorkerDevices(device_type, [_only(device_type, number) for number in range(wanted)], None)


def _only(device_type: str, number: int) -> dict[str, str]:
    """Variables that leave one device visible: the number-th of those that are visible now."""
    variable = DEVICE_KINDS[device_type].visible_variable
    if not variable:
        return {}
    visible = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    return {variable: visible[number] if number < len(visible) else str(number)}


def _probe(requested: str) -> tuple[str, int | None]:
    result = subprocess.run(
        [sys.executable, "-c", _PROBE, requested], capture_output=True, text=True, timeout=300, check=False
    )
    try:
        said = json.loads(result.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"the devices cannot be asked: {reason}", "import torch", "repair the installation"
        ) from error
    if "what" in said:
        raise ConfigError(**said)
    return said["type"], said["count"]
