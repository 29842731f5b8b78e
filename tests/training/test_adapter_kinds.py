"""Adapters beyond plain LoRA: what peft loads is what was trained, merged or not; resumed, sharded, and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from peft import PeftModel
from run_helpers import LAYOUTS, Materials
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from finetune import run, sft
from finetune.__main__ import main as finetune
from finetune.config.resolution import resolve_object
from finetune.errors import ConfigError
from finetune.inference.loading import Source, load_weights, trained_on
from finetune.modeling.adapter import add_adapter
from finetune.modeling.loss import make_chunked_head
from finetune.modeling.pretrained import count_parameters
from finetune.modeling.quantization import NOTE_NAME
from finetune.planning.inputs import fine_tuning_workload
from finetune.planning.memory import memory_of
from finetune.planning.shapes import known_config, shape_of_config, shape_of_model
from finetune.planning.workload import Cluster
from finetune.runtime import device as devices
from finetune.training import run as running
from finetune.training.prepare import IDENTITY_SETTINGS, prepare_fine_tuning
from finetune.training.trainer import SFTTrainer

IDS = torch.arange(7, 7 + 2 * 24).reshape(2, 24)
TOKENS = ["<|im_end|>", "<|im_start|>"]
MATERIALS = {"layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "ranks": {"rank_pattern": "q_proj=8,down_proj=2", "alpha_pattern": "q_proj=4"},
    "layers": {"layers_to_transform": "1"},
    "modules": {"modules_to_save": ["embed_tokens", "model.norm"]},
    "tokens": {"train_tokens": TOKENS},
    "plus": {"lora_plus_ratio": 4.0},
}
COUNTED = KINDS | {
    "mlp": {"modules_to_save": ["mlp"], "lora_target_modules": ["q_proj", "down_proj"]},
    "full names": {"rank_pattern": {"^model.layers.0.*q_proj": 8, "k_proj": 2}, **KINDS["layers"]},
    "head": {"modules_to_save": ["lm_head"]},
    "lora head": {"lora_target_modules": ["q_proj", "lm_head"]},
    "plain": {},
}
# Everything that goes under ZeRO-3, and what does not.
SIZES = {**KINDS["rslora"], **KINDS["ranks"], **KINDS["plus"]}
SHARDED = {**SIZES, "modules_to_save": ["lm_head"]}
WHOLE = {**KINDS["dora"], **KINDS["tokens"]}


@pytest.fixture(scope="module")
def models(materials: Materials) -> dict[str, Path]:
    """The same model, and with a head of its own."""
    folder = materials.folder / "untied"
    run_helpers.make_model(folder, layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=False)
    torch.manual_seed(4)
    torch.nn.init.normal_(model.lm_head.weight, std=0.1)
    model.save_pretrained(folder)
    return {"tied": materials.model, "untied": folder}


def base(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def config_of(materials: Materials, **changes: Any) -> Any:
    return resolve_object(materials.settings(materials.folder / "unused", **changes), 1).config


@pytest.mark.parametrize(
    ("changes", "form"),
    [(WHOLE, "untied"), ({**SIZES, **KINDS["layers"], **KINDS["modules"]}, "tied")],
    ids=["whole", "modules"],
)
def test_peft_loads_what_was_trained_and_it_merges(
    materials, models, tmp_path, monkeypatch, changes, form
):
    live: list[torch.Tensor] = []
    save_output = SFTTrainer.save_output

    def looking(self: SFTTrainer, *arguments: Any) -> None:
        live.append(logits(self.model))
        save_output(self, *arguments)

    monkeypatch.setattr(SFTTrainer, "save_output", looking)
    given = {"model": str(models[form]), "max_steps": 3, "warmup_steps": 0, **changes}
    folder, merged = tmp_path / "run", tmp_path / "merged"
    run(materials.settings(folder, **given))
    adapted = PeftModel.from_pretrained(base(models[form]), folder)
    plain = logits(base(models[form]))
    torch.testing.assert_close(logits(adapted), live[0], rtol=1e-5, atol=1e-5)
    assert (live[0] - plain).abs().max() > 0.1, "it learned nothing"
    with adapted.disable_adapter():
        torch.testing.assert_close(logits(adapted), plain, rtol=1e-5, atol=1e-5)
    assert finetune(["merge", "--adapter", str(folder), "--output-dir", str(merged)]) == 0
    torch.testing.assert_close(logits(base(merged)), live[0], rtol=1e-4, atol=1e-4)
    assert ("lm_head.weight" in load_file(merged / "model.safetensors")) == (form == "untied")


def test_alphas_are_what_was_asked_for(materials) -> None:
    config = config_of(materials, **KINDS["ranks"])
    lora = add_adapter(base(materials.model), config, one_dtype=False).peft_config["default"]
    assert (lora.alpha_pattern, lora.lora_alpha) == ({"q_proj": 4}, 8)


def test_b_learns_faster(materials, tmp_path) -> None:
    """AdamW's first step moves each number by the rate, whatever its gradient."""
    changes = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-3, "lora_plus_ratio": 4.0}
    run(materials.settings(tmp_path / "run", **changes))
    file = load_file(tmp_path / "run" / "adapter_model.safetensors")
    ups = torch.cat([tensor.flatten() for name, tensor in file.items() if "lora_B" in name])
    assert float(ups.abs().median()) == pytest.approx(4e-3, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(SHARDED, "zero3_offload"), (WHOLE, "plain"), (WHOLE, "zero2")],
)
def test_two_processes_train_the_same(materials, tmp_path, kind, layout) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_helpers.train(materials.settings(one, **kind))
    run_helpers.train(materials.settings(two, packing=False, **kind, **LAYOUTS[layout]), 2)
    assert run_helpers.losses(two) == pytest.approx(run_helpers.losses(one), rel=1e-5)
    found, expected = run_helpers.result_weights(two), run_helpers.result_weights(one)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def test_auto_takes_the_stops_that_were_never_trained(materials, tmp_path, caplog) -> None:
    model = base(run_helpers.make_model(tmp_path, layers=2))
    with torch.no_grad():  # as a base model has them that was trained on plain text alone
        model.get_input_embeddings().weight[-20:] = 0.02
    model.save_pretrained(tmp_path)
    prepared = prepare_fine_tuning(config_of(materials, model=str(tmp_path)))
    end = prepared.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "<|im_end|> was never trained" in caplog.text and "--train-tokens auto" in caplog.text
    caplog.clear()
    config = config_of(materials, model=str(tmp_path), train_tokens="auto")
    assert prepare_fine_tuning(config).trained_token_ids == (end,)
    assert "never trained" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True, **LAYOUTS["zero3"]}, "DoRA reads base weights"),
        ({"train_tokens": TOKENS, **LAYOUTS["zero3"]}, "trainable tokens"),
        ({"rank_pattern": "q_proj=big"}, "q_proj=big is no name with a whole number"),
        ({"rank_pattern": "q_proj=8,q_proj=4"}, "q_proj is named twice"),
        ({"rank_pattern": "q_porj=8"}, "names q_porj"),
        ({"rank_pattern": {"(": 8}}, "no regular expression"),
        ({"quantization": "nf4", "modules_to_save": ["down_proj"]}, "embeddings, head and norms"),
        ({"layers_to_transform": "1,2-7"}, "names 2, 3, 4, 5, 6, 7"),
        ({"layers_to_transform": "3-1"}, "3-1 goes backwards"),
        (
            {"train_tokens": TOKENS, "modules_to_save": ["embed_tokens"]},
            "modules_to_save names embed_tokens",
        ),
        ({"modules_to_save": "head"}, "names head"),
        ({"train_tokens": "<|end|>"}, "no token '<|end|>'"),
        ({"lora_plus_ratio": 0.0}, "above 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(materials, changes, words) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare_fine_tuning(config_of(materials, **changes))
    assert words in str(refused.value)


@pytest.mark.parametrize("kind", COUNTED)
def test_a_plan_counts_what_is_trained_and_knows_whether_logits_are_made_in_chunks(
    materials, models, kind
):
    """Against the model that is trained."""
    for folder in models.values():
        network = base(folder)
        shape = shape_of_model(network)
        config = config_of(materials, model=str(folder), **COUNTED[kind])
        ids = (1, 2) if kind == "tokens" else ()
        adapted = add_adapter(network, config, one_dtype=False, token_ids=ids)
        planned = fine_tuning_workload(config, shape, Cluster(device_type="cpu"))
        assert planned.computing.whole_logits == (make_chunked_head(adapted) is None)
        assert planned.trained == count_parameters(adapted)["trainable"]


def test_a_copied_embedding_leaves_the_layers_their_dtype(materials, models) -> None:
    config = config_of(materials, modules_to_save=["embed_tokens"])
    for folder in models.values():
        model = add_adapter(base(folder).to(torch.bfloat16), config, one_dtype=False)
        seen: list[torch.dtype] = []
        layer = model.get_base_model().model.layers[0]
        layer.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=IDS).logits.float().sum().backward()
        copied = "embed_tokens.modules_to_save"
        (gradient,) = (p.grad for name, p in model.named_parameters() if copied in name)
        assert seen == [torch.bfloat16] and gradient.dtype == torch.float32 and gradient.any()


