"""The options of `merge`. Needs no torch."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from finetune.config.fields import PathOption, Text, setting
from finetune.config.options import Options
from finetune.inference.options import Dtype
from finetune.runtime.device import DeviceType

option = partial(setting, group="options")


class MergeOptions(Options):
    usage: ClassVar[str] = (
        "python -m finetune merge --adapter FOLDER|ID --output-dir FOLDER [--flag value ...]"
    )
    summary: ClassVar[str] = (
        "Merge a LoRA adapter into its base model: a folder that transformers and whatever serves"
        " its models load\nwithout this package or peft. The folder is tested before it gets its"
        " name: its answers must be the adapter's."
    )
    epilog: ClassVar[str] = (
        "Exit code: 0 merged and tested; 1 failed, and nothing is left; 2 refused before that; 130"
        " interrupted."
    )
    groups: ClassVar[tuple[str, ...]] = ("options",)

    adapter: Text = option(
        unit="FOLDER|ID", description="Output or checkpoint of a LoRA run, or a hub id."
    )
    model: Text | None = option(
        None,
        unit="FOLDER|ID",
        shown_default="the one that the adapter names",
        description="Its base.",
    )
    output_dir: PathOption = option(unit="FOLDER", description="New folder for the merged model.")
    quantization: Literal["auto", "none", "nf4", "int8"] = option(
        "auto",
        description=(
            "Round the base's weights as in QLoRA before; auto: as the run did that made the"
            " adapter."
        ),
    )
    format: Literal["safetensors", "gguf"] = option(
        "safetensors",
        description="gguf: one file for llama.cpp and Ollama instead, with a Modelfile.",
    )
    llama_cpp: PathOption | None = option(
        None,
        unit="FOLDER",
        shown_default="LLAMA_CPP, or PATH",
        description="llama.cpp's folder, for its convert_hf_to_gguf.py.",
    )
    dtype: Dtype = option("auto", description="Of the weights; auto: the base's own.")
    device_type: DeviceType = option("cpu", description="Where to compute.")
    template: Text | None = option(
        None, unit="NAME|FILE", description="Chat template, where the adapter has none of its own."
    )
    trust_remote_code: bool = option(False, description="Run code that comes with the model.")
