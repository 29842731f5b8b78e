"""What a run survived is no failure, whichever of its logs shows that it continued."""

from __future__ import annotations

import pytest

TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 8\n'
OOM_LINE = "torch.OutOfMemoryError: CUDA out of memory.\n"
OOM = TRACEBACK + OOM_LINE
DISK = f"{TRACEBACK}OSError: [Errno 28] No space left on device\n"
BAD_JSON = "json.decoder.JSONDecodeError: Extra data: line 1 column 412 (char 411)\n"
LIMIT = (
    "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2025-06-01T10:20:30 DUE TO TIME LIMIT ***\n"
)
UNTIMED_KILL = "[812233.110480] oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=7,uid=1\n"
XID = "Jun  1 {} n1 kernel: NVRM: Xid (PCI:0000:18:00): 79, pid=8, GPU has fallen off the bus.\n"
DONE = "2025-06-01 13:00:00 INFO train: finished, all ranks 0\n"
REFUSED = "ssh: connect to host n2 port 22: Connection refused\n"
PYTEST = "===== test session starts =====\ncollected 3 items\n"
LATE = (
    "[rank0]:[E601 10:30:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600032"
    " milliseconds before timing out.\n"
)
PPO = "ppo step 7/40 reward 0.5\nppo step 8/40 reward 0.6\nppo step 9/40 reward 1\n"
LOSSES = "{'loss': 1.5}\n{'loss': 1.4}\n{'train_runtime': 55.0, 'train_loss': 1.4}\n"
AGAIN = f"attempt 1\n{OOM}attempt 1 failed\nattempt 2\nattempt 2: left with 0\n"
RANK_3 = "[rank3]: step 1 loss 2.5\n[rank3]: "
RETRIED = "python fetch.py\nshard 2: Connection reset by peer, try 1 of 5, wait 2 s\n"


def steps(first: int, last: int, hour: int = 10) -> str:
    lines = (
        f"2025-06-01 {hour}:{n % 60:02d}:00 INFO train: step {n} loss 2.{n} tok/s 9000\n"
        for n in range(first, last)
    )
    return "".join(lines)


# What tells it -> the logs.
SURVIVED = {
    "steps after it by time in another log": (LIMIT, steps(1, 10) + steps(10, 40, hour=12)),
    "an end after it by time in another log": (LIMIT, steps(1, 3, hour=12) + DONE),
    "a kernel's time without a year": (XID.format("10:10:30"), steps(1, 40)),
    "the machine's, without a time, of a run that ended": (UNTIMED_KILL, steps(1, 40) + DONE),
    "a launcher's that went on, of a run that ended well": (AGAIN, LOSSES),
    "one step and a good end": (f"{OOM}going on with 8\n{steps(1, 2)}Done.\n",),
    "steps without a loss": (OOM + PPO,),
    "many steps of others": (RANK_3 + BAD_JSON + "step 1 loss 2.5\n" * 10,),
    "tests that all passed": (f"python -m pytest\n{OOM}{BAD_JSON}=== 12 passed in 3.1s ===\n",),
    "a node that was not up yet": (REFUSED + steps(1, 2),),
    "a connection that another takes up": (f"client_loop: send: Broken pipe\n{steps(1, 2)}",),
    "a limit after the end": (f"{steps(1, 20)}training done\nexit code: 0\n{LIMIT}",),
    "the end before any evidence": (f"{steps(1, 20)}training done\n{UNTIMED_KILL}exit code: 0\n",),
    "comments and quoted lines": (f"step 1 loss 2.5\n# {BAD_JSON}> {BAD_JSON}",),
    "a try of several": (RETRIED,),
}
# Why it is a failure -> its first cause, and the logs.
FAILED = {
    "others went on for nine steps": ("device_oom", RANK_3 + OOM_LINE + "step 1 loss 2.5\n" * 9),
    "a watchdog in another log comes later": (
        "device_oom",
        steps(1, 20) + LATE,
        f"{steps(1, 20)}2025-06-01 10:19:30 ERROR: out\n{OOM}",
    ),
    "a script says done": (
        "device_oom",
        f"{steps(1, 20)}{OOM}done\nTraining finished\nexit code 0\n",
    ),
    "after tests that passed": ("disk_full", f"{PYTEST}{OOM}=== 2 passed in 3s ===\n{DISK}"),
    "before tests that passed": (
        "device_oom",
        f"python\n{OOM}{PYTEST}{DISK}=== 2 passed in 3s ===\n",
    ),
    "tests that do not show where they began": ("device_oom", f"{OOM}=== 12 passed in 3.21s ===\n"),
    "a node that no one can log in to": ("permission_denied", "python\n" + REFUSED),
    "a limit, with no end told": ("preempted", f"{steps(1, 20)}training done\n{LIMIT}"),
    "after the training": ("disk_full", steps(1, 20) + DONE + DISK),
    "the machine's, of a run that did not end": ("host_oom", UNTIMED_KILL, steps(1, 20)),
    "the end of what was denied": ("device_oom", f"{OOM}failed before training is done\n"),
    "again, after steps": ("disk_full", OOM + steps(1, 20) + DISK),
    "the same, more often than is kept": ("device_oom", OOM_LINE * 3 + steps(1, 20) + OOM_LINE),
    "another, after the first was got over": (
        "device_oom",
        f"nfs: server filer03 not responding, still trying\nnfs: server filer03 OK\npython\n{OOM}",
    ),
    "another, after an explanation was cut short by steps": (
        "dataset_bad_json",
        f"EI0006: [PID: 1] \n Possible Cause: 1. a\n{steps(1, 20)}Failed to load JSON from file x\n",
    ),
    "loss that is no number, whatever the end": (
        "nan_loss",
        steps(1, 9) + "step 9 loss nan\n" * 9 + DONE,
    ),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_what_a_run_survived_is_no_failure(name, causes):
    assert causes(*SURVIVED[name]) == []


@pytest.mark.parametrize("name", FAILED)
def test_what_a_run_did_not_survive_is_the_first_cause(name, causes):
    cause, *logs = FAILED[name]
    assert causes(*logs)[:1] == [cause]
