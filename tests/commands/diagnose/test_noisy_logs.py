"""Failures as machines write them: alone, and among the lines of other ranks, bars, warnings and what followed.

The logs are in `series/`: `written.txt` and `families.txt` after the published formats, `orders.txt` of what follows
from what, `threads.txt` after logs in issues; `clean.txt` has no failure, one that nobody knows, or another program's
log. A head says the cause (or causes, for either is right) and `noecho` where the failure is itself what others see of
one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from noisy_logs import noisy, quiet, series

from finetune.commands.diagnose.command import diagnose_logs
from finetune.commands.diagnose.symptoms.base import Kind

FAILURES = series("written") + series("threads") + series("families") + series("orders")
CLEAN = series("clean")
FOREIGN = "foreign: "


def causes_of(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "run.log"
    path.write_text(text, encoding="utf-8")
    return [finding.cause for finding in diagnose_logs([path])]


def test_the_series_are_wide():
    assert len(FAILURES) >= 120
    assert len(CLEAN) >= 30
    assert len({head.split()[0] for head, _ in FAILURES}) >= 40


@pytest.mark.parametrize("number", range(len(FAILURES)))
def test_the_first_cause_is_the_root(number, tmp_path):
    head, lines = FAILURES[number]
    expected = head.split()[0].split("|")
    assert causes_of(tmp_path, quiet(lines))[:1] in [[cause] for cause in expected], f"quiet: {head}: {lines[0]}"
    found = causes_of(tmp_path, noisy(lines, number, echoes="noecho" not in head))
    assert found[:1] in [[cause] for cause in expected], f"noisy: {head}: {lines[0]}"


@pytest.mark.parametrize("number", range(len(CLEAN)))
def test_nothing_is_invented(number, tmp_path):
    head, lines = CLEAN[number]
    if head.startswith(FOREIGN):
        assert causes_of(tmp_path, "\n".join(lines) + "\n") == []
        return
    for text in (quiet(lines), noisy(lines, number, echoes=False)):
        assert set(causes_of(tmp_path, text)) <= {"unknown"}, f"{head}: {text}"


# ---------------------------------------------------------------- what follows from what

RESET = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error"
LATE = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran"
HBM = "EI0012: The SDMA memory copy task is abnormal"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
KERNEL_KILL = "[ 5123.2] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=4245,uid=0"


@pytest.mark.parametrize("first", [KERNEL_KILL, f"[rank2]: {OOM}", f"[rank2]: {HBM}"])
def test_echoes_follow_their_root_wherever_they_stand(first, tmp_path):
    echoes = [f"[rank0]: {RESET}", f"[rank1]: [E] {LATE}"]
    root = causes_of(tmp_path, first + "\n")[0]
    for lines in ([first, *echoes], [echoes[0], first, echoes[1]], [*echoes, first]):
        assert causes_of(tmp_path, "\n".join(lines) + "\n")[0] == root


def test_of_two_echoes_the_earlier_is_the_cause(tmp_path):
    reset, late = f"[rank0]: {RESET}", f"[rank1]: [E] {LATE}"
    assert causes_of(tmp_path, f"{reset}\n{late}\n")[0] == "peer_died"
    stamped = [f"2026-11-21 13:{minute:02d}:00,000 {line}" for minute, line in ((40, late), (10, reset))]
    assert causes_of(tmp_path, "\n".join(stamped) + "\n")[0] == "peer_died"


def test_a_process_that_the_launcher_ended_is_no_kill(tmp_path):
    forced = (
        "W1121 13:00:31.1 4200 api.py:900] Unable to shutdown process 4246 via Signals.SIGTERM, "
        "forcefully exiting via Signals.SIGKILL"
    )
    lines = ["[rank1]: ZeroDivisionError: division by zero", forced, "failed (exitcode: -9) local_rank: 2 (pid: 4246)"]
    assert set(causes_of(tmp_path, "\n".join(lines) + "\n")) <= {"unknown"}


def test_an_error_is_its_first_in_a_chain(tmp_path):
    text = (
        "FileNotFoundError: [Errno 2] No such file or directory: 'x'\n\n"
        "During handling of the above exception, another exception occurred:\n\n" + OOM + "\n"
    )
    assert "device_oom" in causes_of(tmp_path, text)


@pytest.mark.parametrize("end", ["Tried to alloc", "Tried to"])
def test_a_torn_line_is_no_second_failure(end, tmp_path):
    assert causes_of(tmp_path, f"{OOM.split('Tried')[0]}{end}\n{OOM}\n") == ["device_oom"]


@pytest.mark.parametrize(
    "text",
    [
        f"<|im_start|>user\n{OOM}\n<|im_end|>\n[INFO] rank 0: epoch 1\n",
        f'{{"instruction": "Explain: {OOM}", "output": "Killed"}}\n[INFO] rank 0: epoch 1\n',
        f"Sample 4: {OOM}\n[INFO] rank 0: epoch 1\n",
        "Nov 21 13:14:05 mail sshd[7]: Connection reset by peer\nNov 21 13:14:06 mail sshd[8]: No route to host\n",
    ],
)
def test_data_and_other_programs_are_not_diagnosed(text, tmp_path):
    assert causes_of(tmp_path, text) == []


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("EE9999: Inner Error! device memory: out of memory, ret=207001", "device_oom"),
        ("EJ0001: Failed to initialize the HCCP process.", "npu_busy_or_owned"),
        ("EZ9999: The operator failed, error code is 507015", "npu_op_exception"),
        ("EZ9876: an operator that nobody wrote of", "npu_op_exception"),
        ("EI0002: The wait execution of the Notify register times out.", "collective_timeout"),
        ("error code is 507053", "illegal_memory_or_ecc"),
    ],
)
def test_codes_are_read_by_their_families(code, cause, tmp_path):
    assert causes_of(tmp_path, f"[rank3]: RuntimeError: NPU function error, {code}\n")[0] == cause


def test_codes_outside_every_family_are_unknown(tmp_path):
    assert causes_of(tmp_path, "[rank3]: EK0003: Config error of profiling.\n") in ([], ["unknown"])


def test_kinds_are_ordered_from_the_root_outwards():
    assert [kind.name for kind in sorted(Kind)] == [
        *("MACHINE", "ROOT", "KILLED", "VAGUE", "UNEXPLAINED", "PEER_LOST", "TIMEOUT", "CASCADE")
    ]
