"""LLaMA-Factory 0.9.5: its options, and what dataset_info.json says of its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.commands.convert import adapters, hugging_face, preferences
from finetune.commands.convert.draft import Draft, Option, Tool, lost, read
from finetune.errors import ConfigError

_MEDIA = "only text is trained here"
_OTHER_STAGE = "rewards and rollouts are not trained here"
_STAGES = ("sft", "pt", "dpo", "kto")
# pref_loss of stage dpo -> ours.
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_OTHER_METHOD = "LoRA and all parameters are the only ways here"
_ANSWERS = "answering is python -m finetune chat, serve and eval"

OPTIONS: dict[str, Option] = {
    **hugging_face.OPTIONS,
    "model_name_or_path": "model",
    "trust_remote_code": "trust_remote_code",
    "cutoff_len": "cutoff_len",
    "preprocessing_num_workers": "preprocessing_num_workers",
    "lora_dropout": "lora_dropout",
    **read(
        "stage finetuning_type lora_rank lora_alpha lora_target dataset eval_dataset dataset_dir"
        " val_size template mix_strategy interleave_probs packing neat_packing pure_bf16"
        " disable_gradient_checkpointing fp8 early_stopping_steps infer_dtype quantization_bit"
        " mask_history train_on_prompt use_swanlab quantization_type use_rslora use_dora"
        " loraplus_lr_ratio additional_target image_max_pixels model_revision pref_beta pref_ftx"
        " pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight"
        " simpo_gamma ld_alpha ref_model"
    ),
    # ------------------------------------------------ what is trained
    **lost(
        "no adapter is continued or stacked here; merge it into the model first",
        "adapter_name_or_path adapter_folder",
        trains=True,
    ),
    **lost(
        "this kind of LoRA is not trained here",
        "pissa_init pissa_convert",
        trains=True,
    ),
    **lost("part of an option that is not trained here", "pissa_iter loraplus_lr_embedding"),
    **lost("every run makes its own adapter", "create_new_adapter"),
    **lost("every record is trained: make a smaller file", "max_samples", trains=True),
    **lost(
        "no token is added here",
        "resize_vocab add_tokens add_special_tokens new_special_tokens_config",
        trains=True,
    ),
    **lost("no token is added here", "init_special_tokens"),
    **lost(
        "special tokens are read as the tokenizer reads them", "split_special_tokens", trains=True
    ),
    **lost("the model's own position encoding is trained", "rope_scaling", trains=True),
    **lost(
        "the model's own attention and layers are trained",
        "shift_attn mixture_of_depths use_llama_pro",
        trains=True,
    ),
    **lost(
        "routers have the auxiliary loss of the model's configuration",
        "moe_aux_loss_coef",
        trains=True,
    ),
    **lost(
        "weights are those of the model: pretraining is python -m finetune.pretrain",
        "train_from_scratch",
        trains=True,
    ),
    **lost(
        "AdamW is the optimizer here",
        "use_galore use_apollo use_badam use_adam_mini use_muon",
        trains=True,
    ),
    **lost(
        "the loss is cross-entropy here", "use_dft_loss use_asft_loss use_eaft_loss", trains=True
    ),
    **lost(
        "part of a loss that is not trained here",
        "asft_alpha eaft_alpha ref_model_adapters ref_model_quantization_bit",
    ),
    **lost("the order is a shuffle here", "disable_shuffling", trains=True),
    **lost("a system text stands in the records here", "default_system", trains=True),
    **lost(
        "the tokenizer's template says how thoughts are written",
        "enable_thinking",
        trains=True,
        off=(True,),
    ),
    **lost("the tokenizer's template says which thoughts stay", "preserve_thinking", trains=True),
    **lost(
        "the tokenizer's template says how calls of tools are written", "tool_format", trains=True
    ),
    # ------------------------------------------------ parts of what is refused or named above
    **lost(
        _OTHER_METHOD,
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules module_dropout"
        " oft_rank oft_block_size oft_target",
    ),
    **lost(
        _OTHER_STAGE,
        "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model "
        "reward_model_adapters reward_model_quantization_bit reward_model_type",
    ),
    **lost(
        "part of an optimizer that is not here",
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type"
        " galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale"
        " apollo_proj apollo_proj_type apollo_layerwise apollo_scale_type apollo_scale_front"
        " badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio"
        " badam_mask_mode badam_verbose",
    ),
    **lost(
        "a base in few bits is bitsandbytes', whole on a device",
        "quantization_method double_quantization quantization_device_map",
        off=("bitsandbytes", "bnb", True),
    ),
    # ------------------------------------------------ how it runs
    **lost(
        "the kernel is the device's best (docs/configuration.md)",
        "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels",
    ),
    **lost("sums are in float32 where it matters", "upcast_layernorm upcast_lmhead_output"),
    **lost("recomputing has no further settings here", "use_reentrant_gc"),
    **lost(
        "samples are prepared once and cached by their content",
        "overwrite_cache tokenized_path data_shared_file_system preprocessing_batch_size streaming"
        " buffer_size",
    ),
    **lost("tokenized data has a folder of its own: --cache-dir", "cache_dir"),
    **lost(
        "losses here are per difficulty and source",
        "eval_on_each_dataset compute_accuracy eval_num_beams",
    ),
    **lost("targets are what is trained; padding never is", "ignore_pad_token_for_loss"),
    **lost("python -m finetune report draws curves", "plot_loss"),
    **lost("a run is never overwritten: name another folder", "overwrite_output_dir"),
    **lost("tokens per second are in every line of the log", "include_effective_tokens_per_second"),
    **lost(
        "finetune decides it by itself",
        "use_fast_tokenizer low_cpu_mem_usage device_map offload_folder use_kv_cache"
        " print_param_status compute_dtype model_max_length block_diag_attn",
    ),
    **lost("hubs read their tokens from the environment", "hf_hub_token ms_hub_token om_hub_token"),
    **lost(
        _MEDIA,
        "media_dir image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels"
        " video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate"
        " freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
    ),
    **lost(
        "python -m finetune merge makes a whole model of an adapter",
        "export_dir export_size export_device export_quantization_bit export_quantization_dataset"
        " export_quantization_nsamples export_quantization_maxlen export_legacy_format"
        " export_hub_model_id",
    ),
    **lost(
        _ANSWERS,
        "do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty"
        " length_penalty skip_special_tokens infer_backend vllm_maxlen vllm_gpu_util"
        " vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction"
        " sglang_tp_size sglang_config sglang_lora_backend",
    ),
    **lost(
        "another engine: ZeRO-3 with offload is for large models here",
        "use_kt kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num "
        "kt_lora_expert_intermediate_size use_mca use_hyper_parallel hyper_parallel_args",
    ),
    **lost(
        "processes are started by python -m finetune launch",
        "ray_num_workers ray_init_kwargs master_addr master_port",
    ),
    **lost(
        "steps are not profiled here; make roofline counts kernels",
        "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps"
        " profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory"
        " profiler_with_stack profile_modules",
    ),
    **lost("fine-tuning has no fp8 here", "fp8_backend fp8_enable_fsdp_float8_all_gather"),
    **lost(
        "SwanLab reads its settings from the environment",
        "swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key"
        " swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret",
    ),
}
DEFAULTS = {
    **hugging_face.DEFAULTS,
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "lora_dropout": 0.0,
    "cutoff_len": 2048,
    "dataset_dir": "data",
    "val_size": 0.0,
    "pref_beta": 0.1,
    "pref_loss": "sigmoid",
    "simpo_gamma": 0.5,
}
_BEYOND_PLAIN = {
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "loraplus_lr_ratio": "lora_plus_ratio",
    "additional_target": "modules_to_save",
}
_ROLES = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "system_tag": ("system",),
}
_ROLES |= {"observation_tag": ("observation", "tool"), "function_tag": ("function_call",)}
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}


def finish(values: dict[str, Any], given: set[str], draft: Draft, devices: int) -> None:
    if values["stage"] not in _STAGES:
        what = f"stage {values['stage']} has no counterpart: {_OTHER_STAGE}"
        raise ConfigError(what, "stage", f"convert {', '.join(_STAGES)}")
    if values["finetuning_type"] not in ("lora", "full"):
        raise ConfigError(
            f"{values['finetuning_type']} has no counterpart: {_OTHER_METHOD}",
            "finetuning_type",
            "convert lora or full",
        )
    _data(values, draft)
    _method(values, draft)
    _loss(values, draft)
    _template(values, draft)
    hugging_face.revision(values.get("model_revision"), draft)
    hugging_face.finish(values, given, draft, devices)
    # neat_packing says packing there, and so does pretraining that does not say otherwise.
    if values.get("packing", values["stage"] == "pt") or values.get("neat_packing"):
        hugging_face.packed("neat_packing" if values.get("neat_packing") else "packing", draft)
    if values.get("pure_bf16"):
        draft.values["dtype"] = "bfloat16"
        draft.lose("pure_bf16", True, "all parameters keep float32 masters here", trains=True)
    if values.get("disable_gradient_checkpointing"):
        draft.values["gradient_checkpointing"] = False
    if values.get("fp8"):
        draft.lose("fp8", True, "fine-tuning has no fp8 here", trains=True)
    if patience := values.get("early_stopping_steps"):
        hugging_face.keep_best(
            draft, "early_stopping_steps", patience, {"early_stopping": patience}
        )
    if values.get("use_swanlab"):
        trackers = draft.values["report_to"]
        draft.values["report_to"] = ["swanlab", *(trackers if isinstance(trackers, list) else [])]
    draft.values["on_bad_row"] = "drop"


def _method(values: dict[str, Any], draft: Draft) -> None:
    draft.values["finetuning"] = values["finetuning_type"]
    adapters.beyond_plain(values, _BEYOND_PLAIN, draft)
    if bits := values.get("quantization_bit"):
        adapters.quantization("quantization_bit", bits, draft, form=values.get("quantization_type"))
    if values["finetuning_type"] == "full":
        draft.values.pop("lora_dropout", None)
        return
    rank = values["lora_rank"]
    draft.values |= {"lora_r": rank, "lora_alpha": values.get("lora_alpha") or 2 * rank}
    draft.values["lora_target_modules"] = targets(values["lora_target"], "all")


def _loss(values: dict[str, Any], draft: Draft) -> None:
    stage, ftx = values["stage"], values.get("pref_ftx") or 0.0
    if stage not in ("dpo", "kto"):
        preferences.lose_given(values, "the loss is cross-entropy here", "ref_model", draft)
        return
    settings: dict[str, Any] = {"beta": values["pref_beta"]}
    if stage == "kto":
        loss = "kto"
        settings |= {"desirable_weight": values.get("kto_chosen_weight")}
        settings |= {"undesirable_weight": values.get("kto_rejected_weight")}
        preferences.lose_given(values, "kto has no cross-entropy beside it here", "pref_ftx", draft)
    elif (named := values["pref_loss"]) not in _LOSSES:
        raise preferences.refused("pref_loss", named)
    else:
        loss = _LOSSES[named]
        # Its orpo adds the chosen answer's cross-entropy itself, once.
        settings["sft_weight"] = 1.0 + ftx if loss == "orpo" else ftx or None
        settings["label_smoothing"] = values.get("dpo_label_smoothing") if loss == "dpo" else None
        settings["simpo_gamma"] = values["simpo_gamma"] if loss == "simpo" else None
    preferences.lose_given(
        values, "this part of a loss is not trained here", "pref_bco_weight ld_alpha", draft
    )
    preferences.lose_given(
        values,
        preferences.OWN_REFERENCE,
        "ref_model",
        draft,
        off=(values.get("model_name_or_path"),),
    )
    preferences.write(draft, loss, settings)


def targets(value: Any, everything: str) -> Any:
    """LoRA's modules as a list of names, or all-linear."""
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
    return "all-linear" if names == [everything] else names


