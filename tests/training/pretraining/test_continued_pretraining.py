"""Pretraining that goes on from a model: against a plain loop, with sources mixed exactly, resumed;
its result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_helpers
import torch
from conftest import make_records
from run_helpers import LAYOUTS
from transformers import AutoModelForCausalLM

from finetune.__main__ import main as finetune
from finetune.commands.prepare import command as prepare
from finetune.config.kinds import KINDS
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve_object
from finetune.data.corpus.token_shards import TokenShards
from finetune.data.corpus.windows import JoinedWindows, Windows
from finetune.errors import ConfigError, DataError, Problems
from finetune.inference.generation import load_for_generation
from finetune.inference.sampling import Sampling
from finetune.training.pretraining.prepare import prepare_pretraining, source_weights

STEPS, LENGTH, WINDOWS, SAVED = 8, 32, 8, 4
WEIGHTS = (3.0, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with its tokenizer, and two folders that `prepare` made with that."""
    folder = tmp_path_factory.mktemp("continued")
    run_helpers.make_model(folder / "model")
    for number, count in enumerate((300, 60)):
        texts = [
            {"text": f"{row['instruction']}: {row['output']}."}
            for row in make_records(count, seed=number)
        ]
        source = folder / f"{number}.jsonl"
        source.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
        flags = [
            "--data",
            source,
            "--output-dir",
            folder / f"tokens{number}",
            "--tokenizer",
            folder / "model",
        ]
        assert (
            prepare.main(
                [str(word) for word in [*flags, "--num-workers", 1, "--valid-fraction", 0.2]]
            )
            == 0
        )
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(folder / "model"),
        "train_data_path": [str(folder / "tokens0"), str(folder / "tokens1")],
        "data_weights": list(WEIGHTS),
        "valid_data_path": str(folder / "tokens0"),
        "max_seq_len": LENGTH,
        "device_batch_size": 2,
        "total_batch_size": WINDOWS * LENGTH,
        "num_iterations": STEPS,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "dtype": "float32",
        "device_type": "cpu",
        "save_steps": SAVED,
        "sample_every": STEPS,
        "log_samples": True,
        "report_to": "none",
        "output_dir": str(folder / "unused"),
        **changes,
    }


def train(folder: Path, name: str, processes: int = 1, **changes: Any) -> Path:
    output = folder / name
    if not output.exists():
        wanted = settings(folder, **changes, output_dir=str(output))
        run_helpers.train(wanted, processes, module="finetune.pretrain")
    return output


def refused(folder: Path, **changes: Any) -> str:
    with pytest.raises((ConfigError, DataError, Problems)) as caught:
        config = resolve_object(settings(folder, **changes), 1, PretrainConfig).config
        prepare_pretraining(config)
    return str(caught.value)


def windows(folder: Path) -> JoinedWindows:
    return JoinedWindows(
        [Windows(TokenShards(folder / f"tokens{n}", split="train"), LENGTH) for n in (0, 1)]
    )


