"""The loss: cross-entropy at supervised positions only, summed, so that the caller divides by the global denominator.

`forward(logits_to_keep=<positions or mask>)` makes the model compute logits only where the next token is a target. For a large
vocabulary even those do not fit: then the LM head itself returns the losses, chunk by chunk under checkpointing, so
that no more than one chunk of logits exists at a time, forward or backward. It happens inside the model's own forward,
so that the hooks of DeepSpeed, DDP and peft around it see an ordinary call, and a compiled model has the softmax in its
graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getsource, signature
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from finetune.data.collate import Microbatch

# One chunk of logits holds about this many numbers (float32: 128 MiB). Microbatches with fewer are not chunked.
LOGITS_PER_CHUNK = 32 * 2**20
# Their forward squashes logits by `config.final_logit_softcapping`.
SOFTCAPPED_MODEL_TYPES = ("nanochat", "gemma2", "gemma3_text")


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each target, in float32 or better. logits `(n, vocabulary)`, targets `(n,)` -> `(n,)`."""
    # Not .float(): it would round float64 logits, in which gradients are checked against the definition.
    precise = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(precise), targets, reduction="none")


class ChunkedHead:
    """Lets a model's LM head return losses instead of logits while `targets` are set.

    Args:
        head: the output embedding (`model.get_output_embeddings()`), a linear layer without bias; its forward is
            replaced on the instance, its parameters and hooks are untouched.
        logits_per_chunk: numbers in one chunk of logits.
        compiled: the model is compiled: it returns losses of microbatches of every size, in one piece that the
            compiler fuses.
        softcapped: configuration of a model whose forward squashes logits by its `final_logit_softcapping`. It is
            None while the head returns losses, and the head squashes in its place, in float32.
    """

    def __init__(
        self,
        head: torch.nn.Linear,
        logits_per_chunk: int = LOGITS_PER_CHUNK,
        *,
        compiled: bool = False,
        softcapped: PretrainedConfig | None = None,
    ) -> None:
        self.head, self.compiled = head, compiled
        self.config = softcapped
        self.softcap: float | None = None if softcapped is None else softcapped.final_logit_softcapping
        self.tokens_per_chunk = max(1, logits_per_chunk // head.out_features)
        self.targets: torch.Tensor | None = None
        self._plain_forward = head.forward
        head.forward = self._forward  # type: ignore[method-assign, assignment]  # on the instance, on purpose

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.targets is None:
            return self._plain_forward(hidden)
        hidden = hidden.flatten(0, -2)  # microbatches of windows keep their shape, (S, T, width)
        # Compiled, the softmax is fused with what is around it; checkpointing would cut the graph in pieces.
        if self.compiled:
            return self._chunk(hidden, self.targets)
        chunks = zip(hidden.split(self.tokens_per_chunk), self.targets.split(self.tokens_per_chunk), strict=True)
        # The head's matrix product runs in the model's dtype (tensor cores), only the softmax in float32.
        losses = [checkpoint(self._chunk, h, t, use_reentrant=False) for h, t in chunks]
        return torch.cat(losses)

    def _chunk(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, self.head.weight, self.head.bias)
        if self.softcap is not None:
            precise = torch.promote_types(logits.dtype, torch.float32)
            logits = self.softcap * torch.tanh(logits.to(precise) / self.softcap)
        return token_losses(logits, targets)

    def scores(self, targets: int) -> bool:
        """Whether the losses of so many targets are the head's to return."""
        return targets > (0 if self.compiled else self.tokens_per_chunk)

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


def make_chunked_head(model: Any, *, compiled: bool = False) -> ChunkedHead | None:
    """A chunked head for a transformers model (bare or inside a peft one); None where it would change the loss."""
    head = model.get_output_embeddings()
    if not chooses_logits(model) or type(head) is not torch.nn.Linear:  # quantised, say, or with LoRA on it
        return None
    # These squash logits after the head, which the chunked head can do in its place.
    if model.config.model_type in SOFTCAPPED_MODEL_TYPES:
        squashes = model.config.final_logit_softcapping is not None
        return ChunkedHead(head, compiled=compiled, softcapped=model.config if squashes else None)
    return ChunkedHead(head, compiled=compiled) if _returns_what_the_head_does(model) else None


def _returns_what_the_head_does(model: Any) -> bool:
    """Whether logits leave a forward as they come from the head: Cohere, Granite, Falcon-H1 and others scale them.

    Read off its source: configurations have a dozen names for it. Of transformers' models, 122 say
    `logits = self.lm_head(hidden_states)` and nothing more about them.
    """
    found = re.findall(r"^\s*(?:lm_)?logits = (.*)$", getsource(_forward_of(model)), re.MULTILINE)
    return (
        len(found) == 1 and re.fullmatch(r"self\.\w+\([\w.()=]*\)(\.float\(\)|\.contiguous\(\))?", found[0]) is not None
    )


def chooses_logits(model: Any) -> bool:
    """Whether a model's forward takes positions or a mask as `logits_to_keep` (bare or inside a peft one).

    Models of transformers do, but for a few (modeling_utils.slice_logits_to_keep: positions keep the batch's axis, a
    mask takes it away); code that came with a model mostly does not, or knows a number of last tokens only.
    """
    forward = _forward_of(model)
    return forward.__module__.startswith("transformers.") and "logits_to_keep" in signature(forward).parameters


def _forward_of(model: Any) -> Any:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).forward


def let_choose_logits(model: torch.nn.Module) -> None:
    """Let a model's forward take `logits_to_keep` as ours is where it does not: all logits are made, and those kept.

    It needs the memory for all of them.
    """
    if chooses_logits(model):
        return
    kept: list[torch.Tensor | None] = []

    def take(module: torch.nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
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
    model: torch.nn.Module, microbatch: Microbatch, device: torch.device, head: ChunkedHead | None = None
) -> torch.Tensor:
    """Loss of each target of one microbatch: float32 `(n,)`; empty, but part of the graph, where it has no targets."""
    microbatch = microbatch.to(device)
    inputs, targets = microbatch.model_inputs(device), microbatch.targets
    # Through `logits`, because that is what the model's forward returns of its head.
    if head is not None and head.scores(len(targets)):
        with head.scoring(targets):
            return model(**inputs).logits
    logits = model(**inputs).logits
    if len(targets) == 0:
        # Nothing to learn, but every parameter must take part, or DDP and ZeRO wait for gradients that never come.
        return logits.float().sum(dim=-1).flatten()
    return token_losses(logits.flatten(0, -2), targets)


def sums_by_difficulty(losses: torch.Tensor, difficulties: torch.Tensor, count: int) -> torch.Tensor:
    """Summed losses of each difficulty's targets: `(count,)`, in the dtype of the losses.

    Args:
        losses: `(n,)`.
        difficulties: `(n,)`, of each target; -1 for none, which belongs to no sum.
    """
    # torch sums pairwise. index_add_ adds one by one, which in float32 drifts with the number of targets, and on CUDA
    # in any order.
    numbers = torch.arange(count, device=losses.device)
    belongs = difficulties.to(losses.device) == numbers[:, None]
    return torch.where(belongs, losses, losses.new_zeros(())).sum(dim=1)
