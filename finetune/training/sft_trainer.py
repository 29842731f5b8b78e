"""SFTTrainer: RunTrainer for fine-tuning; the output is a peft adapter or a whole model, with its
tokenizer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from finetune.batching.steps import StepBatches
from finetune.modeling.pretrained import DTYPES, check_adapter_file
from finetune.modeling.quantisation import NOTE_NAME, quantization_of
from finetune.storage.checkpoint_files import step_of
from finetune.training.optimizers import make_small_optimizer, set_apart
from finetune.training.saved_tensors import read_description, write_tensors
from finetune.training.state import trainable
from finetune.training.trainer import RunTrainer


class SFTTrainer(RunTrainer):
    """Fine-tunes with or without LoRA.

    Args:
        lora: whether the model carries an adapter.
        compute_dtype: name of the run's dtype; a whole model is saved in it.
        optimizer_name: as `--optimizer`.
        lora_plus_ratio: rate of the B matrices over that of everything else (LoRA+, Hayou et al.
            2024, arXiv:2402.12354); None: the same.
    """

    processing_class: PreTrainedTokenizerBase  # there is always one
    # given by run.py where evaluations answer prompts
    ask: Callable[..., dict[str, float]] | None = None

    def __init__(
        self,
        *,
        lora: bool,
        compute_dtype: str,
        optimizer_name: str = "adamw",
        lora_plus_ratio: float | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.optimizer_name = optimizer_name
        self.lora_plus_ratio = lora_plus_ratio
        self.lora = lora
        self.compute_dtype = compute_dtype
        self.own_padding = getattr(self.model.config, "pad_token_id", None)
        if (padding := getattr(self.processing_class, "pad_token_id", None)) is not None:
            # As Trainer would, with a warning about which nothing is to be done
            # (trainer_utils.align_special_tokens).
            for found in (
                self.model.config.get_text_config(),
                getattr(self.model, "generation_config", None),
            ):
                if found is not None:
                    found.pad_token_id = padding

    def evaluation(self, step_batches: StepBatches) -> dict[str, float]:
        """The losses and, where answers are asked for, what share of them is right. Every rank
        calls.
        """
        found = super().evaluation(step_batches)
        if self.ask is None:
            return found
        execution, control, model = (
            step_batches.execution,
            self.context.control,
            cast(Any, self.model),
        )
        longest = int(self.step_batches.samples.lengths.max())
        return found | self.ask(
            self.model_wrapped,
            model.get_base_model() if self.lora else model,
            rank=execution.rank,
            world_size=execution.world_size,
            tokens_at_once=execution.token_budget
            or longest * (execution.samples_per_microbatch or 1),
            gather=control.gather,
            # ZeRO-3 gathers weights in each forward, so all ranks make as many.
            going=control.any if hasattr(next(model.parameters()), "ds_id") else bool,
        )

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        made = self.optimizer is None
        if made and self.optimizer_name != "adamw":
            decayed = set(self.get_decay_parameter_names(self.model))
            groups: list[dict[str, Any]] = [
                {
                    "params": [
                        p for name, p in trainable(self.model) if (name in decayed) == decays
                    ],
                    "weight_decay": self.args.weight_decay if decays else 0.0,
                }
                for decays in (True, False)
            ]
            self.optimizer = make_small_optimizer(
                self.optimizer_name, self.model, groups, self.args
            )
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if made and self.lora_plus_ratio is not None:
            ups = {
                id(parameter)
                for name, parameter in self.model.named_parameters()
                if "lora_B" in name
            }
            set_apart(optimizer, ups, self.lora_plus_ratio)
        return optimizer

    def model_files(self, weights: Callable[[], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
        """The adapter as peft reads it, and the tokenizer: a LoRA run's checkpoint is an adapter
        folder of its own.
        """
        write_model = self._adapter_files(weights()) if self.lora else None

        def write(folder: Path) -> None:
            if write_model is not None:
                write_model(folder)
            self.processing_class.save_pretrained(folder)

        return write

    def _adapter_files(
        self, weights: dict[str, torch.Tensor], saved: Path | None = None
    ) -> Callable[[Path], None]:
        write, shapes = adapter_writer(self.model, weights), adapter_shapes(self.model)
        trained = self._has_learned(saved)

        def write_and_check(folder: Path) -> None:
            write(folder)
            check_adapter_file(folder, shapes, trained=trained)

        return write_and_check

    def _has_learned(self, saved: Path | None) -> bool:
        """Whether steps were taken, and not skipped, at a learning rate above zero (a warm-up's
        first has none).

        Args:
            saved: until this checkpoint; None: until now.
        """
        if saved is None:
            step, taken = self.state.global_step, self.training_state().optimizer_step()
        else:
            step, taken = step_of(saved.name) or 0, read_description(saved)["optimizer_step"]
        idle = sum(
            self.context.learning_rate_factor(number) == 0 for number in range(min(step, 10_000))
        )
        return bool(taken > idle)

    def output_weights(self) -> dict[str, torch.Tensor]:
        """Float32 masters of an adapter; a whole model in the compute dtype."""
        if self.lora:
            return self.training_state().collect_weights(keep=self.is_world_process_zero())
        return self.whole_weights(DTYPES["bfloat16"] if self.compute_dtype == "bfloat16" else None)

    def write_output(
        self, folder: Path, weights: dict[str, torch.Tensor], saved: Path | None
    ) -> None:
        if self.lora:
            self._adapter_files(weights, saved)(folder)
        else:
            # Trainer has copied the tokenizer's pad token there, where it would become a
            # padding_idx: an embedding that does not train in whatever is trained from this model;
            # and it may be the token that ends answers.
            self.model.config.pad_token_id = self.own_padding
            self.model.save_pretrained(folder, state_dict=weights)
            _note_dtype(folder / "config.json", next(iter(weights.values())).dtype)
        self.processing_class.save_pretrained(folder)


def _note_dtype(path: Path, dtype: torch.dtype) -> None:
    """Let config.json name the dtype of the written weights: save_pretrained names that of the
    model in memory.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def adapter_writer(model: Any, weights: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    """What writes an adapter's files into a folder, without looking at the model again.

    They are adapter_config.json and adapter_model.safetensors, and of a quantised base what it was
    held in.

    Args:
        model: a peft model.
        weights: its trainable ones, by parameter name.
    """
    from peft import get_peft_model_state_dict

    lora = copy.copy(model.peft_config["default"])
    # As PeftModel.save_pretrained does: an adapter is frozen when it is loaded, unless the loader
    # asks to train it.
    lora.inference_mode = True
    # Not PeftModel.save_pretrained: it takes the tensors from the model, and under ZeRO-3 those are
    # empty there.
    adapter = get_peft_model_state_dict(model, state_dict=_under_all_names(model, weights))
    quantization = quantization_of(model)

    def write(folder: Path) -> None:
        lora.save_pretrained(folder)
        if quantization != "none":
            (folder / NOTE_NAME).write_text(
                json.dumps({"quantization": quantization}) + "\n", encoding="utf-8"
            )
        write_tensors(
            folder / "adapter_model.safetensors",
            {name: tensor.contiguous() for name, tensor in adapter.items()},
        )

    return write


def adapter_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """What a complete adapter file holds: the name there and the whole shape of every trained
    parameter.
    """
    from peft import get_peft_model_state_dict

    empty = {
        name: torch.empty(getattr(parameter, "ds_shape", parameter.shape), device="meta")
        for name, parameter in trainable(model)
    }
    adapter = get_peft_model_state_dict(model, state_dict=_under_all_names(model, empty))
    return {name: tuple(tensor.shape) for name, tensor in adapter.items()}


def _under_all_names(
    model: torch.nn.Module, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Trained weights under each of their names, as peft looks for them: tied modules have one
    weight.
    """
    names = {id(parameter): name for name, parameter in trainable(model)}
    every = model.named_parameters(remove_duplicate=False)
    return {
        name: weights[names[id(parameter)]] for name, parameter in every if id(parameter) in names
    }
