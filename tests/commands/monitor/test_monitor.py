"""`finetune monitor`: what it knows of a run while it is written, cut, rotated and ended, and how
it shows it.
"""

from __future__ import annotations

import io
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from fake_runs import (
    DIFFICULTIES,
    MIXES,
    line,
    make_preference_run,
    make_run,
    sign,
    start_event,
    step,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT, environment
from rich.console import Console
from run_helpers import wait_for

from finetune.__main__ import main as finetune
from finetune.batching.curriculum import Schedule, Stage
from finetune.commands.monitor import command as monitor
from finetune.commands.monitor.dashboard import STEP_NUMBERS, Dashboard, Machine
from finetune.errors import StateError
from finetune.plain_text import plain_text
from finetune.runs import event_texts, line_follower
from finetune.runs import reader as runs_reader
from finetune.runs.console_lines import parse_console_line
from finetune.runs.event_texts import event_text, format_duration
from finetune.runs.line_follower import LineFollower
from finetune.runs.reader import open_run, runs_in
from finetune.runs.step_table import StepTable
from finetune.runs.text_chart import averaged, bar, sparkline, text_chart, value_range
from finetune.runtime.host import HostMeter, HostUse
from finetune.runtime.language import _, speaking
from finetune.runtime.smi import SmiDevice, SmiReport
from finetune.storage.run_lock import RunLock

FROZEN = ROOT / "tests" / "frozen" / "monitor.txt"
GIB = 1 << 30
MACHINE = Machine(
    HostUse(0.87, 2.0, 3 * GIB, 24 * GIB),
    [
        SmiReport(
            "npu",
            devices=tuple(
                SmiDevice(
                    number, "910B3", f"NPU {number}", total_bytes=64 * GIB, used_bytes=50 * GIB,
                    utilization_percent=97.0, temperature_celsius=61.0,
                )
                for number in range(8)
            ),
        )
    ],
)  # fmt: skip


def shown(
    view: Any,
    width: int,
    height: int,
    *,
    lang: str = "en",
    encoding: str = "utf-8",
    colour: bool = True,
) -> str:
    """The picture as a terminal of this size gets it."""
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="", errors="replace")
    system = "truecolor" if colour else None
    console = Console(
        file=raw,
        width=width,
        height=height,
        force_terminal=True,
        color_system=system,
        legacy_windows=False,
    )
    with speaking(lang):
        console.print(Dashboard(view, MACHINE, note=_("q quit")))
    raw.flush()
    return raw.buffer.getvalue().decode(encoding)


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# ---------------------------------------------------------------- following files


