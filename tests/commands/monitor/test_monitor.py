"""`finetune monitor`: what it knows of a run while it is written, cut, rotated and ended, and how
it shows it.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import random
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fake_runs import DIFFICULTIES, MIXES, make_preference_run, make_run, sign, start_event, step
from fake_runs import line as line_of
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT
from rich.cells import cell_len
from rich.console import Console
from run_helpers import wait_for

from finetune.__main__ import main as finetune
from finetune.batching.curriculum import Schedule, Stage
from finetune.commands.monitor import command as monitor
from finetune.commands.monitor.dashboard import Dashboard, Machine
from finetune.plain_text import plain_text
from finetune.runs import line_follower
from finetune.runs import reader as runs_reader
from finetune.runs.console_lines import parse_console_line
from finetune.runs.event_texts import event_text, format_duration
from finetune.runs.line_follower import LineFollower
from finetune.runs.reader import open_run
from finetune.runs.step_table import StepTable
from finetune.runs.text_chart import bar, sparkline, text_chart
from finetune.runtime.host import HostMeter, HostUse
from finetune.runtime.language import _, speaking
from finetune.runtime.smi import SmiDevice, SmiReport
from finetune.storage.run_lock import RunLock

FROZEN = ROOT / "tests" / "frozen" / "monitor.txt"
DONE = '{"state": "done", "exit_code": 0}'
GIB = 1 << 30
NUMBERS = {"total_bytes": 64 * GIB, "used_bytes": 50 * GIB}
NUMBERS |= {"utilization_percent": 97.0, "temperature_celsius": 61.0}
NPUS = tuple(SmiDevice(number, "910B3", f"NPU {number}", **NUMBERS) for number in range(8))
MACHINE = Machine(HostUse(0.87, 2.0, 3 * GIB, 24 * GIB), [SmiReport("npu", devices=NPUS)])


def shown(view, width, height, *, lang="en") -> str:
    """The picture as a terminal of this size gets it."""
    raw = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="", errors="replace")
    form = {"color_system": None, "legacy_windows": False}
    console = Console(file=raw, width=width, height=height, force_terminal=True, **form)
    with speaking(lang):
        console.print(Dashboard(view, MACHINE, note=_("q quit")))
    raw.flush()
    return re.sub(r"\x1b\[[01]?m", "", raw.buffer.getvalue().decode())


def append(folder: Path, name: str, *records: dict[str, Any] | str):
    """Add lines to a log of a run; an event has a time."""
    with open(folder / name, "a") as log:
        for record in records:
            if isinstance(record, dict):
                record = line_of({"time": time.time(), **record} if "event" in record else record)
            log.write(record)


# ---------------------------------------------------------------- following files


@settings(max_examples=60, deadline=None)
@given(choices=st.lists(st.integers(0, 9), min_size=1, max_size=25), seed=st.integers(0, 1 << 20))
def test_a_follower_has_what_the_file_has(choices: list[int], seed: int, tmp_path_factory):
    """Appends (torn too), cuts at any place with writing on at once, and replacements, between any
    two looks.
    """
    path, draw, content = tmp_path_factory.mktemp("follow") / "log", random.Random(seed), b""
    follower, had = LineFollower(path), []
    for choice in choices:
        more = b"".join(b"%d\n" % draw.randrange(10**9) for _ in range(draw.randrange(8)))
        if choice == 0:
            more += b"torn %d" % draw.randrange(10**9)
        elif choice in (6, 7) and path.exists():
            content = content[: draw.randrange(len(content) + 1)]
            os.truncate(path, len(content))
            more = more if choice == 7 else b""
        elif choice == 8:
            path.with_suffix(".new").touch()
            path.with_suffix(".new").rename(path)
            content = b""
        content += more
        with open(path, "ab") as file:
            file.write(more)
        if choice != 9:
            new = follower.poll()
            had = (had if not new.restarted else []) + new.lines
            assert had == content[: content.rfind(b"\n") + 1].splitlines()


def test_a_follower_of_unusual_files(tmp_path: Path, monkeypatch):
    path, follower = tmp_path / "log", LineFollower(tmp_path / "log")
    assert follower.poll() == (False, []) and follower.written_at is None
    os.mkfifo(path)
    assert follower.poll() == (False, [])
    path.unlink()
    # of the last bytes only whole lines
    path.write_bytes(b"aaa\nbbb\nccc\n")
    for last_bytes, lines in ((3, []), (4, [b"ccc"]), (5, [b"ccc"]), (8, [b"bbb", b"ccc"])):
        assert LineFollower(path, last_bytes).poll() == (False, lines)
    # a long one comes in pieces
    monkeypatch.setattr(line_follower, "_PIECE_BYTES", 10)
    path.write_bytes(b"1\n" * 20 + b"x" * 50 + b"\n" + b"torn")
    follower = LineFollower(path)
    assert [new.lines for new in follower.pieces()] == [[b"1"] * 6] * 3 + [[b"1", b"1", b"x" * 50]]


# ---------------------------------------------------------------- a run


def test_a_run_from_before_its_first_step_to_its_end(tmp_path: Path):
    folder = tmp_path / "one"
    reader = open_run(folder, may_come=True)
    assert reader.poll().state == "waiting"
    make_run(folder, steps=0)
    view = reader.poll()
    assert (view.state, view.step, view.total_steps, view.eta_seconds) == ("running", 0, 100, None)
    append(folder, "trainer_log.jsonl", *map(step, range(1, 31)), '{"step": 31, "lo')
    view = reader.poll()
    assert (view.step, view.eta_seconds, view.difficulties) == (30, 35.0, list(DIFFICULTIES[:2]))
    append(folder, "trainer_log.jsonl", 'ss": 1.0}\n')
    assert reader.poll().step == 31
    (folder / "status.json").write_text(DONE)
    assert (reader.poll().state, reader.poll().eta_seconds) == ("done", 0.0)
    alone = open_run(None, folder / "trainer_log.jsonl").poll()
    assert (alone.step, alone.state) == (31, "running") and alone.values("learning_rate")
    assert shown(alone, 100, 30) and monitor.plain_line(alone, Machine())


def test_sources_have_a_panel_and_are_no_difficulties(tmp_path: Path):
    folder = make_run(tmp_path / "one")
    own = {"source_tokens/books": 30, "source_share/books": 0.75, "source_loss/books": 1.5}
    append(folder, "trainer_log.jsonl", step(41, **own, **{"source_tokens/code": 10}))
    append(folder, "events.jsonl", {"event": "eval", "step": 40, "eval_loss": 2.0})
    append(folder, "events.jsonl", {"event": "eval", "step": 41, "eval_exact_match": 0.5})
    view = open_run(folder).poll()
    assert (view.sources, view.difficulties) == (["books", "code"], list(DIFFICULTIES))
    picture, said = shown(view, 140, 40), monitor.plain_line(view, MACHINE)
    for text in ("sources", "books", "75%", "1.5000", "exact match"):
        assert text in picture
    assert "books 1.5000" in said and "exact match 50.0%" in said and "NPU 7 78%" in said
    assert event_text(view.evaluations[-2]) == "step 40: validation loss 2.0000"


def test_preferences_are_shown(tmp_path: Path, capsys):
    folder = make_preference_run(tmp_path / "one")
    assert finetune(["monitor", "--once", str(folder)]) == 0
    said, view = capsys.readouterr().out, open_run(folder).poll()
    picture = shown(view, 160, 48)
    for name, text in (
        ("accuracy", "80.0%, eval 60.0%"),
        ("margin", "1.000, eval 0.750"),
        ("rejected reward", "-0.500, eval -0.375"),
        ("reference point", "2.000, eval 1.500"),
    ):
        assert f"{name} {text}" in said and re.search(rf"{name} +{text}", picture)
    assert "accuracy 80.0%" in shown(view, 70, 12)


def test_a_resumed_run_cuts_the_tail_that_it_trains_again(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=40)
    reader = open_run(folder)
    append(folder, "events.jsonl", {"event": "eval", "step": 40, "eval_loss": 9.0})
    assert reader.poll().evaluated() == [(0, 2.5), (40, 9.0)]
    # as the run's own log does: the same file, cut
    kept = (folder / "trainer_log.jsonl").read_text().splitlines(keepends=True)[:20]
    os.truncate(folder / "trainer_log.jsonl", len("".join(kept)))
    append(folder, "trainer_log.jsonl", *(step(n, loss=7.0) for n in range(21, 46)))
    append(folder, "events.jsonl", start_event(20), {"event": "resume", "step": 20})
    view = reader.poll()
    assert view.values("loss")[20:] == [(number, 7.0) for number in range(21, 46)]
    assert view.evaluated() == [(0, 2.5)], "what was measured on the training thrown away is gone"


def test_the_stage_is_the_schedules(tmp_path: Path):
    view = open_run(make_run(tmp_path / "one", steps=1)).poll()
    stages = tuple(Stage(until, mix) for until, mix in zip((0.3, 0.7, 1.0), MIXES, strict=True))
    for number, stage in enumerate(Schedule(DIFFICULTIES, stages).stage_of_steps(100), 1):
        view.steps = StepTable([step(number, **{f"loss/{level}": 1.0 for level in DIFFICULTIES})])
        assert view.stage.number == stage + 1
        shares = [weight / 100 for weight in MIXES[stage]]
        assert view.stage.shares == pytest.approx(dict(zip(DIFFICULTIES, shares, strict=True)))


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("failed", 1), ("stopped", 3)])
def test_an_ended_run(state: str, code: int, tmp_path: Path, capsys):
    status = {"error": "the disk \x1b[31mis full"} if state == "failed" else {}
    folder = make_run(tmp_path / "one", state=state, exit_code=code, **status)
    for form in ([], ["--json"]):  # it ends by itself
        assert finetune(["monitor", str(folder), "--lang", "en", *form]) == 0
        said = capsys.readouterr().out
        assert state in said and "\x1b" not in said
        assert ("the disk is full" in said) == (state == "failed")
        if not form:
            assert ("resume from checkpoint-20" in said) == (state == "stopped")
    assert json.loads(said)["exit_code"] == code


def test_a_killed_run_is_told_from_a_running_one(tmp_path: Path):
    folder = make_run(tmp_path / "one")

    def state() -> str:
        return open_run(folder).poll().state

    process = subprocess.Popen(["true"])
    process.wait()
    sign(folder, process.pid)
    assert state() == "vanished"
    sign(folder, process.pid, host="another-host")
    assert state() == "running", "from here that cannot be known"
    sign(folder, os.getpid(), since=1_000_000_000.0)
    assert state() == "vanished", "the id is a younger process's"
    with RunLock(folder):  # signs with boot and ticks: a step of the clock changes nothing
        signed = json.loads((folder / ".lock").read_text()) | {"since": "2001-09-09T01:46:40+00:00"}
        for later, known in ((0, "running"), (1, "vanished")):
            signed["start_ticks"] += later
            (folder / ".lock").write_text(json.dumps(signed))
            assert state() == known


SAY = "2026-01-0{} 10:00:0{},000 [WARNING] {}\n".format


def test_warnings_of_all_ranks_are_told_once(tmp_path: Path):
    folder = make_run(tmp_path / "one")
    (folder / "logs").mkdir()
    twice = "step 7 was skipped: loss or gradients are not finite"
    for name, text in (
        ("20260101-100000-1-rank0", SAY(1, 0, "of an earlier start")),
        ("20260102-100000-2-rank0", SAY(2, 1, "slow disk") + SAY(2, 2, twice)),
        ("20260102-100000-3-rank11", SAY(2, 3, "no \x1b]0;x\x07link").replace("WARNING", "ERROR")),
    ):
        (folder / "logs" / f"{name}.log").write_text(text)
    reader = open_run(folder)
    reader.poll()
    messages = [(m.level, m.rank, m.text or m.event["event"]) for m in reader.poll().messages]
    expected = [("ERROR", 11, "no link"), ("WARNING", 0, "nonfinite"), ("WARNING", 0, "slow disk")]
    assert sorted(messages) == expected


# ---------------------------------------------------------------- a console's copy


def test_the_consoles_own_lines_and_those_of_other_scripts():
    for text, expected in (
        (
            "2026-01-01 10:00:00,123 [INFO] step 37/120  stage 2/3  loss nan  2,645 tok/s"
            "  lr 0.000625  dt 0.227 s  mfu 12.5%  ETA 1:00:28",
            {"step": 37, "total_steps": 120, "stage": "stage 2/3", "loss": None, "mfu": 0.125}
            | {"tokens_per_second": 2645.0, "learning_rate": 0.000625, "step_seconds": 0.227}
            | {"eta_seconds": 3628},
        ),
        (
            "step 00010/00500 (2.00%) | loss: 3.456789 | lrm: 1.00 | tok/sec: 12,345 | mfu: 1.25%",
            {"step": 10, "total_steps": 500, "loss": 3.456789, "tokens_per_second": 12345.0}
            | {"mfu": 0.0125},
        ),
    ):
        assert parse_console_line(text.encode()).step == expected
    found = parse_console_line(b"[INFO] step 30  eval_loss 0.5677  eval_loss/explain 0.7317")
    assert found.evaluation == {"step": 30, "eval_loss": 0.5677, "eval_loss/explain": 0.7317}
    found = parse_console_line(b"[INFO] saved checkpoint-30").checkpoint
    assert found == {"name": "checkpoint-30", "step": 30}
    assert parse_console_line(b"[SUCCESS] done: 120 steps, output in x").end == "done"
    assert parse_console_line(b"[WARNING] stopped by SIGTERM at step 95; x").end == "stopped"
    assert parse_console_line(b"[ERROR] rank 3: no memory").warning == ("ERROR", 3, "no memory")


LINES = st.binary(max_size=80) | st.text(max_size=80).map(
    lambda text: f"[INFO] step {text}/9 loss {text}".encode()
)


@settings(max_examples=300, deadline=None)
@given(LINES)
def test_no_line_breaks_the_reader_or_reaches_the_terminal(raw: bytes):
    parse_console_line(raw)
    text = plain_text(raw.decode("utf-8", "replace"))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_a_console_that_is_rotated_and_cut_is_followed(tmp_path: Path, monkeypatch):
    path = tmp_path / "console.log"
    say = "[INFO] step {}/100  loss {}  1,000 tok/s  ETA 0:30\n".format
    path.write_text(say(1, 3.0) + say(2, 2.0))
    reader = open_run(None, path)
    assert reader.poll().step == 2
    os.replace(path, tmp_path / "console.log.1")
    path.write_text(say(3, 1.0))
    assert [s for s, _ in reader.poll().values("loss")] == [1, 2, 3]
    path.write_text(say(3, 9.0))  # cut in place, as the run went back
    view = reader.poll()
    assert view.values("loss") == [(1, 3.0), (2, 2.0), (3, 9.0)] and view.state == "running"
    append(tmp_path, "console.log", "[ERROR] the disk is full\n")
    assert reader.poll().state == "failed"
    # of a large one its end is read: what is read is in memory at once
    monkeypatch.setattr(runs_reader, "CONSOLE_BYTES", 1 << 20)
    os.truncate(path, 32 << 20)
    append(tmp_path, "console.log", "\n" + say(2, 2.0))
    tracemalloc.start()
    assert open_run(None, path).poll().values("loss") == [(2, 2.0)]
    assert tracemalloc.get_traced_memory()[1] < 4 * runs_reader.CONSOLE_BYTES
    tracemalloc.stop()


# ---------------------------------------------------------------- the picture


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (200, 60), (10, 3)])
def test_the_picture_fits_any_terminal(width: int, height: int, lang: str, tmp_path: Path):
    view = open_run(make_run(tmp_path / "a-run-with-a-rather-long-name-for-a-folder")).poll()
    text = shown(view, width, height, lang=lang)
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width and (len(lines) <= height or height < 8)
    wanted = ["40 / 100", "40%", "0.05", "1,040", *DIFFICULTIES[:2]] if width >= 60 else []
    if width >= 80:
        wanted += ["NPU 0", "50/64 GiB", "0.0001"]
        wanted += {"en": ["warnings", "q quit"], "zh": ["警告", "q 退出"]}[lang]
    assert [word for word in wanted if word not in text] == []


def test_a_run_that_says_nothing_is_told(tmp_path: Path):
    folder = make_run(tmp_path / "one")
    for name in ("trainer_log.jsonl", "events.jsonl"):
        os.utime(folder / name, (time.time() - 600, time.time() - 600))
    assert "nothing written for 10:0" in shown(open_run(folder).poll(), 120, 30)


def test_the_newest_warnings_are_shown(tmp_path: Path):
    folder = make_run(tmp_path / "one")
    skipped = [{"event": "nonfinite", "step": number, "ids": []} for number in range(11, 41)]
    append(folder, "events.jsonl", *skipped)
    view = open_run(folder).poll()
    texts = [warning["text"] for warning in monitor.to_json(view, MACHINE)["warnings"]]
    assert len(texts) == 20 and "step 40 " in texts[-1] and "step 21 " in texts[0]
    picture = shown(view, 120, 30)
    assert "step 40 was skipped" in picture and "step 11 was" not in picture


def test_a_chart_goes_through_its_points():
    rising = text_chart([(x, x) for x in range(64)], 8, 4)
    assert [len(row) for row in rising] == [8] * 4
    assert rising[0].strip() and rising[0][:4] == rising[3][4:] == "    " and rising[3][0] != " "
    assert text_chart([], 5, 2) == ["     ", "     "]
    flat = text_chart([(0, 1.0), (9, 1.0)], 4, 3, unicode=False)
    assert [row.count("*") for row in flat] == [0, 4, 0]
    assert "".join(bar(share, 2) for share in (-1, 0.5, 7)) == "░░█░██"
    assert sparkline(range(8), 8) == "▁▂▃▄▅▆▇█" and sparkline([], 5) == ""
    times = " ".join(map(format_duration, (5, 75, 3700, 100_000)))
    assert times == "0:05 1:15 1:01:40 1d 3:46:40"


# ---------------------------------------------------------------- this machine


GROUPS = {
    "pod/box/memory.max": "max",
    "pod/box/memory.current": "1",
    "pod/memory.max": "{half}",
    "pod/memory.current": "{quarter}",
    "pod/memory.stat": "anon 5\ninactive_file {eighth}",
    "pod/box/cpu.max": "50000 100000",
    # of version 1
    "memory/docker/memory.limit_in_bytes": "{half}",
    "memory/docker/memory.usage_in_bytes": "1000",
    "memory/memory.limit_in_bytes": "9223372036854771712",
}


def test_memory_and_cores_of_a_container(tmp_path: Path):
    total = psutil.virtual_memory().total
    parts = {"half": total // 2, "quarter": total // 4, "eighth": total // 8}
    for name, text in GROUPS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**parts) + "\n")

    def look(groups: str) -> HostUse:
        (tmp_path / "self").write_text(groups)
        return HostMeter(tmp_path, tmp_path / "self").look()

    use = look("0::/pod/box\n")
    assert (use.memory_total_bytes, use.cores) == (parts["half"], 0.5)
    assert use.memory_used_bytes == parts["quarter"] - parts["eighth"]
    use = look("4:memory:/docker\n3:cpu,cpuacct:/\n")
    assert (use.memory_total_bytes, use.memory_used_bytes) == (parts["half"], 1000)
    use = HostMeter(tmp_path / "nothing", tmp_path / "nothing").look()
    assert use.memory_total_bytes == total and 0 < use.memory_used_bytes < total


# ---------------------------------------------------------------- command


def test_the_newest_run_is_taken_and_named(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert finetune(["monitor", "--once"]) == 2
    for name, age in (("old", 5000), ("new", 0), ("older", 9000)):
        for path in make_run(tmp_path / "runs" / name).iterdir():
            os.utime(path, (time.time() - age, time.time() - age))
    (tmp_path / "runs" / "no-run").mkdir()
    assert finetune(["monitor", "--once", "--lang", "en"]) == 0
    said = capsys.readouterr()
    assert "runs/new" in said.err and "step 40/100" in said.out
    assert "[WARNING] step 7 was skipped" in said.out


def test_what_is_refused(tmp_path: Path, capsys):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "x").touch()
    run = make_run(tmp_path / "one")
    for arguments, text in (
        ([tmp_path / "won", "--once"], str(run)),  # what may be meant
        ([tmp_path / "no" / "where"], "is not there"),
        ([tmp_path / "work"], "is not a run"),
        (["--log", tmp_path / "nothing"], "is not a file"),
        ([run, "--log", "x"], "both"),
        ([run, "--interval", "0"], "at least 0.2"),
    ):
        assert finetune(["monitor", *map(str, arguments)]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.frozen
def test_the_form_of_the_json_is_frozen(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(monitor, "read_devices", lambda: MACHINE.devices)
    assert finetune(["monitor", str(make_run(tmp_path / "one")), "--once", "--json"]) == 0
    look = json.loads(capsys.readouterr().out)
    found = {"top": look, "stage": look["stage"], "host": look["host"]}
    found |= {"device": look["devices"][0], "warning": look["warnings"][0]}
    rows = [row for row in FROZEN.read_text().splitlines() if row and not row.startswith("#")]
    frozen = dict(row.split(": ") for row in rows)
    for name, part in found.items():
        assert sorted(part) == sorted(frozen[name].split())
    assert len(look["devices"]) == 8
    assert (look["step"], look["last"]["loss"], look["evaluation"]["eval_loss"]) == (40, 0.05, 2.5)


def test_lines_into_a_pipe_follow_the_run(tmp_path: Path, monkeypatch, capsys):
    folder = make_run(tmp_path / "one", steps=2)
    more = lambda: append(folder, "trainer_log.jsonl", step(3))  # noqa: E731
    work = iter((more, lambda: (folder / "status.json").write_text(DONE)))
    clock = SimpleNamespace(sleep=lambda _seconds: next(work)(), strftime=time.strftime)
    monkeypatch.setattr(monitor, "time", clock)
    monkeypatch.setattr(monitor, "read_devices", lambda: ())
    with speaking("en"):
        assert finetune(["monitor", str(folder), "--lang", "zh"]) == 0
    said = capsys.readouterr().out
    assert [text in said for text in ("2/100", "3/100", "已完成")] == [True] * 3
    assert said.count("[WARNING]") == 1


@pytest.mark.parametrize("way_out", ["q", "SIGTERM"])
def test_the_dashboard_on_a_real_terminal(way_out: str, tmp_path: Path):
    """Its own screen, kept up to date; the terminal is left as it was found."""
    folder = make_run(tmp_path / "one", steps=2)
    pid, leader = pty.fork()
    if pid == 0:
        code = 99
        try:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
            sys.stdin, sys.stdout = open(0), open(1, "w", encoding="utf-8")  # noqa: SIM115
            os.environ["TERM"] = "xterm-256color"
            code = finetune(["monitor", str(folder), "--interval", "0.2", "--lang", "en"])
        except SystemExit as ended:
            code = ended.code
        finally:
            os._exit(code)
    screen, before = b"", termios.tcgetattr(leader)

    def seen(text: bytes) -> bool:
        nonlocal screen
        while select.select([leader], [], [], 0.05)[0]:
            try:
                screen += os.read(leader, 65536)
            except OSError:  # it has ended
                break
        return text in screen

    def status() -> list[int]:
        seen(b"")
        ended, found = os.waitpid(pid, os.WNOHANG)
        return [found] if ended else []

    try:
        wait_for(lambda: seen(b"2 / 100"), 60)
        append(folder, "trainer_log.jsonl", step(3))
        wait_for(lambda: seen(b"3 / 100"), 60)
        if way_out == "q":
            os.write(leader, b"q")
        else:
            os.kill(pid, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(*wait_for(status, 60))
        assert code == (0 if way_out == "q" else 128 + signal.SIGTERM)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    assert termios.tcgetattr(leader) == before
    os.close(leader)
    assert screen.rindex(b"\x1b[?1049l") > screen.rindex(b"\x1b[?1049h")
    assert screen.rindex(b"\x1b[?25h") > screen.rindex(b"\x1b[?25l"), "the cursor is back"
