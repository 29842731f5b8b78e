"""LLaMA-Factory's new form (v1): blocks for the adapter, the base and the devices, and a file of
data sets.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from finetune.commands.convert.draft import Draft, is_nothing, load_tool
from finetune.commands.convert.hub_data import data_entry, hub_entry, is_hub_data
from finetune.commands.convert.settings import write_settings
from finetune.config.files import read_file
from finetune.errors import ConfigError

# Keys of `peft_config` for LoRA -> the name that `write_settings` reads, and the default there.
_LORA = {
    "r": ("lora_r", 8),
    "lora_alpha": ("lora_alpha", 16),
    "lora_dropout": ("lora_dropout", 0.05),
    "target_modules": ("lora_target_modules", "all"),
    "use_rslora": ("use_rslora", False),
    "use_dora": ("use_dora", False),
    "modules_to_save": ("modules_to_save", None),
}
_DATA_FILES = (".yaml", ".yml")


def finish(draft: Draft) -> None:
    options, settings = draft.options, draft.settings
    draft.apply_table()
    _adapter(draft)
    _devices(draft)
    _data(draft)
    each = options["per_device_train_batch_size"]
    shares = each * (draft.devices // draft.sharing)
    total = options.get("global_batch_size") or shares
    if total % shares:
        raise ConfigError(
            f"global_batch_size {total} is no multiple of micro_batch_size {each} x"
            f" {draft.devices} devices",
            "global_batch_size",
            "say with --devices how many devices the run was on",
        )
    options["gradient_accumulation_steps"] = total // shares
    settings["gradient_checkpointing"] = options["enable_activation_checkpointing"]
    write_settings(draft)


def _block(draft: Draft, name: str) -> dict[str, Any]:
    """Return the keys of a block that say something, or of nothing."""
    block = draft.options.get(name) or {}
    return {key: value for key, value in dict(block).items() if not is_nothing(value)}


def _name_rest(draft: Draft, block: str, rest: dict[str, Any]) -> None:
    for key, value in rest.items():
        draft.drop(f"{block}: {key}", value, "not a key that is known here: look it up")


def _adapter(draft: Draft) -> None:
    """Write LoRA and a quantized base; without `peft_config` all parameters are trained."""
    peft, quantized = _block(draft, "peft_config"), _block(draft, "quant_config")
    kind = peft.pop("name", None)
    if kind not in (None, "lora"):
        what = f"peft_config {kind} has no counterpart: LoRA and all parameters are the only ways"
        raise ConfigError(what, "peft_config", "convert lora or full")
    draft.settings["finetuning"] = kind or "full"
    if kind == "lora":
        for key, (name, default) in _LORA.items():
            draft.options[name] = peft.pop(key, default)
    _name_rest(draft, "peft_config", peft)
    quantized.pop("name", None)
    if bits := quantized.pop("quantization_bit", None):
        draft.settings["quantization"] = {4: "nf4", 8: "int8"}.get(bits, bits)
    _name_rest(draft, "quant_config", quantized)


def _devices(draft: Draft) -> None:
    """Write DeepSpeed's configuration; how FSDP shards is no setting of ours.

    The degree of context parallelism stands here, or among the options (`Tool.degrees`).
    """
    block = _block(draft, "dist_config")
    kind = block.pop("name", None)
    block.pop("cp_mode", None)
    draft.sharing *= int(block.pop("cp_size", 1))
    if draft.devices % draft.sharing:
        what = f"{draft.sharing} devices share every sample, and that does not divide"
        raise ConfigError(
            f"{what} {draft.devices}", "cp_size", "say with --devices how many devices it was on"
        )
    if kind == "deepspeed":
        draft.options["deepspeed"] = block.pop("config_file", "zero3")
    elif kind is not None:
        draft.drop("dist_config", kind, "write deepspeed with ZeRO-3 instead", "harmless")
    _name_rest(draft, "dist_config", block)


def _data(draft: Draft) -> None:
    for option, setting in (("train_dataset", "data"), ("eval_dataset", "valid_data")):
        if given := draft.options.get(option):
            draft.settings[setting] = _entries(str(given), draft)
    if not draft.settings.get("data"):
        raise ConfigError("the run names no dataset", "train_dataset", "convert a run that trains")


def _entries(given: str, draft: Draft) -> list[Any]:
    """Return entries of `data` for a file that lists data sets, a records file, or a hub's data
    set.
    """
    if given.endswith(_DATA_FILES) and os.path.isfile(given):
        sets = read_file(Path(given))
        return [_entry(name, dict(about), draft) for name, about in sets.items()]
    if given.endswith(_DATA_FILES):
        raise ConfigError(
            f"{given} is not here, and names the data",
            "train_dataset",
            "run from the folder that LLaMA-Factory is run in",
        )
    return [hub_entry(draft, given, "hub") if is_hub_data(given) else given]


def _entry(name: str, about: dict[str, Any], draft: Draft) -> Any:
    where = f"dataset {name}: "
    form, most = about.pop("converter", None), about.pop("num_samples", None)
    if form == "pair":
        what = f"{name} holds pairs, and the options of v1's DPO are not read"
        raise ConfigError(what, "converter", "write the run in the form of version 0.9")
    if form == "alpaca":
        reason = "a line end stands between instruction and input here, and none there"
        draft.note(f"{where}converter", form, reason)
    path, split = about.pop("path", None), about.pop("split", None)
    for key in ("source", "dataset_dir", "file_name"):
        value = about.pop(key, None)
        if key == "dataset_dir" and value:
            folder = Path(str(value))
            path = str(folder / about.pop("file_name", ""))
        elif key == "file_name" and value:
            path = str(value)
    if path is None:
        raise ConfigError(f"dataset {name} has no path", "train_dataset", "add it")
    if is_hub_data(path):
        path = hub_entry(draft, path, "hub", split=split)
    for key, value in about.items():
        draft.drop(where + key, value, "write the records that are meant to a file of their own")
    if most:
        reason = f"the first {most} records are taken here, a random choice there"
        draft.note(f"{where}num_samples", most, reason)
    return data_entry(path, most=most)


TOOL = load_tool("llama_factory_v1", finish)
