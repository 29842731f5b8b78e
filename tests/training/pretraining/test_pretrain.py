"""Whole pretraining runs: against a plain loop, on 1 and 2 processes, resumed; and the result."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_helpers
import torch
from conftest import make_records
from launching import run_cli, said
from run_helpers import events, losses, result_weights, sample_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune
from finetune.commands.prepare import command as prepare
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve_object
from finetune.config.schedules import ScheduleSettings, learning_rate_schedule
from finetune.data.corpus.token_shards import TokenShards
from finetune.data.corpus.windows import Windows
from finetune.errors import DataError
from finetune.modeling import lfm2_value
from finetune.modeling.scratch import make_model, scratch_config
from finetune.storage.run_folder import differences
from finetune.training.optimizers import make_optimizer, scaled_rates, set_matrix_schedule
from finetune.training.pretraining.prepare import prepare_pretraining

STEPS, LENGTH, WINDOWS = 30, 32, 8
# how much further apart a run and the plain loop may be than plain loops among themselves
ROUNDING_FACTOR = 5.0
# the last checkpoint of the killed run, and the step before which it is killed
SAVED, KILLED = 20, 24
HERE = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """A folder that `prepare` made of 1,000 short documents."""
    folder = tmp_path_factory.mktemp("tokens")
    texts = [{"text": f"{row['instruction']}: {row['output']}."} for row in make_records(1000)]
    source = folder / "src.jsonl"
    source.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    words = ["--data", source, "--output-dir", folder / "shards", "--vocab-size", 300]
    words += ["--num-workers", 1, "--valid-fraction", 0.2]
    assert prepare.main([str(word) for word in words]) == 0
    return folder / "shards"


@pytest.fixture(scope="module")
def settings(tokens: Path) -> dict[str, Any]:
    own = {"train_data_path": str(tokens), "valid_data_path": str(tokens), "depth": 1}
    own |= {"max_seq_len": LENGTH, "device_batch_size": 2, "total_batch_size": WINDOWS * LENGTH}
    own |= {"num_iterations": STEPS, "warmup_steps": 2, "lr_scaling": False, "embedding_lr": 0.05}
    own |= {"weight_decay": 0.1, "dtype": "float32", "device_type": "cpu", "save_steps": 10}
    own |= {"eval_steps": 10, "eval_tokens": 40 * LENGTH, "sample_every": STEPS}
    return own | {"log_samples": True, "report_to": "none"}


def train(settings: dict, output: Path, processes: int = 1, **changes) -> Path:
    wanted = {**settings, **changes, "output_dir": str(output)}
    run_helpers.train(wanted, processes, module="finetune.pretrain")
    return output


def prepared(settings: dict, **changes):
    given = {**settings, "output_dir": "x", **changes}
    return prepare_pretraining(resolve_object(given, 1, PretrainConfig).config)


@pytest.fixture(scope="module")
def one(settings: dict, tmp_path_factory) -> Path:
    """One process, from begin to end."""
    return train(settings, tmp_path_factory.mktemp("runs") / "one")


def test_a_plain_loop_does_the_same(one, settings, tokens):
    """From the definition: whole batches, no accumulation.

    How far rounding alone may carry equal trainings apart depends on the kernels: NorMuon orthogonalizes
    in bfloat16, which makes small singular values large. So it is measured: further plain loops
    differ from the first only in the order in which they sum over a batch.
    """
    config = resolve_object({**settings, "output_dir": "x"}, 1, PretrainConfig).config
    batches = sample_ids(one)
    model, expected = plain_loop(config, batches, tokens)
    twins = [plain_loop(config, batches, tokens, parts=parts) for parts in (2, 4, WINDOWS)]
    difference = run_helpers.largest_relative_difference
    rounding = max(difference(expected, twin) for _, twin in twins)
    assert rounding < 1e-3, "no yardstick"
    assert difference(expected, losses(one)) <= max(1e-5, ROUNDING_FACTOR * rounding)
    assert expected[-1] < expected[0] - 0.1, "nothing was learned"
    result = result_weights(one)
    for name, parameter in model.named_parameters():
        size = parameter.norm()
        apart = [(twin.get_parameter(name) - parameter).norm() / size for twin, _ in twins]
        limit = max(1e-4, ROUNDING_FACTOR * float(max(apart)))
        assert float((result[name] - parameter).norm() / size) <= limit, name


def plain_loop(
    config: PretrainConfig, batches: list[list[int]], tokens: Path, parts: int = 1
) -> tuple[torch.nn.Module, list[float]]:
    """Train from the definition, with each batch cut into so many parts; the model and its losses."""
    model = make_model(scratch_config("nanochat", 1, vocab_size=300, max_seq_len=LENGTH), seed=42)
    windows = Windows(TokenShards(tokens, split="train"), LENGTH)
    rates = scaled_rates(config, width=64, worth_tokens=1, run_tokens=1)
    optimizer = make_optimizer(model, config, rates, fused=True, compute_dtype=torch.float32)
    peaks = [group["lr"] for group in optimizer.param_groups]
    course = ScheduleSettings(STEPS, 2, warmdown_ratio=0.65, final_fraction=0.05)
    warmdown = learning_rate_schedule("warmdown", course)
    losses = []
    for step, ids in enumerate(batches):
        batch = torch.from_numpy(np.stack([windows[i][0] for i in ids])).long()
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * warmdown(step)
        set_matrix_schedule(optimizer, step, total_steps=STEPS, warmdown_ratio=0.65, decay=0.1)
        total = 0.0
        for part in batch.chunk(parts):
            logits = model(part[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            (loss / parts).backward()
            total += loss.item() / parts
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return model.requires_grad_(False), losses


def test_two_processes_are_the_same_training(one: Path, settings: dict, tmp_path: Path):
    two = train(settings, tmp_path / "two", processes=2)
    assert sample_ids(two) == sample_ids(one)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    for a, b in zip(events(one, "eval"), events(two, "eval"), strict=True):
        assert a["step"] == b["step"] and a["eval_bpb"] == pytest.approx(b["eval_bpb"], rel=1e-4)
    (start,), (sample,) = events(two, "start"), events(two, "sample")
    assert (start["world_size"], start["gradient_accumulation_steps"]) == (2, 2)
    assert sample["step"] == STEPS and len(sample["samples"]) == 3


def test_bits_per_byte_by_definition(one: Path, tokens: Path):
    """From the result folder: nats of tokens that stand for text, over the bytes of that text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(one), AutoTokenizer.from_pretrained(one)
    windows = Windows(TokenShards(tokens, split="val"), LENGTH, limit=40)
    special = set(tokenizer.all_special_ids)
    nats = total_bytes = 0.0
    for index in range(len(windows)):
        ids = torch.from_numpy(windows[index][0]).long()
        with torch.no_grad():
            log_probabilities = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        for position, token in enumerate(ids[1:].tolist()):
            if token not in special:
                nats -= log_probabilities[position, token].item()
                # A byte-level token is written with one character for each of its bytes.
                total_bytes += len(tokenizer.convert_ids_to_tokens(token))
    first, *_, last = events(one, "eval")
    assert last["step"] == STEPS
    assert last["eval_bpb"] == pytest.approx(nats / math.log(2) / total_bytes, rel=1e-5)
    # The first evaluation is the start's: every token equally likely.
    assert first["eval_loss"] == pytest.approx(math.log(320), abs=1e-2)


