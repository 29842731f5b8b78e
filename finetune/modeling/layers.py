"""Fused operations instead of a model's own RMSNorm, rotary position embedding and SwiGLU.

| device | --fused-layers auto uses                                                     |
|--------|------------------------------------------------------------------------------|
| CUDA   | liger-kernel if it is installed, else each operation under torch.compile     |
| NPU    | torch_npu's npu_rms_norm, npu_rotary_mul and npu_swiglu                      |
| others | torch's own operations                                                       |

A module is replaced if its class has the same code as a reference class in transformers (Llama's,
OLMo 2's, ...). The formula of each reference class is one of the `plain_...` functions.
transformers copies this code into the files of most model families.

Not replaced are norms with `1 + weight` (Gemma) or without weights, rotations of adjacent elements
(Cohere, DeepSeek), and MLPs with another activation or one joined projection.

A fused operation is used only after it agreed with the plain one on this device, at the model's own
sizes (kernel_check.py). Linear layers are still called as modules, so hooks and adapters on them
keep working.

Operations, by the name that providers give them:
    rms_norm: x `(..., D)`, weight `(D,)` of the same dtype, eps -> the shape and dtype of x.
    rotary: q `(S, H, T, D)`, k `(S, K, T, D)`, cos and sin `(S or 1, T, D)`, one dtype -> q and k
        rotated.
    swiglu: gate and up `(..., D)` of one dtype -> `silu(gate) * up`.
Shapes: S samples, T tokens, D elements of the last axis, H query heads, K key-value heads.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from finetune.modeling.attention import head_sizes
from finetune.modeling.kernel_check import Comparison, Input, Operation, problem_of
from finetune.modeling.quantization import parameter_count
from finetune.runtime.device import capabilities, empty_cache

logger = logging.getLogger("finetune")

ROTARY = "apply_rotary_pos_emb"  # its name in transformers' modeling files


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 and rounded where Llama rounds.

    Source: arXiv:1910.07467.
    """
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate element i of a head with element i + D/2.

    Source: arXiv:2104.09864, in the layout of GPT-NeoX.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return rotate(q), rotate(k)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of one projection times another. Source: arXiv:2002.05202."""
    return nn.functional.silu(gate) * up


PLAIN: Mapping[str, Operation] = {
    "rms_norm": plain_rms_norm,
    "rotary": plain_rotary,
    "swiglu": plain_swiglu,
}


# ---------------------------------------------------------------- providers


def choose_provider(setting: str, device_type: str, *, compiles: bool) -> str | None:
    """Return the provider of the fused operations: liger, compile, npu, or None for the model's
    own.

    Args:
        setting: of --fused-layers.
        device_type: of the run.
        compiles: whether torch.compile pays on this device (Capabilities.compile).

    Raises:
        ConfigError: the requested provider does not work on this device or is not installed.
    """
    has_liger = all(
        importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton")
    )
    if setting == "auto":
        if device_type == "cuda":
            return "liger" if has_liger else "compile" if compiles else None
        return "npu" if device_type == "npu" else None
    required = {"liger": "cuda", "npu": "npu"}.get(setting, device_type)
    if device_type != required:
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


def provided_ops(provider: str) -> Mapping[str, Operation]:
    """Return the operations of a provider; imports its package."""
    if provider == "liger":
        return _liger_ops()
    if provider == "npu":
        return _npu_ops()
    # Each function on its own, with symbolic sizes: a run has microbatches of many lengths.
    return {name: torch.compile(function, dynamic=True) for name, function in PLAIN.items()}


def _liger_ops() -> Mapping[str, Operation]:
    # liger-kernel 0.8.5, transformers/functional.py; by position, because earlier versions take no
    # keywords.
    from liger_kernel.transformers import functional as liger

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Any:
        # offset 0, Llama's casts, and not in place: that would write dx over dy, which a residual
        # after the norm (OLMo 2, Gemma 2) still needs.
        return liger.liger_rms_norm(x, weight, eps, 0.0, "llama", False)

    # Rotary rotates q and k in place, and swiglu's backward overwrites gate and up. Nothing reads
    # those again: the projections and norms before them keep their inputs for the backward pass,
    # not their outputs.
    return {
        "rms_norm": rms_norm,
        "rotary": liger.liger_rope,
        "swiglu": liger.liger_swiglu,
    }


def _npu_ops() -> Mapping[str, Operation]:
    # Limits of torch_npu 2.13 (op-plugin's custom_APIs/torch_npu):
    # - rms_norm: x of 2 to 8 axes, weight of its dtype or float32.
    # - rotary: 4 axes, D even and below 896, S and H below 1,000.
    # - swiglu: one contiguous tensor whose last axis is even.
    import torch_npu

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Any:
        return torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        # As (S, T, H, D): the layout that projections made and that attention takes; no copy on
        # either side.
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        rotated = (
            torch_npu.npu_rotary_mul(x.transpose(1, 2).contiguous(), cos, sin) for x in (q, k)
        )
        return tuple(x.transpose(1, 2) for x in rotated)

    def swiglu(gate: Tensor, up: Tensor) -> Any:
        return torch_npu.npu_swiglu(torch.cat((gate, up), dim=-1), dim=-1)

    return {
        "rms_norm": rms_norm,
        "rotary": rotary,
        "swiglu": swiglu,
    }


# ---------------------------------------------------------------- the modules of a model


@dataclass(frozen=True)
class FusableLayer:
    """A module that a plain function describes.

    Attributes:
        operation: the name of the plain function in `PLAIN`.
        keeps_dtype: whether results have the dtype of the input if weight or cosine have a wider
            one.
        eps: of a norm.
        rotate: of an attention module, the function that it calls to rotate.
    """

    module: Any
    operation: str
    keeps_dtype: bool = False
    eps: float = 0.0
    rotate: Operation | None = None


def find_fusable(model: nn.Module) -> list[FusableLayer]:
    """Find the modules whose code is that of a reference class; nothing is computed."""
    # transformers 5.23; each is followed by its `keeps_dtype`. SeedOssMLP is left out: it has its
    # own dropout. glm4_moe and phi3 rotate only the first part of a head if the configuration
    # requests it.
    norms = {
        _code(LlamaRMSNorm.forward): False,
        _code(Olmo2RMSNorm.forward): True,
        _code(HeliumRMSNorm.forward): True,
    }
    references = {
        llama: False,
        olmo2: True,
        glm4_moe: False,
        phi3: False,
    }
    rotations = {_rotation_code(getattr(file, ROTARY)): keeps for file, keeps in references.items()}
    swiglu = _code(LlamaMLP.forward)
    found: list[FusableLayer] = []
    module: Any
    for module in model.modules():
        forward = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue  # replaced already, or not a Python function
        code = _code(forward)
        if code in norms:
            epsilon = module.variance_epsilon
            found.append(FusableLayer(module, "rms_norm", norms[code], eps=epsilon))
        elif code == swiglu and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
            found.append(FusableLayer(module, "swiglu"))
        elif ROTARY in forward.__code__.co_names:
            rotate: Any = forward.__globals__.get(ROTARY)
            code = _rotation_code(rotate)
            if code in rotations:
                found.append(FusableLayer(module, "rotary", rotations[code], rotate=rotate))
    return found


def _code(function: Any) -> Any:
    """Return what a function does: its instructions, the names it uses and its constants, without
    its docstring. Equal for the copies that transformers keeps in its modeling files.
    """
    code = function.__code__
    return code.co_code, code.co_names, tuple(x for x in code.co_consts if not isinstance(x, str))


def _rotation_code(rotate: Any) -> Any:
    # NanoChat's function equals Llama's, and calls a `rotate_half` with the signs swapped
    half = getattr(rotate, "__globals__", {}).get("rotate_half")
    return None if half is None else (_code(rotate), _code(half))


def use_fused_layers(model: nn.Module, ops: Mapping[str, Operation]) -> dict[str, int]:
    """Let the fusable modules compute with `ops`; return how many do, by operation.

    Nothing is compared here: see `agreeing_ops`. Only the modules of this model are changed, not
    transformers' classes, so other models in the process are not affected.
    """
    forwards = {
        "rms_norm": _norm_forward,
        "rotary": _rotary_forward,
        "swiglu": _mlp_forward,
    }
    counts = dict.fromkeys(forwards, 0)
    for layer in find_fusable(model):
        if layer.operation in ops:
            forward = forwards[layer.operation](ops[layer.operation], layer)
            vars(layer.module)["forward"] = MethodType(forward, layer.module)
            counts[layer.operation] += 1
    return counts


def _norm_forward(norm: Operation, layer: FusableLayer) -> Operation:
    def forward(self: Any, hidden_states: Tensor) -> Any:
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        normed = norm(hidden_states.to(dtype), self.weight.to(dtype), layer.eps)
        return normed.to(hidden_states.dtype) if layer.keeps_dtype else normed

    return forward


def _mlp_forward(swiglu: Operation, layer: FusableLayer) -> Operation:
    def forward(self: Any, x: Tensor) -> Any:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

    return forward


def _rotary_forward(rotary: Operation, layer: FusableLayer) -> Operation:
    """Return the module's own forward with another function as `apply_rotary_pos_emb`."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        width = cos.shape[-1]
        if unsqueeze_dim != 1 or cos.dim() != 3 or q.shape[-1] != width or k.shape[-1] != width:
            # another layout, or only a part is rotated
            assert layer.rotate is not None
            return layer.rotate(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        dtype = torch.promote_types(q.dtype, cos.dtype)
        rotated_q, rotated_k = rotary(q.to(dtype), k.to(dtype), cos.to(dtype), sin.to(dtype))
        if layer.keeps_dtype:
            return rotated_q.to(q.dtype), rotated_k.to(k.dtype)
        return rotated_q, rotated_k

    forward: Any = type(layer.module).forward
    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: rotate},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


