"""The run's own numbers, for the text of steps: what logs and run.yaml mention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Name of a placeholder: names under which the setting is printed.
_SETTINGS = {
    "micro_batch_size": (
        "micro_batch_size", "device_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu",
    ),
    "cutoff_len": ("cutoff_len", "max_seq_len", "max_seq_length", "max_length", "model_max_length", "seq_length"),
    "world_size": ("world_size", "num_processes"),
    "nproc": ("nproc_per_node",),
    "master_addr": ("master_addr",),
    "master_port": ("master_port",),
    "timeout_seconds": ("timeout_seconds",),
    "dataloader_num_workers": ("dataloader_num_workers",),
    "learning_rate": ("learning_rate", "lr"),
}  # fmt: skip
_NAMES = {name: setting for setting, names in _SETTINGS.items() for name in names}
FACT_WORDS = tuple(_NAMES) + tuple(name.replace("_", "-") for name in _NAMES if "_" in name)
_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_FACT = re.compile(
    rf"(?<![A-Za-z])(?P<name>{'|'.join(sorted((n.replace('_', '[_-]') for n in _NAMES), key=len, reverse=True))})"
    rf"""["']?(?:\s*[=:]\s*|\s+|\s*\.{{3,40}}\s*)["']?(?P<value>{_NUMBER}(?!\.?\w)|[\w.-]{{1,100}}(?=["',\s]|$))""",
    re.IGNORECASE,
)

# What a log is about: the conditions of entries (`when`).
FACTS = {
    "npu": re.compile(
        r"\b(?:torch_)?(?:npu|NPU)|[Aa]scend(?!ing|ed|s\b)|\bHCCL|\bhccl|\bCANN\b|\baclnn|davinci"
        r"|\bE[1-9EHIJLZ]\d{4}\b|\bERR\d{5}\b"
    ),
    "cuda": re.compile(r"cuda|CUDA|\bNCCL\b|nvidia|NVIDIA|cuDNN|\bH[12]00\b|\bA100\b"),
    "server": re.compile(
        r"\bv[Ll][Ll][Mm]\b|vllm[/_]|sglang|lmdeploy|uvicorn|EngineCore|api_server|mindie"
    ),
    "training": re.compile(r"\b[Tt]rain(?:er|ing)?\b|trainer\.py|\bepoch\b|\bloss\b|optimizer"),
}


def facts_of(text: str) -> frozenset[str]:
    """Return the names of `FACTS` that a text tells.

    One of an NPU tells no "cuda", and one of training no "server": a trainer may start an engine.
    """
    found = {name for name, form in FACTS.items() if form.search(text)}
    found -= {"cuda"} if "npu" in found else set()
    return frozenset(found - {"server"} if "training" in found else found)


def facts_in(text: str) -> dict[str, str]:
    """Settings that a line mentions, by the name of their placeholder."""
    found: dict[str, str] = {}
    for match in _FACT.finditer(text):
        name, value = _NAMES[match["name"].lower().replace("-", "_")], match["value"]
        if name == "master_addr" or re.fullmatch(_NUMBER, value):
            found.setdefault(name, value)
    return found


def facts_of_config(config: Mapping[str, Any]) -> dict[str, str]:
    """The same of a run's configuration."""
    return {
        _NAMES[name]: str(value)
        for name, value in config.items()
        if name in _NAMES and value is not None
    }


def with_next_values(facts: Mapping[str, str]) -> dict[str, str]:
    """With numbers to try next: half the batch, half the length, the next port."""
    made = dict(facts)
    for name in ("micro_batch_size", "cutoff_len"):
        number = facts.get(name, "")
        if re.fullmatch(r"\d{1,9}", number) and int(number) > 1:
            made[f"half_{name}"] = str(int(number) // 2)
    if (own := _gib(facts.get("allocated", ""))) and own < _gib(facts.get("capacity", "")) / 3:
        made["own_share"] = f"{facts['allocated']} of {facts['capacity']}"
    if (unused := _gib(facts.get("unallocated", ""))) and unused > 2 * _gib(
        facts.get("wanted", "")
    ):
        made["fragmented"] = facts["unallocated"]
    port = facts.get("port") or facts.get("master_port", "")
    if re.fullmatch(r"\d{1,5}", port) and int(port) < 65535:
        made["next_port"] = str(int(port) + 1)
    return made


def _gib(text: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMG])iB", text)
    return float(match[1]) * 2.0 ** {"G": 0, "M": -10, "K": -20}[match[2]] if match else 0.0