def _template(values: dict[str, Any], draft: Draft) -> None:
    if values["stage"] == "pt":
        draft.note(
            "cutoff_len",
            values["cutoff_len"],
            "texts are cut off there, where LLaMA-Factory joins and splits them: split long ones"
            " first, or use python -m finetune prepare and pretrain --model",
        )
        return
    draft.note(
        "template",
        values.get("template"),
        "the tokenizer's own chat template is used: see python -m finetune inspect; --template"
        " names another",
    )
    draft.note(
        "cutoff_len", values["cutoff_len"], "what is too long is cut so that the answer stays"
    )
    for name in ("mask_history", "train_on_prompt"):
        if values.get(name):
            draft.lose(
                name,
                True,
                "every answer of a conversation is trained, and nothing else",
                trains=True,
            )
    if values.get("packing") and not values.get("neat_packing"):
        draft.note("packing", True, "samples that are packed never attend to one another here")


def _data(values: dict[str, Any], draft: Draft) -> None:
    folder = Path(str(values["dataset_dir"]))
    info = _dataset_info(folder)
    for option, name in (("dataset", "data"), ("eval_dataset", "valid_data")):
        if value := values.get(option):
            names = (
                [part.strip() for part in value.split(",")]
                if isinstance(value, str)
                else list(value)
            )
            draft.values[name] = [
                _entry(each, info, folder, values["stage"], draft) for each in names
            ]
    if not draft.values.get("data"):
        raise ConfigError("the run names no dataset", "dataset", "convert a run that trains")
    if values["val_size"]:
        split(values["val_size"], "val_size", draft)
    probabilities = values.get("interleave_probs")
    if values.get("mix_strategy", "concat") != "concat":
        parts = probabilities.split(",") if isinstance(probabilities, str) else probabilities
        parts = parts or [1] * len(draft.values["data"])
        draft.values["data_weights"] = [float(part) for part in parts]
        draft.note(
            "mix_strategy",
            values["mix_strategy"],
            "sources are mixed exactly by weight, none repeats a record before it is exhausted, and"
            " the run's length is num_epochs or max_steps",
        )


