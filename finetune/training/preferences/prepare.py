"""What a run on preferences knows before a model or a process group exists."""

from __future__ import annotations

from typing import Any

from finetune.config.preference_config import PreferenceConfig
from finetune.training.prepare_sft import Prepared, prepare_with

# Of each loss: the settings that it reads, besides its beta.
_READ = {
    "dpo": ("label_smoothing", "sft_weight"),
    "ipo": ("sft_weight",),
    "orpo": ("sft_weight",),
    "simpo": ("label_smoothing", "simpo_gamma", "sft_weight"),
    "kto": ("desirable_weight", "undesirable_weight"),
}


def prepare_data(config: PreferenceConfig) -> Prepared:
    """Tokenizer, samples, and the list of global batches, with the checks that need no weights."""
    settings = ("loss", "beta", *_READ[config.loss])
    identity: dict[str, Any] = {"kind": "dpo", **{name: getattr(config, name) for name in settings}}
    return prepare_with(config, identity)
