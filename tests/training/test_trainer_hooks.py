"""Private and easily changed parts of transformers, accelerate, DeepSpeed, peft and torch that
finetune/ leans on.

After an upgrade this fails first, and names the place in our code to look at. What is not private
but matters by its place in the order of things is here too.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import deepspeed
import peft
import pytest
import torch
import torch._utils
import torch.nn.attention
from accelerate.state import AcceleratorState, GradientState
from deepspeed import utils as deepspeed_utils
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from launching import ROOT
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.utils import cpp_extension
from transformers import (
    GenerationMixin,
    PretrainedConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from finetune.config.run_config import RunConfig
from finetune.training.state import TrainingState
from finetune.training.trainer import RunTrainer, SFTTrainer, training_arguments

TRAINER = "finetune/training/trainer.py"
STATE = "finetune/training/state.py"
SAVED = STATE
EXECUTION = "finetune/training/executor.py"
AGENT = "finetune/commands/launch/agent.py"
DECODING = "finetune/inference/decoding.py"
GUARDS = "finetune/training/guards.py"

# (owner, name, parameters without self, who uses it)
SIGNATURES: tuple[tuple[Any, str, str, str], ...] = (
    (LocalElasticAgent, "_start_workers", "worker_group", AGENT),
    (LocalElasticAgent, "_monitor_workers", "worker_group", AGENT),
    (LocalElasticAgent, "_shutdown", "death_sig timeout", AGENT),
    (Trainer, "get_train_dataloader", "", f"{TRAINER}: get_train_dataloader"),
    (
        Trainer,
        "set_initial_training_values",
        "args dataloader",
        f"{TRAINER}: set_initial_training_values",
    ),
    (
        Trainer,
        "_init_training_state",
        "max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
        f"{TRAINER}: _init_training_state",
    ),
    (
        Trainer,
        "_prepare_for_training",
        "max_steps train_dataloader resume_from_checkpoint",
        f"{TRAINER}: same name",
    ),
    (
        Trainer,
        "get_batch_samples",
        "epoch_iterator num_batches device",
        f"{TRAINER}: get_batch_samples",
    ),
    (Trainer, "create_scheduler", "num_training_steps optimizer", f"{TRAINER}: create_scheduler"),
    (Trainer, "training_step", "model inputs num_items_in_batch", f"{TRAINER}: training_step"),
    (Trainer, "_get_grad_norm", "model grad_norm", f"{TRAINER}: _get_grad_norm"),
    (Trainer, "floating_point_ops", "inputs", f"{TRAINER}: floating_point_ops"),
    (Trainer, "store_flos", "", f"{TRAINER}: store_flos"),
    (Trainer, "evaluate", "eval_dataset ignore_keys metric_key_prefix", f"{TRAINER}: evaluate"),
    (Trainer, "log", "logs start_time", f"{TRAINER}: log"),
    (Trainer, "_save_checkpoint", "model trial", f"{TRAINER}: _save_checkpoint"),
    (Trainer, "remove_callback", "callback", f"{TRAINER}: __init__"),
    (Trainer, "create_optimizer", "model", "finetune/training/pretraining/trainer.py"),
    (
        GenerationMixin,
        "_update_model_kwargs_for_generation",
        "outputs model_kwargs is_encoder_decoder num_new_tokens",
        f"{DECODING}: decode",
    ),
    (
        GenerationMixin,
        "prepare_inputs_for_generation",
        (
            "input_ids next_sequence_length past_key_values attention_mask inputs_embeds"
            " is_first_iteration kwargs"
        ),
        f"{DECODING}: decode",
    ),
    (GradientState, "_set_sync_gradients", "sync_gradients", f"{EXECUTION}: _microbatch"),
    (GradientState, "_reset_state", "", "finetune/training/session.py: _forget_accelerate"),
    (
        AcceleratorState,
        "_reset_state",
        "reset_partial_state",
        "finetune/training/session.py: _forget_accelerate",
    ),
    (accelerate.Accelerator, "backward", "loss kwargs", f"{EXECUTION}: _backward"),
    (Trainer, "_get_learning_rate", "", TRAINER),
    (
        DeepSpeedEngine,
        "set_gradient_accumulation_boundary",
        "is_boundary",
        f"{EXECUTION}: _microbatch",
    ),
    (DeepSpeedEngine, "backward", "loss retain_graph scale_wrt_gas", f"{EXECUTION}: _backward"),
    (DeepSpeedEngine, "step", "lr_kwargs", f"{GUARDS}: step_engine"),
    (DeepSpeedEngine, "fp16_enabled", "", f"{GUARDS}: step_engine"),
    (
        DeepSpeedZeroOptimizer_Stage3,
        "has_overflow",
        "partition_gradients",
        f"{GUARDS}: step_engine",
    ),
    (DeepSpeedZeroOptimizer_Stage3, "_overflow_clean_up", "prev_scale", f"{GUARDS}: step_engine"),
    (
        DeepSpeedZeroOptimizer,
        "_lazy_init_hp_params_optimizer_state",
        "",
        f"{STATE}: _link_stage_1_and_2",
    ),
    (deepspeed_utils, "safe_get_full_fp32_param", "param", f"{STATE}: _get"),
    (deepspeed_utils, "safe_get_full_optimizer_state", "param optim_state_key", f"{STATE}: _get"),
    (deepspeed_utils, "safe_get_local_fp32_param", "param", f"{STATE}: _get"),
    (deepspeed_utils, "safe_get_local_optimizer_state", "param optim_state_key", f"{STATE}: _get"),
    (deepspeed_utils, "safe_set_full_fp32_param", "param value", f"{STATE}: _load_engine"),
    (
        deepspeed_utils,
        "safe_set_full_optimizer_state",
        "param value optim_state_key",
        f"{STATE}: _load_engine",
    ),
    (deepspeed_utils, "safe_set_local_fp32_param", "param value", f"{STATE}: _load_engine"),
    (
        deepspeed_utils,
        "safe_set_local_optimizer_state",
        "param value optim_state_key",
        f"{STATE}: _load_engine",
    ),
    (
        deepspeed.zero.GatheredParameters,
        "__init__",
        "params modifier_rank fwd_module enabled",
        f"{STATE}: gathered",
    ),
    (torch._utils, "_flatten_dense_tensors", "tensors", f"{EXECUTION}: _sum_gradients"),
    (torch._utils, "_unflatten_dense_tensors", "flat tensors", f"{EXECUTION}: _sum_gradients"),
    (cpp_extension, "_get_build_directory", "name verbose", "finetune/training/operators.py"),
    (
        peft,
        "get_peft_model_state_dict",
        "model state_dict adapter_name unwrap_compiled save_embedding_layers",
        f"{TRAINER}: adapter_writer",
    ),
    # What a layer computes, and these in it, tests/modeling/test_lora.py compares with.
    (
        peft.tuners.lora.Linear,
        "forward",
        "x args kwargs",
        "finetune/modeling/lora.py: LayerGroup.forward",
    ),
)

# (class, attributes that its instances have, who uses them)
ATTRIBUTES: tuple[tuple[type, str, str], ...] = (
    (
        Trainer,
        "_tr_loss _created_lr_scheduler model_wrapped is_deepspeed_enabled optimizer lr_scheduler",
        TRAINER,
    ),
    (Trainer, "accelerator callback_handler control state", TRAINER),
    (LocalElasticAgent, "_remaining_restarts", AGENT),
    (StaticTCPRendezvous, "_store", AGENT),
    (TrainingArguments, "_n_gpu n_gpu", TRAINER),
    (accelerate.Accelerator, "scaler gradient_state", f"{TRAINER}, {EXECUTION}"),
    (accelerate.optimizer.AcceleratedOptimizer, "optimizer", f"{TRAINER}: training_state"),
    (DeepSpeedEngine, "optimizer", f"{TRAINER}, {STATE}"),
    (
        DeepSpeedZeroOptimizer_Stage3,
        "optimizer overflow loss_scale fp32_partitioned_groups_flat",
        f"{TRAINER}, {STATE}",
    ),
    (
        DeepSpeedZeroOptimizer,
        "optimizer overflow single_partition_of_fp32_groups",
        f"{TRAINER}, {STATE}",
    ),
    (DeepSpeedZeroOptimizer, "_hp_optimizer_states_linked", f"{STATE}: _link_stage_1_and_2"),
    (torch.nn.Module, "_compiled_call_impl", "finetune/training/pretraining/trainer.py"),
    (torch.nn.Module, "_modules _parameters _buffers", "finetune/modeling/layers.py: _twin"),
    (
        PretrainedConfig,
        "_attn_implementation _auto_class",
        "finetune/training/pretraining/trainer.py",
    ),
    (
        peft.tuners.lora.Linear,
        "base_layer lora_A lora_B lora_dropout scaling",
        "finetune/modeling/lora.py",
    ),
    (
        peft.tuners.lora.Linear,
        "lora_variant lora_bias fan_in_fan_out",
        "finetune/modeling/lora.py: _is_plain",
    ),
    (
        peft.tuners.lora.Linear,
        "disable_adapters merged active_adapters",
        "finetune/modeling/lora.py: _is_active",
    ),
    (
        peft.tuners.tuners_utils.BaseTunerLayer,
        "_disable_adapters",
        "finetune/modeling/lora.py: adapter_off",
    ),
    (
        peft.utils.other.AuxiliaryTrainingWrapper,
        "_disable_adapters",
        "finetune/modeling/lora.py: adapter_off",
    ),
    (torch.Tensor, "_version", "finetune/modeling/lora.py: LayerGroup.forward"),
)

# Private names of others that our code reads on objects: each is pinned above.
PINNED_ELSEWHERE = {
    "_exit": "os._exit, documented",
    "_replace": "of named tuples, documented",
    "_hp_mapping": "test_partitioned_parameters_have_these",
    "_flash_attention_forward": (
        "test_the_flash_operator_takes_scale_and_windows_and_has_a_derivative"
    ),
    "_foreach_copy_": "test_several_tensors_are_copied_at_once",
    "_weight_conversions": "tests/training/test_brought_models.py, by what is saved",
}


@pytest.mark.parametrize(
    ("owner", "name", "parameters", "user"), SIGNATURES, ids=lambda value: str(value)[:60]
)
def test_signature(owner: Any, name: str, parameters: str, user: str):
    assert hasattr(owner, name), f"{owner} has no {name} any more; used by {user}"
    found = parameters_of(owner, name)
    assert found == parameters.split(), (
        f"{name}({', '.join(found)}) is not as it was; used by {user}"
    )


def parameters_of(owner: Any, name: str) -> list[str]:
    """Names of the parameters but self; from the source where a decorator hides them, as
    DeepSpeed's do.
    """
    found = list(inspect.signature(getattr(owner, name)).parameters)
    if found == ["args", "kwargs"]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        (function,) = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        found = [argument.arg for argument in function.args.args]
    return [parameter for parameter in found if parameter != "self"]


@pytest.mark.parametrize(("owner", "names", "user"), ATTRIBUTES, ids=lambda value: str(value)[:60])
def test_attributes(owner: type, names: str, user: str):
    for name in names.split():
        there = (
            hasattr(owner, name)
            or name in set_by(owner)
            or name in getattr(owner, "__annotations__", {})
        )
        assert there, f"{owner.__name__} has no {name} any more; used by {user}"


@cache
def set_by(owner: type) -> set[str]:
    """Names that the class (or one that it inherits from) assigns on self."""
    found: set[str] = set()
    for one in owner.__mro__[:-1]:
        if one.__module__ in ("builtins", "typing", "abc") or one is torch.nn.Module:
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one)))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and _is_self(node.value)
            ):
                found.add(node.attr)
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


# --------------------------------------------------------------- nothing is used that is not pinned


def our_trainers() -> Iterator[type]:
    yield from (RunTrainer, SFTTrainer)
    try:
        from finetune.training.pretraining.trainer import PretrainTrainer
    except ImportError:
        return
    yield PretrainTrainer


def test_every_overridden_method_is_pinned():
    pinned = {name for owner, name, _, _ in SIGNATURES if owner is Trainer}
    for ours in our_trainers():
        overridden = {
            name
            for name in vars(ours)
            if callable(getattr(Trainer, name, None)) and not name.startswith("__")
        }
        assert overridden <= pinned, (
            f"{ours.__name__} overrides {overridden - pinned}: pin them in SIGNATURES"
        )


def test_overrides_take_what_trainer_gives():
    """Each override accepts Trainer's positional call: the same number of parameters, or
    *arguments.
    """
    for ours in our_trainers():
        for name in vars(ours):
            theirs = getattr(Trainer, name, None)
            if not inspect.isfunction(theirs) or name.startswith("__"):
                continue
            count = len(inspect.signature(theirs).parameters)
            inspect.signature(getattr(ours, name)).bind(*range(count))


def test_our_attributes_are_not_trainers():
    """What our trainers keep on self has no name that Trainer uses for something else."""
    meant = {"lr_scheduler", "_created_lr_scheduler", "control", "optimizer"}
    for ours in our_trainers():
        own = set_by_one(ours) - meant
        assert not own & set_by(Trainer), (
            f"{ours.__name__} and Trainer both set {own & set_by(Trainer)}"
        )
        assert not own & set(dir(Trainer)), (
            f"{ours.__name__} hides {own & set(dir(Trainer))} of Trainer"
        )


def set_by_one(owner: type) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and _is_self(node.value)
    }


def test_every_private_name_of_others_is_pinned():
    pinned = {name for _, name, _, _ in SIGNATURES} | {
        name for _, names, _ in ATTRIBUTES for name in names.split()
    }
    pinned |= set(PINNED_ELSEWHERE)
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in (ROOT / "finetune").rglob("*.py")
    }
    ours = {
        name
        for tree in trees.values()
        for node in ast.walk(tree)
        for name in _made_here(node)
        if name.startswith("_")
    }
    for path, tree in trees.items():
        for name in _private_names(tree) - ours:
            assert name in pinned, (
                f"{path.relative_to(ROOT)} uses {name} of another package: pin it in this file"
            )


def _made_here(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
        return [node.attr]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _private_names(tree: ast.AST) -> set[str]:
    """Private attributes that are read, and private names imported from other packages."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("finetune"):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