def test_a_plain_loop_does_the_same(folder):
    """The windows of the sample log, torch's own AdamW with decay on matrices, a cosine: from the
    definition.
    """
    ours = train(folder, "full")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    norms = {id(p) for name, p in model.named_parameters() if "norm" in name}
    groups = [
        {
            "params": [p for p in model.parameters() if (id(p) in norms) == is_norm],
            "weight_decay": 0.0 if is_norm else 0.1,
        }
        for is_norm in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    losses, of_sources, text = [], [], windows(folder)
    for step, ids in enumerate(run_helpers.sample_ids(ours)):
        batch = torch.from_numpy(np.stack([text[i][0] for i in ids])).long()
        factor = step / 2 if step < 2 else 0.5 * (1 + np.cos(np.pi * (step - 2) / (STEPS - 2)))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * factor
        logits, targets = model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten()
        each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        loss, sources = each.mean(), torch.from_numpy(np.repeat(text.sources[ids], LENGTH))
        of_sources.append([float(each.detach()[sources == number].mean()) for number in (0, 1)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert run_helpers.losses(ours) == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1
    logged = [
        [line[f"source_loss/tokens{n}"] for n in (0, 1)]
        for line in run_helpers.lines(ours / "trainer_log.jsonl")
    ]
    np.testing.assert_allclose(logged, of_sources, rtol=1e-4)
    result = run_helpers.result_weights(ours)
    for name, parameter in model.named_parameters():
        if name in result:  # the head is tied
            torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-3, atol=1e-5)


def test_sources_are_mixed_exactly(folder):
    """After every step each is within one window of its weight, and none repeats a window before it
    is exhausted.
    """
    text, taken = windows(folder), np.zeros(2)
    seen: list[list[int]] = [[], []]
    for step, ids in enumerate(run_helpers.sample_ids(train(folder, "full")), 1):
        for number in ids:
            source = int(text.sources[number])
            taken[source] += 1
            seen[source].append(number)
        target = np.array(WEIGHTS) / sum(WEIGHTS) * WINDOWS * step
        assert np.abs(taken - target).max() < 1
    for source, numbers in enumerate(seen):
        size = len(text.parts[source])
        for first in range(0, len(numbers), size):
            assert len(set(numbers[first : first + size])) == len(numbers[first : first + size])


def test_natural_weights_are_the_numbers_of_windows(folder):
    config = resolve_object(
        settings(folder, data_weights=["natural", 20]), 1, PretrainConfig
    ).config
    assert resolve_object(config.model_dump(mode="json"), 1, PretrainConfig).config == config
    data, sizes = prepare_pretraining(config), [len(part) for part in windows(folder).parts]
    assert source_weights(config, data.train) == (float(sizes[0]), 20.0)
    config = resolve_object(
        settings(folder, data_weights=["natural", "natural"]), 1, PretrainConfig
    ).config
    taken = [
        windows(folder).sources[prepare_pretraining(config).batches.indices(step)]
        for step in range(STEPS)
    ]
    assert abs(np.concatenate(taken).mean() * sum(sizes) - sizes[1]) < sum(sizes) / (
        STEPS * WINDOWS
    )


@pytest.mark.parametrize("how", ["full", "lora"])
def test_the_arithmetic_is_that_of_what_is_trained(folder, how):
    """By hand: six operations for each number of a trained matrix, four of a frozen one; attention
    as PaLM has it.
    """
    output = train(folder, how, finetuning=how)
    assert all(line["mfu"] is None for line in run_helpers.lines(output / "trainer_log.jsonl")), (
        "a CPU has no peak"
    )
    (start,) = run_helpers.events(output, "start")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    # the tied embedding is the head
    passed = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    attention = 12 * model.config.num_hidden_layers * 32 * LENGTH
    trained = start["parameters"]["trainable"]
    expected = 6 * passed if how == "full" else 4 * passed + 6 * trained
    assert start["flops_per_token"] == expected + attention
    assert how == "full" or trained < passed


def test_joined_windows_are_their_parts(folder):
    text = windows(folder)
    expected = [part[i][0] for part in text.parts for i in range(len(part))]
    assert len(text) == len(expected)
    assert all(np.array_equal(text[i][0], ids) for i, ids in enumerate(expected))


@pytest.mark.parametrize("how", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_resumed_run_is_bit_identical(folder, how):
    whole = train(folder, how, finetuning=how)
    again = train(folder, f"{how} again", finetuning=how, resume=str(whole / f"checkpoint-{SAVED}"))
    first, second = run_helpers.result_weights(whole), run_helpers.result_weights(again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "lora"])
def test_two_processes_are_the_same_training(folder, how):
    one, two = train(folder, how, finetuning=how), train(folder, f"{how} two", 2, finetuning=how)
    assert run_helpers.sample_ids(one) == run_helpers.sample_ids(two)
    assert (
        run_helpers.largest_relative_difference(run_helpers.losses(one), run_helpers.losses(two))
        < 1e-4
    )


def test_the_adapter_is_merged_and_answers(folder, tmp_path):
    adapter = train(folder, "lora", finetuning="lora")
    losses = run_helpers.losses(adapter)
    assert losses[-1] < losses[0]
    words = ["merge", "--adapter", str(adapter), "--output-dir", str(tmp_path / "merged")]
    code, output = run_helpers.run_module("finetune", words, tmp_path / "log", {})
    assert code == 0, output
    for model in (adapter, tmp_path / "merged", train(folder, "full")):
        with load_for_generation(str(model), dtype="float32", device_type="cpu") as generator:
            answer = generator.generate(
                ["router switch"], Sampling(temperature=0.0, max_new_tokens=3)
            )[0]
        assert answer.completion_tokens


def test_the_result_is_evaluated_and_chatted_with(folder, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps(row) + "\n" for row in make_records(3, seed=5)), encoding="utf-8"
    )
    where = ["--device-type", "cpu", "--dtype", "float32", "--max-new-tokens", "2"]
    for how in ("full", "lora"):
        model = ["--model", str(train(folder, how, finetuning=how)), *where]
        assert (
            finetune(
                [
                    "eval",
                    *model,
                    "--data",
                    str(rows),
                    "--json",
                    "--cache-dir",
                    str(tmp_path / "cache"),
                ]
            )
            == 0
        )
        (measured,) = json.loads(capsys.readouterr().out)["models"]
        assert measured["overall"]["samples"] == 3 and 0 < measured["overall"]["loss"] < 10
        assert finetune(["chat", *model, "--prompt", "router"]) == 0


def test_the_result_has_its_bases_settings(folder):
    """The tokenizer's pad token would be an embedding that does not train in whatever is trained
    from it.
    """
    base, ours = (
        json.loads((part / "config.json").read_text())
        for part in (folder / "model", train(folder, "full"))
    )
    assert base.get("pad_token_id") == ours.get("pad_token_id")
    assert ours["architectures"] == base["architectures"]


def test_bits_per_byte_and_the_beginning_are_the_models_own(folder):
    """The first evaluation is the base's; the last is lower."""
    before, *_, after = [
        event["eval_bpb"] for event in run_helpers.events(train(folder, "full"), "eval")
    ]
    assert after < before


# -------------------------------------------------------------- what is refused, and what is chosen


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"depth": 3}, "depth is 3, and model is"),
        ({"arch": "llama"}, "arch is llama, and model is"),
        ({"vocab_size": 99}, "vocab_size is 99"),
        ({"tokenizer": "other"}, "tokenizer is other"),
        ({"optimizer": "muon"}, "a model is continued with adamw"),
        ({"num_iterations": None}, "how long to continue is not said"),
        ({"data_weights": [1.0]}, "data_weights are 1, and train_data_path has 2 entries"),
        ({"data_weights": [1.0, -1.0]}, "data_weights"),
        ({"max_seq_len": 512, "total_batch_size": 1024}, "made for at most 256 tokens"),
        ({"deepspeed": LAYOUTS["zero2"]["deepspeed"]}, "pretraining does not run under DeepSpeed"),
        ({"finetuning": "lora", "lora_target_modules": ["fc1"]}, "fc1 matches no linear module"),
        ({"model": None, "finetuning": "lora"}, "finetuning is lora, and there is no model"),
    ],
)
def test_what_conflicts_is_refused(folder, changes, said):
    assert said in refused(folder, **changes)


