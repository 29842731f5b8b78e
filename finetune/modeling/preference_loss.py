"""Preference losses: functions of answers' log-probabilities, and the head whose losses they
weight.

pi is the model that is trained, ref the model before training, y_w the chosen answer to a prompt x,
y_l the rejected answer, sigma the logistic function. The log-probability of an answer is a sum over
its tokens, unless a mean is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from finetune.modeling.loss import ChunkedHead, HeadLosses, scored_chunk


def dpo_losses(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimization: Rafailov et al. 2023, arXiv 2305.18290, equation 7.

        -log sigma(beta h),  h = log(pi(y_w) / ref(y_w)) - log(pi(y_l) / ref(y_l))

    With label smoothing e, the probability that a pair is in the wrong order, this is conservative
    DPO (E. Mitchell, "A note on DPO with noisy preferences", 2023, equation 3):

        -(1 - e) log sigma(beta h) - e log sigma(-beta h)

    Args:
        chosen, rejected, reference_chosen, reference_rejected: `(pairs,)`, log-probabilities.

    Returns:
        `(pairs,)`.
    """
    log_ratio = (chosen - reference_chosen) - (rejected - reference_rejected)
    return _smoothed(beta * log_ratio, label_smoothing)


def ipo_losses(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Identity preference optimization: Azar et al. 2023, arXiv 2310.12036, equation 17; beta is
    its tau.

        (h - 1 / (2 beta))^2,  h as for DPO, of mean log-probabilities of an answer's tokens

    The mean instead of the sum is TRL's interpretation (trainer/dpo_trainer.py), which comes from
    the authors.

    Args:
        chosen, rejected, reference_chosen, reference_rejected: `(pairs,)`, mean log-probabilities.
    """
    log_ratio = (chosen - reference_chosen) - (rejected - reference_rejected)
    return (log_ratio - 1 / (2 * beta)).square()


def orpo_losses(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the odds-ratio term of Hong et al. 2024, arXiv 2403.07691, equation 7; beta is lambda
    in equation 6.

        -beta log sigma(log(odds(y_w) / odds(y_l))),  odds(y) = p / (1 - p),  p = exp(mean
        log-probability of y)

    Equation 6 adds the cross-entropy of the chosen answer: `--sft-weight`, 1 by default. As in the
    paper, it covers the answer; TRL's (experimental/orpo) covers the prompt and the answer.

    Args:
        chosen, rejected: `(pairs,)`, mean log-probabilities.
    """
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -beta * logsigmoid(log_odds)


def simpo_losses(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float,
    simpo_gamma: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Simple preference optimization: Meng et al. 2024, arXiv 2405.14734, equation 6.

        -log sigma(beta log pi(y_w) / |y_w| - beta log pi(y_l) / |y_l| - gamma)

    gamma is `simpo_gamma`, in TRL (experimental/cpo) too; label smoothing as for DPO.

    Args:
        chosen, rejected: `(pairs,)`, mean log-probabilities.
    """
    return _smoothed(beta * (chosen - rejected) - simpo_gamma, label_smoothing)


def kto_losses(
    log_ratios: Tensor,
    desirable: Tensor,
    reference_point: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Kahneman-Tversky optimization: Ethayarajh et al. 2024, arXiv 2402.01306, equation 8.

        lambda_y - v(x, y):  lambda_D (1 - sigma(beta (r - z0)))  or  lambda_U (1 - sigma(beta (z0 -
        r)))

    r = log(pi(y) / ref(y)); z0 is the mean of r over mismatched prompts and answers of the global
    batch, at least 0 and without a gradient.

    Args:
        log_ratios: `(samples,)`, r.
        desirable: bool `(samples,)`.
        reference_point: scalar, z0.
    """
    good = desirable_weight * (1 - torch.sigmoid(beta * (log_ratios - reference_point)))
    bad = undesirable_weight * (1 - torch.sigmoid(beta * (reference_point - log_ratios)))
    return torch.where(desirable, good, bad)


# The losses of pairs by name. Positional arguments are log-probabilities: the model's of the chosen
# and the rejected answers, then the reference's if the loss has one. Keyword arguments are settings
# of the run.
PAIR_LOSSES: dict[str, Callable[..., Tensor]] = {
    "dpo": dpo_losses,
    "ipo": ipo_losses,
    "orpo": orpo_losses,
    "simpo": simpo_losses,
}


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    if not label_smoothing:
        return -logsigmoid(logits)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, without cancellation.

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    # For a probability that rounds to 1 the result would be -inf, and its gradient NaN: use the
    # largest number below 0 instead.
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    small = x > -math.log(2)
    # Each branch gets only values in its own range: where() multiplies the other branch's gradient
    # by 0, and 0 times inf is NaN.
    near = torch.log(-torch.expm1(torch.where(small, x, -1.0)))
    return torch.where(small, near, torch.log1p(-torch.exp(torch.where(small, -1.0, x))))


def document_sums(losses: Tensor, targets: Sequence[int]) -> Tensor:
    """Sum the losses of each document.

    Args:
        losses: `(n,)`, document after document.
        targets: number of targets per document; on the host, so that nothing waits for the device.

    Returns:
        `(documents,)`, in the losses' dtype and part of their graph.
    """
    # torch sums pairwise; adding into a tensor by index adds one by one, and on CUDA in any order.
    return torch.stack([part.sum() for part in losses.split(list(targets))]) if targets else losses


class WeighedHead(ChunkedHead):
    """A chunked head whose losses may have different upstream gradients even if its weights are
    trained.
    """

    def losses(self, hidden: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        weight, bias = self.head.weight, self.head.bias
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return super().losses(hidden, targets, dtype)
        losses: Tensor = WeighedHeadLosses.apply(hidden, weight, bias, targets, self, dtype)
        return losses


class WeighedHeadLosses(torch.autograd.Function):
    """`HeadLosses` whose gradients are computed in the backward pass, when the factor of each
    target is known.

    The weight's gradient is a sum over targets, and a preference loss weights them by document. So
    the logits are computed a second time, chunk by chunk, which costs a third more for the head and
    keeps nothing between the passes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: ChunkedHead,
        dtype: torch.dtype,
    ) -> Tensor:
        """Shapes as of `HeadLosses`."""
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.head, ctx.dtype = head, dtype
        losses: Tensor = HeadLosses.apply(hidden, weight, bias, targets, head, dtype, False)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        head = ctx.head
        dtype = ctx.dtype
        precise = torch.promote_types(dtype, torch.float32)
        grad_hidden = hidden.new_empty(hidden.shape, dtype=dtype)
        grad_weight = torch.zeros_like(weight, dtype=precise)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=precise)
        matrix = weight.to(dtype)
        offset = None if bias is None else bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, rows in head.chunks(hidden, dtype):
                _, gradient = scored_chunk(
                    rows, matrix, offset, targets[part], head.softcap, learning=True
                )
                torch.mm(gradient, matrix, out=grad_hidden[part])
                # The factors on the narrow side of the product: hidden states, not logits.
                grad_weight += gradient.T @ (rows * upstream[part, None]).to(dtype)
                if grad_bias is not None:
                    grad_bias += gradient.T @ upstream[part].to(dtype)
                del gradient  # before the next chunk's logits are made
        return (
            (grad_hidden * upstream[:, None]).to(hidden.dtype),
            grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )
