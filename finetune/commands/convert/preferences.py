"""Losses on preferences of other tools as settings of `python -m finetune.dpo`."""

from __future__ import annotations

from finetune.commands.convert.draft import Draft, is_nothing, load
from finetune.commands.convert.settings import listed
from finetune.errors import ConfigError

_SETTINGS = load("losses")
_KTO = "its reference point is a mean over the global batch, there over what a device holds"
_SFT = (
    "there a mean of means over each microbatch or answer, here over the tokens of all chosen"
    " answers of a step"
)


def write_loss(draft: Draft, loss: str) -> None:
    """Make the draft a run on preferences.

    Args:
        loss: dpo, ipo, orpo, simpo or kto. With dpo, `loss_type` names the loss, as in TRL's
            trainer, to which most tools pass their options.

    Raises:
        ConfigError: `loss_type` names an unsupported loss or combination of losses.
    """
    options = draft.options
    settings = draft.settings
    if loss == "dpo":
        loss = _combined(draft)
    settings |= {
        "kind": "dpo",
        "loss": loss,
        "beta": options["beta"],
    }
    for setting, option in _SETTINGS[loss].items():
        if options.get(option) is not None:
            settings[setting] = options[option]
    # TRL's trainers turn all dropout off by default, the adapter's too.
    if settings.get("lora_dropout") and options.get("disable_dropout") is not False:
        reason = "0 is written: dropout is turned off there while preferences are trained"
        draft.note("lora_dropout", settings["lora_dropout"], reason)
        settings["lora_dropout"] = 0.0
    if loss == "kto":
        draft.note("kto", "loss", _KTO)
    if settings.get("sft_weight"):
        draft.note("sft_weight", settings["sft_weight"], _SFT)
    for name in ("ref_model", "ref_adapters"):
        value = options.get(name)
        if not is_nothing(value) and value != options["model"]:
            draft.drop(name, value, "the reference is the model as it is before the run")


def _combined(draft: Draft) -> str:
    """Return the loss that `loss_type` names, and store the weight of an added cross-entropy as the
    option sft_weight.
    """
    options = draft.options
    names = listed(options.get("loss_type") or "sigmoid")
    weights = listed(options.get("loss_weights") or [1.0] * len(names))
    pairs = dict(zip(names, map(float, weights), strict=False))
    sft_weights = [options.get("rpo_alpha"), pairs.pop("sft", None)]
    loss, factor = next(iter(pairs.items()), ("", 1.0))
    name = draft.written("loss_type")
    refused = ""
    if len(names) != len(weights) or len(pairs) != 1 or loss not in ("sigmoid", "ipo"):
        refused = f"{name} {', '.join(map(str, names))}"
    elif factor <= 0:
        refused = f"a weight of {name} {factor}"
    if refused:
        what = f"{refused} has no counterpart: the losses here are dpo, ipo, orpo, simpo and kto"
        raise ConfigError(what, name, "convert a run with one of them")
    if factor != 1:
        reason = "the whole loss is divided by it here, so that max_grad_norm clips at another size"
        draft.drop(f"weight of {loss}", factor, reason)
        sft_weights[1] = sft_weights[1] and sft_weights[1] / factor
    given = [weight for weight in sft_weights if weight is not None]
    options["sft_weight"] = sum(given) if given else None
    return "ipo" if loss == "ipo" else "dpo"