# ---------------------------------------------------------------- the order of things


def assert_in_order(method: Callable[..., Any], *texts: str, why: str) -> None:
    source, position = inspect.getsource(method), -1
    for text in texts:
        found = source.find(text, position + 1)
        assert found > position, f"{method.__qualname__}: {text!r} is not where it was; {why}"
        position = found


def inner_loop() -> Callable[..., Any]:
    """The method of Trainer that steps the optimizer."""
    methods = [value for value in vars(Trainer).values() if inspect.isfunction(value)]
    (loop,) = [method for method in methods if "self.optimizer.step()" in inspect.getsource(method)]
    return loop


def test_a_step_of_trainer_is_in_the_order_we_need():
    assert_in_order(
        inner_loop(),
        "self.get_batch_samples(",
        "self.training_step(",
        "self._tr_loss += tr_loss_step",
        "self._get_grad_norm(",  # empties the gradients of a step that is not finite
        "self.optimizer.step()",
        "self.lr_scheduler.step()",
        "self.state.global_step += 1",
        "self.callback_handler.on_step_end(",  # end_of_step counts from 1
        why=f"{TRAINER}: training_step, _get_grad_norm, end_of_step",
    )


def test_training_starts_in_the_order_we_need():
    methods = [value for value in vars(Trainer).values() if inspect.isfunction(value)]
    (start,) = [
        method for method in methods if "self._prepare_for_training(" in inspect.getsource(method)
    ]
    assert_in_order(
        start,
        "self.get_train_dataloader(",
        "self.set_initial_training_values(",
        "self._init_training_state(",
        "self._prepare_for_training(",  # moments are loaded after it made the engine
        "self._tr_loss = ",
        why=f"{TRAINER}: _init_training_state, _prepare_for_training",
    )
    assert_in_order(
        Trainer._prepare_for_training,
        "self.create_scheduler(",
        why=f"{TRAINER}: create_scheduler",
    )


