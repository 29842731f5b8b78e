"""Run folders with files that somebody else has written: no traceback, nothing that a terminal would obey."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import yaml

from finetune.commands.checkpoints.command import main as checkpoints
from finetune.commands.monitor import command as monitor_command
from finetune.commands.monitor.command import main as monitor
from finetune.commands.report.command import main as report
from finetune.errors import FinetuneError

ESCAPE = "\x1b]0;pwn\x07\x1b[31m"
VALUES: tuple[Any, ...] = ("four" + ESCAPE, float("nan"), float("inf"), 1e300, 10**400, -1, None)
VALUES += (True, [], {}, [ESCAPE], {ESCAPE: ESCAPE})
FILES = ("events.jsonl", "trainer_log.jsonl", "status.json", "run_identity.json", "run.yaml")
SHARE = 30  # one of so many changes is tried: all of them take minutes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run that was evaluated."""
    materials = run_helpers.make_materials(tmp_path_factory.mktemp("hostile"))
    changes = {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "valid_data": str(materials.data)}
    run_helpers.train(materials.settings(materials.folder / "run", **changes))
    return materials.folder / "run"


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value inside of a value."""
    inner = value.items() if isinstance(value, dict) else ()
    for key, content in enumerate(value) if isinstance(value, list) else inner:
        yield (*before, key)
        yield from places(content, (*before, key))


def shown(folder: Path) -> str:
    """What readers write about a run."""
    said, page = io.StringIO(), folder / "report.html"
    words = {monitor: ["--once", "--json"], report: ["--output", str(page)], checkpoints: []}
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        for command, more in [(monitor, ["--once"]), *words.items()]:
            with contextlib.suppress(FinetuneError):
                command([str(folder), *more])
    return said.getvalue() + (page.read_text() if page.exists() else "")


@pytest.mark.parametrize("name", FILES)
def test_a_changed_value_is_shown_or_left_out(name, run, tmp_path, monkeypatch):
    monkeypatch.setattr(monitor_command, "SHORTEST_INTERVAL_SECONDS", 0.0)  # between two looks
    for other in FILES:
        (tmp_path / other).write_text((run / other).read_text())
    path = tmp_path / name
    # JSON is YAML.
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    records = [yaml.safe_load(line) for line in lines]
    kinds = {  # of places that many lines have, one
        (record.get("event"), place): (number, *place)
        for number, record in enumerate(records)
        for place in places(record)
    }
    changes = [(place, value) for place in kinds.values() for value in VALUES]
    for place, value in random.Random(name).sample(changes, len(changes) // SHARE):
        changed = copy.deepcopy(records)
        inside = changed
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = value
        path.write_text("".join(json.dumps(record) + "\n" for record in changed))
        said = shown(path.parent)
        assert "\x1b" not in said and "\x07" not in said, (place, value)