def split(value: float, name: str, draft: Draft) -> None:
    """A part of the training data to evaluate on."""
    draft.values["valid_split"] = float(value) if value < 1 else int(value)
    draft.note(name, value, "which records are held out is decided by a hash of each (valid_split)")


def _dataset_info(folder: Path) -> dict[str, Any]:
    path = folder / "dataset_info.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"dataset_info.json cannot be read: {error}",
            str(path),
            "run from the folder that LLaMA-Factory is run in",
        ) from error


def _entry(name: str, info: dict[str, Any], folder: Path, stage: str, draft: Draft) -> Any:
    """An entry of data: a path, with the columns where they have other names."""
    about = info.get(name)
    if not isinstance(about, dict):
        raise ConfigError(f"dataset_info.json has no {name}", str(folder), "correct the name")
    path = next(
        (about[key] for key in ("hf_hub_url", "ms_hub_url", "om_hub_url") if key in about), None
    )
    if path is None:
        path = (
            str(folder / about["file_name"])
            if "file_name" in about
            else about.get("cloud_file_name")
        )
    if path is None:
        raise ConfigError(
            f"{name} is made by a script, which is never run",
            "script_url",
            "write its records to a file",
        )
    where = f"dataset {name}"
    for key in ("subset", "folder", "num_samples"):
        if about.get(key):
            draft.lose(
                f"{where}: {key}",
                about[key],
                "write the records that are meant to a file of their own",
                trains=True,
            )
    if about.get("split", "train") != "train":
        draft.lose(f"{where}: split", about["split"], "the split train is read", trains=True)
    if bool(about.get("ranking")) != (stage == "dpo"):
        holds = "holds rankings" if about.get("ranking") else "holds no rankings"
        raise ConfigError(
            f"{name} {holds}, and the stage is {stage}", "ranking", "name data of the stage"
        )
    columns = _columns(about, stage, where, draft)
    return {"path": path, "columns": columns} if columns else path