def test_the_seven_numbers_of_a_training():
    """`set_initial_training_values` returns them in this order."""
    _, returned = inspect.getsource(Trainer.set_initial_training_values).split("return (")
    names = [
        line.strip().rstrip(",") for line in returned.split(")")[0].splitlines() if line.strip()
    ]
    assert names == [
        "num_train_epochs",
        "num_update_steps_per_epoch",
        "num_examples",
        "num_train_samples",
        "total_train_batch_size",
        "steps_in_epoch",
        "max_steps",
    ], f"used by {TRAINER}: set_initial_training_values"


def test_zero_1_and_2_are_told_from_zero_3_by_these():
    """trainer.py asks for `_overflow_clean_up`, state.py for the name of the flat groups."""
    assert not hasattr(DeepSpeedZeroOptimizer, "_overflow_clean_up")
    assert "fp32_partitioned_groups_flat" not in set_by(DeepSpeedZeroOptimizer)
    assert not hasattr(DeepSpeedZeroOptimizer_Stage3, "_hp_optimizer_states_linked")
    assert "_hp_optimizer_states_linked" not in set_by(DeepSpeedZeroOptimizer_Stage3)


def test_partitioned_parameters_have_these():
    from deepspeed.runtime.zero import partition_parameters

    source = Path(partition_parameters.__file__).read_text(encoding="utf-8")
    for name in (
        "ds_id",
        "ds_shape",
        "ds_numel",
        "ds_tensor",
        "ds_status",
        "ds_secondary_tensor",
        "ds_process_group",
    ):
        assert f"param.{name} = " in source, (
            f"a ZeRO-3 parameter has no {name}; used by {STATE} and modeling/pretrained.py"
        )

    from deepspeed.runtime.zero import stage_1_and_2
    from deepspeed.utils import mixed_precision_linkage
    from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment

    linked = Path(mixed_precision_linkage.__file__).read_text(encoding="utf-8")
    assert "lp_param._hp_mapping = " in linked, f"used by {SAVED}: held_part"
    assert "_hp_mapping" in Path(stage_1_and_2.__file__).read_text(encoding="utf-8")
    assert "lp_fragment_address" in tensor_fragment.__dataclass_fields__
    assert {"start", "numel"} <= set(fragment_address.__dataclass_fields__)


