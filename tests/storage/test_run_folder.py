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
import textwrap
import time
from pathlib import Path

import pytest
import yaml
from file_system_calls import breaking, killed_at
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.errors import ConfigError, DataError, FinetuneError, StateError
from finetune.storage import run_lock
from finetune.storage.run_folder import (
    Difference,
    RunLock,
    SampleLog,
    check_output_folder,
    describe_folder,
    format_differences,
    read_identity,
    read_status,
    write_identity,
    write_status,
)
from finetune.storage.run_log import read_jsonl_tolerant

IDENTITY = {
    "model": "tiny",
    "data": "ab12",
    "global_batch_size": 32,
    "levels": ("explain", "topology"),
    "seed": 42,
}

HOLDER = """
import os, sys, time
from finetune.storage.run_folder import RunLock
with RunLock(sys.argv[1], 0):
    {inside}
    print("held", flush=True)
    time.sleep(60)
"""


def hold_in_another_process(folder: Path, inside: str = "pass") -> subprocess.Popen[str]:
    code = HOLDER.replace("{inside}", inside)
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and "held" in holder.stdout.readline()
    return holder


# --------------------------------------------------------------------------------------------- lock
def test_a_second_process_waits_and_is_then_refused_with_the_holders_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holder = hold_in_another_process(tmp_path)
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
        assert caught.value.exit_code == 2 and caught.value.fix
        assert caplog.text.count("waiting up to") == 1
        assert os.listdir(tmp_path) == [".lock"]
    finally:
        holder.kill()
        holder.wait()
    with RunLock(tmp_path, 5):  # killed, so free
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_the_wait_ends_when_the_holder_does(tmp_path: Path) -> None:
    holder = hold_in_another_process(tmp_path)
    subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import time, os; time.sleep(0.5); os.kill({holder.pid}, {signal.SIGKILL})",
        ]
    )
    start = time.monotonic()
    with RunLock(tmp_path, 20):
        assert 0.2 < time.monotonic() - start < 10
    holder.wait()


def test_a_forked_child_does_not_hold_the_lock_of_its_killed_parent(tmp_path: Path) -> None:
    """As a loader's worker does; multiprocessing forks the same way."""
    inside = (
        "child = os.fork()\n    if child == 0: time.sleep(60); os._exit(0)\n    print(child,"
        " end=' ')"
    )
    code = HOLDER.replace("{inside}", inside)
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline().split()[0])
    try:
        holder.kill()
        holder.wait()
        with RunLock(tmp_path, 5):  # the child may not have run a line yet
            os.kill(child, 0)  # alive
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_locks_in_one_process_exclude_each_other_and_follow_each_other(tmp_path: Path) -> None:
    with RunLock(tmp_path / "a" / "b"):
        with (
            pytest.raises(StateError, match=f"process {os.getpid()}"),
            RunLock(tmp_path / "a" / "b", 0),
        ):
            pass
        with RunLock(tmp_path / "c", 0):
            pass
    with RunLock(tmp_path / "a" / "b", 0):
        pass


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), RunLock(tmp_path / "new" / "run"):
        raise ConfigError("wrong")
    assert os.listdir(tmp_path) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(StateError), RunLock(tmp_path / "mine"):
        raise StateError("not a run of ours")
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_an_accepted_run_that_fails_keeps_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError), RunLock(tmp_path / "run"):
        write_status(tmp_path / "run", "failed", 1)
        raise FinetuneError("while running")
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "status.json"]
    # a later refusal takes nothing of it
    with pytest.raises(StateError), RunLock(tmp_path / "run"):
        raise StateError("another data set")
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "status.json"]


