"""Run folders with files that a damaged disk or somebody else has written: readers show what they can,
without a traceback and without what a terminal would obey.
"""

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
VALUES: tuple[Any, ...] = (
    "four" + ESCAPE,
    float("nan"),
    float("inf"),
    1e300,
    10**400,
    -1,
    None,
    True,
    [],
    {},
    [ESCAPE],
    {ESCAPE: ESCAPE},
)
FILES = ("events.jsonl", "trainer_log.jsonl", "status.json", "run_identity.json", "run.yaml")
SHARE = 12  # one of so many changes is tried: all of them take minutes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text files of a real run that was evaluated and resumed."""
    materials = run_helpers.make_materials(tmp_path_factory.mktemp("hostile"))
    folder = materials.folder / "run"
    settings = materials.settings(
        folder, max_steps=4, eval_steps=2, save_steps=2, valid_data=str(materials.data)
    )
    run_helpers.train(settings)
    return folder


def records_of(path: Path) -> list[Any]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return [yaml.safe_load(path.read_text())]  # JSON is YAML


def write_records(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value inside of a value."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, content in inner:
        yield (*before, key)
        yield from places(content, (*before, key))


def shown(folder: Path, output: Path) -> str:
    """What readers write about a run."""
    said = io.StringIO()
    output.unlink(missing_ok=True)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        for command, *words in (
            (monitor, "--once"),
            (monitor, "--once", "--json"),
            (report, "--output", str(output)),
            (checkpoints,),
        ):
            try:
                command([str(folder), *words])
            except FinetuneError as error:
                said.write(str(error))
    page = output.read_text() if output.exists() else ""
    return said.getvalue() + page


@pytest.mark.parametrize("name", FILES)
def test_a_changed_value_is_shown_or_left_out(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_command, "SHORTEST_INTERVAL_SECONDS", 0.0)  # between two looks
    for other in FILES:
        (tmp_path / other).write_text((run / other).read_text())
    records = records_of(run / name)
    # Of places that many lines have, one.
    kinds = {
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
        write_records(tmp_path / name, changed)
        said = shown(tmp_path, tmp_path / "report.html")
        assert "\x1b" not in said and "\x07" not in said, (place, value)
