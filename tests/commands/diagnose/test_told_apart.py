"""A quotation, a retry, a person's stop and a rank that still prepares are no failure."""

from __future__ import annotations

import json

import pytest

from finetune.commands.diagnose.command import main
from finetune.errors import ExitCode

STEP = "{'loss': 1.8, 'learning_rate': 2e-05}\n"
FRAME = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
TIMEOUT = (
    "[rank1]:[E409 04:38:57.375750231 ProcessGroupNCCL.cpp:633] [Rank 1] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600048 milliseconds\n"
)


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