def test_tokens_of_another_tokenizer_are_refused(folder, tmp_path):
    other = run_helpers.make_model(tmp_path / "other", tokenizer_name="llama3")
    assert "made with another tokenizer" in refused(folder, model=str(other))


def test_rates_are_not_those_from_scratch(folder):
    open_settings = {"learning_rate": None, "warmup_steps": None}
    for how, rate in (("full", 4.5e-5), ("lora", 2e-4)):
        given = {
            k: v for k, v in settings(folder, finetuning=how).items() if k not in open_settings
        }
        resolved = resolve_object(given, 1, PretrainConfig)
        assert resolved.config.learning_rate == rate
        assert any(f"learning_rate {rate:g} for continuing" in note for note in resolved.notes)
        assert (resolved.config.optimizer, resolved.config.lr_scheduler) == ("adamw", "cosine")
        # As run.yaml has it: the same run again.
        again = resolve_object(resolved.config.model_dump(mode="json"), 1, PretrainConfig)
        assert again.config == resolved.config


def test_the_plan_and_the_description_are_of_the_model(folder):
    kind = KINDS["pretrain"]
    config = resolve_object(settings(folder, finetuning="lora"), 1, PretrainConfig).config
    shape = kind.shape(config)
    assert shape.hidden == 32
    from finetune.planning.inputs import workload_of
    from finetune.planning.workload import Cluster

    assert 0 < workload_of(config, shape, Cluster(device_type="cpu")).trained < shape.total
    assert "pretraining continued" in kind.describe({"model": "m", "finetuning": "lora"})
