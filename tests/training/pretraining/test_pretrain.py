"""Whole pretraining runs: on 1 and 2 processes, resumed; and the result."""

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
from run_helpers import events, losses, sample_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune
from finetune.commands.prepare import command as prepare
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve_object
from finetune.data.corpus.token_shards import TokenShards
from finetune.data.corpus.windows import Windows
from finetune.errors import DataError
from finetune.modeling import lfm2_value
from finetune.storage.run_folder import differences
from finetune.training.pretraining.prepare import prepare_pretraining

STEPS, LENGTH, WINDOWS = 30, 32, 8
# the last checkpoint of the killed run, and the step before which it is killed
SAVED, KILLED = 20, 24


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
