"""`finetune clean` ends what a run recorded and left, and nothing else. The processes are real."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import ROOT, environment
from run_helpers import wait_for

from finetune.commands.clean import leftovers
from finetune.commands.clean.command import main
from finetune.commands.clean.leftovers import find_stale
from finetune.storage.launch_record import describe
from finetune.storage.run_lock import RunLock

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)", "finetune.sft"]
STUBBORN = [
    sys.executable,
    "-c",
    (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True);"
        " time.sleep(600)"
    ),
    "finetune.sft",
]
# A worker as torch elastic starts it: in a session of its own, with the run's lock and a log of its
# own open.
WORKER = """
import sys, time, os, signal
from pathlib import Path
from finetune.storage.run_log import add_log_file
from finetune.storage.run_lock import RunLock
with RunLock(Path(sys.argv[2])):
    add_log_file(Path(sys.argv[2]), 0)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""
AGENT = """
import subprocess, sys, time
subprocess.Popen(sys.argv[1:], start_new_session=True)
time.sleep(600)
"""
# A record of an older version has no more than the wall time.
BEFORE_TICKS = {"boot_id": None, "start_ticks": None}
FROZEN = ROOT / "tests" / "frozen" / "clean.txt"

Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts real processes, and ends them (by their handles) when the test is over."""
    started: list[subprocess.Popen] = []

    def begin(words: Sequence[str] = SLEEP, **options: Any) -> subprocess.Popen:
        started.append(process := subprocess.Popen(words, **options))
        command = Path(f"/proc/{process.pid}/cmdline")
        # Right after exec a process has none, and a busy machine may look then.
        while process.poll() is None and command.exists() and not command.read_bytes():
            time.sleep(0.01)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with `runs/one` of a run that has ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "runs" / "one"
    (run / "logs").mkdir(parents=True)
    (run / "status.json").write_text('{"state": "running", "exit_code": null}')
    (tmp_path / "logs").mkdir()
    return tmp_path


def described(process: subprocess.Popen, **changed: Any) -> dict[str, Any]:
    """A process as the launcher records it, which waits for a command line: right after exec there
    is none.
    """
    found = describe(process.pid, "worker", rank=0, attempt=1)
    assert found is not None and found.command_digest is not None
    return asdict(found) | changed


def gone_supervisor(start: Start, **changed: Any) -> dict[str, Any]:
    process = start()
    facts = described(process, role="supervisor", rank=None, **changed)
    process.kill()
    process.wait()
    return facts


def record_launch(place: Path, *processes: dict[str, Any], name: str = "20260101-000000-1") -> Path:
    path = place / "logs" / f"{name}.processes.json"
    content = {
        "version": 1,
        "log": f"{name}.log",
        "output_dir": str(place / "runs" / "one"),
        "ended_at": None,
    }
    path.write_text(
        json.dumps(
            {**content, "started_at": "2026-01-01T00:00:00+00:00", "processes": list(processes)}
        )
    )
    return path


def is_running(process: subprocess.Popen) -> bool:
    return process.poll() is None


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------- processes


def test_an_orphan_is_listed_and_ended_only_with_yes_and_a_stranger_with_its_command_line_is_not(
    place: Path, start: Start, capsys: pytest.CaptureFixture[str]
):
    orphan, stranger = start(), start()
    record_launch(place, gone_supervisor(start), described(orphan, rank=3))
    code, report = said(capsys, "runs/one")
    assert (code, report["dry_run"]) == (1, True)
    assert [(p["pid"], p["rank"], p["done"]) for p in report["processes"]] == [
        (orphan.pid, 3, False)
    ]
    assert is_running(orphan)
    code, report = said(capsys, "--yes", "--wait", "0.3")
    assert code == 0 and [(p["pid"], p["done"]) for p in report["processes"]] == [
        (orphan.pid, True)
    ]
    assert not is_running(orphan) and orphan.returncode == -15
    assert is_running(stranger)
    assert said(capsys)[0] == 0, "nothing is left"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"start_time": 1_000_000_000.0, **BEFORE_TICKS}, "used again"),
        ({"start_ticks": 1}, "used again"),
        ({"boot_id": "of another boot"}, "used again"),
        ({"host": "another-host"}, None),
        ({"pid": "none"}, None),
    ],
)
def test_a_process_that_is_not_what_was_recorded_is_left_alone(
    changed: dict[str, Any],
    why: str | None,
    place: Path,
    start: Start,
    capsys: pytest.CaptureFixture[str],
):
    process = start()
    record_launch(place, gone_supervisor(start), described(process) | changed)
    code, report = said(capsys, "--yes", "--wait", "0")
    assert code == 0 and report["processes"] == [] and is_running(process)
    assert [why in left["why"] for left in report["left_alone"]] == ([True] if why else [])


def test_a_step_of_the_clock_changes_nothing(
    place: Path, start: Start, capsys: pytest.CaptureFixture[str]
):
    orphan = start()
    record_launch(
        place,
        gone_supervisor(start),
        described(orphan, start_time=described(orphan)["start_time"] + 5),
    )
    assert [p["pid"] for p in said(capsys)[1]["processes"]] == [orphan.pid]


def test_a_record_that_others_may_have_written_is_not_believed(
    place: Path, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Process ids, start times and commands are there for everybody to see: a forged record has
    them right.
    """
    orphan = start()
    path = record_launch(place, gone_supervisor(start), described(orphan))

    def is_refused(why: str) -> bool:
        code, report = said(capsys, "--yes", "--wait", "0")
        assert (code, report["processes"]) == (0, []) and is_running(orphan)
        return report["left_alone"] == [{"file": "logs/" + path.name, "why": why}]

    for mode in (0o664, 0o646):
        path.chmod(mode)
        assert is_refused("others can write the record (chmod go-w, if it is yours)")
    path.chmod(0o644)
    assert said(capsys)[0] == 1
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)
        assert is_refused("the record belongs to another user")


