"""Muon with the matrices of one shape at once, as torch.optim.Muon computes it; and NorMuon, with
what was found since.

With several processes every rank holds all gradients after DDP's sum, and all weights and moments.
Only the orthogonalization is distributed over the ranks, and its results are gathered. Keller
Jordan's distributed Muon and nanochat's distribute the work in the same way. Here moments and
weights stay whole on every rank, so a checkpoint is the same for any number of ranks, with torch's
names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from finetune.planning.traffic import MUON_AT_ONCE

# Coefficients of five steps of Polar Express (Amsel et al. 2025, arXiv:2505.16932). Their safety
# factor is 0.02 and their cushion 2, as in nanochat (karpathy/nanochat, nanochat/optim.py).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
POLAR_MARGIN = 1.01  # the largest singular value stays below 1 through the rounding of bfloat16
SECOND_MOMENT_BETA = 0.9
SECOND_MOMENT = "neuron_exp_avg_sq"


class BatchedMuon(torch.optim.Muon):
    """torch.optim.Muon with the matrices of one shape stacked, and each rank orthogonalising a part
    of them.

    torch takes them one by one: 23 kernels for each. The result is torch's up to the rounding of
    its bfloat16 products.

    Attributes:
        found_inf: 1 where the next step is to be empty, 0 where not, on the device; None: not. As
            torch's fused AdamW has it.
        dtype: of the products, and of what the ranks send each other.
    """

    found_inf: torch.Tensor | None = None
    dtype = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; `closure` as in torch."""
        loss = evaluated(closure)
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, members in shapes.items():
                count = max(1, MUON_AT_ONCE // shape.numel())
                for start in range(0, len(members), count):
                    self._update(members[start : start + count], group)
        return loss

    def _update(self, members: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        """Momentum and weights of matrices of one shape."""
        momentum = group["momentum"]
        gradient = torch.stack(
            [parameter.grad for parameter in members if parameter.grad is not None]
        )
        buffers = self._held(members, "momentum_buffer", gradient.shape[1:])
        moment, weight = torch.stack(buffers), torch.stack([p.detach() for p in members])
        skip = None if self.found_inf is None else self.found_inf.to(torch.bool)
        if skip is not None:
            # A gradient that is the moment leaves it as it is, exactly; and what follows is finite.
            gradient = torch.where(skip, moment, gradient)
        moment.lerp_(gradient, 1 - momentum)
        direction = self._directions(
            gradient.lerp_(moment, momentum) if group["nesterov"] else moment, group
        )
        changed = self._changed(weight, direction, members, group, skip)
        if skip is not None:
            changed = torch.where(skip, weight, changed)
        torch._foreach_copy_(buffers, list(moment.unbind()))
        torch._foreach_copy_([p.detach() for p in members], list(changed.unbind()))

    def _held(
        self, members: list[torch.nn.Parameter], name: str, shape: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the moments of that name, zeros before the first step."""
        for parameter in members:
            if name not in self.state[parameter]:
                self.state[parameter][name] = parameter.new_zeros(shape)
        return [self.state[parameter][name] for parameter in members]

    def _changed(
        self,
        weight: torch.Tensor,
        direction: torch.Tensor,
        members: list[torch.nn.Parameter],
        group: dict[str, Any],
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the weights `(matrices, rows, columns)` after the step."""
        rate, (rows, columns) = float(group["lr"]), weight.shape[1:]
        changed = weight * (1 - rate * group["weight_decay"])
        like_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
        scale = (
            0.2 * math.sqrt(max(rows, columns))
            if like_adamw
            else math.sqrt(max(1.0, rows / columns))
        )
        return changed.add_(direction, alpha=-rate * scale)

    def _directions(self, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Updates `(matrices, rows, columns)` orthogonalised; each rank computes some, and gets
        all.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks == 1:
            return self._orthogonalised(update, group)
        share = -(-len(update) // ranks)
        mine = update[dist.get_rank() * share :][:share]
        part = update.new_zeros((share, *update.shape[1:]), dtype=self.dtype)
        if len(mine):
            part[: len(mine)] = self._orthogonalised(mine, group)
        gathered = part.new_empty((ranks * share, *update.shape[1:]))
        dist.all_gather_into_tensor(gathered, part)
        return gathered[: len(update)]

    def _orthogonalised(self, matrices: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Newton-Schulz iteration of each of `(n, rows, columns)`, as torch.optim.Muon does it for
        one.
        """
        found = matrices.to(self.dtype)
        found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
        return _iterated(found, [group["ns_coefficients"]] * group["ns_steps"])


class NorMuon(BatchedMuon):
    """Muon as in nanochat (karpathy/nanochat, nanochat/optim.py): four changes in addition to the
    batching.

    - Polar Express instead of one polynomial five times (arXiv:2505.16932, Amsel et al. 2025).
      Its input are gradients whose rows have been made equally long (arXiv:2603.28254). Its result
      is scaled to the Frobenius norm of an orthogonal matrix (arXiv:2602.21545).
    - A second moment for each neuron, the longer side of a matrix. The updates of all neurons
      become equally long, and the whole keeps its norm (arXiv:2510.05491, Li et al. 2025).
    - Weights decay only if the update has the same direction (arXiv:2510.12402, Chen et al. 2025).
      The factor on the rate of tall matrices applies to their decay too.

    Args:
        dtype: bfloat16 if the model computes in 16 bits. With float32, runs on different numbers of
            processes stay as close to one another as their gradients are; bfloat16 would magnify
            the rounding of small singular values.
        arguments, settings: those of torch.optim.Muon.
    """

    def __init__(
        self, *arguments: Any, dtype: torch.dtype = torch.bfloat16, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self.dtype = dtype

    def _changed(
        self,
        weight: torch.Tensor,
        direction: torch.Tensor,
        members: list[torch.nn.Parameter],
        group: dict[str, Any],
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        update = direction.to(weight.dtype)
        rows, columns = update.shape[1:]
        update = update * (
            math.sqrt(min(rows, columns)) / update.norm(dim=(1, 2), keepdim=True).clamp(min=1e-6)
        )
        across = 2 if rows >= columns else 1  # the mean is over the shorter side
        squares = update.square().mean(dim=across, keepdim=True)
        held = self._held(members, SECOND_MOMENT, squares.shape[1:])
        before = torch.stack(held)
        second = before.lerp(squares, 1 - SECOND_MOMENT_BETA)
        if skip is not None:
            second = torch.where(skip, before, second)
        torch._foreach_copy_(held, list(second.unbind()))
        factor = second.clamp(min=1e-10).rsqrt()
        norm = squares.sum(dim=(1, 2), keepdim=True).sqrt()
        scaled = (squares * factor.square()).sum(dim=(1, 2), keepdim=True).sqrt()
        update = update * (factor * (norm / scaled.clamp(min=1e-10)))
        rate = float(group["lr"]) * math.sqrt(max(1.0, rows / columns))
        decayed = weight * (weight * update >= 0) * (rate * group["weight_decay"])
        return weight - decayed - update * rate

    def _orthogonalised(self, matrices: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        lengths = matrices.norm(dim=2, keepdim=True)
        mean = matrices.norm(dim=(1, 2), keepdim=True) / math.sqrt(matrices.shape[1])
        found = (matrices * (mean / lengths.clamp(min=1e-6))).to(self.dtype)
        found = found / (found.norm(dim=(1, 2), keepdim=True) * POLAR_MARGIN + 1e-6)
        return _iterated(found, POLAR_EXPRESS)


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the result of an optimizer step's closure, computed with gradients; None without
    one.
    """
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _iterated(
    matrices: torch.Tensor, coefficients: Sequence[tuple[float, float, float]]
) -> torch.Tensor:
    """Apply odd polynomials of degree five to each matrix in `(n, rows, columns)`, one after
    another, on the shorter side.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if tall else matrices
    for a, b, c in coefficients:
        gram = found @ found.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, polynomial, found, beta=a)
    return found.mT if tall else found
