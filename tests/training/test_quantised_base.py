"""Runs on a base in few bits: near the plain run, resumed bit by bit, the adapter loaded by peft on
either base.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import preference_rows
import pytest
import run_helpers
import torch
from peft import PeftModel
from run_helpers import LAYOUTS, Materials
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from finetune.__main__ import main as finetune
from finetune.config.resolution import resolve_object
from finetune.errors import ConfigError
from finetune.inference.loading import Source, load_weights, trained_on
from finetune.modeling.quantization import NOTE_NAME
from finetune.planning.inputs import fine_tuning_workload
from finetune.planning.memory import memory_of
from finetune.planning.shapes import known_config, shape_of_config
from finetune.planning.workload import Cluster
from finetune.training.prepare import IDENTITY_SETTINGS, prepare_fine_tuning

# Relative, of losses: weights in 4 bits are off by a tenth of their norm, in 8 bits by a hundredth.
LOSS_LIMITS = {"nf4": 0.05, "int8": 2e-3}
IDS = torch.arange(7, 7 + 2 * 24).reshape(2, 24)


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("quantised"))


@pytest.fixture(scope="module")
def run(materials: Materials):
    """Output folder of a run of 6 steps, by its quantization."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = materials.folder / f"run-{kind}"
            run_helpers.train(materials.settings(made[kind], quantization=kind, save_steps=2))
        return made[kind]

    return get


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_it_trains_the_same_steps_near_the_plain_run(run, kind: str) -> None:
    plain, quantised = run("none"), run(kind)
    assert run_helpers.sample_ids(plain) == run_helpers.sample_ids(quantised)
    difference = run_helpers.largest_relative_difference(
        run_helpers.losses(plain), run_helpers.losses(quantised)
    )
    assert 1e-6 < difference < LOSS_LIMITS[kind]
    losses = run_helpers.losses(quantised)
    assert losses[-1] < 0.98 * losses[0]


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_run_bit_by_bit(materials, run, tmp_path) -> None:
    whole, killed = run("nf4"), tmp_path / "killed"
    wanted = materials.settings(killed, quantization="nf4", save_steps=2, async_save=False)
    run_helpers.kill_and_resume(wanted, 6, resumed_at=4)
    run_helpers.assert_same_training(killed, whole)


def test_peft_loads_the_adapter_on_either_base_and_merge_keeps_what_was_trained(
    materials, run, tmp_path, capsys
):
    adapter = run("nf4")
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )

    def base(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(materials.model, dtype=torch.float32, **options)

    plain = logits(PeftModel.from_pretrained(base(), adapter))
    quantised = PeftModel.from_pretrained(
        base(quantization_config=four_bits, device_map="cpu"), adapter
    )
    # Training: in evaluation bitsandbytes repacks the weights on some CPUs, and cannot where they
    # are this small.
    trained = quantised.train()(input_ids=IDS).logits.detach()
    rounding = relative(plain, trained)
    assert rounding > 0.05
    for flags, expected in (((), trained), (("--quantization", "none"), plain)):
        output = tmp_path / f"merged{len(flags)}"
        assert (
            finetune(["merge", "--adapter", str(adapter), "--output-dir", str(output), *flags]) == 0
        )
        merged = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
        assert "quantization_config" not in json.loads((output / "config.json").read_text())
        assert relative(logits(merged), expected) < 1e-5
        assert (
            "base in nf4" in capsys.readouterr().err
            and "base in nf4" in (output / "README.md").read_text()
        )


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_adapter_says_what_it_was_trained_on_wherever_it_lies(
    materials, run, tmp_path, caplog, kind
) -> None:
    for place in (run(kind), run(kind) / "checkpoint-4"):
        moved = tmp_path / place.name
        moved.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors", NOTE_NAME):
            shutil.copy(place / name, moved)
        assert trained_on(moved) == kind
    with caplog.at_level("INFO", "finetune"):
        load_weights(
            Source(str(materials.model), moved),
            torch.device("cpu"),
            "float32",
            trust_remote_code=False,
        )
    assert f"trained on a base in {kind}" in caplog.text
    (moved / NOTE_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="note cannot be read"):
        trained_on(moved)
    assert not (run("none") / NOTE_NAME).exists() and trained_on(run("none")) == "none"


def test_it_is_another_run_and_plain_ones_are_as_before(materials, tmp_path) -> None:
    plain, quantised = (
        prepare_fine_tuning(resolve_object(materials.settings(tmp_path, **own), 1).config).identity
        for own in ({}, {"quantization": "nf4"})
    )
    assert quantised == plain | {"quantization": "nf4"}
    assert plain.keys() == {
        "kind", "lora_target_modules", "total_steps", "data", "schedule", "weights", *IDENTITY_SETTINGS
    }  # fmt: skip


@pytest.mark.parametrize("device", ["npu", "mps"])
def test_devices_without_kernels_are_refused_where_they_are_found(
    materials, tmp_path, monkeypatch, device
) -> None:
    from finetune.runtime import device as devices

    config = resolve_object(
        materials.settings(tmp_path, quantization="nf4", device_type="auto"), 1
    ).config
    monkeypatch.setattr(devices, "choose_device_type", lambda requested: device)
    with pytest.raises(ConfigError, match=f"not on {device}"):
        prepare_fine_tuning(config)


def test_without_bitsandbytes_it_says_what_to_install(
    materials, tmp_path, monkeypatch, capsys
) -> None:
    from finetune import sft
    from finetune.training import run as running

    monkeypatch.setattr(
        running, "find_spec", lambda name: None if name == "bitsandbytes" else object()
    )
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(materials.settings(tmp_path / "run", quantization="int8")))
    assert sft.main(["--config", str(settings)]) == 2
    assert "pip install bitsandbytes" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "each"), [("none", 2.0), ("nf4", 0.516), ("int8", 1.0)])
