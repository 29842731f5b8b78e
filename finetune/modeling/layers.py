"""Fused operations in place of a model's own RMSNorm, rotary position embedding and SwiGLU.

| device | --fused-layers auto takes                                                            |
|--------|--------------------------------------------------------------------------------------|
| CUDA   | liger-kernel where it is installed, else each operation under torch.compile          |
| NPU    | torch_npu's npu_rms_norm, npu_rotary_mul and npu_swiglu                              |
| others | torch's own operations                                                               |

A module of a model is replaced if the code of its class is that of a reference class of
transformers (Llama's, OLMo 2's, ...) whose formula is one of the `plain_...` functions.
transformers copies this code into the files of most model families. Norms with `1 + weight`
(Gemma) or without weights, rotations of adjacent elements (Cohere, DeepSeek), MLPs with another
activation or one joined projection stay as they are. A fused operation is used only after it agreed
with the plain one on this device, at the model's own sizes (layer_check.py). Linear layers stay
modules that are called: hooks and adapters on them work as before.

Shapes: T tokens, D elements of the last axis, H query heads, K key-value heads.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3 import modeling_phi3 as phi3

from finetune.errors import ConfigError

logger = logging.getLogger("finetune")

ROTARY = "apply_rotary_pos_emb"  # the name that transformers' modeling files give it


@dataclass(frozen=True)
class FusedOps:
    """The operations of one provider. None leaves the model's own.

    rms_norm: x `(..., D)`, weight `(D,)` of the same dtype, eps -> the shape and dtype of x.
    rotary: q `(S, H, T, D)`, k `(S, K, T, D)`, cos and sin `(S or 1, T, D)`, one dtype -> q and k
    rotated. swiglu: gate and up `(..., D)` of one dtype -> `silu(gate) * up`.
    """

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] | None
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None
    swiglu: Callable[[Tensor, Tensor], Tensor] | None


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 and rounded where Llama's rounds
    (arXiv:1910.07467).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotation of number i of a head with number i + D/2 (arXiv:2104.09864, in the layout of
    GPT-NeoX).
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turned(q), turned(k)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of one projection times another (arXiv:2002.05202)."""
    return nn.functional.silu(gate) * up


PLAIN = FusedOps("torch", plain_rms_norm, plain_rotary, plain_swiglu)


# ---------------------------------------------------------------- providers


def choose_provider(setting: str, device_type: str, *, compiles: bool) -> str | None:
    """Who provides the fused operations: liger, compile, npu, or None for the model's own.

    Args:
        setting: of --fused-layers.
        compiles: whether torch.compile pays on this device (Capabilities.compile).

    Raises:
        ConfigError: a provider was asked for that does not work on this device or is not installed.
    """
    has_liger = all(
        importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton")
    )
    if setting == "auto":
        if device_type == "cuda":
            return "liger" if has_liger else "compile" if compiles else None
        return "npu" if device_type == "npu" else None
    wanted = {"liger": "cuda", "npu": "npu"}.get(setting, device_type)
    if device_type != wanted:
        raise ConfigError(
            f"{setting} has no operations for {device_type}",
            "--fused-layers",
            "leave it out, or say auto or off",
        )
    if setting == "liger" and not has_liger:
        raise ConfigError(
            "liger-kernel is not installed",
            "--fused-layers liger",
            "pip install liger-kernel, or say auto or off",
        )
    return None if setting == "off" else setting


def provided_ops(provider: str) -> FusedOps:
    """The operations of a provider; imports its package."""
    return {"liger": _liger_ops, "compile": _compiled_ops, "npu": _npu_ops}[provider]()


def _liger_ops() -> FusedOps:
    # liger-kernel 0.8.5, transformers/functional.py; by position, because earlier versions take no
    # keywords.
    from liger_kernel.transformers import functional as liger

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # offset 0, Llama's casts, and not in place: that would write dx over dy, which a residual
        # behind the norm (OLMo 2, Gemma 2) still needs.
        normed: Tensor = liger.liger_rms_norm(x, weight, eps, 0.0, "llama", False)
        return normed

    # Rotary turns q and k where they lie, and swiglu's backward writes over gate and up. Nobody
    # reads those again: the projections and norms before them keep their inputs for the backward
    # pass, not their outputs.
    return FusedOps("liger", rms_norm, liger.liger_rope, liger.liger_swiglu)


def _compiled_ops() -> FusedOps:
    # Each function by itself, with symbolic sizes: a run has microbatches of many lengths.
    def compiled(function: Any) -> Any:
        return torch.compile(function, dynamic=True)

    return FusedOps(
        "compile", compiled(plain_rms_norm), compiled(plain_rotary), compiled(plain_swiglu)
    )


def _npu_ops() -> FusedOps:
    # torch_npu 2.13 (op-plugin's custom_APIs/torch_npu): x of 2 to 8 axes, weight of its dtype or
    # float32; 4 axes, D even and below 896, S and H below 1,000; swiglu's one tensor contiguous and
    # its last axis even.
    import torch_npu

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
        return normed

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # As (S, T, H, D): so projections made them, and attention takes them again; no copy on
        # either side.
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        turned = (
            torch_npu.npu_rotary_mul(x.transpose(1, 2).contiguous(), cos, sin) for x in (q, k)
        )
        turned_q, turned_k = (x.transpose(1, 2) for x in turned)
        return turned_q, turned_k

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        product: Tensor = torch_npu.npu_swiglu(torch.cat((gate, up), dim=-1), dim=-1)
        return product

    return FusedOps("npu", rms_norm, rotary, swiglu)


