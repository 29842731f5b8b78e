"""Axolotl: what its table does not say: the loss and the data."""

from __future__ import annotations

from typing import Any

from finetune.commands.convert.draft import Draft, is_nothing, load_tool
from finetune.commands.convert.hub_data import data_entry, hub_entry, is_hub_data
from finetune.commands.convert.preferences import write_loss
from finetune.commands.convert.settings import write_settings
from finetune.errors import ConfigError

# Forms of records by the first part of `type`; others are named.
_FORMS = ("completion", "pretrain", "chat_template", "alpaca", "sharegpt", "None")
_PAIRED_FORMS = ("chat_template", "chatml", "llama3", "zephyr", "passthrough", "None")
_ASKED = {"intel": "question", "icr": "input"}  # type chatml.intel and so on -> the prompt's field
# Formats that leave a field as it is.
_PLAIN = ("{prompt}", "{chosen}", "{rejected}", "{completion}")
# Columns that are read, by the form of the records, and of pairs and labels.
_COLUMNS = {
    "completion": ("text",),
    "pretrain": ("text",),
    "chat_template": ("messages",),
}
_PAIR = ("messages", "prompt", "chosen", "rejected", "completion", "label", "system")


def finish(draft: Draft) -> None:
    options = draft.options
    draft.apply_table()
    _data(draft)
    options["lora_target_modules"] = options.get("lora_target_modules") or "all-linear"
    if options.get("lora_target_linear"):
        options["lora_target_modules"] = "all-linear"
    if "warmup_steps" not in draft.given:
        options.setdefault("warmup_ratio", 0.03)
    if options.get("eval_steps"):
        options.setdefault("eval_strategy", "steps")
    trackers = {
        "wandb": "wandb_project",
        "tensorboard": "use_tensorboard",
        "swanlab": "use_swanlab",
    }
    used = [name for name, option in trackers.items() if options.get(option)]
    options["report_to"] = used or "none"
    write_settings(draft)
    _loss(draft)


def _loss(draft: Draft) -> None:
    options = draft.options
    if not options.get("rl"):
        return
    of_trl = dict(options.get("trl") or {})
    # The first given value counts, for any loss; otherwise TRL's default.
    betas = [of_trl.pop("beta", None), options.get("rl_beta"), options.get("orpo_alpha")]
    options["beta"] = next((beta for beta in betas if beta is not None), 0.1)
    for name, value in of_trl.items():
        reason = "not an option of a loss that is known here: look it up"
        draft.drop(f"trl: {name}", value, reason)
    write_loss(draft, options["rl"])


def _data(draft: Draft) -> None:
    options, settings = draft.options, draft.settings
    data = options.get("datasets") or options.get("pretraining_dataset")
    if not data:
        raise ConfigError("the run names no data", "datasets", "add it")
    settings["data"] = [_entry(about, draft) for about in data]
    if tests := options.get("test_datasets"):
        settings["valid_data"] = [_entry(about, draft) for about in tests]


def _entry(about: dict[str, Any], draft: Draft) -> Any:
    """Return an entry of `data`: a path, with the columns that have other names."""
    paired = bool(draft.options.get("rl"))
    table, forms = (draft.tool.pairs, _PAIRED_FORMS) if paired else (draft.tool.data, _FORMS)
    where, written = f"dataset {about.get('path')}: ", about.get("type")
    form, _, style = str(written).partition(".")
    if isinstance(written, dict) and paired:
        about, form = about | written, "fields"
    elif form not in forms:
        form = "unknown"
    for name, value in about.items():
        if name not in table.options and not is_nothing(value) and value not in _PLAIN:
            draft.drop(where + name, value, "records are read in one way here")
    entry = draft.read(table, about) | {"form": form}
    draft.apply_rows(table, entry, about, where)
    if form == "chat_template":
        mapped = {"role": "role", "content": "content"} | entry
        mapped |= entry.get("message_property_mappings") or {}
        pair = (mapped["role"], mapped["content"])
        if pair not in (("role", "content"), ("from", "value")):
            reason = "turns have role and content, or from and value"
            draft.drop(f"{where}roles", "/".join(pair), reason)
    if style.partition(".")[0] in _ASKED:
        entry["prompt"] = _ASKED[style.partition(".")[0]]
    names = _PAIR if paired else _COLUMNS.get(form, ())
    columns = {name: entry[name] for name in names if entry.get(name, name) != name}
    paths = entry.get("data_files") or entry.get("path")
    if isinstance(paths, list):
        if len(paths) > 1:
            draft.drop(f"{where}data_files", paths[1:], "name a folder or glob instead")
        paths = paths[0]
    if is_hub_data(paths):
        paths = hub_entry(
            draft,
            paths,
            "hub",
            subset=about.get("name"),
            revision=about.get("revision"),
            split=about.get("split"),
        )
    else:
        for name in ("name", "revision", "split"):
            if about.get(name) not in (None, "train"):
                draft.drop(f"{where}{name}", about[name], "only a hub's data sets have it")
    return data_entry(paths, columns)


TOOL = load_tool("axolotl", finish)