def test_names_that_our_code_compares_with():
    assert accelerate.utils.DistributedType.DEEPSPEED.value == "DEEPSPEED", f"used by {EXECUTION}"
    assert {"on_step_end"} <= set(dir(TrainerCallback)), "used by training/trainer.py: StepEnd"
    fields = TrainingArguments.__dataclass_fields__
    needed = (
        "activation_checkpointing ddp_broadcast_buffers average_tokens_across_devices"
        " logging_nan_inf_filter"
    )
    for name in needed.split():
        assert name in fields, (
            f"TrainingArguments has no {name}; used by finetune/training/trainer.py"
        )


def test_the_flat_sum_is_exact():
    """torch._utils is private: what it does is checked, not only that it is there."""
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor([[7.0]]), torch.tensor(8.0)]
    flat = torch._utils._flatten_dense_tensors(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 8]
    back = torch._utils._unflatten_dense_tensors(flat * 2, tensors)
    assert all(torch.equal(tensor * 2, other) for tensor, other in zip(tensors, back, strict=True))


def test_several_tensors_are_copied_at_once():
    """Used by finetune/training/optimizers.py: BatchedMuon."""
    targets = [torch.zeros(2, 3), torch.zeros(2, 3)]
    torch._foreach_copy_(targets, list(torch.arange(12.0).reshape(2, 2, 3).unbind()))
    assert torch.equal(torch.stack(targets), torch.arange(12.0).reshape(2, 2, 3))


