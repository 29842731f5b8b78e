"""`python -m finetune serve`: a model behind the OpenAI protocol, with a chat page."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Sequence
from functools import partial
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

    from finetune.commands.serve.guard import Guard

logger = logging.getLogger("finetune")

GRACE_SECONDS = 30
LISTEN_BACKLOG = 1024
# The default of the system buffers megabytes for a client that does not read.
SEND_BUFFER_BYTES = 128 << 10


def run_server(settings: ServeSettings) -> int:
    """Serve until a signal. Returns 0: stopped; 1: all workers failed.

    Raises:
        ConfigError: the address is taken, there is no token where one is needed, or the model
            cannot be loaded.
    """
    options = settings.options
    if settings.token is None and (not options.is_loopback or options.allow_host):
        # A name that others use leads here through a proxy, even if the server listens on loopback.
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
    from finetune.commands.serve.app import create_app
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
    app = create_app(pool, settings.options, settings.token, metrics)
    server = _make_server(settings.options, app)
    # uvicorn shuts down on these signals, then raises them again for the handlers that were set
    # before: ignore them there.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    failed = asyncio.create_task(_stop_when_failed(pool.all_failed, server))
    gc.collect()
    # The collections that a large request causes then skip the objects loaded so far.
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
        if not pool.all_failed.is_set():
            logger.info("stopped by a signal")
    finally:
        failed.cancel()
        await pool.close()
    return int(ExitCode.FAILED if pool.all_failed.is_set() else ExitCode.DONE)


def _make_server(options: ServeOptions, app: Guard) -> uvicorn.Server:
    import uvicorn

    from finetune.commands.serve.connections import MAX_HEAD_BYTES, LimitedProtocol

    # Clients must not be able to fill the log: what they cause is logged as a warning.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        http=partial(LimitedProtocol, options),
        lifespan="off",
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=GRACE_SECONDS,
        access_log=False,  # no line per request: paths and times are in /metrics
        log_level="error",
        server_header=False,
        proxy_headers=False,
    )
    return uvicorn.Server(config)


async def _stop_when_failed(all_failed: asyncio.Event, server: uvicorn.Server) -> None:
    await all_failed.wait()
    logger.error("no worker can be started any more: the server ends")
    server.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that a taken port is reported before a model is loaded. Clients
    that connect meanwhile wait.

    A socket that is only bound would not keep a second server from binding the same port: that
    server would fail after loading its model.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # each connection inherits it
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
    """Run the command. Returns 0: stopped by a signal; 1: failed while serving; 2: refused."""
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
