"""LLaMA-Factory: what its table does not say, and dataset_info.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.commands.convert.draft import Draft, load_tool
from finetune.commands.convert.hub_data import data_entry, hub_entry
from finetune.commands.convert.preferences import write_loss
from finetune.commands.convert.settings import listed, write_settings
from finetune.errors import ConfigError

_HUBS = {"hf_hub_url": "hub", "ms_hub_url": "modelscope"}
# Keys of dataset_info.json that say where records are, in the order in which they count.
_PATHS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "file_name", "cloud_file_name")
# Columns of an entry -> ours; those of pairs count only where pairs are trained.
_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
}
_PAIR = {"chosen": "chosen", "rejected": "rejected"}


def finish(draft: Draft) -> None:
    options, settings = draft.options, draft.settings
    # Pretraining packs unless the run turns packing off.
    options.setdefault("packing", options["stage"] == "pt")
    draft.apply_table()
    options.setdefault("lora_alpha", 2 * options["lora_r"])
    if "val_size" in draft.given and options.get("eval_steps"):
        options.setdefault("eval_strategy", "steps")
    _data(draft)
    write_settings(draft)
    _loss(draft)
    if options.get("use_swanlab"):
        others = settings["report_to"]
        settings["report_to"] = ["swanlab", *(others if isinstance(others, list) else [])]


def _loss(draft: Draft) -> None:
    options = draft.options
    if options["stage"] == "kto":
        write_loss(draft, "kto")
    elif options["stage"] == "dpo":
        loss = options["pref_loss"]
        weight = options.get("pref_ftx") or 0.0
        options["cpo_alpha"] = weight
        # Its orpo adds the chosen answer's cross-entropy itself, once.
        options["sft_weight"] = 1.0 + weight
        write_loss(draft, loss if loss in ("orpo", "simpo") else "dpo")


def _data(draft: Draft) -> None:
    options, settings = draft.options, draft.settings
    folder = str(options["dataset_dir"])
    if folder.startswith("REMOTE:"):
        fix = "download dataset_info.json into a folder, and give that"
        raise ConfigError(f"dataset_dir {folder} is on a hub", "dataset_dir", fix)
    path = Path(folder) / "dataset_info.json"
    try:
        info = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        what = f"dataset_info.json cannot be read: {error}"
        fix = "run from the folder that LLaMA-Factory is run in"
        raise ConfigError(what, str(path), fix) from error
    for option, setting in (("dataset", "data"), ("eval_dataset", "valid_data")):
        if options.get(option):
            names = listed(options[option])
            settings[setting] = [_entry(name, info.get(name), path.parent, draft) for name in names]
    if not settings.get("data"):
        raise ConfigError("the run names no dataset", "dataset", "convert a run that trains")
    if options.get("mix_strategy", "concat") != "concat":
        weights = listed(options.get("interleave_probs") or [1] * len(settings["data"]))
        settings["data_weights"] = [float(weight) for weight in weights]


def _entry(name: str, about: Any, folder: Path, draft: Draft) -> Any:
    """Return an entry of `data`: a path, with the columns that have other names.

    Args:
        about: its entry in dataset_info.json.
    """
    if not isinstance(about, dict):
        raise ConfigError(f"dataset_info.json has no {name}", str(folder), "correct the name")
    if "file_name" in about:
        about = about | {"file_name": str(folder / about["file_name"])}
    key = next((key for key in _PATHS if key in about), None)
    path = about.get(key)
    if key in _HUBS:
        path = hub_entry(
            draft, path, _HUBS[key], subset=about.get("subset"), split=about.get("split")
        )
    elif key == "om_hub_url":
        what = f"{name} is on Modelers, which is not read here"
        raise ConfigError(what, "om_hub_url", "download its files, and name them as file_name")
    if path is None:
        what = f"{name} is made by a script, which is never run"
        raise ConfigError(what, "script_url", "write its records to a file")
    stage, ranking = draft.options["stage"], bool(about.get("ranking"))
    if ranking != (stage == "dpo"):
        what = f"{name} holds {'' if ranking else 'no '}rankings, and the stage is {stage}"
        raise ConfigError(what, "ranking", "name data of the stage")
    where, most = f"dataset {name}: ", about.get("num_samples")
    if most:
        reason = f"the first {most} records are taken here, a random choice there"
        draft.note(f"{where}num_samples", most, reason)
    named, tags = about.get("columns") or {}, about.get("tags") or {}
    entry = draft.read(draft.tool.data, about | named | tags)
    draft.apply_rows(draft.tool.data, entry, entry, where)
    known = _COLUMNS | (_PAIR if stage == "dpo" else {})
    form = entry["formatting"]
    if form != "alpaca":
        pair = (entry["role_tag"], entry["content_tag"])
        if form != "openai" and pair not in (("from", "value"), ("role", "content")):
            reason = "turns have from and value, or role and content"
            draft.drop(f"{where}tags", "/".join(pair), reason)
        ours = "messages" if form == "openai" or pair[0] == "role" else "conversations"
        known = {"messages": ours} | {other: ours for other, ours in known.items() if other == ours}
        named = {"messages": "conversations"} | named
    elif stage == "pt":
        text = "text" if str(path).endswith(".txt") else named.get("prompt", "instruction")
        return data_entry(path, {"text": text}, most)
    columns = {
        ours: named[other] for other, ours in known.items() if named.get(other, ours) != ours
    }
    if stage == "kto" and named.get("kto_tag", "kto_tag") not in ("kto_tag", "label"):
        columns["label"] = named["kto_tag"]
    return data_entry(path, columns, most)


TOOL = load_tool("llama_factory", finish)
