"""The names that a DeepSpeed configuration may have. Never imports deepspeed.

DeepSpeed silently accepts a misspelt top-level key and trains with its default instead, and refuses
one inside `zero_optimization` only after the model was loaded. So the names of deepspeed 0.19.8 are
listed here and checked first; a test compares the list with the installed deepspeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from finetune.config.names import nearest
from finetune.errors import ConfigError

# name -> None for a value, a dict of names for a block, ANY for a block that is not looked into
Names = dict[str, Any]
ANY: Names = {"*": None}


def _leaves(text: str) -> Names:
    return dict.fromkeys(text.split())


_OFFLOAD = _leaves("device nvme_path buffer_count pin_memory")
_ZERO = {
    **_leaves(
        "stage contiguous_gradients reduce_scatter reduce_bucket_size"
        " use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm"
        " compute_grad_norm load_from_fp32_weights elastic_checkpoint sub_group_size"
        " cpu_offload_param cpu_offload_use_pin_memory cpu_offload ignore_unused_parameters"
        " legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size"
        " zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients"
        " memory_efficient_linear pipeline_loading_checkpoint override_module_apply"
        " log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory"
        " stage3_gather_fp16_weights_on_model_save stage3_prefetch_bucket_size prefetch_bucket_size"
        " stage3_param_persistence_threshold param_persistence_threshold"
        " stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters"
        " max_live_parameters stage3_max_reuse_distance max_reuse_distance"
        " stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save"
        " stage3_module_granularity_threshold module_granularity_threshold"
        " stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params"
        " stage3_allgather_sequential allgather_sequential"
    ),
    "offload_param": {**_OFFLOAD, **_leaves("buffer_size max_in_cpu")},
    "offload_optimizer": {
        **_OFFLOAD,
        **_leaves("pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc"),
    },
    "zenflow": _leaves(
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio"
        " full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"
    ),
    "leaf_module": _leaves("classes names name_suffixes"),
}
_BF16 = _leaves(
    "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads"
    " bf16_optimizer_states"
)

KNOWN: Names = {
    **_leaves(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"
        " managed_gradient_accumulation steps_per_print dump_state disable_python_gc"
        " disable_allgather communication_data_type seq_parallel_communication_data_type"
        " prescale_gradients gradient_predivide_factor gradient_allreduce_op gradient_clipping"
        " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown"
        " memory_breakdown use_data_before_expert_parallelism dataloader_drop_last log_level"
        " vocabulary_size sequence_parallel_size datastates_ckpt"
    ),
    "zero_optimization": _ZERO,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "fp16": _leaves(
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis"
        " consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads"
    ),
    "torch_autocast": _leaves("enabled dtype lower_precision_safe_modules"),
    "optimizer": {
        **_leaves("type legacy_fusion"),
        "params": _leaves(
            "lr betas eps weight_decay bias_correction adam_w_mode adamw_mode amsgrad set_grad_none"
            " torch_adam foreach fp32_optimizer_states"
        ),
    },
    "scheduler": {
        "type": None,
        "params": _leaves(
            "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps"
            " last_batch_iteration warmup_min_ratio cos_min_ratio"
        ),
    },
    "activation_checkpointing": _leaves(
        "partition_activations number_checkpoints contiguous_memory_optimization"
        " synchronize_checkpoint_boundary profile cpu_checkpointing"
    ),
    "aio": _leaves(
        "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"
    ),
    "checkpoint": {
        **_leaves("tag_validation load_universal use_node_local_storage checkpoint_serialization"),
        "parallel_write": _leaves("pipeline_stage"),
        "writer": _leaves(
            "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled"
            " io_multiplier"
        ),
    },
    "data_types": _leaves("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
    "tensorboard": _leaves("enabled output_path job_name"),
    "wandb": _leaves("enabled group team project"),
    "csv_monitor": _leaves("enabled output_path job_name"),
    "comet": _leaves(
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key"
        " online mode"
    ),
    "comms_logger": _leaves("enabled prof_all prof_ops verbose debug"),
    "compile": _leaves(
        "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation"
        " offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log"
        " offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather"
        " sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
    ),
    "timers": {"throughput": _leaves("enabled synchronized")},
    "flops_profiler": _leaves(
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"
    ),
    "hybrid_engine": _leaves(
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters"
        " tp_gather_partition_size enable_cuda_graph"
    ),
    **dict.fromkeys(
        [
            "autotuning",
            "data_efficiency",
            "expert_parallel",
            "pipeline",
            "tensor_parallel",
            "weight_quantization",
        ],
        ANY,
    ),
}

# Names that deepspeed 0.19.8 no longer has, by the path of their block.
REMOVED: dict[str, frozenset[str]] = {
    "": frozenset(
        _leaves(
            "nebula compression_training amp quantize_training sparse_gradients eigenvalue"
            " sparse_attention elasticity graph_harvesting curriculum_learning"
            " progressive_layer_drop"
        )
    ),
    "zero_optimization": frozenset(
        _leaves("mics_shard_size mics_hierarchical_params_gather zeropp_loco_param")
    ),
}


def unknown_keys(
    config: Mapping[str, Any], where: str, known: Names = KNOWN, path: str = ""
) -> Iterator[ConfigError]:
    """Keys that deepspeed 0.19.8 does not know where they stand, and blocks that are no blocks.

    Args:
        config: a DeepSpeed configuration, or the block at `path`.
        where: the file, for the message.
    """
    for key, value in config.items():
        name = f"{path}.{key}" if path else str(key)
        if key in REMOVED.get(path, ()):
            yield ConfigError(
                f"DeepSpeed key {name} was removed from DeepSpeed", where, "remove it"
            )
        elif key not in known:
            guess = nearest(str(key), known)
            block = f"in {path}" if path else "at the top level"
            fix = (
                f"did you mean {guess!r}?"
                if guess
                else f"known names here: {', '.join(sorted(known))}"
            )
            yield ConfigError(
                f"unknown DeepSpeed key {name!r}: deepspeed has no such name {block}", where, fix
            )
        elif known[key] is not None and value is not None and known[key] is not ANY:
            if isinstance(value, Mapping):
                yield from unknown_keys(value, where, known[key], name)
            else:
                what = f"DeepSpeed key {name} is {value!r}, and must be a block"
                yield ConfigError(what, where, f'write "{key}": {{...}}')


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value
