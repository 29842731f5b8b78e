"""A failure's lines among those of other ranks, bars, warnings and what follows."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

SERIES = Path(__file__).parent / "commands/diagnose/series"
START = time.mktime((2026, 11, 21, 13, 0, 0, 0, 0, -1))
RANKS = 4
# Prefixes of a line by rank; {node} is the rank's machine.
PREFIXES = (
    "[rank{rank}]: ",
    "[default{rank}]:[rank{rank}]: ",
    "[{rank}]: ",
    "{rank}: ",
    "[1,{rank}]<stderr>:",
    "[rank{rank}] ",
)
NODE_PREFIXES = (
    "10.0.0.{node}: [rank{rank}]: ",
    "node-{node}  | [rank{rank}]: ",
    "worker-{node}: [rank{rank}]: ",
)
# The five forms of times; an empty one is a log without.
TIMES = (
    "%Y-%m-%d %H:%M:%S,{ms:03d} ",
    "[%Y-%m-%d %H:%M:%S,{ms:03d}] ",
    "%m/%d/%Y %H:%M:%S - ",
    "%Y-%m-%dT%H:%M:%S.{ms:03d}Z ",
    "[%H:%M:%S] ",
    "",
)
WARNINGS = (
    "torch/utils/checkpoint.py:87: UserWarning: None of the inputs have requires_grad=True",
    "[WARNING] async_io requires the dev libaio .so object and headers but these were not found.",
    "node0:4244:4390 [0] NCCL INFO Call to connect returned Connection refused, retrying",
    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
    (
        "[W1121 13:00:02.223456789 socket.cpp:764] [c10d] The client socket has failed to connect"
        " to [node0]:29500 (errno: 111 - Connection refused)."
    ),
    "wandb: WARNING Path ./wandb/ wasn't writable, using system temp directory.",
    (
        "[INFO] HCCL(4244,python):2026-11-21-13:00:07.911.325 [hccl_comm.cc:115]"
        " [60570]HCCL_CONNECT_TIMEOUT set to 1800, error timeout check on"
    ),
    "sample 3: The process was killed, an error they called it; out of memory, some said.",
    "Loading checkpoint shards:  50%|#####     | 2/4 [00:05<00:05,  1.8it/s]",
    (
        "[2026-11-21 13:00:05,100] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW!"
        " Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768"
    ),
)
ECHOES = (
    "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:41234",
    (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process"
        " exited or there was a network error, NCCL version 2.27.7"
    ),
    (
        "[E1121 13:40:01.408271257 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught"
        " collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
        " Timeout(ms)=1800000) ran for 1800060 milliseconds before timing out."
    ),
    (
        "EI0002: [PID: 4249] 2026-11-21-13:44:23.586.187 The wait execution of the Notify register"
        " times out. Reason: The Notify register has not received the Notify record from remote"
        " rank: [1]."
    ),
)
TABLE = (
    (
        "W1121 13:44:06.120000 4200 torch/distributed/elastic/multiprocessing/api.py:1010] Sending"
        " process 4244 closing signal SIGTERM"
    ),
    (
        "E1121 13:44:06.321000 4200 torch/distributed/elastic/multiprocessing/api.py:984] failed"
        " (exitcode: 1) local_rank: {rank} (pid: 4245) of binary: /opt/env/bin/python"
    ),
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "============================================================",
    "train.py FAILED",
    "Root Cause (first observed failure):",
    "[0]:",
    "  time      : 2026-11-21_13:44:06",
    "  host      : node0",
    "  rank      : {rank} (local_rank: {rank})",
    "  exitcode  : 1 (pid: 4245)",
    "============================================================",
)

_CLOCK = re.compile(r"\b13:\d\d:\d\d\b")


def series(name: str) -> list[tuple[str, list[str]]]:
    """(head, lines) of every case of a series: a line `### head`, then the lines of its failure."""
    blocks = re.split(r"(?m)^### ", (SERIES / f"{name}.txt").read_text(encoding="utf-8"))[1:]
    cases = (block.rstrip("\n").split("\n") for block in blocks)
    return [(head, lines) for head, *lines in cases]


def quiet(lines: list[str]) -> str:
    """One process: a few steps, then the lines."""
    steps = [f"{{'loss': 2.{n}043, 'learning_rate': 2e-05, 'epoch': 0.0{n}}}" for n in (1, 2)]
    own = [line.removeprefix("!") for line in lines]
    return "\n".join(["[INFO] python train.py --micro-batch-size 8", *steps, *own]) + "\n"


def noisy(lines: list[str], seed: int, *, echoes: bool = True) -> str:
    """Several ranks in one log, each with its prefix, and what follows at the end.

    Args:
        lines: of the failure; those that begin with `!` are printed without a prefix (launchers,
            kernel, scheduler).
        echoes: other ranks report that they lost the failed one, or waited for it.
    """
    draw = random.Random(seed)
    prefix, stamp = draw.choice(PREFIXES + NODE_PREFIXES), draw.choice(TIMES)
    failed, clock = draw.randrange(RANKS), START
    made: list[str] = []

    def say(text: str, rank: int, seconds: float) -> None:
        text = _CLOCK.sub(time.strftime("%H:%M:%S", time.localtime(seconds)), text)
        times = time.strftime(stamp, time.localtime(seconds)).format(ms=int(seconds * 1000) % 1000)
        named = prefix.format(rank=rank, node=rank // 2)
        line = (
            (times + named if draw.random() < 0.5 else named + times) + text
            if not text.startswith("!")
            else text[1:]
        )
        made.append(f"\x1b[3{draw.randrange(8)}m{line}\x1b[0m" if draw.random() < 0.2 else line)

    for step in range(6):
        clock += 10
        for rank in range(RANKS):
            if draw.random() < 0.4:
                say(draw.choice(WARNINGS), rank, clock)
        bars = (f"{step}{n}%|##   | {step * 10 + n}/400 [00:0{n}<01:0{n}]" for n in range(3))
        made.append("\r".join(bars))
        say(f"{{'loss': 2.{step}1, 'learning_rate': 2e-05, 'epoch': 0.{step}}}", 0, clock)
    for text in lines:
        clock += 0.2
        say(text, failed, clock)
        if draw.random() < 0.3:
            say(draw.choice(WARNINGS), (failed + 1) % RANKS, clock)
        if draw.random() < 0.15:
            frame = "frame #5: <unknown function> + 0xdbbf4 (0x7eff423efbf4 in"
            say(f"  {draw.choice(('^^^^^^', frame, '~~'))}", failed, clock)
    if echoes:
        for rank in range(RANKS):
            if rank != failed:
                echo = draw.choice(ECHOES)
                late = 1800 if "time" in echo else 3
                say(echo.format(rank=rank), rank, clock + late + rank)
        made.extend(line.format(rank=failed) for line in TABLE)
    return "\n".join(_torn(made, draw)) + "\n"


def _torn(lines: list[str], draw: random.Random) -> Iterator[str]:
    """Now and then a piece of a line on its own, as writers without a lock leave it."""
    for line in lines:
        if draw.random() < 0.03:
            yield line[: len(line) // 4]
        yield line
