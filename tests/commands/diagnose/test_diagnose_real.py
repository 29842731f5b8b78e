"""Each cause by a process that really fails of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diagnose_breaks as breaks
import pytest
import run_helpers
from launching import environment
from run_helpers import Materials

from finetune.commands.diagnose.command import diagnose_logs
from finetune.runtime.ports import free_port


def _child(log: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    with contextlib.suppress(SystemExit):
        try:
            function(*arguments)
        except Exception:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def broken(
    folder: Path, function: Callable[..., None], *arguments: Any, processes: int = 1
) -> list[Path]:
    """Run a function in forked processes, as ranks; their logs."""
    context = run_helpers._fork_context()
    logs = [folder / f"rank{rank}.log" for rank in range(processes)]
    started = [
        context.Process(target=_child, args=(str(log), function, (rank, *arguments)))
        for rank, log in enumerate(logs)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    hung = [process for process in started if process.exitcode is None]
    for process in started:  # and what it started itself, as a loader's worker whose parent died
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert not hung
    return logs


def causes(*paths: Path) -> list[str]:
    return [finding.cause for finding in diagnose_logs(paths)]


def assert_cause(cause: str, paths: list[Path]) -> None:
    findings = diagnose_logs(paths)
    texts = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in paths]
    assert [finding.cause for finding in findings] == [cause], "\n".join(texts)


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("diagnose"))


@pytest.mark.parametrize("cause", breaks.CODE)
def test_code(cause, tmp_path):
    assert_cause(cause, broken(tmp_path, breaks.run_code, breaks.CODE[cause]))


@pytest.mark.parametrize(
    ("cause", "function"),
    [
        ("host_oom", breaks.host_memory),
        ("grad_checkpoint_mismatch", breaks.recomputation),
        ("deepspeed_batch_assert", breaks.batch_sizes),
        ("too_many_open_files", breaks.open_files),
        ("deepspeed_cpu_adam_build", breaks.no_compiler),
        ("bf16_unsupported", breaks.bfloat16),
    ],
)
def test_one_process(cause, function, tmp_path):
    assert_cause(cause, broken(tmp_path, function, str(tmp_path)))


def test_packages_that_are_not_there_or_not_set_up(materials, tmp_path):
    if not importlib.util.find_spec("flash_attn"):
        logs = broken(tmp_path, breaks.flash_attention, str(materials.model))
        assert_cause("flash_attn_missing", logs)
    if not importlib.util.find_spec("wandb"):
        pytest.skip("wandb is not installed here")
    (tmp_path / "own").mkdir()
    assert_cause("wandb_login", broken(tmp_path / "own", breaks.wandb, str(tmp_path)))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting file systems needs root")
def test_small_shared_memory_and_a_full_disk(tmp_path):
    logs = broken(tmp_path, breaks.shared_memory, str(tmp_path))
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if "NO MOUNT" in logs[0].read_text() or not mounted:
        pytest.skip("mounting is not allowed here")
    try:
        assert_cause("dataloader_worker_killed_shm", logs)
        logs[0].unlink()
        assert_cause("disk_full", broken(tmp_path, breaks.disk, str(disk)))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize(
    ("cause", "function", "processes"),
    [
        ("rendezvous_timeout", breaks.master_is_dead, 1),
        ("nccl_network_interface", breaks.interface_is_not_there, 1),
        ("collective_timeout", breaks.peer_sleeps, 2),
        ("peer_died", breaks.peer_is_killed, 2),
        ("unused_parameters_ddp", breaks.parameters_unused, 2),
    ],
)
def test_processes(cause, function, processes, tmp_path):
    assert_cause(cause, broken(tmp_path, function, free_port(), processes=processes))


def test_the_rank_that_failed_first_is_blamed(tmp_path):
    logs = broken(tmp_path, breaks.peer_fails_first, free_port(), processes=2)
    assert causes(logs[0]) == ["peer_died"]  # all that rank 0 can know
    (finding,) = diagnose_logs(logs)
    assert (finding.cause, finding.rank, finding.consequences) == ("host_oom", 1, ["peer_died"])


def test_port_taken_under_torchrun(tmp_path):
    script, log = tmp_path / "worker.py", tmp_path / "launcher.log"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    with socket.create_server(("127.0.0.1", 0)) as held, log.open("wb") as output:
        words += [f"--master-port={held.getsockname()[1]}", str(script)]
        done = subprocess.run(words, env=environment(), stdout=output, stderr=output, check=False)
    assert done.returncode != 0
    assert_cause("port_in_use", [log])


def rows(folder: Path, line: str) -> dict[str, str]:
    """Data with one line between good ones."""
    good = json.dumps({"instruction": "what", "output": "that"})
    (folder / "bad.jsonl").write_text(f"{good}\n{line}\n{good}\n", encoding="utf-8")
    return {"data": str(folder / "bad.jsonl")}


def model_cut_short(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def more_tokens_than_embeddings(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<new-{number}>" for number in range(64)])
    tokenizer.save_pretrained(model)


NO_OUTPUT, NO_COMMA = '{"instruction": "q", "answer": "a"}', '{"instruction": "q" "output": "a"}'
NEW_TOKEN = '{"instruction": "<new-3>", "output": "a"}'
# What a run of one's own has: settings, or what makes them in a folder.
OWN: dict[str, Any] = {
    "model_not_found": {"model": "/tmp/no-model"},
    "dataset_missing_field": lambda folder: rows(folder, NO_OUTPUT),
    "dataset_bad_json": lambda folder: rows(folder, NO_COMMA),
    "explained_by_run": {"lora_target_modules": ["no_such_layer"]},
    "hub_offline": {"model": "an-owner/a-model-that-is-not-cached"},
    "cuda_driver_mismatch": {"device_type": "cuda"},
    "torch_npu_missing_or_mismatch": {"device_type": "npu"},
    "nan_loss": {"learning_rate": 1e30, "max_steps": 40, "max_grad_norm": 0},
    "deepspeed_batch_assert": {"global_batch_size": 7, "gradient_accumulation_steps": 4},
    "checkpoint_corrupt": {"change": model_cut_short},
    "tokenizer_vocab_mismatch": lambda folder: {
        "change": more_tokens_than_embeddings,
        **rows(folder, NEW_TOKEN),
    },
}


@pytest.mark.parametrize("cause", OWN)
def test_own_run(cause, materials, tmp_path):
    changes = dict(OWN[cause](tmp_path) if callable(OWN[cause]) else OWN[cause])
    if change := changes.pop("change", None):
        changes["model"] = str(shutil.copytree(materials.model, tmp_path / "model"))
        change(tmp_path / "model")
    ranks = run_helpers.start(materials.settings(tmp_path / "run", **changes))
    assert ranks.wait() != [0], ranks.output()
    assert_cause(cause, ranks.log_paths)
    if cause == "nan_loss":
        assert causes(tmp_path / "run") == ["nan_loss"]


def test_output_folder_of_somebody_else(materials, tmp_path):
    closed, config = tmp_path / "closed", tmp_path / "run.json"
    closed.mkdir()
    closed.chmod(0o555)
    config.write_text(json.dumps(materials.settings(closed / "run")))
    assert_cause("permission_denied", broken(tmp_path, breaks.sft_without_rights, str(config)))


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_run_that_was_ended(how, materials, tmp_path):
    ranks = run_helpers.start(materials.settings(tmp_path / "run", max_steps=2000))
    log = tmp_path / "run" / "trainer_log.jsonl"
    run_helpers.wait_for(
        lambda: log.exists() and log.read_bytes().count(b"\n"), what="the first step"
    )
    assert causes(tmp_path / "run") == []  # it runs
    if how == "killed":
        ranks.kill()
        assert causes(tmp_path / "run") == ["peer_died"]
        return
    run_helpers.send(ranks.pids, signal.SIGTERM)
    assert ranks.wait() == [3], ranks.output()
    assert_cause("preempted", ranks.log_paths)
    assert causes(tmp_path / "run") == ["preempted"]


def test_good_runs_get_no_finding(materials, tmp_path):
    ranks = run_helpers.train(materials.settings(tmp_path / "run"), 2)
    assert causes(*ranks.log_paths) == [] and causes(tmp_path / "run") == []