def test_each_makes_another_run(materials) -> None:
    plain = prepare_fine_tuning(config_of(materials)).identity
    own = {"kind", "lora_target_modules", "total_steps", "data", "schedule", "weights"}
    assert plain.keys() == own | set(IDENTITY_SETTINGS), "plain ones are as before"
    every = KINDS["dora"] | KINDS["ranks"] | KINDS["tokens"] | KINDS["plus"]
    found = prepare_fine_tuning(config_of(materials, **every)).identity
    assert found.keys() - plain.keys() == every.keys() and json.loads(json.dumps(found)) == found


@pytest.fixture(scope="module")
def based_on(materials: Materials) -> dict[str, Path]:
    """Output folders of runs of 6 steps, by their quantization."""
    folders = {kind: materials.folder / f"run-{kind}" for kind in ("none", "nf4")}
    for kind, folder in folders.items():
        run_helpers.train(materials.settings(folder, quantization=kind, save_steps=2))
    return folders


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_it_trains_the_same_steps_near_the_plain_run_and_its_adapter_has_a_note(
    materials, based_on, tmp_path, caplog
):
    plain, quantised = based_on["none"], based_on["nf4"]
    assert run_helpers.sample_ids(plain) == run_helpers.sample_ids(quantised)
    losses = [run_helpers.losses(folder) for folder in (plain, quantised)]
    # Weights in 4 bits are off by a tenth of their norm.
    assert 1e-6 < run_helpers.largest_relative_difference(*losses) < 0.05
    assert losses[1][-1] < 0.98 * losses[1][0]
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", NOTE_NAME):
        shutil.copy(quantised / "checkpoint-4" / name, moved)
    source, cpu = Source(str(materials.model), moved), torch.device("cpu")
    with caplog.at_level("INFO", "finetune"):
        load_weights(source, cpu, "float32", trust_remote_code=False)
    assert "trained on a base in nf4" in caplog.text
    (moved / NOTE_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="note cannot be read"):
        trained_on(moved)
    assert trained_on(quantised) == "nf4" and trained_on(plain) == "none"


