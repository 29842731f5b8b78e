"""The loss: cross-entropy at supervised positions only, summed, so that the caller divides by the
global denominator.

`forward(logits_to_keep=<positions or mask>)` makes the model compute logits only where the next
token is a target. For a large vocabulary even those do not fit: then the LM head itself returns the
losses, chunk by chunk, so that no more than one chunk of logits exists at a time. It happens inside
the model's own forward, so that the hooks of DeepSpeed, DDP and peft around it see an ordinary
call, and a compiled model has the softmax in its graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getsource, signature
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear, log_softmax
from transformers import PretrainedConfig

from finetune.batching.collate import Microbatch

# Numbers in one chunk of logits: 512 MiB where they are held twice in float32. With a vocabulary of
# 152k 440 rows, as many as a matrix product needs so that reading the head's weights is not what
# takes the time.
LOGITS_PER_CHUNK = 64 * 2**20
# A head that is trained adds its weights' gradient up once a chunk, which moves as many bytes as
# many rows' logits.
TRAINED_HEAD_CHUNKS = 2
# glibc gives back blocks of 32 MiB and more at once, and the system clears their pages anew for the
# next chunk: fewer, unless a product would have too few rows.
LOGITS_PER_CHUNK_ON_CPU = 7 * 2**20
ROWS_OF_A_PRODUCT = 440
# Their forward squashes logits by `config.final_logit_softcapping`.
SOFTCAPPED_MODEL_TYPES = ("nanochat", "gemma2", "gemma3_text")


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each target, in float32 or better. logits `(n, vocabulary)`, targets `(n,)`
    -> `(n,)`.
    """
    # Not .float(): it would round float64 logits, in which gradients are checked against the
    # definition.
    precise = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(precise), targets, reduction="none")


class HeadLosses(torch.autograd.Function):
    """Cross-entropy of a linear head's logits, with the gradients computed in the forward pass,
    chunk by chunk.

    Logits are so computed once and never kept, and the weight's gradient is one buffer in float32:
    Liger's fused linear cross-entropy (Hsu et al. 2024, arXiv 2410.10989), Cut Cross-Entropy
    (Wijmans et al. 2024, arXiv 2411.09009). Softmax minus one at the target is the gradient of a
    sum of losses; what comes from above multiplies it. The weight's gradient is a sum over targets
    already, so there all targets must have the same factor, as they have in a sum; with different
    ones it is NaN, which no step survives. The host does not look: it would wait for the device.
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
        learning: bool,
    ) -> torch.Tensor:
        """hidden `(n, width)`, weight `(vocabulary, width)`, targets `(n,)` -> losses `(n,)`, in
        float32 or better.

        Args:
            dtype: of the matrix products.
            learning: whether gradients are wanted at all.
        """
        precise = torch.promote_types(dtype, torch.float32)
        losses = torch.empty(targets.shape, dtype=precise, device=hidden.device)
        wanted = [learning and need for need in ctx.needs_input_grad[:3]]
        gradients = [
            hidden.new_empty(hidden.shape, dtype=dtype) if wanted[0] else None,
            torch.zeros_like(weight, dtype=precise) if wanted[1] else None,
            torch.zeros_like(bias, dtype=precise) if wanted[2] and bias is not None else None,
        ]
        matrix = weight.to(dtype)
        offset = None if bias is None else bias.to(dtype)
        of_hidden, of_weight, of_bias = gradients
        for part, rows in head.chunks(hidden, dtype):
            losses[part], gradient = scored_chunk(
                rows, matrix, offset, targets[part], head.softcap, any(wanted)
            )
            if of_hidden is not None:
                torch.mm(gradient, matrix, out=of_hidden[part])
            if of_weight is not None:
                of_weight += gradient.T @ rows
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=precise)
            del gradient  # before the next chunk's logits are made
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, *of_head = ctx.saved_tensors
        first = upstream[0]
        factor = torch.where((upstream == first).all(), first, math.nan)
        found = [None if of_hidden is None else of_hidden * upstream[:, None]]
        found += [None if gradient is None else gradient.mul_(factor) for gradient in of_head]
        sized = [
            None if g is None else g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return (*sized, None, None, None, None)


def scored_chunk(
    rows: torch.Tensor,
    matrix: torch.Tensor,
    offset: torch.Tensor | None,
    targets: torch.Tensor,
    softcap: float | None,
    learning: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of a chunk, and the gradient of their sum by the logits in the compute dtype (nothing
    without learning).

    At most two tensors of logits exist at a time, three with a softcap: see LOSS_BYTES_PER_LOGIT in
    planning.
    """
    logits = linear(rows, matrix, offset)
    dtype, precise = logits.dtype, torch.promote_types(logits.dtype, torch.float32)
    if softcap is not None:
        logits = squash(logits, softcap)
    slope = None if softcap is None or not learning else 1 - (logits / softcap).square()
    # Not by log_softmax's dtype: it would keep the logits beside the float32 copy that it makes of
    # them.
    logits = logits.to(precise)
    likelihoods = log_softmax(logits, dim=-1)
    del logits
    places = targets[:, None]
    at_targets = likelihoods.gather(1, places)
    if not learning:
        return -at_targets[:, 0], at_targets
    gradient = likelihoods.exp_().scatter_(1, places, at_targets.exp() - 1)
    if slope is not None:
        gradient *= slope
    return -at_targets[:, 0], gradient.to(dtype)


