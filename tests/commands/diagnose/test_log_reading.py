"""Logs of every kind become lines with rank and time, in bounded memory."""

from __future__ import annotations

import io
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.commands.diagnose import log_lines
from finetune.commands.diagnose.command import diagnose_logs
from finetune.commands.diagnose.log_lines import LogFile, rank_in_name, raw_lines
from finetune.commands.diagnose.log_prefixes import decode, read_time, strip_prefixes
from finetune.commands.diagnose.log_scan import scan_log

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


class Produced(io.RawIOBase):
    """A file that is made while it is read."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def read(self, size: int = -1) -> bytes:
        while len(self._rest) < size and (block := next(self._blocks, b"")):
            self._rest += block
        given, self._rest = self._rest[:size], self._rest[size:]
        return given


def found(blocks: Iterator[bytes]) -> list[tuple[str, int]]:
    scan = scan_log(LogFile("log", Produced(blocks)))
    return [(evidence.symptom.cause, evidence.line.number) for evidence in scan.evidence]


@given(
    st.binary(max_size=300).map(lambda made: made.replace(b"\x00", b"\n").replace(b"\x01", b"\r"))
)
def test_pieces_are_those_of_a_split_whatever_the_blocks(content):
    lines = enumerate(content.split(b"\n"), 1)
    expected = [(number, piece) for number, line in lines for piece in line.split(b"\r") if piece]
    for size in (1, 7, 64, 1 << 18):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log_lines, "BLOCK_BYTES", size)
            assert [one for one in raw_lines(b"", io.BytesIO(content)) if one[1]] == expected


def test_a_line_of_100_mb_ends_in_an_error_and_little_memory():
    def blocks() -> Iterator[bytes]:
        yield b"[INFO] begins\n"
        yield from (b"x" * 1_000_000 for _ in range(100))
        yield f" {OOM}\nlast\n".encode()

    tracemalloc.start()
    try:
        assert found(blocks()) == [("device_oom", 2)]
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_what_is_known_of_lines_does_not_grow_with_the_log(monkeypatch):
    """The worst case: no line is like one seen before."""
    monkeypatch.setattr(log_lines, "SHAPES_LIMIT", 100)
    lines = [f"{'x' * number} went on\n" for number in range(1, 500)]
    log = LogFile("log", io.BytesIO("".join([*lines, OOM]).encode()))
    assert [piece.line.number for piece in scan_log(log).evidence] == [500]
    assert len(log._shapes) <= 100


def test_bars_colours_and_broken_bytes():
    bar = b"\r".join(b"\x1b[32m%3d%%|##| %d/9\x1b[0m" % (n * 10, n) for n in range(9))
    error = OOM.encode()
    log = b"\xff\xfe\x80 not UTF-8\n%b\x1b[31m%b\x1b[0m\n%b\xff" % (bar, error, error[:-1])
    assert found(iter([log])) == [("device_oom", 2), ("device_oom", 3)]
    assert decode(b"\x1b]0;title\x07\x1b[1;31mred\x1b[0m \xe4\xb8\xad\xff") == "red 中�"
    assert found(iter([])) == []


# A line -> its rank and node; where what is left is not ERROR, what is.
ERROR = "ValueError: x"
PREFIXES = {
    "[rank3]: ValueError: x": (3, "", ERROR),
    "[default1]:[rank1]:   File x": (1, "", "  File x"),
    "2026-11-21 13:14:05,123 ValueError: x": (None, "", ERROR),
    "[2026-11-21 13:14:05,123] [INFO] [launch.py:3] x": (None, "", "[INFO] [launch.py:3] x"),
    "(Worker pid=12, ip=10.0.0.4) ValueError: x": (None, "(Worker pid=12, ip=10.0.0.4)", ERROR),
    "5: ValueError: x": (5, "", ERROR),
    "[E1121 13:34:01.4 P.cpp:6] [Rank 2] x": (2, "", "[E1121 13:34:01.4 P.cpp:6] [Rank 2] x"),
    "[PG ID 0 PG GUID 0(default_pg) Rank 6] x": (6, "", "[PG ID 0 PG GUID 0(default_pg) Rank 6] x"),
    "no prefix: 5": (None, "", "no prefix: 5"),
    "[1,3]<stderr>:ValueError: x": (3, "", ERROR),
    "[rank1] 2026-11-21T13:14:05.500Z ValueError: x": (1, "", ERROR),
    "11/21/2026 13:14:05 - [default2]:ValueError: x": (2, "", ERROR),
    "ERROR 11-21 13:14:05 [core.py:7] ValueError: x": (None, "", ERROR),
    "2026-11-21 13:14:05.500 | ERROR    | train:main:7 - ValueError: x": (None, "", ERROR),
    "10.0.0.3: [rank1]: ValueError: x": (1, "10.0.0.3", ERROR),
    "node-1 | [rank1]: ValueError: x": (1, "node-1", ERROR),
    "[pod/train-worker-2/main] [rank1]: ValueError: x": (1, "train-worker-2/main", ERROR),
    "Nov 21 13:14:05 node7 kernel: [12.345678] ValueError: x": (None, "node7", ERROR),
}


def test_prefixes():
    for line, (rank, node, rest) in PREFIXES.items():
        assert strip_prefixes(line) == (rest, rank, node), line


def test_times():
    wanted = time.mktime((2026, 11, 21, 13, 14, 5, 0, 0, -1)) + 0.5
    for line in (
        "2026-11-21 13:14:05,500 x",
        "2026-11-21T13:14:05.500+08:00 x",
        "EI0006: [PID: 1] 2026-11-21-13:14:05.500.436 Getting",
        "2026/11/21 13:14:05.5 x",
        "[rank0]:[E1121 13:14:05.500000000 ProcessGroupNCCL.cpp:683]",
        "  time      : 2026-11-21_13:14:05.5",
    ):
        assert read_time(line, 2026) == wanted, line
    assert read_time("[Sat Nov 21 13:14:05 2026] oom", 1999) == wanted - 0.5
    short = time.mktime((2025, 4, 16, 15, 12, 21, 0, 0, -1)) + 0.131
    found = read_time("[W416 15:12:21.131066630 socket.cpp:933]", 2025)
    assert found == pytest.approx(short, abs=1e-2)
    assert read_time("12 of 2026 rows at 13:14", 2026) is None


def test_ranks_in_names():
    for name, rank in {
        "runs/a/logs/20261121-131405-4244-rank3.log": 3,
        "logs/rank_12.log": 12,
        "logs/none_x/attempt_0/5/stderr.log": 5,
        "train.log": None,
    }.items():
        assert rank_in_name(Path(name)) == rank


@pytest.mark.parametrize(("quote", "lines"), [("> ", 2), ("", 5000)])
def test_a_log_on_a_pipe(tmp_path, quote, lines):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = f"{quote}step 1: all is well\n" * lines + f"{quote}{OOM}\n"
    writer = threading.Thread(target=pipe.write_text, args=(content,))
    writer.start()
    findings = diagnose_logs([pipe])
    writer.join()
    assert [finding.cause for finding in findings] == ["device_oom"]
