"""Hooks of other packages that finetune/ overrides, and what no CPU shows: an upgrade fails here first."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._utils
import torch.nn.attention
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from transformers import Trainer, TrainingArguments

from finetune.config.run_config import RunConfig
from finetune.training import trainer
from finetune.training.pretraining.trainer import PretrainTrainer
from finetune.training.trainer import RunTrainer, SFTTrainer, training_arguments

# What is overridden or called: a line for each function, its name, then its parameters without self.
# A hook that is renamed would silently not be called any more.
HOOKS = {
    LocalElasticAgent: """
        _start_workers worker_group
        _monitor_workers worker_group
        _shutdown death_sig timeout""",
    Trainer: """
        get_train_dataloader
        set_initial_training_values args dataloader
        _init_training_state max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial
        _prepare_for_training max_steps train_dataloader resume_from_checkpoint
        get_batch_samples epoch_iterator num_batches device
        create_scheduler num_training_steps optimizer
        create_optimizer model
        training_step model inputs num_items_in_batch
        _get_grad_norm model grad_norm
        _get_learning_rate
        floating_point_ops inputs
        store_flos
        evaluate eval_dataset ignore_keys metric_key_prefix
        log logs start_time
        _save_checkpoint model trial""",
}
OURS = (RunTrainer, SFTTrainer, PretrainTrainer)


def test_hooks_have_these_parameters():
    for owner, text in HOOKS.items():
        for name, *parameters in map(str.split, text.strip().splitlines()):
            assert list(inspect.signature(getattr(owner, name)).parameters) == ["self", *parameters]


def set_by(owner: type) -> set[str]:
    """Names that the class assigns on self."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    stored = (node for node in stored if isinstance(node.ctx, ast.Store))
    return {node.attr for node in stored if getattr(node.value, "id", "") == "self"}


@pytest.mark.parametrize("ours", OURS)
def test_overridden_methods_are_pinned_and_attributes_are_not_trainers(ours: type):
    pinned = {line.split()[0] for line in HOOKS[Trainer].strip().splitlines()}
    for name in vars(ours):
        theirs = getattr(Trainer, name, None)
        if inspect.isfunction(theirs) and not name.startswith("__"):
            assert name in pinned
            # Trainer calls by position
            given = range(len(inspect.signature(theirs).parameters))
            inspect.signature(getattr(ours, name)).bind(*given)
    own = set_by(ours) - {"lr_scheduler", "_created_lr_scheduler", "control", "optimizer"}
    assert not own & (set_by(Trainer) | set(dir(Trainer)))


ONE_STEP = SimpleNamespace(batches=SimpleNamespace(total_steps=1), valid=None)


def run_config(folder: Path, device_type: str) -> RunConfig:
    given = {"model": "m", "data": ("d",), "report_to": ("none",), "dtype": "float32"}
    own = {"output_dir": str(folder), "device_type": device_type, "gradient_checkpointing": False}
    return RunConfig(**given, **own)


def test_a_process_that_sees_several_devices_trains_on_one(monkeypatch, tmp_path, caplog):
    """Else Trainer makes a DataParallel of the model; two devices are simulated here."""

    def two_devices(self: TrainingArguments) -> torch.device:
        self._n_gpu = 2
        return torch.device("cpu")

    found = cached_property(two_devices)
    found.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", found)
    monkeypatch.setattr(logging.getLogger("finetune"), "handlers", [caplog.handler])
    arguments = training_arguments(run_config(tmp_path, "cpu"), ONE_STEP, learning_rate=1e-4)
    assert arguments.n_gpu == 1 and "sees 2 devices and trains on one" in caplog.text


@pytest.mark.parametrize("device", ["nvme", "none"])
def test_an_offloaded_optimizer_steps_fused_on_the_cpu(device, monkeypatch, tmp_path):
    """An NPU has no fused AdamW; offloaded, it is the CPU's, and the other takes ten times as long."""
    given: dict[str, object] = {}
    monkeypatch.setattr(trainer, "TrainingArguments", lambda **named: given.update(named))
    monkeypatch.setattr(trainer, "_use_one_device", lambda arguments: None)
    zero = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}}
    training_arguments(run_config(tmp_path, "npu"), ONE_STEP, learning_rate=1e-4, deepspeed=zero)
    assert given["optim"] == ("adamw_torch" if device == "none" else "adamw_torch_fused")
