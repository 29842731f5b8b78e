"""TRL: what its table does not say: the trainer, the loss and the data."""

from __future__ import annotations

import os

from finetune.commands.convert.draft import Draft, load_tool
from finetune.commands.convert.hub_data import data_entry, hub_entry, is_hub_data
from finetune.commands.convert.preferences import write_loss
from finetune.commands.convert.settings import listed, write_settings
from finetune.errors import ConfigError

_OF_DPO = ("beta", "loss_weights", "precompute_ref_log_probs", "label_smoothing", "sync_ref_model")


def finish(draft: Draft) -> None:
    options, settings = draft.options, draft.settings
    named = "trainer" in options
    trainer = options.setdefault("trainer", _guess(draft))
    draft.apply_table()
    if not named:
        reason = f'taken for a run of trl {trainer}; else name it, e.g. "trl kto --config FILE"'
        draft.note("trainer", "not named", reason)
    if settings["cutoff_len"] == "null":
        del settings["cutoff_len"]
    _data(draft)
    options["lora_target_modules"] = options.get("lora_target_modules") or ["q_proj", "v_proj"]
    write_settings(draft)
    if trainer != "sft":
        write_loss(draft, "simpo" if trainer == "cpo" else trainer)


def _guess(draft: Draft) -> str:
    """Return the trainer of a run that does not name it.

    The loss identifies the trainer first, then options that only one trainer has.

    Returns:
        `unknown` if it may be one of several.
    """
    losses = {str(each) for each in listed(draft.options.get("loss_type") or [])}
    given = draft.given
    if "simpo" in losses or given & {"cpo_alpha", "simpo_gamma"}:
        return "cpo"
    if "kto" in losses or given & {"desirable_weight", "undesirable_weight"}:
        return "kto"
    if losses - {"nll", "chunked_nll", "dft"}:
        return "dpo"
    if "max_completion_length" in given:
        return "unknown"
    return "dpo" if given.intersection(_OF_DPO) else "sft"


def _data(draft: Draft) -> None:
    options, entries = draft.options, []
    one = {"path": options.get("dataset_name"), "name": options.get("dataset_config")}
    one["split"] = options["dataset_train_split"]
    for source in options.get("datasets") or [one]:
        paths = source.get("data_files") or source.get("path")
        if not paths:
            raise ConfigError("the run names no data", "dataset_name", "add it")
        known = {**one, **source}
        draft.apply_rows(draft.tool.data, known, known, f"{paths}: ")
        for path in paths if isinstance(paths, list) else [paths]:
            if is_hub_data(path):
                path = hub_entry(draft, path, "hub", subset=known["name"], split=known["split"])
            entries.append(path)
    text = options["dataset_text_field"]
    columns = {"text": text} if text != "text" else None
    draft.settings["data"] = [data_entry(entry, columns) for entry in entries]
    if not options.get("valid_split") and options.get("eval_strategy", "no") != "no":
        split = options.get("dataset_test_split", "test")
        if is_hub_data(one["path"]):
            subset = one["name"]
            draft.settings["valid_data"] = [
                hub_entry(draft, str(one["path"]), "hub", subset=subset, split=split)
            ]
        else:
            kind = "folder" if os.path.isdir(str(entries[0])) else "data set"
            reason = f"name the {kind}'s test file as valid_data"
            draft.drop("dataset_test_split", split, reason)


TOOL = load_tool("trl", finish)
