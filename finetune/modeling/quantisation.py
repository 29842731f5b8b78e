"""Frozen base weights in 4 or 8 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), held by
bitsandbytes.

A quantised layer is computed as the linear layer of its dequantised weight, in the run's dtype, on
every device: what is trained does not depend on the device or on what else is in a microbatch.
bitsandbytes' own layers round more, and otherwise from place to place (0.50.2): Linear8bitLt rounds
activations too on CUDA (LLM.int8, arXiv:2208.07339), its outliers being those of the whole
microbatch, and not on a CPU while it trains; Linear4bit repacks its weights with coarser scales at
the first evaluation on a CPU that has AVX512-BF16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from finetune.runtime.launch_environment import import_bitsandbytes

KINDS = {"Linear4bit": "nf4", "Linear8bitLt": "int8"}  # by the layers of bitsandbytes.nn
# Beside the adapter of a quantised base: {"quantization": "nf4"}.
NOTE_NAME = "finetune_adapter.json"


def quantized_loading(
    kind: str, dtype: torch.dtype, device: torch.device | None, *, zero3: bool
) -> dict[str, Any]:
    """What from_pretrained is told beside the rest.

    Args:
        kind: nf4, with a scale for 64 weights, these scales in 8 bits; or int8, with a scale for
            each output.
        dtype: that the weights are computed in.
        device: that the model is loaded on. Under ZeRO-3 transformers takes no device: it is the
            current one.
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
            # DeepSpeed joins and sends weights of the run's dtype only: 4-bit numbers are said to
            # be of it.
            bnb_4bit_quant_storage=dtype,
        )
    return {"quantization_config": settings} | ({} if zero3 else {"device_map": {"": device}})


def is_quantised(layer: torch.nn.Module) -> bool:
    """Whether it is a linear layer of bitsandbytes."""
    kind = type(layer)
    return kind.__name__ in KINDS and kind.__module__.startswith("bitsandbytes.")


def quantization_of(model: torch.nn.Module) -> str:
    """What the weights of a loaded model are held in: nf4, int8 or none."""
    return next(
        (KINDS[type(module).__name__] for module in model.modules() if is_quantised(module)), "none"
    )


def compute_exactly(model: torch.nn.Module) -> int:
    """Let the model's quantised layers compute as the module says; how many there are."""
    layers = [module for module in model.modules() if is_quantised(module)]
    for layer in layers:
        layer.forward = partial(_forward, layer)
        if hasattr(layer.weight, "CB"):
            layer.weight.CB = None  # the numbers once more: ZeRO-3 could not let go of them
    return len(layers)


def weight_of(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a linear layer, `(out, in)`; that of a quantised one dequantised, in
    `dtype`.
    """
    weight: Any = layer.weight
    if not is_quantised(layer):
        return weight
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state).to(dtype)
    # As MatMul8bitFp of bitsandbytes.autograd does it: in float32, and rounded to the dtype once.
    whole: torch.Tensor = weight.data.to(dtype, copy=True).mul_(weight.SCB.unsqueeze(1) / 127.0)
    return whole


def numbers_in(parameter: Any) -> int:
    """How many numbers a parameter stands for: ZeRO-3 has a part of it here, and 4-bit weights are
    packed.
    """
    state = getattr(parameter, "quant_state", None)
    return int(
        state.shape.numel()
        if state is not None
        else getattr(parameter, "ds_numel", parameter.numel())
    )


def computed_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that a product with x is computed in: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = FrozenProduct.apply(x.to(computed_dtype(x)), layer)
    return product


class FrozenProduct(torch.autograd.Function):
    """x W' + b of a quantised layer. The weight is dequantised again in the backward pass, and not
    kept.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
        """x: (..., in) -> (..., out), in the dtype of x."""
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return functional.linear(x, weight_of(layer, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ weight_of(ctx.layer, gradient.dtype), None
