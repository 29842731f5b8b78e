"""The device table and the launch environment: what is read, what is set and never overridden, what is refused."""

from __future__ import annotations

import logging
import os
import platform
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, run_cli, said

from finetune.errors import ConfigError
from finetune.runtime import device as devices
from finetune.runtime.device import DEVICE_KINDS, LaunchWorld
from finetune.runtime.npu_tuning import npu_variables

ONE = LaunchWorld(0, 0, 1, 1, launched=False)
TWO = LaunchWorld(1, 1, 2, 2, launched=True)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch):
    """An environment as on a fresh machine; whatever a test does to it is undone."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(kept)
    yield
    os.environ.clear()
    os.environ.update(before)


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
    assert devices.launch_world() == ONE
    assert devices.launch_world().is_main


def test_a_launcher_says_who_this_is():
    os.environ.update(RANK="5", LOCAL_RANK="1", WORLD_SIZE="16", LOCAL_WORLD_SIZE="4")
    world = devices.launch_world()
    assert world == LaunchWorld(5, 1, 16, 4, launched=True) and not world.is_main


def test_without_a_local_world_size_all_are_here():
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert devices.launch_world().local_world_size == 2


def test_a_stale_world_size_is_ignored_with_a_warning(messages: pytest.LogCaptureFixture):
    os.environ["WORLD_SIZE"] = "8"
    assert devices.launch_world() == ONE
    assert "WORLD_SIZE" not in os.environ, "accelerate and DeepSpeed would still believe it"
    (record,) = messages.records
    assert record.levelno == logging.WARNING
    assert "WORLD_SIZE=8" in record.getMessage() and "unset WORLD_SIZE" in record.getMessage()


def test_a_free_port_can_be_bound():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", devices.free_port()))


# ---------------------------------------------------------------- the environment


def prepare(world: LaunchWorld = ONE, *, use_deepspeed: bool = False, **more: Any) -> dict[str, str]:
    """Variables that were set; each is also said, with a reason."""
    before = dict(os.environ)
    said = devices.prepare_environment(world, use_deepspeed=use_deepspeed, timeout_seconds=77, **more)
    added = {name: value for name, value in os.environ.items() if name not in before}
    assert sorted(line.split(": ")[0] for line in said) == sorted(f"{name}={value}" for name, value in added.items())
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
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(devices.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    names = set(prepare(LaunchWorld(0, 0, 2, 2, launched=False), use_deepspeed=True))
    assert {"HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} <= names
    assert os.environ["HCCL_CONNECT_TIMEOUT"] == "77", "the same limit as --timeout-seconds"
    for name in names:
        os.environ[name] = "the user's"
    assert prepare(LaunchWorld(0, 0, 2, 2, launched=False), use_deepspeed=True) == {}
    assert {os.environ[name] for name in names} == {"the user's"}


def test_tuning_of_npus_is_set_where_there_are_some(monkeypatch: pytest.MonkeyPatch):
    asked = npu_variables(("core-binding", "task-queue"), 400)
    assert npu_variables((), None) == {}, "nothing unless asked for"
    assert not set(asked) & set(prepare(npu_variables=asked)), "no torch_npu here"
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    os.environ["TASK_QUEUE_ENABLE"] = "1"
    added = prepare(npu_variables=asked)
    assert (added["CPU_AFFINITY_CONF"], added["HCCL_BUFFSIZE"]) == ("2", "400") and "TASK_QUEUE_ENABLE" not in added


def test_operators_are_built_once_per_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "TORCH_EXTENSIONS_DIR" not in prepare()
    assert prepare(use_deepspeed=True)["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "torch_extensions")
    assert "TORCH_EXTENSIONS_DIR" not in prepare(use_deepspeed=True), "one that is set stays"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert "TORCH_EXTENSIONS_DIR" not in prepare(use_deepspeed=True), "the system's Python keeps torch's own place"


@pytest.mark.parametrize("name", ["ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"])
def test_what_would_silently_train_something_else_is_taken_out(name: str):
    os.environ[name] = "true"
    devices.prepare_environment(ONE, use_deepspeed=True, timeout_seconds=1)
    assert name not in os.environ


def test_deepspeed_asked_for_by_the_launcher_without_keys_is_refused():
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    with pytest.raises(ConfigError) as caught:
        devices.prepare_environment(TWO, use_deepspeed=False, timeout_seconds=1)
    assert "no DeepSpeed keys" in caught.value.what
    assert "ds_configs/zero3.json" in caught.value.fix and "--use_deepspeed" in caught.value.fix


def test_the_launcher_of_accelerate_without_keys_is_refused(tmp_path: Path, tiny_model: Path, tiny_data: Path):
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


def test_a_torch_npu_that_cannot_be_loaded_is_said(broken_torch_npu: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(broken_torch_npu))
    os.environ["PYTHONPATH"] = str(broken_torch_npu)
    with pytest.raises(ConfigError) as caught:
        devices.probe_torch_npu()
    assert "torch_npu is installed but cannot be loaded: ImportError: libhccl.so" in caught.value.what
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
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(devices.subprocess, "run", lambda *args, **kwargs: pytest.fail("a process was started"))
    devices.probe_torch_npu()


# ---------------------------------------------------------------- the device


def pretend(monkeypatch: pytest.MonkeyPatch, *, npu: int = 0, cuda: int = 0, mps: bool = False, bfloat16: bool = True):
    """A machine with these devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0) if bfloat16 else (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3" if bfloat16 else "Tesla T4")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    module = types.SimpleNamespace(
        is_available=lambda: npu > 0,
        device_count=lambda: npu,
        is_bf16_supported=lambda: bfloat16,
        get_device_name=lambda *_: "Ascend 910B3",
    )
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object() if npu else None)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))


