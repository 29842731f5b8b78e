"""Private and easily changed parts of other packages that finetune/ leans on: an upgrade fails here first."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Callable
from functools import cache, cached_property
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
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import mixed_precision_linkage
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from launching import ROOT
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.utils import cpp_extension
from transformers import GenerationMixin, PretrainedConfig, Trainer, TrainingArguments

from finetune.config.run_config import RunConfig
from finetune.training.pretraining.trainer import PretrainTrainer
from finetune.training.state import TrainingState
from finetune.training.trainer import RunTrainer, SFTTrainer, training_arguments

# Of each owner a line for each function: its name, then its parameters without self.
SIGNATURES: dict[Any, str] = {
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
        _save_checkpoint model trial
        remove_callback callback""",
    GenerationMixin: """
        _update_model_kwargs_for_generation outputs model_kwargs is_encoder_decoder num_new_tokens
        prepare_inputs_for_generation input_ids next_sequence_length past_key_values attention_mask inputs_embeds is_first_iteration kwargs""",
    GradientState: """
        _set_sync_gradients sync_gradients
        _reset_state""",
    AcceleratorState: "_reset_state reset_partial_state",
    accelerate.Accelerator: "backward loss kwargs",
    DeepSpeedEngine: """
        set_gradient_accumulation_boundary is_boundary
        backward loss retain_graph scale_wrt_gas
        step lr_kwargs
        fp16_enabled""",
    DeepSpeedZeroOptimizer_Stage3: """
        has_overflow partition_gradients
        _overflow_clean_up prev_scale""",
    DeepSpeedZeroOptimizer: "_lazy_init_hp_params_optimizer_state",
    deepspeed.utils: """
        safe_get_full_fp32_param param
        safe_get_full_optimizer_state param optim_state_key
        safe_get_local_fp32_param param
        safe_get_local_optimizer_state param optim_state_key
        safe_set_full_fp32_param param value
        safe_set_full_optimizer_state param value optim_state_key
        safe_set_local_fp32_param param value
        safe_set_local_optimizer_state param value optim_state_key""",
    deepspeed.zero.GatheredParameters: "__init__ params modifier_rank fwd_module enabled",
    torch._utils: """
        _flatten_dense_tensors tensors
        _unflatten_dense_tensors flat tensors""",
    torch.nn.attention: "activate_flash_attention_impl impl",
    cpp_extension: "_get_build_directory name verbose",
    peft: "get_peft_model_state_dict model state_dict adapter_name unwrap_compiled save_embedding_layers",
    peft.tuners.lora.Linear: "forward x args kwargs",
}
# Attributes that instances of a class have.
ATTRIBUTES: dict[type, str] = {
    Trainer: "_tr_loss _created_lr_scheduler model_wrapped is_deepspeed_enabled optimizer lr_scheduler"
    " accelerator callback_handler control state",
    LocalElasticAgent: "_remaining_restarts",
    StaticTCPRendezvous: "_store",
    TrainingArguments: "_n_gpu n_gpu activation_checkpointing ddp_broadcast_buffers"
    " average_tokens_across_devices logging_nan_inf_filter",
    accelerate.Accelerator: "scaler gradient_state",
    accelerate.optimizer.AcceleratedOptimizer: "optimizer",
    DeepSpeedEngine: "optimizer",
    DeepSpeedZeroOptimizer_Stage3: "optimizer overflow loss_scale fp32_partitioned_groups_flat",
    DeepSpeedZeroOptimizer: "optimizer overflow single_partition_of_fp32_groups _hp_optimizer_states_linked",
    torch.nn.Module: "_compiled_call_impl _modules _parameters _buffers",
    PretrainedConfig: "_attn_implementation _auto_class",
    peft.tuners.lora.Linear: "base_layer lora_A lora_B lora_dropout scaling lora_variant lora_bias"
    " fan_in_fan_out disable_adapters merged active_adapters",
    peft.tuners.tuners_utils.BaseTunerLayer: "_disable_adapters",
    peft.utils.other.AuxiliaryTrainingWrapper: "_disable_adapters",
    torch.Tensor: "_version",
}
# Documented, or pinned by another test.
PINNED_ELSEWHERE = {
    *("_exit", "_replace", "_hp_mapping", "_flash_attention_forward"),
    "_foreach_copy_",  # test_optimizers.py
    "_weight_conversions",  # test_brought_models.py, by what is saved
}
OURS = (RunTrainer, SFTTrainer, PretrainTrainer)


def signatures() -> list[tuple[Any, str, list[str]]]:
    lines = ((owner, line) for owner, text in SIGNATURES.items() for line in text.splitlines())
    return [(owner, words[0], words[1:]) for owner, line in lines if (words := line.split())]


def test_functions_have_these_parameters_and_instances_these_attributes():
    for owner, name, parameters in signatures():
        assert parameters_of(owner, name) == parameters, (owner, name)
    for owner, names in ATTRIBUTES.items():
        there = set(dir(owner)) | set(getattr(owner, "__annotations__", {}))
        missing = set(names.split()) - there
        assert not missing or missing <= set_by(owner), (owner, missing)


def parameters_of(owner: Any, name: str) -> list[str]:
    """Names of the parameters but self; from the source if a decorator hides them, as DeepSpeed's do."""
    found = list(inspect.signature(getattr(owner, name)).parameters)
    if found == ["args", "kwargs"]:
        nodes = ast.walk(tree_of(owner))
        (function,) = (n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name)
        found = [argument.arg for argument in function.args.args]
    return [parameter for parameter in found if parameter != "self"]


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


