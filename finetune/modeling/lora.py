"""LoRA's linear layers at minimum cost: base product and adapter as one autograd function.

peft computes `base(x) + lora_B(lora_A(dropout(x.to(adapter dtype)))) * scaling` with separate
operators (peft 0.21, tuners/lora/layer.py, Linear.forward). With float32 adapters under autocast it
casts every input up and down again, and keeps a copy of it for each layer. Here the matrix product
itself adds the adapter, layers with the same input (q, k, v; gate, up) are computed together, and
their input is kept once. Only `forward` of peft's own layers is replaced, on the instance:
parameters, names, files, merging and disabling stay peft's. LoRA: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from finetune.modeling.quantization import computed_dtype, is_quantized, weight_of

ADAPTER = "default"  # peft's name for the only adapter
# Layers that a block calls one after another with the same input, by transformers' names.
SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_lora(model: nn.Module) -> int:
    """Replace the forward of the peft model's plain LoRA layers; return their number.

    Replaced are adapters without extras on a frozen nn.Linear or on a quantized layer. All others
    are left to peft (Conv1D, experts, variants such as DoRA), and so are layers whose weight the
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
            # Forget them even if the block's forward raises (out of memory, the early stop of
            # recomputation). Outputs that were not taken hold the graph, and with it the
            # activations of all earlier layers.
            model.get_submodule(parent).register_forward_hook(group.forget, always_call=True)
    return sum(map(len, groups.values()))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Let a peft model compute as its base does, `modules_to_save` and trainable tokens included.

    PeftModel.disable_adapter does more, which it undoes only in part: it turns `requires_grad` off
    and on again (tuners_utils.py, enable_adapters), which DDP, ZeRO and optimizers rely on.
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


def _is_plain(module: nn.Module) -> bool:
    from peft.tuners.lora import Linear, LoraLayer

    # Exact types: a subclass has its own forward. For a quantized layer peft has its own class too.
    if not isinstance(module, LoraLayer) or not (
        is_quantized(module.base_layer)
        or (type(module) is Linear and type(module.base_layer) is nn.Linear)
    ):
        return False
    extras = module.lora_variant or module.lora_bias.get(ADAPTER) or module.fan_in_fan_out
    trained = any(parameter.requires_grad for parameter in module.base_layer.parameters())
    return list(module.lora_A) == [ADAPTER] and not extras and not trained


class LayerGroup:
    """LoRA layers that are called one after another with the same input; or a single layer.

    The first call computes the outputs of all, which wait until the other layers are called with
    the same tensor. If layers are called in another order, with other inputs or not at all, their
    outputs are the same; only work is wasted.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        # ZeRO-3 gathers a weight in hooks of the module that owns it, before its forward and before
        # its backward. So a function that computes several modules, or reads a weight without its
        # module, would see an empty tensor.
        self.partitioned = any(hasattr(layer.base_layer.weight, "ds_id") for layer in layers)
        self._input: Tensor | None = None
        self._version = 0
        self._waiting: dict[int, Tensor] = {}

    def forward(self, number: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute layer `number` as peft does: x (..., in features) -> (..., out features)."""
        layer = self.layers[number]
        if args or kwargs or not _is_active(layer) or not _fits(layer, x):
            result: Tensor = type(layer).forward(layer, x, *args, **kwargs)
            return result
        if self.partitioned or torch.compiler.is_compiling():
            return _by_modules(layer, x)
        if not torch.is_grad_enabled():
            return _compute([layer], x)[0]
        if x is not self._input or x._version != self._version or number not in self._waiting:
            together = {
                other: candidate
                for other, candidate in enumerate(self.layers)
                if candidate is layer or _are_alike(candidate, layer)
            }
            outputs = _compute(list(together.values()), x)
            self._waiting = dict(zip(together, outputs, strict=True))
            self._input = x
            self._version = x._version
        output = self._waiting.pop(number)
        if not self._waiting:
            self._input = None
        return output

    def forget(self, *hook_arguments: Any) -> None:
        """Drop outputs that were not taken; a forward hook of the layers' parent."""
        self._input = None
        self._waiting = {}


def _are_alike(other: Any, layer: Any) -> bool:
    """Return whether `other` can be computed together with an active layer."""
    return (
        _is_active(other)
        and other.scaling[ADAPTER] == layer.scaling[ADAPTER]
        and _dropout(other) == _dropout(layer)
        and other.base_layer.weight.dtype == layer.base_layer.weight.dtype
    )


def _is_active(layer: Any) -> bool:
    return not layer.disable_adapters and not layer.merged and layer.active_adapters == [ADAPTER]


def _fits(layer: Any, x: Tensor) -> bool:
    """Return whether the base's weight has the dtype of the computation; a quantized one is
    dequantized to it.
    """
    base = layer.base_layer
    return is_quantized(base) or bool(base.weight.dtype == computed_dtype(x))


def _dropout(layer: Any) -> float:
    module = layer.lora_dropout[ADAPTER]  # nn.Identity if there is none
    return float(module.p) if module.training and isinstance(module, nn.Dropout) else 0.0


def _by_modules(layer: Any, x: Tensor) -> Tensor:
    """Compute a layer with operators alone, each weight used by its own module: for ZeRO-3's hooks
    and for torch.compile, which fuses them.

    The scaling is applied to the smallest tensor.
    """
    result = layer.base_layer(x)
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(down.weight.dtype)
    update = up(down(layer.lora_dropout[ADAPTER](x)) * layer.scaling[ADAPTER])
    return (result + update).to(result.dtype)


