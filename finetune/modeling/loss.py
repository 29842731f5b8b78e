"""The loss: cross-entropy at supervised positions only, summed; the caller divides by the global
denominator.

`forward(logits_to_keep=<positions or mask>)` makes the model compute logits only where the next
token is a target. For a large vocabulary even those do not fit. Then the LM head itself returns the
losses, chunk by chunk, so that only one chunk of logits exists at a time. This happens inside the
model's own forward: the hooks of DeepSpeed, DDP and peft around it see an ordinary call, and a
compiled model has the softmax in its graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getsource, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear, log_softmax
from transformers import PretrainedConfig

from finetune.batching.collate import Microbatch

# Logits in one chunk: 512 MiB when held twice in float32. With a vocabulary of 152k that is 440
# rows, as many as a matrix product needs so that its time is not spent on reading the head's
# weights.
LOGITS_PER_CHUNK = 64 * 2**20
# A trained head adds to its weights' gradient once per chunk, which moves as many bytes as the
# logits of many rows: larger chunks.
TRAINED_HEAD_CHUNKS = 2
# glibc returns blocks of 32 MiB and more to the system immediately, and the system clears their
# pages again for the next chunk. So use smaller chunks, unless a product would have too few rows.
LOGITS_PER_CHUNK_ON_CPU = 7 * 2**20
ROWS_OF_A_PRODUCT = 440
# Their forward soft-caps logits by `config.final_logit_softcapping`.
SOFTCAPPED_MODEL_TYPES = ("nanochat", "gemma2", "gemma3_text")


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target, in float32 or better: logits `(n, vocabulary)`,
    targets `(n,)` -> `(n,)`.
    """
    # Not .float(): it would round the float64 logits with which tests check gradients.
    precise = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(precise), targets, reduction="none")


