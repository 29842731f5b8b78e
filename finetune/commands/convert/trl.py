"""TRL 1.16: SFTConfig, DPOConfig, KTOConfig, experimental ORPOConfig and CPOConfig, ModelConfig,
and its scripts.
"""

from __future__ import annotations

import os
from typing import Any

from finetune.commands.convert import adapters, hugging_face, preferences
from finetune.commands.convert.draft import Draft, Option, Tool, is_nothing, lost, read
from finetune.commands.convert.llama_factory import split, targets
from finetune.errors import ConfigError

_TOKENS = "the tokenizer's own tokens are used"
_TRAINERS = ("sft", "dpo", "kto", "orpo", "cpo")
# Of GRPO, RLOO, PPO and on-line DPO; the last three of distillation.
_ROLLOUTS = (
    "num_generations reward_funcs reward_weights reward_model_name_or_path reward_model_path"
    " scale_rewards generation_batch_size steps_per_generation num_iterations epsilon_high"
    " importance_sampling_level mask_truncated_completions use_vllm vllm_mode num_ppo_epochs"
    " kl_coef cliprange vf_coef whiten_rewards response_length judge lmbda seq_kd"
    " teacher_model_name_or_path"
)
_OF_PREFERENCES = (
    "beta loss_weights label_smoothing ld_alpha f_divergence_type use_weighting sync_ref_model"
    " desirable_weight undesirable_weight simpo_gamma cpo_alpha alpha max_completion_length"
)
_SFT_LOSSES = {"nll", "chunked_nll", "dft"}

OPTIONS: dict[str, Option] = {
    **hugging_face.OPTIONS,
    "model_name_or_path": "model",
    "trust_remote_code": "trust_remote_code",
    "dataset_num_proc": "preprocessing_num_workers",
    "lora_dropout": "lora_dropout",
    **read(
        "max_length packing packing_strategy use_peft lora_r lora_alpha lora_target_modules"
        " dataset_name datasets dataset_config dataset_train_split dataset_test_split"
        " dataset_text_field test_split_size chat_template_path assistant_only_loss"
        " completion_only_loss load_in_4bit load_in_8bit dtype eos_token truncation_mode"
        " model_revision bnb_4bit_quant_type use_rslora use_dora lora_modules_to_save trainer"
        " loss_type disable_dropout"
    ),
    **read(f"{_OF_PREFERENCES} {_ROLLOUTS}"),
    **lost(
        "part of a loss that is not trained here",
        "discopop_tau f_alpha_divergence_coef ref_model_mixup_alpha ref_model_sync_steps",
    ),
    **lost(
        "what the reference says is asked as it is best here",
        "precompute_ref_log_probs precompute_ref_batch_size",
    ),
    **lost("a run on preferences answers nothing while it trains", "generate_during_eval"),
    **lost("a causal language model is trained", "is_encoder_decoder padding_value"),
    **lost("the model is loaded as it is", "model_init_kwargs", trains=True),
    **lost("data is prepared in one way here", "dataset_kwargs", trains=True),
    **lost(
        "routers have the auxiliary loss of the model's configuration",
        "router_aux_loss_coef",
        trains=True,
    ),
    **lost("experts' parameters get no adapter here", "lora_target_parameters", trains=True),
    **lost("the order is a shuffle in any case", "shuffle_dataset"),
    **lost(
        "padding is what execution needs",
        "padding_free pad_to_multiple_of eval_packing",
        off=("auto",),
    ),
    **lost(_TOKENS, "pad_token"),
    **lost("its launcher's", "accelerate_config"),
    **lost("activations are recomputed or kept here", "activation_offloading"),
    **lost("samples are prepared once and read from memory maps", "dataset_streaming streaming"),
    **lost("the kernel is the device's best (docs/configuration.md)", "attn_implementation"),
    **lost(
        "finetune decides it by itself", "ignore_bias_buffers lora_task_type", off=("CAUSAL_LM",)
    ),
    **lost(
        "nf4 has double quantisation here",
        "use_bnb_nested_quant bnb_4bit_quant_storage",
        off=(True,),
    ),
}
DEFAULTS = {
    **hugging_face.DEFAULTS,
    "learning_rate": 2e-5,
    "logging_steps": 10,
    "gradient_checkpointing": True,
    "max_length": 1024,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "dataset_train_split": "train",
    "dataset_text_field": "text",
}