class Writer:
    """A file with what a reader should have of it: the model that `LineFollower` is compared
    with.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = b""

    def write(self, more: bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(more)
        self.content += more

    def cut(self, size: int) -> None:
        self.content = self.content[:size]
        os.truncate(self.path, len(self.content))

    def replace(self) -> None:
        other = self.path.with_suffix(".new")
        other.write_bytes(b"")
        os.replace(other, self.path)
        self.content = b""


@settings(max_examples=60, deadline=None)
@given(choices=st.lists(st.integers(0, 9), min_size=1, max_size=25), seed=st.integers(0, 1 << 20))
def test_a_follower_has_what_the_file_has(
    choices: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory
):
    """Appends (torn too), cuts at any place with writing on at once, and replacements, between any
    two looks.
    """
    folder = tmp_path_factory.mktemp("follow")
    draw, writer = random.Random(seed), Writer(folder / "log")
    follower, had = LineFollower(writer.path), []
    for choice in choices:
        if choice < 6:
            writer.write(
                b"".join(b"%d\n" % draw.randrange(10**9) for _ in range(draw.randrange(4)))
            )
            writer.write(b"torn %d" % draw.randrange(10**9) if choice == 0 else b"")
        elif choice < 8 and writer.path.exists():
            writer.cut(draw.randrange(len(writer.content) + 1))
            writer.write(
                b"" if choice == 6 else b"again %d\n" % draw.randrange(10**9) * draw.randrange(8)
            )
        elif choice == 8 and writer.path.exists():
            writer.replace()
        if choice != 9:
            new = follower.poll()
            had = (had if not new.restarted else []) + new.lines
            assert had == writer.content[: writer.content.rfind(b"\n") + 1].splitlines()


def test_a_follower_waits_for_a_file_and_takes_no_pipe_for_one(tmp_path: Path):
    follower = LineFollower(tmp_path / "log")
    assert follower.poll() == (False, []) and follower.written_at is None
    os.mkfifo(tmp_path / "log")
    assert follower.poll() == (False, [])
    (tmp_path / "log").unlink()
    (tmp_path / "log").write_text("a\n")
    assert follower.poll() == (False, [b"a"]) and follower.written_at is not None


# ---------------------------------------------------------------- a run


def test_a_run_from_before_its_first_step_to_its_end(tmp_path: Path):
    folder = tmp_path / "runs" / "one"
    folder.parent.mkdir()
    reader = open_run(folder, may_come=True)
    assert reader.poll().state == "waiting"
    make_run(folder, steps=0)
    view = reader.poll()
    assert (view.state, view.step, view.total_steps, view.eta_seconds) == ("running", 0, 100, None)
    with open(folder / "trainer_log.jsonl", "a") as log:
        log.write("".join(line(step(n)) for n in range(1, 31)) + '{"step": 31, "lo')
        log.flush()
        view = reader.poll()
        assert (view.step, view.eta_seconds, view.difficulties) == (
            30,
            35.0,
            list(DIFFICULTIES[:2]),
        )
        log.write('ss": 1.0}\n')
    assert reader.poll().step == 31
    (folder / "status.json").write_text('{"state": "done", "exit_code": 0}')
    assert (reader.poll().state, reader.poll().eta_seconds) == ("done", 0.0)


def test_sources_have_a_panel_and_are_no_difficulties(tmp_path: Path):
    from finetune.commands.monitor.command import _numbers

    folder = make_run(tmp_path / "one")
    own = {
        "source_tokens/books": 30,
        "source_share/books": 0.75,
        "source_loss/books": 1.5,
        "source_tokens/code": 10,
    }
    with open(folder / "trainer_log.jsonl", "a") as log:
        log.write(line(step(41, **own)))
    view = open_run(folder).poll()
    assert (view.sources, view.difficulties) == (["books", "code"], list(DIFFICULTIES))
    text = without_styles(shown(view, 140, 40, lang="en"))
    assert "sources" in text and "books" in text and "75%" in text and "1.5000" in text
    assert "books 1.5000" in _numbers(view)
    with open(folder / "events.jsonl", "a") as events:
        events.write(
            line(
                {
                    "event": "eval",
                    "time": time.time(),
                    "step": 40,
                    "eval_loss": 2.0,
                    "eval_exact_match": 0.5,
                }
            )
        )
    view = open_run(folder).poll()
    assert "exact match 50.0%" in _numbers(view)
    assert "exact match" in without_styles(shown(view, 140, 40, lang="en"))
    assert event_text(view.evaluations[-1]) == "step 40: validation loss 2.0000, exact match 0.5000"


def test_preferences_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = make_preference_run(tmp_path / "one")
    expected = {
        "accuracy": "80.0%, eval 60.0%",
        "margin": "1.000, eval 0.750",
        "chosen reward": "0.500, eval 0.375",
        "rejected reward": "-0.500, eval -0.375",
        "reference point": "2.000, eval 1.500",
    }
    assert finetune(["monitor", "--once", str(folder)]) == 0
    said = capsys.readouterr().out
    assert all(f"{name} {text}" in said for name, text in expected.items()), said
    picture = without_styles(shown(open_run(folder).poll(), 160, 48))
    assert all(re.search(rf"{name} +{text}", picture) for name, text in expected.items()), picture
    assert "accuracy 80.0%" in without_styles(shown(open_run(folder).poll(), 70, 12))


def test_a_resumed_run_cuts_the_tail_that_it_trains_again(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=40)
    reader = open_run(folder)
    evaluation = {"event": "eval", "time": time.time(), "step": 40, "eval_loss": 9.0}
    with open(folder / "events.jsonl", "a") as events:
        events.write(line(evaluation))
    assert [s for s, _ in reader.poll().values("loss")] == list(range(1, 41))
    assert reader.poll().evaluated() == [(0, 2.5), (40, 9.0)]
    kept = "".join((folder / "trainer_log.jsonl").read_text().splitlines(keepends=True)[:20])
    # as the run's own log does: the same file, cut
    with open(folder / "trainer_log.jsonl", "r+") as log:
        log.truncate(len(kept))
        log.seek(0, os.SEEK_END)
        log.write("".join(line(step(n, loss=7.0)) for n in range(21, 46)))
    with open(folder / "events.jsonl", "a") as events:
        events.write(
            line(start_event(20))
            + line({"event": "resume", "time": time.time(), "step": 20, "checkpoint": "x"})
        )
    view = reader.poll()
    assert [s for s, _ in view.values("loss")] == list(range(1, 46))
    assert [loss for _, loss in view.values("loss")[20:]] == [7.0] * 25
    assert view.evaluated() == [(0, 2.5)], (
        "what was measured on the training that was thrown away is gone"
    )


def test_the_stage_is_the_schedules(tmp_path: Path):
    view = open_run(make_run(tmp_path / "one", steps=1)).poll()
    stages = tuple(Stage(until, mix) for until, mix in zip((0.3, 0.7, 1.0), MIXES, strict=True))
    for number, stage in enumerate(Schedule(DIFFICULTIES, stages).stage_of_steps(100), 1):
        view.steps = StepTable([step(number, **{f"loss/{level}": 1.0 for level in DIFFICULTIES})])
        assert view.stage.number == stage + 1
        shares = [weight / 100 for weight in MIXES[stage]]
        assert view.stage.shares == pytest.approx(dict(zip(DIFFICULTIES, shares, strict=True)))


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("failed", 1), ("stopped", 3)])
def test_an_ended_run(state: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status = {"error": "the disk \x1b[31mis full"} if state == "failed" else {}
    folder = make_run(tmp_path / "one", state=state, exit_code=code, **status)
    assert finetune(["monitor", str(folder), "--interval", "0.2", "--lang", "en"]) == 0, (
        "it ends by itself"
    )
    said = capsys.readouterr().out
    assert state in said and "step 40/100" in said and "\x1b" not in said
    assert ("the disk is full" in said) == (state == "failed")
    assert ("resume from checkpoint-20" in said) == (state == "stopped")


def test_a_killed_run_is_told_from_a_running_one(tmp_path: Path):
    folder = make_run(tmp_path / "one")
    assert open_run(folder).poll().state == "running"
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    sign(folder, process.pid)
    assert open_run(folder).poll().state == "vanished"
    sign(folder, process.pid, host="another-host")
    assert open_run(folder).poll().state == "running", "from here that cannot be known"
    sign(folder, os.getpid(), since=1_000_000_000.0)
    assert open_run(folder).poll().state == "vanished", "the id is a younger process's"
    with RunLock(folder):  # signs with boot and ticks: a step of the clock changes nothing
        signed = json.loads((folder / ".lock").read_text())
        (folder / ".lock").write_text(json.dumps({**signed, "since": "2001-09-09T01:46:40+00:00"}))
        assert open_run(folder).poll().state == "running"
        (folder / ".lock").write_text(
            json.dumps({**signed, "start_ticks": signed["start_ticks"] + 1})
        )
        assert open_run(folder).poll().state == "vanished"


def test_broken_files_of_a_run_do_no_harm(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=3)
    for name in ("run.yaml", "status.json", "run_identity.json", ".lock"):
        (folder / name).write_bytes(b"\xff\xfe{[")
    with open(folder / "trainer_log.jsonl", "a") as log:
        log.write(
            'not json\n[1]\n{"step": "x"}\n{"step": 4, "loss": "high", "loss/a": [], "share/a":'
            ' {}}\n{"step": 5}\n'
        )
    with open(folder / "events.jsonl", "a") as events:
        events.write(
            '{"event": 1}\n{"event": "eval", "time": 1}\n{"event": "oom", "time": 2}\n\x00\n'
        )
    view = open_run(folder).poll()
    assert view.step == 5 and [s for s, _ in view.values("loss")] == [1, 2, 3]
    for size in ((100, 30), (60, 15), (20, 5)):
        assert shown(view, *size)
    assert monitor.plain_line(view, MACHINE) and json.dumps(monitor.to_json(view, MACHINE))


def test_warnings_of_all_ranks_are_told_once(tmp_path: Path):
    folder = make_run(tmp_path / "one")
    (folder / "logs").mkdir()
    old = "2026-01-01 10:00:00,000 [WARNING] of an earlier start\n"
    new = (
        "2026-01-02 10:00:00,000 [INFO] all is well\n2026-01-02 10:00:01,000 [WARNING] slow disk\n"
    )
    twice = (
        "2026-01-02 10:00:02,000 [WARNING] step 7 was skipped: loss or gradients are not finite\n"
    )
    (folder / "logs" / "20260101-100000-1-rank0.log").write_text(old)
    (folder / "logs" / "20260102-100000-2-rank0.log").write_text(new + twice)
    (folder / "logs" / "20260102-100000-3-rank11.log").write_text(
        "2026-01-02 10:00:03,000 [ERROR] no \x1b]0;x\x07link\n"
    )
    reader = open_run(folder)
    reader.poll()
    messages = [(m.level, m.rank, m.text or m.event["event"]) for m in reader.poll().messages]
    assert sorted(messages) == [
        ("ERROR", 11, "no link"),
        ("WARNING", 0, "nonfinite"),
        ("WARNING", 0, "slow disk"),
    ]


def test_messages_stay_in_order_where_the_clock_goes_back(tmp_path: Path):
    """The last ones are shown: those of an hour before the clock was set back must not stand in
    their place.
    """
    folder = make_run(tmp_path / "one", steps=1)
    at = time.time()
    with open(folder / "events.jsonl", "a") as events:
        for number, offset in enumerate((0.0, 3600.0, 3601.0, 1.0, 2.0)):
            events.write(
                line({"event": "nonfinite", "time": at + offset, "step": 10 + number, "ids": []})
            )
    (folder / "logs").mkdir()
    said = "".join(f"2026-01-01 0{hour}:00:00,000 [WARNING] at {hour}\n" for hour in (5, 7, 6))
    (folder / "logs" / "20260101-000000-1-rank1.log").write_text(said)
    messages = open_run(folder).poll().messages
    assert [m.event["step"] for m in messages if m.event] == [7, 10, 11, 12, 13, 14]
    assert [m.text for m in messages if not m.event] == ["at 5", "at 7", "at 6"]


def test_a_rotated_log_of_a_rank_is_followed(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=1)
    (folder / "logs").mkdir()
    path = folder / "logs" / "20260101-000000-1-rank1.log"
    say = "2026-01-01 00:00:00,000 [WARNING] {}\n".format
    path.write_text(say("first"))
    reader = open_run(folder)
    assert [m.text for m in reader.poll().messages if m.rank] == ["first"]
    path.rename(path.with_suffix(".log.1"))
    path.write_text(say("second"))
    assert [m.text for m in reader.poll().messages if m.rank] == ["first", "second"]
    path.write_text("")
    reader.poll()
    path.write_text(say("third"))
    assert [m.text for m in reader.poll().messages if m.rank] == ["first", "second", "third"]


def test_a_long_file_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(line_follower, "_PIECE_BYTES", 10)
    path, follower = tmp_path / "log", LineFollower(tmp_path / "log")
    assert list(follower.pieces()) == []
    path.write_bytes(b"1\n" * 20 + b"x" * 50 + b"\n" + b"torn")
    assert [new.lines for new in follower.pieces()] == [[b"1"] * 6] * 3 + [[b"1", b"1", b"x" * 50]]
    path.write_bytes(b"new\n")
    assert list(follower.pieces()) == [(True, [b"new"])]


# ---------------------------------------------------------------- a console's copy


def test_the_consoles_own_lines():
    text = (
        "2026-01-01 10:00:00,123 [INFO] step 37/120  stage 2/3  loss 0.4520  2,645 tok/s  ETA"
        " 1:00:28"
    )
    assert parse_console_line(text.encode()).step == {
        "step": 37, "total_steps": 120, "stage": "stage 2/3", "loss": 0.452, "tokens_per_second": 2645.0,
        "eta_seconds": 3628,
    }  # fmt: skip
    text = (
        "[INFO] step 20/60  loss 6.6590  9,022 tok/s  lr 0.000625  dt 0.227 s  mfu 12.5%  ETA 0:09"
    )
    facts = parse_console_line(text.encode()).step
    assert (facts["learning_rate"], facts["step_seconds"], facts["mfu"]) == (0.000625, 0.227, 0.125)
    line_ = parse_console_line(b"[INFO] step 30  eval_loss 0.5677  eval_loss/explain 0.7317")
    assert line_.evaluation == {"step": 30, "eval_loss": 0.5677, "eval_loss/explain": 0.7317}
    assert parse_console_line(b"[INFO] saved checkpoint-30").checkpoint == {
        "name": "checkpoint-30",
        "step": 30,
    }
    assert parse_console_line(b"[SUCCESS] done: 120 steps, output in x").end == "done"
    assert parse_console_line(b"[WARNING] stopped by SIGTERM at step 95; x").end == "stopped"
    assert parse_console_line(b"[ERROR] rank 3: no memory").warning == ("ERROR", 3, "no memory")
    assert parse_console_line(b"[INFO] step 2/9  loss nan  5 tok/s  ETA 0:01").step["loss"] is None


def test_lines_of_other_scripts():
    text = (
        b"step 00010/00500 (2.00%) | loss: 3.456789 | lrm: 1.00 | dt: 100.00ms | tok/sec: 12,345 |"
        b" mfu: 1.25%"
    )
    facts = parse_console_line(text).step
    assert (facts["step"], facts["total_steps"], facts["loss"]) == (10, 500, 3.456789)
    assert (facts["tokens_per_second"], facts["mfu"]) == (12345.0, 0.0125)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=80)
    | st.text(max_size=80).map(lambda text: f"[INFO] step {text}/9 loss {text}".encode())
)
def test_no_line_breaks_the_reader_or_reaches_the_terminal(raw: bytes):
    parse_console_line(raw)
    text = plain_text(raw.decode("utf-8", "replace"))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_a_console_that_is_rotated_and_cut_is_followed(tmp_path: Path):
    path = tmp_path / "console.log"
    say = "[INFO] step {}/100  loss {}  1,000 tok/s  ETA 0:30\n".format
    path.write_text(say(1, 3.0) + say(2, 2.0))
    reader = open_run(None, path)
    assert reader.poll().step == 2
    os.replace(path, tmp_path / "console.log.1")
    path.write_text(say(3, 1.0))
    assert [s for s, _ in reader.poll().values("loss")] == [1, 2, 3]
    path.write_text(say(4, 0.5))  # cut in place
    assert [s for s, _ in reader.poll().values("loss")] == [1, 2, 3, 4]
    path.write_text(say(3, 9.0))  # the run went back
    view = reader.poll()
    assert view.values("loss") == [(1, 3.0), (2, 2.0), (3, 9.0)] and view.state == "running"
    with open(path, "a") as file:
        file.write("[ERROR] the disk is full\n")
    assert reader.poll().state == "failed"


def test_of_a_large_console_its_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is read of it is in memory at once."""
    monkeypatch.setattr(runs_reader, "CONSOLE_BYTES", 1 << 20)
    path = tmp_path / "console.log"
    say = "[INFO] step {}/100  loss {}  1,000 tok/s  ETA 0:30\n".format
    path.write_text(say(1, 3.0))
    os.truncate(path, 32 << 20)
    with open(path, "a") as file:
        file.write("\n" + say(2, 2.0))
    tracemalloc.start()
    reader = open_run(None, path)
    assert reader.poll().values("loss") == [(2, 2.0)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * runs_reader.CONSOLE_BYTES
    with open(path, "a") as file:
        file.write(say(3, 1.0))
    assert reader.poll().values("loss") == [(2, 2.0), (3, 1.0)]


@pytest.mark.parametrize(
    ("last_bytes", "lines"), [(1, []), (3, []), (4, [b"ccc"]), (5, [b"ccc"]), (8, [b"bbb", b"ccc"])]
)
def test_the_last_lines_are_whole_ones(last_bytes: int, lines: list[bytes], tmp_path: Path):
    (tmp_path / "log").write_bytes(b"aaa\nbbb\nccc\n")
    follower = LineFollower(tmp_path / "log", last_bytes)
    assert follower.poll() == (False, lines)
    (tmp_path / "log").write_bytes(b"new\n")
    assert follower.poll().restarted


def test_a_step_log_by_itself_is_read_too(tmp_path: Path):
    folder = make_run(tmp_path / "one")
    view = open_run(None, folder / "trainer_log.jsonl").poll()
    assert (view.step, view.state) == (40, "running") and view.values("learning_rate")


# ---------------------------------------------------------------- the picture


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(
    ("width", "height"), [(60, 15), (80, 24), (100, 30), (200, 60), (30, 8), (10, 3)]
)
def test_the_picture_fits_any_terminal(width: int, height: int, lang: str, tmp_path: Path):
    from rich.cells import cell_len

    view = open_run(make_run(tmp_path / "a-run-with-a-rather-long-name-for-a-folder")).poll()
    lines = without_styles(shown(view, width, height, lang=lang)).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= height or height < 8
    text = "\n".join(lines)
    if width >= 60:
        assert "40 / 100" in text and "40%" in text and "0.05" in text and "1,040" in text
        assert all(name in text for name in DIFFICULTIES[:2])
    if width >= 80:
        assert "NPU 0" in text and "50/64 GiB" in text and "0.0001" in text
        assert {"en": "warnings", "zh": "警告"}[lang] in text and {"en": "q quit", "zh": "q 退出"}[
            lang
        ] in text


def test_without_colour_and_without_unicode(tmp_path: Path):
    folder = make_run(tmp_path / "one")
    view = open_run(folder).poll()
    assert "\x1b[3" not in shown(view, 100, 30, colour=False)
    ascii_only = without_styles(shown(view, 100, 30, encoding="ascii"))
    assert "+-" in ascii_only and re.search(r"\| +0\.0|\*", ascii_only) and "###" in ascii_only
    words = [sys.executable, "-m", "finetune", "monitor", str(folder), "--once", "--lang", "zh"]
    variables = environment({"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    said = subprocess.run(words, env=variables, capture_output=True, check=False)
    assert said.returncode == 0 and b"40/100" in said.stdout


def test_a_run_that_says_nothing_is_told(tmp_path: Path):
    folder = make_run(tmp_path / "one")
    for name in ("trainer_log.jsonl", "events.jsonl"):
        os.utime(folder / name, (time.time() - 600, time.time() - 600))
    view = open_run(folder).poll()
    assert view.silent_seconds == pytest.approx(600, abs=60)
    assert "nothing written for 10:0" in without_styles(shown(view, 120, 30))


def test_the_newest_warnings_are_shown(tmp_path: Path):
    folder = make_run(tmp_path / "one")
    with open(folder / "events.jsonl", "a") as events:
        for number in range(11, 41):
            skipped = {"event": "nonfinite", "time": time.time(), "step": number, "ids": []}
            events.write(line(skipped))
    view = open_run(folder).poll()
    texts = [warning["text"] for warning in monitor.to_json(view, MACHINE)["warnings"]]
    assert len(texts) == 20 and "step 40 " in texts[-1] and "step 21 " in texts[0]
    picture = without_styles(shown(view, 120, 30))
    assert "step 40 was skipped" in picture and "step 11 was" not in picture


def test_a_chart_goes_through_its_points():
    rising = text_chart([(x, x) for x in range(64)], 8, 4)
    assert [len(row) for row in rising] == [8] * 4
    assert (
        rising[0].strip()
        and rising[0][:4] == "    "
        and rising[3][:1] != " "
        and rising[3][4:] == "    "
    )
    assert text_chart([], 5, 2) == ["     ", "     "]
    assert text_chart([(1, 3.0)], 3, 3, unicode=False).count("   ") == 2, (
        "a single point is a single dot"
    )
    flat = text_chart([(0, 1.0), (9, 1.0)], 4, 3, unicode=False)
    assert [row.count("*") for row in flat] == [0, 4, 0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200), st.integers(1, 60), st.integers(1, 12)
)
def test_charts_of_any_values(values: list[float], width: int, height: int):
    points = list(enumerate(values))
    rows = text_chart(averaged(points, width), width, height)
    assert [len(row) for row in rows] == [width] * height and any(row.strip() for row in rows)
    low, high = value_range(points)
    assert low < high
    assert 0 < len(sparkline(values, width)) <= width
    assert len(averaged(points, width)) <= max(width, 1)


def test_small_forms():
    assert [bar(share, 4) for share in (-1, 0, 0.5, 1, 7)] == [
        "░░░░",
        "░░░░",
        "██░░",
        "████",
        "████",
    ]
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█" and sparkline([], 5) == ""
    assert [format_duration(s) for s in (5, 75, 3700, 100_000)] == [
        "0:05",
        "1:15",
        "1:01:40",
        "1d 3:46:40",
    ]


def test_what_stands_in_tables_is_translated():
    tables = (event_texts.STATES, event_texts.EVENTS, event_texts.ADVICE)
    texts = [text for table in tables for text in table.values()]
    texts += [name for _key, name, _form in STEP_NUMBERS if name not in ("tok/s", "MFU")]
    with speaking("zh"):
        for text in texts:
            assert _(text) != text
            assert sorted(re.findall(r"{\w+}", _(text))) == sorted(re.findall(r"{\w+}", text))


# ---------------------------------------------------------------- this machine


def test_memory_and_cores_of_a_container(tmp_path: Path):
    import psutil

    total = psutil.virtual_memory().total
    inner = tmp_path / "cgroup" / "pod" / "box"
    inner.mkdir(parents=True)
    (tmp_path / "self").write_text("0::/pod/box\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("1\n")
    (inner.parent / "memory.max").write_text(f"{total // 2}\n")
    (inner.parent / "memory.current").write_text(f"{total // 4}\n")
    (inner.parent / "memory.stat").write_text(f"anon 5\ninactive_file {total // 8}\n")
    (inner / "cpu.max").write_text("50000 100000\n")
    use = HostMeter(tmp_path / "cgroup", tmp_path / "self").look()
    assert (use.memory_total_bytes, use.cores) == (total // 2, 0.5)
    assert use.memory_used_bytes == total // 4 - total // 8
    version_1 = tmp_path / "v1" / "memory" / "docker"
    version_1.mkdir(parents=True)
    (version_1 / "memory.limit_in_bytes").write_text(f"{total // 3}\n")
    (version_1 / "memory.usage_in_bytes").write_text("1000\n")
    (version_1.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "self1").write_text("4:memory:/docker\n3:cpu,cpuacct:/\n")
    use = HostMeter(tmp_path / "v1", tmp_path / "self1").look()
    assert (use.memory_total_bytes, use.memory_used_bytes) == (total // 3, 1000)
    use = HostMeter(tmp_path / "nothing", tmp_path / "nothing").look()
    assert use.memory_total_bytes == total and 0 < use.memory_used_bytes < total


# ---------------------------------------------------------------- command


def test_the_newest_run_is_taken_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert finetune(["monitor", "--once"]) == 2
    for name, age in (("old", 5000), ("new", 0), ("older", 9000)):
        for path in make_run(tmp_path / "runs" / name).iterdir():
            os.utime(path, (time.time() - age, time.time() - age))
    (tmp_path / "runs" / "no-run").mkdir()
    assert [path.name for path in runs_in("runs")] == ["new", "old", "older"]
    capsys.readouterr()
    assert finetune(["monitor", "--once", "--lang", "en"]) == 0
    said = capsys.readouterr()
    assert (
        "runs/new" in said.err
        and "step 40/100" in said.out
        and "[WARNING] step 7 was skipped" in said.out
    )


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "x").touch()
    make_run(tmp_path / "one")
    for arguments, text in (
        ([str(tmp_path / "won"), "--once"], "is not there"),
        ([str(tmp_path / "no" / "where")], "is not there"),
        ([str(tmp_path / "work")], "is not a run"),
        (["--log", str(tmp_path / "nothing")], "is not a file"),
        ([str(tmp_path / "one"), "--log", "x"], "both"),
        ([str(tmp_path / "one"), "--interval", "0"], "at least 0.2"),
        ([str(tmp_path / "one"), "--lang", "fr"], "en, zh"),
    ):
        assert finetune(["monitor", *arguments]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(StateError, match="is not there") as refused:
        open_run(tmp_path / "won")
    assert str(tmp_path / "one") in refused.value.fix


@pytest.mark.frozen
def test_the_form_of_the_json_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(monitor, "read_devices", lambda: MACHINE.devices)
    rows = [row for row in FROZEN.read_text().splitlines() if row and not row.startswith("#")]
    frozen = {name: set(fields.split()) for name, fields in (row.split(": ") for row in rows)}
    assert finetune(["monitor", str(make_run(tmp_path / "one")), "--once", "--json"]) == 0
    look = json.loads(capsys.readouterr().out)
    assert set(look) == frozen["top"]
    for name, part in (
        ("stage", look["stage"]),
        ("host", look["host"]),
        ("device", look["devices"][0]),
    ):
        assert set(part) == frozen[name]
    assert set(look["warnings"][0]) == frozen["warning"] and len(look["devices"]) == 8
    assert (look["step"], look["last"]["loss"], look["evaluation"]["eval_loss"]) == (40, 0.05, 2.5)


def test_lines_into_a_pipe_follow_the_run(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=2)
    words = [
        sys.executable,
        "-m",
        "finetune",
        "monitor",
        str(folder),
        "--interval",
        "0.2",
        "--lang",
        "zh",
    ]
    watching = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment({"PYTHONIOENCODING": "utf-8"}),
    )
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.extend(watching.stdout))
    thread.start()
    try:
        wait_for(lambda: any("2/100" in text for text in said), what="the first line")
        with open(folder / "trainer_log.jsonl", "a") as log:
            log.write(line(step(3)))
        wait_for(lambda: any("3/100" in text for text in said), what="the next step")
        (folder / "status.json").write_text('{"state": "done", "exit_code": 0}')
        assert watching.wait(30) == 0
    finally:
        watching.kill()
        watching.wait()
        thread.join()
        watching.stdout.close()
    assert any("已完成" in text for text in said)


@pytest.mark.parametrize("way_out", ["q", "SIGTERM"])
def test_the_dashboard_on_a_real_terminal(way_out: str, tmp_path: Path):
    """Its own screen, kept up to date; the terminal is left as it was found."""
    folder = make_run(tmp_path / "one", steps=2)
    leader, follower = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before = termios.tcgetattr(follower)
    variables = environment(
        {
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
            "PYTHONIOENCODING": "utf-8",
            "COLUMNS": None,
        }
    )
    words = [
        sys.executable,
        "-m",
        "finetune",
        "monitor",
        str(folder),
        "--interval",
        "0.2",
        "--lang",
        "en",
    ]
    watching = subprocess.Popen(
        words, stdin=follower, stdout=follower, stderr=follower, env=variables
    )
    screen = b""

    def seen(text: bytes) -> bool:
        nonlocal screen
        while select.select([leader], [], [], 0.05)[0]:
            screen += os.read(leader, 65536)
        return text in screen

    try:
        wait_for(lambda: seen(b"2 / 100"), what="the first picture")
        with open(folder / "trainer_log.jsonl", "a") as log:
            log.write(line(step(3)))
        wait_for(lambda: seen(b"3 / 100"), what="the next picture")
        if way_out == "q":
            os.write(leader, b"q")
        else:
            watching.send_signal(signal.SIGTERM)
        assert watching.wait(30) == (0 if way_out == "q" else 128 + signal.SIGTERM)
        seen(b"")
        assert b"\x1b[?1049h" in screen and screen.rindex(b"\x1b[?1049l") > screen.rindex(
            b"\x1b[?1049h"
        )
        assert screen.rindex(b"\x1b[?25h") > screen.rindex(b"\x1b[?25l"), "the cursor is back"
        assert termios.tcgetattr(follower) == before
    finally:
        watching.kill()
        watching.wait()
        os.close(leader)
        os.close(follower)
