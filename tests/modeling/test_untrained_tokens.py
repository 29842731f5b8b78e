"""Tokens that a base model never saw are found by their vectors in its head."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import run_helpers
import torch
from launching import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from finetune.data.encoding.render import trained_end_ids
from finetune.errors import ConfigError
from finetune.modeling.untrained_tokens import trained_token_ids, untrained_tokens


@pytest.fixture
def materials(tmp_path: Path):
    return run_helpers.make_materials(tmp_path / "materials")


def stops_of(model: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return untrained_tokens(str(model), tokenizer, trained_end_ids(tokenizer))


def spoil(model: Path, change: float) -> str:
    """Make the head's vector of the end of a turn nearly that of another special token."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    (stop,) = trained_end_ids(tokenizer)
    (other, *_) = [number for number in tokenizer.added_tokens_decoder if number != stop]
    path = model / "model.safetensors"
    weights = load_file(path)
    head = weights["model.embed_tokens.weight"]  # tied
    direction = torch.nn.functional.normalize(torch.ones_like(head[other]), dim=0)
    head[stop] = head[other] + change * head[other].norm() * direction
    save_file(weights, path, metadata={"format": "pt"})
    return tokenizer.convert_ids_to_tokens(stop)


def test_rows_that_are_alike_are_found(materials):
    model = Path(materials.model)
    assert stops_of(ROOT / "data_samples" / "tiny-qwen3") == stops_of(model) == []
    assert spoil(model, 0.5) and stops_of(model) == []
    assert [spoil(model, 0.01)] == stops_of(model)


def test_sharded_weights_and_names_of_a_hub(materials, tmp_path: Path, monkeypatch):
    model, commit, cache = Path(materials.model), "a" * 40, tmp_path / "cache"
    name = spoil(model, 0.0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ends = trained_end_ids(tokenizer)
    shutil.copytree(model, cache / "models--owner--tiny" / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    copied = f"owner/tiny@{commit}"
    assert untrained_tokens(copied, tokenizer, ends) == [name]
    found = trained_token_ids(copied, tokenizer, ("auto",), ends)
    assert found == [tokenizer.convert_tokens_to_ids(name)]
    assert untrained_tokens("somebody/model", tokenizer, [0]) is None
    with pytest.raises(ConfigError, match="name the tokens"):
        trained_token_ids("somebody/model", tokenizer, ("auto",), ends)
    shard = (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    places = dict.fromkeys(load_file(shard), shard.name)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert stops_of(model) == [name]
    shard.unlink()
    assert stops_of(model) is None


def test_a_run_warns_once_where_lora_cannot_teach_the_end(materials, tmp_path, caplog):
    from finetune.config.resolution import resolve_object
    from finetune.training.prepare import prepare_fine_tuning

    spoil(Path(materials.model), 0.0)
    targets = {"lora_target_modules": ["q_proj", "lm_head"]}
    for changes, warned in (({}, 1), ({"finetuning": "full"}, 0), (targets, 0)):
        caplog.clear()
        settings = materials.settings(tmp_path / "out", **changes)
        with caplog.at_level(logging.WARNING, "finetune"):
            prepare_fine_tuning(resolve_object(settings, 1).config)
        assert caplog.text.count("never trained in this base model") == warned