# --------------------------------------------------------------- nothing is used that is not pinned


@pytest.mark.parametrize("ours", OURS)
def test_overridden_methods_are_pinned_and_attributes_are_not_trainers(ours: type):
    pinned = {name for owner, name, _ in signatures() if owner is Trainer}
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


def test_every_private_name_of_others_is_pinned():
    pinned = {name for _, name, _ in signatures()} | PINNED_ELSEWHERE
    pinned |= {name for names in ATTRIBUTES.values() for name in names.split()}
    paths = sorted((ROOT / "finetune").rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    ours = {name for tree in trees.values() for node in ast.walk(tree) for name in _made_here(node)}
    for path, tree in trees.items():
        unknown = _private_names(tree) - ours - pinned
        assert not unknown, f"{path.relative_to(ROOT)} uses {unknown} of other packages"


def _made_here(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if _sets_on_self(node):
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


def of_trainer(text: str) -> Callable[..., Any]:
    """The method of Trainer with this text."""
    methods = [value for value in vars(Trainer).values() if inspect.isfunction(value)]
    (found,) = [method for method in methods if text in inspect.getsource(method)]
    return found


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (  # get_grad_norm empties the gradients of a step that is not finite; end_of_step counts from 1
            "self.optimizer.step()",
            "get_batch_samples( training_step( _tr_loss _get_grad_norm( optimizer.step()"
            " lr_scheduler.step() state.global_step callback_handler.on_step_end(",
        ),
        (  # moments are loaded after _prepare_for_training made the engine
            "self._prepare_for_training(",
            "get_train_dataloader( set_initial_training_values( _init_training_state("
            " _prepare_for_training( _tr_loss",
        ),
    ],
)
def test_trainer_works_in_the_order_we_need(text: str, calls: str):
    source, place = inspect.getsource(of_trainer(text)), -1
    assert "self.create_scheduler(" in inspect.getsource(Trainer._prepare_for_training)
    for call in calls.split():
        end = {"_tr_loss": " = ", "state.global_step": " += 1"}.get(call, "")
        if call == "_tr_loss" and "optimizer" in text:
            end = " += tr_loss_step"
        found = source.find(f"self.{call}{end}", place + 1)
        assert found > place, f"{call} is not where it was"
        place = found


def test_the_seven_numbers_of_a_training():
    """`set_initial_training_values` returns them in this order."""
    _, returned = inspect.getsource(Trainer.set_initial_training_values).split("return (")
    assert returned.split(")")[0].replace(",", "").split() == [
        "num_train_epochs",
        "num_update_steps_per_epoch",
        "num_examples",
        "num_train_samples",
        "total_train_batch_size",
        "steps_in_epoch",
        "max_steps",
    ]


def test_what_zero_keeps_in_parameters_and_how_its_stages_are_told_apart():
    assert not hasattr(DeepSpeedZeroOptimizer, "_overflow_clean_up")
    assert "fp32_partitioned_groups_flat" not in set_by(DeepSpeedZeroOptimizer)
    assert "_hp_optimizer_states_linked" not in set_by(DeepSpeedZeroOptimizer_Stage3)
    source = inspect.getsource(partition_parameters)
    for name in ["id", "shape", "numel", "tensor", "status", "secondary_tensor", "process_group"]:
        assert f"param.ds_{name} = " in source
    assert "lp_param._hp_mapping = " in inspect.getsource(mixed_precision_linkage)
    assert "_hp_mapping" in inspect.getsource(stage_1_and_2)
    assert "lp_fragment_address" in tensor_fragment.__dataclass_fields__
    assert {"start", "numel"} <= set(fragment_address.__dataclass_fields__)
    assert accelerate.utils.DistributedType.DEEPSPEED.value == "DEEPSPEED"


def test_torchs_flash_kernels():
    """modeling/attention.py calls the operator, modeling/attention_check.py switches its kernels."""
    operator, attention = torch.ops.aten._flash_attention_forward, torch.nn.attention
    names = [argument.name for argument in operator.default._schema.arguments]
    assert names[:13] == [
        "query",
        "key",
        "value",
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
        "return_debug_mask",
        "scale",
        "window_size_left",
        "window_size_right",
    ]
    assert "FA3" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    attention.restore_flash_attention_impl()
    # what FlashAttention 3's registration imports, takes and refuses
    source = inspect.getsource(attention._fa3)
    for text in (
        *('"flash_attn_interface"', '"_flash_attention_forward"', '"_flash_attention_backward"'),
        *("dropout_p must be 0", "FA3 requires compute capability 9.0", "inputs must be one of"),
    ):
        assert text in source
    assert 'getattr(self, "found_inf", None)' in inspect.getsource(torch.optim.Adam.step)


# ---------------------------------------------------------------- what no CPU shows

ONE_STEP = SimpleNamespace(batches=SimpleNamespace(total_steps=1), valid=None)


def run_config(folder: Path, device_type: str) -> RunConfig:
    given = {"model": "m", "data": ("d",), "report_to": ("none",), "dtype": "float32"}
    given |= {
        "output_dir": str(folder),
        "device_type": device_type,
        "gradient_checkpointing": False,
    }
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
