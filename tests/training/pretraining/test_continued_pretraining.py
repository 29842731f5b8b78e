"""Pretraining that goes on from a model: against a plain loop, with sources mixed exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_helpers
import torch
from conftest import make_records
from run_helpers import LAYOUTS, events, lines, losses, result_weights, sample_ids
from transformers import AutoModelForCausalLM

from finetune.commands.prepare import command as prepare
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve_object
from finetune.data.corpus.token_shards import TokenShards
from finetune.data.corpus.windows import JoinedWindows, Windows
from finetune.errors import FinetuneError
from finetune.training.pretraining.prepare import prepare_pretraining

STEPS, LENGTH, WINDOWS, SAVED = 8, 32, 8, 4
WEIGHTS = (3.0, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with its tokenizer, and two folders that `prepare` made with that."""
    folder = tmp_path_factory.mktemp("continued")
    run_helpers.make_model(folder / "model")
    for number, count in enumerate((300, 60)):
        rows = make_records(count, seed=number)
        texts = [{"text": f"{row['instruction']}: {row['output']}."} for row in rows]
        source = folder / f"{number}.jsonl"
        source.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
        words = ["--data", source, "--output-dir", folder / f"tokens{number}"]
        words += ["--tokenizer", folder / "model", "--num-workers", 1, "--valid-fraction", 0.2]
        assert prepare.main([str(word) for word in words]) == 0
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    own = {"model": str(folder / "model"), "data_weights": list(WEIGHTS), "max_seq_len": LENGTH}
    own |= {"train_data_path": [str(folder / "tokens0"), str(folder / "tokens1")]}
    own |= {"valid_data_path": str(folder / "tokens0"), "device_batch_size": 2, "warmup_steps": 2}
    own |= {"total_batch_size": WINDOWS * LENGTH, "num_iterations": STEPS, "learning_rate": 3e-3}
    own |= {"dtype": "float32", "device_type": "cpu", "save_steps": SAVED, "sample_every": STEPS}
    own |= {"log_samples": True, "report_to": "none", "output_dir": str(folder / "unused")}
    return own | changes


def config_of(folder: Path, **changes: Any) -> PretrainConfig:
    return resolve_object(settings(folder, **changes), 1, PretrainConfig).config


def train(folder: Path, name: str, processes: int = 1, **changes: Any) -> Path:
    output = folder / name
    if not output.exists():
        wanted = settings(folder, **changes, output_dir=str(output))
        run_helpers.train(wanted, processes, module="finetune.pretrain")
    return output


def windows(folder: Path) -> JoinedWindows:
    shards = [TokenShards(folder / f"tokens{n}", split="train") for n in (0, 1)]
    return JoinedWindows([Windows(shard, LENGTH) for shard in shards])


def test_a_plain_loop_does_the_same(folder):
    """From the definition: torch's own AdamW with decay on matrices, a cosine."""
    ours = train(folder, "full")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if "norm" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    expected, of_sources, text = [], [], windows(folder)
    for step, ids in enumerate(sample_ids(ours)):
        batch = torch.from_numpy(np.stack([text[i][0] for i in ids])).long()
        factor = step / 2 if step < 2 else 0.5 * (1 + np.cos(np.pi * (step - 2) / (STEPS - 2)))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * factor
        logits, targets = model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten()
        each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        sources = torch.from_numpy(np.repeat(text.sources[ids], LENGTH))
        of_sources.append([float(each.detach()[sources == number].mean()) for number in (0, 1)])
        each.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(each.mean().item())
    assert losses(ours) == pytest.approx(expected, rel=1e-4) and expected[-1] < expected[0] - 0.1
    log = lines(ours / "trainer_log.jsonl")
    logged = [[line[f"source_loss/tokens{n}"] for n in (0, 1)] for line in log]
    np.testing.assert_allclose(logged, of_sources, rtol=1e-4)
    for name, tensor in result_weights(ours).items():
        if name in named:  # the head is tied
            torch.testing.assert_close(tensor, named[name].detach(), rtol=1e-3, atol=1e-5)
    # The first evaluation is the base's; the last is lower.
    before, *_, after = [event["eval_bpb"] for event in events(ours, "eval")]
    assert after < before


@pytest.mark.parametrize("how", ["full", "lora"])
def test_the_arithmetic_is_that_of_what_is_trained(folder, how):
    """Six operations for each number of a trained matrix, four of a frozen one; attention as PaLM has it."""
    output = train(folder, how, finetuning=how)
    found = lines(output / "trainer_log.jsonl")
    assert all(line["mfu"] is None for line in found), "a CPU has no peak"
    assert found[-1]["loss"] < found[0]["loss"]
    (start,) = events(output, "start")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    # the tied embedding is the head
    passed = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    attention = 12 * model.config.num_hidden_layers * 32 * LENGTH
    trained = start["parameters"]["trainable"]
    expected = 6 * passed if how == "full" else 4 * passed + 6 * trained
    assert start["flops_per_token"] == expected + attention
    assert how == "full" or trained < passed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depth": 3}, "depth is 3, and model is"),
        ({"optimizer": "muon"}, "a model is continued with adamw"),
        ({"num_iterations": None}, "how long to continue is not said"),
        ({"data_weights": [1.0]}, "data_weights are 1, and train_data_path has 2 entries"),
        ({"max_seq_len": 512, "total_batch_size": 1024}, "made for at most 256 tokens"),
        (LAYOUTS["zero2"], "pretraining does not run under DeepSpeed"),
        ({"model": None, "finetuning": "lora"}, "finetuning is lora, and there is no model"),
        ({"model": "other"}, "made with another tokenizer"),
    ],
)
def test_what_conflicts_is_refused(folder, tmp_path, changes, words):
    if changes.get("model"):
        run_helpers.make_model(tmp_path / "other", tokenizer_name="llama3")
        changes = {"model": str(tmp_path / "other")}
    with pytest.raises(FinetuneError) as caught:
        prepare_pretraining(config_of(folder, **changes))
    assert words in str(caught.value)


def test_rates_are_not_those_from_scratch(folder):
    for how, rate in (("full", 4.5e-5), ("lora", 2e-4)):
        given = settings(folder, finetuning=how)
        del given["learning_rate"], given["warmup_steps"]
        resolved = resolve_object(given, 1, PretrainConfig)
        config = resolved.config
        assert config.learning_rate == rate
        assert (config.optimizer, config.lr_scheduler) == ("adamw", "cosine")
        assert any(f"learning_rate {rate:g} for continuing" in note for note in resolved.notes)
        # As run.yaml has it: the same run again.
        assert resolve_object(config.model_dump(mode="json"), 1, PretrainConfig).config == config
