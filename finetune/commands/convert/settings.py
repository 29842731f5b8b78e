"""Settings that several options say together; the same for all tools, by common names."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from finetune.commands.convert.draft import Draft, is_nothing
from finetune.config.deepspeed import KNOWN
from finetune.config.files import read_file
from finetune.config.paths import is_hub_id, split_revision

# accelerate's option for sharding -> the equivalent value of a tool's own `deepspeed`.
_SHARDING = {
    "deepspeed_config_file": "{}",
    "zero_stage": "zero{}",
    "accelerate_config": "{}",
}
_TRACKERS = ("none", "tensorboard", "wandb", "swanlab", "trackio")
_PATTERNS = ("rank_pattern", "alpha_pattern")
_NAMES = ("modules_to_save", "layers_to_transform")
_VALUES = ("use_rslora", "use_dora", "lora_plus_ratio")


def listed(value: Any) -> list[Any]:
    """Return a value as a list: one, several, or names with commas between."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [value]


def write_settings(draft: Draft) -> None:
    """Write everything but the data, the loss and where the model comes from."""
    _adapter(draft)
    _length(draft)
    _intervals(draft)
    _evaluation(draft)
    _trackers(draft)
    _deepspeed(draft)
    _revision(draft)
    seed = draft.options.get("data_seed")
    seed = draft.options["seed"] if seed is None else seed
    draft.settings["curriculum_seed"] = seed
    draft.note("seed", seed, "the order of the samples is another than that of the same seed there")


def _adapter(draft: Draft) -> None:
    options, settings = draft.options, draft.settings
    if settings["finetuning"] == "full":
        return
    names = listed(options["lora_target_modules"])
    every = names in (["all"], ["all-linear"])
    settings["lora_target_modules"] = "all-linear" if every else names
    for name in ("lora_r", "lora_alpha", "lora_dropout"):
        settings[name] = options[name]
    for name in (*_VALUES, *_NAMES, *_PATTERNS):
        value = options.get(name)
        if is_nothing(value):
            continue
        if name in _PATTERNS and not isinstance(value, dict):
            draft.drop(name, value, "write it as a mapping of names to numbers")
        else:
            settings[name] = listed(value) if name in _NAMES else value