def test_killed_and_resumed_it_is_bit_identical(one, settings, tmp_path):
    """Saves are not in the background: the checkpoint is whole then."""
    wanted = {**settings, "output_dir": str(tmp_path / "again"), "async_save": False}
    run_helpers.kill_and_resume(wanted, KILLED, SAVED, module="finetune.pretrain")
    assert sample_ids(tmp_path / "again") == sample_ids(one)
    run_helpers.assert_same_training(tmp_path / "again", one)


def test_every_way_of_starting_is_the_same_run(one, settings, tmp_path):
    """It becomes torchrun."""
    config, output = tmp_path / "run.json", tmp_path / "out"
    config.write_text(json.dumps({**settings, "sample_every": 0, "eval_steps": 0, "save_steps": 0}))
    flags = ["--config", config, "--output-dir", output, "--distributed", "--world_size", 2]
    result = run_cli(flags, module="finetune.pretrain")
    assert result.returncode == 0, said(result)
    assert events(output, "start")[0]["world_size"] == 2
    assert losses(output) == pytest.approx(losses(one), rel=1e-4)


def test_the_result_is_an_ordinary_model_that_is_fine_tuned(one, tiny_data, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(one), AutoTokenizer.from_pretrained(one)
    assert type(model).__name__ == "NanoChatForCausalLM"
    assert model.get_input_embeddings().padding_idx is None
    assert "finetune" not in (one / "config.json").read_text()
    config = json.loads((one / f"checkpoint-{STEPS}" / "config.json").read_text())
    assert config["model_type"] == "nanochat" and config.get("pad_token_id") is None
    ids = tokenizer("def test", return_tensors="pt").input_ids
    options = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    assert model.generate(ids, max_new_tokens=5, **options).shape[1] > ids.shape[1]
    settings = {"model": str(one), "data": str(tiny_data), "output_dir": str(tmp_path / "sft")}
    settings |= {"cutoff_len": 256, "global_batch_size": 4, "max_steps": 3, "device_type": "cpu"}
    settings |= {"dtype": "float32", "report_to": "none", "cache_dir": str(tmp_path / "cache")}
    finetune.run(settings)
    adapter = result_weights(tmp_path / "sft")
    assert any("mlp.fc1.lora_B" in name and tensor.any() for name, tensor in adapter.items())


def test_another_architecture_and_optimizer(settings: dict, tmp_path: Path):
    changes = {"arch": "lfm2_value", "optimizer": "adamw", "learning_rate": 3e-3, "depth": 2}
    changes |= {"save_steps": 0, "num_iterations": 4, "document_aligned": True}
    changes |= {"max_grad_norm": 1.0, "lr_scheduler": "cosine"}
    finetune.run({**settings, **changes, "output_dir": str(tmp_path / "run")})
    lfm2_value.register()
    name = type(AutoModelForCausalLM.from_pretrained(tmp_path / "run")).__name__
    assert name.lower().startswith("lfm2value")
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]


