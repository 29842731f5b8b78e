"""ms-swift 4: `swift sft`, `swift pt` and `swift rlhf`, as a command line or a YAML file."""

from __future__ import annotations

import json
import math
from typing import Any

from finetune.commands.convert import adapters, hugging_face, preferences
from finetune.commands.convert.draft import Draft, Option, Tool, lost, read
from finetune.commands.convert.llama_factory import split, targets
from finetune.config.paths import is_hub_id
from finetune.errors import ConfigError

_TUNERS = "LoRA and all parameters are the only ways here"
_ANSWERS = "answering is python -m finetune chat, serve and eval"

OPTIONS: dict[str, Option] = {
    **hugging_face.OPTIONS,
    "model": "model",
    "dataset_num_proc": "preprocessing_num_workers",
    "lora_dropout": "lora_dropout",
    **read(
        "tuner_type dataset val_dataset split_dataset_ratio torch_dtype max_length"
        " truncation_strategy lora_rank lora_alpha target_modules target_regex columns system"
        " loss_scale template quant_bits packing adapters bnb_4bit_quant_type modules_to_save"
        " use_rslora use_dora lorap_lr_ratio early_stop_interval interleave_prob stopping_strategy"
        " strict use_chat_template max_epochs stage model_revision use_hf rlhf_type loss_type"
        " loss_weights beta label_smoothing rpo_alpha ld_alpha cpo_alpha simpo_gamma"
        " desirable_weight undesirable_weight ref_model ref_adapters"
    ),
    **lost("part of a loss that is not trained here", "discopop_tau"),
    **lost(
        "the reference is the model as it is before the run", "ref_model_type ref_model_revision"
    ),
    **lost(
        "a run on preferences answers nothing while it trains", "max_completion_length", off=(512,)
    ),
    # ------------------------------------------------ what is trained
    **lost(
        "single parameters are not frozen here",
        "freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters "
        "trainable_parameters_regex freeze_llm",
        trains=True,
    ),
    **lost("experts' parameters get no adapter by name here", "target_parameters", trains=True),
    **lost("this kind of LoRA is not trained here", "use_swift_lora", trains=True),
    **lost(
        "this kind of LoRA is not trained here",
        "lora_bias init_weights",
        trains=True,
        off=("true", True),
    ),
    **lost(
        "AdamW is the optimizer here", "optimizer use_galore lisa_activated_layers", trains=True
    ),
    **lost("the loss is cross-entropy here", "enable_dft_loss", trains=True),
    **lost("losses are averaged over tokens here", "acc_strategy", trains=True, off=("token",)),
    **lost(
        "routers have the auxiliary loss of the model's configuration",
        "router_aux_loss_coef",
        trains=True,
    ),
    **lost(
        "the order is a shuffle here",
        "dataset_shuffle train_dataloader_shuffle",
        trains=True,
        off=(True,),
    ),
    **lost("no token is added here", "new_special_tokens", trains=True),
    **lost("the model's own position encoding is trained", "rope_scaling", trains=True),
    **lost("weights are those of the model", "init_strategy", trains=True),
    **lost("a causal language model is trained", "task_type", trains=True, off=("causal_lm",)),
    **lost("a causal language model is trained", "num_labels problem_type mrl_dims"),
    **lost(
        "the tokenizer's template says how thoughts and tools are written",
        "agent_template response_prefix preserve_thinking",
        trains=True,
    ),
    **lost(
        "the tokenizer's template says how thoughts are written",
        "enable_thinking",
        trains=True,
        off=(True,),
    ),
    **lost(
        "the tokenizer's template says how thoughts are written",
        "add_non_thinking_prefix disable_ignore_empty_think",
        off=(True,),
    ),
    **lost(
        "the names in self-cognition data are written into the records beforehand",
        "model_name model_author",
        trains=True,
    ),
    **lost(
        "code of others is not run here",
        "external_plugins custom_register_path callbacks",
        trains=True,
    ),
    **lost("learning rates are one here", "vit_lr aligner_lr", trains=True),
    # ------------------------------------------------ how it runs
    **lost(
        "finetune decides it by itself",
        "model_type attn_impl experts_impl device_map max_memory model_kwargs template_backend"
        " padding_side padding_free use_logits_to_keep enable_npu_model_patch load_args"
        " load_data_args ignore_args_error check_model safe_serialization max_shard_size"
        " max_model_len local_repo_path lora_dtype ds3_gather_for_generation resume_only_model",
        off=("right", "swift", True, "5GB"),
    ),
    **lost("peft makes the adapter", "tuner_backend", off=("peft",)),
    **lost(
        "one device holds whole samples here",
        "sequence_parallel_size deepspeed_autotp_size",
        off=(1,),
    ),
    **lost("write it into the DeepSpeed file", "zero_hpz_partition_size"),
    **lost(
        "samples are prepared once and cached by their content",
        "cached_dataset cached_val_dataset load_from_cache_file lazy_tokenize streaming"
        " shuffle_buffer_size download_mode packing_num_proc packing_length packing_strategy"
        " val_dataset_shuffle disable_auto_column_mapping custom_dataset_info",
        off=("binpack", 1, "reuse_dataset_if_exists"),
    ),
    **lost(
        "the run folder is output_dir itself",
        "add_version create_checkpoint_symlink use_flash_ckpt",
        off=(True,),
    ),
    **lost("losses here are per difficulty and source", "enable_channel_loss eval_metric"),
    **lost(
        "only text is trained here",
        "max_pixels norm_bbox freeze_vit freeze_aligner vit_gradient_checkpointing",
        off=(True,),
    ),
    **lost(
        "a base in few bits is bitsandbytes', computed in the run's dtype",
        "quant_method hqq_axis bnb_4bit_compute_dtype bnb_4bit_use_double_quant"
        " bnb_4bit_quant_storage",
        off=("bnb", True),
    ),
    **lost(
        _ANSWERS,
        "max_new_tokens temperature top_k top_p repetition_penalty num_beams stream stop_words"
        " logprobs top_logprobs structured_outputs_regex eval_use_evalscope eval_dataset"
        " eval_dataset_args eval_limit eval_generation_config extra_eval_args",
    ),
    **lost(
        "part of an optimizer that is not here",
        "galore_target_modules galore_rank galore_update_proj_gap galore_scale galore_proj_type"
        " galore_optim_per_parameter galore_with_embedding galore_quantization galore_proj_quant"
        " galore_proj_bits galore_proj_group_size galore_cos_threshold galore_gamma_proj"
        " galore_queue_size lisa_step_interval",
    ),
    **lost(
        _TUNERS,
        "lora_ga_batch_size lora_ga_iters lora_ga_max_length lora_ga_direction lora_ga_scale"
        " lora_ga_stable_gamma fourier_n_frequency fourier_scaling boft_block_size boft_block_num"
        " boft_n_butterfly_factor boft_dropout vera_rank vera_projection_prng_key vera_dropout"
        " vera_d_initial adapter_act adapter_length adalora_target_r adalora_init_r adalora_tinit"
        " adalora_tfinal adalora_deltaT adalora_beta1 adalora_beta2 adalora_orth_reg_weight"
        " llamapro_num_new_blocks llamapro_num_groups reft_layer_key reft_layers reft_rank"
        " reft_intervention_type reft_args",
    ),
    **lost("loss scales follow the answers", "is_binary_loss_scale"),
    **lost(
        "SwanLab reads its settings from the environment",
        "swanlab_token swanlab_project swanlab_workspace swanlab_exp_name"
        " swanlab_notification_method swanlab_webhook_url swanlab_secret swanlab_sender_email"
        " swanlab_receiver_email swanlab_smtp_server swanlab_smtp_port swanlab_email_language"
        " swanlab_mode",
    ),
}
DEFAULTS = {
    **hugging_face.DEFAULTS,
    "tuner_type": "lora",
    "stage": "sft",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": None,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "lora_rank": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["all-linear"],
    "logging_steps": 5,
    "gradient_checkpointing": True,
    "split_dataset_ratio": 0.0,
    "report_to": ["tensorboard"],
    "learning_rate": None,
}
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}


