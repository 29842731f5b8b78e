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
from finetune.inference.options import ModelOptions

FROZEN = Path(__file__).parents[2] / "frozen" / "chat_names.txt"


def names() -> list[str]:
    """One line per public name."""
    lines = []
    for command, options in (("chat", ChatOptions), ("serve", ServeOptions)):
        lines += [f"{command} {flag(name)}" for name in ("help", *flags_of(options))]
    metrics = Metrics()
    text = metrics.text(workers_ready=0, active=0, queued=0).decode()
    lines += [
        f"metric {line.split()[2]}"
        for line in text.splitlines()
        if line.startswith("# HELP") and not line.split()[2].endswith("_created")
    ]
    pool = WorkerPool({}, [{}], per_worker=1, max_queue=1)
    app = create_app(pool, ServeOptions(model="m"), None, metrics).app
    lines += [
        f"path {method} {route.path}" for route in app.routes for method in sorted(route.methods)
    ]
    return lines


@pytest.mark.frozen
def test_public_names_are_frozen():
    """A name may be added (to the file too); one that is there stays."""
    assert names() == FROZEN.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("options", [ChatOptions, ServeOptions])
def test_flags_may_not_be_shortened(options: type[ModelOptions]):
    with pytest.raises(ConfigError, match="unknown flag --mod"):
        read_options(options, ["--model", "m", "--mod", "x"])
