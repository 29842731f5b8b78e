"""Private and easily changed parts of other packages that finetune/ leans on: an upgrade fails here first."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import torch._utils
import torch.nn.attention
from deepspeed.runtime.zero import partition_parameters, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import mixed_precision_linkage
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from transformers import Trainer, TrainingArguments

from finetune.config.run_config import RunConfig
from finetune.training.pretraining.trainer import PretrainTrainer
from finetune.training.state import TrainingState
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


def tree_of(owner: Any) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(owner)))


@cache
def set_by(owner: type) -> set[str]:
    """Names that the class (or one that it inherits from) assigns on self."""
    classes = [
        one for one in owner.__mro__[:-1] if one.__module__ not in ("builtins", "typing", "abc")
    ]
    return set().union(*(set_by_one(one) for one in classes if one is not torch.nn.Module))


def set_by_one(owner: type) -> set[str]:
    return {node.attr for node in ast.walk(tree_of(owner)) if _sets_on_self(node)}


def _sets_on_self(node: ast.AST) -> bool:
    stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return stored and isinstance(node.value, ast.Name) and node.value.id == "self"


@pytest.mark.parametrize("ours", OURS)
def test_overridden_methods_are_pinned_and_attributes_are_not_trainers(ours: type):
    pinned = {line.split()[0] for line in HOOKS[Trainer].strip().splitlines()}
    for name in vars(ours):
        theirs = getattr(Trainer, name, None)
        if inspect.isfunction(theirs) and not name.startswith("__"):
            assert name in pinned
            # Trainer calls by position
            inspect.signature(getattr(ours, name)).bind(
                *range(len(inspect.signature(theirs).parameters))
            )
    own = set_by_one(ours) - {"lr_scheduler", "_created_lr_scheduler", "control", "optimizer"}
    assert not own & (set_by(Trainer) | set(dir(Trainer)))


STEP = """get_batch_samples( training_step( _tr_loss_+=_tr_loss_step _get_grad_norm( optimizer.step()
    lr_scheduler.step() state.global_step_+=_1 callback_handler.on_step_end("""
# moments are loaded after _prepare_for_training made the engine
START = """get_train_dataloader( set_initial_training_values( _init_training_state( _prepare_for_training(
    _tr_loss_=_"""
SEVEN = """num_train_epochs num_update_steps_per_epoch num_examples num_train_samples
    total_train_batch_size steps_in_epoch max_steps"""


@pytest.mark.parametrize(
    ("text", "calls"), [("self.optimizer.step()", STEP), ("self._prepare_for_training(", START)]
)
def test_trainer_works_in_the_order_we_need(text: str, calls: str):
    methods = (inspect.getsource(m) for m in vars(Trainer).values() if inspect.isfunction(m))
    (source,) = (method for method in methods if text in method)
    places = [
        source.find("self." + call.replace("_=_", " = ").replace("_+=_", " += "))
        for call in calls.split()
    ]
    assert -1 not in places and places == sorted(places), "a step has another order"
    assert "self.create_scheduler(" in inspect.getsource(Trainer._prepare_for_training)
    _, returned = inspect.getsource(Trainer.set_initial_training_values).split("return (")
    assert returned.split(")")[0].replace(",", "").split() == SEVEN.split()


PARTITIONED = "id shape numel tensor status secondary_tensor process_group"


def test_what_zero_keeps_in_parameters_and_how_its_stages_are_told_apart():
    assert not hasattr(DeepSpeedZeroOptimizer, "_overflow_clean_up")
    assert "fp32_partitioned_groups_flat" not in set_by(DeepSpeedZeroOptimizer)
    assert "_hp_optimizer_states_linked" not in set_by(DeepSpeedZeroOptimizer_Stage3)
    source = inspect.getsource(partition_parameters)
    for name in PARTITIONED.split():
        assert f"param.ds_{name} = " in source
    assert "lp_param._hp_mapping = " in inspect.getsource(mixed_precision_linkage)
    assert "_hp_mapping" in inspect.getsource(stage_1_and_2)
    assert "lp_fragment_address" in tensor_fragment.__dataclass_fields__
    assert {"start", "numel"} <= set(fragment_address.__dataclass_fields__)
    assert accelerate.utils.DistributedType.DEEPSPEED.value == "DEEPSPEED"


FLASH = """query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale
    window_size_left window_size_right"""
FLASH_3 = (  # what its registration in torch imports, takes and refuses
    '"flash_attn_interface"|"_flash_attention_forward"|"_flash_attention_backward"|dropout_p must be 0'
    "|FA3 requires compute capability 9.0|inputs must be one of"
)


def test_torchs_flash_and_fused_kernels():
    """modeling/attention.py calls the operator, modeling/attention_check.py switches its kernels."""
    operator, attention = torch.ops.aten._flash_attention_forward, torch.nn.attention
    names = [argument.name for argument in operator.default._schema.arguments]
    assert names[:13] == FLASH.split()
    assert "FA3" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    attention.restore_flash_attention_impl()
    source = inspect.getsource(attention._fa3)
    assert all(text in source for text in FLASH_3.split("|"))
    assert 'getattr(self, "found_inf", None)' in inspect.getsource(torch.optim.Adam.step)


# ---------------------------------------------------------------- what no CPU shows

ONE_STEP = SimpleNamespace(batches=SimpleNamespace(total_steps=1), valid=None)


def run_config(folder: Path, device_type: str) -> RunConfig:
    given = {"model": "m", "data": ("d",), "report_to": ("none",), "dtype": "float32"}
    given |= {"output_dir": str(folder), "device_type": device_type}
    given |= {"gradient_checkpointing": False}
    return RunConfig(**given)


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


@pytest.mark.parametrize("device", ["cpu", "nvme", "none"])
def test_an_offloaded_optimizer_steps_fused_on_the_cpu(device, monkeypatch, tmp_path):
    """An NPU has no fused AdamW; offloaded, it is the CPU's, and the other takes ten times as long."""
    given: dict[str, object] = {}
    trainer = "finetune.training.trainer"
    monkeypatch.setattr(f"{trainer}.TrainingArguments", lambda **named: given.update(named))
    monkeypatch.setattr(f"{trainer}._use_one_device", lambda arguments: None)
    zero = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}}
    training_arguments(run_config(tmp_path, "npu"), ONE_STEP, learning_rate=1e-4, deepspeed=zero)
    assert given["optim"] == ("adamw_torch" if device == "none" else "adamw_torch_fused")


@pytest.mark.parametrize("fused", [True, False])
def test_the_step_count_is_where_the_optimizers_kernel_reads_it(fused):
    """A fused kernel reads it on the device (here: meta), others on the host."""
    flat = torch.nn.Parameter(torch.zeros(4, device="meta"))
    inner = SimpleNamespace(param_groups=[{"fused": fused}], state={})
    zero = SimpleNamespace(optimizer=inner, fp32_partitioned_groups_flat=[flat])
    engine = SimpleNamespace(optimizer=zero)
    TrainingState(torch.nn.Linear(1, 1), engine=engine)._seed_engine(7)
    step = inner.state[flat]["step"]
    assert step.device.type == ("meta" if fused else "cpu")
    assert fused or float(step) == 7
