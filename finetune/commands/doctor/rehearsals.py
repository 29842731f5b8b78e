"""What doctor's dry run trains: a small run of each kind, executed as the configured one would be.
Needs no torch.

`dry_run.make` has put into the folder: `model`, `train.jsonl`, `pairs.jsonl`, `labels.jsonl` and
`tokens.bin`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.config.preference_config import PreferenceConfig, PreferenceSettings
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.run_config import RunConfig

STEPS = 2
_WINDOW = 64  # tokens


def fine_tuning(folder: Path, processes: int, config: RunConfig | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "cutoff_len": 128,
        "micro_batch_size": 1,
        "global_batch_size": 2 * processes,
        "max_steps": STEPS,
        "lora_r": 4,
    }
    return settings | _of_config(config, "finetuning", "deepspeed")


def preferences(folder: Path, processes: int, config: PreferenceConfig | None) -> dict[str, Any]:
    """Of a model that is trained whole the resumed run finds what was said of the answers
    before.
    """
    labelled = config is not None and config.preference_form == "labels"
    loss = _of_config(config, *PreferenceSettings.model_fields)
    data = str(folder / ("labels.jsonl" if labelled else "pairs.jsonl"))
    return fine_tuning(folder, processes, config) | loss | {"data": data}


def pretraining(folder: Path, processes: int, config: PretrainConfig | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_data_path": str(folder / "tokens.bin"),
        "tokenizer": str(folder / "model"),
        "depth": 2,
        "max_seq_len": _WINDOW,
        "device_batch_size": 1,
        "total_batch_size": 2 * processes * _WINDOW,
        "num_iterations": STEPS,
    }
    if config is not None and config.model is not None:
        settings |= {"model": str(folder / "model"), "lora_r": 4, "finetuning": config.finetuning}
        del settings["tokenizer"], settings["depth"]
    return settings | _of_config(config, "arch", "optimizer", "backend", "compile", "fp8")


def _of_config(config: RunConfig | PretrainConfig | None, *names: str) -> dict[str, Any]:
    """What decides how the run is executed; settings without a value have their default."""
    values = {} if config is None else {name: getattr(config, name) for name in ("dtype", *names)}
    return {name: value for name, value in values.items() if value is not None}
