"""Fused operations: what is replaced computes the same, and a wrong kernel is not used."""

from __future__ import annotations

import copy
import logging
import sys
import types
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import CPU, documents, make_microbatch, make_model, tiny_config

from finetune.errors import ConfigError
from finetune.modeling import layers
from finetune.modeling.attention import ISOLATED_MODEL_TYPES, choose_attention
from finetune.modeling.kernel_check import Operation
from finetune.modeling.layers import (
    PLAIN,
    agreeing_ops,
    choose_provider,
    compare_layers,
    find_fusable,
    fuse_layers,
    plain_rms_norm,
    plain_rotary,
    plain_swiglu,
    provided_ops,
    use_fused_layers,
)

# Model type -> RMSNorms, attentions that rotate halves, SwiGLU MLPs of its tiny model of four
# layers: Gemma's norms add 1 to the weight, NanoChat's have none; Cohere and DeepSeek rotate
# neighbours; GLM and Phi-3 join gate and up; experts are one tensor.
COUNTS = {"llama": (9, 4, 4), "qwen3": (17, 4, 4), "olmo2": (17, 4, 4), "helium": (9, 0, 4)}
COUNTS |= {"gemma": (0, 4, 0), "cohere": (0, 0, 4), "phi3": (9, 4, 0), "glm4_moe": (9, 4, 4)}
COUNTS |= {"mixtral": (9, 4, 0), "nanochat": (0, 0, 0), "lfm2": (13, 2, 0), "bamba": (5, 1, 2)}
# By their configuration these rotate a part of each head or nothing, or (MLA) neighbours by another
# function: with their own code.
OWN_ROTATION = set("deepseek_v3 glm4_moe_lite granitemoehybrid glm4_moe gpt_neox bamba".split())
OWN_ROTATION |= {"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}


def counted() -> tuple[dict[str, Operation], Counter[str]]:
    """The plain operations, and how often each was called."""
    calls: Counter[str] = Counter()

    def call(name: str, *arguments: Any) -> Any:
        calls[name] += 1
        return PLAIN[name](*arguments)

    return {name: partial(call, name) for name in PLAIN}, calls


def packed() -> dict[str, Any]:
    inputs = make_microbatch(documents(), packing=True).model_inputs(CPU)
    return {**inputs, "logits_to_keep": 0}


def backward(model: torch.nn.Module) -> list[torch.Tensor]:
    """Logits and gradients of packed documents."""
    logits = model(**packed()).logits
    given = (logits.float().logsumexp(-1).sum(), [*model.parameters()])
    return [logits.detach(), *torch.autograd.grad(*given, materialize_grads=True)]


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    for mine, right in zip(found, wanted, strict=True):
        largest = max(1.0, right.abs().max().item())
        torch.testing.assert_close(mine, right, rtol=10 * tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("kind", sorted(ISOLATED_MODEL_TYPES))
def test_what_is_replaced_computes_the_same(kind):
    """Logits and every gradient against the model as transformers made it; dtypes too."""
    config = tiny_config(kind)
    own = make_model(config, choose_attention(config)).requires_grad_(True)
    fused = copy.deepcopy(own)
    ops, calls = counted()
    counts = use_fused_layers(fused, ops)
    assert tuple(counts.values()) == COUNTS.get(kind, tuple(counts.values()))
    assert_near(backward(fused), backward(own), 1e-5)
    for name, count in counts.items():
        assert (calls[name] > 0) == (count > 0) or (name == "rotary" and kind in OWN_ROTATION)
    # in 16 bits OLMo rounds elsewhere, and a router then takes another expert here and there
    logits, wanted = (model.bfloat16()(**packed()).logits for model in (fused, own))
    assert logits.dtype == wanted.dtype
    off = (logits.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    assert off.median() < 0.02


def test_weights_that_are_wider_than_the_states_give_the_dtypes_of_the_model():
    """With float32 weights Llama's norm returns float32 of bfloat16, OLMo's bfloat16."""
    x = torch.randn(1, 3, 32, dtype=torch.bfloat16)
    for kind in ("llama", "olmo2", "afmoe"):
        model = make_model(tiny_config(kind), "eager")
        wanted = model.model.norm(x).dtype
        use_fused_layers(model, PLAIN)
        assert model.model.norm(x).dtype == wanted


class Stale:
    """Returns what it has computed before where the size is the same; the gradients are right."""

    def __init__(self) -> None:
        self.seen: dict[Any, torch.Tensor] = {}

    def __call__(self, gate, up):
        right = plain_swiglu(gate, up)
        return right + (self.seen.setdefault(gate.shape, right.detach()) - right).detach()


def wrong_from_256_tokens_on(x, weight, eps):
    right = plain_rms_norm(x, weight, eps)
    return right if x.shape[1] < 256 else torch.cat((right[:, :-1], x[:, -1:]), dim=1)


def raises(gate, up):
    raise RuntimeError("no kernel image is available\nfor this device")


def wrong_eps(x, weight, eps):
    return plain_rms_norm(x, weight, eps * 10)


def detached(x, weight, eps):
    return plain_rms_norm(x, weight.detach(), eps)


def half_a_gradient(gate, up):
    return plain_swiglu(gate, (up + up.detach()) / 2)


# What is wrong: operation, the wrong one or its class, what is said.
FAULTS: dict[str, tuple[str, Any, str]] = {
    "wrong eps": ("rms_norm", wrong_eps, "off by"),
    "weight without gradient": ("rms_norm", detached, "missing"),
    "wrong for many tokens": ("rms_norm", wrong_from_256_tokens_on, "300 tokens"),
    "keys not rotated": ("rotary", lambda q, k, *t: (plain_rotary(q, k, *t)[0], k), "output 2"),
    "half a gradient": ("swiglu", half_a_gradient, "the gradient of input 2"),
    "stale output": ("swiglu", Stale, "output 1"),
    "another dtype": ("swiglu", lambda *given: plain_swiglu(*given).double(), "torch.float64"),
    "not a number": ("swiglu", lambda *given: plain_swiglu(*given) * torch.nan, "nan"),
    "raises": ("swiglu", raises, "RuntimeError: no kernel image is available"),
}


def compare(ops, dtype, kind):
    sizes = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96}
    model = make_model(tiny_config("qwen3", **sizes), "eager")
    comparisons = compare_layers(ops, find_fusable(model), model.config)
    assert [c.kind for c in comparisons] == ["rms_norm", "rms_norm", "rotary", "swiglu"]
    comparisons = [c for c in comparisons if kind in c.kind]
    return agreeing_ops("faulty", ops, comparisons, device=CPU, dtypes=[dtype], tokens=300)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_operation_is_refused_with_one_warning(fault, caplog):
    kind, wrong, told = FAULTS[fault]
    for dtype in (torch.float32, torch.bfloat16):
        ops = {**PLAIN, kind: wrong() if isinstance(wrong, type) else wrong}
        caplog.clear()
        with caplog.at_level(logging.WARNING, "finetune"):
            kept = compare(ops, dtype, kind)
        assert kept == {name: ops[name] for name in ops if name != kind}, "the others stay"
        (record,) = caplog.records
        text = record.getMessage()
        assert "faulty is not used" in text and told in text and "--fused-layers off" in text


def test_a_model_keeps_its_own_operation_where_the_fused_one_is_refused(monkeypatch, caplog):
    wrong = {**PLAIN, "rms_norm": wrong_eps}
    monkeypatch.setattr(layers, "choose_provider", lambda *_, **__: "wrong")
    monkeypatch.setattr(layers, "provided_ops", lambda provider: wrong)
    model = make_model(tiny_config("qwen3"), "eager")
    before = torch.get_rng_state()
    said = fuse_layers(model, "auto", device_type="cpu", dtypes=[torch.float32], tokens=64)
    assert said == "wrong: 4 rotary, 4 swiglu" and len(caplog.records) == 1
    assert torch.equal(torch.get_rng_state(), before), "the run's random numbers stay"
    assert "forward" not in vars(model.model.norm) and "forward" in vars(model.model.layers[0].mlp)


@pytest.mark.parametrize(
    ("setting", "device_type", "compiles", "liger", "provider"),
    [
        ("auto", "cuda", True, True, "liger"),
        ("auto", "cuda", True, False, "compile"),
        ("auto", "cuda", False, False, None),
        ("auto", "npu", False, True, "npu"),
        ("auto", "cpu", False, True, None),
        ("off", "cuda", True, True, None),
        ("compile", "cpu", False, False, "compile"),
        ("liger", "cuda", True, False, "not installed"),
        ("npu", "cuda", True, False, "no operations for cuda"),
    ],
)
def test_who_provides(setting, device_type, compiles, liger, provider, monkeypatch):
    monkeypatch.setattr(layers.importlib.util, "find_spec", lambda name: True if liger else None)
    if provider is not None and " " in provider:
        with pytest.raises(ConfigError, match=provider):
            choose_provider(setting, device_type, compiles=compiles)
    else:
        assert choose_provider(setting, device_type, compiles=compiles) == provider


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_ligers_functions_are_called_as_documented(kind, monkeypatch, caplog):
    """liger-kernel 0.8.5's functions; two write over their inputs, which nothing may read again."""
    calls: set[str] = set()

    def written_over(result, *inputs):
        for x in inputs:
            x.data.fill_(torch.nan)
        return result

    def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        calls.add("rms_norm")
        assert (offset, casting_mode, in_place) == (0.0, "llama", False) and X.dtype == W.dtype
        return plain_rms_norm(X, W, eps)

    def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        calls.add("rope")
        assert cos.dim() == 3 and q.transpose(1, 2).is_contiguous()
        return written_over(plain_rotary(q, k, cos, sin), q, k)

    def liger_swiglu(a, b):
        calls.add("swiglu")
        return written_over(plain_swiglu(a.clone(), b.clone()), a, b)

    functions = {f.__name__: f for f in (liger_rms_norm, liger_rope, liger_swiglu)}
    package = types.ModuleType("liger_kernel.transformers")
    package.functional = types.SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    config = tiny_config(kind)
    own = make_model(config, choose_attention(config)).requires_grad_(True)
    fused = copy.deepcopy(own)
    ops = provided_ops("liger")
    comparisons = compare_layers(ops, find_fusable(fused), config)
    given = {"device": CPU, "dtypes": [torch.float32], "tokens": 64}
    assert agreeing_ops("liger", ops, comparisons, **given) == ops, caplog.text
    use_fused_layers(fused, ops)
    assert_near(backward(fused), backward(own), 1e-4)
    assert calls == {"rms_norm", "rope", "swiglu"}


def test_the_compiler_gets_each_operation_with_symbolic_sizes(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: (function, dynamic))
    assert provided_ops("compile") == {name: (plain, True) for name, plain in PLAIN.items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("provider", ["liger", "compile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_operations_agree_on_cuda(provider, dtype, caplog):
    if provider == "liger":
        pytest.importorskip("liger_kernel", reason="needs liger-kernel")
    ops = provided_ops(provider)
    sizes = {"head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288}
    model = make_model(tiny_config("qwen3", **sizes), "eager")
    comparisons = compare_layers(ops, find_fusable(model), model.config)
    given = {"device": torch.device("cuda"), "dtypes": [dtype], "tokens": 2048}
    assert agreeing_ops(provider, ops, comparisons, **given) == ops, caplog.text