def test_a_lock_file_removed_while_waiting_is_not_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run was refused between our open and our flock: what we locked has no name any
    more.
    """
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


def test_folders_that_cannot_be_made_or_locked_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".lock").symlink_to(tmp_path / "file")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "linked"):
        with pytest.raises(StateError, match="cannot be made or locked") as caught, RunLock(folder):
            pass
        assert str(folder) in str(caught.value) and caught.value.fix
    with (
        breaking(0, errno.EROFS),
        pytest.raises(StateError, match="Read-only"),
        RunLock(tmp_path / "new"),
    ):
        pass
    assert not (tmp_path / "new").exists()

    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    with RunLock(tmp_path / "new"):
        pass


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    with caplog.at_level(logging.WARNING, "finetune"), RunLock(tmp_path / "new"):
        pass
    assert "has no locks" in caplog.text


# ------------------------------------------------------------------------------------------- status
def test_status_says_state_and_exit_code(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, "running", None, step=3)
    write_status(tmp_path, "stopped", 3, step=7, checkpoint="checkpoint-7")
    status = read_status(tmp_path)
    assert status is not None and status.pop("written_at").endswith("+00:00")
    assert status == {"state": "stopped", "exit_code": 3, "step": 7, "checkpoint": "checkpoint-7"}
    assert os.listdir(tmp_path) == ["status.json"]
    with pytest.raises(ValueError, match="refused"):
        write_status(tmp_path, "refused", 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("torn", [False, True])
def test_status_is_whole_wherever_its_writer_is_killed(tmp_path: Path, torn: bool) -> None:
    write_status(tmp_path, "running", None)
    states = []
    for number in range(100):
        if not killed_at(number, lambda: write_status(tmp_path, "done", 0), torn=torn):
            break
        status = read_status(tmp_path)
        assert status is not None
        states.append(status["state"])
        write_status(tmp_path, "running", None)
    assert states == sorted(states, reverse=True) and set(states) == (
        {"running"} if torn else {"running", "done"}
    )


@pytest.mark.parametrize("number", range(3))
def test_a_full_disk_leaves_the_old_status(tmp_path: Path, number: int) -> None:
    write_status(tmp_path, "running", None)
    with pytest.raises(OSError, match="No space"), breaking(number, errno.ENOSPC):
        write_status(tmp_path, "done", 0)
    assert os.listdir(tmp_path) == ["status.json"]
    status = read_status(tmp_path)
    assert status is not None and status["state"] == "running"


# ------------------------------------------------------------------------------- whose folder it is
def test_a_free_folder(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    for name in (".lock", ".run_identity.json.tmp"):
        (tmp_path / "killed" / name).write_text("")
    for folder in (tmp_path / "killed", tmp_path / "absent", tmp_path / "absent" / "below"):
        assert describe_folder(folder).kind == "empty"
        assert check_output_folder(folder, IDENTITY) == []
    assert os.listdir(tmp_path) == ["killed"]


def test_the_same_run_has_no_differences_and_another_shows_them(tmp_path: Path) -> None:
    write_identity(tmp_path, IDENTITY)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": "tiny"}))
    write_status(tmp_path, "running", None)
    assert check_output_folder(tmp_path, IDENTITY) == []
    described = describe_folder(tmp_path)
    assert described.kind == "run" and described.config == {"model": "tiny"}
    assert (
        described.identity
        == read_identity(tmp_path)
        == {
            **IDENTITY,
            "levels": ["explain", "topology"],
        }
    )
    assert described.status is not None and described.status["state"] == "running"
    other = {**IDENTITY, "seed": 43, "tokenizer": "cd34"}
    del other["data"]
    differences = check_output_folder(tmp_path, other)
    assert differences == [
        Difference("seed", 42, 43),
        Difference("tokenizer", None, "cd34"),
        Difference("data", "ab12", None),
    ]
    assert format_differences(differences).splitlines()[0] == "seed: 42 in the folder, 43 now"


def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(StateError, match="not a run of this package") as caught:
        check_output_folder(tmp_path, IDENTITY)
    assert caught.value.exit_code == 2 and "--output-dir" in caught.value.fix
    (tmp_path / "run_identity.json").write_text("{")
    with pytest.raises(StateError, match="broken"):
        check_output_folder(tmp_path, IDENTITY)
    for path in (tmp_path / "thesis.tex", tmp_path / "dangling"):
        if path.name == "dangling":
            path.symlink_to(tmp_path / "nothing")
        with pytest.raises(StateError, match="cannot be read|link to nothing"):
            check_output_folder(path, IDENTITY)


def test_a_folder_that_another_rank_makes_at_this_moment_is_empty(
    tmp_path: Path, monkeypatch
) -> None:
    """Rank 0 makes the output folder while others look for it: a rank was refused, for a link to
    nothing.
    """
    folder, plain = tmp_path / "run", os.listdir
    lock = RunLock(folder)

    def listdir(path: Path) -> list[str]:
        monkeypatch.setattr(os, "listdir", plain)
        try:
            return plain(path)
        finally:
            lock.__enter__()

    monkeypatch.setattr(os, "listdir", listdir)
    assert check_output_folder(folder, IDENTITY) == [] and folder.is_dir()
    lock.__exit__(None, None, None)


def test_a_hostile_run_yaml_runs_nothing(tmp_path: Path) -> None:
    write_identity(tmp_path, IDENTITY)
    (tmp_path / "run.yaml").write_text(
        f"x: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n"
    )
    assert describe_folder(tmp_path).config is None
    assert not (tmp_path / "made").exists()


# ------------------------------------------------------------------------------------ samples.jsonl
def whole_log(steps: int) -> list[dict[str, object]]:
    return [{"step": step, "ids": [step * 2, step * 2 + 1]} for step in range(1, steps + 1)]


def write_steps(path: Path, first: int, last: int, resume_step: int) -> None:
    with SampleLog(path, resume_step) as log:
        for record in whole_log(last)[first - 1 :]:
            log.append(record["step"], record["ids"])  # type: ignore[arg-type]
        log.sync()


def test_the_form_of_a_line(tmp_path: Path) -> None:
    write_steps(tmp_path / "samples.jsonl", 1, 2, 0)
    expected = '{"step": 1, "ids": [2, 3]}\n{"step": 2, "ids": [4, 5]}\n'
    assert (tmp_path / "samples.jsonl").read_text() == expected


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl")
    for step in range(1, 4):
        log.append(step, [step])
        assert len((tmp_path / "samples.jsonl").read_bytes().splitlines()) == step
    log.close()
    log.close()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), total=st.integers(1, 12))
def test_an_interrupted_log_ends_up_as_an_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, total: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "samples.jsonl"
    done = 0
    for _ in range(data.draw(st.integers(0, 4))):
        reached = data.draw(st.integers(done, total))
        write_steps(path, done + 1, reached, done)
        # Killed while it wrote the next line; resumed from a checkpoint at or before what is whole.
        with open(path, "ab") as file:
            line = json.dumps({"step": reached + 1, "ids": [1, 2, 3]}).encode() + b"\n"
            file.write(
                data.draw(
                    st.sampled_from([line[: data.draw(st.integers(0, len(line)))], b"\0" * 40])
                )
            )
        done = data.draw(st.integers(0, reached))
    write_steps(path, done + 1, total, done)
    assert [json.loads(line) for line in path.read_text().splitlines()] == whole_log(total)
    assert list(read_jsonl_tolerant(path)) == whole_log(total)


def test_lines_that_are_missing_are_said_and_none_is_invented(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "samples.jsonl"
    write_steps(path, 1, 3, 0)
    with caplog.at_level(logging.WARNING, "finetune"):
        SampleLog(path, 5).close()
    assert "not whole up to step 5" in caplog.text and "missing from step 4" in caplog.text
    assert list(read_jsonl_tolerant(path)) == whole_log(3)
    caplog.clear()
    path.write_text('{"step": 1, "ids": []}\nnonsense\n{"step": 3, "ids": []}\n')
    with caplog.at_level(logging.WARNING, "finetune"):
        SampleLog(path, 3).close()
    assert "not whole up to step 3" in caplog.text and "missing from step 2" in caplog.text
    assert len(caplog.records) == 1
    assert len(path.read_text().splitlines()) == 3


def test_a_right_log_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "finetune"):
        write_steps(tmp_path / "samples.jsonl", 1, 3, 0)
        write_steps(tmp_path / "samples.jsonl", 3, 5, 2)
        write_steps(tmp_path / "samples.jsonl", 6, 6, 5)
    assert caplog.records == []


def test_a_linked_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("my text")
    (tmp_path / "samples.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError):
        SampleLog(tmp_path / "samples.jsonl")
    assert (tmp_path / "mine").read_text() == "my text"


def test_the_reader_forgives_a_torn_last_line_only(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for tail in ("", '{"a": 2', '{"a": 2}', "\0\0\0", "[1]", '{"a"\n'):
        path.write_text('{"a": 1}\n' + tail)
        assert list(read_jsonl_tolerant(path)) == [{"a": 1}], tail
    path.write_text(textwrap.dedent('{"a": 1}\n{"a"\n{"a": 3}\n'))
    with pytest.raises(DataError, match="log.jsonl:2"):
        list(read_jsonl_tolerant(path))
