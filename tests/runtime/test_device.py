"""The device table: which device is taken, what it can do, what is refused."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import types

import pytest
import torch
from launching import ROOT

from finetune.errors import ConfigError
from finetune.runtime import device as devices
from finetune.runtime.device import DEVICE_KINDS
from finetune.runtime.launch_environment import LaunchWorld

TWO = LaunchWorld(1, 1, 2, 2, launched=True)

pytestmark = pytest.mark.usefixtures("fresh_environment")


# ---------------------------------------------------------------- the device


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    *,
    npu: int = 0,
    cuda: int = 0,
    mps: bool = False,
    bfloat16: bool = True,
):
    """A machine with these devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda *_: (9, 0) if bfloat16 else (7, 5)
    )
    monkeypatch.setattr(
        torch.cuda,
        "get_device_name",
        lambda *_: "NVIDIA H100 80GB HBM3" if bfloat16 else "Tesla T4",
    )
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
def test_the_best_device_comes_first(
    machine: dict, types_in_order: list[str], monkeypatch: pytest.MonkeyPatch
):
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
def test_choose_dtype(
    requested: str, device_type: str, bfloat16: bool, chosen: str | None, monkeypatch
):
    pretend(monkeypatch, npu=1, cuda=1, mps=True, bfloat16=bfloat16)
    if chosen is not None:
        assert devices.choose_dtype(requested, device_type) == chosen
        return
    with pytest.raises(ConfigError) as caught:
        devices.choose_dtype(requested, device_type)
    assert (
        requested in caught.value.what
        and caught.value.where == "--dtype"
        and "float32" in caught.value.fix
    )


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
    """Facts that other parts rely on; the fused AdamW differed on the simulated npu, and stays off
    there.
    """
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
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
            ),
            True,
        ),
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
    """`torch.cuda`, `torch.npu`, `torch.mps` are said in one file, so that a new device is added in
    one place.

    torch_npu's operators (`torch_npu.npu_...`) stand where they are called: in finetune/modeling.
    """
    for path in (ROOT / "finetune").rglob("*.py"):
        if path.name != "device.py":
            text = path.read_text(encoding="utf-8")
            found = re.findall(
                r"\b(?:torch\.cuda|torch\.npu|torch\.mps|torch_npu(?!\.npu_))\.\w+", text
            )
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
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, cwd=ROOT, check=True
    )
    given_back, untouched, kept = map(int, done.stdout.split())
    pages = 2**26 / os.sysconf("SC_PAGESIZE")
    # the allocator of the machine is one that gives back
    assert given_back > pages / 2 and untouched > pages / 2
    assert kept < pages / 100


def test_memory_is_pinned_for_devices_where_enough_may_be_locked(monkeypatch: pytest.MonkeyPatch):
    import resource

    from finetune.runtime.device import LEAST_LOCKED_BYTES, can_pin

    for limit, enough in (
        (-1, True),
        (LEAST_LOCKED_BYTES, True),
        (LEAST_LOCKED_BYTES - 1, False),
        (65536, False),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert can_pin("npu") is enough and can_pin("cuda") is enough
        assert not can_pin("cpu") and not can_pin("mps")
