"""Stand-ins for a device's fused layers: one opaque operator each, forward and backward, for
`use_fused_layers`.

They compute nothing: they are for fake tensors only. What each keeps for its backward is what such
kernels keep: the input of a norm, gate and up; of a rotation only the tables.
"""

from __future__ import annotations

from typing import Any

import torch


def use_stand_ins(model: torch.nn.Module) -> None:
    """Let a model compute norms, rotations and gates by the stand-ins."""
    from finetune.modeling.layers import use_fused_layers

    use_fused_layers(model, {"rms_norm": rms_norm, "rotary": rotary, "swiglu": swiglu})


@torch.library.custom_op("roofline::rms_norm", mutates_args={})
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    raise NotImplementedError("for fake tensors only")


@torch.library.custom_op("roofline::rms_norm_backward", mutates_args={})
def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    raise NotImplementedError("for fake tensors only")


@torch.library.custom_op("roofline::rotary", mutates_args={})
def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> list[torch.Tensor]:
    raise NotImplementedError("for fake tensors only")


@torch.library.custom_op("roofline::swiglu", mutates_args={})
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("for fake tensors only")


@torch.library.custom_op("roofline::swiglu_backward", mutates_args={})
def swiglu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    raise NotImplementedError("for fake tensors only")


rms_norm.register_fake(lambda x, weight, eps: torch.empty_like(x))
rms_norm_backward.register_fake(
    lambda grad, x, weight: [torch.empty_like(x), torch.empty_like(weight)]
)
rotate.register_fake(lambda q, k, cos, sin: [torch.empty_like(q), torch.empty_like(k)])
swiglu.register_fake(lambda gate, up: torch.empty_like(gate))
swiglu_backward.register_fake(lambda grad, gate, up: [torch.empty_like(gate), torch.empty_like(up)])


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers' apply_rotary_pos_emb: both rotated."""
    first, second = rotate(q, k, cos, sin)
    return first, second


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))


def _norm_backward(context: Any, grad: torch.Tensor) -> Any:
    return (*rms_norm_backward(grad, *context.saved_tensors), None)


def _keep_tables(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[2:])


def _rotate_backward(context: Any, grads: Any) -> Any:
    cos, sin = context.saved_tensors
    return (*rotate(*grads, cos, sin), None, None)  # by the opposite angle: as much work


def _swiglu_backward(context: Any, grad: torch.Tensor) -> Any:
    return tuple(swiglu_backward(grad, *context.saved_tensors))


rms_norm.register_autograd(_norm_backward, setup_context=_keep)
rotate.register_autograd(_rotate_backward, setup_context=_keep_tables)
swiglu.register_autograd(_swiglu_backward, setup_context=_keep)
