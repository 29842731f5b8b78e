"""What a run on preferences minimises, and what it logs of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature

import numpy as np
import torch

from finetune.batching.collate import Answers, Microbatch
from finetune.batching.steps import AnswerSource, LossGroups, StepBatch
from finetune.config.preference_config import PreferenceConfig
from finetune.modeling import preference_loss as losses_of
from finetune.modeling.loss import ChunkedHead, microbatch_losses
from finetune.modeling.objective import Scored
from finetune.training.preferences.reference import Reference
from finetune.training.preferences.reference_point import ReferencePoint

# What is added up, over all samples and over those of each group. Of a pair both answers count; of
# a record with a label its one answer is a chosen one (good) or a rejected one (bad).
SUMS = (
    "loss",  # without the cross-entropy that --sft-weight adds
    "right",  # pairs whose chosen answer has the higher reward
    "chosen",  # answers
    "rejected",
    "chosen_reward",
    "rejected_reward",
    "chosen_logprob",
    "rejected_logprob",
    "chosen_tokens",
    "reference_point",  # KTO's, once a sample
)


@dataclass
class PreferenceObjective:
    """The mean loss of the global batch's samples, and `sft_weight` times the mean loss of its
    chosen answers' tokens.

    Attributes:
        samples: those of the batches that are trained on.
        reference: of the losses that compare with the model before the run.
        point: of KTO.
    """

    config: PreferenceConfig
    samples: AnswerSource
    reference: Reference | None
    point: ReferencePoint | None = None

    _token_weight = 0.0  # of a chosen answer's token beside a pair, in the step under way
    _reference_point = 0.0  # of the step under way

    def sums(self, groups: int) -> int:
        return len(SUMS) * (1 + groups)

    def denominator(self, batch: StepBatch) -> int:
        return len(batch.indices)

    def begin(self, model: torch.nn.Module, batch: StepBatch) -> None:
        if self.config.sft_weight:
            tokens = int(self.samples.first_supervised[batch.indices].sum())
            self._token_weight = self.config.sft_weight * len(batch.indices) / tokens
        if self.point is not None:
            self._reference_point = self.point.of(model, self.samples, batch.indices)

    def score(
        self,
        model: torch.nn.Module,
        microbatch: Microbatch,
        head: ChunkedHead | None,
        *,
        groups: int,
    ) -> Scored:
        # The reference first: its activations are gone before those that the backward pass needs
        # are made.
        reference = (
            None
            if self.reference is None
            else self.reference.log_probabilities(model, microbatch, head)
        )
        losses = microbatch_losses(model, microbatch, microbatch.input_ids.device, head)
        return self.scored(losses, microbatch.answers, reference, groups=groups)

    def scored(
        self,
        losses: torch.Tensor,
        answers: Answers | None,
        reference: torch.Tensor | None,
        *,
        groups: int,
    ) -> Scored:
        """Of the targets' losses `(n,)` and the reference's log-probabilities `(documents,)`."""
        assert answers is not None
        log_probs = -losses_of.document_sums(losses, answers.targets)
        if self.config.loss == "kto":
            assert reference is not None, "kto compares with a reference"
            found = self._labelled(log_probs, answers, reference)
        else:
            found = self._compared(log_probs, answers.counts, reference)
        total = found["loss"].sum()
        if self._token_weight:
            total = total - self._token_weight * found["chosen_logprob"].sum()
        table = torch.stack([found[name].detach().to(torch.float32) for name in SUMS])  # (SUMS, S)
        numbers = torch.arange(-1, groups, device=losses.device)
        # The first row is all samples; a sample without a group (-1) is in no other.
        belongs = (answers.groups == numbers[:, None]) | (numbers[:, None] < 0)
        # (1 + groups, SUMS)
        sums = torch.where(belongs[:, None, :], table, table.new_zeros(())).sum(dim=-1)
        return Scored(total, sums.flatten())

    def _compared(
        self, log_probs: torch.Tensor, counts: torch.Tensor, reference: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Of pairs: every one of `SUMS`, `(pairs,)`."""
        config = self.config
        chosen, rejected = log_probs[0::2], log_probs[1::2]
        means = log_probs / counts
        if reference is None:
            good, bad = config.beta * means[0::2], config.beta * means[1::2]
        else:
            ratios = config.beta * (log_probs - reference)
            good, bad = ratios[0::2], ratios[1::2]
        one = torch.ones_like(chosen)
        return {
            "loss": self._losses(log_probs, counts, reference),
            "right": (good > bad).to(one.dtype),
            "chosen": one,
            "rejected": one,
            "chosen_reward": good,
            "rejected_reward": bad,
            "chosen_logprob": chosen,
            "rejected_logprob": rejected,
            "chosen_tokens": counts[0::2].to(one.dtype),
            "reference_point": torch.zeros_like(chosen),
        }

    def _labelled(
        self, log_probs: torch.Tensor, answers: Answers, reference: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The same of answers with labels, `(samples,)`."""
        config, ratios = self.config, log_probs - reference
        point = torch.full_like(ratios, self._reference_point, requires_grad=False)
        good = answers.labels == 1
        weights = {
            "desirable_weight": config.desirable_weight,
            "undesirable_weight": config.undesirable_weight,
        }
        loss = losses_of.kto_losses(ratios, good, point, beta=config.beta, **weights)
        nothing = torch.zeros_like(ratios)
        found = {"loss": loss, "right": nothing, "chosen_tokens": nothing, "reference_point": point}
        for name, own in (("chosen", good), ("rejected", ~good)):
            found[name] = own.to(ratios.dtype)
            found[f"{name}_reward"] = torch.where(own, config.beta * ratios, nothing)
            found[f"{name}_logprob"] = torch.where(own, log_probs, nothing)
        return found

    def _losses(
        self, log_probs: torch.Tensor, counts: torch.Tensor, reference: torch.Tensor | None
    ) -> torch.Tensor:
        """`(pairs,)`."""
        loss = losses_of.PAIR_LOSSES[self.config.loss]
        parts = [log_probs] if reference is None else [log_probs, reference]
        if self.config.by_token:
            parts = [part / counts for part in parts]
        pairs = (answers for part in parts for answers in (part[0::2], part[1::2]))
        return loss(*pairs, **{name: getattr(self.config, name) for name in _settings_of(loss)})


@cache
def _settings_of(loss: Callable[..., torch.Tensor]) -> tuple[str, ...]:
    return tuple(
        name for name, one in signature(loss).parameters.items() if one.kind is one.KEYWORD_ONLY
    )


def preference_facts(
    sums: Sequence[float], groups: LossGroups, config: PreferenceConfig
) -> dict[str, float]:
    """What the log says of sums over samples: means over all of them, and over those of each
    difficulty and source.
    """
    table = np.asarray(sums).reshape(1 + len(groups), len(SUMS))
    facts = _means(dict(zip(SUMS, table[0].tolist(), strict=True)), config)
    for prefix, by in (("", groups.by_difficulty), ("source_", groups.by_source)):
        columns = {name: by(table[1:, number].tolist()) for number, name in enumerate(SUMS)}
        for one in columns["loss"]:
            means = _means({name: column[one] for name, column in columns.items()}, config)
            facts |= {
                f"{prefix}{name}/{one}": means[name]
                for name in ("loss", "accuracy", "margin")
                if name in means
            }
    return facts


def _means(sums: dict[str, float], config: PreferenceConfig) -> dict[str, float]:
    """Nothing where there are no samples."""
    labelled, chosen, rejected = config.loss == "kto", sums["chosen"], sums["rejected"]
    samples = chosen + rejected if labelled else chosen
    if not samples:
        return {}
    means = {"loss": sums["loss"] / samples}
    if config.sft_weight:
        means["loss"] -= config.sft_weight * sums["chosen_logprob"] / sums["chosen_tokens"]
    if labelled:
        means["reference_point"] = sums["reference_point"] / samples
    else:
        means["accuracy"] = sums["right"] / samples
    for name, count in (("chosen", chosen), ("rejected", rejected)):
        if count:
            means[f"{name}_reward"] = sums[f"{name}_reward"] / count
            means[f"{name}_logprob"] = sums[f"{name}_logprob"] / count
    if chosen and rejected:
        means["margin"] = means["chosen_reward"] - means["rejected_reward"]
    return means
