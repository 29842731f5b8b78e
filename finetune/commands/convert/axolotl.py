"""Axolotl 0.13's YAML (schemas of July 2026)."""

from __future__ import annotations

from typing import Any

from finetune.commands.convert import adapters, axolotl_preferences, hugging_face
from finetune.commands.convert.draft import Draft, Option, Tool, lost, read
from finetune.commands.convert.llama_factory import split, targets
from finetune.errors import ConfigError

_WEIGHTS = "a base in few bits is load_in_4bit or load_in_8bit alone"
_TOKENS = "the tokenizer's own tokens are used"

OPTIONS: dict[str, Option] = {
    **hugging_face.BASIC,
    "base_model": "model",
    "trust_remote_code": "trust_remote_code",
    "sequence_len": "cutoff_len",
    "lora_dropout": "lora_dropout",
    "dataset_num_proc": "preprocessing_num_workers",
    **read(
        "datasets test_datasets pretraining_dataset val_set_size adapter lora_r lora_alpha"
        " lora_target_linear lora_target_modules load_in_4bit load_in_8bit micro_batch_size"
        " gradient_accumulation_steps num_epochs max_steps lr_scheduler warmup_steps warmup_ratio"
        " optimizer bf16 fp16 bfloat16 float16 float32 gradient_checkpointing logging_steps"
        " save_steps saves_per_epoch save_strategy save_total_limit eval_steps evals_per_epoch"
        " eval_strategy early_stopping_patience load_best_model_at_end metric_for_best_model"
        " deepspeed fsdp chat_template train_on_inputs excess_length_strategy sample_packing rl"
        " wandb_project use_tensorboard trl rl_beta orpo_alpha simpo_gamma cpo_alpha"
        " kto_desirable_weight kto_undesirable_weight dpo_use_weighting dpo_label_smoothing"
        " dpo_loss_type dpo_loss_weights"
    ),
    # ------------------------------------------------ what is trained
    **lost(
        "no adapter is continued here; merge it into the model first", "lora_model_dir", trains=True
    ),
    **read(
        "peft_use_dora peft_use_rslora peft_layers_to_transform lora_rank_pattern"
        " lora_alpha_pattern lora_modules_to_save loraplus_lr_ratio"
    ),
    **lost(
        "experts' parameters get no adapter by name here", "lora_target_parameters", trains=True
    ),
    **lost(
        "tokens are named by their text here: --train-tokens",
        "peft_trainable_token_indices",
        trains=True,
    ),
    **lost(
        "this kind of LoRA is not trained here",
        "peft_layers_pattern peft_layer_replication peft_init_lora_weights lora_fan_in_fan_out"
        " relora peft",
        trains=True,
    ),
    **lost(
        "the schedules here have no further arguments",
        "lr_scheduler_kwargs cosine_min_lr_ratio cosine_constant_lr_ratio lr_quadratic_warmup"
        " lr_groups embedding_lr embedding_lr_scale",
        trains=True,
    ),
    **lost("AdamW has no further arguments here", "optim_args optim_target_modules", trains=True),
    **lost(
        _TOKENS,
        "special_tokens tokens added_tokens_overrides eot_tokens resize_token_embeddings_to_32x"
        " fix_untrained_tokens",
        trains=True,
    ),
    **lost("a system text stands in the records here", "default_system_message", trains=True),
    **lost(
        "the template is taken as it is", "chat_template_kwargs chat_template_jinja", trains=True
    ),
    **lost("there is no noise on embeddings here", "neftune_noise_alpha", trains=True),
    **lost(
        "the order is a shuffle here",
        "group_by_length curriculum_sampling sample_packing_sequentially",
        trains=True,
    ),
    **lost("the order is a shuffle here", "shuffle_merged_datasets", trains=True, off=(True,)),
    **lost("whole layers are trained, or adapters", "unfrozen_parameters", trains=True),
    **lost("a short record is trained like any other", "min_sample_len", trains=True),
    **lost(
        "exact duplicates are dropped by --drop-duplicates",
        "dataset_exact_deduplication",
        trains=True,
    ),
    **lost("plugins of Axolotl are not run here", "plugins", trains=True),
    **lost("weights are those of the model", "reinit_weights", trains=True),
    **lost("the loss is cross-entropy here", "use_eaft", trains=True),
    **lost(
        "AdamW is the optimizer here",
        "adam_beta3 adam_epsilon2 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of"
        " qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant"
        " qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj"
        " qgalore_queue_size torchdistx_path",
        trains=True,
    ),
    **lost(
        "the schedules here have no further arguments",
        "lr_div_factor jagged_restart_steps jagged_restart_warmup_steps"
        " jagged_restart_anneal_steps",
        trains=True,
    ),
    **lost(
        "the model's own attention and layers are trained",
        "scaling_softmax scaling_softmax_factor scaling_softmax_bias use_pose"
        " pose_split_on_token_ids pose_max_context_len pose_num_chunks llama4_linearized_experts"
        " use_onebitllms fp32_norms fp32_norm_classes",
        trains=True,
    ),
    **lost("trainers of others are not run here", "trainer_cls ebft num_labels", trains=True),
    **lost("a long question is cut with its sample", "max_prompt_len", trains=True),
    **lost("texts are not joined here", "pretraining_sample_concatenation", trains=True),
    **lost(
        "part of an option that is not trained here",
        "loraplus_lr_embedding relora_prune_ratio relora_prune_method relora_cpu_offload eaft_alpha"
        " eaft_k mean_resizing_embeddings shrink_embeddings peft_ensure_weight_tying"
        " peft_autocast_adapter_dtype",
    ),
    **lost(
        "rewards and rollouts are not trained here",
        "reward_model process_reward_model center_rewards_coefficient vllm",
    ),
    **lost(
        "what the reference says is asked as it is best here",
        "precompute_ref_log_probs dpo_use_liger_kernel dpo_padding_free",
    ),
    **lost("fine-tuning has no fp8 here", "fp8", trains=True),
    # ------------------------------------------------ how it runs
    **lost(
        "samples are packed where that changes nothing (--packing)",
        "eval_sample_packing pad_to_sequence_len sample_packing_group_size sample_packing_bin_size "
        "batch_flattening multipack_real_batches",
        off=(True,),
    ),
    **lost(
        "the kernel is the device's best (docs/configuration.md)",
        "flash_attention sdp_attention xformers_attention flex_attention eager_attention"
        " sage_attention attn_implementation flash_attn_cross_entropy flash_attn_fuse_mlp"
        " lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel"
        " chunked_cross_entropy",
    ),
    **lost(
        "one device holds whole samples here",
        "sequence_parallel_degree context_parallel_size tensor_parallel_size dp_shard_size"
        " dp_replicate_size heads_k_stride ring_attn_func",
        off=(1,),
    ),
    **lost(
        "finetune decides it by itself",
        "model_type tokenizer_type tokenizer_config tokenizer_use_fast tokenizer_legacy"
        " processor_type base_model_config is_llama_derived_model is_mistral_derived_model"
        " is_qwen_derived_model is_falcon_derived_model strict device device_map world_size"
        " local_rank ddp ddp_bucket_cap_mb ddp_find_unused_parameters ddp_broadcast_buffers"
        " gradient_checkpointing_kwargs low_cpu_mem_usage max_memory gpu_memory_limit gc_steps"
        " dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last"
        " remove_unused_columns eval_batch_size batch_size eval_sequence_len group_size"
        " activation_offloading",
        off=(True,),
    ),
    **lost("float32 products are in TF32 where the device has it", "tf32", off=(True, "auto")),
    **lost(
        "samples are prepared once and cached by their content",
        "dataset_prepared_path dataset_processes dataset_keep_in_memory skip_prepare_dataset "
        "shuffle_before_merging_datasets streaming dataset_shard_num dataset_shard_idx",
    ),
    **lost(
        "fine-tuning compiles single layers (--fused-layers compile)",
        "torch_compile torch_compile_backend torch_compile_mode",
    ),
    **lost(
        "nothing is uploaded here",
        "hub_model_id hub_strategy hub_revision push_dataset_to_hub hf_use_auth_token",
    ),
    **lost(
        "checkpoints here are always whole, verified and resumable",
        "save_only_model save_safetensors save_first_step",
    ),
    **lost(
        "checkpoints of other tools cannot be resumed; a run here resumes by itself",
        "resume_from_checkpoint auto_resume_from_checkpoints",
    ),
    **lost(
        "wandb reads it from the environment",
        "wandb_entity wandb_name wandb_run_id wandb_watch wandb_log_model wandb_mode",
    ),
    **lost(
        "other trackers are not here",
        "mlflow_tracking_uri mlflow_experiment_name comet_project_name",
    ),
    **lost(
        "evaluation is the loss; python -m finetune eval answers prompts",
        "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval generate_samples eval_table_size"
        " eval_max_new_tokens",
    ),
    **lost(
        "a run that is not finite stops by itself", "loss_watchdog_threshold loss_watchdog_patience"
    ),
    **lost("the best evaluation is the one of the lowest loss", "greater_is_better"),
    **lost(
        "tokens per second are in every line of the log", "include_tokens_per_second include_tkps"
    ),
    **lost(
        "another launcher's",
        "fsdp_config fsdp_version use_ray ray_num_workers deepcompile auto_find_batch_size",
    ),
    **lost(_WEIGHTS, "gptq bnb_config_kwargs qlora_sharded_model_loading lora_on_cpu"),
    **lost("steps are not profiled here", "profiler_steps profiler_steps_start"),
    **lost(
        "finetune decides it by itself",
        "accelerator_config axolotl_config_path chunked_cross_entropy_num_chunks cls_model_config"
        " dynamic_checkpoint embeddings_skip_upcast experimental_skip_move_to_device"
        " experts_implementation flash_attn_d512 flash_optimum flex_attn_compile_kwargs"
        " freeze_mm_modules fused_attn_kernel gc_collect_steps gemma4_hybrid_attn_impl"
        " is_preprocess large_head_attention layer_offloading merge_lora merge_method"
        " num_dataset_shards_to_save pad_to_multiple_of preprocess_iterable pretrain_multipack_attn"
        " pretrain_multipack_buffer_size processor_kwargs sample_packing_eff_est"
        " sample_packing_mp_start_method sdpa_varlen selective_checkpointing"
        " streaming_multipack_buffer_size tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp"
        " tokenizer_save_jinja_files tokenizer_use_mistral_common torch_compile_options"
        " torch_empty_cache_steps total_num_tokens total_supervised_tokens use_kernels",
        off=(True,),
    ),
    **lost("another launcher's", "fsdp_final_state_dict_type fp8_enable_fsdp_float8_all_gather"),
    **lost(
        _WEIGHTS,
        "qat quantization quantize_moe_experts model_quantization_config"
        " model_quantization_config_kwargs",
        trains=True,
    ),
    **lost(
        "evaluation is the loss; python -m finetune eval answers prompts",
        "bench_dataset bench_split num_generation_samples generation_max_new_tokens"
        " generation_temperature generation_top_p generation_top_k generation_prompt_ratio"
        " generation_do_sample",
    ),
}
DEFAULTS = {
    "output_dir": "./model-out",
    "sequence_len": 512,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1.0,
    "lr_scheduler": "cosine",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lora_dropout": 0.0,
    "optimizer": "adamw_torch_fused",
    "seed": 42,
    "val_set_size": 0.0,
    "bf16": "auto",
    "logging_steps": 500,
    "save_steps": 500,
}
_BEYOND_PLAIN = {
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_layers_to_transform": "layers_to_transform",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "lora_modules_to_save": "modules_to_save",
    "loraplus_lr_ratio": "lora_plus_ratio",
}
_READ_OF_DATA = (
    *(
        "path",
        "type",
        "split",
        "data_files",
        "field",
        "text_column",
        "ds_type",
        "chat_template",
        "roles_to_train",
    ),
    *(
        "field_messages",
        "field_tools",
        "message_property_mappings",
        "message_field_role",
        "message_field_content",
    ),
    "train_on_eos",
)