@pytest.mark.parametrize(
    ("machine", "types_in_order"),
    [
        ({}, ["cpu"]),
        ({"mps": True}, ["mps", "cpu"]),
        ({"cuda": 1}, ["cuda", "cpu"]),
        ({"npu": 8}, ["npu", "cpu"]),
        # torch_npu's transfer module makes CUDA look present: the npu must still come first.
        ({"npu": 8, "cuda": 8, "mps": True}, ["npu", "cuda", "mps", "cpu"]),
    ],
)
def test_the_best_device_comes_first(machine: dict, types_in_order: list[str], monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, **machine)
    assert devices.available_device_types() == types_in_order
    assert devices.choose_device_type("auto") == types_in_order[0]
    assert devices.choose_device_type("cpu") == "cpu"


def test_a_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, cuda=1)
    with pytest.raises(ConfigError) as caught:
        devices.choose_device_type("npu")
    assert "'npu' is not available" in caught.value.what and "cuda, cpu" in caught.value.what
    assert caught.value.where == "--device-type"


def test_deepspeed_is_told_the_device_whatever_was_said_before(monkeypatch: pytest.MonkeyPatch):
    """Else ZeRO-3 loads the model onto another device than the run's."""
    for cuda, device_type in ((0, "cpu"), (1, "cuda")):
        pretend(monkeypatch, cuda=cuda)
        devices.choose_device_type("auto")
        assert os.environ["DS_ACCELERATOR"] == device_type


@pytest.mark.parametrize(
    ("requested", "device_type", "bfloat16", "chosen"),
    [
        ("auto", "cpu", True, "float32"),
        ("auto", "mps", True, "float32"),
        ("auto", "cuda", True, "bfloat16"),
        ("auto", "cuda", False, "float32"),
        ("auto", "npu", True, "bfloat16"),
        ("auto", "npu", False, "float32"),
        ("float32", "cuda", True, "float32"),
        ("float16", "cuda", True, "float16"),
        ("float16", "npu", False, "float16"),
        ("bfloat16", "cpu", True, "bfloat16"),
        ("bfloat16", "npu", True, "bfloat16"),
        ("bfloat16", "cuda", False, None),
        ("bfloat16", "mps", True, None),
        ("float16", "cpu", True, None),
        ("float16", "mps", True, None),
    ],
)
def test_choose_dtype(requested: str, device_type: str, bfloat16: bool, chosen: str | None, monkeypatch):
    pretend(monkeypatch, npu=1, cuda=1, mps=True, bfloat16=bfloat16)
    if chosen is not None:
        assert devices.choose_dtype(requested, device_type) == chosen
        return
    with pytest.raises(ConfigError) as caught:
        devices.choose_dtype(requested, device_type)
    assert requested in caught.value.what and caught.value.where == "--dtype" and "float32" in caught.value.fix