# ---------------------------------------------------------------- for a run


def fuse_layers(
    model: nn.Module,
    setting: str,
    *,
    device_type: str,
    dtypes: Sequence[torch.dtype],
    tokens: int,
) -> str:
    """Use the requested fused operations that agree with the plain ones on this device.

    Args:
        model: transformers' or peft's, before it is wrapped; its weights may be on any device.
        setting: of --fused-layers.
        device_type: of the run.
        dtypes: of the computation and of the weights.
        tokens: maximum tokens of a microbatch.

    Returns:
        The provider and how often each operation is used, for the start-up table; "none" without
        one.

    Raises:
        ConfigError: the requested provider does not work on this device or is not installed.
    """
    provider = choose_provider(setting, device_type, compiles=capabilities(device_type).compile)
    if provider is None:
        return "none"
    try:
        ops = provided_ops(provider)
    except (ImportError, AttributeError, RuntimeError) as error:
        logger.warning(
            "fused layers of %s cannot be loaded: %s. torch's own are used", provider, error
        )
        return "none"
    device = torch.device(device_type)
    comparisons = compare_layers(ops, find_fusable(model), model.config)
    ops = agreeing_ops(
        provider, ops, comparisons, device=device, dtypes=dict.fromkeys(dtypes), tokens=tokens
    )
    empty_cache(device)  # the memory that the comparisons took
    counts = use_fused_layers(model, ops)
    used = [f"{count} {name}" for name, count in counts.items() if count]
    return f"{provider}: {', '.join(used)}" if used else "none"


