"""The fused LoRA layers against peft's own: outputs, gradients, what is kept, kernels that run."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny_models import make_model, tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from finetune.modeling.lora import fuse_lora

QKV = ("q_proj", "k_proj", "v_proj")
WIDTHS = {"q_proj": 24, "k_proj": 8, "v_proj": 10}


class Attention(nn.Module):
    """Calls its projections in a given order, and can fail between two of them."""

    def __init__(self, width: int, *, bias: bool = False, order: Sequence[str] = QKV) -> None:
        super().__init__()
        for name in QKV:
            setattr(self, name, nn.Linear(width, WIDTHS[name], bias=bias))
        self.order, self.fails = order, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = {}
        for name in self.order:
            outputs[name] = getattr(self, name)(x)
            if self.fails:
                raise MemoryError("between two projections")
        return torch.cat([outputs[name].tanh() for name in QKV], -1)


class Model(nn.Module):
    def __init__(self, width: int, **attention: Any) -> None:
        super().__init__()
        self.attention = Attention(width, **attention)
        self.o_proj = nn.Linear(sum(WIDTHS.values()), width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.attention(x))


def adapted(model: nn.Module, *, targets: Any = (*QKV, "o_proj"), **options: Any) -> Any:
    """With an adapter whose B are not zero."""
    generator = torch.Generator().manual_seed(5)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": targets, **options}
    model = get_peft_model(model, LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def pair(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """The same model twice: peft's own, and with its layers fused."""
    own = {name: options.pop(name) for name in ("bias", "order") if name in options}
    torch.manual_seed(0)
    plain = adapted(Model(16, **own).to(dtype), **options)
    if dtype == torch.float64:
        plain.double()
    fused = copy.deepcopy(plain)
    assert fuse_lora(fused) == len(options.get("targets", (*QKV, "o_proj")))
    return plain, fused


def numbers(width=16, rows=(2, 5), dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*rows, width, generator=generator, dtype=torch.float64).to(dtype)


def results(model, x):
    """Output, gradient of the input and of every trained parameter, of two microbatches."""
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    outputs = [model(x) for _ in range(2)]
    for output in reversed(outputs):  # two microbatches in flight
        output.square().mean().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trained]
    assert [gradient.dtype for gradient in gradients] == [parameter.dtype for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    return [outputs[0].detach(), x.grad, *gradients]


def assert_same(found, expected, tolerance=1e-09):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        largest = max(1.0, float(theirs.detach().abs().max()))
        assert float((ours - theirs).detach().abs().max()) <= tolerance * largest


@settings(max_examples=30, deadline=None)
@given(
    rows=st.sampled_from([(7,), (1, 1), (2, 5), (2, 3, 4)]),
    targets=st.sampled_from([[*QKV, "o_proj"], ["q_proj", "v_proj"], ["k_proj"]]),
    order=st.permutations(QKV),
    rank=st.integers(1, 5),
    alpha=st.integers(1, 9),
    bias=st.booleans(),
    dropout=st.sampled_from([0.0, 0.4]),
)
def test_equal_to_peft_in_float64(rows, targets, order, rank, alpha, bias, dropout) -> None:
    # One order of draws on both sides: peft drops at each call, the fused layers at the first.
    order = QKV if dropout else order
    plain, fused = pair(
        targets=targets, order=order, bias=bias, r=rank, lora_alpha=alpha, lora_dropout=dropout
    )
    x = numbers(rows=rows)
    assert_same(results(fused, x), results(plain, x))
    assert_same([fused.eval()(x)], [plain.eval()(x)])


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    """What the other projections would have taken holds the graph of all layers before."""
    _, fused = pair()
    fused.base_model.model.attention.fails = True
    x = numbers().requires_grad_() * 1.0
    before = weakref.ref(x)
    with contextlib.suppress(MemoryError):
        fused(x)
    del x
    gc.collect()
    assert before() is None


def test_other_inputs_are_told_apart() -> None:
    pairs, x = pair(), numbers().requires_grad_()
    found = []
    for model in pairs:
        a, y = model.base_model.model.attention, x * 1.0
        # another tensor, the same layer twice
        parts = [a.q_proj(y), a.k_proj(y + 1), a.q_proj(y), a.v_proj(y), a.k_proj(y.clone())]
        output = torch.cat(parts, -1)
        trained = [p for p in a.parameters() if p.requires_grad]
        found.append([output, *torch.autograd.grad(output.square().mean(), [x, *trained])])
        y = x.detach() * 1.0
        with torch.no_grad():
            first = a.q_proj(y)
        a.k_proj(y)
        y.add_(1.0)  # the same tensor, with other numbers
        found[-1] += [first, a.v_proj(y)]
    assert_same(found[1], found[0])


def test_what_is_not_plain_is_left_to_peft() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20))
    tied, other = Model(16), Model(16)
    tied.attention.v_proj = tied.attention.k_proj
    other.o_proj = type("Other", (nn.Linear,), {})(42, 16)
    assert fuse_lora(adapted(gpt2, targets=["c_attn"])) == 0
    assert fuse_lora(adapted(Model(16), use_dora=True)) == 0
    assert (fuse_lora(adapted(tied)), fuse_lora(adapted(other))) == (2, 3)