class HeadLosses(torch.autograd.Function):
    """Cross-entropy of a linear head's logits, with the gradients computed in the forward pass,
    chunk by chunk.

    So logits are computed once and never kept, and the weight's gradient is one buffer in float32.
    The gradient of a sum of losses is softmax minus one at the target; the upstream gradient
    multiplies it. The weight's gradient is a sum over targets already, so all targets must have the
    same upstream gradient, as they have in a sum. With different ones the result is NaN, which no
    step accepts. The host does not check: it would wait for the device.

    Source: Liger's fused linear cross-entropy (Hsu et al. 2024, arXiv 2410.10989), and Cut
    Cross-Entropy (Wijmans et al. 2024, arXiv 2411.09009).
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
        learning: bool,
    ) -> Tensor:
        """Return the losses, `(n,)` in float32 or better.

        Args:
            hidden: `(n, hidden_size)`; weight: `(vocabulary, hidden_size)`; bias: `(vocabulary,)`.
            targets: `(n,)`.
            head: gives the chunks and the softcap.
            dtype: of the matrix products.
            learning: whether gradients are needed at all.
        """
        precise = torch.promote_types(dtype, torch.float32)
        losses = torch.empty(targets.shape, dtype=precise, device=hidden.device)
        needed = [learning and need for need in ctx.needs_input_grad[:3]]
        grad_hidden = hidden.new_empty(hidden.shape, dtype=dtype) if needed[0] else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if needed[1] else None
        grad_bias = None
        if needed[2] and bias is not None:
            grad_bias = torch.zeros_like(bias, dtype=precise)
        matrix = weight.to(dtype)
        offset = None if bias is None else bias.to(dtype)
        for part, rows in head.chunks(hidden, dtype):
            losses[part], gradient = scored_chunk(
                rows, matrix, offset, targets[part], head.softcap, any(needed)
            )
            if grad_hidden is not None:
                torch.mm(gradient, matrix, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += gradient.T @ rows
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=precise)
            del gradient  # before the next chunk's logits are made
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *grads_of_head = ctx.saved_tensors
        first = upstream[0]
        factor = torch.where((upstream == first).all(), first, math.nan)
        found = [None if grad_hidden is None else grad_hidden * upstream[:, None]]
        found += [None if gradient is None else gradient.mul_(factor) for gradient in grads_of_head]
        cast = [
            None if g is None else g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return (*cast, None, None, None, None)


def scored_chunk(
    rows: Tensor,
    matrix: Tensor,
    offset: Tensor | None,
    targets: Tensor,
    softcap: float | None,
    learning: bool,
) -> tuple[Tensor, Tensor]:
    """Return the losses of a chunk, and the gradient of their sum by the logits in the compute
    dtype (meaningless without learning).

    At most two tensors of logits exist at a time, three with a softcap: see LOSS_BYTES_PER_LOGIT in
    planning.
    """
    logits = linear(rows, matrix, offset)
    dtype, precise = logits.dtype, torch.promote_types(logits.dtype, torch.float32)
    if softcap is not None:
        logits = soft_cap(logits, softcap)
    slope = None if softcap is None or not learning else 1 - (logits / softcap).square()
    # Not by log_softmax's dtype argument: it would keep the logits in addition to its float32 copy.
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


def soft_cap(logits: Tensor, softcap: float) -> Tensor:
    """Return softcap * tanh(logits / softcap), in float32 or better."""
    precise = torch.promote_types(logits.dtype, torch.float32)
    return softcap * torch.tanh(logits.to(precise) / softcap)


class ChunkedHead:
    """Lets a model's LM head return losses instead of logits while `targets` are set.

    Args:
        head: the output embedding (`model.get_output_embeddings()`), a linear layer; its forward is
            replaced on the instance, its parameters and hooks are untouched.
        logits_per_chunk: number of logits in one chunk; None: what suits the device.
        compiled: the model is compiled: losses are computed in one piece that the compiler fuses.
        softcapped: configuration of a model whose forward soft-caps logits by its
            `final_logit_softcapping`. This is None while the head returns losses: the head
            soft-caps instead, in float32.
    """

    def __init__(
        self,
        head: nn.Linear,
        logits_per_chunk: int | None = None,
        *,
        compiled: bool = False,
        softcapped: PretrainedConfig | None = None,
    ) -> None:
        self.head = head
        self.logits_per_chunk = logits_per_chunk
        self.compiled = compiled
        self.config = softcapped
        self.softcap: float | None = None
        if softcapped is not None:
            self.softcap = softcapped.final_logit_softcapping
        self.targets: Tensor | None = None
        self._plain_forward = head.forward
        head.forward = self._forward  # type: ignore[method-assign, assignment]  # on the instance, on purpose

    def tokens_at_once(self, hidden: Tensor) -> int:
        """Return the number of rows in one chunk of logits."""
        vocabulary = self.head.out_features
        logits = self.logits_per_chunk
        if logits is None and hidden.device.type == "cpu":
            rows = min(ROWS_OF_A_PRODUCT, LOGITS_PER_CHUNK // vocabulary)
            logits = max(LOGITS_PER_CHUNK_ON_CPU, rows * vocabulary)
        elif logits is None:
            logits = LOGITS_PER_CHUNK
            if self.head.weight.requires_grad:
                logits *= TRAINED_HEAD_CHUNKS
        return max(1, logits // vocabulary)

    def chunks(self, hidden: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield, for each chunk of logits, its position and its rows of `hidden` in `dtype`."""
        done = 0
        # Chunks of equal size: a short last one would take as long as a full one.
        count = max(1, math.ceil(len(hidden) / self.tokens_at_once(hidden)))
        for rows in hidden.tensor_split(count):
            part = slice(done, done + len(rows))
            yield part, rows.to(dtype)
            done = part.stop

    def _forward(self, hidden: Tensor) -> Tensor:
        if self.targets is None:
            return self._plain_forward(hidden)
        hidden = hidden.flatten(0, -2)  # (1, n, hidden_size) packed, (S, T, hidden_size) windows
        # The compiler fuses the softmax with the operations around it; chunks would break the
        # graph.
        if self.compiled:
            logits = linear(hidden, self.head.weight, self.head.bias)
            if self.softcap is not None:
                logits = soft_cap(logits, self.softcap)
            return token_losses(logits, self.targets)
        kind = hidden.device.type
        # The matrix products run in the compute dtype (tensor cores), only the softmax in float32.
        # Autocast would cast the weights for each of them.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        with torch.autocast(kind, enabled=False):
            return self.losses(hidden, self.targets, dtype)

    def losses(self, hidden: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """Return losses `(n,)` of hidden `(n, hidden_size)` and targets `(n,)`, with matrix
        products in `dtype`.
        """
        weight, bias = self.head.weight, self.head.bias
        losses: Tensor = HeadLosses.apply(
            hidden, weight, bias, targets, self, dtype, torch.is_grad_enabled()
        )
        return losses

    @contextmanager
    def scoring(self, targets: Tensor) -> Iterator[None]:
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
    """Return a chunked head for a transformers model (bare or inside a peft one); None if it would
    change the loss.
    """
    head = model.get_output_embeddings()
    # quantized, for example, or with LoRA on it
    if not chooses_logits(model) or type(head) is not nn.Linear:
        return None
    # These soft-cap logits after the head, which the chunked head can do instead.
    if model.config.model_type in SOFTCAPPED_MODEL_TYPES:
        has_softcap = model.config.final_logit_softcapping is not None
        return head_class(head, compiled=compiled, softcapped=model.config if has_softcap else None)
    return head_class(head, compiled=compiled) if _returns_heads_logits(model) else None


def _returns_heads_logits(model: Any) -> bool:
    """Return whether a forward leaves the head's logits unchanged: Cohere, Granite, Falcon-H1 and
    others scale them.

    This is read from the source: configurations have a dozen names for the scale. 122 of
    transformers' models have `logits = self.lm_head(hidden_states)` and nothing more about logits.
    """
    found = re.findall(r"^\s*(?:lm_)?logits = (.*)$", getsource(_forward_of(model)), re.MULTILINE)
    return (
        len(found) == 1
        and re.fullmatch(r"self\.\w+\([\w.()=]*\)(\.float\(\)|\.contiguous\(\))?", found[0])
        is not None
    )


def chooses_logits(model: Any) -> bool:
    """Return whether a model's forward takes positions or a mask as `logits_to_keep` (bare or
    inside a peft one).

    Nearly all models of transformers do (modeling_utils.slice_logits_to_keep: positions keep the
    batch axis, a mask removes it). Code that ships with a model mostly does not, or only takes a
    number of last tokens.
    """
    forward = _forward_of(model)
    return (
        forward.__module__.startswith("transformers.")
        and "logits_to_keep" in signature(forward).parameters
    )


def _forward_of(model: Any) -> Any:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).forward


