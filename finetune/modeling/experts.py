"""Mixtures of experts: how many tokens each expert gets, and the loss that balances experts.

The balancing loss of Switch multiplies two means over tokens: the share of tokens that an expert
gets, and the probability that the router gives it. transformers takes both means over a forward, so
its loss depends on how a batch is cut into microbatches and over devices. Here both are means over
the global batch: a forward of the whole batch without gradients counts the tokens of each expert,
then the second mean is a sum over microbatches. This costs one more forward in each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.batching.collate import Microbatch
from finetune.batching.steps import StepBatch
from finetune.modeling.loss import ChunkedHead
from finetune.modeling.objective import Scored, TokenLoss
from finetune.runtime.device import is_out_of_memory


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Return the experts of each layer, in order: the modules of transformers'
    `use_experts_implementation`, called with hidden states, experts of each token and weights.
    """
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def find_routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the router of each layer, and which of its results are the logits `(tokens, experts)`.

    transformers names them in `can_record_outputs`.
    """
    kinds = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            named = module.can_record_outputs.get("router_logits", ())
            for recorder in named if isinstance(named, list | tuple) else [named]:
                kinds[recorder.target_class] = recorder.index
    return [
        (module, index)
        for module in model.modules()
        for kind, index in kinds.items()
        if type(module) is kind
    ]


def balance_coefficient(config: Any) -> float:
    """Return the weight of the balancing loss that a model's configuration asks for; 0 for none."""
    config = config.get_text_config()
    asked = getattr(config, "output_router_logits", False)
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if asked else 0.0


class MixtureLoss(TokenLoss):
    """The token loss of a mixture of experts, with the balancing loss if the model's configuration
    asks for it; the sums also have the tokens of each expert.

    Args:
        model: bare or inside a peft one. Hooks are added to its experts and routers.
        coefficient: of the balancing loss; 0: only tokens are counted.

    Source: Fedus et al. 2021 (arXiv 2101.03961), equations 4 to 6, over all layers together as in
        transformers' `load_balancing_loss_func`; means over the global batch as in Qiu et al. 2025
        (arXiv 2501.11873).
    """

    def __init__(self, model: nn.Module, coefficient: float) -> None:
        self.coefficient = coefficient
        experts = find_experts(model)
        self.layers = len(experts)
        self.experts = max(int(module.num_experts) for module in experts)  # type: ignore[arg-type]
        for layer, module in enumerate(experts):
            module.register_forward_pre_hook(partial(self._count, layer), with_kwargs=True)
        if coefficient:
            for module, index in find_routers(model):
                module.register_forward_hook(partial(self._add_probabilities, index))
        self._chosen = 1  # experts of a token
        self._real: Tensor | None = None  # float32 `(tokens,)`: 0 for padding, else 1
        self._watching = False
        self._counts = torch.zeros(self.layers, self.experts)
        self._probabilities: list[Tensor] = []
        self._of_batch = torch.zeros(self.experts)  # tokens of each expert, over all layers
        self._targets = 1

    def sums(self, groups: int) -> int:
        return groups + self.layers * self.experts + 1

    def begin(self, model: nn.Module, batch: StepBatch, microbatches: Sequence[Microbatch]) -> None:
        if not self.coefficient:
            return
        self._targets = batch.supervised_tokens
        counts = torch.zeros(self.experts, device=next(model.parameters()).device)
        failure = None
        model.eval()
        try:
            with torch.no_grad():
                for microbatch in microbatches:
                    counts += self._counts_of(model, microbatch.to(counts.device))
        except Exception as error:  # each device backend raises its own type
            # The other ranks wait in the sum. They learn of it after their microbatches.
            if not is_out_of_memory(error):
                raise
            failure = error
        finally:
            model.train()
        if dist.is_initialized():
            dist.all_reduce(counts)
        if failure is not None:
            raise failure
        self._of_batch = counts

    def _counts_of(self, model: nn.Module, microbatch: Microbatch) -> Tensor:
        device = microbatch.input_ids.device
        inputs = microbatch.model_inputs(device)
        inputs["logits_to_keep"] = torch.zeros(1, dtype=torch.long, device=device)  # one is least
        with self._watched(microbatch):
            model(**inputs)
        return self._counts.sum(0)

    def score(
        self,
        model: nn.Module,
        microbatch: Microbatch,
        head: ChunkedHead | None,
        *,
        groups: int,
    ) -> Scored:
        with self._watched(microbatch):
            scored = super().score(model, microbatch, head, groups=groups)
        total, balance = scored.total, torch.zeros(1, device=scored.sums.device)
        if self.coefficient:
            part = self._balance()
            total = total + part * self._targets  # the executor divides by them
            balance = part.detach().to(scored.sums.dtype)[None]
        return Scored(total, torch.cat([scored.sums, self._counts.flatten(), balance]))

    def _balance(self) -> Tensor:
        """Return this microbatch's part of the balancing loss of the global batch, in the graph."""
        received = torch.stack(self._probabilities).sum(0)
        rows = self._of_batch.sum() / self._chosen  # tokens times layers
        return self.coefficient * self.experts * (self._of_batch * received).sum() / rows.square()

    # ------------------------------------------------------------------ what a forward shows

    @contextmanager
    def _watched(self, microbatch: Microbatch) -> Iterator[None]:
        """Collect what experts and routers see in a forward of the microbatch."""
        self._real = real_tokens(microbatch)
        self._counts = torch.zeros(self.layers, self.experts, device=self._real.device)
        self._probabilities = []
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    def _count(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if not self._watching:
            return
        assert self._real is not None
        chosen = args[1]  # int64 `(tokens, experts of a token)`
        self._chosen = chosen.shape[-1]
        weight = self._real.repeat_interleave(self._chosen)
        self._counts[layer].scatter_add_(0, chosen.flatten(), weight)

    def _add_probabilities(
        self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any
    ) -> None:
        # With gradient checkpointing the router runs again in the backward pass. It must then save
        # the same tensors, and so compute the same, although nothing is collected.
        if self._real is None or not (self._watching or torch.is_grad_enabled()):
            return
        logits = output[index]
        logits = logits.reshape(-1, logits.shape[-1])
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        received = (probabilities * self._real[:, None]).sum(0)
        if self._watching:
            self._probabilities.append(received)

    # ------------------------------------------------------------------ the log

    def facts(self, sums: Sequence[float], steps: int) -> dict[str, Any]:
        """Return what a line of the log has about experts.

        Args:
            sums: of all ranks, since the line before.
            steps: since then.
        """
        *counts, balance = sums[-self.layers * self.experts - 1 :]
        of_layers = torch.tensor(counts, dtype=torch.float64).view(self.layers, self.experts)
        load = of_layers.max(1).values / of_layers.mean(1)
        facts = {
            "expert_load": [round(value, 2) for value in load.tolist()],
            "experts_idle": int((of_layers == 0).sum()),
        }
        return facts | ({"balance_loss": balance / max(1, steps)} if self.coefficient else {})


def real_tokens(microbatch: Microbatch) -> Tensor:
    """Return 1 for each token of a microbatch, 0 for padding: float32 `(tokens,)`, row by row."""
    positions = microbatch.position_ids
    if len(microbatch.targets) == 0:  # the empty microbatch
        return torch.zeros(positions.numel(), device=positions.device)
    if microbatch.document_lengths is not None:
        return torch.ones(positions.numel(), device=positions.device)
    columns = torch.arange(positions.shape[1], device=positions.device)
    # Padding has position 0, and so has the first token of a row.
    return ((positions > 0) | (columns == 0)).flatten().float()