def finish(values: dict[str, Any], given: set[str], draft: Draft, devices: int) -> None:
    _data(values, draft)
    _method(values, draft)
    axolotl_preferences.finish(values, draft)
    strategy = values.get("excess_length_strategy") or "drop"
    draft.note(
        "sequence_len",
        values["sequence_len"],
        f"a longer sample is cut so that its answer stays; there: {strategy}"
        " (excess_length_strategy)",
    )
    if values.get("sample_packing"):
        hugging_face.packed("sample_packing", draft)
    if values.get("train_on_inputs"):
        draft.lose(
            "train_on_inputs", True, "the answers are trained, and nothing else", trains=True
        )
    if values.get("chat_template") not in (None, "tokenizer_default"):
        draft.note(
            "chat_template",
            values["chat_template"],
            "the tokenizer's own chat template is used; --template names another",
        )
    if "warmup_steps" not in given and "warmup_ratio" not in given:
        draft.values["warmup_steps"] = values["warmup_ratio"] = 0.03
        draft.note(
            "warmup_steps", "not set", "0.03 of the steps, as there, but without its limit of 100"
        )
    names = {
        "num_train_epochs": "num_epochs",
        "lr_scheduler_type": "lr_scheduler",
        "optim": "optimizer",
    }
    values |= {theirs: values.get(own) for theirs, own in names.items()}
    values["per_device_train_batch_size"] = values["micro_batch_size"]
    values["bf16"], values["fp16"] = (
        _is_bfloat16(values),
        values.get("fp16") or values.get("float16"),
    )
    values["eval_strategy"] = values.get("eval_strategy") or (
        "steps" if values.get("eval_steps") else "no"
    )
    for name, setting in (("saves_per_epoch", "save_steps"), ("evals_per_epoch", "eval_steps")):
        if values.get(name):
            draft.lose(name, values[name], f"steps are counted here: set {setting}", trains=False)
    values["save_strategy"] = values.get("save_strategy") or "steps"
    values["report_to"] = [
        name
        for name, key in (("wandb", "wandb_project"), ("tensorboard", "use_tensorboard"))
        if values.get(key)
    ] or "none"
    if values.get("wandb_project"):
        draft.lose(
            "wandb_project",
            values["wandb_project"],
            "wandb reads it from the environment: WANDB_PROJECT",
            trains=False,
        )
    hugging_face.finish(values, given, draft, devices)
    if patience := values.get("early_stopping_patience"):
        hugging_face.keep_best(
            draft, "early_stopping_patience", patience, {"early_stopping": patience}
        )
    if values.get("gradient_checkpointing") is not None:
        draft.values["gradient_checkpointing"] = bool(values["gradient_checkpointing"])


