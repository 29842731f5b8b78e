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
from pathlib import Path

import pytest
from noisy_logs import SERIES, noisy, quiet, series

from finetune.commands.diagnose.command import diagnose_logs
from finetune.commands.diagnose.knowledge import Kind

FAILURES = (
    series("written")
    + series("threads")
    + series("families")
    + series("orders")
    + series("wordings")
)
WHOLE = [
    json.loads(line) for line in (SERIES / "whole.jsonl").read_text(encoding="utf-8").splitlines()
]
CLEAN = series("clean")
ORDINARY = (SERIES / "ordinary.txt").read_text(encoding="utf-8").splitlines()
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
    assert causes_of(tmp_path, quiet(lines))[:1] in [[cause] for cause in expected], (
        f"quiet: {head}: {lines[0]}"
    )
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


@pytest.mark.parametrize("line", ORDINARY)
def test_an_ordinary_line_is_no_failure(line, tmp_path):
    assert causes_of(tmp_path, f"[INFO] rank 0: epoch 1\n{line}\n{{'loss': 2.1}}\n") == []


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_whole_logs(number, tmp_path):
    """The first cause of all logs of a run together; nothing where the run was well."""
    paths = []
    for name, text in WHOLE[number]["log"].items():
        paths.append(tmp_path / name)
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        paths[-1].write_text(text, encoding="utf-8", newline="")
    found = [finding.cause for finding in diagnose_logs(paths)]
    assert found[:1] in ([[cause] for cause in WHOLE[number]["causes"]] or [[]]), found


# ---------------------------------------------------------------- what follows from what

RESET = (
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was"
    " a network error"
)
LATE = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE,"
    " Timeout(ms)=600000) ran"
)
HBM = "EI0012: The SDMA memory copy task is abnormal"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
KERNEL_KILL = (
    "[ 5123.2] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=4245,uid=0"
)


@pytest.mark.parametrize("first", [KERNEL_KILL, f"[rank2]: {OOM}", f"[rank2]: {HBM}"])
def test_echoes_follow_their_root_wherever_they_stand(first, tmp_path):
    echoes = [f"[rank0]: {RESET}", f"[rank1]: [E] {LATE}"]
    root = causes_of(tmp_path, first + "\n")[0]
    for lines in ([first, *echoes], [echoes[0], first, echoes[1]], [*echoes, first]):
        assert causes_of(tmp_path, "\n".join(lines) + "\n")[0] == root


def test_of_two_echoes_the_earlier_is_the_cause(tmp_path):
    reset, late = f"[rank0]: {RESET}", f"[rank1]: [E] {LATE}"
    assert causes_of(tmp_path, f"{reset}\n{late}\n")[0] == "peer_died"
    stamped = [
        f"2026-11-21 13:{minute:02d}:00,000 {line}" for minute, line in ((40, late), (10, reset))
    ]
    assert causes_of(tmp_path, "\n".join(stamped) + "\n")[0] == "peer_died"


def test_a_process_that_the_launcher_ended_is_no_kill(tmp_path):
    forced = (
        "W1121 13:00:31.1 4200 api.py:900] Unable to shutdown process 4246 via Signals.SIGTERM, "
        "forcefully exiting via Signals.SIGKILL"
    )
    lines = [
        "[rank1]: ZeroDivisionError: division by zero",
        forced,
        "failed (exitcode: -9) local_rank: 2 (pid: 4246)",
    ]
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
        (
            "Nov 21 13:14:05 mail sshd[7]: Connection reset by peer\nNov 21 13:14:06 mail sshd[8]:"
            " No route to host\n"
        ),
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


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("^docker0,lo", None),
        ('"^docker0"', None),
        ("docker0", "interface"),
        ("'=docker0'", "interface"),
    ],
)
def test_an_interface_that_is_left_out_is_none_that_is_taken(value, cause, tmp_path):
    frame = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'
    )
    late = (
        "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2"
        " clients joined."
    )
    socket = "[rank1]: RuntimeError: call hccl api failed: EI0006: Getting socket times out."
    for kind, end, named, other in (
        ("NCCL", late, "nccl_network_interface", "rendezvous_timeout"),
        ("HCCL", late, "hccl_config", "rendezvous_timeout"),
        ("HCCL", socket, "hccl_config", "hccl_connect_timeout"),
    ):
        found = causes_of(tmp_path, f"export {kind}_SOCKET_IFNAME={value}\n{frame}{end}\n")
        assert found == [named if cause else other]


