"""What a run on preferences minimizes, and what it logs: the losses, and KTO's reference point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature

import numpy as np
import torch

from finetune.batching.collate import Answers, Microbatch
from finetune.batching.steps import (
    AnswerBatches,
    AnswerSource,
    BatchSource,
    InOrder,
    LossGroups,
    StepBatch,
)
from finetune.config.preference_config import PreferenceConfig
from finetune.modeling import preference_loss as losses_of
from finetune.modeling.loss import ChunkedHead, microbatch_losses
from finetune.modeling.objective import Scored
from finetune.runtime import device as devices
from finetune.runtime.parent_watchdog import progress
from finetune.training.control import Control
from finetune.training.preferences.reference import Reference, log_probabilities

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

    _token_weight = 0.0  # of a chosen answer's token relative to a pair, in the step in progress
    _reference_point = 0.0  # of the step in progress

    def sums(self, groups: int) -> int:
        return len(SUMS) * (1 + groups)

    def denominator(self, batch: StepBatch) -> int:
        return len(batch.indices)

    def begin(
        self, model: torch.nn.Module, batch: StepBatch, microbatches: Sequence[Microbatch]
    ) -> None:
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
        """Score targets' losses `(n,)` with the reference's log-probabilities `(documents,)`."""
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
        """Return all `SUMS` for pairs, each `(pairs,)`."""
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
        """Return all `SUMS` for answers with labels, each `(samples,)`."""
        config, ratios = self.config, log_probs - reference
        point = torch.full_like(ratios, self._reference_point, requires_grad=False)
        good = answers.labels == 1
        weights = {
            "desirable_weight": config.desirable_weight,
            "undesirable_weight": config.undesirable_weight,
        }
        loss = losses_of.kto_losses(ratios, good, point, beta=config.beta, **weights)
        nothing = torch.zeros_like(ratios)
        found = {
            "loss": loss,
            "right": nothing,
            "chosen_tokens": nothing,
            "reference_point": point,
        }
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
    """Return what is logged of sums over samples: means over all, and by difficulty and source."""
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


# ------------------------------------------------------------------ KTO's reference point


def mismatched_pairs(indices: np.ndarray, total: int) -> np.ndarray:
    """int64 `(batch,)`: each sample of a global batch with the one after it, of the last with the
    first.

    Args:
        total: samples there are; a pair's number is that of the prompt's sample x total + that of
            the answer's.
    """
    return indices.astype(np.int64) * total + np.roll(indices, -1)


def all_mismatched_pairs(batches: BatchSource, total: int) -> np.ndarray:
    """int64, sorted: the pairs of all steps, each once."""
    steps = map(batches.indices, range(batches.total_steps))
    found = [mismatched_pairs(indices, total) for indices in steps if len(indices) > 1]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *found]))


def mismatched_microbatches(
    like: AnswerBatches,
    samples: AnswerSource,
    pairs: np.ndarray,
    numbers: np.ndarray,
    cutoff_len: int,
) -> Iterator[Microbatch]:
    """This rank's microbatches of prompts with answers to others, cut as those of the run.

    Args:
        numbers: int `(pairs,)`, what their answers are numbered by.
        cutoff_len: maximum tokens of a prompt with its answer.
    """
    mismatched = Mismatched(samples, pairs, cutoff_len)
    everything = np.arange(len(pairs))
    execution = like.execution
    if execution.token_budget is not None:
        # A long prompt with a long answer may need more room than any sample of the data.
        longest = int(mismatched.lengths.max())
        execution = replace(execution, token_budget=max(execution.token_budget, longest))
    batches = AnswerBatches(
        mismatched,
        InOrder(len(mismatched), len(mismatched)),
        execution,
        difficulty_ids=np.full(len(mismatched), -1),
        groups=LossGroups(),
        pad_token_id=like.pad_token_id,
    )
    named = torch.from_numpy(numbers)
    for microbatch in batches.microbatches(everything, execution):
        assert microbatch.answers is not None
        yield replace(
            microbatch,
            answers=replace(microbatch.answers, samples=named[microbatch.answers.samples]),
        )


class Mismatched:
    """Prompts with the answers of other samples, by `mismatched_pairs`.

    A document has at most `cutoff_len` tokens, as those of the data: of a longer one the answer
    loses its end.
    """

    def __init__(self, samples: AnswerSource, pairs: np.ndarray, cutoff_len: int) -> None:
        prompts, answers = np.divmod(pairs, len(samples))
        known = {
            index: samples[index]
            for index in np.unique(np.concatenate([prompts, answers])).tolist()
        }
        # Where the answer begins, as far as it is trained.
        begins = {index: int(supervised.argmax()) for index, (_, supervised) in known.items()}
        self._documents = []
        for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
            (ids, _), (other_ids, other_supervised) = known[prompt], known[answer]
            parts = (ids[: begins[prompt]], other_ids[begins[answer] :])
            masks = (np.zeros(begins[prompt], dtype=bool), other_supervised[begins[answer] :])
            self._documents.append(
                (np.concatenate(parts)[:cutoff_len], np.concatenate(masks)[:cutoff_len])
            )
        self.lengths = np.array([len(ids) for ids, _ in self._documents], dtype=np.int32)
        self.supervised_counts = np.array(
            [mask.sum() for _, mask in self._documents], dtype=np.int32
        )
        self.record_ids = samples.record_ids[prompts]
        self.labels = samples.labels[prompts]
        self.first_lengths = self.first_supervised = np.zeros_like(self.lengths)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._documents[index]


@dataclass(frozen=True)
class ReferencePoint:
    """z0 of arXiv 2402.01306, section 4.1; the same on every rank, however microbatches are cut.

    Attributes:
        pairs: those that the reference knows, by its numbers; None where it is asked about any.
    """

    step_batches: AnswerBatches
    reference: Reference
    head: ChunkedHead | None
    control: Control
    device: torch.device
    cutoff_len: int
    pairs: np.ndarray | None = None

    def of(self, model: torch.nn.Module, samples: AnswerSource, indices: np.ndarray) -> float:
        """Return the value for a global batch; 0 if it has one sample. Every rank must call it.

        Raises:
            torch.OutOfMemoryError: on every rank, where memory did not suffice on one.
        """
        if len(indices) < 2:
            return 0.0
        found, error = 0.0, ""
        try:
            found = self._sum(model, samples, indices)
        except Exception as caught:  # devices raise their own types
            if not devices.is_out_of_memory(caught):
                raise
            error = str(caught).splitlines()[0]
        # The others must be notified here: they would wait for this rank's part of the mean.
        total, failed = self.control.sum([found, float(bool(error))])
        if failed:
            raise torch.OutOfMemoryError(error or "out of memory on another rank")
        return max(0.0, total / len(indices))

    def _sum(self, model: torch.nn.Module, samples: AnswerSource, indices: np.ndarray) -> float:
        """Return the sum over this rank's part of the global batch."""
        pairs = mismatched_pairs(indices, len(samples))
        numbers = (
            np.arange(len(pairs)) if self.pairs is None else np.searchsorted(self.pairs, pairs)
        )
        total = torch.zeros((), device=self.device)
        for microbatch in mismatched_microbatches(
            self.step_batches, samples, pairs, numbers, self.cutoff_len
        ):
            progress.mark()
            here = microbatch.to(self.device)
            now = log_probabilities(model, here, self.head)
            total += (now - self.reference.log_probabilities(model, here, self.head)).sum()
        return float(total)
