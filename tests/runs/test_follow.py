"""`finetune.follow`: every event once, live, through stops, resumes and torn lines."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import fake_runs
import pytest

import finetune
from finetune.errors import FinetuneError
from finetune.storage.run_folder import write_status
from finetune.storage.run_log import RunLog

SOON = 0.01  # seconds between looks


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events]


def steps(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events if event["event"] == "step"]


def test_runs_that_have_ended_and_folders_that_are_none(tmp_path: Path) -> None:
    done = fake_runs.make_run(tmp_path / "done", steps=3, state="done", exit_code=0)
    found = list(finetune.follow(done, poll_seconds=SOON))
    assert names(found) == ["start", "eval", "checkpoint", "nonfinite"]
    assert steps(list(finetune.follow(done, steps=True, poll_seconds=SOON))) == [1, 2, 3]
    stopped = fake_runs.make_run(tmp_path / "stopped", state="stopped", exit_code=3)
    assert len(list(finetune.follow(stopped, poll_seconds=SOON, resume_seconds=0.2))) == 4
    with pytest.raises(FinetuneError, match="is not there"):
        next(finetune.follow(tmp_path / "no" / "run"))


def test_events_come_while_the_run_works_and_the_last_one_is_not_missed(tmp_path: Path) -> None:
    run = fake_runs.make_run(tmp_path / "run")
    stream = finetune.follow(run, poll_seconds=SOON)
    assert names([next(stream) for _ in range(4)])[-1] == "nonfinite"

    def work() -> None:
        with (run / "events.jsonl").open("a") as file:
            print('{"event": "eval", "time": 1.0, "step": 41}', file=file, flush=True)
            time.sleep(0.1)
            write_status(run, "done", 0, step=100)
            time.sleep(SOON / 2)
            print('{"event": "end", "time": 2.0, "step": 100}', file=file)

    writer = threading.Thread(target=work)
    writer.start()
    assert names(list(stream)) == ["eval", "end"]
    writer.join()


def test_a_resumed_run_goes_on_in_the_same_stream(tmp_path: Path) -> None:
    run = fake_runs.make_run(tmp_path / "run", steps=40, state="stopped", exit_code=3)
    stream = finetune.follow(run, steps=True, poll_seconds=SOON, resume_seconds=60.0)
    assert steps([next(stream) for _ in range(44)]) == list(range(1, 41))
    with (run / "events.jsonl").open("a") as events:
        events.write('{"event": "chec')  # torn by a kill
    log = RunLog(run, resume_step=38)  # cuts the torn line, and the lines of steps 39 and 40
    write_status(run, "running", None, step=38)
    log.event("resume", step=38, checkpoint="checkpoint-38")
    for number in (39, 40, 41):
        log.step(fake_runs.step(number, loss=0.5))
    log.close()
    write_status(run, "done", 0, step=41)
    after = list(stream)
    assert steps(after) == [39, 40, 41] and set(names(after)) == {"step", "resume"}
