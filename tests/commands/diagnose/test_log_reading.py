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

    def readable(self) -> bool:
        return True

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
    expected = [
        (number, piece)
        for number, line in enumerate(content.split(b"\n"), 1)
        for piece in line.split(b"\r")
        if piece
    ]
    before = log_lines.BLOCK_BYTES
    try:
        for log_lines.BLOCK_BYTES in (1, 7, 64, 1 << 18):
            assert [
                (number, piece) for number, piece in raw_lines(b"", io.BytesIO(content)) if piece
            ] == expected
    finally:
        log_lines.BLOCK_BYTES = before


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


def test_memory_does_not_grow_with_the_log(monkeypatch):
    """Lines that are all different are the worst case: none is like one seen before."""
    monkeypatch.setattr(log_lines, "SHAPES_LIMIT", 1000)
    letters = "abcdefghijklmnopqrstuvwxyz"

    def blocks() -> Iterator[bytes]:
        for number in range(10_000):
            word = "".join(letters[(number >> shift) % 26] for shift in range(0, 20, 4))
            yield f"{word}{word} something went on, error {number} of {word}\n".encode()
        yield f"{OOM}\n".encode()

    tracemalloc.start()
    try:
        assert found(blocks()) == [("device_oom", 10_001)]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_bars_colours_and_broken_bytes():
    bar = b"\r".join(b"\x1b[32m%3d%%|##| %d/9\x1b[0m" % (n * 10, n) for n in range(9))
    log = (
        b"\xff\xfe\x80 not UTF-8\n"
        + bar
        + b"\x1b[31m"
        + OOM.encode()
        + b"\x1b[0m\n"
        + OOM.encode()[:-1]
        + b"\xff"
    )
    assert found(iter([log])) == [("device_oom", 2), ("device_oom", 3)]
    assert decode(b"\x1b]0;title\x07\x1b[1;31mred\x1b[0m \xe4\xb8\xad\xff") == "red 中�"


def test_an_empty_log():
    assert found(iter([])) == []


@pytest.mark.parametrize(
    ("line", "text", "rank"),
    [
        ("[rank3]: Traceback (most recent call last):", "Traceback (most recent call last):", 3),
        ("[rank3]:     raise X", "    raise X", 3),
        ("[default1]:[rank1]:   File x", "  File x", 1),
        ("2026-11-21 13:14:05,123 [ERROR] what", "[ERROR] what", None),
        ("[2026-11-21 13:14:05,123] [INFO] [launch.py:319] x", "[INFO] [launch.py:319] x", None),
        ("(RayTrainWorker pid=12, ip=10.0.0.4) ValueError: x", "ValueError: x", None),
        ("(train pid=8464) EI0002: x", "EI0002: x", None),
        ("5: ValueError: x", "ValueError: x", 5),
        (
            "[E1121 13:34:01.4 P.cpp:683] [Rank 2] Watchdog",
            "[E1121 13:34:01.4 P.cpp:683] [Rank 2] Watchdog",
            2,
        ),
        ("[ERROR] 2026-11-21-13:14:05 (PID:1, Device:4, RankID:4) ERR00100 x", None, 4),
        ("[PG ID 0 PG GUID 0(default_pg) Rank 6] Exception", None, 6),
        ("no prefix: 5", "no prefix: 5", None),
        ("[7]: ValueError: x", "ValueError: x", 7),
        ("[1,3]<stderr>:ValueError: x", "ValueError: x", 3),
        ("[rank1] 2026-11-21T13:14:05.500Z ValueError: x", "ValueError: x", 1),
        ("11/21/2026 13:14:05 - [default2]:ValueError: x", "ValueError: x", 2),
        ("[ERROR] ValueError: x", "[ERROR] ValueError: x", None),
        ("(Worker pid=9) ERROR 11-21 13:14:05 [core.py:7] ValueError: x", "ValueError: x", None),
        (
            "2026-11-21 13:14:05.500 | ERROR    | train:main:7 - ValueError: x",
            "ValueError: x",
            None,
        ),
    ],
)
def test_prefixes(line, text, rank):
    assert strip_prefixes(line)[:2] == (line if text is None else text, rank)


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("10.0.0.3: [rank1]: ValueError: x", "10.0.0.3"),
        ("node-1 | [rank1]: ValueError: x", "node-1"),
        ("worker-0: [rank1]: ValueError: x", "worker-0"),
        ("[pod/train-worker-2/main] [rank1]: ValueError: x", "train-worker-2/main"),
        ("Nov 21 13:14:05 node7 kernel: [12.345678] ValueError: x", "node7"),
    ],
)
def test_nodes(line, node):
    text, _, found_node = strip_prefixes(line)
    assert (text, found_node) == ("ValueError: x", node)


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-21 13:14:05,500 x",
        "2026-11-21T13:14:05.500+08:00 x",
        "[ERROR] HCCL(1,python):2026-11-21-13:14:05.500.436 [f.cc:1]",
        "EI0006: [PID: 1] 2026-11-21-13:14:05.500.436 Getting",
        "2026/11/21 13:14:05.5 x",
        "[rank0]:[E1121 13:14:05.500000000 ProcessGroupNCCL.cpp:683]",
        "I1121 13:14:05.500000 4200 torch/x.py:1] y",
        "  time      : 2026-11-21_13:14:05.5",
    ],
)
def test_times(line):
    assert read_time(line, 2026) == time.mktime((2026, 11, 21, 13, 14, 5, 0, 0, -1)) + 0.5


