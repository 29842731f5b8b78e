"""The options of every command that loads a model to answer with. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from finetune.config.fields import Text, setting
from finetune.config.options import Options
from finetune.runtime.device import DeviceType

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Count = Annotated[int, Field(ge=1)]


class ModelOptions(Options):
    """Which model, and where it runs."""

    model: Text | None = setting(
        None,
        group="model",
        unit="FOLDER|ID",
        description="A model, the output or a checkpoint of a run, an adapter, or a hub id.",
    )
    adapter: Text | None = setting(
        None,
        group="model",
        unit="FOLDER|ID",
        description="A LoRA adapter for --model; without --model on its base.",
    )
    template: Text | None = setting(
        None,
        group="model",
        unit="NAME|FILE",
        description="Chat template, where the model has none of its own.",
    )
    device_type: DeviceType = setting(
        "auto", group="model", description="Where to compute; auto: the best there is."
    )
    dtype: Dtype = setting(
        "auto", group="model", description="Number format; auto: the best of the device."
    )
    context_tokens: int | None = setting(
        None, group="model", unit="N", description="Most tokens of a conversation with its answer."
    )
    trust_remote_code: bool = setting(
        False, group="model", description="Run code that comes with the model."
    )

    def loading(self) -> dict[str, Any]:
        """These as the arguments of `load_for_generation`."""
        return {name: getattr(self, name) for name in ModelOptions.model_fields}

    def problems(self) -> list[tuple[str, str]]:
        if self.model is None and not self.adapter:
            return [
                (
                    "there is no model",
                    "give --model a folder, the output of a run, or a hub id (owner/name)",
                )
            ]
        return []