def squash(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(logits / softcap), in float32 or better."""
    return softcap * torch.tanh(
        logits.to(torch.promote_types(logits.dtype, torch.float32)) / softcap
    )


class ChunkedHead:
    """Lets a model's LM head return losses instead of logits while `targets` are set.

    Args:
        head: the output embedding (`model.get_output_embeddings()`), a linear layer; its forward is
            replaced on the instance, its parameters and hooks are untouched.
        logits_per_chunk: numbers in one chunk of logits; None: what suits the device.
        compiled: the model is compiled: losses are made in one piece that the compiler fuses.
        softcapped: configuration of a model whose forward squashes logits by its
            `final_logit_softcapping`. It is None while the head returns losses, and the head
            squashes in its place, in float32.
    """

    def __init__(
        self,
        head: torch.nn.Linear,
        logits_per_chunk: int | None = None,
        *,
        compiled: bool = False,
        softcapped: PretrainedConfig | None = None,
    ) -> None:
        self.head = head
        self.logits_per_chunk = logits_per_chunk
        self.compiled = compiled
        self.config = softcapped
        self.softcap: float | None = (
            None if softcapped is None else softcapped.final_logit_softcapping
        )
        self.targets: torch.Tensor | None = None
        self._plain_forward = head.forward
        head.forward = self._forward  # type: ignore[method-assign, assignment]  # on the instance, on purpose

    def tokens_at_once(self, hidden: torch.Tensor) -> int:
        """Rows of one chunk of logits."""
        numbers = self.logits_per_chunk
        if numbers is None and hidden.device.type == "cpu":
            rows = min(ROWS_OF_A_PRODUCT, LOGITS_PER_CHUNK // self.head.out_features)
            numbers = max(LOGITS_PER_CHUNK_ON_CPU, rows * self.head.out_features)
        elif numbers is None:
            numbers = LOGITS_PER_CHUNK * (
                TRAINED_HEAD_CHUNKS if self.head.weight.requires_grad else 1
            )
        return max(1, numbers // self.head.out_features)

    def chunks(
        self, hidden: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of `hidden` whose logits are made at once, in `dtype`, and where they are."""
        done = 0
        # Chunks of one size: a short last one would take as long as a whole.
        for rows in hidden.tensor_split(
            max(1, math.ceil(len(hidden) / self.tokens_at_once(hidden)))
        ):
            part = slice(done, done + len(rows))
            yield part, rows.to(dtype)
            done = part.stop

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.targets is None:
            return self._plain_forward(hidden)
        hidden = hidden.flatten(0, -2)  # (1, n, width) packed, (S, T, width) windows
        weight, bias = self.head.weight, self.head.bias
        # Compiled, the softmax is fused with what is around it; chunks would cut the graph in
        # pieces.
        if self.compiled:
            logits = linear(hidden, weight, bias)
            return token_losses(
                logits if self.softcap is None else squash(logits, self.softcap), self.targets
            )
        kind = hidden.device.type
        # The matrix products run in the compute dtype (tensor cores), only the softmax in float32.
        # Autocast would cast the weights for each of them.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        with torch.autocast(kind, enabled=False):
            return self.losses(hidden, self.targets, dtype)

    def losses(
        self, hidden: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """hidden `(n, width)`, targets `(n,)` -> losses `(n,)`, with matrix products in `dtype`."""
        weight, bias = self.head.weight, self.head.bias
        losses: torch.Tensor = HeadLosses.apply(
            hidden, weight, bias, targets, self, dtype, torch.is_grad_enabled()
        )
        return losses

    def scores(self, targets: int) -> bool:
        """Whether the losses of so many targets are the head's to return: an empty microbatch has
        logits to be zero.
        """
        return targets > 0

    @contextmanager
    def scoring(self, targets: torch.Tensor) -> Iterator[None]:
        self.targets = targets
        if self.config is not None:
            self.config.final_logit_softcapping = None
        try:
            yield
        finally:
            self.targets = None
            if self.config is not None:
                self.config.final_logit_softcapping = self.softcap


def make_chunked_head(
    model: Any, head_class: type[ChunkedHead] = ChunkedHead, *, compiled: bool = False
) -> ChunkedHead | None:
    """A chunked head for a transformers model (bare or inside a peft one); None where it would
    change the loss.
    """
    head = model.get_output_embeddings()
    # quantised, say, or with LoRA on it
    if not chooses_logits(model) or type(head) is not torch.nn.Linear:
        return None
    # These squash logits after the head, which the chunked head can do in its place.
    if model.config.model_type in SOFTCAPPED_MODEL_TYPES:
        squashes = model.config.final_logit_softcapping is not None
        return head_class(head, compiled=compiled, softcapped=model.config if squashes else None)
    return head_class(head, compiled=compiled) if _returns_what_the_head_does(model) else None


def _returns_what_the_head_does(model: Any) -> bool:
    """Whether logits leave a forward as they come from the head: Cohere, Granite, Falcon-H1 and
    others scale them.

    Read off its source: configurations have a dozen names for it. Of transformers' models, 122 say
    `logits = self.lm_head(hidden_states)` and nothing more about them.
    """
    found = re.findall(r"^\s*(?:lm_)?logits = (.*)$", getsource(_forward_of(model)), re.MULTILINE)
    return (
        len(found) == 1
        and re.fullmatch(r"self\.\w+\([\w.()=]*\)(\.float\(\)|\.contiguous\(\))?", found[0])
        is not None
    )


def chooses_logits(model: Any) -> bool:
    """Whether a model's forward takes positions or a mask as `logits_to_keep` (bare or inside a
    peft one).

    Models of transformers do, but for a few (modeling_utils.slice_logits_to_keep: positions keep
    the batch's axis, a mask takes it away); code that came with a model mostly does not, or knows a
    number of last tokens only.
    """
    forward = _forward_of(model)
    return (
        forward.__module__.startswith("transformers.")
        and "logits_to_keep" in signature(forward).parameters
    )


def _forward_of(model: Any) -> Any:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).forward


def let_choose_logits(model: torch.nn.Module) -> None:
    """Let a model's forward take `logits_to_keep` as ours is where it does not: all logits are
    made, and those kept.

    It needs the memory for all of them.
    """
    if chooses_logits(model):
        return
    kept: list[torch.Tensor | None] = []

    def take(
        module: torch.nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        kept[:] = [inputs.pop("logits_to_keep", None)]
        return args, inputs

    def choose(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if kept and kept[0] is not None:
            mask = kept[0].dtype == torch.bool
            output.logits = output.logits[kept[0]] if mask else output.logits[:, kept[0]]
        return output

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(choose)


def microbatch_losses(
    model: torch.nn.Module,
    microbatch: Microbatch,
    device: torch.device,
    head: ChunkedHead | None = None,
) -> torch.Tensor:
    """Loss of each target of one microbatch: float32 `(n,)`; empty, but part of the graph, where it
    has no targets.
    """
    microbatch = microbatch.to(device)
    inputs, targets = microbatch.model_inputs(device), microbatch.targets
    # Through `logits`, because that is what the model's forward returns of its head.
    if head is not None and head.scores(len(targets)):
        with head.scoring(targets):
            return model(**inputs).logits
    logits = model(**inputs).logits
    if len(targets) == 0:
        # Nothing to learn, but every parameter must take part, or DDP and ZeRO wait for gradients
        # that never come.
        return logits.float().sum(dim=-1).flatten()
    return token_losses(logits.flatten(0, -2), targets)


def sums_by_group(losses: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
    """Summed losses of each group's targets: `(count,)`, in the dtype of the losses.

    Args:
        losses: `(n,)`.
        groups: `(n,)`, of each target; -1 for none, which belongs to no sum.
    """
    # torch sums pairwise. index_add_ adds one by one, which in float32 drifts with the number of
    # targets, and on CUDA in any order.
    numbers = torch.arange(count, device=losses.device)
    belongs = groups.to(losses.device) == numbers[:, None]
    return torch.where(belongs, losses, losses.new_zeros(())).sum(dim=1)
