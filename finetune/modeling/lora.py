"""LoRA's linear layers at what they must cost: base product and adapter as one autograd function.

peft computes `base(x) + lora_B(lora_A(dropout(x.to(adapter dtype)))) * scaling` of separate
operators (peft 0.21, tuners/lora/layer.py, Linear.forward). With float32 adapters under autocast it
casts every input up and down again, and keeps a copy of it for each layer. Here the adapter is
added by the matrix product itself, layers of one input (q, k, v; gate, up) are computed together,
and their input is kept once. Only `forward` of peft's own layers is replaced, on the instance:
parameters, names, files, merging and disabling stay peft's. LoRA: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from finetune.modeling.quantisation import computed_dtype, is_quantised, weight_of

ADAPTER = "default"  # peft's name for the only adapter
# Layers that a block calls with one input, one after another, by the names that transformers gives
# them.
SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_lora(model: torch.nn.Module) -> int:
    """Replace the forward of the peft model's plain LoRA layers; the number of them.

    Left to peft: anything but an adapter without extras on a frozen torch.nn.Linear or on a layer
    that is quantised here (Conv1D, experts, variants such as DoRA), and layers whose weight the
    model holds in several places.
    """
    holders = Counter(
        id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
    )
    groups: dict[tuple[str, tuple[str, ...], int], list[Any]] = {}
    for name, module in model.named_modules():
        if _is_plain(module) and holders[id(module.base_layer.weight)] == 1:
            parent, _, own = name.rpartition(".")
            together = next((names for names in SHARED_INPUT if own in names), (own,))
            groups.setdefault((parent, together, module.in_features), []).append(module)
    for (parent, _, _), layers in groups.items():
        group = LayerGroup(layers)
        for number, layer in enumerate(layers):
            layer.forward = partial(group.forward, number)
        if len(layers) > 1:
            # Also when the block's forward raises (out of memory, the early stop of recomputation):
            # outputs that were not taken hold the graph, and with it the activations of all layers
            # before.
            model.get_submodule(parent).register_forward_hook(group.forget, always_call=True)
    return sum(map(len, groups.values()))


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Let a peft model compute as its base does, `modules_to_save` and trainable tokens included.

    What PeftModel.disable_adapter does besides, it would undo only in part: it turns
    `requires_grad` off and on again (tuners_utils.py, enable_adapters), by which DDP, ZeRO and
    optimizers go.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers: list[Any] = [
        m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)
    ]
    before = [layer.disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, off in zip(layers, before, strict=True):
            layer._disable_adapters = off


def _is_plain(module: torch.nn.Module) -> bool:
    from peft.tuners.lora import Linear, LoraLayer

    # Exact types: a subclass has a forward of its own. On a quantised layer peft has a class of its
    # own too.
    if not isinstance(module, LoraLayer) or not (
        is_quantised(module.base_layer)
        or (type(module) is Linear and type(module.base_layer) is torch.nn.Linear)
    ):
        return False
    extras = module.lora_variant or module.lora_bias.get(ADAPTER) or module.fan_in_fan_out
    trained = any(parameter.requires_grad for parameter in module.base_layer.parameters())
    return list(module.lora_A) == [ADAPTER] and not extras and not trained


class LayerGroup:
    """LoRA layers that are called with one input, one after another; or a single one.

    The first that is called computes all, and what the others have not taken yet waits until they
    ask with the same tensor. Called in another order, with other inputs or not at all, they give
    the same outputs; only work is wasted.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        # ZeRO-3 gathers a weight by hooks of the module that owns it, before its forward and before
        # its backward: a function that computed several modules, or read a weight past its module,
        # would find it empty.
        self.partitioned = any(hasattr(layer.base_layer.weight, "ds_id") for layer in layers)
        self._input: torch.Tensor | None = None
        self._version = 0
        self._waiting: dict[int, torch.Tensor] = {}

    def forward(self, number: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The forward of layer `number`. x: (..., in features) -> (..., out features), as
        peft's.
        """
        layer = self.layers[number]
        if args or kwargs or not _is_active(layer) or not _fits(layer, x):
            result: torch.Tensor = type(layer).forward(layer, x, *args, **kwargs)
            return result
        if self.partitioned or torch.compiler.is_compiling():
            return _by_modules(layer, x)
        if not torch.is_grad_enabled():
            return _compute([layer], x)[0]
        if x is not self._input or x._version != self._version or number not in self._waiting:
            together = [
                other
                for other in range(len(self.layers))
                if other == number or self._alike(other, layer)
            ]
            outputs = _compute([self.layers[other] for other in together], x)
            self._waiting = dict(zip(together, outputs, strict=True))
            self._input = x
            self._version = x._version
        output = self._waiting.pop(number)
        if not self._waiting:
            self._input = None
        return output

    def _alike(self, number: int, layer: Any) -> bool:
        """Whether a layer can be computed with another: its adapter is on, with the same scaling
        and dropout.
        """
        other = self.layers[number]
        same = other.scaling[ADAPTER] == layer.scaling[ADAPTER] and _dropout(other) == _dropout(
            layer
        )
        return (
            same
            and _is_active(other)
            and other.base_layer.weight.dtype == layer.base_layer.weight.dtype
        )

    def forget(self, *hook_arguments: Any) -> None:
        """Drop outputs that were not taken; a forward hook of the layers' parent."""
        self._input = None
        self._waiting = {}


def _is_active(layer: Any) -> bool:
    return not layer.disable_adapters and not layer.merged and layer.active_adapters == [ADAPTER]


def _fits(layer: Any, x: torch.Tensor) -> bool:
    """Whether base and adapter are computed in the dtype of the base's weight; one in few bits is
    dequantised to it.
    """
    return is_quantised(layer.base_layer) or bool(
        layer.base_layer.weight.dtype == computed_dtype(x)
    )


def _dropout(layer: Any) -> float:
    module = layer.lora_dropout[ADAPTER]  # torch.nn.Identity where there is none
    return float(module.p) if module.training and isinstance(module, torch.nn.Dropout) else 0.0


def _by_modules(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Operators alone, each weight used by its own module: for ZeRO-3's hooks and for
    torch.compile, which fuses them.

    The scaling is applied where it has the fewest numbers to multiply.
    """
    result = layer.base_layer(x)
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(down.weight.dtype)
    update = up(down(layer.lora_dropout[ADAPTER](x)) * layer.scaling[ADAPTER])
    return (result + update).to(result.dtype)


def _compute(layers: Sequence[Any], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    outputs: tuple[torch.Tensor, ...] = AdaptedLinears.apply(
        x,
        layers[0].scaling[ADAPTER],
        _dropout(layers[0]),
        [layer.base_layer for layer in layers],
        *(layer.lora_A[ADAPTER].weight for layer in layers),
        *(layer.lora_B[ADAPTER].weight for layer in layers),
    )
    return outputs


class AdaptedLinears(torch.autograd.Function):
    """n frozen linear layers of one input, each with its adapter: y_i = x W_i' + b_i + scaling
    (drop_i(x) A_i') B_i'.

    Computed in the dtype of W, or the run's where W is in few bits; A and B may have another one,
    their gradients have it too. Kept for the backward pass: x once, the products with A, a mask for
    each dropout; no output, and no dequantised weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scaling: float,
        dropout: float,
        bases: Sequence[torch.nn.Linear],
        *adapters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """x: (..., in); bases: n, with W (out_i, in) and b (out_i) or None; adapters: n of A (r_i,
        in), then of B (out_i, r_i).
        """
        downs, ups = list(adapters[: len(bases)]), list(adapters[len(bases) :])
        dtype = computed_dtype(x)
        ctx.input_dtype, ctx.adapter_dtype, ctx.shape = x.dtype, downs[0].dtype, x.shape
        ctx.scaling, ctx.kept_share, ctx.ranks = (
            scaling,
            1.0 - dropout,
            [len(down) for down in downs],
        )
        x = x.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        # One cast of all A, and one read of x. Casting anew each time costs microseconds; a cast
        # kept for a whole step would be stale, and nothing would show it, after a write to `.data`
        # (which does not count as a version).
        down = (torch.cat(downs) if len(downs) > 1 else downs[0]).to(dtype)
        ups = [up.to(dtype) for up in ups]
        masks: list[torch.Tensor] = []
        if dropout:
            parts = []
            for own in down.split(ctx.ranks):
                dropped, mask = torch.native_dropout(rows, dropout, True)
                masks.append(mask)
                parts.append(dropped @ own.t())
            low = torch.cat(parts, 1)
        else:
            low = rows @ down.t()
        outputs = []
        for base, up, part in zip(bases, ups, low.split(ctx.ranks, 1), strict=True):
            bias = None if base.bias is None else base.bias.to(dtype)
            output = functional.linear(x, weight_of(base, dtype), bias)
            # In place: the update is added while the product is written, and the base's output is
            # not kept.
            output.view(-1, output.shape[-1]).addmm_(part, up.t(), alpha=scaling)
            outputs.append(output)
        ctx.bases = bases
        ctx.save_for_backward(rows, low, down, *ups, *masks)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """gradients: n of (..., out_i), None of an output that nothing used; its adapter then has
        None too.
        """
        count, scaling = len(gradients), ctx.scaling
        rows, low, down, *others = ctx.saved_tensors
        ups, masks = others[:count], others[count:]
        # Of the outputs that were used: by number, gradients as (tokens, out_i) and of the products
        # with A (tokens, r).
        of_output = {
            n: g.reshape(-1, g.shape[-1]) for n, g in enumerate(gradients) if g is not None
        }
        of_low = {n: gradient @ ups[n] for n, gradient in of_output.items()}
        lows, own_downs = low.split(ctx.ranks, 1), down.split(ctx.ranks)
        of_up: list[torch.Tensor | None] = [None] * count
        for n, gradient in of_output.items():
            of_up[n] = _product(ups[n], gradient.t(), lows[n], scaling).to(ctx.adapter_dtype)
        of_x = _through_bases(of_output, ctx.bases) if ctx.needs_input_grad[0] else None
        of_down: list[torch.Tensor | None] = [None] * count
        if masks:
            undo = partial(torch.ops.aten.native_dropout_backward, scale=1.0 / ctx.kept_share)
            for n, gradient in of_low.items():
                # The same operator drops and undoes: x times the mask again is cheaper than keeping
                # what was dropped.
                dropped = undo(rows, masks[n])
                of_down[n] = _product(own_downs[n], gradient.t(), dropped, scaling).to(
                    ctx.adapter_dtype
                )
                if of_x is not None:
                    of_x.add_(undo(gradient @ own_downs[n], masks[n]), alpha=scaling)
        else:
            used = list(of_low)
            if len(used) < count:
                down = torch.cat([own_downs[n] for n in used])
            gradient = torch.cat(list(of_low.values()), 1) if len(used) > 1 else of_low[used[0]]
            whole = _product(down, gradient.t(), rows, scaling).to(ctx.adapter_dtype)
            for n, part in zip(used, whole.split([ctx.ranks[n] for n in used]), strict=True):
                of_down[n] = part
            if of_x is not None:
                of_x.addmm_(gradient, down, alpha=scaling)
        if of_x is not None:
            of_x = of_x.view(ctx.shape).to(ctx.input_dtype)
        return (of_x, None, None, None, *of_down, *of_up)


def _product(
    like: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float
) -> torch.Tensor:
    """scaling * left @ right in one kernel; `like` has the result's shape and is not read
    (beta=0).
    """
    return torch.addmm(like, left, right, beta=0, alpha=scaling)


def _through_bases(
    of_output: dict[int, torch.Tensor], bases: Sequence[torch.nn.Linear]
) -> torch.Tensor:
    """The input's gradient through the frozen weights, summed by the products themselves: (tokens,
    in).
    """
    first, *rest = of_output
    of_x = of_output[first] @ weight_of(bases[first], of_output[first].dtype)
    for n in rest:
        of_x.addmm_(of_output[n], weight_of(bases[n], of_x.dtype))
    return of_x
