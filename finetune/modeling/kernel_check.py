"""A fused kernel compared with plain operations on the device of the run, before it is used.

Both run forward and backward on the same values, at the model's own sizes, in the run's dtype, for
a few tokens and for as many as a microbatch has. The reference is computed in float64 on the CPU,
for a selection of tokens. The plain operation's own error against the reference sets the bound. On
those tokens a kernel may be off by `FACTOR` times that error (or by one rounding of the dtype). On
all tokens it may differ from the plain operation by twice that. Rows are compared by their norm, so
that a bound does not grow with the number of tokens. Rows have many sizes, down to the square root
of eps, so that a kernel which ignores eps is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

# fused kernels round less often than plain operations, but sum and exponentiate in another way
FACTOR = 4.0
FEW_TOKENS = 33  # no multiple of any block of a kernel
CHOSEN_TOKENS = 48  # of many, those that are computed in float64
POOL = 1_000_003  # random numbers, repeated: a prime, so that no two rows are equal

Operation = Callable[..., Any]


@dataclass(frozen=True)
class Input:
    """One argument of an operation.

    Attributes:
        shape: of one token; of the whole for a weight.
        kind: "token": a row for each token. "weight": the same for all tokens. "angle": cosines or
            sines for each token, within -1 and 1 and with both halves alike; without gradient.
    """

    shape: tuple[int, ...]
    kind: Literal["token", "weight", "angle"] = "token"

    def make(self, tokens: int, pool: Tensor, sizes: Tensor) -> Tensor:
        """Return float32 values on the CPU: `(1, tokens, *shape)`, or `shape` for a weight."""
        if self.kind == "weight":
            return _filled(self.shape, pool)
        made = _filled((1, tokens, *self.shape), pool)
        if self.kind == "angle":
            half = made.sin()[..., : self.shape[-1] // 2]
            return torch.cat((half, half), -1)
        return made * sizes.view(1, -1, *[1 for _ in self.shape])


def _spread(tokens: int) -> Tensor:
    return torch.linspace(0, tokens - 1, min(tokens, CHOSEN_TOKENS)).round().long()


@dataclass(frozen=True)
class Comparison:
    """One operation at one size. Outputs have a row for each token and the shapes of the first
    inputs.

    Attributes:
        smallest: size of the smallest rows.
        by_largest: errors are fractions of the largest row, because rows of a result may be zero.
        chosen: returns, for a number of tokens, the positions that float64 computes on their own.
        kind, what: the operation, and its name for people, if several are compared.
    """

    fused: Operation
    plain: Operation
    inputs: tuple[Input, ...]
    outputs: int = 1
    smallest: float = 0.1
    by_largest: bool = False
    chosen: Callable[[int], Tensor] = _spread
    kind: str = ""
    what: str = ""


def problem_of(
    comparison: Comparison, device: torch.device, dtype: torch.dtype, tokens: int
) -> str | None:
    """Describe what is wrong with the fused operation; None if nothing is."""
    few = min(FEW_TOKENS, tokens)
    # Run the same size twice with other values: if a kernel leaves something in an internal buffer,
    # the second result shows it.
    sizes = (few, few, tokens)
    # Run all before comparing anything, so that a result that a later call overwrites is found too.
    try:
        draws = [_draw(comparison, size, device, dtype, seed) for seed, size in enumerate(sizes)]
        fused = [_results(comparison.fused, comparison, *draw) for draw in draws]
    # A kernel, its compiler or its driver may raise any type: report it, and do not use the kernel.
    except Exception as error:
        return first_line(error)
    for size, draw, found in zip(sizes, draws, fused, strict=True):
        if difference := _difference(comparison, *draw, found, dtype):
            return f"{difference}, at {size:,} tokens in {str(dtype).removeprefix('torch.')}"
    return None


def first_line(error: Exception) -> str:
    """Return the error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def _filled(shape: tuple[int, ...], pool: Tensor) -> Tensor:
    count = math.prod(shape)
    return pool.repeat(-(-count // len(pool)))[:count].view(shape)


def _draw(
    comparison: Comparison, tokens: int, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Draw inputs, and the gradients of the outputs; each token's row has another size."""
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(seed))
    steps = torch.linspace(0, 1, tokens).roll(7 * seed)
    sizes = comparison.smallest * (4 / comparison.smallest) ** steps  # up to 4
    inputs = [
        given.make(tokens, pool.roll(-7919 * number), sizes).to(device, dtype)
        for number, given in enumerate(comparison.inputs)
    ]
    shapes = [tuple(x.shape) for x in inputs[: comparison.outputs]]
    return inputs, [_filled(shape, pool.roll(17)).to(device, dtype) for shape in shapes]


def _results(
    function: Operation, comparison: Comparison, inputs: list[Tensor], gradients: list[Tensor]
) -> list[Any]:
    """Return the outputs, then the gradients of the inputs that have one (None if it is missing).

    Computed on copies: kernels overwrite inputs.
    """
    leaves = [
        x.detach().clone().requires_grad_(given.kind != "angle")
        for x, given in zip(inputs, comparison.inputs, strict=True)
    ]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(outputs, learned, [x.clone() for x in gradients], allow_unused=True)
    return [None if x is None else x.detach() for x in (*outputs, *found)]


def _difference(
    comparison: Comparison,
    inputs: list[Tensor],
    gradients: list[Tensor],
    fused: list[Any],
    dtype: torch.dtype,
) -> str | None:
    """Describe the first result of the fused operation that is wrong."""
    tokens = inputs[0].shape[1]
    chosen = comparison.chosen(tokens)
    plain = _results(comparison.plain, comparison, inputs, gradients)
    few = [
        _exact(x, None if given.kind == "weight" else chosen)
        for x, given in zip(inputs, comparison.inputs, strict=True)
    ]
    exact = _results(comparison.plain, comparison, few, [_exact(x, chosen) for x in gradients])
    names = [f"output {number + 1}" for number in range(comparison.outputs)]
    for number, given in enumerate(comparison.inputs, 1):
        if given.kind != "angle":
            names.append(f"the gradient of input {number}")
    unit = max(torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps)
    for name, found, own, right in zip(names, fused, plain, exact, strict=True):
        if found is None:
            return f"{name} is missing"
        if found.shape != own.shape or found.dtype != own.dtype:
            return (
                f"{name} is {found.dtype} {tuple(found.shape)}, not {own.dtype} {tuple(own.shape)}"
            )
        own_error = unit
        has_rows = right.dim() > 1
        # The gradient of a weight is a sum over tokens: right only if all tokens were chosen.
        if has_rows or len(chosen) == tokens:
            rows = chosen if has_rows else None
            own_error = max(unit, _error(comparison, _exact(own, rows), right))
            error = _error(comparison, _exact(found, rows), right)
            if not error <= FACTOR * own_error:  # also for NaN
                return f"{name} is off by {error:.1e} of its size, torch's own by {own_error:.1e}"
        error = _error(comparison, found.float(), own.float())
        if not error <= 2 * FACTOR * own_error:
            return (
                f"{name} differs by {error:.1e} of its size from torch's own, which is off by"
                f" {own_error:.1e}"
            )
    return None


def _error(comparison: Comparison, found: Tensor, right: Tensor) -> float:
    """Return the largest distance of a row from the right one, as a fraction of its norm; NaN if
    any value is NaN.
    """
    distance = (found - right).norm(dim=-1)
    size = right.norm(dim=-1)
    if comparison.by_largest:
        size = size.max()
    return float((distance / size.clamp_min(torch.finfo(right.dtype).tiny)).max())


def _exact(x: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the chosen rows (None: all) in float64 on the CPU."""
    if chosen is not None:
        x = x.index_select(1, chosen.to(x.device))
    return x.cpu().double()
