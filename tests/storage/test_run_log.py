"""The logs of a run: their schema is frozen, every line is whole, and a torn last line is passed
over.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from launching import ROOT

from finetune.errors import DataError
from finetune.storage.run_log import (
    EVENTS,
    JsonLines,
    RunLog,
    StepLog,
    add_log_file,
    read_jsonl_tolerant,
    setup_console,
    success,
)

FROZEN = ROOT / "tests" / "frozen" / "events.txt"
LEVELS = ("explain", "reasoning", "topology")


def frozen() -> dict[str, set[str]]:
    lines = [line for line in FROZEN.read_text().splitlines() if line and not line.startswith("#")]
    return {name: set(fields.split()) for name, fields in (line.split(": ") for line in lines)}


def shape(record: dict) -> set[str]:
    """The fields of a line, with LEVEL for a level's name."""
    return {
        f"{name.split('/')[0]}/LEVEL" if name.split("/")[-1] in LEVELS else name for name in record
    }


def assert_of_schema(record: dict, fields: set[str]) -> None:
    required = {field for field in fields if not field.endswith("?")}
    assert required <= shape(record) <= {field.rstrip("?") for field in fields}, record


# ---------------------------------------------------------------- the schema


@pytest.mark.frozen
def test_the_events_are_the_frozen_ones():
    assert set(EVENTS) == set(frozen()) - {"trainer_log.jsonl"}
    assert len(EVENTS) == len(set(EVENTS))


def test_every_place_that_writes_an_event_gives_the_frozen_fields():
    """From the source, so that events that a test can hardly provoke are looked at too; each is
    written somewhere.
    """
    written = set()
    for path in (ROOT / "finetune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_event = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "event"
            )
            if not is_event or not (node.args and isinstance(node.args[0], ast.Constant)):
                continue
            name, given = node.args[0].value, {keyword.arg for keyword in node.keywords}
            written.add(name)
            fields = {field for field in frozen()[name] if not field.endswith("?")}
            assert given == fields or (None in given and given - {None} <= fields), (
                f"{path.name}: {name}"
            )
    assert written == set(EVENTS)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, tiny_model, tiny_data, tiny_valid) -> Path:
    """A run of 4 steps whose last checkpoint was damaged afterwards, and that then went on from the
    one before.
    """
    from finetune.sft import main

    folder = tmp_path_factory.mktemp("runlog")
    flags = [
        "--model",
        tiny_model,
        "--data",
        tiny_data,
        "--valid-data",
        tiny_valid,
        "--output-dir",
        folder / "run",
    ]
    flags += [
        "--cache-dir",
        folder / "cache",
        "--device-type",
        "cpu",
        "--dtype",
        "float32",
        "--max-steps",
        4,
    ]
    flags += [
        "--save-steps",
        2,
        "--global-batch-size",
        6,
        "--cutoff-len",
        128,
        "--report-to",
        "none",
    ]
    before = dict(os.environ)
    try:
        assert main([str(word) for word in flags]) == 0
        shutil.copytree(folder / "run", folder / "first")
        (folder / "run" / "checkpoint-4" / "weights.safetensors").write_bytes(b"damaged")
        assert main([str(word) for word in flags]) == 0
    finally:
        os.environ.clear()
        os.environ.update(before)
    return folder / "run"


def test_the_events_of_a_run_are_of_the_schema(run_folder: Path):
    records = list(read_jsonl_tolerant(run_folder / "events.jsonl"))
    for record in records:
        assert_of_schema(record, frozen()[record["event"]] | {"event", "time"})
    first = ["execution", "start", "eval", "checkpoint", "eval", "checkpoint", "end"]
    again = ["skipped_checkpoint", "execution", "start", "resume", "eval", "checkpoint", "end"]
    assert [record["event"] for record in records] == first + again
    skipped, resumed = records[7], records[10]
    assert skipped["name"] == "checkpoint-4" and "weights.safetensors" in skipped["why"]
    assert (resumed["checkpoint"], resumed["step"]) == ("checkpoint-2", 2)
    assert [record["step"] for record in records if record["event"] == "eval"] == [0, 4, 4]


def test_the_steps_of_a_run_are_of_the_schema(run_folder: Path):
    records = list(read_jsonl_tolerant(run_folder / "trainer_log.jsonl"))
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert_of_schema(record, frozen()["trainer_log.jsonl"])
        assert sum(record[f"share/{level}"] for level in LEVELS) == pytest.approx(1, abs=1e-3)
        tokens = sum(record[f"tokens/{level}"] for level in LEVELS)
        total = sum(
            record[f"tokens/{level}"] * record.get(f"loss/{level}", 0.0) for level in LEVELS
        )
        assert total / tokens == pytest.approx(record["loss"], rel=1e-5), (
            "the loss is not the mean over all targets"
        )


