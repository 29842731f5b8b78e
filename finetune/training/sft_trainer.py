"""SFTTrainer: RunTrainer for fine-tuning; the output is a peft adapter or a whole model, with its tokenizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from finetune.modeling.pretrained import DTYPES, check_adapter_file
from finetune.storage import durable_files
from finetune.training.state import gathered, trainable
from finetune.training.trainer import RunTrainer


class SFTTrainer(RunTrainer):
    """Fine-tunes with or without LoRA.

    Args:
        lora: whether the model carries an adapter.
        compute_dtype: name of the run's dtype; a whole model is saved in it.
    """

    def __init__(self, *, lora: bool, compute_dtype: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.lora, self.compute_dtype = lora, compute_dtype

    def write_model_files(self, folder: Path) -> list[str]:
        """On rank 0, beside the saved state: the adapter as peft reads it, and the tokenizer. Returns the names.

        A checkpoint of a LoRA run is thereby an adapter folder of its own.
        """
        before = set(os.listdir(folder))
        if self.lora:
            write_adapter(folder, self.model, load_file(folder / "weights.safetensors"))
            check_adapter_file(folder, adapter_shapes(self.model), trained=self._has_learned())
        self.processing_class.save_pretrained(folder)
        return sorted(set(os.listdir(folder)) - before)

    def _has_learned(self) -> bool:
        """Whether any step so far had a learning rate above zero (a warm-up's first has none)."""
        return any(self.context.learning_rate_factor(step) > 0 for step in range(min(self.state.global_step, 10_000)))

    def save_output(self, output_dir: Path) -> None:
        """Put the result into the run folder: written beside, reopened, then moved in. Every rank calls."""
        staging = output_dir / ".staging-0-output"
        if self.lora:
            weights = self._whole_weights(trainable_only=True)
        else:
            weights = self._whole_weights(trainable_only=False)
        if self.is_world_process_zero():
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            if self.lora:
                write_adapter(staging, self.model, weights)
                check_adapter_file(staging, adapter_shapes(self.model), trained=self._has_learned())
            else:
                self.model.save_pretrained(staging, state_dict=weights)
            self.processing_class.save_pretrained(staging)
            for path in sorted(staging.iterdir()):
                durable_files.share_file(path)
                durable_files.sync_file(path)
                os.replace(path, output_dir / path.name)
            staging.rmdir()
            durable_files.sync_folder(output_dir)
        self.context.control.barrier()

    def _whole_weights(self, *, trainable_only: bool) -> dict[str, torch.Tensor]:
        """Whole tensors by name on rank 0, CPU: float32 masters of an adapter, compute dtype of a whole model."""
        if trainable_only:
            state = self.training_state()
            return state.collect_weights(keep=self.is_world_process_zero())
        dtype = DTYPES["bfloat16"] if self.compute_dtype == "bfloat16" else None
        weights = {}
        for name, parameter in self.model.named_parameters():
            with gathered(parameter):
                if self.is_world_process_zero():
                    weights[name] = parameter.detach().to("cpu", dtype or parameter.dtype, copy=True)
        if self.is_world_process_zero():
            for name, buffer in self.model.state_dict(keep_vars=True).items():
                if not isinstance(buffer, torch.nn.Parameter):
                    weights[name] = buffer.detach().cpu().clone()
        return weights


def write_adapter(folder: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors from trainable weights by parameter name."""
    from peft import get_peft_model_state_dict

    lora = model.peft_config["default"]
    in_training, lora.inference_mode = lora.inference_mode, True
    lora.save_pretrained(folder)
    lora.inference_mode = in_training
    adapter = get_peft_model_state_dict(model, state_dict=weights)
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in adapter.items()}, path)
    durable_files.share_file(path)


def adapter_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """What a complete adapter file holds: the name there and the whole shape of every trained parameter."""
    return {
        ".".join(part for part in name.split(".") if part != "default"): tuple(
            getattr(parameter, "ds_shape", parameter.shape)
        )
        for name, parameter in trainable(model)
    }