def test_a_strangers_lock_is_no_record(
    elastic: tuple[subprocess.Popen, int, Path], monkeypatch: pytest.MonkeyPatch
):
    _parent, worker, run = elastic
    lock = leftovers._lock_of(run)
    assert lock is not None and [process.pid for process in lock.processes] == [worker]
    if os.getuid() == 0:
        os.chown(run / ".lock", 65534, 65534)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert leftovers._lock_of(run) is None


def test_another_users_process_is_left_alone(
    place: Path, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if os.getuid() == 0:
        process = start(["sleep", "600"], user=65534)  # for real
    else:
        process = start()
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    record_launch(place, gone_supervisor(start), described(process))
    code, report = said(capsys, "--yes", "--wait", "0")
    assert code == 0 and "another user" in report["left_alone"][0]["why"] and is_running(process)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"host": "another-host"},
        {"start_time": 1.0},
    ],
    ids=["", "another host", "clock step"],
)
def test_a_run_whose_launcher_may_be_alive_is_no_orphan(
    changed: dict[str, Any], place: Path, start: Start, capsys: pytest.CaptureFixture[str]
):
    worker, supervisor = start(), start()
    record_launch(
        place, described(supervisor, role="supervisor", rank=None, **changed), described(worker)
    )
    code, report = said(capsys, "--yes", "--wait", "0")
    assert (code, report["processes"]) == (0, []) and is_running(worker) and is_running(supervisor)


def test_a_list_without_its_launcher_proves_nothing(
    place: Path, start: Start, capsys: pytest.CaptureFixture[str]
):
    worker = start()
    record_launch(place, described(worker))
    record_launch(place, gone_supervisor(start), name="20260101-000000-2")  # of another launch
    assert said(capsys, "--yes", "--wait", "0")[0] == 0 and is_running(worker)


def test_one_that_does_not_listen_is_killed(
    place: Path, start: Start, capsys: pytest.CaptureFixture[str]
):
    process = start(STUBBORN, stdout=subprocess.PIPE)
    process.stdout.readline()
    record_launch(place, gone_supervisor(start), described(process))
    assert said(capsys, "--yes", "--wait", "0.3")[0] == 0
    assert process.wait() == -9


def test_one_that_is_about_to_end_is_waited_for(place: Path, start: Start):
    process = start([sys.executable, "-c", "import time; time.sleep(1.5)", "finetune.sft"])
    record_launch(place, gone_supervisor(start), described(process))
    assert main(["--yes", "--wait", "30"]) == 0
    assert process.wait() == 0, "it was signalled although it was saving"


def test_a_process_that_took_the_id_meanwhile_is_not_signalled(
    place: Path, start: Start, monkeypatch: pytest.MonkeyPatch
):
    """Between the listing and the signal: the process of that id is another one by now."""
    process = start()
    record_launch(place, gone_supervisor(start), described(process))
    stale = find_stale(None)
    (orphan,) = stale.orphans
    monkeypatch.setattr(orphan.process, "_ident", (process.pid, 1.0))
    leftovers.clean(stale, 0.0)
    assert orphan.problem == "" and is_running(process)