def test_the_resumed_run_logged_the_same_steps(run_folder: Path):
    first, again = (
        list(read_jsonl_tolerant(folder / "trainer_log.jsonl"))
        for folder in (run_folder.parent / "first", run_folder)
    )
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert [record[name] for record in again] == pytest.approx(
            [record[name] for record in first], rel=1e-5
        )


def test_no_machine_path_and_no_text_of_the_data_is_logged(run_folder: Path, tiny_data: Path):
    answers = [
        json.loads(line)["output"] for line in tiny_data.read_text(encoding="utf-8").splitlines()
    ]
    for path in [
        run_folder / "events.jsonl",
        run_folder / "trainer_log.jsonl",
        *run_folder.glob("logs/*"),
    ]:
        text = path.read_text(encoding="utf-8")
        assert not any(answer in text for answer in answers if len(answer) > 20), path.name


def test_the_logs_folder_has_a_file_per_rank_and_start(run_folder: Path):
    """Both starts are of one process here: within one second they share the file."""
    logs = list((run_folder / "logs").iterdir())
    assert len(logs) in (1, 2) and all(log.name.endswith("-rank0.log") for log in logs)
    said = "".join(log.read_text(encoding="utf-8") for log in logs)
    assert said.count("saved checkpoint-4") == 2


# ---------------------------------------------------------------- writer and reader


def test_an_event_that_is_not_in_the_schema_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="unknown event 'lunch'"):
        RunLog(tmp_path).event("lunch")


def test_a_log_without_folder_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    log = RunLog(None)
    log.step({"step": 1})
    log.event("end", state="done")
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writes = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(bytes(data)) or real(fd, data))
    with JsonLines(tmp_path / "x.jsonl") as log:
        log.write({"text": "路由器\n"})
    assert writes == [b'{"text": "\xe8\xb7\xaf\xe7\x94\xb1\xe5\x99\xa8\\n"}\n']


def test_closing_twice_does_no_harm(tmp_path: Path):
    log = JsonLines(tmp_path / "x.jsonl")
    log.close()
    log.close()


@pytest.mark.parametrize(
    "torn", [b"", b'{"step": 4', b'{"step": 4}', b"\x00\x00\x00", b'{"step": 4}\n{"st']
)
def test_going_on_cuts_what_is_torn_or_later(torn: bytes, tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n' + torn)
    with StepLog(path, resume_step=2) as log:
        assert log.kept_steps == [1, 2]
        log.write({"step": 3, "again": True})
    assert list(read_jsonl_tolerant(path)) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


@pytest.mark.parametrize(
    ("steps", "is_lost"),
    [(range(1, 21), False), (range(1, 12), True), (range(5, 21, 5), False), ([5, 10], True)],
    ids=["whole", "every step", "every fifth", "lost fifths"],
)
def test_lines_that_are_lost_are_warned_of(
    steps: Iterable[int], is_lost: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Of a run that goes on from step 20, by the distance of its own lines."""
    lines = "".join(json.dumps({"step": step}) + "\n" for step in steps)
    (tmp_path / "trainer_log.jsonl").write_text(lines)
    with caplog.at_level(logging.WARNING, logger="finetune"):
        RunLog(tmp_path, resume_step=20).close()
    assert ("lost its end" in caplog.text) == is_lost


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(DataError, match="log.jsonl:2"):
        list(read_jsonl_tolerant(path))


# ---------------------------------------------------------------- console


@pytest.fixture
def console():
    logger = logging.getLogger("finetune")
    before = (list(logger.handlers), logger.propagate, logger.level)
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def test_lines_are_tagged_and_said_once(
    console: logging.Logger, capsys: pytest.CaptureFixture[str]
):
    setup_console(0)
    setup_console(0)
    console.info("a")
    console.warning("b")
    success("c")
    assert capsys.readouterr().err.splitlines() == ["[INFO] a", "[WARNING] b", "[SUCCESS] c"]


def test_other_ranks_say_only_errors_with_their_number(
    console: logging.Logger, capsys: pytest.CaptureFixture[str]
):
    setup_console(3)
    console.info("a")
    console.warning("b")
    console.error("c")
    assert capsys.readouterr().err.splitlines() == ["[ERROR] rank 3: c"]


def test_the_file_of_a_rank_has_everything(console: logging.Logger, tmp_path: Path):
    setup_console(1)
    handler = add_log_file(tmp_path, 1)
    console.info("only in the file")
    console.removeHandler(handler)
    handler.close()
    (path,) = (tmp_path / "logs").iterdir()
    assert path.name.endswith("-rank1.log") and "[INFO] only in the file" in path.read_text()
