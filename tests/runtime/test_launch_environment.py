"""The launch environment: what is read, what is set and never overridden, what is refused."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, run_cli, said

from finetune.errors import ConfigError
from finetune.runtime.launch_environment import (
    LaunchWorld,
    launch_world,
    npu_variables,
    prepare_environment,
    probe_torch_npu,
)
from finetune.runtime.ports import free_port

ONE = LaunchWorld(0, 0, 1, 1, launched=False)
TWO = LaunchWorld(1, 1, 2, 2, launched=True)

pytestmark = pytest.mark.usefixtures("fresh_environment")


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the package's logger says, wherever another test has sent it."""
    logger = logging.getLogger("finetune")
    before, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = before


# ---------------------------------------------------------------- who this process is


def test_a_plain_process_is_alone():
    assert launch_world() == ONE
    assert launch_world().is_main


def test_a_launcher_says_who_this_is():
    os.environ.update(RANK="5", LOCAL_RANK="1", WORLD_SIZE="16", LOCAL_WORLD_SIZE="4")
    world = launch_world()
    assert world == LaunchWorld(5, 1, 16, 4, launched=True) and not world.is_main


def test_without_a_local_world_size_all_are_here():
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert launch_world().local_world_size == 2


def test_a_stale_world_size_is_ignored_with_a_warning(messages: pytest.LogCaptureFixture):
    os.environ["WORLD_SIZE"] = "8"
    assert launch_world() == ONE
    assert "WORLD_SIZE" not in os.environ, "accelerate and DeepSpeed would still believe it"
    (record,) = messages.records
    assert record.levelno == logging.WARNING
    assert "WORLD_SIZE=8" in record.getMessage() and "unset WORLD_SIZE" in record.getMessage()


def test_a_free_port_can_be_bound():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


# ---------------------------------------------------------------- the environment


def prepare(
    world: LaunchWorld = ONE, *, use_deepspeed: bool = False, **more: Any
) -> dict[str, str]:
    """Variables that were set; each is also said, with a reason."""
    before = dict(os.environ)
    said = prepare_environment(world, use_deepspeed=use_deepspeed, timeout_seconds=77, **more)
    added = {name: value for name, value in os.environ.items() if name not in before}
    assert sorted(line.split(": ")[0] for line in said) == sorted(
        f"{name}={value}" for name, value in added.items()
    )
    assert all(line.split(": ", 1)[1] for line in said)
    changed = [name for name in before if os.environ.get(name, before[name]) != before[name]]
    assert not changed, f"variables of the user were changed: {changed}"
    return added


def test_one_process_needs_little():
    assert prepare() == {"TOKENIZERS_PARALLELISM": "false"}