def _length(draft: Draft) -> None:
    """Write the global batch, the number of steps, and the warm-up."""
    options, settings = draft.options, draft.settings
    each = options["per_device_train_batch_size"]
    accumulated = options["gradient_accumulation_steps"]
    size = each * accumulated * (draft.devices // draft.sharing)
    shared = f" / {draft.sharing} that share every sample there" * (draft.sharing > 1)
    settings |= {"micro_batch_size": each, "global_batch_size": size}
    draft.note(
        "global_batch_size",
        size,
        f"{each} a device x {accumulated} accumulated x {draft.devices}"
        f" device{'s' * (draft.devices > 1)} (--devices){shared}: here it is part of the run, and"
        " the same on any number of devices",
    )
    steps = options.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        settings["max_steps"] = steps
    else:
        settings["num_epochs"] = float(options["num_train_epochs"])
    warmup = options.get("warmup_steps") or options.get("warmup_ratio") or 0
    # transformers' schedule of that name has no warm-up, even if the other options request one.
    if options["lr_scheduler_type"] == "constant":
        warmup = 0
    settings["warmup_steps"] = warmup if 0 < warmup < 1 else int(warmup)


def _intervals(draft: Draft) -> None:
    """Write the intervals of logging and saving in steps, and how many checkpoints are kept."""
    options, settings = draft.options, draft.settings
    for name, fallback in (("logging_steps", 10), ("save_steps", 500)):
        steps, strategy = options[name], options.get(name.replace("steps", "strategy"), "steps")
        if strategy == "steps" and steps >= 1:
            settings[name] = int(steps)
        elif name == "save_steps" and strategy == "no":
            settings[name] = 0
        else:
            settings[name] = fallback
            shown = steps if strategy == "steps" else strategy
            reason = f"steps are counted here: {fallback} is written"
            draft.drop(name, shown, reason, "harmless")
    limit = options.get("save_total_limit", "not set")
    if isinstance(limit, int) and limit > 0:
        settings["save_total_limit"] = max(2, limit)
        if limit == 1:
            draft.note("save_total_limit", 1, "2 are kept: the newest may be damaged")
    else:
        reason = "there every checkpoint is kept, here the newest 2"
        draft.note("save_total_limit", limit, reason)


def _evaluation(draft: Draft) -> None:
    """Write when to evaluate, and what the best evaluation is for."""
    options, settings = draft.options, draft.settings
    share = options.get("valid_split")
    if share and not settings.get("valid_data"):
        settings["valid_split"] = float(share) if share < 1 else int(share)
        reason = "which records are held out is decided by a hash of each (valid_split)"
        draft.note("valid_split", share, reason)
    strategy, steps = options.get("eval_strategy", "no"), options.get("eval_steps")
    if strategy == "steps" and (steps is None or steps >= 1):
        settings["eval_steps"] = int(steps or options["logging_steps"])
    elif strategy != "no":
        shown = strategy if steps is None else steps
        draft.drop("eval_strategy", shown, "set eval_steps to steps", "harmless")
    evaluated = settings.get("eval_steps") and (
        settings.get("valid_data") or settings.get("valid_split")
    )
    for name, setting in (
        ("load_best_model_at_end", "keep_best"),
        ("early_stopping", "early_stopping"),
    ):
        value = options.get(name)
        if value and evaluated:
            settings[setting] = value
        elif value:
            draft.drop(name, value, "set it when valid_data and eval_steps are set")


def _trackers(draft: Draft) -> None:
    given = draft.options.get("report_to")
    names = [str(name) for name in (given if isinstance(given, list) else [given]) if name]
    if names == ["all"]:
        draft.settings["report_to"] = "auto"
        return
    for name in names:
        if name not in _TRACKERS:
            reason = f"trackers here are {', '.join(_TRACKERS[1:])}"
            draft.drop("report_to", name, reason, "harmless")
    draft.settings["report_to"] = [name for name in names if name in _TRACKERS] or "none"


def _deepspeed(draft: Draft) -> None:
    """Write a DeepSpeed configuration: keys, JSON text, a file, or after the name of one that is
    part of another tool.
    """
    options = draft.options
    for name, form in _SHARDING.items():
        text = form.format(options.get(name))
        if name in options and ("zero" in text.lower() or text.endswith(".json")):
            options.setdefault("deepspeed", text)
    given = options.get("deepspeed")
    if is_nothing(given):
        return
    _use_adamw(draft)
    text = str(given).strip()
    if isinstance(given, dict):
        draft.settings["deepspeed"] = _known_keys(draft, given)
        return
    if text.startswith("{"):
        draft.settings["deepspeed"] = _known_keys(draft, json.loads(text))
        return
    if os.path.isfile(text):
        content = read_file(text)
        known = _known_keys(draft, content)
        draft.settings["deepspeed"] = text if known == content else known
        return
    name = Path(text).stem.lower()
    found = re.search(r"z(?:ero)?([123])", name)
    if found is None:
        reason = "the file is not here: give yours as --deepspeed"
        draft.drop("deepspeed", given, reason, "harmless")
        return
    stage = int(found[1])
    zero: dict[str, Any] = {"stage": stage}
    if "offload" in name:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    draft.settings["deepspeed"] = {"zero_optimization": zero}
    reason = f"the file is not here: ZeRO-{stage} is written, after its name"
    draft.note("deepspeed", given, reason)


def _known_keys(draft: Draft, keys: dict[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed configuration without the keys that DeepSpeed ignores, which are named."""
    known = {name: value for name, value in keys.items() if name in KNOWN}
    for name in keys.keys() - known.keys():
        draft.drop(f"deepspeed: {name}", keys[name], "DeepSpeed has no such key", "harmless")
    return known


def _use_adamw(draft: Draft) -> None:
    """Write AdamW instead of an optimizer whose moments DeepSpeed cannot shard."""
    if draft.settings.get("optimizer") in ("adamw-8bit", "adafactor"):
        del draft.settings["optimizer"]
        reason = "DeepSpeed shards the moments of AdamW: AdamW with float32 moments is written"
        draft.drop("optim", draft.options.get("optim"), reason)


def _revision(draft: Draft) -> None:
    """Write `model_revision` as a part of the model's name; main and master are the hubs' own."""
    revision, model = draft.options.get("model_revision"), str(draft.settings.get("model"))
    if revision in (None, "", "main", "master"):
        return
    name = f"{model}@{revision}"
    if is_hub_id(model) and split_revision(name)[1] is not None:
        draft.settings["model"] = name
    else:
        reason = "the model is a folder, whose files are taken as they are"
        draft.drop("model_revision", revision, reason)
