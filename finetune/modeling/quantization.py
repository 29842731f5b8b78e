"""Frozen base weights in 4 or 8 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), held by
bitsandbytes.

A quantized layer computes what a linear layer with its dequantized weight would, in the run's
dtype, on every device. So training does not depend on the device or on what else is in a
microbatch. bitsandbytes' own layers round more, and differently from device to device (0.50.2). On
CUDA, Linear8bitLt rounds activations too (LLM.int8, arXiv:2208.07339), with outliers taken from the
whole microbatch; on a CPU it does not while it trains. Linear4bit repacks its weights with coarser
scales at the first evaluation on a CPU that has AVX512-BF16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from finetune.runtime.launch_environment import import_bitsandbytes

KINDS = {"Linear4bit": "nf4", "Linear8bitLt": "int8"}  # by the layers of bitsandbytes.nn
# Next to the adapter of a quantized base: {"quantization": "nf4"}.
NOTE_NAME = "finetune_adapter.json"


def quantized_loading(
    kind: str, dtype: torch.dtype, device: torch.device | None, *, zero3: bool
) -> dict[str, Any]:
    """Return additional arguments for from_pretrained.

    Args:
        kind: nf4, with a scale for 64 weights and these scales in 8 bits; or int8, with a scale for
            each output.
        dtype: of the computation.
        device: that the model is loaded on. Under ZeRO-3 transformers takes no device: it uses the
            current one.
        zero3: whether the run uses ZeRO-3.
    """
    from transformers import BitsAndBytesConfig

    import_bitsandbytes()

    if kind == "int8":
        settings = BitsAndBytesConfig(load_in_8bit=True)
    else:
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            # DeepSpeed joins and sends only weights of the run's dtype: 4-bit weights are declared
            # to have it.
            bnb_4bit_quant_storage=dtype,
        )
    return {"quantization_config": settings} | ({} if zero3 else {"device_map": {"": device}})


def is_quantized(layer: nn.Module) -> bool:
    """Return whether this is a linear layer of bitsandbytes."""
    kind = type(layer)
    return kind.__name__ in KINDS and kind.__module__.startswith("bitsandbytes.")


def quantization_of(model: nn.Module) -> str:
    """Return the format of a loaded model's weights: nf4, int8 or none."""
    for module in model.modules():
        if is_quantized(module):
            return KINDS[type(module).__name__]
    return "none"


def compute_exactly(model: nn.Module) -> None:
    """Let the model's quantized layers compute as this module describes."""
    for layer in model.modules():
        if is_quantized(layer):
            quantized: Any = layer
            quantized.forward = partial(_forward, layer)
            if hasattr(quantized.weight, "CB"):
                quantized.weight.CB = None  # the weights again: ZeRO-3 could not free them


def weight_of(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight of a linear layer, `(out, in)`; of a quantized one dequantized to
    `dtype`.
    """
    weight: Any = layer.weight
    if not is_quantized(layer):
        return weight
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state).to(dtype)
    # As MatMul8bitFp of bitsandbytes.autograd does it: in float32, and rounded to the dtype once.
    whole: Tensor = weight.data.to(dtype, copy=True).mul_(weight.SCB.unsqueeze(1) / 127.0)
    return whole


def parameter_count(parameter: Any) -> int:
    """Return the number of elements in a whole parameter.

    The tensor has fewer: ZeRO-3 holds only a part here, and 4-bit weights are packed.
    """
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return int(state.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def computed_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a product with x is computed in: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _forward(layer: Any, x: Tensor) -> Any:
    return FrozenProduct.apply(x.to(computed_dtype(x)), layer)


class FrozenProduct(torch.autograd.Function):
    """x W' + b of a quantized layer. The backward pass dequantizes the weight again instead of
    keeping it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        """x: (..., in) -> (..., out), in the dtype of x."""
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return functional.linear(x, weight_of(layer, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ weight_of(ctx.layer, gradient.dtype), None