def finish(values: dict[str, Any], given: set[str], draft: Draft, devices: int) -> None:
    full = values["tuner_type"] == "full"
    if values["tuner_type"] not in ("lora", "full"):
        raise ConfigError(
            f"{values['tuner_type']} has no counterpart: {_TUNERS}",
            "tuner_type",
            "convert lora or full",
        )
    draft.values["learning_rate"] = values["learning_rate"] or (1e-5 if full else 1e-4)
    if values["gradient_accumulation_steps"] is None:
        per_step = values["per_device_train_batch_size"] * devices
        values["gradient_accumulation_steps"] = max(1, math.ceil(16 / per_step))
    if values.get("max_epochs"):
        values["num_train_epochs"] = values["max_epochs"]
    _method(values, draft, full=full)
    _hub(values, draft)
    _data(values, draft)
    _text(values, draft)
    draft.values["dtype"] = _dtype(values)
    if "torch_dtype" not in given and not (given & {"bf16", "fp16"}):
        draft.note("torch_dtype", "not set", "there the model's own number format, here bfloat16")
    if values.get("eval_strategy") is None and (
        draft.values.get("valid_split") or draft.values.get("valid_data")
    ):
        values["eval_strategy"], values["eval_steps"] = (
            "steps",
            values.get("eval_steps") or values["save_steps"],
        )
    draft.values.setdefault(
        "output_dir", f"output/{str(values.get('model')).rstrip('/').rpartition('/')[2]}"
    )
    hugging_face.finish(values, given, draft, devices)
    _loss(values, draft)
    if patience := values.get("early_stop_interval"):
        hugging_face.keep_best(draft, "early_stop_interval", patience, {"early_stopping": patience})


