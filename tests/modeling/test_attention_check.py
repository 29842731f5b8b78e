"""FlashAttention 3, compared before it is used (the NPU's kernel: test_fake_npu.py).

A function for the CPU stands for torch's operator; torch's switch between flash kernels is the real
one, and so are its checks of what FlashAttention 3 takes.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import (
    CPU,
    as_trained,
    attention_by_mask,
    documents,
    make_microbatch,
    tiny_config,
)
from torch.nn import attention as hook
from torch.nn.attention import _fa3, _registry

from finetune.modeling import attention, attention_check, kernel_check
from finetune.modeling.attention import ISOLATED
from finetune.modeling.attention_check import check_attention

USED = "FlashAttention 3"


class OnHopper:
    """What torch's checks ask of a tensor, of one that lies on a CUDA device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.dim, self.is_cuda, self.device = tensor.dtype, tensor.dim, True, "cuda:0"


class Kernels:
    """FlashAttention 2, and 3 while torch's switch says so, which may have a fault; in float64."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.fault = patch, ""
        self.calls: list[bool] = []  # whether 3 was called

    def register(self) -> SimpleNamespace:
        if self.fault == "no package for this torch":
            raise ImportError("flash_attn_3/_C.so: undefined symbol")
        return SimpleNamespace(remove=lambda: None)

    def __call__(self, q, k, v, bounds, bounds_k, max_q, max_k, dropout, *flags, scale, **window):
        self.calls.append(is_3())
        left = window["window_size_left"]
        if is_3():
            *given, ends = map(OnHopper, (q, k, v, bounds))
            with self.patch.context() as patch:
                patch.setattr(torch.cuda, "is_available", lambda: True)
                patch.setattr(_fa3, "_get_device_major", lambda device: 9)
                rest = (dropout, flags[-1], None, None, ends, None, None, None)
                refused = _fa3._fa3_forward_support_error(*given, *rest)
            assert refused is None, refused
            if self.fault == "cannot be launched":
                raise RuntimeError("this build has no kernels for heads of 16\nmore")
            bounds = bounds[[0, -1]] if self.fault == "ignores ends" else bounds
            scale = q.shape[-1] ** -0.5 if self.fault == "ignores the scale" else scale
            left = -1 if self.fault == "ignores windows" else left
            if self.fault == "wrong gradient":
                k = 1.05 * k - (0.05 * k).detach()
        return (attention_by_mask(q, k, v, bounds, left, scale),)


def is_3() -> bool:
    return hook.current_flash_attention_impl() == "FA3"


@pytest.fixture
def kernels(monkeypatch):
    """On a CUDA device of capability 9.0 with the package, whose computation is the CPU's."""
    made = Kernels(monkeypatch)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", made)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", made.register)
    on_machine(monkeypatch)
    monkeypatch.setattr(attention, "has_flash", lambda device: True)
    monkeypatch.setattr(attention_check, "empty_cache", lambda device: None)
    problem_of = kernel_check.problem_of
    monkeypatch.setattr(
        attention_check, "problem_of", lambda one, _, *given: problem_of(one, CPU, *given)
    )
    yield made
    if _registry.current_flash_attention_impl() is not None:
        _registry.restore_flash_attention_impl()


def on_machine(monkeypatch, *, package: bool = True, generation: tuple[int, int] = (9, 0)) -> None:
    def find(name: str) -> Any:
        return package or None if name == "flash_attn_interface" else find_spec(name)

    monkeypatch.setattr(attention_check.importlib.util, "find_spec", find)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: generation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)


def model_of(model_type: str = "qwen3", **changes: Any) -> torch.nn.Module:
    sizes = {} if model_type == "deepseek_v3" else {"head_dim": 16, **changes}
    return as_trained(tiny_config(model_type, **sizes))


def check(model: torch.nn.Module, setting: str = "auto", **given: Any) -> str:
    given = {"dtype": torch.bfloat16, "tokens": 700, **given}
    return check_attention(model, setting, device_type="cuda", **given)