def finish(values: dict[str, Any], given: set[str], draft: Draft, devices: int) -> None:
    trainer = _trainer(values, draft)
    if trainer != "sft" and "learning_rate" not in given:
        draft.values["learning_rate"] = 1e-6  # of every trainer of preferences
    _data(values, draft)
    _method(values, draft)
    hugging_face.revision(values.get("model_revision"), draft)
    if values["max_length"]:
        draft.values["cutoff_len"] = values["max_length"]
        draft.note(
            "max_length", values["max_length"], "what is too long is cut so that the answer stays"
        )
    else:
        draft.lose(
            "max_length",
            "null",
            "there nothing is cut, here what is longer than cutoff_len: set it",
            trains=True,
        )
    if values.get("truncation_mode", "keep_start") != "keep_start":
        draft.lose(
            "truncation_mode",
            values["truncation_mode"],
            "what is too long loses its question's middle",
            trains=True,
        )
    if trainer == "sft":
        _tokens(values, draft)
    else:
        _preferences(trainer, values, draft)
    if values.get("eos_token"):
        draft.lose("eos_token", values["eos_token"], _TOKENS, trains=True)
    if template := values.get("chat_template_path"):
        draft.values["template"] = template
    values.setdefault("bf16", not values.get("fp16"))
    hugging_face.finish(values, given, draft, devices)


def _trainer(values: dict[str, Any], draft: Draft) -> str:
    """One of _TRAINERS: as the command says, else guessed, which is said.

    Raises:
        ConfigError: it is another's run, or may be one.
    """
    fix = f"convert a run of trl {', '.join(_TRAINERS)}"
    if rollouts := [name for name in _ROLLOUTS.split() if not is_nothing(values.get(name))]:
        what = (
            "belongs to a run on rewards, rollouts or of a teacher (GRPO, RLOO, PPO, distillation)"
        )
        raise ConfigError(f"{rollouts[0]} {what}, which has no counterpart", rollouts[0], fix)
    if named := values.get("trainer"):
        if named not in _TRAINERS:
            raise ConfigError(f"trl {named} has no counterpart", "trainer", fix)
        return str(named)
    trainer = _guess(values)
    if trainer is None:
        what = (
            "max_completion_length is an option of ORPO, CPO, GRPO, RLOO and distillation: it"
            " cannot be told which"
        )
        raise ConfigError(
            what, "max_completion_length", 'where it is ORPO convert "trl orpo --config FILE"'
        )
    why = f'taken for a run of trl {trainer}; else name it, e.g. "trl kto --config FILE"'
    draft.note("trainer", "not named", why)
    return trainer


def _guess(values: dict[str, Any]) -> str | None:
    """The loss tells first, then options that only one trainer has; None where several could be
    meant.
    """
    losses, given = (
        {str(each) for each in preferences.listed(values.get("loss_type") or [])},
        values.keys(),
    )
    if "simpo" in losses or given & {"cpo_alpha", "simpo_gamma"}:
        return "cpo"
    if "kto" in losses or given & {"desirable_weight", "undesirable_weight"}:
        return "kto"
    if losses - _SFT_LOSSES:
        return "dpo"
    if "max_completion_length" in given:
        return None
    if given & {
        "beta",
        "loss_weights",
        "precompute_ref_log_probs",
        "label_smoothing",
        "sync_ref_model",
    }:
        return "dpo"
    return "sft"


def _preferences(trainer: str, values: dict[str, Any], draft: Draft) -> None:
    settings: dict[str, Any] = {"beta": values.get("beta", 0.1)}
    loss, losses = trainer, values.get("loss_type")
    if trainer == "dpo":
        loss, sft = preferences.of_losses(
            "loss_type", losses or "sigmoid", values.get("loss_weights"), draft
        )
        settings["sft_weight"] = sft
    elif trainer == "kto" and losses not in (None, "kto", ["kto"]):
        raise preferences.refused("loss_type", losses)
    elif trainer == "cpo":
        if losses != "simpo":
            raise preferences.refused("loss_type", losses or "sigmoid (of cpo)")
        loss = "simpo"
        settings |= {
            "simpo_gamma": values.get("simpo_gamma", 0.5),
            "sft_weight": values.get("cpo_alpha", 1.0),
        }
        settings["label_smoothing"] = values.get("label_smoothing")
    if loss == "kto":
        settings |= {name: values.get(name) for name in ("desirable_weight", "undesirable_weight")}
    if trainer == "orpo":
        if losses is not None:
            raise preferences.refused("loss_type", f"{losses} (of orpo)")
        draft.note(
            "orpo",
            "loss",
            "there the cross-entropy is that of prompt and answer, here of the answer",
        )
    if trainer == "dpo" and values.get("label_smoothing"):
        why = (
            "TRL 1.16 reads it for the losses robust and exo_pair only; here it makes DPO"
            " conservative: left out"
        )
        draft.note("label_smoothing", values["label_smoothing"], why)
    why = "this part of a loss is not trained here"
    preferences.lose_given(values, why, "ld_alpha use_weighting alpha", draft)
    preferences.lose_given(values, why, "f_divergence_type", draft, off=("reverse_kl",))
    preferences.lose_given(values, preferences.OWN_REFERENCE, "sync_ref_model", draft)
    preferences.lose_given(
        values, "a document is cut as a whole (cutoff_len)", "max_completion_length", draft
    )
    preferences.write(draft, loss, settings, dropout=values.get("disable_dropout") is False)


