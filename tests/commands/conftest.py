from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def make_adapter(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[..., Path]:
    """A peft adapter with weights that change what the model says, and the tokenizer beside it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def make(
        *, base: Path = tiny_model, scale: float = 1.0, folder: Path | None = None, **settings
    ) -> Path:
        folder = folder or tmp_path_factory.mktemp("adapters") / "adapter"
        torch.manual_seed(3)
        settings = {"target_modules": "all-linear"} | settings
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapted = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.mul_(0.3 * scale)
                elif parameter.requires_grad:  # of modules_to_save
                    parameter.add_(0.1 * torch.randn_like(parameter))
        adapted.save_pretrained(folder)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
        return folder

    return make