def test_no_more_processes_than_devices(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, npu=8, cuda=2)
    devices.check_local_ranks("npu", LaunchWorld(9, 1, 16, 8, launched=True))
    devices.check_local_ranks("cuda", TWO)
    devices.check_local_ranks("cpu", LaunchWorld(0, 0, 64, 64, launched=True))
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    with pytest.raises(ConfigError) as caught:
        devices.check_local_ranks("cuda", LaunchWorld(0, 0, 4, 4, launched=True))
    assert "4 processes" in caught.value.what and "2 cuda" in caught.value.what
    assert caught.value.where == "CUDA_VISIBLE_DEVICES=0,1" and "2" in caught.value.fix
    with pytest.raises(ConfigError, match="ASCEND_RT_VISIBLE_DEVICES is not set"):
        devices.check_local_ranks("npu", LaunchWorld(0, 0, 9, 9, launched=True))


def test_two_processes_cannot_share_an_mps_device(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, mps=True)
    with pytest.raises(ConfigError, match="2 processes"):
        devices.check_local_ranks("mps", TWO)


def test_the_table():
    """Facts that other parts rely on; the fused AdamW differed on the simulated npu, and stays off there."""
    assert list(DEVICE_KINDS) == ["npu", "cuda", "mps", "cpu"]
    assert {name: kind.backend for name, kind in DEVICE_KINDS.items()} == {
        "npu": "hccl",
        "cuda": "nccl",
        "mps": "gloo",
        "cpu": "gloo",
    }
    assert not DEVICE_KINDS["npu"].fused_adamw


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17 GB)"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error: BaseException, is_one: bool):
    assert devices.is_out_of_memory(error) is is_one


def test_memory_on_a_cpu():
    cpu = torch.device("cpu")
    assert 10 * 2**20 < devices.peak_memory_bytes(cpu) < 2**43
    devices.empty_cache(cpu)


def test_no_other_file_names_a_device_module():
    """`torch.cuda`, `torch.npu`, `torch.mps` are said in one file, so that a new device is added in one place.

    torch_npu's operators (`torch_npu.npu_...`) stand where they are called: in finetune/modeling.
    """
    for path in (ROOT / "finetune").rglob("*.py"):
        if path.name != "device.py" and path.parent.name != "symptoms":  # whose remedies name them
            text = path.read_text(encoding="utf-8")
            found = re.findall(r"\b(?:torch\.cuda|torch\.npu|torch\.mps|torch_npu(?!\.npu_))\.\w+", text)
            assert not found, f"{path} says {found[0]}"


PAGE_FAULTS = """
import resource, torch
from finetune.runtime.host import keep_freed_memory

def faults(of_pages=16384):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(of_pages * 1024)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back = faults()
keep_freed_memory("cuda")
untouched = faults()
keep_freed_memory("cpu")
# At first something small may take a piece of what was freed, and the next block does not fit there any more.
print(given_back, untouched, min(faults() for _ in range(40)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_used_again_without_page_faults():
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, cwd=ROOT, check=True)
    given_back, untouched, kept = map(int, done.stdout.split())
    pages = 2**26 / os.sysconf("SC_PAGESIZE")
    assert given_back > pages / 2 and untouched > pages / 2  # the allocator of the machine is one that gives back
    assert kept < pages / 100


def test_memory_is_pinned_for_devices_where_enough_may_be_locked():
    from finetune.runtime.device import LEAST_LOCKED_BYTES, can_pin

    for limit, enough in ((-1, True), (LEAST_LOCKED_BYTES, True), (LEAST_LOCKED_BYTES - 1, False), (65536, False)):
        assert can_pin("npu", limit) is enough and can_pin("cuda", limit) is enough
        assert not can_pin("cpu", limit) and not can_pin("mps", limit)
