"""Models as people bring them: with a vision part, mixtures, code of their own, ids without embeddings."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import chat_models
import pytest
import run_helpers
import torch
from run_helpers import LAYOUTS, Materials
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GitConfig,
    GitForCausalLM,
    MixtralConfig,
    Qwen3ForCausalLM,
)

import finetune
from finetune.batching.collate import collate
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError, DataError
from finetune.modeling.adapter import add_adapter, check_adapter
from finetune.modeling.loss import let_choose_logits, make_chunked_head, microbatch_losses
from finetune.modeling.model_config import outside_text, weights_identity
from finetune.modeling.pretrained import load_model
from finetune.storage.run_folder import check_output_folder, write_identity
from finetune.training.prepare import prepare_fine_tuning

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CPU = torch.device("cpu")


def run_config(materials: Materials, **changes: Any) -> RunConfig:
    settings = materials.settings(materials.folder / "unused", **changes)
    return RunConfig(**settings | {name: (settings[name],) for name in ("data", "report_to")})


@pytest.fixture(scope="module")
def sees(materials: Materials) -> Path:
    """A Gemma 3 with its vision tower, which is loaded whole if a text model is asked for."""
    tokenizer, folder = chat_models.family("chatml"), materials.folder / "sees"
    text = SIZES | {"vocab_size": len(tokenizer), "head_dim": 8}
    text["pad_token_id"] = tokenizer.pad_token_id
    vision = SIZES | {"image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", ["plain", pytest.param("zero3", marks=pytest.mark.slow)])
def test_only_the_text_model_is_trained(materials, sees, tmp_path, layout):
    """Parameters that take no part would have DDP wait for them in the second step, and decay wear
    them down.
    """
    changes = {"finetuning": "full", "weight_decay": 0.5, "max_steps": 3, **LAYOUTS[layout]}
    settings = materials.settings(tmp_path / "run", model=str(sees), **changes)
    output = run_helpers.train(settings, processes=2).output()
    parts = "model.vision_tower, model.multi_modal_projector"
    assert f"only the text model is trained: {parts}" in output
    before, after = (load_file(folder / "model.safetensors") for folder in (sees, tmp_path / "run"))
    assert before.keys() == after.keys()
    for name in before:
        of_text = "vision" not in name and "multi_modal" not in name
        assert torch.equal(before[name], after[name]) != of_text, name


def test_all_linear_means_the_text_model(materials, sees):
    config = run_config(materials, model=str(sees))
    model = load_model(config, model_dtype=torch.float32, zero3=False)
    adapted = add_adapter(model, config, one_dtype=False).named_parameters()
    assert all("language_model" in name for name, parameter in adapted if parameter.requires_grad)


def test_parts_that_cannot_be_told_apart_are_refused():
    """GIT, as Phi-4-multimodal, has its text settings next to those of its tower."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    with torch.device("meta"):
        model = GitForCausalLM(GitConfig(**sizes, vocab_size=64, vision_config=vision))
    words = "text part of a git model cannot be told from its vision_config"
    with pytest.raises(ConfigError, match=words):
        outside_text(model)


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def test_an_adapter_that_a_mixture_cannot_have_is_refused_before_its_weights_are_read(
    materials, tmp_path
):
    config = MixtralConfig(**SIZES, **EXPERTS, vocab_size=64)
    config.save_pretrained(tmp_path)
    for targets, dropout, words in (
        ("all-linear", 0.1, "adapters on a mixture's experts have no dropout"),
        (("w1",), 0.0, "without also targeting w3"),
        (("q_proj", "fc1"), 0.1, "fc1 matches no linear module"),
        ("all-linear", 0.0, None),
        (("w1", "w2", "w3"), 0.0, None),
    ):
        changes = {"model": str(tmp_path), "lora_target_modules": targets, "lora_dropout": dropout}
        refused = pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext()
        with refused:
            check_adapter(config, run_config(materials, **changes))


