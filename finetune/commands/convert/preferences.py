"""Losses on preferences of other tools as settings of `python -m finetune.dpo`; most tools stand on
TRL's trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.commands.convert.draft import Draft, is_nothing
from finetune.errors import ConfigError

OWN_REFERENCE = "the reference is the model as it is before the run"
TOKENS = (
    "there a mean of means over each microbatch or answer, here over the tokens of all chosen"
    " answers of a step"
)


def write(draft: Draft, loss: str, settings: Mapping[str, Any], *, dropout: bool = False) -> None:
    """Make the draft a run on preferences.

    Args:
        loss: ours.
        settings: of ours, those that the tool names or has a default for; None is left to ours.
        dropout: whether the tool leaves dropout on; by default its trainers turn all of it off, the
            adapter's too.
    """
    draft.values |= {"kind": "dpo", "loss": loss}
    draft.values |= {name: value for name, value in settings.items() if value is not None}
    if draft.values.get("lora_dropout") and not dropout:
        given = draft.values["lora_dropout"]
        draft.note(
            "lora_dropout",
            given,
            "0 is written: dropout is turned off there while preferences are trained",
        )
        draft.values["lora_dropout"] = 0.0
    if loss == "kto":
        draft.note(
            "kto",
            "loss",
            "its reference point is a mean over the global batch, there over what a device holds",
        )
    if draft.values.get("sft_weight"):
        draft.note("sft_weight", draft.values["sft_weight"], TOKENS)


def refused(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{name} {value} has no counterpart: the losses here are dpo, ipo, orpo, simpo and kto",
        name,
        "convert a run with one of them",
    )


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def of_losses(name: str, losses: Any, weights: Any, draft: Draft) -> tuple[str, float | None]:
    """The loss that TRL's `loss_type` names, and the weight of the `sft` beside it.

    Args:
        name: option that names the losses.
        losses, weights: one, or lists of as many.
    """
    names = [str(each) for each in listed(losses)]
    factors = [1.0] * len(names) if weights is None else [float(each) for each in listed(weights)]
    ours = {"sigmoid": "dpo", "ipo": "ipo"}
    pairs = dict(zip(names, factors, strict=False))
    sft = pairs.pop("sft", None)
    if len(names) != len(factors) or len(pairs) != 1 or not set(pairs) <= set(ours):
        raise refused(name, ", ".join(names))
    ((loss, factor),) = pairs.items()
    if factor <= 0:
        raise refused(f"a weight of {name}", factor)
    if factor != 1:
        why = "the whole loss is divided by it here, so that max_grad_norm clips at another size"
        draft.lose(f"weight of {loss}", factor, why, trains=True)
    return ours[loss], None if sft is None else sft / factor


def lose_given(
    values: Mapping[str, Any], why: str, names: str, draft: Draft, *, off: tuple[Any, ...] = ()
) -> None:
    """Name options of a loss that change what is trained, where they are given; their names with
    spaces between.
    """
    for name in names.split():
        if not is_nothing(values.get(name)) and values[name] not in off:
            draft.lose(name, values[name], why, trains=True)