# mistral has windows, deepseek_v3 MLA
@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [("qwen3", torch.float16), ("mistral", torch.bfloat16), ("deepseek_v3", torch.bfloat16)],
)
def test_where_it_agrees_it_is_used_forward_and_backward(model_type, dtype, kernels, caplog):
    model = model_of(model_type)
    before = torch.get_rng_state()
    assert check(model, dtype=dtype) == USED and not caplog.records
    assert is_3() and model.config._attn_implementation == ISOLATED
    assert set(kernels.calls) == {True}
    assert torch.equal(torch.get_rng_state(), before), "the run's random numbers stay"
    kernels.calls.clear()
    model.to(dtype).requires_grad_(True).train()
    inputs = make_microbatch(documents(), packing=True).model_inputs(CPU)
    model(**inputs).logits.float().sum().backward()
    assert set(kernels.calls) == {True}, "training takes it"


FAULTS = {
    "no package for this torch": "ImportError: flash_attn_3/_C.so: undefined symbol",
    "cannot be launched": "RuntimeError: this build has no kernels for heads of 16.",
    "ignores ends": "output 1 is off by",
    "ignores the scale": "output 1 is off by",
    "ignores windows": "output 1 is off by",
    "wrong gradient": "the gradient of input 2 is off by",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_where_it_differs_or_raises_torchs_own_is_restored_with_one_warning(fault, kernels, caplog):
    kernels.fault = fault
    model = model_of("mistral")
    with caplog.at_level(logging.WARNING):  # few tokens show a document that sees its neighbour
        assert check(model, tokens=9 if fault == "ignores ends" else 700) == "torch's"
    (record,) = caplog.records
    text = record.getMessage()
    assert f"{USED} is not used: {FAULTS[fault]}" in text and "--fused-layers off" in text
    assert not is_3() and model.config._attn_implementation == ISOLATED
    kernels.calls.clear()
    model.to(torch.bfloat16)(**make_microbatch(documents(), packing=True).model_inputs(CPU))
    assert set(kernels.calls) == {False}, "FlashAttention 2"


MACHINES = {"package": {"package": False}}
MACHINES |= {"Ampere": {"generation": (8, 0)}, "Blackwell": {"generation": (10, 0)}}
REFUSED: dict[str, dict[str, Any]] = {
    **dict.fromkeys((*MACHINES, "hook", "FA3 in torch"), {}),
    "off": {"setting": "off"},
    "float32": {"dtype": torch.float32},
    "dropout": {"attention_dropout": 0.1},
    "wide heads": {"head_dim": 264},
    "softcap": {"model_type": "gemma2"},
    "not packed": {"model_type": "stablelm"},
}


@pytest.mark.parametrize("without", REFUSED)
def test_where_it_is_not_here_or_refuses_nothing_is_said(without, kernels, monkeypatch, caplog):
    given = dict(REFUSED[without])
    options = {name: given.pop(name) for name in ("setting", "dtype") if name in given}
    if without in MACHINES:
        on_machine(monkeypatch, **MACHINES[without])
    elif without == "hook":  # as in torch 2.10
        for name in attention_check.HOOK:
            monkeypatch.delattr(hook, name)
    elif without == "FA3 in torch":
        monkeypatch.delitem(_registry._FLASH_ATTENTION_IMPLS, "FA3")
    assert check(model_of(**given), **options) == "torch's"
    assert not caplog.records and not kernels.calls
    assert _registry.current_flash_attention_impl() is None


def test_an_earlier_runs_kernel_does_not_reach_a_run_that_wants_none(kernels):
    for given in ({"setting": "off"}, {"model": model_of(attention_dropout=0.1)}):
        assert check(model_of()) == USED
        assert check(**{"model": model_of(), **given}) == "torch's" and not is_3()


def on_hopper() -> bool:
    there = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return there and find_spec("flash_attn_interface") is not None


@pytest.mark.gpu
@pytest.mark.skipif(
    not on_hopper(), reason="needs an NVIDIA GPU of compute capability 9.0 and flash_attn_interface"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "deepseek_v3"])
def test_it_agrees_on_hopper(model_type, dtype, caplog):
    try:
        assert check(model_of(model_type), dtype=dtype, tokens=4096) == USED and not caplog.records
    finally:
        check(model_of(), setting="off")
    assert hook.current_flash_attention_impl() is None
