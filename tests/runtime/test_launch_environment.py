"""The launch environment: what is read, what is set and never overridden, what is refused."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from finetune.errors import ConfigError
from finetune.runtime import launch_environment
from finetune.runtime.launch_environment import (
    LaunchWorld,
    launch_world,
    npu_variables,
    prepare_environment,
    probe_torch_npu,
)
from finetune.sft import main

ONE = LaunchWorld(0, 0, 1, 1, launched=False)
TWO = LaunchWorld(1, 1, 2, 2, launched=True)

pytestmark = pytest.mark.usefixtures("fresh_environment")


def test_who_this_process_is(monkeypatch, caplog):
    assert launch_world() == ONE and launch_world().is_main
    monkeypatch.setattr(launch_environment.logger, "propagate", True)
    os.environ["WORLD_SIZE"] = "8"
    assert launch_world() == ONE
    assert "WORLD_SIZE" not in os.environ, "accelerate and DeepSpeed would still believe it"
    assert "WORLD_SIZE=8" in caplog.text and "unset WORLD_SIZE" in caplog.text
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert launch_world().local_world_size == 2, "all are here"
    os.environ.update(RANK="5", LOCAL_RANK="1", WORLD_SIZE="16", LOCAL_WORLD_SIZE="4")
    assert launch_world() == LaunchWorld(5, 1, 16, 4, launched=True) and not launch_world().is_main


def prepare(world=ONE, *, use_deepspeed=False, **more):
    """Variables that were set; each is also said, with a reason."""
    before = dict(os.environ)
    said = prepare_environment(world, use_deepspeed=use_deepspeed, timeout_seconds=77, **more)
    added = {name: value for name, value in os.environ.items() if name not in before}
    assert {line.split(": ")[0] for line in said} == {f"{k}={v}" for k, v in added.items()}
    assert all(os.environ.get(name) == value for name, value in before.items())
    return added


def test_what_is_set_and_why():
    assert prepare() == {"TOKENIZERS_PARALLELISM": "false"}
    cores = len(os.sched_getaffinity(0))
    assert prepare(TWO)["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert "RANK" not in prepare(TWO, use_deepspeed=True), "the launcher has said it"
    added = prepare(use_deepspeed=True)
    assert (added["RANK"], added["LOCAL_RANK"], added["WORLD_SIZE"]) == ("0", "0", "1")
    assert added["MASTER_ADDR"] == "127.0.0.1" and 1024 <= int(added["MASTER_PORT"]) < 65536


def test_what_the_user_set_is_never_changed(monkeypatch):
    alone = LaunchWorld(0, 0, 2, 2, launched=False)
    asked = npu_variables(("core-binding", "task-queue"), 400)
    assert not set(asked) & set(prepare(npu_variables=asked)), "no torch_npu here"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    added = prepare(alone, use_deepspeed=True, npu_variables=asked)
    assert {"HCCL_EXEC_TIMEOUT", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} <= set(added)
    assert added["HCCL_CONNECT_TIMEOUT"] == "77", "the same limit as --timeout-seconds"
    assert [added[name] for name in asked] == ["2", "2", "400"]
    for name in added:
        os.environ[name] = "the user's"
    assert prepare(alone, use_deepspeed=True, npu_variables=asked) == {}


def test_operators_are_built_once_per_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    name = "TORCH_EXTENSIONS_DIR"
    assert name not in prepare()
    assert prepare(use_deepspeed=True)[name] == str(tmp_path / "torch_extensions")
    del os.environ[name]
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert name not in prepare(use_deepspeed=True), "the system's Python keeps torch's own place"


def test_what_would_silently_train_something_else_is_taken_out_or_refused():
    names = ("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION")
    os.environ.update(dict.fromkeys(names, "true"))
    prepare_environment(ONE, use_deepspeed=True, timeout_seconds=1)
    assert not set(names) & set(os.environ)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    with pytest.raises(ConfigError, match="no DeepSpeed keys"):
        prepare_environment(TWO, use_deepspeed=False, timeout_seconds=1)


def test_a_torch_npu_that_cannot_be_loaded_is_said(tmp_path, monkeypatch, capsys):
    package = tmp_path / "site" / "torch_npu.py"
    package.parent.mkdir()
    package.write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(package.parent)
    os.environ["PYTHONPATH"] = str(package.parent)
    assert main(["--model", "m", "--data", "d", "--output-dir", f"{tmp_path}/out"]) == 2
    assert "but cannot be loaded: ImportError: libhccl" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("it was probed"))
    probe_torch_npu()


def test_bitsandbytes_finds_no_kernels_while_it_is_imported(tmp_path: Path, monkeypatch, capfd):
    """What comes with peft says nothing and downloads nothing."""
    (tmp_path / "bitsandbytes.py").write_text(
        "import logging\n"
        "try:\n    import kernels\nexcept ImportError:\n    kernels = None\n"
        "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load')\n"
    )
    kernels = ModuleType("kernels")
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # put back at the end, if it was there
    del sys.modules["bitsandbytes"]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    launch_environment.import_bitsandbytes()
    assert sys.modules["bitsandbytes"].kernels is None and sys.modules["kernels"] is kernels
    assert "Failed" not in capfd.readouterr().err
