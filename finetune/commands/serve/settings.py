"""The settings and flags of `serve`. Needs no torch."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.commands.serve.worker_devices import worker_devices
from finetune.errors import ConfigError
from finetune.inference.flags import make_parser

TOKEN_VARIABLE = "FINETUNE_SERVE_TOKEN"
SHORTEST_TOKEN = 16
_COUNTS = ("max_batch", "max_queue", "max_new_tokens", "max_body_bytes", "max_connections", "num_gpus", "num_workers")
_SECONDS = ("head_seconds", "body_seconds", "queue_seconds", "request_seconds")


@dataclass(frozen=True)
class ServeSettings:
    """One server.

    Attributes:
        load: arguments of `load_for_generation`.
        environments: variables of each worker.
        host, port: where to listen; port 0: a free one.
        allowed_hosts: names that requests may use for this server, besides loopback's and `host`.
        token: what clients must send; None on loopback only.
        worker_command: how a worker is started; None: the real one.
    """

    load: Mapping[str, Any]
    environments: Sequence[Mapping[str, str]]
    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    max_batch: int = 16
    max_queue: int = 64
    max_new_tokens: int = 2048
    max_body_bytes: int = 1 << 20
    max_connections: int = 512
    head_seconds: float = 10.0
    body_seconds: float = 10.0
    queue_seconds: float = 60.0
    request_seconds: float = 600.0
    worker_command: tuple[str, ...] | None = None

    @property
    def is_loopback(self) -> bool:
        return _is_loopback(self.host)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_serve_parser() -> Any:
    parser = make_parser(
        "serve",
        "Serve a model with the OpenAI protocol and a chat page.",
        f"The token that clients must send comes from --token-file or the variable {TOKEN_VARIABLE}, never from the "
        "command line. On loopback none is needed. Exit code: 0 ended by a signal; 1 failed; 2 refused.",
    )
    place = parser.add_argument_group("where")
    place.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; any other address needs a token")
    place.add_argument("--port", type=int, default=8000, help="default: 8000; 0: a free one")
    place.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name that this server is reached by"
    )
    place.add_argument("--token-file", metavar="FILE", help="file with the token that clients must send")
    workers = parser.add_argument_group("workers")
    workers.add_argument("--num-gpus", type=int, metavar="N", help="devices, a worker on each; default: 1")
    workers.add_argument("--num-workers", type=int, metavar="N", help="the same for a CPU: processes; default: 1")
    workers.add_argument("--max-batch", type=int, default=16, metavar="N", help="answers that a worker writes at once")
    limits = parser.add_argument_group("limits")
    defaults = ServeSettings({}, ())
    limits.add_argument("--max-queue", type=int, default=defaults.max_queue, metavar="N", help="requests that may wait")
    limits.add_argument(
        "--max-new-tokens", type=int, default=defaults.max_new_tokens, metavar="N", help="most tokens of any answer"
    )
    limits.add_argument("--max-body-bytes", type=int, default=defaults.max_body_bytes, metavar="N")
    limits.add_argument("--max-connections", type=int, default=defaults.max_connections, metavar="N")
    for name, meaning in (
        ("head_seconds", "for a request's head to arrive"),
        ("body_seconds", "for its body"),
        ("queue_seconds", "to wait for room"),
        ("request_seconds", "for the whole answer"),
    ):
        flag = "--" + name.replace("_", "-")
        limits.add_argument(flag, type=float, default=getattr(defaults, name), metavar="X", help=meaning)
    return parser


def serve_settings(options: Any) -> ServeSettings:
    """Settings from the parsed flags.

    Raises:
        ConfigError: a value out of its range, no model, no such device, or a token that cannot be used.
    """
    for name in _COUNTS:
        least = 0 if name == "max_queue" else 1
        _check(options, name, lambda value, least=least: value >= least, f"{least} or more")
    # The system would take it modulo 65,536.
    _check(options, "port", lambda value: 0 <= value < 1 << 16, "a port from 1 to 65535, or 0 for a free one")
    for name in _SECONDS:
        _check(options, name, lambda value: 0 < value < 1e6, "above 0")
    if options.num_gpus is not None and options.num_workers is not None:
        raise ConfigError(
            "--num-gpus and --num-workers are both given",
            "command line",
            "--num-gpus is for devices, --num-workers for CPUs",
        )
    devices = worker_devices(options.device_type, options.num_gpus, options.num_workers)
    load = {
        "model": options.model,
        "adapter": options.adapter,
        "device_type": devices.device_type,
        "dtype": options.dtype,
        "template": options.template,
        "max_batch": options.max_batch,
        "context_tokens": options.context_tokens,
        "cpu_threads": devices.cpu_threads,
        "trust_remote_code": options.trust_remote_code,
    }
    if options.model is None and options.adapter is None:
        raise ConfigError("there is no model", "--model", "give --model a folder, a run's output, or a hub id")
    return ServeSettings(
        load,
        devices.environments,
        host=options.host,
        port=options.port,
        allowed_hosts=tuple(options.allow_host),
        token=read_token(options.token_file),
        max_batch=options.max_batch,
        max_queue=options.max_queue,
        max_new_tokens=options.max_new_tokens,
        max_body_bytes=options.max_body_bytes,
        max_connections=options.max_connections,
        head_seconds=options.head_seconds,
        body_seconds=options.body_seconds,
        queue_seconds=options.queue_seconds,
        request_seconds=options.request_seconds,
    )


def _check(options: Any, name: str, fine: Any, rule: str) -> None:
    value, flag = getattr(options, name), "--" + name.replace("_", "-")
    if value is not None and not fine(value):
        raise ConfigError(f"{flag} is {value}", flag, f"use {rule}")


def read_token(file: str | None) -> str | None:
    """The token from its file or variable; the variable is taken out of the environment, so that workers have it not.

    Raises:
        ConfigError: unreadable, too short, or with white space inside.
    """
    variable = os.environ.pop(TOKEN_VARIABLE, None)
    where = TOKEN_VARIABLE
    token = variable
    if file is not None:
        where = file
        try:
            token = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token cannot be read: {error}", file, "give a file that holds the token") from error
    if token is None:
        return None
    token = token.strip()
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token must be {SHORTEST_TOKEN} printable ASCII characters or more, without spaces",
            where,
            'make one: python -c "import secrets; print(secrets.token_urlsafe(32))"',
        )
    return token
