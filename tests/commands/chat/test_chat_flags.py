"""The public names of chat and serve stay: flags, metrics, paths, codes that scripts and dashboards
rely on.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.commands.chat.command import ChatOptions
from finetune.commands.serve.answers import Metrics
from finetune.commands.serve.app import create_app
from finetune.commands.serve.options import ServeOptions
from finetune.commands.serve.workers import WorkerPool
from finetune.config.fields import flag
from finetune.config.options import flags_of, read_options
from finetune.errors import ConfigError

FROZEN = Path(__file__).parents[2] / "frozen" / "chat_names.txt"


@pytest.mark.frozen
def test_public_names_are_frozen():
    """A name may be added (to the file too); one that is there stays."""
    lines = []
    for command, options in (("chat", ChatOptions), ("serve", ServeOptions)):
        lines += [f"{command} {flag(name)}" for name in ("help", *flags_of(options))]
        with pytest.raises(ConfigError, match="unknown flag --mod"):  # none may be shortened
            read_options(options, ["--model", "m", "--mod", "x"])
    metrics = Metrics()
    text = metrics.text(workers_ready=0, active=0, queued=0).decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    lines += [f"metric {name}" for name in names if not name.endswith("_created")]
    pool = WorkerPool({}, [{}], per_worker=1, max_queue=1)
    routes = create_app(pool, ServeOptions(model="m"), None, metrics).app.routes
    lines += [f"path {method} {route.path}" for route in routes for method in sorted(route.methods)]
    assert lines == FROZEN.read_text(encoding="utf-8").splitlines()
