"""Nothing that others wrote is obeyed by the terminal or shows a password."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable

import pytest
from fake_runs import make_run
from launching import ROOT
from rich.cells import cell_len

from finetune.__main__ import main as finetune
from finetune.commands.diagnose.log_prefixes import decode
from finetune.errors import DataError
from finetune.plain_text import CONTROLS, mask_passwords, plain_lines, plain_text
from finetune.runtime.terminal import plain_streams
from finetune.storage.run_log import add_log_file, setup_console

HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\x9d0;x\x07e\u202ef\u2066g\x08h"


def obeyed(text: str) -> bool:
    return CONTROLS.search(text.replace("\n", "").replace("\r", "")) is not None


def test_one_meaning_everywhere(capsys):
    assert obeyed(HOSTILE) and plain_text("ä\t行 👋") == "ä\t行 👋"
    assert plain_lines("a\nb\r\n\x1b[1mc") == "a\nb\r\nc"
    setup_console(0).warning("%s\n%s", HOSTILE, HOSTILE)
    error = DataError(HOSTILE, HOSTILE, HOSTILE)
    for text in (plain_text(HOSTILE), decode(HOSTILE.encode()), str(error)):
        assert not obeyed(text) and "title" not in text, ascii(text)
    said = capsys.readouterr().err
    assert said.startswith("[WARNING] ab") and said.count("\n") == 2 and not obeyed(said)


def test_no_password_of_an_address(capsys, tmp_path):
    address, shown = "http://user:pass@mirror/x", "http://***@mirror/x"
    for given, expected in (
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


class Screen(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_what_is_printed_has_no_meaning_for_a_terminal(monkeypatch):
    shown = Screen()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="utf-8"))
        with plain_streams():
            print(HOSTILE)
        sys.stdout.detach()
    assert shown.getvalue() and not obeyed(shown.getvalue().decode())


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    """What a command writes to a terminal of 80 columns and 24 rows, called here."""

    def run(words: list[str]) -> str:
        shown = Screen()
        with monkeypatch.context() as patch:
            for name in ("stdout", "stderr"):
                stream = io.TextIOWrapper(shown, encoding="utf-8", write_through=True)
                patch.setattr(sys, name, stream)
            for setting in ("COLUMNS=80", "LINES=24", "NO_COLOR=1", "TERM=xterm-256color"):
                patch.setenv(*setting.split("="))
            with contextlib.suppress(SystemExit):
                finetune(words)
            said = shown.getvalue().decode()
            for stream in (sys.stdout, sys.stderr):
                stream.detach()
        return said

    return run


CLUSTER = "--nodes 2 --devices-per-node 8 --device-name 910B3 --device-memory 64GiB"


def test_screens_fit_80_columns_and_show_nothing_that_a_terminal_obeys(tmp_path, show, monkeypatch):
    """Rows are filled by words and nothing is cut; NO_COLOR leaves bold and dim."""
    folder = tmp_path / "x\x1b]0;title\x07\u202ey"
    make_run(folder)
    log = folder / "train.log"
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"
    log.write_text(f"step 1 {HOSTILE}\n{error} {HOSTILE}\n")
    monkeypatch.chdir(ROOT)
    plan = f"plan --config ds_configs/zero3.json {CLUSTER} --host-memory 512GiB".split()
    for words in (["diagnose", str(log)], plan, ["monitor", str(folder), "--once"]):
        said = show(words)
        styles = ";".join(re.findall(r"\x1b\[([\d;]*)m", said)).split(";")
        assert set(styles) <= {"", "0", "1", "2", "3", "7"}
        text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", said)
        lines = text.splitlines()
        assert lines and not obeyed(text), ascii(text)
        path = str(tmp_path)  # a long word is left to the terminal, and can be copied
        assert [line for line in lines if cell_len(line) > 80 and path not in line] == []
        assert [line for line in lines[1:] if "…" in line and "WARNING" not in line] == []
