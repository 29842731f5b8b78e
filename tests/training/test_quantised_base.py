"""Runs on a quantized base: near the plain run, resumed bit by bit, the adapter loaded by peft on either base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from peft import PeftModel
from run_helpers import LAYOUTS, Materials
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from finetune import sft
from finetune.__main__ import main as finetune
from finetune.config.resolution import resolve_object
from finetune.errors import ConfigError
from finetune.inference.loading import Source, load_weights, trained_on
from finetune.modeling.quantization import NOTE_NAME
from finetune.planning.inputs import fine_tuning_workload
from finetune.planning.memory import memory_of
from finetune.planning.shapes import known_config, shape_of_config
from finetune.planning.workload import Cluster
from finetune.runtime import device as devices
from finetune.training import run as running
from finetune.training.prepare import IDENTITY_SETTINGS, prepare_fine_tuning

# Relative, of losses: weights in 4 bits are off by a tenth of their norm, in 8 bits by a hundredth.
LOSS_LIMITS = {"nf4": 0.05, "int8": 2e-3}
IDS = torch.arange(7, 7 + 2 * 24).reshape(2, 24)


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("quantised"))


@pytest.fixture(scope="module")
def run(materials: Materials) -> Callable[[str], Path]:
    """Output folder of a run of 6 steps, by its quantization."""

    def get(kind: str) -> Path:
        folder = materials.folder / f"run-{kind}"
        if not folder.exists():
            run_helpers.train(materials.settings(folder, quantization=kind, save_steps=2))
        return folder

    return get


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_it_trains_the_same_steps_near_the_plain_run_and_its_adapter_has_a_note(
    materials, run, tmp_path, caplog, kind: str
) -> None:
    plain, quantised = run("none"), run(kind)
    assert run_helpers.sample_ids(plain) == run_helpers.sample_ids(quantised)
    before, losses = run_helpers.losses(plain), run_helpers.losses(quantised)
    difference = run_helpers.largest_relative_difference(before, losses)
    assert 1e-6 < difference < LOSS_LIMITS[kind]
    assert losses[-1] < 0.98 * losses[0]
    for place in (quantised, quantised / "checkpoint-4"):
        moved = tmp_path / place.name
        moved.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors", NOTE_NAME):
            shutil.copy(place / name, moved)
        assert trained_on(moved) == kind
    source, cpu = Source(str(materials.model), moved), torch.device("cpu")
    with caplog.at_level("INFO", "finetune"):
        load_weights(source, cpu, "float32", trust_remote_code=False)
    assert f"trained on a base in {kind}" in caplog.text
    (moved / NOTE_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="note cannot be read"):
        trained_on(moved)
    assert not (plain / NOTE_NAME).exists() and trained_on(plain) == "none"


def test_peft_loads_the_adapter_on_either_base_and_merge_keeps_what_was_trained(
    materials, run, tmp_path, capsys
):
    adapter, nf4 = run("nf4"), {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    four_bits = BitsAndBytesConfig(load_in_4bit=True, **nf4)

    def base(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(materials.model, dtype=torch.float32, **options)

    plain = logits(PeftModel.from_pretrained(base(), adapter))
    held = base(quantization_config=four_bits, device_map="cpu")
    # Training: in evaluation bitsandbytes repacks the weights on some CPUs, and cannot if they are
    # this small.
    trained = PeftModel.from_pretrained(held, adapter).train()(input_ids=IDS).logits.detach()
    assert relative(plain, trained) > 0.05
    for flags, expected in (([], trained), (["--quantization", "none"], plain)):
        output = tmp_path / f"merged{len(flags)}"
        words = ["merge", "--adapter", str(adapter), "--output-dir", str(output)]
        assert finetune([*words, *flags]) == 0
        merged = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
        assert "quantization_config" not in json.loads((output / "config.json").read_text())
        assert relative(logits(merged), expected) < 1e-5
        for text in (capsys.readouterr().err, (output / "README.md").read_text()):
            assert "base in nf4" in text


def test_it_is_another_run_and_plain_ones_are_as_before(materials, tmp_path) -> None:
    plain, quantised = (
        prepare_fine_tuning(resolve_object(materials.settings(tmp_path, **own), 1).config).identity
        for own in ({}, {"quantization": "nf4"})
    )
    assert quantised == plain | {"quantization": "nf4"}
    own = {"kind", "lora_target_modules", "total_steps", "data", "schedule", "weights"}
    assert plain.keys() == own | set(IDENTITY_SETTINGS)


def test_what_it_needs_is_said(materials, tmp_path, monkeypatch, capsys) -> None:
    """A device with kernels, and bitsandbytes."""
    given = materials.settings(tmp_path / "run", quantization="nf4", device_type="auto")
    with monkeypatch.context() as patch:
        patch.setattr(devices, "choose_device_type", lambda requested: "npu")
        with pytest.raises(ConfigError, match="not on npu"):
            prepare_fine_tuning(resolve_object(given, 1).config)
    missing = {"bitsandbytes": None}
    monkeypatch.setattr(running, "find_spec", lambda name: missing.get(name, object()))
    (tmp_path / "settings.json").write_text(json.dumps(given | {"device_type": "cpu"}))
    assert sft.main(["--config", str(tmp_path / "settings.json")]) == 2
    assert "pip install bitsandbytes" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "each"), [("none", 2.0), ("nf4", 0.516), ("int8", 1.0)])
@pytest.mark.parametrize("layout", ["plain", "zero2", "zero3"])
def test_a_plan_counts_the_bytes_of_the_base(kind: str, each: float, layout: str) -> None:
    shape = shape_of_config(known_config("Qwen/Qwen3-8B"))
    given = {"model": "Qwen/Qwen3-8B", "data": "x.jsonl", "output_dir": "out", "quantization": kind}
    config = resolve_object(given | LAYOUTS[layout], 8).config
    work = fine_tuning_workload(config, shape, Cluster(devices_per_node=8))
    rest, spread = 2 * (shape.total - shape.block_matrices), 8 if layout == "zero3" else 1
    sharded = 2 * work.adapter / spread + 4 * work.adapter / 8
    adapter = 4 * work.adapter if layout == "plain" else sharded
    scales = 0.016 * shape.block_matrices if kind == "nf4" else 0.0  # whole on every device
    expected = (rest + each * shape.block_matrices - scales) / spread + scales + adapter
    terms = memory_of(work).terms
    found = sum(term.bytes for term in terms if term.kind == "weights")
    assert found == pytest.approx(expected, rel=5e-3)
    dequantised = [term.bytes for term in terms if "dequantised" in term.formula]
    assert dequantised == ([] if kind == "none" else [2 * 4096 * 12288])
