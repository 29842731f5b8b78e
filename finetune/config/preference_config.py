"""The settings of training on preferences: those of fine-tuning, and the loss that compares
answers.

Defaults follow from the loss, and are its authors' where they name one. modeling/preference_loss.py
has the equations and what the settings are in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from finetune.config.fields import (
    Positive,
    Problem,
    Resolution,
    Rule,
    Strict,
    Text,
    batch_setting,
    flag,
    logging_setting,
    note_unused,
    optimizer_setting,
    redefined,
    setting,
)
from finetune.config.run_config import RunConfig

PreferenceLossName = Literal["dpo", "ipo", "orpo", "simpo", "kto"]


@dataclass(frozen=True)
class LossKind:
    """What a loss compares, and its defaults: beta as in its paper and in TRL.

    The rate of full training is 5e-7, as in Zephyr's recipe (arXiv 2310.16944) and KTO's paper. It
    is within SimPO's 3e-7 to 1e-6. Adapters take ten times that, as in Zephyr's own recipe for
    adapters.
    """

    by_token: bool  # means over an answer's tokens instead of sums
    reference: bool  # compares with the model as it was before the run
    beta: float = 0.1
    sft_weight: float = 0.0
    full_rate: float = 5e-7
    adapter_rate: float = 5e-6
    settings: tuple[str, ...] = ("sft_weight",)  # that it reads, besides its beta


LOSSES: dict[PreferenceLossName, LossKind] = {
    "dpo": LossKind(by_token=False, reference=True, settings=("label_smoothing", "sft_weight")),
    "ipo": LossKind(by_token=True, reference=True),
    # its paper's
    "orpo": LossKind(
        by_token=True, reference=False, sft_weight=1.0, full_rate=8e-6, adapter_rate=8e-5
    ),
    "simpo": LossKind(
        by_token=True,
        reference=False,
        beta=2.0,  # 2.0 to 2.5 in its paper
        settings=("label_smoothing", "simpo_gamma", "sft_weight"),
    ),
    "kto": LossKind(
        by_token=False, reference=True, settings=("desirable_weight", "undesirable_weight")
    ),
}
_preference_setting = partial(setting, group="preferences")
Weight = Annotated[float, Field(ge=0)]


def _kind(values: dict[str, Any]) -> LossKind:
    return LOSSES[values.get("loss", "dpo")]


def _learning_rate(values: dict[str, Any]) -> float:
    kind = _kind(values)
    return kind.full_rate if values.get("finetuning") == "full" else kind.adapter_rate


class PreferenceSettings(Strict):
    """The settings of the loss; a base class, so that they are declared before the settings whose
    defaults follow from them.
    """

    loss: PreferenceLossName = _preference_setting(
        "dpo", "What compares the answers; kto takes single answers with a label, the others pairs."
    )
    beta: float = _preference_setting(
        default_factory=lambda values: _kind(values).beta,
        description="Strength of the loss: its beta, ipo's tau, orpo's lambda.",
        gt=0,
        depends_on="loss",
        shown_default="0.1, 2.0 for simpo",
    )
    label_smoothing: float = _preference_setting(
        0.0, "dpo and simpo: the probability that a pair is the wrong way round.", ge=0, lt=0.5
    )
    simpo_gamma: Weight = _preference_setting(
        default_factory=lambda values: 0.5 * values.get("beta", LOSSES["simpo"].beta),
        description="simpo: the margin that the chosen answer's reward is to have.",
        depends_on="beta",
        shown_default="half of beta",
    )
    sft_weight: Weight = _preference_setting(
        default_factory=lambda values: _kind(values).sft_weight,
        description="Adds so much of the chosen answers' cross-entropy, by token.",
        depends_on="loss",
        shown_default="0.0, 1.0 for orpo",
    )
    desirable_weight: Weight = _preference_setting(1.0, "kto: weight of the answers that are good.")
    undesirable_weight: Weight = _preference_setting(
        1.0, "kto: weight of the answers that are bad."
    )


def note_unused_by_loss(resolution: Resolution) -> None:
    """Note settings of another loss than the run's."""
    loss = resolution.value("loss")
    read = LOSSES[loss].settings if isinstance(loss, str) and loss in LOSSES else ()
    of_losses = ("label_smoothing", "simpo_gamma", "desirable_weight", "undesirable_weight")
    note_unused(resolution, [((name,), name not in read, f"loss is {loss}") for name in of_losses])


class PreferenceConfig(RunConfig, PreferenceSettings):
    """The settings of a run on preferences (`python -m finetune.dpo`)."""

    command: ClassVar[str] = "python -m finetune.dpo"
    rules: ClassVar[tuple[Rule, ...]] = (*RunConfig.rules, note_unused_by_loss)

    global_batch_size: Positive = batch_setting(
        32, "Samples per optimizer step over all devices; a pair is one sample.", unit="samples"
    )
    cutoff_len: int = redefined(
        RunConfig,
        "cutoff_len",
        description="Longest prompt with an answer; longer ones are trimmed.",
    )
    best_metric: Text = logging_setting(
        "loss",
        "What the best evaluation is the best of, for keep_best and early_stopping.",
        unit="loss|accuracy|margin[/DIFFICULTY]",
    )
    num_epochs: float = batch_setting(
        1.0, "Passes over the data, unless max_steps is set.", gt=0, unit="passes"
    )
    learning_rate: float = optimizer_setting(
        default_factory=_learning_rate,
        description="Highest learning rate, reached after the warm-up.",
        gt=0,
        depends_on="loss",
        shown_default="5e-6 for lora, 5e-7 for full; orpo 8e-5, 8e-6",
    )

    @property
    def metrics(self) -> dict[str, bool]:
        # Answers with labels have only the loss: if all validation records have the same label,
        # there is no margin.
        if self.loss == "kto":
            return {"loss": False}
        return {
            "loss": False,
            "accuracy": True,
            "margin": True,
        }

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model as it was before the run."""
        return LOSSES[self.loss].reference

    @property
    def by_token(self) -> bool:
        """Whether the loss takes means over an answer's tokens; otherwise it takes sums."""
        return LOSSES[self.loss].by_token

    @property
    def preference_form(self) -> Literal["pairs", "labels"]:
        return "labels" if self.loss == "kto" else "pairs"

    @property
    def documents_per_sample(self) -> int:
        """Number of documents in a sample, each of at most `cutoff_len` tokens."""
        return 1 if self.loss == "kto" else 2

    @property
    def tokens_per_step(self) -> int:
        return super().tokens_per_step * self.documents_per_sample

    @property
    def tokens_per_microbatch(self) -> int:
        return super().tokens_per_microbatch * self.documents_per_sample

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.eval_generate is not None:
            yield (
                f"eval_generate is {self.eval_generate}, and a run on preferences answers nothing"
                " while it trains",
                f"leave {flag('eval_generate')} out, and use python -m finetune eval on its result",
            )
        if self.loss != "kto":
            return
        if self.global_batch_size < 2:
            yield (
                "loss is kto, which mismatches the samples of a global batch, and"
                " global_batch_size is 1",
                f"set {flag('global_batch_size')} to 2 or more",
            )
        if self.sft_weight:
            what = "loss is kto, and sft_weight is of pairs"
            yield what, f"leave {flag('sft_weight')} out"
        if not (self.desirable_weight or self.undesirable_weight):
            what = "both weights of kto are 0"
            yield what, f"give {flag('desirable_weight')} a value above 0"