def _compute(layers: Sequence[Any], x: Tensor) -> Any:
    return AdaptedLinears.apply(
        x,
        layers[0].scaling[ADAPTER],
        _dropout(layers[0]),
        [layer.base_layer for layer in layers],
        *(layer.lora_A[ADAPTER].weight for layer in layers),
        *(layer.lora_B[ADAPTER].weight for layer in layers),
    )


class AdaptedLinears(torch.autograd.Function):
    """n frozen linear layers with the same input, each with its adapter: y_i = x W_i' + b_i +
    scaling (drop_i(x) A_i') B_i'.

    Computed in the dtype of W, or in the run's if W is quantized; A and B may have another dtype,
    which their gradients have too. Kept for the backward pass: x once, the products with A, a mask
    for each dropout; no output, and no dequantized weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scaling: float,
        dropout: float,
        bases: Sequence[nn.Linear],
        *adapters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Compute the outputs, n of (..., out_i).

        Args:
            x: (..., in).
            scaling: of all adapters.
            dropout: probability, of all adapters.
            bases: n layers, with W (out_i, in) and b (out_i) or None.
            adapters: n of A (r_i, in), then n of B (out_i, r_i).
        """
        downs = list(adapters[: len(bases)])
        dtype = computed_dtype(x)
        ctx.bases = bases
        ctx.shape = x.shape
        ctx.input_dtype = x.dtype
        ctx.adapter_dtype = downs[0].dtype
        ctx.scaling = scaling
        ctx.kept_share = 1.0 - dropout
        ctx.ranks = [len(down) for down in downs]
        x = x.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        # One cast of all A, and one read of x. Casting each time costs microseconds. A cast kept
        # for a whole step would be stale after a write to `.data`, without an error: such a write
        # does not count as a version.
        down = (torch.cat(downs) if len(downs) > 1 else downs[0]).to(dtype)
        ups = [up.to(dtype) for up in adapters[len(bases) :]]
        masks: list[Tensor] = []
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
            # In place: the product adds the update as it is written, and the base's output is not
            # kept.
            output.view(-1, output.shape[-1]).addmm_(part, up.t(), alpha=scaling)
            outputs.append(output)
        ctx.save_for_backward(rows, low, down, *ups, *masks)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x and of the adapters.

        Args:
            gradients: n of (..., out_i), None for an output that nothing used; its adapter then
                gets None too.
        """
        count = len(gradients)
        scaling = ctx.scaling
        rows, low, down, *others = ctx.saved_tensors
        ups, masks = others[:count], others[count:]
        # Used outputs only, by layer index. grad_output: (tokens, out_i). grad_low, of the product
        # with A: (tokens, r).
        grad_output = {
            n: g.reshape(-1, g.shape[-1]) for n, g in enumerate(gradients) if g is not None
        }
        grad_low = {n: gradient @ ups[n] for n, gradient in grad_output.items()}
        lows = low.split(ctx.ranks, 1)
        own_downs = down.split(ctx.ranks)
        grad_up: list[Tensor | None] = [None] * count
        for n, gradient in grad_output.items():
            grad_up[n] = _product(ups[n], gradient.t(), lows[n], scaling).to(ctx.adapter_dtype)
        grad_x = _through_bases(grad_output, ctx.bases) if ctx.needs_input_grad[0] else None
        grad_down: list[Tensor | None] = [None] * count
        if masks:
            undo = partial(torch.ops.aten.native_dropout_backward, scale=1.0 / ctx.kept_share)
            for n, gradient in grad_low.items():
                # The same operator drops and undoes: multiplying x by the mask again is cheaper
                # than keeping the product.
                dropped = undo(rows, masks[n])
                grad_down[n] = _product(own_downs[n], gradient.t(), dropped, scaling).to(
                    ctx.adapter_dtype
                )
                if grad_x is not None:
                    grad_x.add_(undo(gradient @ own_downs[n], masks[n]), alpha=scaling)
        else:
            used = list(grad_low)
            if len(used) < count:
                down = torch.cat([own_downs[n] for n in used])
            gradient = torch.cat(list(grad_low.values()), 1) if len(used) > 1 else grad_low[used[0]]
            whole = _product(down, gradient.t(), rows, scaling).to(ctx.adapter_dtype)
            for n, part in zip(used, whole.split([ctx.ranks[n] for n in used]), strict=True):
                grad_down[n] = part
            if grad_x is not None:
                grad_x.addmm_(gradient, down, alpha=scaling)
        if grad_x is not None:
            grad_x = grad_x.view(ctx.shape).to(ctx.input_dtype)
        return (grad_x, None, None, None, *grad_down, *grad_up)


def _product(like: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """Return scaling * left @ right from one kernel; `like` has the result's shape and is not read
    (beta=0).
    """
    return torch.addmm(like, left, right, beta=0, alpha=scaling)


def _through_bases(grad_output: dict[int, Tensor], bases: Sequence[nn.Linear]) -> Tensor:
    """Return the input's gradient through the frozen weights, (tokens, in); the products themselves
    add it up.
    """
    first, *rest = grad_output
    grad_x = grad_output[first] @ weight_of(bases[first], grad_output[first].dtype)
    for n in rest:
        grad_x.addmm_(grad_output[n], weight_of(bases[n], grad_x.dtype))
    return grad_x