# --------------------------------------------------------------- which modules of a model are meant


@dataclass(frozen=True)
class FusableLayers:
    """What of a model the plain functions describe.

    norms: (module, eps, whether its output has the input's dtype when its weight has a wider one).
    attentions: (module, the function it calls to rotate, whether that returns the dtype of q when
    cos is wider).
    """

    norms: list[tuple[nn.Module, float, bool]] = field(default_factory=list)
    attentions: list[tuple[nn.Module, Callable[..., Any], bool]] = field(default_factory=list)
    mlps: list[nn.Module] = field(default_factory=list)


def find_fusable(model: nn.Module) -> FusableLayers:
    """Find the modules whose code is that of a reference below; nothing is computed."""
    found = FusableLayers()
    norms, rotations = _reference_norms(), _reference_rotations()
    swiglu = _code(LlamaMLP.forward)
    for module in model.modules():
        forward = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue  # replaced already, or a function of another kind
        code = _code(forward)
        if code in norms:
            epsilon: Any = module.variance_epsilon
            found.norms.append((module, epsilon, norms[code]))
        elif code == swiglu and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
            found.mlps.append(module)
        elif ROTARY in forward.__code__.co_names:
            rotary: Any = forward.__globals__.get(ROTARY)
            if (code := _rotation_code(rotary)) in rotations:
                found.attentions.append((module, rotary, rotations[code]))
    return found


def _code(function: Any) -> tuple[bytes, tuple[str, ...], tuple[Any, ...]]:
    """What a function does: its instructions, the names it uses and its numbers, without its
    docstring. Equal for the copies that transformers keeps in each of its modeling files.
    """
    code = function.__code__
    return code.co_code, code.co_names, tuple(x for x in code.co_consts if not isinstance(x, str))


def _rotation_code(rotary: Any) -> Any:
    # NanoChat's function equals Llama's, and calls a `rotate_half` with the signs swapped
    half = getattr(rotary, "__globals__", {}).get("rotate_half")
    return None if half is None else (_code(rotary), _code(half))


# transformers 5.23; each is followed by whether its output has the input's dtype when the other
# argument, weight or cosine, is wider. SeedOssMLP is left out: it has a dropout of its own.
def _reference_norms() -> dict[Any, bool]:
    references = {LlamaRMSNorm: False, Olmo2RMSNorm: True, HeliumRMSNorm: True}
    return {_code(norm.forward): keeps for norm, keeps in references.items()}


def _reference_rotations() -> dict[Any, bool]:
    # glm4_moe and phi3 rotate the first part of a head only, if the configuration says so
    references = {llama: False, olmo2: True, glm4_moe: False, phi3: False}
    return {_rotation_code(getattr(file, ROTARY)): keeps for file, keeps in references.items()}


# ---------------------------------------------------------------- the replacement


def use_fused_layers(
    model: nn.Module, ops: FusedOps, found: FusableLayers | None = None
) -> dict[str, int]:
    """Let the modules that are meant compute with `ops`; returns how many of each kind do.

    Nothing is compared here: see `layer_check.agreeing_ops`. Module by module and not by changing
    transformers' files: other models of the process compute as before.
    """
    found = find_fusable(model) if found is None else found
    counts = dict.fromkeys(("rms_norm", "rotary", "swiglu"), 0)
    if ops.rms_norm is not None:
        for module, eps, keeps in found.norms:
            vars(module)["forward"] = MethodType(_norm_forward(ops.rms_norm, eps, keeps), module)
            counts["rms_norm"] += 1
    if ops.rotary is not None:
        for module, own, keeps in found.attentions:
            vars(module)["forward"] = MethodType(
                _rotary_forward(module, ops.rotary, own, keeps), module
            )
            counts["rotary"] += 1
    if ops.swiglu is not None:
        for module in found.mlps:
            vars(module)["forward"] = MethodType(_mlp_forward(ops.swiglu), module)
            counts["swiglu"] += 1
    return counts


def _norm_forward(
    norm: Callable[[Tensor, Tensor, float], Tensor], eps: float, keeps: bool
) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        normed = norm(hidden_states.to(dtype), self.weight.to(dtype), eps)
        return normed.to(hidden_states.dtype) if keeps else normed

    return forward


def _mlp_forward(swiglu: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return projected

    return forward


def _rotary_forward(
    module: nn.Module,
    rotary: Callable[..., tuple[Tensor, Tensor]],
    own: Callable[..., Any],
    keeps: bool,
) -> Callable[..., Any]:
    """The module's own forward with another function under the name `apply_rotary_pos_emb`."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if (
            unsqueeze_dim != 1
            or cos.dim() != 3
            or cos.shape[-1] != q.shape[-1]
            or k.shape[-1] != q.shape[-1]
        ):
            # another layout, or only a part is rotated
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        dtype = torch.promote_types(q.dtype, cos.dtype)
        turned = rotary(q.to(dtype), k.to(dtype), cos.to(dtype), sin.to(dtype))
        return (
            tuple(x.to(before.dtype) for x, before in zip(turned, (q, k), strict=True))
            if keeps
            else turned
        )

    forward: Any = type(module).forward
    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: rotate},
        forward.__name__,
        closure=forward.__closure__,
    )
    changed.__defaults__, changed.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    return changed