@pytest.fixture
def elastic(place: Path, start: Start) -> tuple[subprocess.Popen, int, Path]:
    """A parent and its worker, as torch elastic and a rank; the worker's id; the run."""
    run = place / "runs" / "two"
    variables = environment({"TORCHELASTIC_RUN_ID": "1", "RANK": "0"})
    words = [sys.executable, "-c", WORKER, "finetune.sft", str(run)]
    parent = start(
        [sys.executable, "-c", AGENT, *words], env=variables, stdout=subprocess.PIPE, text=True
    )
    return parent, int(parent.stdout.readline()), run


def test_a_worker_that_only_the_run_folder_knows(
    elastic: tuple[subprocess.Popen, int, Path], capsys: pytest.CaptureFixture[str]
):
    parent, worker, run = elastic
    assert said(capsys, str(run)) == (0, said(capsys, str(run))[1]), "its launcher is alive"
    assert psutil.pid_exists(worker)
    parent.kill()
    parent.wait()
    wait_for(lambda: said(capsys, str(run))[0] == 1, what="the worker's parent changes")
    code, report = said(capsys, str(run), "--yes", "--wait", "0.3")
    assert code == 0 and [p["pid"] for p in report["processes"]] == [worker]
    wait_for(
        lambda: (
            not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
        )
    )


def test_the_folder_of_a_run_does_not_prove_a_process_without_its_start(place: Path, start: Start):
    """The id fits: a run on another machine that shares the disk may have had the same id."""
    run = place / "runs" / "one"
    process = start()
    facts = {
        "pid": process.pid,
        "host": socket.gethostname(),
        "since": "2099-01-01T00:00:00+00:00",
    }
    (run / ".lock").write_text(json.dumps(facts))
    assert find_stale(run).orphans == []


def test_a_process_started_by_hand_is_never_an_orphan(
    elastic: tuple[subprocess.Popen, int, Path], start: Start
):
    parent, worker, run = elastic
    parent.kill()
    parent.wait()
    os.kill(worker, 9)
    words = [sys.executable, "-c", WORKER, "finetune.sft", str(run)]
    # nohup ... &, and the shell is gone
    alone = start(words, env=environment(), stdout=subprocess.PIPE, text=True)
    pid = int(alone.stdout.readline())
    lock = leftovers._lock_of(run)
    assert lock is not None and [process.pid for process in lock.processes] == [pid]
    assert find_stale(run).orphans == []


# ---------------------------------------------------------------- files


def test_unfinished_checkpoints_go_unless_the_run_is_at_work(
    place: Path, capsys: pytest.CaptureFixture[str]
):
    run = place / "runs" / "one"
    for name in (
        ".staging-5-abc",
        ".removing-checkpoint-3",
        "checkpoint-5",
        ".invalid-checkpoint-4-1",
    ):
        (run / name).mkdir()
        (run / name / "weights.safetensors").write_bytes(b"x" * 100)
    with RunLock(run):
        code, report = said(capsys, "--yes")
        assert code == 0 and report["files"] == []
        assert {"run": "runs/one", "why": "the run is at work"} in report["left_alone"]
    code, report = said(capsys)
    assert code == 1
    assert [(f["kind"], Path(f["path"]).name, f["size_bytes"]) for f in report["files"]] == [
        ("checkpoint", ".removing-checkpoint-3", 100),
        ("checkpoint", ".staging-5-abc", 100),
    ]
    assert (run / ".staging-5-abc").exists()
    assert said(capsys, "--yes")[0] == 0
    left = sorted(
        path.name for path in run.iterdir() if "checkpoint" in path.name or "staging" in path.name
    )
    assert left == [".invalid-checkpoint-4-1", "checkpoint-5"]


@pytest.fixture
def shared(place: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, int]:
    """A folder in the place of /dev/shm, and the id of a recorded worker that is gone; its run
    wrote a second ago.
    """
    folder = place / "shm"
    folder.mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY_FOLDER", folder)
    process = start()
    record_launch(place, gone_supervisor(start), described(process))
    process.kill()
    process.wait()
    (place / "runs" / "one" / "trainer_log.jsonl").write_text("")
    moment = time.time() + 60  # the file below is older than the run's last sign of life
    os.utime(place / "runs" / "one" / "trainer_log.jsonl", (moment, moment))
    return folder, process.pid


def found() -> list[str]:
    return [file.path.name for file in find_stale(None).files]


def test_shared_memory_of_a_recorded_process_that_is_gone(shared: tuple[Path, int]):
    folder, pid = shared
    (folder / f"torch_{pid}_12345_0").write_bytes(b"x" * 64)
    for name in (
        f"torch_{os.getpid()}_1_0",
        "torch_1_1_0",
        "psm_1234",
        f"torch_{pid}",
        f"sem.{pid}",
        f"x{pid}_1_0",
    ):
        (folder / name).write_bytes(b"x")
    assert found() == [f"torch_{pid}_12345_0"]
    stale = find_stale(None)
    leftovers.clean(stale, 0)
    assert [file.problem for file in stale.files] == [""]
    assert len(list(folder.iterdir())) == 6


