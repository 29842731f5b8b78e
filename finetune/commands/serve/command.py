"""`python -m finetune serve`: a model behind the OpenAI protocol, with a chat page."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from finetune.commands.serve.options import (
    SHORTEST_TOKEN,
    TOKEN_VARIABLE,
    ServeOptions,
    ServeSettings,
    serve_settings,
)
from finetune.config.options import read_options
from finetune.errors import INTERRUPTED, ConfigError, ExitCode

if TYPE_CHECKING:
    import uvicorn

    from finetune.commands.serve.answers import Metrics
    from finetune.commands.serve.guard import Guard
    from finetune.commands.serve.workers import WorkerPool

logger = logging.getLogger("finetune")

GRACE_SECONDS = 30
LISTEN_BACKLOG = 1024
# by itself the system would keep megabytes for a client that does not read
SEND_BUFFER_BYTES = 128 << 10


def run_server(settings: ServeSettings) -> int:
    """Serve until a signal. 0: ended in order; 1: all workers failed.

    Raises:
        ConfigError: the address is taken, there is no token where one is needed, or the model
            cannot be loaded.
    """
    options = settings.options
    if settings.token is None and (not options.is_loopback or options.allow_host):
        # A name that others use leads here through a proxy, whatever address is listened on.
        flag, reached_by = (
            ("--allow-host", options.allow_host[0])
            if options.is_loopback
            else ("--host", options.host)
        )
        raise ConfigError(
            f"{reached_by} can be reached by others, and there is no token",
            flag,
            f"write a token of {SHORTEST_TOKEN} characters or more to a file and give --token-file"
            f" FILE, or set {TOKEN_VARIABLE}; or leave {flag} out",
        )
    listener = _bind(options.host, options.port)
    try:
        return asyncio.run(_serve(settings, listener))
    except KeyboardInterrupt:  # before uvicorn listens for it
        return INTERRUPTED
    finally:
        listener.close()


async def _serve(settings: ServeSettings, listener: socket.socket) -> int:
    from finetune.commands.serve.answers import Metrics
    from finetune.commands.serve.workers import WORKER_COMMAND, WorkerPool

    metrics = Metrics()
    pool = WorkerPool(
        settings.load,
        settings.environments,
        per_worker=settings.options.max_batch,
        max_queue=settings.options.max_queue,
        worker_seconds=settings.options.worker_seconds,
        command=settings.worker_command or WORKER_COMMAND,
        on_restart=metrics.restarts.inc,
    )
    logger.info(
        "loading %s on %d worker(s)",
        settings.load.get("model") or "the adapter's model",
        len(pool.workers),
    )
    await pool.start()
    server = _make_server(settings.options, _make_app(settings, pool, metrics))
    # uvicorn stops in order on these, then raises them again for whoever handled them before: that
    # is us, at the end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    failed = asyncio.create_task(_stop_when_failed(pool.all_failed, server))
    gc.collect()
    # what is loaded stays: a large request's garbage is found without looking through all of it
    gc.freeze()
    host = settings.options.host
    logger.info(
        "%s answers at http://%s:%d (page at /, OpenAI protocol at /v1); Ctrl-C ends it",
        pool.about["name"],
        f"[{host}]" if ":" in host else host,
        listener.getsockname()[1],
    )
    try:
        await server.serve(sockets=[listener])
    finally:
        failed.cancel()
        await pool.close()
    return int(ExitCode.FAILED if pool.all_failed.is_set() else ExitCode.DONE)


def _make_app(settings: ServeSettings, pool: WorkerPool, metrics: Metrics) -> Guard:
    from finetune.commands.serve.app import create_app
    from finetune.commands.serve.guard import LOOPBACK_NAMES, Rules

    options = settings.options
    rules = Rules(
        hosts=LOOPBACK_NAMES | {name.lower() for name in (options.host, *options.allow_host)},
        any_address=not options.is_loopback,
        token=settings.token,
        max_body_bytes=options.max_body_bytes,
        body_seconds=options.body_seconds,
    )
    return create_app(pool, rules, options, metrics, pool.close)


def _make_server(options: ServeOptions, app: Guard) -> uvicorn.Server:
    import uvicorn

    from finetune.commands.serve.connections import MAX_HEAD_BYTES, LineLimit, limited_protocol

    config = uvicorn.Config(
        app,
        http=limited_protocol(options),
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=GRACE_SECONDS,
        access_log=False,  # no line per request: paths and times are in /metrics
        log_level="warning",
        server_header=False,
        proxy_headers=False,
    )
    limit = LineLimit(logger)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(limit)
    return uvicorn.Server(config)


async def _stop_when_failed(all_failed: asyncio.Event, server: uvicorn.Server) -> None:
    await all_failed.wait()
    logger.error("no worker can be started any more: the server ends")
    server.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens: a taken port is known before a model is loaded. Who connects meanwhile
    waits.

    Bound only, it would not keep a second server from binding the same port, which then failed
    after loading its model.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # each connection takes it over
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{host}:{port} cannot be used: {error}",
            "--host, --port",
            "choose another --port, or 0 for a free one",
        ) from error
    return listener


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: ended by a signal, in order; 1: failed while serving; 2: refused before
    serving.
    """
    from finetune.storage.run_log import setup_console

    options = read_options(ServeOptions, argv)
    setup_console(0)
    missing = [
        name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None
    ]
    if missing:
        raise ConfigError(
            f"not installed: {', '.join(missing)}", "serve", f"pip install {' '.join(missing)}"
        )
    return run_server(serve_settings(options))
