"""Presets of guides 000 and 004, the device's capabilities, and what is refused before training."""

from __future__ import annotations

import json
import logging
import os
import re
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import ROOT

from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve
from finetune.errors import ConfigError, FinetuneError
from finetune.pretrain import KIND, main
from finetune.runtime import device as devices
from finetune.runtime.device import peak_flops
from finetune.training.pretraining.prepare import prepare_pretraining

# preset: processes, accumulation there and the guides' numbers, written here from the guides.
PRESETS = {
    "npu4_conservative": (
        4,
        4,
        {"depth": 6, "device_batch_size": 2, "total_batch_size": 32768, "max_seq_len": 1024},
    ),
    "npu4_standard": (
        4,
        4,
        {"depth": 8, "device_batch_size": 4, "total_batch_size": 65536, "max_seq_len": 1024},
    ),
    "npu4_full": (
        4,
        2,
        {"depth": 12, "device_batch_size": 32, "total_batch_size": 524288, "max_seq_len": 2048},
    ),
    "gpu2_conservative": (
        2,
        1,
        {"depth": 12, "device_batch_size": 8, "total_batch_size": 24576, "max_seq_len": 1536},
    ),
    "gpu2_balanced": (
        2,
        1,
        {"depth": 16, "device_batch_size": 12, "total_batch_size": 49152, "max_seq_len": 2048},
    ),
    "gpu2_aggressive": (
        2,
        1,
        {"depth": 20, "device_batch_size": 14, "total_batch_size": 86016, "max_seq_len": 3072},
    ),
}
MORE = {
    "npu4_conservative": {"num_iterations": 500, "lr_scale": 0.7},
    "npu4_standard": {"num_iterations": 1000, "lr_scale": 1.0},
}


@pytest.fixture(autouse=True)
def _logger_as_before():
    """`main` puts a handler on the console of one test, which is closed in the next."""
    logger = logging.getLogger("finetune")
    before = list(logger.handlers), logger.propagate
    yield
    logger.handlers, logger.propagate = before


def test_every_preset_is_here():
    files = {
        path.stem.removeprefix("pretrain_")
        for path in (ROOT / "ds_configs").glob("pretrain_*.json")
    }
    assert files == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_guides_numbers(name: str):
    processes, accumulation, numbers = PRESETS[name]
    arguments = ["--config", str(ROOT / "ds_configs" / f"pretrain_{name}.json")]
    config = resolve(arguments, world_size=processes, model_class=PretrainConfig).config
    # docs/guides/pretraining.md: memory
    assert config.arch == ("nanochat" if name == "gpu2_aggressive" else "lfm2_value")
    for setting, value in (numbers | MORE.get(name, {})).items():
        assert getattr(config, setting) == value, setting
    assert config.gradient_accumulation_steps == accumulation
    assert config.deepspeed is None and config.output_dir == f"runs/pretrain_{name}"
    alone = resolve(arguments, world_size=1, model_class=PretrainConfig).config
    assert alone.gradient_accumulation_steps == accumulation * processes, (
        "the fallback on one device"
    )


def test_its_own_processes_are_started_once_and_with_the_same_words(monkeypatch):
    started = []
    monkeypatch.setattr(
        os, "execve", lambda path, words, environment: started.append((words, environment))
    )
    monkeypatch.setenv("WORLD_SIZE", "4")  # guide 000 exports it: torchrun must not believe it
    words = [
        "--train-data-path",
        "x.bin",
        "--output-dir",
        "out",
        "--distributed",
        "--world_size",
        "2",
    ]
    KIND.start_processes(words)
    ((command, environment),) = started
    assert "--nproc_per_node=2" in command and command[-len(words) :] == words
    assert "WORLD_SIZE" not in environment
    KIND.start_processes(["--train-data-path", "x.bin", "--output-dir", "out"])
    assert len(started) == 1
    with pytest.raises(FinetuneError, match="not a multiple"):
        KIND.start_processes([*words, "--total-batch-size", "1000"])
    with pytest.raises(ConfigError, match="how many processes"):
        KIND.start_processes([*words[:-2], "--device-type", "cpu"])


# ---------------------------------------------------------------- what the device can do


def test_peaks_by_name():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H20") == 148e12
    assert peak_flops("Ascend910B3") == 313e12
    assert peak_flops("NVIDIA GeForce GT 710") is None


@pytest.mark.parametrize(
    ("generation", "fp8", "flash", "hopper"),
    [
        ((7, 0), False, False, False),
        ((8, 0), False, True, False),
        ((9, 0), True, True, True),
        ((10, 0), True, True, False),
    ],
)
def test_capabilities_of_cuda(generation, fp8: bool, flash: bool, hopper: bool, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: generation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: generation >= (8, 0)
    )
    able = devices.capabilities("cuda")
    assert (able.fp8, able.flash, able.hopper, able.compile, able.peak_flops) == (
        fp8,
        flash,
        hopper,
        True,
        None,
    )