def let_choose_logits(model: nn.Module) -> None:
    """Let a model's forward take `logits_to_keep` if it does not: it computes all logits, and
    returns the selected ones.

    This needs the memory for all logits.
    """
    if chooses_logits(model):
        return
    kept: list[Tensor | None] = []

    def take(
        module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        kept[:] = [inputs.pop("logits_to_keep", None)]
        return args, inputs

    def choose(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if kept and kept[0] is not None:
            mask = kept[0].dtype == torch.bool
            output.logits = output.logits[kept[0]] if mask else output.logits[:, kept[0]]
        return output

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(choose)


def microbatch_losses(
    model: nn.Module,
    microbatch: Microbatch,
    device: torch.device,
    head: ChunkedHead | None = None,
) -> Tensor:
    """Return the loss of each target in a microbatch, float32 `(n,)`.

    Without targets, the result is zeros that are part of the graph.
    """
    microbatch = microbatch.to(device)
    inputs = microbatch.model_inputs(device)
    targets = microbatch.targets
    # In `logits`, where the model's forward returns the result of its head.
    if head is not None and len(targets) > 0:
        with head.scoring(targets):
            return model(**inputs).logits
    logits = model(**inputs).logits
    if len(targets) == 0:
        # Nothing to learn, but every parameter must take part, or DDP and ZeRO would wait for
        # gradients forever.
        return logits.float().sum(dim=-1).flatten()
    return token_losses(logits.flatten(0, -2), targets)


def sums_by_group(losses: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sum the losses of each group's targets: `(count,)`, in the dtype of the losses.

    Args:
        losses: `(n,)`.
        groups: `(n,)`, of each target; -1 belongs to no sum.
        count: number of groups.
    """
    # torch sums pairwise. index_add_ adds one by one, which in float32 drifts with the number of
    # targets, and on CUDA in any order.
    numbers = torch.arange(count, device=losses.device)
    belongs = groups.to(losses.device) == numbers[:, None]
    return torch.where(belongs, losses, losses.new_zeros(())).sum(dim=1)
