"""Nothing that others wrote, in a log, a file's name or an address, is obeyed by the terminal or
shows a password.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from fake_runs import make_run
from launching import ROOT, environment
from rich.cells import cell_len

from finetune.__main__ import main as finetune
from finetune.commands.diagnose.log_prefixes import decode
from finetune.errors import DataError
from finetune.plain_text import CONTROLS, mask_passwords, plain_lines, plain_text
from finetune.runtime.terminal import filled
from finetune.storage.run_log import add_log_file, setup_console

HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\x9d0;x\x07e\u202ef\u2066g\x08h"


def obeyed(text: str) -> bool:
    return CONTROLS.search(text.replace("\n", "").replace("\r", "")) is not None


def test_one_meaning_everywhere(capsys):
    assert obeyed(HOSTILE) and plain_text("ä\t行 👋") == "ä\t行 👋"
    assert plain_lines("a\nb\r\n\x1b[1mc") == "a\nb\r\nc" and "\n" not in plain_text("a\nb")
    setup_console(0).warning("%s\n%s", HOSTILE, HOSTILE)
    error = DataError(HOSTILE, HOSTILE, HOSTILE)
    for text in (plain_text(HOSTILE), decode(HOSTILE.encode()), str(error)):
        assert not obeyed(text) and "title" not in text, ascii(text)
    said = capsys.readouterr().err
    assert said.startswith("[WARNING] ab") and said.count("\n") == 2 and not obeyed(said)


def test_no_password_of_an_address(capsys, tmp_path):
    address, shown = "http://user:pass@mirror/x", "http://***@mirror/x"
    for given, expected in (
        (address, shown),
        ("a 'https://:secret@h:80' and ftp://u:p@h", "a 'https://***@h:80' and ftp://***@h"),
        ("http://host:80/a@b http://u@h", "http://host:80/a@b http://u@h"),
    ):
        error = DataError(given, given)
        assert mask_passwords(given) == expected == error.what == error.where
    logger, handler = setup_console(0), add_log_file(tmp_path, 0)
    logger.info("asking %s", address)
    assert capsys.readouterr().err == f"[INFO] asking {shown}\n"
    logger.handlers.clear()
    handler.close()
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text().endswith(f"asking {shown}\n")


PRINT = f"""
import sys
from finetune.runtime.terminal import console, plain_streams
with plain_streams():
    console(highlight=False).print({HOSTILE!r}, style="bold red")
    print({HOSTILE!r})
print(type(sys.stdout).__name__)
"""


def test_a_terminal_obeys_nothing_but_a_consoles_own_colours():
    ours, theirs = pty.openpty()
    env = environment({"TERM": "xterm-256color", "NO_COLOR": None})
    subprocess.run([sys.executable, "-c", PRINT], stdout=theirs, cwd=ROOT, env=env, check=True)
    said = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert said.startswith("\x1b[1;31m") and said.endswith("TextIOWrapper\r\n"), ascii(said)
    assert not obeyed(said.replace("\x1b[1;31m", "").replace("\x1b[0m", "")) and "title" not in said


class Screen(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    """What a command writes to a terminal of 80 columns and 24 rows, called here."""

    def run(words: list[str]) -> str:
        shown = Screen()
        with monkeypatch.context() as patch:
            for name in ("stdout", "stderr"):
                stream = io.TextIOWrapper(shown, encoding="utf-8", write_through=True)
                patch.setattr(sys, name, stream)
            for name, value in (("COLUMNS", "80"), ("LINES", "24"), ("NO_COLOR", "1")):
                patch.setenv(name, value)
            patch.setenv("TERM", "xterm-256color")
            with contextlib.suppress(SystemExit):
                finetune(words)
            said = shown.getvalue().decode()
            for stream in (sys.stdout, sys.stderr):
                stream.detach()
        return said

    return run


def test_commands_show_nothing_that_a_terminal_obeys(tmp_path, show):
    """Of a log and its name."""
    folder = tmp_path / "x\x1b]0;title\x07\u202ey"
    folder.mkdir()
    log = folder / "train.log"
    log.write_text(f"step 1 {HOSTILE}\nRuntimeError: CUDA out of memory {HOSTILE}\n")
    for words in (["diagnose", str(log)], ["plan", str(folder)], ["clean\u202e"]):
        said = show(words)
        assert said and not obeyed(re.sub(r"\x1b\[[\d;]*m", "", said)), (words, ascii(said))


DEVICES = "--nodes 2 --devices-per-node 8 --device-name 910B3 --device-memory 64GiB"
SCREENS = {
    "diagnose": "diagnose {folder}/train.log",
    "plan": f"plan --config ds_configs/zero3.json {DEVICES} --host-memory 512GiB",
    "curriculum": "curriculum show --config ds_configs/zero3.json",
    "monitor": "monitor {folder}/run --once",
    "help": "--help",
}


@pytest.mark.parametrize("screen", SCREENS)
def test_screens_fit_80_columns_and_have_no_colours_where_none_are_wanted(
    screen, tmp_path, show, monkeypatch
):
    """Rows are filled by words, never broken by the terminal, and nothing is cut; NO_COLOR leaves
    bold and dim.
    """
    make_run(tmp_path / "run")
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0\n"
    (tmp_path / "train.log").write_text("step 1\n" + error)
    monkeypatch.chdir(ROOT)
    said = show(SCREENS[screen].format(folder=tmp_path).split())
    styles = ";".join(re.findall(r"\x1b\[([\d;]*)m", said)).split(";")
    assert set(styles) <= {"", "0", "1", "2", "3", "7"}
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", said).splitlines()
    path = str(tmp_path)  # a long word is left to the terminal, and can be copied
    assert lines and [line for line in lines if cell_len(line) > 80 and path not in line] == []
    cut = [line for line in lines[1:] if "…" in line and "WARNING" not in line]
    assert cut == [], "cut, but not the long path"


def test_rows_are_filled_by_words():
    path = "/a/very/long/path/that/is/no/words/all.log"
    text = f"   fix: run `nc -vz 10.0.0.4 29500` on every other node, and see {path}"
    rows = filled(text, 40)
    assert " ".join(" ".join(rows).split()) == " ".join(text.split())
    assert [row for row in rows if len(row) > 40] == [f"       {path}"]
    assert all(row.startswith("       ") for row in rows[1:])
    assert any("`nc -vz 10.0.0.4 29500`" in row for row in rows)
    chinese = filled("  原因：各进程未能全部会合。某个节点没有启动、启动太晚或设置不同。", 30)
    assert all(cell_len(row) <= 32 and row.strip()[0] not in "，。、：" for row in chinese)
    assert len(chinese) == 3 and filled("", 10) == [""] and filled("short", 10) == ["short"]
