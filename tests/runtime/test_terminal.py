"""Nothing that others wrote, in a log, a file's name or an address, is obeyed by the terminal or
shows a password.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

import pytest
from fake_runs import make_run
from launching import ROOT, environment
from rich.cells import cell_len

from finetune.commands.diagnose.log_prefixes import decode
from finetune.errors import DataError
from finetune.plain_text import CONTROLS, mask_passwords, plain_lines, plain_text
from finetune.runtime.terminal import filled
from finetune.storage.run_log import add_log_file, setup_console

HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\x9d0;x\x07e\u202ef\u2066g\x08h"


def obeyed(text: str) -> bool:
    return CONTROLS.search(text.replace("\n", "").replace("\r", "")) is not None


def test_one_meaning_everywhere(capsys: pytest.CaptureFixture[str]):
    assert obeyed(HOSTILE) and plain_text("ä\t行 👋") == "ä\t行 👋"
    assert plain_lines("a\nb\r\n\x1b[1mc") == "a\nb\r\nc" and "\n" not in plain_text("a\nb")
    setup_console(0).warning("%s\n%s", HOSTILE, HOSTILE)
    for text in (
        plain_text(HOSTILE),
        decode(HOSTILE.encode()),
        str(DataError(HOSTILE, HOSTILE, HOSTILE)),
    ):
        assert not obeyed(text) and "title" not in text, ascii(text)
    said = capsys.readouterr().err
    assert said.startswith("[WARNING] ab") and said.count("\n") == 2 and not obeyed(said)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://user:pass@mirror/x", "http://***@mirror/x"),
        ("a 'https://:secret@h:80' and ftp://u:p@h", "a 'https://***@h:80' and ftp://***@h"),
        ("http://host:80/a@b http://u@h", "http://host:80/a@b http://u@h"),
    ],
)
def test_no_password_of_an_address(
    address, shown, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert (
        mask_passwords(address) == shown == DataError(address).what == DataError("x", address).where
    )
    logger, handler = setup_console(0), add_log_file(tmp_path, 0)
    logger.info("asking %s", address)
    assert capsys.readouterr().err == f"[INFO] asking {shown}\n"
    logger.handlers.clear()
    handler.close()
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text().endswith(f"asking {shown}\n")


def on_a_terminal(words: list[str], env: Mapping[str, str | None] | None = None) -> str:
    """What a command writes to a terminal of 80 columns and 24 rows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "finetune", *words]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment(env)
    )
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # so Linux says that the other side is closed
        while part := os.read(ours, 65536):
            said += part
    os.close(ours)
    process.wait(60)
    return said.decode()


def test_commands_on_a_terminal(tmp_path):
    """A log and its name, with colours of a table where there is one."""
    folder = tmp_path / "x\x1b]0;title\x07\u202ey"
    folder.mkdir()
    log = folder / "train.log"
    log.write_text(f"step 1 {HOSTILE}\nRuntimeError: CUDA out of memory {HOSTILE}\n")
    for words in (
        ["diagnose", str(log)],
        ["checkpoints", str(folder)],
        ["plan", str(folder)],
        ["clean\u202e"],
    ):
        said = on_a_terminal(words)
        assert said and not obeyed(said), (words, ascii(said))


@pytest.mark.parametrize(
    "command", ["diagnose", "plan", "curriculum", "monitor", "checkpoints", "help"]
)
def test_screens_fit_80_columns_and_are_without_colours_where_none_are_wanted(
    command: str, tmp_path: Path
):
    """Rows are filled by words, never broken by the terminal, and nothing is cut; NO_COLOR leaves
    bold and dim.
    """
    run = make_run(tmp_path / "run")
    log = tmp_path / "train.log"
    log.write_text(
        "step 1\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0\n"
    )
    machines = (
        "--nodes 2 --devices-per-node 8 --device-name 910B3 --device-memory 64GiB --host-memory"
        " 512GiB"
    )
    words = {
        "diagnose": ["diagnose", str(log)],
        "plan": ["plan", "--config", "ds_configs/zero3.json", *machines.split()],
        "curriculum": ["curriculum", "show", "--config", "ds_configs/zero3.json"],
        "monitor": ["monitor", str(run), "--once"],
        "checkpoints": ["checkpoints", str(run)],
        "help": ["--help"],
    }[command]
    said = on_a_terminal(
        words, {"TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": None, "LINES": None}
    )
    styles = [
        int(code)
        for codes in re.findall(r"\x1b\[([\d;]*)m", said)
        for code in codes.split(";")
        if code
    ]
    assert [code for code in styles if code not in (0, 1, 2, 3, 7)] == []
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", said).splitlines()
    path = str(tmp_path)  # a long word is left to the terminal, and can be copied
    assert lines and [line for line in lines if cell_len(line) > 80 and path not in line] == []
    assert [line for line in lines[1:] if "…" in line and "WARNING" not in line] == [], (
        "cut, but not the long path"
    )


def test_rows_are_filled_by_words():
    text = (
        "   fix: run `nc -vz 10.0.0.4 29500` on every other node, and see"
        " /a/very/long/path/that/is/no/words/all.log"
    )
    rows = filled(text, 40)
    assert " ".join(" ".join(rows).split()) == " ".join(text.split())
    assert [row for row in rows if len(row) > 40] == [
        "       /a/very/long/path/that/is/no/words/all.log"
    ]
    assert all(row.startswith("       ") for row in rows[1:]) and any(
        "`nc -vz 10.0.0.4 29500`" in row for row in rows
    )
    chinese = filled("  原因：各进程未能全部会合。某个节点没有启动、启动太晚或设置不同。", 30)
    assert (
        all(cell_len(row) <= 32 and row.strip()[0] not in "，。、：" for row in chinese)
        and len(chinese) == 3
    )
    assert filled("", 10) == [""] and filled("short", 10) == ["short"]


def test_a_console_draws_its_own_colours_only():
    script = (
        "import sys\n"
        "from finetune.runtime.terminal import console, plain_streams\n"
        "with plain_streams():\n"
        f"    console(highlight=False).print({HOSTILE!r}, style='bold red')\n"
        f"    print({HOSTILE!r})\n"
        "print(type(sys.stdout).__name__)"
    )
    ours, theirs = pty.openpty()
    settings = {"TERM": "xterm-256color", "NO_COLOR": None}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=theirs, cwd=ROOT, env=environment(settings)
    )
    process.wait(60)
    said = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert said.startswith("\x1b[1;31m") and said.endswith("TextIOWrapper\r\n"), ascii(said)
    assert not obeyed(said.replace("\x1b[1;31m", "").replace("\x1b[0m", "")) and "title" not in said