def test_times_of_the_kernel_and_months_of_one_digit():
    assert read_time("[Sat Nov 21 13:14:05 2026] oom", 1999) == time.mktime(
        (2026, 11, 21, 13, 14, 5, 0, 0, -1)
    )
    assert read_time("[W416 15:12:21.131066630 socket.cpp:933]", 2025) == pytest.approx(
        time.mktime((2025, 4, 16, 15, 12, 21, 0, 0, -1)) + 0.131, abs=1e-2
    )
    assert read_time("12 of 2026 rows at 13:14", 2026) is None


def test_a_line_without_a_time_has_that_of_the_line_before():
    log = f"2026-11-21 13:14:05 a\nplain\n{OOM}\n2026-11-21 14:14:05 b\n{OOM}\n"
    evidence = scan_log(LogFile("log", io.BytesIO(log.encode()))).evidence
    assert [piece.line.seconds for piece in evidence] == [
        time.mktime((2026, 11, 21, hour, 14, 5, 0, 0, -1)) for hour in (13, 14)
    ]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("runs/a/logs/20261121-131405-4244-rank3.log", 3),
        ("logs/rank_12.log", 12),
        ("logs/none_x/attempt_0/5/stderr.log", 5),
        ("train.log", None),
    ],
)
def test_ranks_in_names(name, rank):
    assert rank_in_name(Path(name)) == rank


def test_times_without_a_year_are_of_the_year_of_the_others(tmp_path):
    """What failed in a log that tells no year is not put into the present one."""
    late, early = tmp_path / "rank0.log", tmp_path / "rank1.log"
    late.write_text(
        "2019-11-21 13:30:00,000 x\n[E1121 13:30:00.1 x.cpp:1] Watchdog caught collective operation"
        " timeout"
    )
    early.write_text(f"[W1121 13:00:00.100000000 y.cpp:1] torch warns\n{OOM}\n")
    assert [finding.cause for finding in diagnose_logs([late, early])] == ["device_oom"]


@pytest.mark.parametrize(
    ("last", "cut"),
    [
        (b"[2026-11-21 13:10:09] iteration 30/ 900 | elapsed ti", True),
        (b"[2026-11-21 13:1", False),
        (
            (
                b"[2026-11-21 13:10:09] iteration 30/ 900 | elapsed time: 5 | lm loss: 2.5 | grad"
                b" norm: 0.7"
            ),
            False,
        ),
        (b"[2026-11-21 13:10:09] iteration 30/ 900 | elapsed", False),
        (b"[2026-11-21 13:10:09] saved", False),
        (b"[2026", False),
    ],
)
def test_a_log_that_breaks_off(last, cut):
    step = (
        b"[2026-11-21 13:09:0%d] iteration %d/ 900 | elapsed time: 5 | lm loss: 2.5 | grad norm:"
        b" 0.75 |\n"
    )
    log = LogFile("x.log", io.BytesIO(step % (1, 1) + step % (2, 2) + last + b"\n"))
    assert (scan_log(log).evidence != []) is cut


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