@pytest.mark.parametrize("moment", [-3600.0, 3600.0])
def test_shared_memory_from_before_or_after_the_run_is_anothers(
    moment: float, shared: tuple[Path, int]
):
    folder, pid = shared
    path = folder / f"torch_{pid}_12345_0"
    path.write_bytes(b"x")
    os.utime(path, (time.time() + moment, time.time() + moment))
    assert found() == []


def test_another_users_shared_memory_is_left_alone(
    shared: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
):
    folder, pid = shared
    path = folder / f"torch_{pid}_12345_0"
    path.write_bytes(b"x")
    stale = find_stale(None)
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert found() == []
    leftovers.clean(stale, 0)
    assert stale.files[0].problem and path.exists(), "it was looked at again before it was removed"


def test_shared_memory_in_use_is_left_alone(shared: tuple[Path, int], place: Path):
    folder, pid = shared
    path = folder / f"torch_{pid}_12345_0"
    path.write_bytes(b"x" * 4096)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert found() == []
    assert found() == [path.name]
    with RunLock(place / "runs" / "one"):
        assert found() == [], "the run is at work, perhaps where its processes cannot be seen"


def test_shared_memory_that_an_orphan_has_mapped_goes_with_it(
    place: Path, start: Start, monkeypatch: pytest.MonkeyPatch
):
    folder = place / "shm"
    folder.mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY_FOLDER", folder)
    for name in ("buffer_of_any_name", "another"):
        (folder / name).write_bytes(b"x" * 4096)
    code = (
        "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 4096);"
        " f.close(); print(flush=True); time.sleep(600)"
    )
    orphan = start(
        [sys.executable, "-c", code, str(folder / "buffer_of_any_name"), "finetune.sft"],
        stdout=subprocess.PIPE,
    )
    orphan.stdout.readline()
    record_launch(place, gone_supervisor(start), described(orphan))
    stale = find_stale(None)
    assert [file.path.name for file in stale.files] == ["buffer_of_any_name"]
    leftovers.clean(stale, 0.2)
    assert [item.problem for item in (*stale.orphans, *stale.files)] == ["", ""]
    assert not is_running(orphan)
    assert [path.name for path in folder.iterdir()] == ["another"]


# ---------------------------------------------------------------- command


@pytest.mark.frozen
def test_the_form_of_the_json_is_frozen(
    place: Path, start: Start, capsys: pytest.CaptureFixture[str]
):
    lines = [line for line in FROZEN.read_text().splitlines() if line and not line.startswith("#")]
    frozen = {name: set(fields.split()) for name, fields in (line.split(": ") for line in lines)}
    orphan, other = start(), start()
    (place / "runs" / "one" / ".staging-5-abc").mkdir()
    record_launch(place, gone_supervisor(start), described(orphan), described(other, start_ticks=1))
    report = said(capsys)[1]
    assert set(report) == frozen["top"]
    assert (
        set(report["processes"][0]) == frozen["process"]
        and set(report["files"][0]) == frozen["file"]
    )
    assert set(report["left_alone"][0]) <= {field.rstrip("?") for field in frozen["left_alone"]}


def test_words_in_both_languages(place: Path, start: Start, capsys: pytest.CaptureFixture[str]):
    orphan = start()
    record_launch(place, gone_supervisor(start), described(orphan, rank=1))
    assert main(["--lang", "en"]) == 1
    english = capsys.readouterr().out
    assert f"process {orphan.pid}  worker 1 of" in english and "--yes" in english
    assert main(["--lang", "zh"]) == 1
    assert f"进程 {orphan.pid}" in capsys.readouterr().out
    assert "finetune.sft" in english, "what it will end is shown"
    assert main(["--yes", "--wait", "0.2", "--lang", "en"]) == 0
    after = capsys.readouterr()
    assert "[ended]" in after.out and f"process {orphan.pid}  worker 1 of" in after.err, (
        "before and after"
    )


def test_what_is_not_a_run_is_refused(place: Path):
    from finetune.__main__ import main as finetune

    (place / "work").mkdir()
    (place / "work" / "thesis.tex").touch()
    assert finetune(["clean", "work", "--yes"]) == 2 and (place / "work" / "thesis.tex").exists()
    assert finetune(["clean", "nowhere"]) == 2
    assert finetune(["clean", "runs/one", "--wait", "-1"]) == 2
    assert finetune(["clean"]) == 0
