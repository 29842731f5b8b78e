"""gpt-oss, whose experts lie on disk in MXFP4: 4-bit numbers in blocks of 32 with one exponent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_models import family
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError
from finetune.modeling.pretrained import check_model, load_model

# OCP Microscaling Formats 1.0, table 5 (E2M1): sign, two bits of exponent, one of mantissa.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])


def quantized_folder(folder: Path) -> dict[str, torch.Tensor]:
    """A model as OpenAI's files have it; returns what its experts' weights are, `(E, in, out)`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("gpt_oss")).to(torch.bfloat16)
    model.save_pretrained(folder)
    family("chatml").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    wanted = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), dtype=torch.uint8)
        exponents = torch.randint(120, 128, codes.shape[:3], dtype=torch.uint8)
        tensors[f"{name}_blocks"] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        tensors[f"{name}_scales"] = exponents
        values = E2M1[codes.long()] * 2.0 ** (exponents.float() - 127)[..., None]
        wanted[name] = values.flatten(2).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    return wanted


def test_its_weights_are_converted_while_they_are_loaded(tmp_path: Path) -> None:
    wanted = quantized_folder(tmp_path / "model")
    settings = {"data": ("unused",), "output_dir": "unused", "model": str(tmp_path / "model")}
    config = RunConfig(**settings)
    check_model(config)
    model = load_model(config, model_dtype=torch.bfloat16, zero3=False)
    found = model.state_dict()
    for name, values in wanted.items():
        assert torch.equal(found[name].float(), values), name
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert wanted.keys() <= saved.keys()
    with pytest.raises(ConfigError, match="not quantised again as nf4"):
        check_model(RunConfig(**settings, quantization="nf4"))
