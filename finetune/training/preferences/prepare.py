"""What a run on preferences knows before a model or a process group exists."""

from __future__ import annotations

from typing import Any

from finetune.config.preference_config import LOSSES, PreferenceConfig
from finetune.training.prepare_sft import Prepared, prepare_with


def prepare_data(config: PreferenceConfig) -> Prepared:
    """Tokenizer, samples, and the list of global batches, with the checks that need no weights."""
    settings = ("loss", "beta", *LOSSES[config.loss].settings)
    identity: dict[str, Any] = {"kind": "dpo", **{name: getattr(config, name) for name in settings}}
    return prepare_with(config, identity)