def test_capabilities_elsewhere(monkeypatch):
    fake = types.SimpleNamespace(
        is_bf16_supported=lambda: True, get_device_name=lambda: "Ascend910B4"
    )
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    npu = devices.capabilities("npu")
    assert (npu.bfloat16, npu.fp8, npu.compile, npu.peak_flops) == (True, False, False, 280e12)
    assert not devices.capabilities("cpu").compile and not devices.capabilities("mps").bfloat16


@pytest.mark.parametrize(("device", "backend", "right"), [
    ("cpu", "auto", "gloo"), ("cpu", "gloo", "gloo"), ("cpu", "nccl", None), ("cuda", "auto", "nccl"),
    ("cuda", "gloo", "gloo"), ("cuda", "hccl", None), ("npu", "auto", "hccl"), ("npu", "gloo", None),
])  # fmt: skip
def test_backends(device: str, backend: str, right):
    if right is None:
        with pytest.raises(ConfigError, match="does not work"):
            devices.choose_backend(backend, device)
    else:
        assert devices.choose_backend(backend, device) == right


def test_fp8_is_ignored_with_one_message_where_there_is_none(monkeypatch):
    from finetune.training.pretraining import build

    said: list[str] = []
    monkeypatch.setattr(build.logger, "warning", lambda text, *values: said.append(text % values))
    config = PretrainConfig(train_data_path=("x",), output_dir="o", fp8=True)
    assert build._use_fp8(torch.nn.Linear(2, 2), config, devices.capabilities("cpu")) is False
    assert said == ["--fp8 is ignored: cpu has no float8 matrix products"]


# ---------------------------------------------------------------- refused before training


@pytest.fixture
def files(tmp_path: Path) -> Path:
    np.arange(1000, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(20, dtype="<u2").tofile(tmp_path / "val.bin")
    return tmp_path


def refused(files: Path, capsys, *flags: str) -> str:
    words = [
        "--train-data-path",
        files / "train.bin",
        "--output-dir",
        files / "out",
        "--vocab-size",
        "1000",
    ]
    words += [
        "--max-seq-len",
        "16",
        "--device-batch-size",
        "2",
        "--total-batch-size",
        "64",
        "--depth",
        "1",
    ]
    words += ["--num-iterations", "1", "--device-type", "cpu"]
    code = main([*(str(word) for word in words), *flags])
    assert code == 2
    assert not (files / "out").exists(), "a refused run wrote something"
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train-data-path nothing.bin", "no such token file"),
        ("--max-seq-len 1024 --total-batch-size 2048", "lower --max-seq-len to at most 999"),
        ("--total-batch-size 2048", "a --total-batch-size of at most 992"),
        ("--device-batch-size 3", "nearest that agree"),
        ("--arch gpt5", "nanochat, qwen3, llama, lfm2, lfm2_value"),
        ("--backend nccl", "backend nccl does not work with cpu"),
        ("--resume_from old.pt", "pickle"),
        ("--use_wandb", "wandb is not installed"),
        ("--use_wandb --report-to none", "leave one of the two out"),
    ],
)
def test_bad_input(flags: str, said: str, files: Path, capsys):
    if "wandb" in flags and find_spec("wandb"):
        pytest.skip("wandb is installed")
    assert said in refused(files, capsys, *flags.split())


def test_validation_data_smaller_than_a_window(files: Path, capsys):
    said = refused(
        files,
        capsys,
        "--valid-data-path",
        str(files / "val.bin"),
        "--max-seq-len=32",
        "--total-batch-size=64",
    )
    assert "20 tokens are not one window" in said and "--valid-data-path" in said


def test_an_id_beyond_the_vocabulary_is_named_when_it_is_read(files: Path):
    """A headerless file says nothing of its ids; reading all of it before would take hours."""
    words = ["--train-data-path", str(files / "train.bin"), "--vocab-size=500", "--max-seq-len=32"]
    words += ["--device-batch-size=2", "--total-batch-size=64", "--num-iterations=16"]
    config = resolve([*words, "--output-dir", "x"], world_size=1, model_class=PretrainConfig).config
    data = prepare_pretraining(config)
    with pytest.raises(FinetuneError, match="token 500 is 500, and the vocabulary has 500 ids"):
        for start in range(len(data.train)):
            data.train[start]


def test_everything_wrong_at_once(files: Path, capsys):
    said = refused(files, capsys, "--arch", "gpt5", "--device-batch-size", "3", "--resume", "x.pt")
    assert "gpt5" in said and "nearest that agree" in said


def test_print_config_is_json_of_numbers(files: Path, capsys):
    words = ["--config", str(ROOT / "ds_configs" / "pretrain_gpu2_balanced.json"), "--print-config"]
    assert main(words) == 0
    assert (
        json.loads((ROOT / "ds_configs" / "pretrain_gpu2_balanced.json").read_text())["depth"] == 16
    )
    assert re.search(r"^depth +16 ", capsys.readouterr().out, re.M)