def test_best_fit_windows_make_another_run(settings: dict, tmp_path: Path, caplog):
    settings = {**settings, "windows": "best-fit"}
    data = prepared(settings)
    # <|endoftext|>
    assert {int(data.train[index][0][0]) for index in range(len(data.train))} == {1}
    assert "69% of the training tokens are cut by --windows best-fit" in caplog.text
    caplog.clear()
    longer = prepared(settings, max_seq_len=128)
    assert longer.train.cut_tokens > 0 and "are cut by" not in caplog.text
    plain, aligned = (prepared(settings, windows=name).identity for name in ("stream", "document"))
    assert data.identity["windows"] == "best-fit" and data.identity["document_aligned"] is False
    # Those of runs that were begun before there was a choice of three.
    assert "windows" not in plain and plain["document_aligned"] is False
    assert aligned.keys() == plain.keys() and aligned["document_aligned"] is True
    np.arange(4000, dtype="<u2").tofile(tmp_path / "bare.bin")
    with pytest.raises(DataError, match="does not say where its documents begin"):
        prepared(settings, train_data_path=str(tmp_path / "bare.bin"), vocab_size=4000)


def test_a_run_whose_rates_went_with_the_square_root_goes_on_with_it_alone(settings: dict):
    new = prepared(settings, lr_scaling=True).identity
    before = prepared(settings, lr_scaling=True, lr_batch_exponent=0.5).identity
    of_0_1_0 = {name: value for name, value in new.items() if name != "lr_batch_exponent"}
    assert differences(of_0_1_0, new) == [("lr_batch_exponent", 0.5, 0.25)]
    assert differences(of_0_1_0, before) == []
    assert differences(before, new) == [("lr_batch_exponent", 0.5, 0.25)]
    assert "lr_batch_exponent" not in prepared(settings, lr_scaling=False).identity


def test_token_files_without_header_or_tokenizer(settings: dict, tmp_path: Path):
    """The guides' raw .bin files: a vocabulary size is enough; the result has no tokenizer."""
    choose = np.random.default_rng(0)
    changes = {"vocab_size": 300, "num_iterations": 2, "save_steps": 0}
    for name, part in (("train_data_path", "train"), ("valid_data_path", "val")):
        choose.integers(0, 300, 4000).astype("<u2").tofile(tmp_path / f"{part}.bin")
        changes[name] = str(tmp_path / f"{part}.bin")
    output = tmp_path / "out"
    finetune.run({**settings, **changes, "output_dir": str(output)})
    assert AutoModelForCausalLM.from_pretrained(output).config.vocab_size == 320
    assert not (output / "tokenizer.json").exists()
    assert "eval_bpb" not in events(output, "eval")[-1]
