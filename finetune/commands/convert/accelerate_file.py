"""The file that `accelerate launch --config_file` names: processes, DeepSpeed and FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.config.files import read_file, read_yaml
from finetune.errors import ConfigError

# Tensor, context and sequence parallelism: processes that share every sample.
_DEGREES = tuple(f"parallelism_config_{kind}_size" for kind in ("tp", "cp", "sp"))
_OPTIONS = ("--config_file", "--config-file")


def read_accelerate(words: list[str]) -> dict[str, Any]:
    """Return the settings in a launcher's file, as options that every tool's table knows.

    Args:
        words: the launcher's part of a command, in front of the tool's name.

    Raises:
        ConfigError: the file is missing, or not a settings file.
    """
    path = _named(words)
    if path is None:
        return {}
    if not path.is_file():
        what = f"accelerate's file {path} is not here: it says how many processes the run has"
        raise ConfigError(what, "--config_file", "convert in the folder that the run starts in")
    if path.suffix in (".yaml", ".yml", ".json"):
        content = read_file(path)
    else:
        content = read_yaml(path.read_text(encoding="utf-8"), str(path))
    degrees = content.get("parallelism_config") or {}
    options: dict[str, Any] = {name: degrees[name] for name in _DEGREES if name in degrees}
    if processes := content.get("num_processes"):
        options["num_processes"] = processes
    kind = str(content.get("distributed_type", "")).upper()
    deepspeed = content.get("deepspeed_config") or {}
    if kind == "DEEPSPEED":
        options["deepspeed"] = deepspeed.get("deepspeed_config_file") or _zero(deepspeed)
    elif kind == "FSDP":
        options["fsdp"] = content.get("fsdp_config") or {}
    return options


def _named(words: list[str]) -> Path | None:
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in _OPTIONS:
            return Path(value if equals else words[number + 1])
    return None


def _zero(keys: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own keys for accelerate's."""
    zero: dict[str, Any] = {"stage": int(keys.get("zero_stage", 2))}
    for ours, theirs in (
        ("offload_optimizer", "offload_optimizer_device"),
        ("offload_param", "offload_param_device"),
    ):
        if keys.get(theirs, "none") != "none":
            zero[ours] = {"device": keys[theirs]}
    return {"zero_optimization": zero}
