"""The logs of a run: their schema is frozen, every line is whole, and a torn last line is passed
over.
"""

from __future__ import annotations

import ast
import json
import logging
import os
from pathlib import Path

import pytest
from launching import ROOT

from finetune.errors import DataError
from finetune.storage.run_log import (
    EVENTS,
    JsonLines,
    RunLog,
    read_jsonl_tolerant,
)

FROZEN = ROOT / "tests" / "frozen" / "events.txt"
LEVELS = ("explain", "reasoning", "topology")


def frozen() -> dict[str, set[str]]:
    lines = [line for line in FROZEN.read_text().splitlines() if line and not line.startswith("#")]
    return {name: set(fields.split()) for name, fields in (line.split(": ") for line in lines)}


def assert_of_schema(record: dict, fields: set[str]) -> None:
    """A line has the fields, with LEVEL for a level's name."""
    found = {
        f"{name.split('/')[0]}/LEVEL" if name.split("/")[-1] in LEVELS else name for name in record
    }
    required = {field for field in fields if not field.endswith("?")}
    assert required <= found <= {field.rstrip("?") for field in fields}, record


@pytest.mark.frozen
def test_every_place_that_writes_an_event_gives_the_frozen_fields():
    """From the source, so that events that a test can hardly provoke are looked at too."""
    written = set()
    for path in (ROOT / "finetune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="event"), args=[ast.Constant(value=name), *_]
                ):
                    given = {keyword.arg for keyword in node.keywords}
                    fields = {field for field in frozen()[name] if not field.endswith("?")}
                    partly = None in given and given - {None} <= fields
                    assert given == fields or partly, f"{path.name}: {name}"
                    written.add(name)
    assert written == set(EVENTS) == set(frozen()) - {"trainer_log.jsonl"}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, tiny_model, tiny_data, tiny_valid) -> Path:
    """A run whose last checkpoint was damaged, and that then went on from the one before."""
    from finetune.sft import main

    folder = tmp_path_factory.mktemp("runlog")
    words = f"--model {tiny_model} --data {tiny_data} --valid-data {tiny_valid}"
    words += f" --output-dir {folder}/run --cache-dir {folder}/cache --device-type cpu"
    words += " --dtype float32 --max-steps 4 --save-steps 2 --global-batch-size 6"
    words += " --cutoff-len 128 --report-to none"
    before = dict(os.environ)
    try:
        assert main(words.split()) == 0
        (folder / "run" / "checkpoint-4" / "weights.safetensors").write_bytes(b"damaged")
        assert main(words.split()) == 0
    finally:
        os.environ.clear()
        os.environ.update(before)
    return folder / "run"


def test_the_lines_of_a_run_are_of_the_schema(run_folder, tiny_data):
    events = list(read_jsonl_tolerant(run_folder / "events.jsonl"))
    for record in events:
        assert_of_schema(record, frozen()[record["event"]] | {"event", "time"})
    first = ["execution", "start", "eval", "checkpoint", "eval", "checkpoint", "end"]
    again = ["skipped_checkpoint", "execution", "start", "resume", "eval", "checkpoint", "end"]
    assert [record["event"] for record in events] == first + again
    skipped, resumed = events[7], events[10]
    assert skipped["name"] == "checkpoint-4" and "weights.safetensors" in skipped["why"]
    assert (resumed["checkpoint"], resumed["step"]) == ("checkpoint-2", 2)
    assert [record["step"] for record in events if record["event"] == "eval"] == [0, 4, 4]

    steps = list(read_jsonl_tolerant(run_folder / "trainer_log.jsonl"))
    for record in steps:
        assert_of_schema(record, frozen()["trainer_log.jsonl"])
        assert sum(record[f"share/{level}"] for level in LEVELS) == pytest.approx(1, abs=1e-3)
        tokens = {level: record[f"tokens/{level}"] for level in LEVELS}
        total = sum(tokens[level] * record.get(f"loss/{level}", 0.0) for level in LEVELS)
        # the loss is the mean over all targets
        assert total / sum(tokens.values()) == pytest.approx(record["loss"], rel=1e-5)

    # No text of the data is logged.
    logs = [*run_folder.glob("logs/*-rank0.log"), *run_folder.glob("*.jsonl")]
    said = "".join(path.read_text(encoding="utf-8") for path in logs)
    assert said.count("saved checkpoint-4") == 2
    answers = [json.loads(line)["output"] for line in tiny_data.read_text("utf-8").splitlines()]
    assert not any(answer in said for answer in answers if len(answer) > 20)


def test_a_log_refuses_unknown_events_and_is_silent_without_a_folder():
    with pytest.raises(ValueError, match="unknown event 'lunch'"):
        RunLog(None).event("lunch")


def test_a_line_is_one_write(tmp_path, monkeypatch):
    writes: list[bytes] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(bytes(data)) or real(fd, data))
    with JsonLines(tmp_path / "x.jsonl") as log:
        log.write({"text": "路由器\n"})
        log.write({"loss": float("nan"), "more": [float("inf"), 1]})
        log.close()
    expected = ['{"text": "路由器\\n"}\n', '{"loss": null, "more": [null, 1]}\n']
    assert writes == [line.encode() for line in expected]


@pytest.mark.parametrize(
    ("steps", "is_lost"),
    [(range(1, 12), True), (range(5, 21, 5), False)],
)
def test_lines_that_are_lost_are_warned_of(steps, is_lost, tmp_path, caplog):
    """Of a run that goes on from step 20, by the distance of its own lines."""
    lines = "".join(json.dumps({"step": step}) + "\n" for step in steps)
    (tmp_path / "trainer_log.jsonl").write_text(lines)
    with caplog.at_level(logging.WARNING, logger="finetune"):
        RunLog(tmp_path, resume_step=20).close()
    assert ("lost its end" in caplog.text) == is_lost


def test_the_reader_forgives_a_torn_last_line_only(tmp_path):
    path = tmp_path / "log.jsonl"
    for tail in ("", '{"a": 2', '{"a": 2}', "\0\0\0", "[1]", '{"a"\n'):
        path.write_text('{"a": 1}\n' + tail)
        assert list(read_jsonl_tolerant(path)) == [{"a": 1}], tail
    path.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(DataError, match="log.jsonl:2"):
        list(read_jsonl_tolerant(path))