@pytest.mark.parametrize("layout", ["plain", "zero2", "zero3"])
def test_a_plan_counts_the_bytes_of_the_base(kind: str, each: float, layout: str) -> None:
    shape = shape_of_config(known_config("Qwen/Qwen3-8B"))
    given = {
        "model": "Qwen/Qwen3-8B",
        "data": "x.jsonl",
        "output_dir": "out",
        "quantization": kind,
        **LAYOUTS[layout],
    }
    work = fine_tuning_workload(resolve_object(given, 8).config, shape, Cluster(devices_per_node=8))
    rest, spread = 2 * (shape.total - shape.block_matrices), 8 if layout == "zero3" else 1
    adapter = (
        4 * work.adapter if layout == "plain" else 2 * work.adapter / spread + 4 * work.adapter / 8
    )
    scales = 0.016 * shape.block_matrices if kind == "nf4" else 0.0  # whole on every device
    expected = (rest + each * shape.block_matrices - scales) / spread + scales + adapter
    found = sum(term.bytes for term in memory_of(work).terms if term.kind == "weights")
    assert found == pytest.approx(expected, rel=5e-3)
    dequantised = [term for term in memory_of(work).terms if "dequantised" in term.formula]
    assert [term.bytes for term in dequantised] == ([] if kind == "none" else [2 * 4096 * 12288])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "zero2", "zero3_offload"])
def test_two_processes_train_the_same(materials, run, tmp_path, layout: str) -> None:
    output_dir = tmp_path / "run"
    run_helpers.train(
        materials.settings(output_dir, quantization="int8", packing=False, **LAYOUTS[layout]), 2
    )
    assert run_helpers.sample_ids(output_dir) == run_helpers.sample_ids(run("int8"))
    difference = run_helpers.largest_relative_difference(
        run_helpers.losses(run("int8")), run_helpers.losses(output_dir)
    )
    assert difference < 1e-5


@pytest.mark.slow
def test_the_reference_of_preferences_is_the_quantised_base(materials, tmp_path) -> None:
    """With the adapter off the base is what it was: before it has learned, policy and reference
    agree to the bit.
    """
    preference_rows.make_pairs(tmp_path / "pairs.jsonl", 24)
    found = {}
    for layout, processes in (("plain", 1), ("zero3", 2)):
        folder = tmp_path / layout
        given = {"data": str(tmp_path / "pairs.jsonl"), "quantization": "nf4", **LAYOUTS[layout]}
        run_helpers.train(
            materials.settings(folder, max_steps=4, **given), processes, module="finetune.dpo"
        )
        found[layout] = run_helpers.losses(folder)
    assert found["plain"][0] == pytest.approx(math.log(2), rel=1e-6)
    assert run_helpers.largest_relative_difference(found["plain"], found["zero3"]) < 1e-5
