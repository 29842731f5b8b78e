"""Models as people bring them: with a vision part, mixtures, code of their own, ids without
embeddings.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import chat_models
import pytest
import run_helpers
import torch
from run_helpers import LAYOUTS, Materials
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GitConfig,
    GitForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3ForCausalLM,
)

from finetune.batching.collate import collate
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError, DataError
from finetune.modeling.adapter import add_adapter, check_adapter
from finetune.modeling.loss import let_choose_logits, make_chunked_head, microbatch_losses
from finetune.modeling.model_config import (
    load_model_config,
    outside_text,
    weights_identity,
)
from finetune.storage.run_folder import check_output_folder, write_identity
from finetune.training.prepare import prepare_fine_tuning

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("brought"))


def run_config(materials: Materials, **changes: Any) -> RunConfig:
    settings = materials.settings(materials.folder / "unused", **changes)
    return RunConfig(**settings | {name: (settings[name],) for name in ("data", "report_to")})


# ---------------------------------------------------------------- a vision part


@pytest.fixture(scope="module")
def sees(materials: Materials) -> Path:
    """A Gemma 3 with its vision tower, which is loaded whole where a text model is asked for."""
    tokenizer = chat_models.family("chatml")
    text = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "head_dim": 8,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {**SIZES, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    folder = materials.folder / "sees"
    Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", ["plain", "zero3"])
def test_only_the_text_model_is_trained(materials, sees, tmp_path, layout):
    """Parameters that take no part would have DDP wait for them in the second step, and decay wear
    them down.
    """
    changes = {"finetuning": "full", "weight_decay": 0.5, "max_steps": 3, **LAYOUTS[layout]}
    ranks = run_helpers.train(
        materials.settings(tmp_path / "run", model=str(sees), **changes), processes=2
    )
    assert (
        "only the text model is trained: model.vision_tower, model.multi_modal_projector"
        in ranks.output()
    )
    before, after = (load_file(folder / "model.safetensors") for folder in (sees, tmp_path / "run"))
    assert before.keys() == after.keys()
    trained = {name for name in before if not torch.equal(before[name], after[name])}
    assert trained == {
        name for name in before if "vision" not in name and "multi_modal" not in name
    }


def test_a_mixture_under_zero3_is_saved_as_it_was_loaded(materials, tmp_path):
    """Experts are many tensors in files and one in memory; names and shapes of the output are those
    of the base.
    """
    model = tmp_path / "mixture"
    shutil.copytree(materials.model, model)
    vocabulary = load_model_config(str(model)).vocab_size
    torch.manual_seed(0)
    MixtralForCausalLM(
        MixtralConfig(**SIZES, vocab_size=vocabulary, num_local_experts=2, num_experts_per_tok=1)
    ).save_pretrained(model)
    changes = {"finetuning": "full", "max_steps": 2, **LAYOUTS["zero3"]}
    run_helpers.train(
        materials.settings(tmp_path / "run", model=str(model), **changes), processes=2
    )
    run_helpers.train(
        materials.settings(tmp_path / "plain", model=str(model), finetuning="full", max_steps=2)
    )
    base, ours, plain = (
        load_file(folder / "model.safetensors")
        for folder in (model, tmp_path / "run", tmp_path / "plain")
    )
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in base.items()
    }
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-4, atol=1e-5)


def test_all_linear_means_the_text_model(materials, sees):
    from finetune.modeling.pretrained import load_model

    config = run_config(materials, model=str(sees))
    model = load_model(config, model_dtype=torch.float32, zero3=False)
    adapted = [name for name, parameter in add_adapter(model, config, one_dtype=False).named_parameters()
               if parameter.requires_grad]  # fmt: skip
    assert adapted and all("language_model" in name for name in adapted)


def test_parts_that_cannot_be_told_apart_are_refused():
    """GIT, as Phi-4-multimodal, has its text settings beside those of its tower; its decoder is the
    whole model.
    """
    sizes = {**SIZES, "vocab_size": 64}
    sizes.pop("num_key_value_heads")
    with torch.device("meta"):
        model = GitForCausalLM(
            GitConfig(**sizes, vision_config={**sizes, "image_size": 28, "patch_size": 14})
        )
    with pytest.raises(
        ConfigError, match="text part of a git model cannot be told from its vision_config"
    ):
        outside_text(model)


# ---------------------------------------------------------------- mixtures of experts


@pytest.fixture(scope="module")
def mixture(materials: Materials) -> Path:
    folder = materials.folder / "mixture"
    MixtralConfig(
        **SIZES, vocab_size=64, num_local_experts=2, num_experts_per_tok=1
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("targets", "dropout", "said"),
    [
        ("all-linear", 0.1, "adapters on a mixture's experts have no dropout"),
        (("w1",), 0.0, "without also targeting w3"),
        (("q_proj", "fc1"), 0.1, "fc1 matches no linear module"),
        ("all-linear", 0.0, None),
        (("q_proj", "v_proj"), 0.1, None),
        (("w1", "w2", "w3"), 0.0, None),
    ],
)
def test_an_adapter_that_a_mixture_cannot_have_is_refused_before_its_weights_are_read(
    materials, mixture, targets, dropout, said
):
    config = run_config(
        materials, model=str(mixture), lora_target_modules=targets, lora_dropout=dropout
    )
    if said is None:
        check_adapter(load_model_config(str(mixture)), config)
        return
    with pytest.raises(ConfigError, match=said):
        check_adapter(load_model_config(str(mixture)), config)


@pytest.mark.parametrize("method", ["mxfp4", "gptq"])
def test_quantised_weights_are_refused_before_they_are_read(materials, tmp_path, method):
    """gpt-oss as it is published; on a machine without the method's kernels it would end in their
    import.
    """
    folder = Path(shutil.copytree(materials.model, tmp_path / "quantised"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(settings | {"quantization_config": {"quant_method": method}})
    )
    with pytest.raises(ConfigError, match=f"weights are quantised .{method}."):
        prepare_fine_tuning(run_config(materials, model=str(folder)))


# ---------------------------------------------------------------- code that came with the model


class OwnCode(Qwen3ForCausalLM):
    """As code beside a model mostly is: its forward knows nothing of logits to keep."""

    def forward(
        self, input_ids=None, position_ids=None, use_cache=None, document_lengths=None, **kwargs
    ):
        assert "logits_to_keep" not in kwargs
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


class LastTokens(Qwen3ForCausalLM):
    """Or a number of last tokens alone."""

    def forward(
        self, input_ids=None, position_ids=None, use_cache=None, logits_to_keep: int = 0, **kwargs
    ):
        assert isinstance(logits_to_keep, int)
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


@pytest.mark.parametrize("kind", [OwnCode, LastTokens])
def test_a_model_that_makes_all_logits_has_the_same_losses(materials, kind):
    device = torch.device("cpu")
    ids = torch.arange(3, 40).numpy().astype("int32")
    microbatch = collate(
        [(ids, ids % 3 == 1, 0), (ids[:9], ids[:9] % 2 == 1, 0)], packing=False, pad_token_id=0
    )
    plain = Qwen3ForCausalLM.from_pretrained(materials.model).requires_grad_(False)
    model = kind.from_pretrained(materials.model).requires_grad_(False)
    let_choose_logits(model)
    assert make_chunked_head(model) is None and make_chunked_head(plain) is not None
    wanted = microbatch_losses(plain, microbatch, device)
    torch.testing.assert_close(microbatch_losses(model, microbatch, device), wanted)
    # nothing is kept from a call
    torch.testing.assert_close(microbatch_losses(model, microbatch, device), wanted)


# ---------------------------------------------------------------- ids without embeddings


@pytest.fixture(scope="module")
def blind(materials: Materials) -> Path:
    """As Gemma 3 of one billion: the tokenizer has a token for images, and the table ends before
    it.
    """
    folder = materials.folder / "blind"
    shutil.copytree(materials.model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<image>"], "pad_token": "<pad above>"}
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("packing", [True, False])
def test_a_tokenizer_with_ids_above_the_table_trains(materials, blind, tmp_path, packing):
    changes = {"packing": packing, "max_steps": 2}
    ranks = run_helpers.train(materials.settings(tmp_path / "run", model=str(blind), **changes))
    assert ranks.output().count("cannot be used; a text that has one is refused") == 1
    plain = run_helpers.train(materials.settings(tmp_path / "plain", **changes))
    assert run_helpers.losses(tmp_path / "run") == run_helpers.losses(tmp_path / "plain")
    assert "cannot be used" not in plain.output()


def test_a_record_with_such_an_id_is_refused_by_its_place(materials, blind, tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [
        {"instruction": "q", "output": "a"},
        {"instruction": "what is in <image>?", "output": "a"},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="only .* embeddings; the first is .*'<image>'") as caught:
        prepare_fine_tuning(run_config(materials, model=str(blind), data=str(data)))
    assert caught.value.where == f"{data}:2"


# ---------------------------------------------------------------- which model it is


def test_a_model_is_its_weights_and_not_its_path(materials, tmp_path):
    def identity(folder: Path) -> str:
        return weights_identity(str(folder))

    moved = tmp_path / "moved"
    shutil.copytree(materials.model, moved)
    assert identity(moved) == identity(materials.model)
    weights = load_file(moved / "model.safetensors")
    next(iter(weights.values())).add_(1e-3)
    save_file(weights, moved / "model.safetensors")
    assert identity(moved) != identity(materials.model)


def test_a_large_file_is_told_apart_by_its_blocks(materials, tmp_path):
    """Only some of 256 MB are read; what changes a stretch of weights shows in them."""
    moved = tmp_path / "moved"
    shutil.copytree(materials.model, moved)
    with (moved / "model.safetensors").open("r+b") as file:
        file.truncate(256 << 20)
    before = weights_identity(str(moved))
    with (moved / "model.safetensors").open("r+b") as file:
        file.seek(100 << 20)
        file.write(b"\1" * (8 << 20))
    assert weights_identity(str(moved)) != before


def test_runs_of_older_versions_know_their_model_by_its_path(tmp_path):
    write_identity(tmp_path, {"kind": "sft", "model": "a", "seed": 0})
    now = {"kind": "sft", "model": "a", "seed": 0, "weights": "w"}
    assert check_output_folder(tmp_path, now) == []
    assert [d.name for d in check_output_folder(tmp_path, now | {"model": "b"})] == ["model"]
    write_identity(tmp_path, now)
    assert check_output_folder(tmp_path, now | {"model": "b"}) == []
    assert [d.name for d in check_output_folder(tmp_path, now | {"weights": "v"})] == ["weights"]
    write_identity(tmp_path, now | {"weights": "a@None"})  # transformers 5.23 names no commit
    assert check_output_folder(tmp_path, now | {"weights": "a@c0ffee"}) == []
    assert [d.name for d in check_output_folder(tmp_path, now | {"model": "b"})] == ["model"]
