"""The device table: which device is taken, what it can do, what is refused."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
import types

import pytest
import torch
from launching import ROOT

from finetune.errors import ConfigError
from finetune.runtime import device as devices
from finetune.runtime.device import LEAST_LOCKED_BYTES, can_pin
from finetune.runtime.launch_environment import LaunchWorld

pytestmark = pytest.mark.usefixtures("fresh_environment")


def pretend(monkeypatch, *, npu=0, cuda=0, mps=False, bfloat16=True):
    facts = {"is_available": cuda > 0, "device_count": cuda, "get_device_name": "a card"}
    facts |= {"get_device_capability": (9, 0) if bfloat16 else (7, 5)}
    for attribute, value in facts.items():
        monkeypatch.setattr(torch.cuda, attribute, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    facts = {"is_available": npu > 0, "device_count": npu, "is_bf16_supported": bfloat16}
    module = types.SimpleNamespace(get_device_name=lambda *_: "Ascend 910B3")
    for attribute, value in facts.items():
        setattr(module, attribute, lambda value=value: value)
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object() if npu else None)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        ({}, ["cpu"]),
        ({"cuda": 1, "mps": True}, ["cuda", "mps", "cpu"]),
        # torch_npu's transfer module makes CUDA look present: the npu must still come first.
        ({"npu": 8, "cuda": 8, "mps": True}, ["npu", "cuda", "mps", "cpu"]),
    ],
)
def test_the_best_device_comes_first(machine, found, monkeypatch):
    """And DeepSpeed is told: else ZeRO-3 loads the model onto another device than the run's."""
    pretend(monkeypatch, **machine)
    assert devices.available_device_types() == found
    for asked, chosen in (("auto", found[0]), ("cpu", "cpu")):
        assert devices.choose_device_type(asked) == chosen == os.environ["DS_ACCELERATOR"]
    if "npu" not in found:
        with pytest.raises(ConfigError, match=f"'npu' is not available(.|\\n)*{', '.join(found)}"):
            devices.choose_device_type("npu")


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("auto cpu", "float32"),
        ("auto mps", "float32"),
        ("auto cuda", "bfloat16"),
        ("auto cuda old", "float32"),
        ("auto npu", "bfloat16"),
        ("float16 npu old", "float16"),
        ("bfloat16 cpu", "bfloat16"),
        ("bfloat16 cuda old", None),
        ("bfloat16 mps", None),
        ("float16 cpu", None),
    ],
)
def test_choose_dtype(words, chosen, monkeypatch):
    requested, device_type, *old = words.split()
    pretend(monkeypatch, npu=1, cuda=1, mps=True, bfloat16=not old)
    if chosen is not None:
        assert devices.choose_dtype(requested, device_type) == chosen
        return
    with pytest.raises(ConfigError, match=requested):
        devices.choose_dtype(requested, device_type)


def test_no_more_processes_than_devices(monkeypatch):
    def check(device_type: str, local: int) -> None:
        devices.check_local_ranks(device_type, LaunchWorld(0, 0, local, local, launched=True))

    pretend(monkeypatch, npu=8, cuda=2, mps=True)
    for device_type, local in (("npu", 8), ("cuda", 2), ("cpu", 64), ("mps", 1)):
        check(device_type, local)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    with pytest.raises(ConfigError, match="3 processes were started here, on 2 cuda") as caught:
        check("cuda", 3)
    assert caught.value.where == "CUDA_VISIBLE_DEVICES=0,1"
    with pytest.raises(ConfigError, match="ASCEND_RT_VISIBLE_DEVICES is not set"):
        check("npu", 9)
    with pytest.raises(ConfigError, match="2 processes"):
        check("mps", 2)


def test_no_other_file_names_a_device_module():
    """So that a new device is added in one place. torch_npu's operators are where they are called."""
    pattern = re.compile(r"\b(?:torch\.cuda|torch\.npu|torch\.mps|torch_npu(?!\.npu_))\.\w+")
    for path in (ROOT / "finetune").rglob("*.py"):
        found = pattern.findall(path.read_text(encoding="utf-8"))
        assert not found or path.name == "device.py", f"{path} says {found[0]}"


def test_out_of_memory_is_told_from_other_errors():
    allocator = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    for error, expected in (
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError(allocator), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ):
        assert devices.is_out_of_memory(error) is expected, error
    cpu = torch.device("cpu")
    assert 10 * 2**20 < devices.peak_memory_bytes(cpu) < 2**43
    devices.empty_cache(cpu)


PAGE_FAULTS = """
import resource, torch
from finetune.runtime.host import keep_freed_memory

def faults(of_pages=16384):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(of_pages * 1024)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back = faults()
keep_freed_memory("cpu")

print(given_back, min(faults() for _ in range(40)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_used_again_without_page_faults():
    words = [sys.executable, "-c", PAGE_FAULTS]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    given_back, kept = map(int, done.stdout.split())
    pages = 2**26 / os.sysconf("SC_PAGESIZE")
    assert given_back > pages / 2 and kept < pages / 100


def test_memory_is_pinned_for_devices_where_enough_may_be_locked(monkeypatch):
    least = LEAST_LOCKED_BYTES
    for limit, enough in ((resource.RLIM_INFINITY, True), (least, True), (least - 1, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert can_pin("npu") is enough and not can_pin("cpu")