def agreeing_ops(
    provider: str,
    ops: Mapping[str, Operation],
    comparisons: Sequence[Comparison],
    *,
    device: torch.device,
    dtypes: Iterable[torch.dtype],
    tokens: int,
) -> Mapping[str, Operation]:
    """Return the operations that agree with the plain ones here; warn about each of the others."""
    refused: set[str] = set()
    for comparison, dtype in itertools.product(comparisons, dtypes):
        if comparison.kind in refused:
            continue
        problem = problem_of(comparison, device, dtype, tokens)
        if problem:
            refused.add(comparison.kind)
            logger.warning(
                "%s of %s is not used: %s. torch's own is. Fix: another version of its package,"
                " or --fused-layers off to leave out this comparison",
                comparison.what,
                provider,
                problem,
            )
    return {name: operation for name, operation in ops.items() if name not in refused}


def compare_layers(
    ops: Mapping[str, Operation], found: Sequence[FusableLayer], config: Any
) -> list[Comparison]:
    """Return what to compare for a model: each width of its norms and MLPs, and the heads that it
    rotates.
    """
    norms: set[tuple[int, float]] = set()
    mlps: set[int] = set()
    for layer in found:
        if layer.operation == "rms_norm":
            norms.add((parameter_count(layer.module.weight), layer.eps))
        elif layer.operation == "swiglu":
            mlps.add(layer.module.down_proj.in_features)
    made = [_compare_norm(ops["rms_norm"], width, eps) for width, eps in sorted(norms)]
    if any(layer.operation == "rotary" for layer in found):
        made.append(_compare_rotary(ops["rotary"], config.get_text_config()))
    for width in sorted(mlps):
        rows = (Input((width,)), Input((width,)))
        swiglu = ops["swiglu"]
        made.append(
            Comparison(swiglu, plain_swiglu, rows, kind="swiglu", what=f"SwiGLU of {width:,}")
        )
    return made


def _compare_norm(rms_norm: Operation, width: int, eps: float) -> Comparison:
    return Comparison(
        lambda x, weight: rms_norm(x, weight, eps),
        lambda x, weight: plain_rms_norm(x, weight, eps),
        (Input((width,)), Input((width,), "weight")),
        smallest=max(eps**0.5, 1e-3),
        kind="rms_norm",
        what=f"RMSNorm of {width:,}",
    )


def _compare_rotary(rotary: Operation, text: Any) -> Comparison:
    heads, keys, width, _ = head_sizes(text)
    if getattr(text, "qk_rope_head_dim", None):  # multi-head latent attention
        keys, width = 1, text.qk_rope_head_dim

    def heads_second(rotate: Operation) -> Operation:
        # As in a model: (S, T, heads, D) of a projection, seen as (S, heads, T, D) without a copy.
        return lambda q, k, cos, sin: [
            x.transpose(1, 2) for x in rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        ]

    angle = Input((width,), "angle")
    return Comparison(
        heads_second(rotary),
        heads_second(plain_rotary),
        (Input((heads, width)), Input((keys, width)), angle, angle),
        outputs=2,
        kind="rotary",
        what=f"rotary position embedding of {heads} heads of {width}",
    )
