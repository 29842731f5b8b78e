"""Axolotl's `rl`: the loss and its settings, and the fields of the records."""

from __future__ import annotations

from typing import Any

from finetune.commands.convert import preferences
from finetune.commands.convert.draft import Draft, is_nothing

_SMOOTHING = (
    "conservative DPO is written; whether Axolotl's TRL reads it for the loss sigmoid depends on"
    " its version"
)
# Names of their own for the fields of a record of preferences -> ours.
_FIELDS = {
    "field_messages": "messages",
    "field_prompt": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_completion": "completion",
    "field_label": "label",
    "field_system": "system",
}
_FORMS = ("chat_template", "chatml", "llama3", "zephyr", "passthrough")
_ASKED = {"intel": "question", "icr": "input"}  # type chatml.intel and so on -> the prompt's field
_READ = (
    "path",
    "type",
    "split",
    "data_files",
    "ds_type",
    "chat_template",
    "message_property_mappings",
)
# formats that leave a field as it is
_PLAIN = ("{prompt}", "{chosen}", "{rejected}", "{completion}")


def finish(values: dict[str, Any], draft: Draft) -> None:
    kind, of_trl = values.get("rl"), dict(values.get("trl") or {})
    if not kind:
        preferences.lose_given(values, "trainers of others are not run here", "trl", draft)
        return
    betas = (of_trl.pop("beta", None), values.get("rl_beta"), values.get("orpo_alpha"))
    # Their first that is given counts, whatever the loss; else TRL's 0.1, of simpo too.
    settings: dict[str, Any] = {"beta": next((beta for beta in betas if beta is not None), 0.1)}
    loss = str(kind)
    if kind == "dpo":
        losses, weights = values.get("dpo_loss_type") or "sigmoid", values.get("dpo_loss_weights")
        loss, settings["sft_weight"] = preferences.of_losses(
            "dpo_loss_type", losses, weights, draft
        )
        if values.get("dpo_label_smoothing"):
            draft.note("dpo_label_smoothing", values["dpo_label_smoothing"], _SMOOTHING)
            settings["label_smoothing"] = values["dpo_label_smoothing"] if loss == "dpo" else None
    elif kind == "simpo":
        gamma, weight = values.get("simpo_gamma"), values.get("cpo_alpha")
        settings |= {
            "simpo_gamma": 0.5 if gamma is None else gamma,
            "sft_weight": 1.0 if weight is None else weight,
        }
    elif kind == "kto":
        settings |= {"desirable_weight": values.get("kto_desirable_weight") or None}
        settings |= {"undesirable_weight": values.get("kto_undesirable_weight") or None}
    elif kind == "orpo":
        draft.note(
            "orpo",
            "loss",
            "there the cross-entropy is that of prompt and answer, here of the answer",
        )
    elif kind != "ipo":
        raise preferences.refused("rl", kind)
    preferences.lose_given(
        values, "this part of a loss is not trained here", "dpo_use_weighting", draft
    )
    for name, value in of_trl.items():
        draft.lose(
            f"trl: {name}",
            value,
            "not an option of a loss that is known here: look it up",
            trains=True,
        )
    preferences.write(draft, loss, settings)


def columns_of(about: dict[str, Any], where: str, draft: Draft) -> dict[str, str]:
    """The columns of pairs or labels, whose type is one of Axolotl's by name, or names the
    fields.
    """
    form = about.get("type")
    fields = {**about, **form} if isinstance(form, dict) else dict(about)
    columns = {ours: fields.pop(theirs) for theirs, ours in _FIELDS.items() if fields.get(theirs)}
    if isinstance(form, str):
        name, _, which = form.partition(".")
        if name not in _FORMS:
            draft.lose(
                f"{where}: type",
                form,
                "write the records in one of the forms of docs/data.md",
                trains=True,
            )
        if which.partition(".")[0] in _ASKED:
            columns["prompt"] = _ASKED[which.partition(".")[0]]
    if not str(form).startswith("chat_template"):
        why = "the tokenizer's chat template asks the question; --template names another"
        draft.note(f"{where}: type", form, why)
    for name, value in fields.items():
        if name not in _READ and not is_nothing(value) and value not in _PLAIN:
            draft.lose(f"{where}: {name}", value, "records are read in one way here", trains=True)
    return columns
