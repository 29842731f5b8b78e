"""Names that an adapter is asked for, looked for in the model: peft passes over those that it does
not find.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from finetune.config.names import flag
from finetune.errors import ConfigError


def check_named(model: torch.nn.Module, named: dict[str, tuple[str, ...]]) -> None:
    """Raise ConfigError for a module to save that is not there, or a layer: peft passes them
    over.
    """
    modules = {
        name for name, module in model.named_modules() if any(True for _ in module.parameters())
    }
    last = {name.rpartition(".")[2] for name in modules}
    for setting in named.keys() & {"modules_to_save", "layers_to_transform"}:
        names = named[setting]
        missing = [
            name
            for name in names
            if not any(f".{module}".endswith(f".{name}") for module in modules)
        ]
        if missing:
            raise ConfigError(
                f"{setting} names {', '.join(missing)}, and the model has none",
                where=flag(setting),
                fix=f"choose from {', '.join(sorted(last - {''}))}",
            )


def check_patterns(adapted: Sequence[str], patterns: dict[str, tuple[str, ...]]) -> None:
    """Raise ConfigError for a pattern that fits none of the `adapted` names, as peft fits them
    (get_pattern_key).
    """
    for setting, keys in patterns.items():
        for key in keys:
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in adapted):
                raise ConfigError(
                    f"{setting} names {key}, and no module of that name gets an adapter",
                    where=flag(setting),
                    fix=(
                        "choose from"
                        f" {', '.join(sorted({name.rpartition('.')[2] for name in adapted}))}"
                    ),
                )


def check_saved_of_quantised(model: PreTrainedModel, kind: str, names: Sequence[str]) -> None:
    """Raise ConfigError for modules to save with linear layers inside that will be in few bits: no
    number is learned in those.
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        held = any(
            isinstance(inner, torch.nn.Linear) and inner is not head for inner in module.modules()
        )
        if held and name.endswith(tuple(names)):  # as peft fits them
            raise ConfigError(
                f"modules_to_save has {name}, whose weights are in {kind}: they cannot be trained",
                where="--modules-to-save",
                fix=(
                    "on a quantised base embeddings, head and norms can be trained whole; LoRA"
                    " trains the rest"
                ),
            )
