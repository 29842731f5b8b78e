"""`finetune clean` ends what a run recorded and left, and nothing else. The processes are real."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, environment
from run_helpers import alive, wait_for

from finetune.__main__ import main as finetune
from finetune.commands.clean import leftovers
from finetune.commands.clean.command import main
from finetune.commands.clean.leftovers import find_stale
from finetune.storage.launch_record import describe
from finetune.storage.run_lock import RunLock

SLEEP = ["sleep", "600"]
SAVING = [sys.executable, "-S", "-c", "import time; time.sleep(0.5)"]
STUBBORN = ["sh", "-c", "trap '' TERM; echo; while true; do sleep 0.1; done"]
# A worker as torch elastic starts it: in a session of its own, with the run's lock and a log of its
# own open.
WORKER = """
import os, sys, time
from pathlib import Path
from finetune.storage.run_log import add_log_file
from finetune.storage.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    add_log_file(Path(sys.argv[1]), 0)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""
AGENT = """
import subprocess, sys, time
subprocess.Popen(sys.argv[1:], start_new_session=True)
time.sleep(600)
"""
MAPPING = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 4096)
print(flush=True)
time.sleep(600)
"""
FROZEN = ROOT / "tests" / "frozen" / "clean.txt"

Start = Callable[..., subprocess.Popen]
Clean = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts real processes, and ends them (by their handles) when the test is over."""
    started: list[subprocess.Popen] = []

    def begin(words: Sequence[str] = SLEEP, **options: Any) -> subprocess.Popen:
        started.append(process := subprocess.Popen(words, **options))
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """An empty folder to work in, with `runs/one` of a run that has ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "runs" / "one"
    (run / "logs").mkdir(parents=True)
    (run / "status.json").write_text('{"state": "running", "exit_code": null}')
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def clean(place: Path, capsys) -> Clean:
    """Exit code and report of the command."""

    def call(*words: str) -> tuple[int, dict[str, Any]]:
        code = main([*words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


NOW = ("--yes", "--wait", "0")


def described(process: subprocess.Popen, **changed: Any) -> dict[str, Any]:
    """A process as the launcher records it, which waits for a command line: right after exec there
    is none.
    """
    found = describe(process.pid, "worker", rank=0, attempt=1)
    assert found is not None and found.command_digest is not None
    return asdict(found) | changed


def gone(process: subprocess.Popen, role: str = "supervisor") -> dict[str, Any]:
    facts = described(process, role=role)
    process.kill()
    process.wait()
    return facts


def record_launch(place: Path, *processes: dict[str, Any], number: int = 1) -> Path:
    path = place / "logs" / f"20260101-000000-{number}.processes.json"
    content = {"version": 1, "log": "x.log", "output_dir": str(place / "runs" / "one")}
    content |= {"started_at": "2026-01-01T00:00:00+00:00", "ended_at": None}
    path.write_text(json.dumps({**content, "processes": processes}))
    return path


def is_running(process: subprocess.Popen) -> bool:
    return process.poll() is None


def pids(report: dict[str, Any]) -> list[int]:
    return [process["pid"] for process in report["processes"]]


# ---------------------------------------------------------------- processes


@pytest.mark.frozen
def test_an_orphan_is_listed_and_ended_only_with_yes(place, start, clean, capsys):
    orphan, stranger, other = start(), start(), start()  # of the same command line
    # a step of the clock changes nothing
    facts = described(orphan, rank=3)
    facts["start_time"] += 5
    record_launch(place, gone(start()), facts, described(other, start_ticks=1))
    (place / "runs" / "one" / ".staging-5-abc").mkdir()
    code, report = clean("runs/one")
    assert (code, report["dry_run"], pids(report)) == (1, True, [orphan.pid])
    assert (report["processes"][0]["rank"], report["processes"][0]["done"]) == (3, False)
    lines = [line for line in FROZEN.read_text().splitlines() if line and not line.startswith("#")]
    frozen = {name: set(fields.split()) for name, fields in (line.split(": ") for line in lines)}
    assert set(report) == frozen["top"] and set(report["files"][0]) == frozen["file"]
    assert set(report["processes"][0]) == frozen["process"]
    assert set(report["left_alone"][0]) <= {field.rstrip("?") for field in frozen["left_alone"]}
    english = f"process {orphan.pid}  worker 3 of"
    for language, text in (("zh", f"进程 {orphan.pid}"), ("en", english)):
        assert main(["--lang", language]) == 1
        printed = capsys.readouterr().out
        assert text in printed and "--yes" in printed and "sleep 600" in printed
    assert is_running(orphan)
    assert main(["--yes", "--wait", "0.2"]) == 0
    printed = capsys.readouterr()
    assert text in printed.err and "[ended]" in printed.out, "before and after"
    assert orphan.wait() == -15 and is_running(stranger) and is_running(other)
    code, report = clean()
    assert code == 0 and pids(report) == [], "nothing is left"


@pytest.mark.parametrize(
    ("supervisor", "worker", "why"),
    [
        # a record of an older version has no more than the wall time
        ("gone", {"start_time": 1e9, "boot_id": None, "start_ticks": None}, "used again"),
        ("gone", {"start_ticks": 1}, "used again"),
        ("gone", {"boot_id": "of another boot"}, "used again"),
        ("gone", {"host": "another-host"}, None),
        ("gone", {"pid": "none"}, None),
        # a launcher that may be alive
        ({}, {}, None),
        ({"host": "another-host"}, {}, None),
        # a list without a launcher
        (None, {}, None),
    ],
)
def test_what_may_be_another_or_has_its_launcher_is_left_alone(
    supervisor, worker, why, place, start, clean
):
    process, launcher = start(), start()
    listed = [described(process) | worker]
    if supervisor == "gone":
        listed.append(gone(launcher))
    elif supervisor is not None:
        listed.append(described(launcher, role="supervisor", **supervisor))
    record_launch(place, *listed)
    record_launch(place, gone(start()), number=2)  # of another launch
    code, report = clean(*NOW)
    assert code == 0 and report["processes"] == [] and is_running(process)
    assert [why in left["why"] for left in report["left_alone"]] == ([True] if why else [])


def test_a_record_that_others_may_have_written_is_not_believed(place, start, clean):
    """Process ids, start times and commands are there for everybody to see: a forged record has
    them right.
    """
    orphan = start()
    path = record_launch(place, gone(start()), described(orphan))
    writable = "others can write the record (chmod go-w, if it is yours)"
    for mode, owner, why in (
        (0o664, os.getuid(), writable),
        (0o646, os.getuid(), writable),
        (0o644, 65534, "the record belongs to another user"),
    ):
        if os.getuid() in (0, owner):
            path.chmod(mode)
            os.chown(path, owner, -1)
            code, report = clean(*NOW)
            assert (code, report["processes"]) == (0, []) and is_running(orphan)
            assert report["left_alone"] == [{"file": "logs/" + path.name, "why": why}]
    os.chown(path, os.getuid(), -1)
    assert clean()[0] == 1


def test_another_users_process_is_left_alone(place: Path, start: Start, clean: Clean, monkeypatch):
    process = start(SLEEP, user=65534) if os.getuid() == 0 else start()
    if os.getuid() != 0:
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    record_launch(place, gone(start()), described(process))
    code, report = clean(*NOW)
    assert code == 0 and "another user" in report["left_alone"][0]["why"] and is_running(process)


def test_one_that_does_not_listen_is_killed_and_one_that_saves_is_waited_for(place, start, clean):
    stubborn = start(STUBBORN, stdout=subprocess.PIPE)
    stubborn.stdout.readline()
    record_launch(place, gone(start()), described(stubborn))
    assert clean("--yes", "--wait", "0.1")[0] == 0 and stubborn.wait() == -9
    saving = start(SAVING)
    record_launch(place, gone(start()), described(saving))
    assert clean("--yes", "--wait", "30")[0] == 0
    assert saving.wait() == 0, "it was signalled although it was saving"


def test_a_process_that_took_the_id_meanwhile_is_not_signalled(place, start, monkeypatch):
    """Between the listing and the signal: the process of that id is another one by now."""
    process = start()
    record_launch(place, gone(start()), described(process))
    stale = find_stale(None)
    (orphan,) = stale.orphans
    monkeypatch.setattr(orphan.process, "_ident", (process.pid, 1.0))
    leftovers.clean(stale, 0.0)
    assert orphan.problem == "" and is_running(process)


def test_a_worker_that_only_the_run_folder_knows(place, start, clean, monkeypatch):
    run = place / "runs" / "two"
    piped = {"stdout": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", WORKER, str(run)]
    # started by hand (nohup ... &, and the shell is gone) it is never an orphan
    alone = start(words, env=environment(), **piped)
    assert int(alone.stdout.readline()) == alone.pid
    assert [process.pid for process in leftovers._lock_of(run).processes] == [alone.pid]
    assert find_stale(run).orphans == []
    alone.kill()
    alone.wait()
    variables = environment({"TORCHELASTIC_RUN_ID": "1", "RANK": "0"})
    parent = start([sys.executable, "-S", "-c", AGENT, *words], env=variables, **piped)
    worker = int(parent.stdout.readline())
    assert clean(str(run))[0] == 0 and alive([worker]), "its launcher is alive"
    parent.kill()
    parent.wait()
    wait_for(lambda: clean(str(run))[0] == 1, what="the worker's parent changes")
    with monkeypatch.context() as patch:  # a stranger's lock is no record
        patch.setattr(os, "getuid", lambda: 4_000_000)
        assert leftovers._lock_of(run) is None
    code, report = clean(str(run), "--yes", "--wait", "0.1")
    assert code == 0 and pids(report) == [worker]
    wait_for(lambda: not alive([worker]))


# ---------------------------------------------------------------- files


def test_unfinished_checkpoints_go_unless_the_run_is_at_work(place: Path, clean: Clean):
    run = place / "runs" / "one"
    unfinished = [".removing-checkpoint-3", ".staging-5-abc"]
    kept = [".invalid-checkpoint-4-1", "checkpoint-5"]
    for name in (*unfinished, *kept):
        (run / name).mkdir()
        (run / name / "weights.safetensors").write_bytes(b"x" * 100)
    with RunLock(run):
        code, report = clean("--yes")
        assert code == 0 and report["files"] == []
        assert {"run": "runs/one", "why": "the run is at work"} in report["left_alone"]
    code, report = clean()
    found = [
        (file["kind"], Path(file["path"]).name, file["size_bytes"]) for file in report["files"]
    ]
    assert code == 1 and found == [("checkpoint", name, 100) for name in unfinished]
    assert clean("--yes")[0] == 0
    left = {path.name for path in run.iterdir()}
    assert left >= set(kept) and not left & set(unfinished)


@pytest.fixture
def shared(place: Path, start: Start, monkeypatch) -> tuple[Path, Path]:
    """A folder in the place of /dev/shm, and what a recorded worker that is gone left there; its
    run wrote after that.
    """
    folder = place / "shm"
    folder.mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY_FOLDER", folder)
    worker = gone(start(), "worker")
    record_launch(place, gone(start()), worker)
    left = folder / f"torch_{worker['pid']}_12345_0"
    left.write_bytes(b"x" * 4096)
    log, moment = place / "runs" / "one" / "trainer_log.jsonl", time.time() + 60
    log.write_text("")
    os.utime(log, (moment, moment))
    return folder, left


def found() -> list[str]:
    return [file.path.name for file in find_stale(None).files]


def test_shared_memory_of_a_recorded_process_that_is_gone(shared: tuple[Path, Path], place: Path):
    folder, left = shared
    pid = left.name.split("_")[1]
    others = {f"torch_{os.getpid()}_1_0", f"torch_{pid}", f"sem.{pid}", f"x{pid}_1_0", "psm_1234"}
    for name in others:
        (folder / name).write_bytes(b"x")
    assert found() == [left.name]
    now = time.time()
    for moment in (now - 3600, now + 3600):  # from before or after the run: another's
        os.utime(left, (moment, moment))
        assert found() == []
    os.utime(left, (now, now))
    with RunLock(place / "runs" / "one"):
        assert found() == [], "the run is at work, perhaps where its processes cannot be seen"
    stale = find_stale(None)
    with open(left, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert found() == []
        leftovers.clean(stale, 0)
        assert stale.files[0].problem and left.exists(), "it came into use since it was listed"
    leftovers.clean(stale, 0)
    assert stale.files[0].problem == "" and {path.name for path in folder.iterdir()} == others


def test_shared_memory_that_an_orphan_has_mapped_goes_with_it(shared, place, start):
    folder, left = shared
    left.rename(folder / "buffer_of_any_name")
    (folder / "another").write_bytes(b"x" * 4096)
    words = [sys.executable, "-S", "-c", MAPPING, str(folder / "buffer_of_any_name")]
    orphan = start(words, stdout=subprocess.PIPE)
    orphan.stdout.readline()
    record_launch(place, gone(start()), described(orphan))
    stale = find_stale(None)
    assert [file.path.name for file in stale.files] == ["buffer_of_any_name"]
    leftovers.clean(stale, 0.1)
    assert [item.problem for item in (*stale.orphans, *stale.files)] == ["", ""]
    assert not is_running(orphan) and [path.name for path in folder.iterdir()] == ["another"]


def test_what_is_not_a_run_is_refused(place: Path):
    (place / "work").mkdir()
    (place / "work" / "thesis.tex").touch()
    assert finetune(["clean", "work", "--yes"]) == 2 and (place / "work" / "thesis.tex").exists()
    assert finetune(["clean", "nowhere"]) == 2
    assert finetune(["clean", "runs/one", "--wait", "-1"]) == 2
    assert finetune(["clean"]) == 0
