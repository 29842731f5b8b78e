"""Failures as machines write them: alone, and among the lines of other ranks, bars, warnings and
what followed.

The logs are in `series/`: `written.txt` and `families.txt` after the published formats,
`orders.txt` of what follows from what, `threads.txt` after logs in issues, `wordings.txt` as
versions put it; `clean.txt` has no failure, one that nobody knows, or another program's log; each
line of `ordinary.txt` is near a rule and no failure. `whole.jsonl` has logs as they are, of all
ranks and nodes. A head says the cause (or causes, for either is right) and `noecho` where the
failure is itself what others see of one.
"""

from __future__ import annotations

import json

import pytest
from noisy_logs import SERIES, noisy, quiet, series

from finetune.commands.diagnose.command import diagnose_logs

FAILURES = [
    failure
    for name in ("written", "threads", "families", "orders", "wordings")
    for failure in series(name)
]
WHOLE = (SERIES / "whole.jsonl").read_text(encoding="utf-8").splitlines()
CLEAN = series("clean")


@pytest.mark.parametrize("number", range(len(FAILURES)))
def test_the_first_cause_is_the_root(number, causes):
    head, lines = FAILURES[number]
    expected = [[cause] for cause in head.split()[0].split("|")]
    assert causes(quiet(lines))[:1] in expected, f"quiet: {head}: {lines[0]}"
    text = noisy(lines, number, echoes="noecho" not in head)
    assert causes(text)[:1] in expected, f"noisy: {head}: {lines[0]}"


def test_nothing_is_invented(causes):
    for number, (head, lines) in enumerate(CLEAN):
        if head.startswith("foreign: "):
            assert causes("\n".join(lines) + "\n") == [], head
            continue
        for text in (quiet(lines), noisy(lines, number, echoes=False)):
            assert set(causes(text)) <= {"unknown"}, f"{head}: {text}"


def test_an_ordinary_line_is_no_failure(causes):
    for line in (SERIES / "ordinary.txt").read_text(encoding="utf-8").splitlines():
        assert causes(f"[INFO] rank 0: epoch 1\n{line}\n{{'loss': 2.1}}\n") == [], line


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_whole_logs(number, tmp_path):
    """The first cause of all logs of a run together; nothing where the run was well."""
    whole, paths = json.loads(WHOLE[number]), []
    for name, text in whole["log"].items():
        paths.append(tmp_path / name)
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        paths[-1].write_text(text, encoding="utf-8", newline="")
    found = [finding.cause for finding in diagnose_logs(paths)]
    assert found[:1] in ([[cause] for cause in whole["causes"]] or [[]]), found


RESET = "[rank0]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited"
RESET += " or there was a network error\n"
LATE = "[rank1]: [E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5,"
LATE += " OpType=ALLREDUCE, Timeout(ms)=600000) ran\n"
HBM = "[rank2]: EI0012: The SDMA memory copy task is abnormal\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
KILL = "[ 51.2] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=4245,uid=0\n"


def test_echoes_follow_their_root_wherever_they_stand(causes):
    for first in (KILL, f"[rank2]: {OOM}", HBM):
        root = causes(first)[0]
        for text in (first + RESET + LATE, RESET + first + LATE, RESET + LATE + first):
            assert causes(text)[0] == root
    assert causes(RESET + LATE)[0] == "peer_died"
    stamped = f"2026-11-21 13:40:00,000 {LATE}2026-11-21 13:10:00,000 {RESET}"
    assert causes(stamped)[0] == "peer_died", "the earlier of two echoes"


def test_an_interface_that_is_left_out_is_none_that_is_taken(causes):
    frame = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    x()\n'
    late = "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2"
    late += " clients joined."
    socket = "[rank1]: RuntimeError: call hccl api failed: EI0006: Getting socket times out."
    for kind, end, named, other in (
        ("NCCL", late, "nccl_network_interface", "rendezvous_timeout"),
        ("HCCL", late, "hccl_config", "rendezvous_timeout"),
        ("HCCL", socket, "hccl_config", "hccl_connect_timeout"),
    ):
        for value in ("^docker0,lo", '"^docker0"', "'=docker0'"):
            found = causes(f"export {kind}_SOCKET_IFNAME={value}\n{frame}{end}\n")
            assert found == [other if "^" in value else named], (kind, value)