def _columns(about: dict[str, Any], stage: str, where: str, draft: Draft) -> dict[str, str]:
    given, form = dict(about.get("columns") or {}), about.get("formatting", "alpaca")
    for kind in ("images", "videos", "audios"):
        if given.pop(kind, None):
            draft.lose(f"{where}: {kind}", True, _MEDIA, trains=True)
    found: dict[str, str] = {}
    if form == "alpaca":
        if stage == "pt":
            return {"text": given.get("prompt", "instruction")}
        # Columns that are named replace all, those that are not named are not read.
        for theirs, ours in _COLUMNS.items():
            name = given.get(theirs, ours if not given else None)
            if name is not None and name != ours:
                found[ours] = name
    else:
        name = given.get("messages", "conversations")
        tags = about.get("tags") or {}
        ours = "messages" if form == "openai" or tags.get("role_tag") == "role" else "conversations"
        found |= {ours: name} if name != ours else {}
        _tags(tags, form, where, draft)
    same = ("history", "system", "tools", *(("chosen", "rejected") if stage == "dpo" else ()))
    found |= {ours: given[ours] for ours in same if given.get(ours) not in (None, ours)}
    if stage == "kto" and given.get("kto_tag") not in (None, "kto_tag", "label"):
        found["label"] = given["kto_tag"]
    return found


def _tags(tags: dict[str, Any], form: str, where: str, draft: Draft) -> None:
    pair = (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
    if form != "openai" and pair not in (("from", "value"), ("role", "content")):
        draft.lose(
            f"{where}: tags",
            "/".join(pair),
            "turns have from and value, or role and content",
            trains=True,
        )
    for tag, known in _ROLES.items():
        if tags.get(tag) not in (None, *known):
            draft.lose(
                f"{where}: {tag}", tags[tag], f"roles here are {' or '.join(known)}", trains=True
            )


TOOL = Tool(
    "llamafactory",
    "LLaMA-Factory",
    OPTIONS,
    DEFAULTS,
    finish,
    starts=dict.fromkeys((("llamafactory-cli", "train"), ("lmf", "train"), ("src/train.py",)), {}),
    nulls=hugging_face.NULLS,
)
