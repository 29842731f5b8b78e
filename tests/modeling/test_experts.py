"""Mixtures of experts: the balancing loss and the counts are those of the whole batch, however it
is cut, and agree with transformers on one forward.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import CPU, as_trained, documents, make_microbatch, tiny_config

from finetune.modeling.experts import MixtureLoss, balance_coefficient

# Those whose configuration can ask for the loss.
TYPES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "ernie4_5_moe", "minimax_m2")
COEFFICIENT = 0.7


def model_of(kind: str) -> Any:
    config = tiny_config(kind)
    config.output_router_logits, config.router_aux_loss_coef = True, COEFFICIENT
    model = as_trained(config).double().requires_grad_(True)
    model.set_experts_implementation("eager")  # the grouped product takes no float64
    return model


def loss_and_gradients(model: Any, objective: Any, cut: list[list[Any]], packing: bool):
    """Of a global batch, a list of microbatches, each a list of documents."""
    microbatches = [make_microbatch(part, packing=packing) for part in cut]
    targets = sum(len(microbatch.targets) for microbatch in microbatches)
    model.zero_grad()
    objective.begin(model, SimpleNamespace(supervised_tokens=targets), microbatches)
    scored = [objective.score(model, each, None, groups=1) for each in microbatches]
    total = torch.stack([each.total for each in scored]).sum() / targets
    total.backward()
    sums = torch.stack([each.sums for each in scored]).sum(0)
    return total.detach(), {n: p.grad for n, p in model.named_parameters()}, sums


@pytest.mark.parametrize("kind", TYPES)
def test_it_is_transformers_loss_and_does_not_depend_on_microbatches(kind):
    # As in a run: every sample has targets.
    docs, model = [doc for doc in documents() if len(doc) > 1], model_of(kind)
    objective = MixtureLoss(model, balance_coefficient(model.config))
    whole, expected, sums = loss_and_gradients(model, objective, [docs], False)
    inputs = make_microbatch(docs, packing=False).model_inputs(CPU)
    longest = max(map(len, docs))
    mask = torch.tensor([[n < len(doc) for n in range(longest)] for doc in docs])
    theirs = model(**inputs, attention_mask=mask.long()).aux_loss
    assert objective.facts(sums.tolist(), 1)["balance_loss"] == pytest.approx(
        COEFFICIENT * theirs.item(), rel=1e-5
    )
    for cut in ([docs[:1], docs[1:]], [[doc] for doc in docs]):
        for packing in (True, False):
            total, gradients, counts = loss_and_gradients(model, objective, cut, packing)
            assert torch.equal(counts[1:-1], sums[1:-1])
            assert total.item() == pytest.approx(whole.item(), rel=1e-6)  # routers round to float32
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
