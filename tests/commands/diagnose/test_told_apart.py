"""A quotation, a retry, a person's stop and a rank that still prepares are no failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.commands.diagnose.command import diagnose_logs, main
from finetune.errors import ExitCode

LOGS = Path(__file__).parent / "logs"
STEP = "{'loss': 1.8, 'learning_rate': 2e-05}\n"
FRAME = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
TIMEOUT = (
    "[rank1]:[E409 04:38:57.375750231 ProcessGroupNCCL.cpp:633] [Rank 1] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600048 milliseconds\n"
)


def test_a_quoted_prompt_is_neither_cause_nor_evidence(diagnose):
    prompt = "Sample prompt: 'My server prints \"RuntimeError: CUDA error: out of memory\", why?'\n"
    finding = diagnose(prompt + FRAME + OOM)[0]
    assert finding.cause == "device_oom" and "My server" not in " ".join(finding.evidence)
    failed = "request 3 of prompt='why?' failed: RuntimeError: CUDA error: out of memory\n"
    assert diagnose(failed)[0].cause == "device_oom", "only the quotation is left out"


STOPPED = f"{STEP}{FRAME}KeyboardInterrupt\nmake: *** [Makefile:14: train] Error 1\n"
QUOTES = (
    "task 7 torch\nRuntimeError: CUDA error: out of memory at line 3\nanswer checked\nnext one\n"
)


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        (STOPPED, "interrupted", ["No failure found", "A person stopped", "same command again"]),
        (f"{STEP}{{'train_runtime': 9.1}}\n{FRAME}KeyboardInterrupt\n", "", ["No failure found"]),
        (f"{STEP}{FRAME}ValueError: unknown\n{FRAME}KeyboardInterrupt\n", None, ["unknown"]),
        (STEP, "", ["No failure found"]),
        (
            f"{QUOTES}pass@1 = 0.616\nresults in x/merged.json\n",
            "got_over",
            ["goes on to a result"],
        ),
        (f"{QUOTES}results in x/merged.json\nexited with code 3\n", None, ["out of memory"]),
        (f"{QUOTES}next one\n", None, ["out of memory"]),
    ],
)
def test_what_a_person_stopped_or_a_run_got_over_is_no_failure(text, key, words, tmp_path, capsys):
    """`key`: what `--json` has beside the findings; None: there are findings."""
    log = tmp_path / "x.log"
    log.write_text(text)
    code = ExitCode.FAILED if key is None else ExitCode.DONE
    assert main([str(log), "--lang", "en"]) == code
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)
    assert main([str(log), "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["findings", *([key] if key else [])]
    assert bool(told["findings"]) == (key is None)


def test_a_rank_that_still_prepared_is_named(diagnose):
    def progress(percent: int) -> str:
        return f"Map (num_proc=8): {percent}%|██ | {percent}0/1000 [09:20<08:41, 1.28 examples/s]\n"

    for texts in ((progress(40) + TIMEOUT,), ("[rank0]: " + progress(40), TIMEOUT)):
        finding = diagnose(*texts)[0]
        assert finding.cause == "collective_timeout" and "ddp_timeout" in finding.fix
        assert "Map (num_proc=8): 40%" in finding.explanation
    assert "on rank 0" in finding.explanation
    for text in (progress(40) + progress(100) + TIMEOUT, progress(40) + STEP + TIMEOUT):
        finding = diagnose(text)[0]
        assert finding.cause == "collective_timeout" and "prepared" not in finding.explanation


def test_a_name_that_only_ipv6_does_not_know_is_no_reason(diagnose):
    warned = "[W0802 18:27:43.2 socket.cpp:697] [c10d] The IPv{} network addresses of (n0, 23456)"
    warned += " cannot be retrieved (gai error: {}).\n"
    end = "torch.distributed.DistNetworkError: The client socket has timed out after 3s while"
    end += " trying to connect to (n, 1)"
    unknown = warned.format(4, "-2 - Name or service not known")
    other = warned.format(6, "-9 - Address family for hostname not supported")
    assert "has no address here" in diagnose(unknown + end)[0].explanation
    assert "has no address here" not in diagnose(other + end)[0].explanation
    assert diagnose(unknown + STEP) == []


def test_what_frames_and_batches_of_ranks_tell(diagnose):
    for name, words in (
        ("dataset_missing_field/collator", ["IndexError", "collate (/home/user/fit.py, line 31)"]),
        ("device_oom/evaluation", ["nested_concat", "eval_accumulation_steps"]),
        ("device_oom/state_gathered", ["_zero3_consolidated_16bit_state_dict", "offload_to_cpu"]),
        ("collective_timeout/unequal_batches", ["unequal numbers of batches", "drop_last"]),
        ("permission_denied/read_only", ["read-only", "/models/.cache"]),
        ("port_in_use/http_server", ["port 8000", "--port 8001", ":8000"]),
    ):
        finding = diagnose_logs(LOGS / f"{name}.log")[0]
        said = f"{finding.explanation}\n{finding.fix}"
        assert all(word in said for word in words), (name, said)
        assert "stop it or take another device" not in said
    assert "eval_accumulation_steps" not in diagnose(FRAME + OOM)[0].fix
    equal = "[rank0] dataloader length 5\n[rank1] dataloader length 5\n"
    assert "unequal" not in diagnose(equal + TIMEOUT)[0].explanation


PIECES = {
    "step": STEP,
    "frame": FRAME,
    "field": "KeyError: 'text'\n",
    "unknown": "ValueError: nothing is left\n",
    "reward": "Step 1: reward 0.1\nValueError: must be a number: 'abc'\n",
    "labels": "TypeError: forward() got an unexpected keyword argument 'labels'\n",
    "attribute": "AttributeError: 'Tensor' object has no attribute 'foo'\n",
    "zero": "ZeroDivisionError: division by zero\n",
    "illegal": "[rank0]: RuntimeError: CUDA error: an illegal memory access was encountered\n",
    "xid": "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n",
    "up": "INFO:     Application startup complete.\n",
    "answered": 'INFO:     10.0.0.2:5000 - "POST /v1/completions HTTP/1.1" 200 OK\n',
    "rate": "INFO 11-02 10:06:10 [metrics.py:455] Avg generation throughput: 1.3 tokens/s\n",
    "engine": f"ERROR 11-02 10:10:00 [engine.py:160] {OOM}",
    "died": "CRITICAL 11-02 10:10:01 [launcher.py:116] MQLLMEngine is already dead, terminating\n",
    "server": '  File "/e/site-packages/sglang/srt/entrypoints/http_server.py", line 2, in request\n',
    "exited": "E1102 10:00:30.0 140 torch/elastic/x.py:869] failed (exitcode: 1) local_rank: 0 (pid: 7)\n",
    "slurm": "slurmstepd: error: Exited with exit code 1\n",
    "srun": "srun: error: n1: task 0: Exited with exit code 1\n",
    "make": "make: *** [Makefile:4: train] Error 1\n",
    "unbuilt": "ERROR: Could not build wheels for flash-attn, which is required to install x\n",
    "instead": "flash-attn not installed, falling back to sdpa\n",
    "unbound": "./run.sh: line 4: NCCL_DEBUG: unbound variable\n",
    "tracker": "mlflow.exceptions.MlflowException: API request to http://localhost:5000 failed\n",
    "conda": "CommandNotFoundError: not configured\n",
    "finished": "All evaluations finished.\n",
}
# Pieces of a log -> its first cause.
GOES_ON = """
frame field exited up -> dataset_missing_field
up frame field rate -> dataset_missing_field
up answered illegal answered -> illegal_memory_or_ecc
up engine died answered -> device_oom
frame labels answered -> package_mismatch
unknown answered -> nothing
step unknown step unknown step -> nothing
answered frame server unknown answered -> nothing
frame server unknown answered -> unknown
answered frame server unknown exited answered -> unknown
step unknown step slurm -> unknown
unbuilt frame attribute -> program_error
unbuilt frame field -> dataset_missing_field
unbuilt instead step -> nothing
unbuilt make -> missing_package
unbound srun -> program_error
tracker step frame field -> dataset_missing_field
frame tracker step -> wandb_login
reward step finished -> nothing
up xid answered -> illegal_memory_or_ecc
conda up answered -> nothing
conda frame zero -> program_error
"""


@pytest.mark.parametrize("case", GOES_ON.strip().splitlines())
def test_what_a_server_or_a_run_goes_on_after_is_not_its_end(case, causes):
    names, _, cause = case.partition(" -> ")
    found = causes("python\n" + "".join(PIECES[name] for name in names.split()))
    assert found[:1] == ([] if cause == "nothing" else [cause])


def test_a_slow_device_is_the_cause_only_of_a_job_out_of_time(causes):
    slow = "GPU6 clocks_event_reasons.hw_thermal_slowdown=Active\n"
    ended = "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2025-06-01T10:20:30 DUE TO {} ***\n"
    for end, cause in (
        ("TIME LIMIT", "device_throttled"),
        ("PREEMPTION", "preempted"),
        ("NODE FAILURE", "preempted"),
    ):
        assert causes(STEP + slow + STEP * 5 + ended.format(end))[0] == cause
    late = ended.format("TIME LIMIT")
    assert causes("SW Thermal Slowdown : Active\n" + STEP * 5 + late)[0] == "preempted"
    assert causes(STEP + slow + STEP + TIMEOUT)[0] == "collective_timeout"
    for healthy in ("hw_thermal_slowdown=Not Active", "SW Power Cap : Active", "throttle: 0"):
        assert causes(f"{STEP}{healthy}\n{late}")[0] == "preempted"


def test_the_port_of_an_http_server_is_no_rendezvous(diagnose):
    taken = "OSError: [Errno 98] Address already in use\n"
    server = '  File "/e/site-packages/vllm/entrypoints/openai/api_server.py", line 5, in run\n'
    for text, rendezvous in (
        (FRAME + server.replace("in run", "in run_server") + taken, False),
        ("python x.py\nERROR: port 30000 is already in use\n", False),
        (FRAME + taken, True),
        ("RuntimeError: Port 30000 is already in use\n", True),
        ("torch.distributed: port 5000 is already in use\n", True),
    ):
        found = diagnose(text)[0]
        assert found.cause == "port_in_use" and ("rendezvous" in found.explanation) == rendezvous