def _is_bfloat16(values: dict[str, Any]) -> bool:
    """`auto` is bfloat16 where the device has it, as it is here."""
    sixteen = values.get("fp16") or values.get("float16") or values.get("float32")
    return bool(
        values.get("bfloat16")
        or values["bf16"] is True
        or (values["bf16"] == "auto" and not sixteen)
    )


def _method(values: dict[str, Any], draft: Draft) -> None:
    adapter = values.get("adapter")
    if not adapter:
        draft.values["finetuning"] = "full"
        draft.values.pop("lora_dropout")
        return
    if adapter not in ("lora", "qlora"):
        raise ConfigError(
            f"adapter {adapter} has no counterpart",
            "adapter",
            "LoRA and all parameters are trained here",
        )
    for name, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if values.get(name):
            adapters.quantization(name, bits, draft, value=True)
    # peft's own, where Axolotl hands nothing on.
    draft.values |= {
        "finetuning": "lora",
        "lora_r": values.get("lora_r") or 8,
        "lora_alpha": values.get("lora_alpha") or 8,
    }
    adapters.beyond_plain(values, _BEYOND_PLAIN, draft)
    modules = values.get("lora_target_modules")
    if values.get("lora_target_linear") or not modules:
        draft.values["lora_target_modules"] = "all-linear"
    else:
        draft.values["lora_target_modules"] = targets(modules, "all-linear")
    if not modules and not values.get("lora_target_linear"):
        draft.note(
            "lora_target_modules",
            "not set",
            "there peft's own for the model, here all linear layers",
        )


