"""Files that are written for weeks: through rotation, a full disk and a kill."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from finetune.storage import run_log
from finetune.storage.run_log import (
    AppendFile,
    JsonLines,
    RunLog,
    add_log_file,
    read_jsonl_tolerant,
)

LOGGER = logging.getLogger("finetune")


@contextmanager
def room_for(path: Path, more_bytes: int) -> Iterator[None]:
    """A file may grow by so many bytes only: the write across the limit is done in part."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_tears_no_line_and_afterwards_it_goes_on(tmp_path, capfd):
    path = tmp_path / "log.jsonl"
    for more_bytes in (0, 1, 10):
        path.unlink(missing_ok=True)
        with JsonLines(path) as log:
            log.write({"step": 1})
            with room_for(path, more_bytes):
                for _ in range(2):
                    with pytest.raises(OSError, match=r"log\.jsonl"):
                        log.write({"step": 2, "text": "x" * 100})
            log.write({"step": 3})
        assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    # A rank's log counts what was lost.
    handler = add_log_file(tmp_path, 0)
    try:
        (path,) = (tmp_path / "logs").iterdir()
        LOGGER.warning("first")
        with room_for(path, 5):
            LOGGER.warning("second")
            LOGGER.warning("third")
        LOGGER.warning("fourth")
    finally:
        LOGGER.removeHandler(handler)
        handler.close()
    lines = path.read_text().splitlines()
    assert [line[-5:] for line in lines] == ["first", "tten)", "ourth"]
    assert "(2 messages before" in lines[1] and "Traceback" not in capfd.readouterr().err


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "LOOK_SECONDS", 0.0)


def test_what_another_program_renames_is_begun_anew(tmp_path, looks_at_once):
    """logrotate, without its copytruncate: no line is lost, and none stands twice."""
    log = RunLog(tmp_path)
    for step in range(1, 7):
        log.step({"step": step})
        if step in (2, 4):
            os.rename(tmp_path / "trainer_log.jsonl", tmp_path / f"rotated-{step}")
    log.close()
    found = [
        [line["step"] for line in read_jsonl_tolerant(tmp_path / name)]
        for name in ("rotated-2", "rotated-4", "trainer_log.jsonl")
    ]
    assert found == [[1, 2], [3, 4], [5, 6]]


def test_a_folder_that_has_gone_is_still_written(tmp_path, looks_at_once):
    """`mv runs/a runs/b` under a run that is at work, a name that became a link, and copytruncate."""
    old, new = tmp_path / "a", tmp_path / "b"
    old.mkdir()
    with AppendFile(tmp_path / "cut") as log:
        log.append_bytes(b"before\n")
        os.truncate(tmp_path / "cut", 0)
        log.append_bytes(b"after\n")
    assert (tmp_path / "cut").read_bytes() == b"after\n", "at its end, not behind a hole"
    with AppendFile(old / "log") as log, AppendFile(old / "linked") as linked:
        os.rename(old, new)
        log.append_bytes(b"line\n")
        old.mkdir()
        (old / "linked").symlink_to(tmp_path / "elsewhere")
        linked.append_bytes(b"line\n")
    assert (new / "log").read_bytes() == (new / "linked").read_bytes() == b"line\n"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("torn", [b"", b'{"event": "chec', b"\0" * 200_000])
def test_the_first_event_of_a_resumed_run_does_not_follow_half_a_line(torn, tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "start"}\n' + torn)
    log = RunLog(tmp_path)
    log.event("resume", step=1)
    log.close()
    names = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert names == ["start", "resume"]