def _loss(values: dict[str, Any], draft: Draft) -> None:
    kind = values.get("rlhf_type")
    if kind is None:
        preferences.lose_given(values, "the loss is cross-entropy here", "loss_type", draft)
        return
    settings: dict[str, Any] = {"beta": values.get("beta", 2.0 if kind == "simpo" else 0.1)}
    loss = kind
    if kind == "dpo":
        losses, weights = values.get("loss_type") or "sigmoid", values.get("loss_weights")
        loss, sft = preferences.of_losses("loss_type", losses, weights, draft)
        both = [weight for weight in (sft, values.get("rpo_alpha")) if weight is not None]
        settings["sft_weight"] = sum(both) if both else None
        settings["label_smoothing"] = values.get("label_smoothing") if loss == "dpo" else None
    elif kind not in ("orpo", "simpo", "kto") or values.get("loss_type") not in (
        None,
        kind,
        [kind],
    ):
        raise preferences.refused(
            "rlhf_type", kind if values.get("loss_type") is None else values["loss_type"]
        )
    if kind == "simpo":
        settings |= {
            "simpo_gamma": values.get("simpo_gamma", 1.0),
            "sft_weight": values.get("cpo_alpha", 1.0),
        }
        settings["label_smoothing"] = values.get("label_smoothing")
    elif kind == "kto":
        settings |= {name: values.get(name) for name in ("desirable_weight", "undesirable_weight")}
    elif kind == "orpo":
        draft.note(
            "orpo",
            "loss",
            "there the cross-entropy is that of prompt and answer, here of the answer",
        )
    preferences.lose_given(values, "this part of a loss is not trained here", "ld_alpha", draft)
    why, same = preferences.OWN_REFERENCE, (values.get("model"),)
    preferences.lose_given(values, why, "ref_model ref_adapters", draft, off=same)
    preferences.write(draft, loss, settings)


def _dtype(values: dict[str, Any]) -> str:
    if values.get("bf16") or values.get("fp16"):
        return "bfloat16" if values.get("bf16") else "float16"
    return _DTYPES.get(str(values.get("torch_dtype")), "bfloat16")


def _hub(values: dict[str, Any], draft: Draft) -> None:
    model = str(values.get("model"))
    if is_hub_id(model) and not values.get("use_hf"):
        draft.values["hub"] = "modelscope"
        why = "ms-swift takes models by name from ModelScope: hub modelscope is written"
        draft.note("use_hf", values.get("use_hf", "not set"), why)
    elif is_hub_id(model):
        draft.values["hub"] = "huggingface"
    hugging_face.revision(values.get("model_revision"), draft)


def _method(values: dict[str, Any], draft: Draft, *, full: bool) -> None:
    draft.values["finetuning"] = values["tuner_type"]
    if values.get("adapters"):
        draft.lose(
            "adapters",
            values["adapters"],
            "no adapter is continued here; merge it into the model first",
            trains=True,
        )
    if values.get("quant_bits"):
        adapters.quantization(
            "quant_bits", values["quant_bits"], draft, form=values.get("bnb_4bit_quant_type")
        )
    if full:
        draft.values.pop("lora_dropout")
        return
    draft.values |= {"lora_r": values["lora_rank"], "lora_alpha": values["lora_alpha"]}
    same = ("modules_to_save", "use_rslora", "use_dora")
    adapters.beyond_plain(
        values, {**dict(zip(same, same, strict=True)), "lorap_lr_ratio": "lora_plus_ratio"}, draft
    )
    draft.values["lora_target_modules"] = targets(values["target_modules"], "all-linear")
    if values.get("target_regex"):
        draft.lose(
            "target_regex",
            values["target_regex"],
            "name the modules as lora_target_modules",
            trains=True,
        )