def test_the_flash_operator_takes_scale_and_windows_and_has_a_derivative():
    """Used by finetune/modeling/attention.py: _varlen, which cannot use the function of torch's
    oldest versions.
    """
    operator = torch.ops.aten._flash_attention_forward
    names = [argument.name for argument in operator.default._schema.arguments]
    positional = (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    )
    assert names[:13] == [*positional.split(), "scale", "window_size_left", "window_size_right"]
    query, key = (
        torch.empty(10, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2)
    )
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    found = operator(
        query.requires_grad_(),
        key,
        key,
        bounds,
        bounds,
        6,
        6,
        0.0,
        False,
        False,
        window_size_left=3,
    )
    assert found[0].shape == query.shape and found[0].requires_grad


def test_torch_switches_between_flash_kernels():
    """Used by finetune/modeling/attention_check.py; where the names are missing, FlashAttention 3
    is left alone.
    """
    attention = torch.nn.attention
    assert (
        "FA3" in attention.list_flash_attention_impls()
        and attention.current_flash_attention_impl() is None
    )
    assert parameters_of(attention, "activate_flash_attention_impl") == ["impl"]
    assert all(
        parameter.default is not parameter.empty
        for parameter in inspect.signature(
            attention.restore_flash_attention_impl
        ).parameters.values()
    )
    # Of the registration of FlashAttention 3 in torch: what it imports, which operators it takes,
    # what it refuses.
    source = inspect.getsource(attention._fa3)
    for taken in (
        '"flash_attn_interface"',
        '"_flash_attention_forward"',
        '"_flash_attention_backward"',
    ):
        assert taken in source
    refused = "dropout_p must be 0", "FA3 requires compute capability 9.0", "inputs must be one of"
    assert all(text in source for text in refused) and source.count("window_size_left") > 10