def test_peft_loads_the_adapter_on_either_base_and_merge_keeps_what_was_trained(
    materials, based_on, tmp_path, capsys
):
    adapter = based_on["nf4"]
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    four_bits = BitsAndBytesConfig(load_in_4bit=True, **nf4)

    plain = logits(PeftModel.from_pretrained(base(materials.model), adapter))
    held = base(materials.model, quantization_config=four_bits, device_map="cpu")
    # Training: in evaluation bitsandbytes repacks the weights on some CPUs, and cannot if they are
    # this small.
    trained = PeftModel.from_pretrained(held, adapter).train()(input_ids=IDS).logits.detach()
    assert relative(plain, trained) > 0.05
    for flags, expected in (([], trained), (["--quantization", "none"], plain)):
        output = tmp_path / f"merged{len(flags)}"
        words = ["merge", "--adapter", str(adapter), "--output-dir", str(output)]
        assert finetune([*words, *flags]) == 0
        assert "quantization_config" not in json.loads((output / "config.json").read_text())
        assert relative(logits(base(output)), expected) < 1e-5
        for text in (capsys.readouterr().err, (output / "README.md").read_text()):
            assert "base in nf4" in text


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


@pytest.mark.parametrize(
    ("kind", "each", "layout"),
    [
        ("none", 2.0, "zero2"),
        ("nf4", 0.516, "plain"),
        ("nf4", 0.516, "zero3"),
        ("int8", 1.0, "zero3"),
    ],
)
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
