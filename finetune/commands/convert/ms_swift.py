"""ms-swift: what its table does not say: defaults that depend on other options, hub and data."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from finetune.commands.convert.draft import Draft, load_tool
from finetune.commands.convert.hub_data import data_entry, hub_entry, is_hub_data
from finetune.commands.convert.preferences import write_loss
from finetune.commands.convert.settings import write_settings
from finetune.config.paths import is_hub_id
from finetune.errors import ConfigError


def finish(draft: Draft) -> None:
    options, settings = draft.options, draft.settings
    draft.apply_table()
    if "gradient_accumulation_steps" not in draft.given:
        per_step = options["per_device_train_batch_size"] * draft.devices
        options["gradient_accumulation_steps"] = max(1, math.ceil(16 / per_step))
    if options.get("max_epochs"):
        options["num_train_epochs"] = options["max_epochs"]
    _hub(draft)
    _data(draft)
    if "eval_strategy" not in options and (options["valid_split"] or settings.get("valid_data")):
        options["eval_strategy"] = "steps"
        options.setdefault("eval_steps", options["save_steps"])
    name = str(options.get("model")).rstrip("/").rpartition("/")[2]
    settings.setdefault("output_dir", f"output/{name}")
    write_settings(draft)
    loss = options.get("rlhf_type")
    if loss == "simpo" and "beta" not in draft.given:
        options["beta"] = 2.0
    if loss:
        write_loss(draft, loss)


def _hub(draft: Draft) -> None:
    use_hf = draft.options.get("use_hf")
    if not is_hub_id(str(draft.options.get("model"))):
        return
    draft.settings["hub"] = "huggingface" if use_hf else "modelscope"
    if not use_hf:
        reason = "ms-swift takes models by name from ModelScope: hub modelscope is written"
        draft.note("use_hf", "not set" if use_hf is None else use_hf, reason)


def _data(draft: Draft) -> None:
    options, settings = draft.options, draft.settings
    columns = options.get("columns") or {}
    if isinstance(columns, str):
        columns = json.loads(columns)
    # There: a column's name -> swift's, of which only `query` is another than ours.
    columns = {"prompt" if to == "query" else to: name for name, to in columns.items()}
    for option, setting in (("dataset", "data"), ("val_dataset", "valid_data")):
        if given := options.get(option):
            names = [given] if isinstance(given, str) else given
            settings[setting] = [_entry(str(name), columns, draft) for name in names]
    if not settings.get("data"):
        raise ConfigError("the run names no data", "dataset", "add it")
    if weights := options.get("interleave_prob"):
        settings["data_weights"] = [float(weight) for weight in weights]


def _entry(given: str, columns: dict[str, str], draft: Draft) -> Any:
    """Return an entry of `data` for `owner/name:subset#500`, a file or a folder."""
    path, _, count = given.rpartition("#")
    if path and count.isdigit():
        reason = f"the first {count} records are taken here, a random choice there"
        draft.note(f"dataset {path}", f"#{count}", reason)
    else:
        path, count = given, ""
    hub = "hub" if draft.options.get("use_hf") else "modelscope"
    if named := re.fullmatch("(HF|MS)::(.+)", path):
        hub, path = {"HF": "hub", "MS": "modelscope"}[named[1]], named[2]
    head, _, subset = path.rpartition(":")
    name, subsets = (head, subset.split("/")) if is_hub_data(head) else (path, [])
    if len(subsets) > 1:
        draft.drop(f"dataset {name}", f":{subset}", f"name each subset as an entry: {subsets}")
    if is_hub_data(name):
        path = hub_entry(draft, name, hub, subset=subsets[0] if subsets else None)
    return data_entry(path, columns, count)


TOOL = load_tool("ms_swift", finish)
