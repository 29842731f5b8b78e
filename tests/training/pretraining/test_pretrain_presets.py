"""Processes of its own, the device's capabilities, and what is refused before training."""

from __future__ import annotations

import logging
import os
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune.config.pretrain_config import PretrainConfig
from finetune.errors import ConfigError, FinetuneError
from finetune.pretrain import KIND, main
from finetune.runtime import device as devices
from finetune.runtime.device import peak_flops
from finetune.training.pretraining import build


@pytest.fixture(autouse=True)
def _logger_as_before():
    """`main` puts a handler on the console of one test, which is closed in the next."""
    logger = logging.getLogger("finetune")
    before = list(logger.handlers), logger.propagate
    yield
    logger.handlers, logger.propagate = before


def test_its_own_processes_are_started_once_and_with_the_same_words(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda path, words, given: started.append((words, given)))
    monkeypatch.setenv("WORLD_SIZE", "4")  # guide 000 exports it: torchrun must not believe it
    plain = ["--train-data-path", "x.bin", "--output-dir", "out"]
    words = [*plain, "--distributed", "--world_size", "2"]
    KIND.start_processes(words)
    KIND.start_processes(plain)
    ((command, environment),) = started
    assert "--nproc_per_node=2" in command and command[-len(words) :] == words
    assert "WORLD_SIZE" not in environment
    with pytest.raises(FinetuneError, match="not a multiple"):
        KIND.start_processes([*words, "--total-batch-size", "1000"])
    with pytest.raises(ConfigError, match="how many processes"):
        KIND.start_processes([*words[:-2], "--device-type", "cpu"])


def test_capabilities(monkeypatch):
    cuda = torch.cuda
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("NVIDIA GeForce GT 710") is None
    monkeypatch.setattr(cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    for generation, fp8, flash, hopper in (
        ((7, 0), False, False, False),
        ((9, 0), True, True, True),
        ((10, 0), True, True, False),
    ):
        monkeypatch.setattr(cuda, "get_device_capability", lambda generation=generation: generation)
        monkeypatch.setattr(cuda, "is_bf16_supported", lambda including_emulation: True)
        able = devices.capabilities("cuda")
        assert (able.fp8, able.flash, able.hopper) == (fp8, flash, hopper)
        assert (able.compile, able.peak_flops) == (True, 989e12)
    fake = {"is_bf16_supported": lambda: True, "get_device_name": lambda: "Ascend910B4"}
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(**fake), raising=False)
    npu = devices.capabilities("npu")
    assert (npu.bfloat16, npu.fp8, npu.compile, npu.peak_flops) == (True, False, False, 280e12)
    assert not devices.capabilities("cpu").compile and not devices.capabilities("mps").bfloat16


def test_fp8_is_ignored_with_one_message_where_there_is_none(caplog):
    config = PretrainConfig(train_data_path=("x",), output_dir="o", fp8=True)
    assert build._use_fp8(torch.nn.Linear(2, 2), config, devices.capabilities("cpu")) is False
    assert caplog.messages == ["--fp8 is ignored: cpu has no float8 matrix products"]


COMMON = "--vocab-size 1000 --max-seq-len 16 --device-batch-size 2 --total-batch-size 64 --depth 1"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train-data-path nothing.bin", "no such token file"),
        ("--max-seq-len 1024 --total-batch-size 2048", "lower --max-seq-len to at most 999"),
        ("--total-batch-size 2048", "a --total-batch-size of at most 992"),
        ("--arch gpt5 --device-batch-size 3", "nanochat, qwen3, llama"),
        ("--device-batch-size 3", "nearest that agree"),
        ("--resume_from old.pt", "pickle"),
        ("--backend nccl", "backend nccl does not work with cpu"),
        ("--use_wandb", "wandb is not installed"),
        ("--valid-data-path {val} --max-seq-len=32", "20 tokens are not one window"),
    ],
)
def test_bad_input(flags: str, words: str, tmp_path: Path, capsys):
    if "wandb" in flags and find_spec("wandb"):
        pytest.skip("wandb is installed")
    np.arange(1000, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(20, dtype="<u2").tofile(tmp_path / "val.bin")
    given = ["--train-data-path", f"{tmp_path}/train.bin", "--output-dir", f"{tmp_path}/out"]
    given += [*COMMON.split(), "--num-iterations", "1", "--device-type", "cpu"]
    assert main([*given, *flags.format(val=tmp_path / "val.bin").split()]) == 2
    assert not (tmp_path / "out").exists(), "a refused run wrote something"
    assert words in capsys.readouterr().err
