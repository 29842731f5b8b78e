"""The run folder: one process at a time, the same run or none, a status that is never torn, an
exact sample log.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from file_system_calls import breaking, killed_at
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.errors import ConfigError, FinetuneError, StateError
from finetune.storage import run_lock
from finetune.storage.run_folder import (
    Difference,
    RunLock,
    SampleLog,
    check_output_folder,
    describe_folder,
    format_differences,
    put_output,
    read_status,
    write_identity,
    write_status,
)
from finetune.storage.run_log import read_jsonl_tolerant

IDENTITY = {"model": "tiny", "data": "ab12", "levels": ("explain", "topology"), "seed": 42}

HOLDER = """
import os, sys, time
from finetune.storage.run_folder import RunLock
with RunLock(sys.argv[1], 0):
    child = os.fork()
    if child == 0: time.sleep(60); os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""


def test_a_second_process_waits_and_is_then_refused_with_the_holders_name(tmp_path, caplog):
    """Until the holder ends: its forked child, like a loader's worker, does not hold the lock."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        start = time.monotonic()
        with (
            caplog.at_level(logging.WARNING, "finetune"),
            pytest.raises(StateError, match="another run") as caught,
            RunLock(tmp_path, 0.5),
        ):
            pass
        assert 0.5 <= time.monotonic() - start < 5
        assert f"process {holder.pid} on {os.uname().nodename} since 20" in str(caught.value)
        assert caplog.text.count("waiting up to") == 1 and os.listdir(tmp_path) == [".lock"]
        threading.Timer(0.3, holder.kill).start()
        with RunLock(tmp_path, 20):
            assert 0.2 < time.monotonic() - start < 15
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
            os.kill(child, 0)  # alive
    finally:
        holder.kill()
        holder.wait()
        os.kill(child, signal.SIGKILL)


def test_a_refused_run_leaves_nothing_and_one_that_failed_its_folder(tmp_path):
    with pytest.raises(ConfigError), RunLock(tmp_path / "new" / "run"):
        raise ConfigError("wrong")
    assert os.listdir(tmp_path) == []
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    (mine / "thesis.tex").write_text("")
    with pytest.raises(StateError), RunLock(mine):
        raise StateError("not a run of ours")
    assert os.listdir(mine) == ["thesis.tex"]
    with pytest.raises(FinetuneError), RunLock(run):
        write_status(run, "failed", 1)
        raise FinetuneError("while running")
    # a later refusal takes nothing of it
    with pytest.raises(StateError), RunLock(run):
        raise StateError("another data set")
    assert sorted(os.listdir(run)) == [".lock", "status.json"]


def test_a_lock_file_removed_while_waiting_is_not_a_lock(tmp_path, monkeypatch):
    """Another run was refused between our open and our flock."""
    original, calls = run_lock.try_flock, []

    def removed_first(descriptor: int, how: int, path: Path) -> bool | None:
        if not calls:
            os.unlink(path)
        calls.append(descriptor)
        return original(descriptor, how, path)

    monkeypatch.setattr(run_lock, "try_flock", removed_first)
    with RunLock(tmp_path, 0):
        assert len(calls) == 2
        monkeypatch.undo()
        with pytest.raises(StateError), RunLock(tmp_path, 0):
            pass


def test_folders_that_cannot_be_made_or_locked_are_refused(tmp_path):
    file, linked, new = tmp_path / "file", tmp_path / "linked", tmp_path / "new"
    file.write_text("")
    linked.mkdir()
    (linked / ".lock").symlink_to(file)
    for folder in (file, file / "below", linked):
        with pytest.raises(StateError, match="cannot be made or locked") as caught, RunLock(folder):
            pass
        assert str(folder) in str(caught.value)
    with breaking(0, errno.EROFS), pytest.raises(StateError, match="Read-only"), RunLock(new):
        pass
    assert not new.exists()


def test_without_locks_a_claim_keeps_others_out(tmp_path, monkeypatch, caplog):
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    claim = tmp_path / ".lock.claim"
    with caplog.at_level(logging.WARNING, "finetune"), RunLock(tmp_path, 0):
        assert "has no locks" in caplog.text
        with pytest.raises(StateError, match="another run works"), RunLock(tmp_path, 0):
            pass
        facts = json.loads(claim.read_text())
    with RunLock(tmp_path, 0):
        pass
    claim.write_text(json.dumps(facts))  # of a process of this machine that is gone
    with RunLock(tmp_path, 0):
        pass
    elsewhere = [facts["name"][0], "elsewhere", *facts["name"][2:]]
    claim.write_text(json.dumps(facts | {"host": "elsewhere", "name": elsewhere}))
    with pytest.raises(StateError, match=r"on elsewhere(.|\n)*rm .*\.lock\.claim"):
        RunLock(tmp_path, 0).__enter__()
    assert claim.exists()


def test_status_is_whole_wherever_its_writer_is_killed_or_the_disk_is_full(tmp_path):
    for torn in (False, True):
        write_status(tmp_path, "running", None)
        states = []
        for number in range(100):
            if not killed_at(number, lambda: write_status(tmp_path, "done", 0), torn=torn):
                break
            states.append(read_status(tmp_path)["state"])
            write_status(tmp_path, "running", None)
        assert states == sorted(states, reverse=True)
        assert set(states) == ({"running"} if torn else {"running", "done"})
    with pytest.raises(ValueError, match="refused"):
        write_status(tmp_path, "refused", 2)  # type: ignore[arg-type]
    for number in range(3):
        write_status(tmp_path, "running", None)
        with pytest.raises(OSError, match="No space"), breaking(number, errno.ENOSPC):
            write_status(tmp_path, "done", 0)
        assert read_status(tmp_path)["state"] == "running"
        assert os.listdir(tmp_path) == ["status.json"]


def test_a_result_that_is_not_whole_is_not_put_into_place(tmp_path):
    put_output(tmp_path, lambda staging: (staging / "config.json").write_text("{}"))
    with pytest.raises(FinetuneError, match=r"config\.json was written, and is not whole"):
        put_output(tmp_path, lambda staging: (staging / "config.json").write_text('{"a"'))
    assert (tmp_path / "config.json").read_text() == "{}"


def test_the_same_run_has_no_differences_and_another_shows_them(tmp_path):
    write_identity(tmp_path, IDENTITY)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": "tiny"}))
    write_status(tmp_path, "running", None)
    assert check_output_folder(tmp_path, IDENTITY) == []
    described = describe_folder(tmp_path)
    assert (described.kind, described.config) == ("run", {"model": "tiny"})
    assert described.identity == {**IDENTITY, "levels": ["explain", "topology"]}
    assert described.status["state"] == "running"
    other = {**IDENTITY, "seed": 43, "tokenizer": "cd34"}
    del other["data"]
    differences = check_output_folder(tmp_path, other)
    assert differences == [
        Difference("seed", 42, 43),
        Difference("tokenizer", None, "cd34"),
        Difference("data", "ab12", None),
    ]
    assert format_differences(differences).splitlines()[0] == "seed: 42 in the folder, 43 now"
    made = tmp_path / "made"
    (tmp_path / "run.yaml").write_text(f"x: !!python/object/apply:os.mkdir ['{made}']\n")
    assert describe_folder(tmp_path).config is None and not made.exists(), "nothing is run"


def test_somebody_elses_folder_is_refused(tmp_path):
    file, link = tmp_path / "thesis.tex", tmp_path / "dangling"
    file.write_text("")
    with pytest.raises(StateError, match="not a run of this package") as caught:
        check_output_folder(tmp_path, IDENTITY)
    assert "--output-dir" in caught.value.fix
    identity = tmp_path / "run_identity.json"
    identity.write_text("{")
    with pytest.raises(StateError, match="broken"):
        check_output_folder(tmp_path, IDENTITY)
    identity.unlink()
    identity.symlink_to(file)
    link.symlink_to(tmp_path / "nothing")
    for path, words in (
        (tmp_path, "run_identity.json in the output folder cannot be read"),
        (file, "cannot be read"),
        (link, "link to nothing"),
    ):
        with pytest.raises(StateError, match=words):
            check_output_folder(path, IDENTITY)


def whole_log(steps: int) -> list[dict[str, object]]:
    return [{"step": step, "ids": [step * 2, step * 2 + 1]} for step in range(1, steps + 1)]


def write_steps(path: Path, first: int, last: int, resume_step: int) -> None:
    with SampleLog(path, resume_step) as log:
        for number, record in enumerate(whole_log(last)[first - 1 :], first):
            log.append(record["step"], record["ids"])  # type: ignore[arg-type]
            assert path.read_bytes().count(b"\n") == number, "each line is there at once"


@settings(max_examples=100, deadline=None)
@given(data=st.data(), total=st.integers(1, 12))
def test_an_interrupted_log_ends_up_as_an_uninterrupted_one(tmp_path_factory, data, total):
    path = tmp_path_factory.mktemp("log") / "samples.jsonl"
    done = 0
    for _ in range(data.draw(st.integers(0, 4))):
        reached = data.draw(st.integers(done, total))
        write_steps(path, done + 1, reached, done)
        # Killed while it wrote the next line; resumed from a checkpoint at or before what is whole.
        line = json.dumps({"step": reached + 1, "ids": [1, 2, 3]}).encode() + b"\n"
        torn = line[: data.draw(st.integers(0, len(line)))]
        with open(path, "ab") as file:
            file.write(data.draw(st.sampled_from([torn, b"\0" * 40])))
        done = data.draw(st.integers(0, reached))
    write_steps(path, done + 1, total, done)
    text = "".join(json.dumps(record) + "\n" for record in whole_log(total))
    assert path.read_text() == text and list(read_jsonl_tolerant(path)) == whole_log(total)


def test_lines_that_are_missing_are_said_and_none_is_invented(tmp_path, caplog):
    path = tmp_path / "samples.jsonl"
    hole = '{"step": 1, "ids": []}\nnonsense\n{"step": 3, "ids": []}\n'
    with caplog.at_level(logging.WARNING, "finetune"):
        write_steps(path, 1, 3, 0)
        write_steps(path, 3, 5, 2)
        write_steps(path, 6, 6, 5)
        assert caplog.records == [], "a right log is silent"
        for text, step, missing in ((path.read_text(), 8, 7), (hole, 3, 2)):
            caplog.clear()
            path.write_text(text)
            SampleLog(path, step).close()
            assert f"not whole up to step {step}" in caplog.text
            assert f"missing from step {missing}" in caplog.text and len(caplog.records) == 1
            assert path.read_text() == text