def _text(values: dict[str, Any], draft: Draft) -> None:
    """Template, system text and length."""
    if length := values.get("max_length"):
        draft.values["cutoff_len"] = length
        how = values.get("truncation_strategy") or "delete"
        draft.note(
            "max_length", length, f"a longer sample is cut so that its answer stays; there: {how}"
        )
    else:
        draft.note(
            "max_length", "not set", "there the model's longest, here cutoff_len 2048: set it"
        )
    if values.get("packing"):
        hugging_face.packed("packing", draft)
    if values.get("system"):
        draft.lose(
            "system", values["system"], "a system text stands in the records here", trains=True
        )
    if values.get("use_chat_template") is False and values["stage"] != "pt":
        draft.lose(
            "use_chat_template",
            False,
            "conversations are written with a chat template here",
            trains=True,
        )
    if values.get("template"):
        draft.note(
            "template",
            values["template"],
            "the tokenizer's own chat template is used; --template names another",
        )
    if values["stage"] == "pt":
        draft.lose(
            "stage",
            "pt",
            "of a conversation the answers are trained; records of text are trained whole",
            trains=True,
        )
    # Of preferences the answer behind the prompt is trained, there and here.
    last = "last_round" if values.get("rlhf_type") else "default"
    scale = values.get("loss_scale", "default")
    scale = "default" if scale == last else scale
    if scale not in ("default", "all") or (scale == "all" and values["stage"] != "pt"):
        draft.lose(
            "loss_scale",
            scale,
            "every answer of a conversation is trained, and nothing else",
            trains=True,
        )
    draft.values["on_bad_row"] = "refuse" if values.get("strict") else "drop"


def _data(values: dict[str, Any], draft: Draft) -> None:
    columns = values.get("columns")
    columns = json.loads(columns) if isinstance(columns, str) else columns or {}
    renamed = {ours: theirs for theirs, ours in columns.items()}  # there: their name -> swift's
    renamed = {{"query": "prompt"}.get(ours, ours): theirs for ours, theirs in renamed.items()}
    for option, name in (("dataset", "data"), ("val_dataset", "valid_data")):
        given = values.get(option) or []
        if given:
            draft.values[name] = [
                _entry(one, renamed, draft)
                for one in ([given] if isinstance(given, str) else given)
            ]
    if not draft.values.get("data"):
        raise ConfigError("the run names no data", "dataset", "add it")
    if values["split_dataset_ratio"] and not draft.values.get("valid_data"):
        split(values["split_dataset_ratio"], "split_dataset_ratio", draft)
    if weights := values.get("interleave_prob"):
        draft.values["data_weights"] = [float(weight) for weight in weights]
        draft.note(
            "interleave_prob",
            weights,
            "sources are mixed exactly by weight, none repeats a record before it is exhausted",
        )


def _entry(given: str, columns: dict[str, str], draft: Draft) -> Any:
    """`owner/name:subset#500`, a file or a folder."""
    path, mark, count = str(given).rpartition("#")
    path = path if mark and count.isdigit() else str(given)
    if path != given:
        draft.lose(
            f"dataset {path}",
            f"#{count}",
            "every record is trained: make a smaller file",
            trains=True,
        )
    head, colon, subset = path.rpartition(":")
    if colon and "/" in head and "/" not in subset and not head.startswith(("/", ".")):
        draft.lose(
            f"dataset {head}",
            f":{subset}",
            "the whole data set is read: write its part to a file",
            trains=True,
        )
        path = head
    return {"path": path, "columns": dict(columns)} if columns else path


TOOL = Tool(
    "ms-swift",
    "ms-swift",
    OPTIONS,
    DEFAULTS,
    finish,
    starts={
        ("swift", "sft"): {},
        ("swift", "pt"): {"stage": "pt"},
        ("swift", "rlhf"): {"rlhf_type": "dpo"},
        ("swift/cli/sft.py",): {},
        ("swift/cli/rlhf.py",): {"rlhf_type": "dpo"},
        ("swift/cli/pt.py",): {"stage": "pt"},
    },
    aliases={
        "train_type": "tuner_type",
        "sft_type": "tuner_type",
        "model_id_or_path": "model",
        "num_epochs": "num_train_epochs",
    },
    environment={"USE_HF": "use_hf"},
    degrees=("sequence_parallel_size", "deepspeed_autotp_size"),
    nulls={**hugging_face.NULLS, "report_to": None},
)