def test_fused_adam_asks_found_inf():
    """What GradScaler sets, and finetune/training/optimizers.py: skip_where; what it does is in
    test_optimizers.py.
    """
    assert 'getattr(self, "found_inf", None)' in inspect.getsource(torch.optim.Adam.step)


# ---------------------------------------------------------------- what no CPU shows


ONE_STEP = SimpleNamespace(batches=SimpleNamespace(total_steps=1), valid=None)


def run_config(folder: Path, device_type: str) -> RunConfig:
    return RunConfig(
        model="m",
        data=("d",),
        output_dir=str(folder),
        report_to=("none",),
        device_type=device_type,
        dtype="float32",
        gradient_checkpointing=False,
    )


def test_a_process_that_sees_several_devices_trains_on_one(monkeypatch, tmp_path, caplog):
    """Else Trainer makes a DataParallel of the model; two devices stand here for what torch would
    count.
    """
    from functools import cached_property

    def two_devices(self: TrainingArguments) -> torch.device:
        self._n_gpu = 2
        return torch.device("cpu")

    found = cached_property(two_devices)
    found.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", found)
    config = run_config(tmp_path, "cpu")
    monkeypatch.setattr(logging.getLogger("finetune"), "handlers", [caplog.handler])
    arguments = training_arguments(config, ONE_STEP, learning_rate=1e-4)
    assert arguments.n_gpu == 1
    assert "sees 2 devices and trains on one" in caplog.text and "finetune launch" in caplog.text


@pytest.mark.parametrize(
    ("device", "optim"),
    [("cpu", "adamw_torch_fused"), ("nvme", "adamw_torch_fused"), ("none", "adamw_torch")],
)
def test_an_offloaded_optimizer_steps_fused_on_the_cpu_on_every_device(
    device, optim, monkeypatch, tmp_path
):
    """An NPU's table says no fused AdamW; offloaded, it is the CPU's, and the other takes ten times
    as long.
    """
    given: dict[str, object] = {}
    monkeypatch.setattr(
        "finetune.training.trainer.TrainingArguments", lambda **named: given.update(named)
    )
    monkeypatch.setattr("finetune.training.trainer._use_one_device", lambda arguments: None)
    training_arguments(
        run_config(tmp_path, "npu"),
        ONE_STEP,
        learning_rate=1e-4,
        deepspeed={"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}},
    )
    assert given["optim"] == optim


@pytest.mark.parametrize("fused", [True, False])
def test_the_step_count_is_where_the_optimizers_kernel_reads_it(fused):
    """A fused kernel takes its address on the device (here: meta), and others read it on the
    host.
    """
    flat = torch.nn.Parameter(torch.zeros(4, device="meta"))
    inner = SimpleNamespace(param_groups=[{"fused": fused}], state={})
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=inner, fp32_partitioned_groups_flat=[flat])
    )
    TrainingState(torch.nn.Linear(1, 1), engine=engine)._seed_engine(7)
    step = inner.state[flat]["step"]
    assert step.device.type == ("meta" if fused else "cpu")
    assert fused or float(step) == 7
