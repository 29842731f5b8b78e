"""Losses that compare answers: functions of their log-probabilities, and the head's losses that
they weigh.

pi is the model that is trained, ref the model as it was before, y_w the chosen answer to a prompt
x, y_l the rejected one, sigma the logistic function. Log-probabilities of an answer are sums over
its tokens, unless a mean is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from finetune.modeling.loss import ChunkedHead, HeadLosses, scored_chunk


def dpo_losses(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Direct preference optimization: Rafailov et al. 2023, arXiv 2305.18290, equation 7.

        -log sigma(beta h),  h = log(pi(y_w) / ref(y_w)) - log(pi(y_l) / ref(y_l))

    With label smoothing e, the probability that a pair is the wrong way round, it is conservative
    DPO (E. Mitchell, "A note on DPO with noisy preferences", 2023, equation 3):

        -(1 - e) log sigma(beta h) - e log sigma(-beta h)

    Args:
        chosen, rejected, reference_chosen, reference_rejected: `(pairs,)`, log-probabilities.

    Returns:
        `(pairs,)`.
    """
    return _smoothed(
        beta * ((chosen - reference_chosen) - (rejected - reference_rejected)), label_smoothing
    )


def ipo_losses(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    *,
    beta: float,
) -> torch.Tensor:
    """Identity preference optimization: Azar et al. 2023, arXiv 2310.12036, equation 17; beta is
    its tau.

        (h - 1 / (2 beta))^2,  h as for DPO, of log-probabilities that are means over an answer's
        tokens

    The mean instead of the sum is TRL's reading (trainer/dpo_trainer.py), which it has from the
    authors.

    Args:
        chosen, rejected, reference_chosen, reference_rejected: `(pairs,)`, mean log-probabilities.
    """
    return ((chosen - reference_chosen) - (rejected - reference_rejected) - 1 / (2 * beta)).square()


def orpo_losses(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float) -> torch.Tensor:
    """The odds-ratio term of Hong et al. 2024, arXiv 2403.07691, equation 7; beta is lambda in
    equation 6.

        -beta log sigma(log(odds(y_w) / odds(y_l))),  odds(y) = p / (1 - p),  p = exp(mean
        log-probability of y)

    Equation 6 adds the cross-entropy of the chosen answer: `--sft-weight`, 1 by default. The
    cross-entropy is that of the answer, as the paper has it; TRL's (experimental/orpo) is that of
    the prompt and the answer.

    Args:
        chosen, rejected: `(pairs,)`, mean log-probabilities.
    """
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -beta * logsigmoid(log_odds)


def simpo_losses(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    beta: float,
    simpo_gamma: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Simple preference optimization: Meng et al. 2024, arXiv 2405.14734, equation 6.

        -log sigma(beta log pi(y_w) / |y_w| - beta log pi(y_l) / |y_l| - gamma)

    gamma is `simpo_gamma`, in TRL (experimental/cpo) too; label smoothing as for DPO.

    Args:
        chosen, rejected: `(pairs,)`, mean log-probabilities.
    """
    return _smoothed(beta * (chosen - rejected) - simpo_gamma, label_smoothing)


def kto_losses(
    log_ratios: torch.Tensor,
    desirable: torch.Tensor,
    reference_point: torch.Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> torch.Tensor:
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


# The losses of pairs by name. Arguments by position are log-probabilities: the model's of the
# chosen and the rejected answers, then the reference's where the loss has one; those by keyword are
# settings of the run.
PAIR_LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "dpo": dpo_losses,
    "ipo": ipo_losses,
    "orpo": orpo_losses,
    "simpo": simpo_losses,
}


def _smoothed(logits: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    if not label_smoothing:
        return -logsigmoid(logits)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) of x < 0, without cancellation: Maechler 2012, "Accurately computing log(1 -
    exp(-|a|))".
    """
    # Of a probability that rounds to 1 it is -inf, and its gradient NaN: the largest number below 0
    # stands for it.
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    small = x > -math.log(2)
    # Each branch sees numbers of its own only: where() multiplies the other's gradient by 0, and 0
    # times inf is NaN.
    near = torch.log(-torch.expm1(torch.where(small, x, -1.0)))
    return torch.where(small, near, torch.log1p(-torch.exp(torch.where(small, -1.0, x))))


def document_sums(losses: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """Summed losses of each document: `(documents,)`, in the dtype of the losses and part of their
    graph.

    Args:
        losses: `(n,)`, document after document.
        targets: how many each has; numbers of the host, so that nobody waits for the device.
    """
    # torch sums pairwise; adding into a tensor by index is one by one, and on CUDA in any order.
    return torch.stack([part.sum() for part in losses.split(list(targets))]) if targets else losses


class WeighedHead(ChunkedHead):
    """A chunked head whose losses may each have another factor from above, where its weights are
    trained too.
    """

    def losses(
        self, hidden: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        weight, bias = self.head.weight, self.head.bias
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return super().losses(hidden, targets, dtype)
        losses: torch.Tensor = WeighedHeadLosses.apply(hidden, weight, bias, targets, self, dtype)
        return losses


class WeighedHeadLosses(torch.autograd.Function):
    """`HeadLosses` whose gradients are computed in the backward pass, where the factor of each
    target is known.

    The weight's gradient is a sum over targets, and a loss of preferences weighs them by document:
    the logits are made a second time, chunk by chunk, which costs a third more for the head and
    keeps nothing from one pass to the other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: ChunkedHead,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Shapes as of `HeadLosses`."""
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.head, ctx.dtype = head, dtype
        losses: torch.Tensor = HeadLosses.apply(hidden, weight, bias, targets, head, dtype, False)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        head, dtype = ctx.head, ctx.dtype
        precise = torch.promote_types(dtype, torch.float32)
        of_hidden = hidden.new_empty(hidden.shape, dtype=dtype)
        of_weight = torch.zeros_like(weight, dtype=precise)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=precise)
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, rows in head.chunks(hidden, dtype):
                _, gradient = scored_chunk(
                    rows, matrix, offset, targets[part], head.softcap, learning=True
                )
                torch.mm(gradient, matrix, out=of_hidden[part])
                # The factors on the narrow side of the product: hidden states, not logits.
                of_weight += gradient.T @ (rows * upstream[part, None]).to(dtype)
                if of_bias is not None:
                    of_bias += gradient.T @ upstream[part].to(dtype)
                del gradient  # before the next chunk's logits are made
        found = ((of_hidden * upstream[:, None], hidden), (of_weight, weight), (of_bias, bias))
        sized = (None if like is None or g is None else g.to(like.dtype) for g, like in found)
        return (*sized, None, None, None)