def _data(values: dict[str, Any], draft: Draft) -> None:
    data = values.get("datasets") or values.get("pretraining_dataset")
    if not data:
        raise ConfigError("the run names no data", "datasets", "add it")
    entry_of = _preference_entry if values.get("rl") else _entry
    draft.values["data"] = [entry_of(entry, draft) for entry in data]
    if tests := values.get("test_datasets"):
        draft.values["valid_data"] = [entry_of(entry, draft) for entry in tests]
    elif values["val_set_size"]:
        split(values["val_set_size"], "val_set_size", draft)


def _entry(about: dict[str, Any], draft: Draft) -> Any:
    where = f"dataset {about.get('path')}"
    form, columns = about.get("type"), {}
    for name, value in about.items():
        if name not in _READ_OF_DATA and value is not None:
            draft.lose(f"{where}: {name}", value, "records are read in one way here", trains=True)
    if about.get("split", "train") != "train":
        draft.lose(f"{where}: split", about["split"], "the split train is read", trains=True)
    if isinstance(form, dict):
        draft.lose(
            f"{where}: type",
            form,
            "write the records in one of the forms of docs/data.md",
            trains=True,
        )
    elif form in ("completion", "pretrain"):
        columns = {"text": about.get("field") or about.get("text_column") or "text"}
    elif form == "chat_template":
        columns = {"messages": about.get("field_messages") or "messages"}
        _roles(about, where, draft)
    elif str(form).partition(".")[0] not in ("alpaca", "sharegpt", "None"):
        draft.lose(
            f"{where}: type",
            form,
            "write the records in one of the forms of docs/data.md",
            trains=True,
        )
    elif form is not None and str(form).startswith("alpaca"):
        draft.note(
            f"{where}: type",
            form,
            "the tokenizer's chat template asks the question; --template alpaca writes it as"
            " Axolotl",
        )
    return _path(about, columns, where, draft)