def test_peft_stays_in_charge() -> None:
    """Names, disabling, scaling, merging: as without."""
    plain, fused = pair()
    x = numbers()
    assert list(plain.state_dict()) == list(fused.state_dict())
    with plain.disable_adapter(), fused.disable_adapter():
        assert torch.equal(plain(x), fused(x))
    for model in (plain, fused):
        model.base_model.model.attention.k_proj.scale_layer(3.0)  # q, k, v no longer of one scaling
    assert_same(results(fused, x), results(plain, x))
    for model in (plain, fused):
        model.merge_adapter()
    assert torch.equal(plain(x), fused(x))


def test_torch_compile_traces_through() -> None:
    plain, fused = pair(torch.float32)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    x = numbers(dtype=torch.float32)
    assert_same(results(compiled, x), results(plain, x), 1e-5)


# Of a Qwen3 block: the linear layers that take the same input.
PROJECTIONS = [("self_attn", QKV), ("self_attn", ["o_proj"])]
PROJECTIONS += [("mlp", ["gate_proj", "up_proj"]), ("mlp", ["down_proj"])]


def block(*, fused: bool, dtype: torch.dtype, dropout: float) -> Any:
    """Attention and MLP of one Qwen3 layer, with float32 adapters on all of its linear layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
    model = make_model(tiny_config("qwen3", num_hidden_layers=1, **sizes), "sdpa").to(dtype)
    lora = {"targets": "all-linear", "task_type": "CAUSAL_LM", "lora_dropout": dropout}
    model = adapted(model, **lora)
    if fused:
        assert fuse_lora(model) == 7
    return model.base_model.model.model.layers[0]


class Kernels(TorchDispatchMode):
    """Counts operators that compute; those that only look at a tensor otherwise are none."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [r.alias_info for r in func._schema.returns]
        looks = any(alias is not None and not alias.is_write for alias in aliases)
        self.count += not looks and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


def cost(dtype: torch.dtype, dropout: float, *, fused: bool) -> tuple[int, int, int]:
    """Kernels forward and backward, and bytes kept beside the weights, of a block's products."""
    layer = block(fused=fused, dtype=dtype, dropout=dropout)
    groups = []
    for part, layers in ((getattr(layer, part), names) for part, names in PROJECTIONS):
        x = numbers(getattr(part, layers[0]).in_features, (1, 512), dtype).requires_grad_()
        groups += [(getattr(part, name), x) for name in layers]
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        Kernels() as forward,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
    ):
        outputs = [linear(x) for linear, x in groups]
    for parameter in layer.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    ones = [torch.ones_like(output) for output in outputs]
    with Kernels() as backward:
        torch.autograd.backward(outputs, ones)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return forward.count, backward.count, size


@pytest.mark.parametrize(
    ("dtype", "dropout", "forward", "backward", "kept"),
    [
        (torch.float32, 0.0, (27, 56), (31, 52), 1.01),
        (torch.bfloat16, 0.0, (38, 84), (42, 80), 0.69),
        (torch.bfloat16, 0.1, (52, 105), (70, 87), 0.41),
    ],
)
def test_it_costs_less_than_peft(dtype, dropout, forward, backward, kept) -> None:
    """Kernels at most the first number, peft's at least the second; the share of bytes kept."""
    ours, theirs = cost(dtype, dropout, fused=True), cost(dtype, dropout, fused=False)
    assert ours[0] <= forward[0] and theirs[0] >= forward[1]
    assert ours[1] <= backward[0] and theirs[1] >= backward[1]
    assert ours[2] <= kept * theirs[2]