def _tokens(values: dict[str, Any], draft: Draft) -> None:
    """Which tokens of what rows are trained."""
    if values.get("packing"):
        hugging_face.packed("packing", draft)
    if values.get("packing") and values.get("packing_strategy") == "wrapped":
        draft.lose(
            "packing_strategy",
            "wrapped",
            "samples are packed whole, and do not attend to one another",
            trains=True,
        )
    if not values.get("assistant_only_loss"):
        draft.note(
            "assistant_only_loss",
            False,
            "TRL trains every token of a conversation (messages), here only the answers are; of"
            " prompt and completion both train the completion, of text every token",
        )
    if values.get("completion_only_loss") is False:
        draft.lose("completion_only_loss", False, "only completions are trained", trains=True)
    preferences.lose_given(
        values, "the loss is cross-entropy here", "loss_type", draft, off=("nll", "chunked_nll")
    )
    preferences.lose_given(values, "part of a loss on preferences", _OF_PREFERENCES, draft)


def _method(values: dict[str, Any], draft: Draft) -> None:
    if not values.get("use_peft"):
        draft.values["finetuning"] = "full"
        draft.values.pop("lora_dropout")
        return
    draft.values |= {
        "finetuning": "lora",
        "lora_r": values["lora_r"],
        "lora_alpha": values["lora_alpha"],
    }
    names = {
        "use_rslora": "use_rslora",
        "use_dora": "use_dora",
        "lora_modules_to_save": "modules_to_save",
    }
    adapters.beyond_plain(values, names, draft)
    modules = values.get("lora_target_modules")
    draft.values["lora_target_modules"] = (
        targets(modules, "all-linear") if modules else ["q_proj", "v_proj"]
    )
    if not modules:
        draft.note(
            "lora_target_modules",
            "not set",
            "written are peft's own of most models: q_proj, v_proj",
        )
    for name in ("load_in_4bit", "load_in_8bit"):
        if values.get(name):
            bits = 4 if name == "load_in_4bit" else 8
            adapters.quantization(
                name, bits, draft, value=True, form=values.get("bnb_4bit_quant_type")
            )


def _data(values: dict[str, Any], draft: Draft) -> None:
    sources = values.get("datasets") or [
        {"path": values.get("dataset_name"), "name": values.get("dataset_config")}
    ]
    text, entries = values["dataset_text_field"], []
    for source in sources:
        path = source.get("data_files") or source.get("path")
        if not path:
            raise ConfigError("the run names no data", "dataset_name", "add it")
        for key in ("name", "data_dir", "columns", "fraction"):
            if source.get(key):
                draft.lose(
                    f"{path}: {key}",
                    source[key],
                    "write the records that are meant to a file of their own",
                    trains=True,
                )
        if source.get("split", values["dataset_train_split"]) != "train":
            draft.lose(
                f"{path}: split",
                source.get("split", values["dataset_train_split"]),
                "the split train is read",
                trains=True,
            )
        for one in path if isinstance(path, list) else [path]:
            entries.append({"path": one, "columns": {"text": text}} if text != "text" else one)
    draft.values["data"] = entries
    if share := values.get("test_split_size"):
        split(share, "test_split_size", draft)
    elif values.get("eval_strategy", "no") != "no":
        name = values.get("dataset_test_split", "test")
        kind = "folder" if os.path.isdir(str(entries[0])) else "data set"
        draft.lose(
            "dataset_test_split", name, f"name the {kind}'s test file as valid_data", trains=False
        )


TOOL = Tool(
    "trl",
    "TRL",
    OPTIONS,
    DEFAULTS,
    finish,
    starts={
        start: {"trainer": name}
        for name in (*_TRAINERS, "grpo", "rloo", "reward")
        for start in (
            ("trl", name),
            (f"trl/scripts/{name}.py",),
            *([(f"{name}.py",)] if name in _TRAINERS else []),
        )
    },
    aliases={"torch_dtype": "dtype", "max_seq_length": "max_length"},
    nulls={**hugging_face.NULLS, "max_length": None, "gradient_checkpointing": False},
)