def _preference_entry(about: dict[str, Any], draft: Draft) -> Any:
    where = f"dataset {about.get('path')}"
    if str(about.get("type")).startswith("chat_template"):
        _roles(about, where, draft)
    if about.get("split", "train") != "train":
        draft.lose(f"{where}: split", about["split"], "the split train is read", trains=True)
    return _path(about, axolotl_preferences.columns_of(about, where, draft), where, draft)


def _path(about: dict[str, Any], columns: dict[str, str], where: str, draft: Draft) -> Any:
    """The entry with its columns, where they have other names."""
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    path = about.get("data_files") or about.get("path")
    paths = path if isinstance(path, list) else [path]
    if len(paths) > 1:
        draft.lose(f"{where}: data_files", paths[1:], "name a folder or glob instead", trains=True)
    return {"path": paths[0], "columns": columns} if columns else paths[0]


def _roles(about: dict[str, Any], where: str, draft: Draft) -> None:
    mapped = about.get("message_property_mappings") or {}
    pair = (
        mapped.get("role") or about.get("message_field_role") or "role",
        mapped.get("content") or about.get("message_field_content") or "content",
    )
    if pair not in (("role", "content"), ("from", "value")):
        draft.lose(
            f"{where}: roles",
            "/".join(pair),
            "turns have role and content, or from and value",
            trains=True,
        )
    if about.get("roles_to_train") not in (
        None,
        ["assistant"],
        ["gpt"],
        ["gpt", "assistant"],
        ["assistant", "gpt"],
    ):
        draft.lose(
            f"{where}: roles_to_train",
            about["roles_to_train"],
            "the assistant's answers are trained",
            trains=True,
        )
    if about.get("train_on_eos") not in (None, "turn"):
        draft.lose(
            f"{where}: train_on_eos",
            about["train_on_eos"],
            "the end of every answer is trained",
            trains=True,
        )


TOOL = Tool(
    "axolotl",
    "Axolotl",
    OPTIONS,
    DEFAULTS,
    finish,
    starts=dict.fromkeys((("axolotl", "train"), ("axolotl.cli.train",)), {}),
    aliases={"sequence_parallel_degree": "context_parallel_size"},
    degrees=("context_parallel_size", "tensor_parallel_size"),
)