def test_several_processes_share_the_cores():
    assert prepare(TWO)["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))


def test_deepspeed_without_launcher_is_told_that_it_is_alone():
    added = prepare(use_deepspeed=True)
    assert (added["RANK"], added["LOCAL_RANK"], added["WORLD_SIZE"]) == ("0", "0", "1")
    assert added["MASTER_ADDR"] == "127.0.0.1" and 1024 <= int(added["MASTER_PORT"]) < 65536


def test_deepspeed_under_a_launcher_is_told_nothing():
    assert "RANK" not in prepare(TWO, use_deepspeed=True)


def test_what_the_user_set_is_never_changed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    names = set(prepare(LaunchWorld(0, 0, 2, 2, launched=False), use_deepspeed=True))
    assert {
        "HCCL_CONNECT_TIMEOUT",
        "HCCL_EXEC_TIMEOUT",
        "PYTORCH_NPU_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    } <= names
    assert os.environ["HCCL_CONNECT_TIMEOUT"] == "77", "the same limit as --timeout-seconds"
    for name in names:
        os.environ[name] = "the user's"
    assert prepare(LaunchWorld(0, 0, 2, 2, launched=False), use_deepspeed=True) == {}
    assert {os.environ[name] for name in names} == {"the user's"}


def test_tuning_of_npus_is_set_where_there_are_some(monkeypatch: pytest.MonkeyPatch):
    asked = npu_variables(("core-binding", "task-queue"), 400)
    assert npu_variables((), None) == {}, "nothing unless asked for"
    assert not set(asked) & set(prepare(npu_variables=asked)), "no torch_npu here"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    os.environ["TASK_QUEUE_ENABLE"] = "1"
    added = prepare(npu_variables=asked)
    assert (added["CPU_AFFINITY_CONF"], added["HCCL_BUFFSIZE"]) == (
        "2",
        "400",
    ) and "TASK_QUEUE_ENABLE" not in added


def test_operators_are_built_once_per_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "TORCH_EXTENSIONS_DIR" not in prepare()
    assert prepare(use_deepspeed=True)["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "torch_extensions")
    assert "TORCH_EXTENSIONS_DIR" not in prepare(use_deepspeed=True), "one that is set stays"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert "TORCH_EXTENSIONS_DIR" not in prepare(use_deepspeed=True), (
        "the system's Python keeps torch's own place"
    )


@pytest.mark.parametrize(
    "name", ["ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"]
)
def test_what_would_silently_train_something_else_is_taken_out(name: str):
    os.environ[name] = "true"
    prepare_environment(ONE, use_deepspeed=True, timeout_seconds=1)
    assert name not in os.environ


def test_deepspeed_asked_for_by_the_launcher_without_keys_is_refused():
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    with pytest.raises(ConfigError) as caught:
        prepare_environment(TWO, use_deepspeed=False, timeout_seconds=1)
    assert "no DeepSpeed keys" in caught.value.what
    assert "ds_configs/zero3.json" in caught.value.fix and "--use_deepspeed" in caught.value.fix


def test_the_launcher_of_accelerate_without_keys_is_refused(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
):
    """The real command: as accelerate's topology file for DeepSpeed starts it."""
    flags = ["--model", tiny_model, "--data", tiny_data, "--output-dir", tmp_path / "out"]
    result = run_cli(flags, env={"ACCELERATE_USE_DEEPSPEED": "true"})
    assert result.returncode == 2 and "Traceback" not in said(result)
    assert "the launcher asked for DeepSpeed" in result.stderr and not (tmp_path / "out").exists()


# ---------------------------------------------------------------- torch_npu that cannot be loaded


@pytest.fixture
def broken_torch_npu(tmp_path: Path) -> Path:
    """A torch_npu as it is where CANN is not: importing it fails with the loader's words."""
    package = tmp_path / "site" / "torch_npu"
    package.mkdir(parents=True)
    reason = "libhccl.so: cannot open shared object file: No such file or directory"
    (package / "__init__.py").write_text(f"raise ImportError({reason!r})\n")
    return package.parent


def test_a_torch_npu_that_cannot_be_loaded_is_said(
    broken_torch_npu: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(broken_torch_npu))
    os.environ["PYTHONPATH"] = str(broken_torch_npu)
    with pytest.raises(ConfigError) as caught:
        probe_torch_npu()
    assert (
        "torch_npu is installed but cannot be loaded: ImportError: libhccl.so" in caught.value.what
    )
    assert "set_env.sh" in caught.value.fix and "pip uninstall torch_npu" in caught.value.fix


def test_the_command_refuses_before_importing_torch(
    broken_torch_npu: Path, tmp_path: Path, tiny_model: Path, tiny_data: Path
):
    flags = ["--model", tiny_model, "--data", tiny_data, "--output-dir", tmp_path / "out"]
    paths = os.pathsep.join([str(broken_torch_npu), str(ROOT)])
    result = run_cli(flags, env={"PYTHONPATH": paths})
    assert result.returncode == 2 and "Traceback" not in said(result)
    assert "libhccl.so" in result.stderr and "set_env.sh" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_machine_without_torch_npu_is_not_probed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **kwargs: pytest.fail("a process was started")
    )
    probe_torch_npu()