def test_quantised_weights_are_refused_before_they_are_read(materials, tmp_path):
    folder = Path(shutil.copytree(materials.model, tmp_path / "quantised"))
    config = json.loads((folder / "config.json").read_text())
    for method, own, words in (
        ("gptq", "none", "quantised .gptq."),
        ("mxfp4", "nf4", "not quantised again"),
    ):
        config["quantization_config"] = {"quant_method": method}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=words):
            prepare_fine_tuning(run_config(materials, model=str(folder), quantization=own))


class OwnCode(Qwen3ForCausalLM):
    """As code next to a model mostly is: its forward knows nothing of logits to keep."""

    def forward(
        self, input_ids=None, position_ids=None, use_cache=None, document_lengths=None, **kwargs
    ):
        assert "logits_to_keep" not in kwargs
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


def test_a_model_that_makes_all_logits_has_the_same_losses(materials):
    ids = torch.arange(3, 40).numpy().astype("int32")
    documents = [(ids, ids % 3 == 1, 0), (ids[:9], ids[:9] % 2 == 1, 0)]
    microbatch = collate(documents, packing=False, pad_token_id=0)
    plain = Qwen3ForCausalLM.from_pretrained(materials.model).requires_grad_(False)
    model = OwnCode.from_pretrained(materials.model).requires_grad_(False)
    let_choose_logits(model)
    assert make_chunked_head(model) is None and make_chunked_head(plain) is not None
    wanted = microbatch_losses(plain, microbatch, CPU)
    for _ in range(2):  # nothing is kept from a call
        torch.testing.assert_close(microbatch_losses(model, microbatch, CPU), wanted)


@pytest.fixture(scope="module")
def blind(materials: Materials) -> Path:
    """As Gemma 3 of one billion: the tokenizer has a token for images, and the table ends before it."""
    folder = Path(shutil.copytree(materials.model, materials.folder / "blind"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    above = {"additional_special_tokens": ["<image>"], "pad_token": "<pad above>"}
    tokenizer.add_special_tokens(above)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_tokenizer_with_ids_above_the_table_trains(materials, blind, tmp_path):
    for name, model in (("plain", materials.model), ("run", blind)):
        own = {"model": str(model), "packing": False, "max_steps": 2}
        finetune.run(materials.settings(tmp_path / name, **own))
    assert run_helpers.losses(tmp_path / "run") == run_helpers.losses(tmp_path / "plain")


def test_a_record_with_such_an_id_is_refused_by_its_place(materials, blind, tmp_path, caplog):
    data = tmp_path / "data.jsonl"
    questions = ("q", "what is in <image>?")
    rows = ({"instruction": question, "output": "a"} for question in questions)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="only .* embeddings; the first is .*'<image>'") as caught:
        prepare_fine_tuning(run_config(materials, model=str(blind), data=str(data)))
    assert caught.value.where == f"{data}:2"
    assert caplog.text.count("cannot be used; a text that has one is refused") == 1


def test_a_large_file_is_told_apart_by_its_blocks(materials, tmp_path):
    """Only some of 256 MB are read; what changes a stretch of weights shows in them; a path does not."""
    moved = Path(shutil.copytree(materials.model, tmp_path / "moved"))
    assert weights_identity(str(moved)) == weights_identity(str(materials.model))
    with (moved / "model.safetensors").open("r+b") as file:
        file.truncate(256 << 20)
        before = weights_identity(str(moved))
        file.seek(100 << 20)
        file.write(b"\1" * (8 << 20))
    assert weights_identity(str(moved)) != before


def test_runs_of_older_versions_know_their_model_by_its_path(tmp_path):
    def changed(**changes: str) -> list[str]:
        return [found.name for found in check_output_folder(tmp_path, now | changes)]

    now = {"kind": "sft", "model": "a", "seed": 0, "weights": "w"}
    write_identity(tmp_path, {"kind": "sft", "model": "a", "seed": 0})
    assert (changed(), changed(model="b")) == ([], ["model"])
    write_identity(tmp_path, now)
    assert (changed(model="b"), changed(weights="v")) == ([], ["weights"])
    write_identity(tmp_path, now | {"weights": "a@None"})  # transformers 5.23 names no commit
    assert (changed(weights="a@c0ffee"), changed(model="b")) == ([], ["model"])
