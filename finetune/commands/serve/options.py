"""The options of `serve`, and what follows from them: the token, and the device of each worker.
Needs no torch.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from finetune.config.fields import Many, Text, setting
from finetune.errors import ConfigError
from finetune.inference.options import Count, ModelOptions
from finetune.runtime.device import DEVICE_KINDS
from finetune.runtime.host import usable_cores

TOKEN_VARIABLE = "FINETUNE_SERVE_TOKEN"
SHORTEST_TOKEN = 16
_PROBE = (
    "import json, sys\n"
    "from finetune.runtime.device import choose_device_type, device_count\n"
    "from finetune.runtime.launch_environment import probe_torch_npu\n"
    "from finetune.errors import FinetuneError\n"
    "try:\n"
    "    probe_torch_npu()\n"
    "    kind = choose_device_type(sys.argv[1])\n"
    "    print(json.dumps({'type': kind, 'count': device_count(kind)}))\n"
    "except FinetuneError as error:\n"
    "    print(json.dumps({'what': error.what, 'where': error.where, 'fix': error.fix}))\n"
)


def _seconds(default: float, meaning: str) -> Any:
    return setting(
        default, gt=0, lt=1e6, group="limits", unit="seconds", description=f"For {meaning}."
    )


class ServeOptions(ModelOptions):
    usage: ClassVar[str] = "python -m finetune serve --model FOLDER|ID [--flag value ...]"
    summary: ClassVar[str] = "Serve a model with the OpenAI protocol and a chat page."
    epilog: ClassVar[str] = (
        "The token that clients must send comes from --token-file or the variable"
        f" {TOKEN_VARIABLE}, never from the\ncommand line. On loopback none is needed. Exit code: 0"
        " ended by a signal; 1 failed; 2 refused."
    )
    groups: ClassVar[tuple[str, ...]] = ("model", "address", "workers", "limits")

    host: Text = setting(
        "127.0.0.1", group="address", description="Any other address needs a token."
    )
    port: int = setting(
        8000, ge=0, lt=1 << 16, group="address", unit="N", description="0: a free one."
    )
    allow_host: Annotated[tuple[Text, ...], Many] = setting(
        (), group="address", unit="NAME...", description="Names that this server is reached by."
    )
    token_file: Text | None = setting(
        None,
        group="address",
        unit="FILE",
        description="File with the token that clients must send.",
    )
    num_gpus: Count | None = setting(
        None, group="workers", unit="N", shown_default="1", description="Devices, a worker on each."
    )
    num_workers: Count | None = setting(
        None,
        group="workers",
        unit="N",
        shown_default="1",
        description="The same for a CPU: processes.",
    )
    max_batch: Count = setting(
        16, group="workers", unit="N", description="Answers that a worker writes at once."
    )
    max_queue: int = setting(
        64, ge=0, group="limits", unit="N", description="Requests that may wait."
    )
    max_new_tokens: Count = setting(
        2048, group="limits", unit="N", description="Most tokens of any answer."
    )
    max_body_bytes: Count = setting(
        1 << 20, group="limits", unit="N", description="Most bytes of a request's body."
    )
    max_connections: Count = setting(
        512, group="limits", unit="N", description="Most connections at a time."
    )
    head_seconds: float = _seconds(10.0, "a request's head to arrive")
    body_seconds: float = _seconds(10.0, "its body")
    write_seconds: float = _seconds(20.0, "a client to read what was written for it")
    worker_seconds: float = _seconds(30.0, "a sign of life from a worker")
    queue_seconds: float = _seconds(60.0, "room at a worker")
    request_seconds: float = _seconds(600.0, "the whole answer")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def problems(self) -> list[tuple[str, str]]:
        found = super().problems()
        if self.num_gpus is not None and self.num_workers is not None:
            what = "--num-gpus and --num-workers are both given"
            found.append((what, "--num-gpus is for devices, --num-workers for CPUs"))
        return found


@dataclass(frozen=True)
class ServeSettings:
    """One server."""

    options: ServeOptions
    load: Mapping[str, Any]  # arguments of `load_for_generation`
    environments: Sequence[Mapping[str, str]]  # variables of each worker
    # what clients must send; None on loopback only
    token: str | None = field(default=None, repr=False)
    worker_command: tuple[str, ...] | None = None  # how a worker is started; None: the real one


def serve_settings(options: ServeOptions) -> ServeSettings:
    """Raises ConfigError: no such device, or a token that cannot be used."""
    device_type, environments, threads = worker_devices(
        options.device_type, options.num_gpus, options.num_workers
    )
    load = {
        **options.loading(),
        "device_type": device_type,
        "max_batch": options.max_batch,
        "cpu_threads": threads,
    }
    return ServeSettings(options, load, environments, read_token(options.token_file))


def read_token(file: str | None) -> str | None:
    """Return the token from its file or variable, and remove the variable from the environment, so
    that workers do not inherit it.

    Raises:
        ConfigError: unreadable, too short, or with white space inside.
    """
    token, where = os.environ.pop(TOKEN_VARIABLE, None), TOKEN_VARIABLE
    if file is not None:
        where = file
        try:
            token = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the token cannot be read: {error}", file, "give a file that holds the token"
            ) from error
    if token is None:
        return None
    token = token.strip()
    if (
        len(token) < SHORTEST_TOKEN
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise ConfigError(
            f"the token must be {SHORTEST_TOKEN} printable ASCII characters or more, without"
            " spaces",
            where,
            'make one: python -c "import secrets; print(secrets.token_urlsafe(32))"',
        )
    return token


def worker_devices(
    requested: str, num_gpus: int | None, num_workers: int | None
) -> tuple[str, list[dict[str, str]], int | None]:
    """Return the device type, the variables that give each worker its own device, and the threads
    of a CPU worker.

    A subprocess counts the devices, so that the server does not load torch.

    Raises:
        ConfigError: the device type is not available, or has fewer devices.
    """
    device_type, count = ("cpu", None) if requested == "cpu" else _probe(requested)
    if device_type == "cpu":
        if num_gpus is not None:
            raise ConfigError(
                f"--num-gpus {num_gpus}, but the device is the CPU",
                "--num-gpus",
                "use --num-workers for CPU processes",
            )
        wanted = num_workers or 1
        threads = max(1, usable_cores() // wanted)
        return device_type, [{} for _ in range(wanted)], threads
    wanted = num_gpus or num_workers or 1
    if count is not None and wanted > count:
        raise ConfigError(
            f"{wanted} workers on {count} {device_type} device(s)",
            "--num-gpus",
            f"use at most --num-gpus {count}",
        )
    return device_type, [_only(device_type, number) for number in range(wanted)], None


def _only(device_type: str, number: int) -> dict[str, str]:
    """Return the variables that leave one device visible, by its index among the visible ones."""
    variable = DEVICE_KINDS[device_type].visible_variable
    if not variable:
        return {}
    visible = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    return {variable: visible[number] if number < len(visible) else str(number)}


def _probe(requested: str) -> tuple[str, int | None]:
    result = subprocess.run(
        [sys.executable, "-c", _PROBE, requested],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    try:
        found = json.loads(result.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"the devices cannot be asked: {reason}", "import torch", "repair the installation"
        ) from error
    if "what" in found:
        raise ConfigError(**found)
    return found["type"], found["count"]
