"""What is quoted, tried again, stopped by a person or still being prepared is told apart from a
failure of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.commands.diagnose.command import diagnose_logs, main
from finetune.commands.diagnose.findings import Finding
from finetune.errors import ExitCode

LOGS = Path(__file__).parent / "logs"
STEP = "{'loss': 1.8, 'learning_rate': 2e-05}\n"
FRAME = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'
TIMEOUT = (
    "[rank1]:[E409 04:38:57.375750231 ProcessGroupNCCL.cpp:633] [Rank 1] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600048 milliseconds\n"
)


def first(tmp_path: Path, *texts: str) -> Finding:
    logs = [tmp_path / f"log-{number}.log" for number in range(len(texts))]
    for log, text in zip(logs, texts, strict=True):
        log.write_text(text, encoding="utf-8")
    return diagnose_logs(logs)[0]


def test_a_quoted_prompt_is_neither_cause_nor_evidence(tmp_path):
    prompt = (
        "Sample prompt: 'My server prints \"RuntimeError: CUDA error: out of memory\", what now?'\n"
    )
    finding = first(
        tmp_path,
        f"{prompt}{FRAME}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
    )
    assert finding.cause == "device_oom" and not any(
        "My server" in line for line in finding.evidence
    )
    failed = first(
        tmp_path, "request 3 of prompt='why?' failed: RuntimeError: CUDA error: out of memory\n"
    )
    assert failed.cause == "device_oom", "only the quotation is left out"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_that_a_person_stopped(as_json, tmp_path, capsys):
    log = tmp_path / "x.log"
    log.write_text(f"{STEP}{FRAME}KeyboardInterrupt\nmake: *** [Makefile:14: train] Error 1\n")
    assert main([str(log), "--lang", "en", *(["--json"] if as_json else [])]) == ExitCode.DONE
    shown = capsys.readouterr().out
    if as_json:
        told = json.loads(shown)
        assert told["findings"] == [] and "KeyboardInterrupt" in told["interrupted"]["evidence"][0]
    else:
        assert (
            "No failure found" in shown
            and "A person stopped the run" in shown
            and "same command again" in shown
        )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (f"{STEP}{{'train_runtime': 9.1}}\n{FRAME}KeyboardInterrupt\n", ExitCode.DONE),
        (
            f"{STEP}{FRAME}ValueError: nobody knows this\n{FRAME}KeyboardInterrupt\n",
            ExitCode.FAILED,
        ),
        (
            f"{STEP}OSError: [Errno 28] No space left on device\n{FRAME}KeyboardInterrupt\n",
            ExitCode.FAILED,
        ),
        (STEP, ExitCode.DONE),
    ],
)
def test_others_were_not_stopped_by_a_person(text, code, tmp_path, capsys):
    log = tmp_path / "x.log"
    log.write_text(text)
    assert main([str(log), "--json"]) == code
    assert list(json.loads(capsys.readouterr().out)) == ["findings"]


def progress(percent: int) -> str:
    return f"Map (num_proc=8): {percent}%|████ | {percent}0/1000 [09:20<08:41, 1.28 examples/s]\n"


def test_a_rank_that_still_prepared_is_named(tmp_path):
    for texts in ((progress(40) + TIMEOUT,), ("[rank0]: " + progress(40), TIMEOUT)):
        finding = first(tmp_path, *texts)
        assert (
            finding.cause == "collective_timeout" and "Map (num_proc=8): 40%" in finding.explanation
        )
        assert "ddp_timeout" in finding.fix
    assert "on rank 0" in finding.explanation
    for text in (progress(40) + progress(100) + TIMEOUT, progress(40) + STEP + TIMEOUT):
        finding = first(tmp_path, text)
        assert finding.cause == "collective_timeout" and "prepared" not in finding.explanation


def test_a_name_that_only_ipv6_does_not_know_is_no_reason(tmp_path):
    warned = (
        "[W0802 18:27:43.2 socket.cpp:697] [c10d] The IPv{} network addresses of (n0, 23456) cannot"
        " be retrieved "
    )
    end = (
        "torch.distributed.DistNetworkError: The client socket has timed out after 3s while trying"
        " to connect to (n, 1)"
    )
    unknown = warned.format(4) + "(gai error: -2 - Name or service not known).\n"
    other = warned.format(6) + "(gai error: -9 - Address family for hostname not supported).\n"
    assert "has no address here" in first(tmp_path, unknown + end).explanation
    assert "has no address here" not in first(tmp_path, other + end).explanation
    (tmp_path / "good.log").write_text(unknown + STEP)
    assert diagnose_logs(tmp_path / "good.log") == []


def test_requests_tried_again_are_the_cause_only_where_nothing_else_is(tmp_path):
    tried = (
        "'(ReadTimeoutError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Read timed"
        " out.\"))' thrown while requesting HEAD"
        " https://huggingface.co/d/resolve/main/README.md\nRetrying in 2s [Retry 2/5].\n"
    )
    ended = "srun: error: gpu-1: task 0: Exited with exit code 1\n"
    assert first(tmp_path, tried + ended).cause == "hub_offline"
    assert (
        first(tmp_path, f"{tried}{FRAME}ValueError: nobody knows this\n{ended}").cause
        == "program_error"
    )
    full = "OSError: [Errno 28] No space left on device\n"
    assert first(tmp_path, f"[rank1]: {full}[rank0]: {tried}{ended}").cause == "disk_full", (
        "no new start of the run"
    )
    (tmp_path / "good.log").write_text(tried + STEP)
    assert diagnose_logs(tmp_path / "good.log") == []


def test_what_frames_and_batches_of_ranks_tell():
    told = {
        name: diagnose_logs(LOGS / f"{name}.log")[0]
        for name in (
            "dataset_missing_field/collator",
            "device_oom/evaluation",
            "collective_timeout/unequal_batches",
            "permission_denied/read_only",
        )
    }
    bad, evaluation, unequal, read_only = told.values()
    assert bad.rank == 1 and "IndexError" in bad.explanation
    assert "collate (/home/user/fit.py, line 31)" in bad.explanation
    assert "nested_concat" in evaluation.explanation and "eval_accumulation_steps" in evaluation.fix
    assert "unequal numbers of batches" in unequal.explanation and "drop_last" in unequal.fix
    assert "read-only" in read_only.explanation and "/models/.cache" in read_only.explanation


def test_an_error_outside_of_what_reads_records_is_not_blamed_on_them(tmp_path):
    assert first(tmp_path, f"{FRAME}IndexError: list index out of range\n").cause == "program_error"
    loop = (
        'Traceback (most recent call last):\n  File "/w/t.py", line 3, in step\n   '
        " x[0]\nIndexError: list index\n"
    )
    assert first(tmp_path, loop).cause == "program_error"
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    assert "eval_accumulation_steps" not in first(tmp_path, FRAME + oom).fix
    equal = "[rank0] dataloader length 5\n[rank1] dataloader length 5\n"
    assert "unequal" not in first(tmp_path, equal + TIMEOUT).explanation


def test_an_exception_that_was_handled_counts_where_the_process_ends_by_it(tmp_path):
    handled = (
        "WARNING: caught RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB, batch"
        " skipped\n"
    )
    (tmp_path / "good.log").write_text(f"torchrun\n{handled}")
    assert diagnose_logs(tmp_path / "good.log") == []
    reference = (
        "Failed to import kernels: ModuleNotFoundError: No module named 'triton'. Using the"
        " reference path.\n"
    )
    assert diagnose_logs(_written(tmp_path, f"python x.py\n{reference}")) == []
    ended = f"{FRAME}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    assert first(tmp_path, handled + ended).cause == "device_oom"
    assert (
        first(tmp_path, "caught RuntimeError: CUDA error: out of memory, exiting\n").cause
        == "device_oom"
    )
    cut = (
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe2 in position 900: unexpected end"
        " of data\n"
    )
    assert [found.cause for found in diagnose_logs(_written(tmp_path, FRAME + cut))] == [
        "dataset_bad_json"
    ]


def _written(folder: Path, text: str) -> Path:
    (folder / "run.log").write_text(text, encoding="utf-8")
    return folder / "run.log"


ANSWERED = 'INFO:     10.0.0.2:5000 - "POST /v1/completions HTTP/1.1" 200 OK\n'
UP = "INFO:     Application startup complete.\n"
EXITED = (
    "E1102 10:00:30.000 140 torch/distributed/elastic/x.py:869] failed (exitcode: 1) local_rank: 0"
    " (pid: 77)\n"
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
THROUGHPUT = (
    "INFO 11-02 10:06:10 [metrics.py:455] Avg generation throughput: 1.3 tokens/s, Running: 0"
    " reqs\n"
)
DIED = (
    "CRITICAL 11-02 10:10:01 [launcher.py:116] MQLLMEngine is already dead, terminating server"
    " process\n"
)
NOT_BUILT = (
    "ERROR: Could not build wheels for flash-attn, which is required to install"
    " pyproject.toml-based projects\n"
)
UNBOUND = "./run.sh: line 4: NCCL_DEBUG: unbound variable\n"
NO_CONTAINER = "docker: Error response from daemon: No such container: train\n"
IN_SERVER = (
    '  File "/e/site-packages/sglang/srt/entrypoints/http_server.py", line 2, in generate_request\n'
)
TRACKER = "mlflow.exceptions.MlflowException: API request to http://localhost:5000 failed\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{FRAME}KeyError: 'question'\n{EXITED}{UP}", "dataset_missing_field"),
        (f"{FRAME}{OOM}{EXITED}{UP}{ANSWERED}", "device_oom"),
        (f"{UP}{FRAME}KeyError: 'answer'\n{THROUGHPUT}", "dataset_missing_field"),
        (
            (
                f"{UP}{ANSWERED}[rank0]: RuntimeError: CUDA error: an illegal memory access was"
                f" encountered\n{ANSWERED}"
            ),
            "illegal_memory_or_ecc",
        ),
        (
            f"{FRAME}RuntimeError: CUDA error: device-side assert triggered\n{EXITED}{ANSWERED}",
            "illegal_memory_or_ecc",
        ),
        (f"{UP}ERROR 11-02 10:10:00 [engine.py:160] {OOM}{DIED}{ANSWERED}", "device_oom"),
        (f"{UP}ERROR 11-02 10:10:00 [engine.py:160] {OOM}{ANSWERED}", "device_oom"),
        (
            f"{FRAME}TypeError: forward() got an unexpected keyword argument 'labels'\n{ANSWERED}",
            "package_mismatch",
        ),
        (f"ValueError: nothing is left\n{ANSWERED}", None),
        (f"{STEP}ValueError: a reward of 0\n{STEP}ValueError: another reward of 0\n{STEP}", None),
        (f"{ANSWERED}{FRAME}{IN_SERVER}ValueError: it is too long\n{ANSWERED}", None),
        (f"{ANSWERED}{FRAME}{IN_SERVER}{OOM}{ANSWERED}", "device_oom"),
        (f"{FRAME}{IN_SERVER}ValueError: it is too long\n{ANSWERED}", "unknown"),
        (
            f"{ANSWERED}{FRAME}{IN_SERVER}ValueError: it is too long\n{EXITED}{ANSWERED}",
            "unknown",
        ),
        (
            (
                f"{STEP}ValueError: nothing is left\n{STEP}slurmstepd: error: Exited with exit"
                " code 1\n"
            ),
            "unknown",
        ),
        (f"{STEP}ValueError: nothing is left\n{STEP}[rank1]: {TIMEOUT}", "unknown"),
        (
            f"{NOT_BUILT}{FRAME}AttributeError: 'Tensor' object has no attribute 'foo'\n",
            "program_error",
        ),
        (
            f"{NOT_BUILT}{STEP}{FRAME}AttributeError: 'Tensor' object has no attribute 'foo'\n",
            "program_error",
        ),
        (f"{NOT_BUILT}{FRAME}KeyError: 'text'\n", "dataset_missing_field"),
        (
            (
                f"{NOT_BUILT}{FRAME}RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8"
                " and 16x4)\n"
            ),
            "shape_mismatch",
        ),
        (f"{NOT_BUILT}flash-attn not installed, falling back to sdpa\n{STEP}", None),
        (f"{NOT_BUILT}make: *** [Makefile:4: train] Error 1\n", "missing_package"),
        (f"{UNBOUND}{FRAME}KeyError: 'text'\n", "dataset_missing_field"),
        (f"{UNBOUND}srun: error: n1: task 0: Exited with exit code 1\n", "program_error"),
        (f"{NO_CONTAINER}{FRAME}KeyError: 'text'\n", "dataset_missing_field"),
        (f"{TRACKER}{STEP}{FRAME}KeyError: 'text'\n", "dataset_missing_field"),
        (f"{FRAME}{TRACKER}{STEP}", "wandb_login"),
        (
            (
                f"Step 1: reward 0.1\nValueError: must be a number: 'abc'\n{STEP}All evaluations"
                " finished.\n"
            ),
            None,
        ),
        (
            (
                f"{STEP}TypeError: unsupported operand type(s) for +: 'int' and 'str'\n{STEP}All"
                " tasks finished.\n"
            ),
            None,
        ),
        (
            f"{UP}NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n{ANSWERED}",
            "illegal_memory_or_ecc",
        ),
        (f"CommandNotFoundError: not configured\npython x.py\n{STEP}", None),
        (f"CommandNotFoundError: not configured\n{UP}{ANSWERED}", None),
        (
            f"CommandNotFoundError: not configured\n{FRAME}ZeroDivisionError: division by zero\n",
            "program_error",
        ),
    ],
)
def test_what_a_server_or_a_run_goes_on_after_is_not_its_end(text, cause, tmp_path):
    found = [finding.cause for finding in diagnose_logs(_written(tmp_path, "python\n" + text))]
    assert found[:1] == ([cause] if cause else [])


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("TIME LIMIT", "device_throttled"),
        ("PREEMPTION", "preempted"),
        ("NODE FAILURE", "preempted"),
    ],
)
def test_a_slow_device_is_the_cause_only_of_a_job_out_of_time(end, cause, tmp_path):
    slow = "GPU6 clocks_event_reasons.hw_thermal_slowdown=Active\n"
    cancelled = (
        f"slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2025-06-01T10:20:30 DUE TO {end} ***\n"
    )
    assert first(tmp_path, STEP + slow + STEP * 5 + cancelled).cause == cause
    assert (
        first(tmp_path, "SW Thermal Slowdown : Active\n" + STEP * 5 + cancelled).cause
        == "preempted"
    )
    assert first(tmp_path, STEP + slow + STEP + TIMEOUT).cause == "collective_timeout"
    for healthy in (
        "hw_thermal_slowdown=Not Active\n",
        "SW Power Cap : Active\n",
        "GPU thermal_throttle: 0\n",
    ):
        assert first(tmp_path, STEP + healthy + cancelled).cause == "preempted"


def test_who_loads_a_checkpoint_onto_one_device_is_named():
    finding = diagnose_logs(LOGS / "device_oom" / "loaded_onto_one_device.log")[0]
    assert "map_location" in finding.fix
    assert "stop it or take another device" not in finding.fix


def test_sizes_that_are_no_sample_and_no_maximum(tmp_path):
    unlike = (
        "RuntimeError: size of tensor a (768) must match the size of tensor b (1024) at"
        " non-singleton dimension 2"
    )
    warned = (
        "Token indices sequence length is longer than the specified maximum sequence length for"
        " this model (9 > 8)"
    )
    assert first(tmp_path, f"{warned}\n{FRAME}{unlike}\n").cause == "shape_mismatch"


def out_of_memory(*functions: str) -> str:
    frames = "".join(
        f'  File "/e/lib/python3.11/site-packages/torch/x.py", line 2, in {name}\n'
        for name in functions
    )
    return (
        f"{FRAME}{frames}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )


def test_memory_that_gathering_a_checkpoint_took(tmp_path):
    finding = diagnose_logs(LOGS / "device_oom" / "state_gathered.log")[0]
    assert (
        "_zero3_consolidated_16bit_state_dict" in finding.explanation
        and "offload_to_cpu" in finding.fix
    )
    for functions in (("_full_post_state_dict_hook", "_unshard"),):
        assert "SHARDED_STATE_DICT" in first(tmp_path, out_of_memory(*functions)).fix
    for functions in (
        ("generate", "summon_full_params"),
        ("load_state_dict", "x"),
        ("_pre_load_state_dict_hook",),
    ):
        assert "SHARDED_STATE_DICT" not in first(tmp_path, out_of_memory(*functions)).fix


def test_the_port_of_an_http_server_is_no_rendezvous(tmp_path):
    taken = "OSError: [Errno 98] Address already in use\n"
    serves = (
        f'{FRAME}  File "/e/site-packages/vllm/entrypoints/openai/api_server.py", line 5, in'
        f" run_server\n{taken}"
    )
    finding = diagnose_logs(LOGS / "port_in_use" / "http_server.log")[0]
    assert (
        "port 8000" in finding.explanation
        and "--port 8001" in finding.fix
        and ":8000" in finding.fix
    )
    for text in (serves, "python x.py\nERROR: port 30000 is already in use\n"):
        found = first(tmp_path, text)
        assert found.cause == "port_in_use" and "rendezvous" not in found.explanation
    for text in (
        FRAME + taken,
        "RuntimeError: Port 30000 is already in use\n",
        "torch.distributed: port 5000 is already in use\n",
    ):
        assert "rendezvous" in first(tmp_path, text).explanation


def test_a_board_without_a_port_does_not_end_a_run(tmp_path):
    board = "ERROR: TensorBoard could not bind to port 6006, it was already in use\n"
    assert (
        first(tmp_path, f"{board}{FRAME}ZeroDivisionError: division by zero\n").cause
        == "program_error"
    )
    assert diagnose_logs(_written(tmp_path, f"python x.py\n{board}{STEP * 3}")) == []


def test_an_engine_that_ended_its_own_processes_was_not_killed_for_memory(tmp_path):
    sigquit = (
        "[2025-04-01 10:00:20] Received sigquit from a child process. It usually means the child"
        " failed.\n"
    )
    unknown = f"{FRAME}ValueError: nobody knows this\n"
    assert first(tmp_path, f"{unknown}{sigquit}Killed\n").cause == "program_error"
    assert first(tmp_path, f"{STEP}Killed\n").cause == "host_oom"
    restarted = f"{unknown}{sigquit}+ restarted server with 0.9\n{STEP}Killed\n"
    assert first(tmp_path, restarted).cause == "host_oom"
    assert first(tmp_path, f"{unknown}{sigquit}{STEP}Killed\n").cause == "host_oom"
    cache = (
        "ValueError: No available memory for the cache blocks. Try increasing"
        " `gpu_memory_utilization`.\n"
    )
    failed = f"{FRAME}RuntimeError: Engine core initialization failed. See root cause above.\n"
    causes = [
        found.cause
        for found in diagnose_logs(_written(tmp_path, f"{FRAME}{cache}{failed}Killed\n"))
    ]
    assert causes == ["device_oom"]


@pytest.mark.parametrize("module", ["tbe", "te", "tbe.common", "hccl", "acl", "topi", "mspti"])
def test_packages_of_cann_are_not_installed_with_pip(module, tmp_path):
    finding = first(tmp_path, f"{FRAME}ModuleNotFoundError: No module named '{module}'\n")
    assert finding.cause == "torch_npu_missing_or_mismatch" and "set_env.sh" in finding.fix
    other = first(
        tmp_path, f"{FRAME}ModuleNotFoundError: No module named '{module.replace('.', 'x')}nsor'\n"
    )
    assert other.cause == "missing_package"


def test_records_left_out_as_too_long_matter_where_none_is_left(tmp_path):
    dropped = (
        "[WARNING|2025-06-02 18:20:41] llamafactory.data:148 >> Dropped lengthy example with length"
        " 5120 > 1024.\n"
    )
    none_left = (
        "RuntimeError: Cannot find valid samples, check `data/README.md` for the data format.\n"
    )
    assert "1024" in first(tmp_path, dropped * 2 + FRAME + none_left).explanation
    assert "filtered out" in first(tmp_path, FRAME + none_left).explanation
    (tmp_path / "done.log").write_text(f"{dropped * 2}{STEP}{{'train_runtime': 9.1}}\n")
    assert not diagnose_logs([tmp_path / "done.log"])


QUOTES = (
    "task 7 torch\nRuntimeError: CUDA error: out of memory at line 3\nanswer checked\nnext one\n"
)


@pytest.mark.parametrize(
    ("end", "got_over"),
    [
        ("pass@1 = 0.616\nresults in results/merged.json\n", True),
        ("report saved to reports/rag.html\n$ \n", True),
        ("results in results/merged.json\nexited with code 3\n", False),
        ("next one\n", False),
    ],
)
def test_a_log_that_goes_on_to_a_result_is_no_failure(end, got_over, tmp_path, capsys):
    log = tmp_path / "x.log"
    log.write_text(QUOTES + end)
    assert main([str(log), "--lang", "en"]) == (ExitCode.DONE if got_over else ExitCode.FAILED)
    shown = capsys.readouterr().out
    assert ("goes on to a result" in shown) == got_over and "out of memory" in shown
    assert main([str(log), "--json"]) == (ExitCode.DONE if got_over else ExitCode.FAILED)
    told = json.loads(capsys.readouterr().out)
    assert bool(told["findings"]) != got_over and ("got_over" in told) == got_over


def test_a_training_that_ended_is_a_failure_whatever_its_wrapper_saved(tmp_path):
    wrapped = "+ collect logs\nuploading\nlogs saved to s3://bucket/run-7/logs.tar\n"
    assert (
        first(tmp_path, f"{STEP}{FRAME}ValueError: nobody knows this\n{wrapped}").cause
        == "program_error"
    )
