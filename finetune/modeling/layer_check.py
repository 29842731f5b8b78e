"""Fused operations compared with plain ones on the device of the run, before they are used.

Both run forward and backward on the same numbers, at the model's own widths, in the run's dtype,
for a few tokens and for as many as a microbatch has. What is right is computed in float64 on the
CPU, for a choice of tokens. The plain operation's own error against it is the yardstick: on those
tokens a fused one may be off by `FACTOR` times as much (or as much as one rounding of the dtype),
and on all tokens it may differ from the plain one by twice that. Rows of numbers are compared by
their norm, so that a bound does not grow with the number of tokens. Rows are of many sizes, down to
the square root of eps, where an eps that is forgotten shows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from finetune.modeling.layers import (
    PLAIN,
    FusableLayers,
    FusedOps,
    choose_provider,
    find_fusable,
    provided_ops,
    use_fused_layers,
)
from finetune.runtime.device import empty_cache

logger = logging.getLogger("finetune")

# fused kernels round less often than plain operations, but sum and exponentiate in another way
FACTOR = 4.0
FEW_TOKENS = 33  # no multiple of any block of a kernel
CHOSEN_TOKENS = 48  # of many, those that are computed in float64
POOL = 1_000_003  # random numbers, repeated: a prime, so that no two rows are equal

Function = Callable[..., Any]


@dataclass(frozen=True)
class Input:
    """One argument of an operation: so many numbers a token, or the same for all tokens (a
    weight).
    """

    shape: tuple[int, ...]  # of a token; of the whole where it is a weight
    per_token: bool = True
    gradient: bool = True
    angle: bool = False  # cosines or sines: within -1 and 1, both halves alike

    def make(self, tokens: int, pool: Tensor, sizes: Tensor) -> Tensor:
        """`(1, tokens, *shape)` or `shape`, float32, on the CPU."""
        shape = (1, tokens, *self.shape) if self.per_token else self.shape
        made = _filled(shape, pool)
        if self.angle:
            half = made.sin()[..., : shape[-1] // 2]
            return torch.cat((half, half), -1)
        return made * sizes.view(1, -1, *[1 for _ in self.shape]) if self.per_token else made


def _spread(tokens: int) -> Tensor:
    return torch.linspace(0, tokens - 1, min(tokens, CHOSEN_TOKENS)).round().long()


@dataclass(frozen=True)
class Comparison:
    """One operation at one width. Its outputs have a row for each token, as its first inputs
    have.
    """

    kind: str  # field of FusedOps, or attention
    what: str
    fused: Function
    plain: Function
    inputs: tuple[Input, ...]
    outputs: int = 1
    smallest: float = 0.1  # size of the smallest rows
    by_largest: bool = False  # errors as parts of the largest row: rows of a result may be zero
    # of so many tokens, those that are computed in float64 by themselves
    chosen: Callable[[int], Tensor] = _spread


def agreeing_ops(
    ops: FusedOps,
    comparisons: Sequence[Comparison],
    *,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    tokens: int,
) -> FusedOps:
    """`ops` without the operations that differ from the plain ones here or that raise, each told of
    in a warning.
    """
    refused: set[str] = set()
    for comparison in comparisons:
        for dtype in dtypes:
            if comparison.kind not in refused and (
                problem := problem_of(comparison, device, dtype, tokens)
            ):
                refused.add(comparison.kind)
                logger.warning(
                    "%s of %s is not used: %s. torch's own is. Fix: another version of its package,"
                    " or --fused-layers off to leave out this comparison",
                    comparison.what,
                    ops.name,
                    problem,
                )
    changes: dict[str, Any] = dict.fromkeys(refused)
    return replace(ops, **changes)


def compare_layers(ops: FusedOps, found: FusableLayers, config: Any) -> list[Comparison]:
    """What to compare for a model: every width of its norms and MLPs, and the heads that it
    rotates.
    """
    made: list[Comparison] = []
    text = config.get_text_config()
    heads = text.num_attention_heads
    if ops.rms_norm is not None:
        widths = {(_length(module.weight), eps) for module, eps, _ in found.norms}
        made += [_compare_norm(ops, width, eps) for width, eps in sorted(widths)]
    if ops.rotary is not None and found.attentions:
        width = (
            getattr(text, "qk_rope_head_dim", None)
            or getattr(text, "head_dim", None)
            or text.hidden_size // heads
        )
        keys = (
            1
            if hasattr(text, "qk_rope_head_dim")
            else getattr(text, "num_key_value_heads", None) or heads
        )
        made.append(_compare_rotary(ops, heads, keys, width))
    if ops.swiglu is not None:
        made += [
            _compare_swiglu(ops, width)
            for width in sorted({_inner_width(module) for module in found.mlps})
        ]
    return made


def _length(weight: Any) -> int:
    return int(getattr(weight, "ds_numel", weight.numel()))  # ZeRO-3 has partitioned it


def _inner_width(mlp: Any) -> int:
    return int(mlp.down_proj.in_features)


def _compare_norm(ops: FusedOps, width: int, eps: float) -> Comparison:
    def bound(norm: Function) -> Function:
        return lambda x, weight: norm(x, weight, eps)

    return Comparison(
        "rms_norm",
        f"RMSNorm of {width:,}",
        bound(_there(ops.rms_norm)),
        bound(_there(PLAIN.rms_norm)),
        (Input((width,)), Input((width,), per_token=False)),
        smallest=max(eps**0.5, 1e-3),
    )


def _compare_rotary(ops: FusedOps, heads: int, keys: int, width: int) -> Comparison:
    def of_heads_second(rotary: Function) -> Function:
        # As in a model: (S, T, heads, D) of a projection, seen as (S, heads, T, D) without a copy.
        return lambda q, k, cos, sin: [
            x.transpose(1, 2) for x in rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        ]

    angle = Input((width,), gradient=False, angle=True)
    return Comparison(
        "rotary",
        f"rotary position embedding of {heads} heads of {width}",
        of_heads_second(_there(ops.rotary)),
        of_heads_second(_there(PLAIN.rotary)),
        (Input((heads, width)), Input((keys, width)), angle, angle),
        outputs=2,
    )


def _compare_swiglu(ops: FusedOps, width: int) -> Comparison:
    rows = Input((width,))
    return Comparison(
        "swiglu", f"SwiGLU of {width:,}", _there(ops.swiglu), _there(PLAIN.swiglu), (rows, rows)
    )


def _there(function: Function | None) -> Function:
    assert function is not None
    return function


# ---------------------------------------------------------------- one comparison


def problem_of(
    comparison: Comparison, device: torch.device, dtype: torch.dtype, tokens: int
) -> str | None:
    """What is wrong with the fused operation, in words; None where nothing is."""
    # Twice the same size with other numbers: what a kernel leaves in a buffer of its own would show
    # in the second.
    sizes = (min(FEW_TOKENS, tokens), min(FEW_TOKENS, tokens), tokens)
    # All before anything is compared: a result that a later call writes over is seen, too.
    try:
        draws = [_draw(comparison, size, device, dtype, seed) for seed, size in enumerate(sizes)]
        fused = [_results(comparison.fused, comparison, *draw) for draw in draws]
    # whatever a kernel, its compiler or its driver raises: it is told, and not used
    except Exception as error:
        return first_line(error)
    for size, draw, found in zip(sizes, draws, fused, strict=True):
        if difference := _difference(comparison, draw, found, dtype):
            return f"{difference}, at {size:,} tokens in {str(dtype).removeprefix('torch.')}"
    return None


def first_line(error: Exception) -> str:
    """The error's type and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def _filled(shape: tuple[int, ...], pool: Tensor) -> Tensor:
    count = math.prod(shape)
    return pool.repeat(-(-count // len(pool)))[:count].view(shape)


def _draw(
    comparison: Comparison, tokens: int, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs, and the gradients of the outputs; every token's numbers have a size of their own."""
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(seed))
    steps = torch.linspace(0, 1, tokens).roll(7 * seed)
    sizes = comparison.smallest * (4 / comparison.smallest) ** steps  # up to 4
    inputs = [
        given.make(tokens, pool.roll(-7919 * number), sizes).to(device, dtype)
        for number, given in enumerate(comparison.inputs)
    ]
    gradients = [
        _filled(tuple(x.shape), pool.roll(17)).to(device, dtype)
        for x in inputs[: comparison.outputs]
    ]
    return inputs, gradients


def _results(
    function: Function, comparison: Comparison, inputs: list[Tensor], gradients: list[Tensor]
) -> list[Tensor | None]:
    """The outputs and then the gradients of the inputs that have one, on copies: kernels write over
    inputs.
    """
    leaves = [
        x.detach().clone().requires_grad_(given.gradient)
        for x, given in zip(inputs, comparison.inputs, strict=True)
    ]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(outputs, wanted, [x.clone() for x in gradients], allow_unused=True)
    return [None if x is None else x.detach() for x in (*outputs, *found)]


def _difference(
    comparison: Comparison,
    draw: tuple[list[Tensor], list[Tensor]],
    fused: list[Tensor | None],
    dtype: torch.dtype,
) -> str | None:
    """The first result that is not what it should be, in words."""
    plain = _results(comparison.plain, comparison, *draw)
    exact, chosen = _exact(comparison, *draw)
    inputs = range(1, len(comparison.inputs) + 1)
    names = [f"output {number}" for number in range(1, comparison.outputs + 1)]
    names += [f"the gradient of input {n}" for n in inputs if comparison.inputs[n - 1].gradient]
    unit = max(torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps)
    for name, mine, theirs, right in zip(names, fused, plain, exact, strict=True):
        assert theirs is not None
        if mine is None:
            return f"{name} is missing"
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return (
                f"{name} is {mine.dtype} {tuple(mine.shape)}, not {theirs.dtype}"
                f" {tuple(theirs.shape)}"
            )
        own = unit
        if right is not None:
            sample, own_sample = (
                _at(x, chosen) if right.dim() > 1 else x.cpu().double() for x in (mine, theirs)
            )
            own = max(unit, _off(comparison, own_sample, right))
            if not (off := _off(comparison, sample, right)) <= FACTOR * own:
                return f"{name} is off by {off:.1e} of its size, torch's own by {own:.1e}"
        if not (off := _off(comparison, mine.float(), theirs.float())) <= 2 * FACTOR * own:
            return (
                f"{name} differs by {off:.1e} of its size from torch's own, which is off by"
                f" {own:.1e}"
            )
    return None


def _off(comparison: Comparison, found: Tensor, right: Tensor) -> float:
    """Largest distance of a row from what it should be, as a part of its norm; not a number if any
    number is none.
    """
    distance, size = (found - right).norm(dim=-1), right.norm(dim=-1)
    size = size.max() if comparison.by_largest else size
    return float((distance / size.clamp_min(torch.finfo(right.dtype).tiny)).max())


def _exact(
    comparison: Comparison, inputs: list[Tensor], gradients: list[Tensor]
) -> tuple[list[Tensor | None], Tensor]:
    """The plain operation in float64 on the CPU for the chosen tokens, and which they are.

    The gradient of a weight is a sum over tokens: it is None where not all are chosen.
    """
    tokens = inputs[0].shape[1]
    chosen = comparison.chosen(tokens)
    few = [
        _at(x, chosen) if given.per_token else x.cpu().double()
        for x, given in zip(inputs, comparison.inputs, strict=True)
    ]
    results = _results(comparison.plain, comparison, few, [_at(x, chosen) for x in gradients])
    summed = [False] * comparison.outputs + [
        not given.per_token for given in comparison.inputs if given.gradient
    ]
    whole = len(chosen) == tokens
    return [
        None if sums and not whole else x for x, sums in zip(results, summed, strict=True)
    ], chosen


def _at(x: Tensor, chosen: Tensor) -> Tensor:
    return x.index_select(1, chosen.to(x.device)).cpu().double()


# ---------------------------------------------------------------- for a run


def fuse_layers(
    model: nn.Module,
    setting: str,
    *,
    device_type: str,
    compiles: bool,
    dtypes: Sequence[torch.dtype],
    tokens: int,
) -> str:
    """Use the fused operations that the setting asks for and that agree with the plain ones on this
    device.

    Args:
        model: transformers' or peft's, before it is wrapped; its weights may lie anywhere.
        compiles: whether torch.compile pays on this device.
        dtypes: of the computation and of the weights.
        tokens: most tokens of a microbatch.

    Returns:
        The provider and what it does here, for the table of the start; "none" without one.

    Raises:
        ConfigError: the setting asks for what is not here.
    """
    provider = choose_provider(setting, device_type, compiles=compiles)
    if provider is None:
        return "none"
    found = find_fusable(model)
    try:
        ops = provided_ops(provider)
    except (ImportError, AttributeError, RuntimeError) as error:
        logger.warning(
            "fused layers of %s cannot be loaded: %s. torch's own are used", provider, error
        )
        return "none"
    ops = agreeing_ops(
        ops,
        compare_layers(ops, found, model.config),
        device=torch.device(device_type),
        dtypes=list(dict.fromkeys(dtypes)),
        tokens=tokens,
    )
    empty_cache(torch.device(device_type))  # what the comparisons took
    used = [
        f"{count} {name}" for name, count in use_fused_layers(model, ops, found).items() if count
    ]
    return f"{provider}: {', '.join(used)}" if used else "none"