def test_a_setting_of_nccl_is_no_reason_of_hccls_code(tmp_path):
    failed = "RuntimeError: call hccl api failed: EI0006: Getting socket times out."
    assert causes_of(tmp_path, f"export NCCL_SOCKET_IFNAME=docker0\n{failed}\n") == [
        "hccl_connect_timeout"
    ]


def test_codes_outside_every_family_are_unknown(tmp_path):
    assert causes_of(tmp_path, "[rank3]: EK0003: Config error of profiling.\n") in ([], ["unknown"])


def test_a_code_yields_to_its_reason(tmp_path):
    """Of HCCL's result and the code that its process gives near it the code counts; far away they
    are two things.
    """
    call = "[rank1]: RuntimeError: OPS function error: HcclAllreduce, error code is 6"
    reason = "[rank1]: EI0006: [PID: 1] 2026-11-21-13:07:20.444.436 Getting socket times out."
    assert causes_of(tmp_path, f"{call}\n{reason}\n") == ["hccl_connect_timeout"]
    assert causes_of(tmp_path, f"{call}\n")[0] == "hccl_config"
    assert causes_of(tmp_path, f"{call}\n{reason.replace('rank1', 'rank2')}\n")[0] == "hccl_config"


def test_a_cancelled_job_and_a_failure_are_told_by_order(tmp_path):
    cancelled = "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-21T13:00:00 ***"
    failure = "[rank1]: ValueError: nobody knows this"
    assert (
        causes_of(tmp_path, f"{cancelled}\n[rank0]: {RESET}\nsrun: error: n1: task 0: Killed\n")[0]
        == "preempted"
    )
    assert causes_of(tmp_path, f"{failure}\n{cancelled}\n")[0] == "unknown"
    assert causes_of(tmp_path, f"{cancelled}\n{failure}\n")[0] == "preempted"


def test_warnings_at_the_end_of_a_good_run_are_none(tmp_path):
    warning = (
        "[rank9]:[W1121 13:10:11.103710713 TCPStore.cpp:106] [c10d] sendBytes failed on"
        " SocketImpl(fd=69)"
    )
    assert causes_of(tmp_path, f"{{'loss': 1.8}}\n{warning}\n") == ["peer_died"]
    assert causes_of(tmp_path, f"{{'loss': 1.8}}\n{warning}\nexit code 0\n") == []


def test_a_warning_is_the_cause_only_of_what_followed_from_it(tmp_path):
    warning = (
        "x.py:182: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old"
        " (found version 1)"
    )
    bf16 = "ValueError: Your setup doesn't support bf16/gpu."
    assert causes_of(tmp_path, f"{warning}\n{bf16}\n") == ["cuda_driver_mismatch"]
    assert causes_of(tmp_path, f"{warning}\n{{'loss': 1.8}}\n") == []
    assert causes_of(tmp_path, f"{warning}\nOSError: [Errno 28] No space left on device\n") == [
        "disk_full"
    ]


@pytest.mark.parametrize(
    "name", ["my.module.Refused", "BackendCompilerFailed", "jinja2.exceptions.TemplateError"]
)
def test_whatever_ends_a_traceback_is_a_failure(name, tmp_path):
    frame = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'
    )
    assert causes_of(tmp_path, f"{frame}{name}: it broke\n") == ["program_error"]
    assert (
        causes_of(tmp_path, f"[INFO] rank 0: epoch 1\n{name.removesuffix('Error')}: it is so\n")
        == []
    )


def test_kinds_are_ordered_from_the_root_outwards():
    assert [kind.name for kind in sorted(Kind)] == [
        *("MACHINE", "ROOT", "KILLED", "VAGUE", "UNEXPLAINED", "PEER_LOST", "TIMEOUT", "CASCADE")
    ]
