"""Runs on preferences of other tools: the loss and its settings, the data, and what is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from converted_runs import AXOLOTL, DIFFERS, EXAMPLE, SWIFT_KEYS, TRAINED, TRL, converted, section

from finetune.config.preference_config import PreferenceConfig
from finetune.errors import ConfigError

# As examples/train_lora/qwen3_lora_dpo.yaml of LLaMA-Factory has it.
LLAMA_FACTORY = {
    **EXAMPLE,
    "stage": "dpo",
    "pref_beta": 0.1,
    "pref_loss": "sigmoid",
    "dataset": "dpo_en_demo",
    "learning_rate": 5.0e-6,
    "output_dir": "saves/qwen3-4b/lora/dpo",
}
# As the command that TRL's scripts/dpo.py names for LoRA.
TRL_DPO = (
    "trl dpo --dataset_name trl-lib/ultrafeedback_binarized --model_name_or_path"
    " Qwen/Qwen2-0.5B-Instruct --learning_rate 5.0e-6 --num_train_epochs 1"
    " --per_device_train_batch_size 2 --max_steps 1000 --gradient_accumulation_steps 8"
    " --eval_strategy steps --eval_steps 50 --output_dir Qwen2-0.5B-DPO --no_remove_unused_columns"
    " --use_peft --lora_r 32 --lora_alpha 16"
)
SWIFT = (
    "NPROC_PER_NODE=2 swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora"
    " --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji --torch_dtype bfloat16 --num_train_epochs 1"
    " --learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear --max_length"
    " 2048 --output_dir output --rpo_alpha 0.1"
)
AXOLOTL_DPO = {
    **{
        name: value for name, value in AXOLOTL.items() if name not in ("datasets", "sample_packing")
    },
    "rl": "dpo",
    "datasets": [
        {
            "path": "fozziethebeat/alpaca_messages_2k_dpo_test",
            "type": "chat_template.default",
            "field_messages": "conversation",
            "field_chosen": "chosen",
            "field_rejected": "rejected",
            "message_property_mappings": {"role": "role", "content": "content"},
        }
    ],
}


def preferred(run: Any, capsys: Any, tool: str) -> tuple[PreferenceConfig, str]:
    config, text = converted(run, capsys, "--from", tool)
    assert isinstance(config, PreferenceConfig)
    written = yaml.safe_load(text)
    assert (
        written["kind"] == "dpo"
        and "python -m finetune.dpo --config THIS_FILE" in text.splitlines()[0]
    )
    assert config.beta == written["beta"], "what decides the loss is written out"
    return config, text


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {"loss": "dpo", "beta": 0.1, "sft_weight": 0.0, "label_smoothing": 0.0}),
        (
            {"pref_ftx": 0.5, "dpo_label_smoothing": 0.1},
            {"loss": "dpo", "sft_weight": 0.5, "label_smoothing": 0.1},
        ),
        ({"pref_loss": "ipo", "pref_beta": 0.2}, {"loss": "ipo", "beta": 0.2}),
        ({"pref_loss": "orpo", "pref_ftx": 0.25}, {"loss": "orpo", "sft_weight": 1.25}),
        (
            {"pref_loss": "simpo"},
            {"loss": "simpo", "beta": 0.1, "simpo_gamma": 0.5, "sft_weight": 0.0},
        ),
        ({"pref_loss": "simpo", "simpo_gamma": 1.4}, {"simpo_gamma": 1.4}),
        (
            {
                "stage": "kto",
                "dataset": "kto_en_demo",
                "kto_rejected_weight": 0.3,
                "finetuning_type": "full",
            },
            {
                "loss": "kto",
                "desirable_weight": 1.0,
                "undesirable_weight": 0.3,
                "finetuning": "full",
            },
        ),
    ],
)
def test_llama_factory(capsys: Any, changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    config, text = preferred({**LLAMA_FACTORY, **changes}, capsys, "llamafactory")
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert (config.learning_rate, config.global_batch_size) == (5e-6, 8)
    assert "pref_" not in section(text, TRAINED)
    assert ("over the tokens of all chosen answers" in section(text, DIFFERS)) == bool(
        config.sft_weight
    )


def test_the_data_of_llama_factory(capsys: Any) -> None:
    config, _ = preferred(LLAMA_FACTORY, capsys, "llamafactory")
    assert [source.columns for source in config.sources] == [None]
    config, _ = preferred({**LLAMA_FACTORY, "dataset": "own_pairs"}, capsys, "llamafactory")
    assert config.sources[0].columns == {"chosen": "better", "rejected": "worse"}
    labels = {**LLAMA_FACTORY, "stage": "kto", "dataset": "kto_en_demo"}
    assert preferred(labels, capsys, "llamafactory")[0].sources[0].columns is None
    for stage, name, words in (
        ("dpo", "identity", "holds no rankings"),
        ("sft", "own_pairs", "holds rankings"),
    ):
        with pytest.raises(ConfigError, match=words):
            converted({**LLAMA_FACTORY, "stage": stage, "dataset": name}, capsys)


def test_what_llama_factory_has_more(capsys: Any) -> None:
    more = {
        "pref_bco_weight": 0.2,
        "ld_alpha": 0.5,
        "ref_model": "other",
        "lora_dropout": 0.1,
        "new_option": 3,
    }
    config, text = preferred({**LLAMA_FACTORY, **more}, capsys, "llamafactory")
    assert config.lora_dropout == 0 and "lora_dropout 0.1: 0 is written" in section(text, DIFFERS)
    for name in ("pref_bco_weight 0.2", "ld_alpha 0.5", "ref_model other", "new_option 3"):
        assert f"#   {name}: " in section(text, TRAINED)
    _, text = preferred(
        {**LLAMA_FACTORY, "ref_model": EXAMPLE["model_name_or_path"]}, capsys, "llamafactory"
    )
    assert "ref_model" not in text
    _, text = preferred(
        {**LLAMA_FACTORY, "stage": "kto", "dataset": "kto_en_demo", "pref_ftx": 1.0},
        capsys,
        "llamafactory",
    )
    assert "pref_ftx 1.0: kto has no cross-entropy" in section(text, TRAINED)
    for changes in (
        {"pref_loss": "hinge"},
        {"pref_loss": "kto_pair"},
        {"stage": "ppo"},
        {"stage": "rm"},
    ):
        with pytest.raises(ConfigError, match="has no counterpart"):
            converted({**LLAMA_FACTORY, **changes}, capsys)


def test_trl_by_command_line(capsys: Any) -> None:
    config, text = preferred(TRL_DPO, capsys, "trl")
    assert (config.loss, config.beta, config.label_smoothing, config.sft_weight) == (
        "dpo",
        0.1,
        0.0,
        0.0,
    )
    assert (config.learning_rate, config.lora_r, config.lora_dropout, config.cutoff_len) == (
        5e-6,
        32,
        0.0,
        1024,
    )
    assert (config.global_batch_size, config.max_steps) == (16, 1000)
    assert "assistant_only_loss" not in text and "lora_dropout 0.05: 0 is written" in section(
        text, DIFFERS
    )
    config, _ = preferred(f"{TRL_DPO} --disable_dropout false", capsys, "trl")
    assert config.lora_dropout == 0.05
    config, _ = preferred(
        "trl kto --model_name_or_path m --dataset_name d.jsonl --output_dir o", capsys, "trl"
    )
    assert (config.loss, config.learning_rate, config.finetuning) == ("kto", 1e-6, "full")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"beta": 0.3}, {"loss": "dpo", "beta": 0.3, "learning_rate": 1e-6}),
        ({"beta": 0.01, "loss_type": ["ipo"]}, {"loss": "ipo", "beta": 0.01}),
        (
            {"beta": 0.1, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]},
            {"loss": "dpo", "sft_weight": 0.2},
        ),
        ({"beta": 0.1, "loss_type": ["sft", "sigmoid"]}, {"loss": "dpo", "sft_weight": 1.0}),
        (
            {"desirable_weight": 1.5, "undesirable_weight": 0.5},
            {"desirable_weight": 1.5, "undesirable_weight": 0.5},
        ),
        ({"loss_type": "kto"}, {"loss": "kto", "desirable_weight": 1.0}),
        (
            {"loss_type": "simpo", "simpo_gamma": 1.6, "beta": 2.5, "cpo_alpha": 0.0},
            {"simpo_gamma": 1.6, "beta": 2.5},
        ),
        (
            {"loss_type": "simpo", "cpo_alpha": 0.7},
            {"simpo_gamma": 0.5, "beta": 0.1, "sft_weight": 0.7},
        ),
        ({"trainer": "orpo", "beta": 0.2}, {"loss": "orpo", "beta": 0.2, "sft_weight": 1.0}),
    ],
)
def test_trl_by_yaml(capsys: Any, changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    config, _ = preferred({**TRL, **changes}, capsys, "trl")
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_what_trl_has_more(capsys: Any, folder: Path) -> None:
    more = {"beta": 0.1, "ld_alpha": 0.4, "f_divergence_type": "forward_kl", "use_weighting": True}
    more |= {
        "sync_ref_model": True,
        "label_smoothing": 0.2,
        "loss_type": ["sigmoid"],
        "precompute_ref_log_probs": True,
    }
    config, text = preferred({**TRL, **more}, capsys, "trl")
    for name in ("ld_alpha", "f_divergence_type", "use_weighting", "sync_ref_model"):
        assert f"#   {name} " in section(text, TRAINED)
    assert config.label_smoothing == 0 and "label_smoothing 0.2: TRL 1.16 reads it" in section(
        text, DIFFERS
    )
    _, text = preferred({**TRL, "beta": 0.1, "f_divergence_type": "reverse_kl"}, capsys, "trl")
    assert "f_divergence" not in text and "taken for a run of trl dpo" in section(text, DIFFERS)
    config, text = preferred(
        {**TRL, "beta": 0.1, "loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 0.1]},
        capsys,
        "trl",
    )
    assert config.sft_weight == pytest.approx(0.2) and "weight of sigmoid 0.5" in section(
        text, TRAINED
    )
    (folder / "kto.yaml").write_text(yaml.safe_dump({**TRL, "beta": 0.2}))
    config, text = preferred("trl kto --config kto.yaml", capsys, "trl")
    assert (config.loss, config.beta) == ("kto", 0.2) and "taken for" not in text
    wrong = ["hinge"], ["robust"], ["sigmoid", "ipo"], ["sft"]
    for losses in wrong:
        with pytest.raises(ConfigError, match="the losses here are dpo, ipo"):
            converted({**TRL, "beta": 0.1, "loss_type": losses}, capsys)
    for run in ({"trainer": "cpo"}, {"trainer": "kto", "loss_type": "apo_zero_unpaired"}):
        with pytest.raises(ConfigError, match="has no counterpart"):
            converted({**TRL, **run}, capsys)


def guessed(run: dict[str, Any], capsys: Any) -> tuple[Any, str]:
    config, text = converted({**TRL, **run}, capsys, "--from", "trl")
    return config, section(text, DIFFERS)


@pytest.mark.parametrize(
    ("run", "trainer", "loss"),
    [
        ({"beta": 0.1, "loss_type": "sigmoid", "max_completion_length": 512}, "dpo", "dpo"),
        ({"loss_type": "ipo"}, "dpo", "ipo"),
        ({"loss_type": "simpo"}, "cpo", "simpo"),
        ({"loss_type": "kto"}, "kto", "kto"),
        ({"undesirable_weight": 0.5}, "kto", "kto"),
        ({"loss_type": "simpo", "max_completion_length": 512}, "cpo", "simpo"),
        ({"loss_type": "nll"}, "sft", None),
        ({}, "sft", None),
    ],
)
def test_what_trainer_of_trl_is_guessed_is_said(
    capsys: Any, run: dict[str, Any], trainer: str, loss: str
) -> None:
    config, differs = guessed(run, capsys)
    assert getattr(config, "loss", None) == loss and f"taken for a run of trl {trainer};" in differs


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            {"max_completion_length": 512, "num_generations": 8},
            "num_generations belongs to a run on rewards",
        ),
        ({"beta": 0.04, "reward_funcs": ["accuracy"]}, "reward_funcs belongs to a run on rewards"),
        ({"beta": 0.1, "max_completion_length": 512}, "cannot be told which"),
        ({"loss_type": "dapo", "max_completion_length": 512}, "loss_type dapo has no counterpart"),
        ({"loss_type": "ipo", "cpo_alpha": 0.5}, "loss_type ipo has no counterpart"),
        (
            {"trainer": "orpo", "loss_type": "sigmoid"},
            "loss_type sigmoid .of orpo. has no counterpart",
        ),
    ],
)
def test_what_trl_trains_otherwise_is_refused(capsys: Any, run: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        guessed(run, capsys)


def test_trl_commands_of_other_trainers_are_refused(capsys: Any) -> None:
    words = "--model_name_or_path m --dataset_name d.jsonl --output_dir o"
    with pytest.raises(ConfigError, match="trl grpo has no counterpart"):
        converted(f"trl grpo {words}", capsys)
    _, text = converted(f"trl sft {words} --beta 0.1", capsys)
    assert "taken for" not in text and "beta 0.1: part of a loss on preferences" in section(
        text, TRAINED
    )


def test_beta_0_of_ms_swift_is_not_made_its_default(capsys: Any) -> None:
    with pytest.raises(ConfigError, match="beta is 0"):
        converted({**SWIFT_KEYS, "rlhf_type": "dpo", "beta": 0}, capsys, "--from", "ms-swift")


def test_ms_swift_by_command_line(capsys: Any) -> None:
    config, text = preferred(SWIFT, capsys, "ms-swift")
    assert (config.loss, config.beta, config.sft_weight, config.learning_rate) == (
        "dpo",
        0.1,
        0.1,
        1e-4,
    )
    assert (
        config.global_batch_size == 16 and config.hub == "modelscope" and config.lora_dropout == 0
    )
    assert "rlhf_type" not in text and "rpo_alpha" not in text


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"rlhf_type": "dpo", "label_smoothing": 0.1}, {"loss": "dpo", "label_smoothing": 0.1}),
        ({"rlhf_type": "dpo", "loss_type": "ipo", "beta": 0.5}, {"loss": "ipo", "beta": 0.5}),
        (
            {"rlhf_type": "dpo", "loss_type": ["sigmoid", "sft"], "rpo_alpha": 0.5},
            {"sft_weight": 1.5},
        ),
        ({"rlhf_type": "orpo"}, {"loss": "orpo", "beta": 0.1, "sft_weight": 1.0}),
        (
            {"rlhf_type": "simpo"},
            {"loss": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "sft_weight": 1.0},
        ),
        (
            {"rlhf_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0},
            {"simpo_gamma": 0.5, "sft_weight": 0.0},
        ),
        (
            {"rlhf_type": "kto", "undesirable_weight": 0.2, "tuner_type": "full"},
            {"loss": "kto", "undesirable_weight": 0.2},
        ),
    ],
)
def test_ms_swift_by_yaml(capsys: Any, changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    config, text = preferred(
        {**SWIFT_KEYS, "loss_scale": "last_round", **changes}, capsys, "ms-swift"
    )
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert "loss_scale" not in text


def test_what_ms_swift_has_more(capsys: Any) -> None:
    more = {"rlhf_type": "dpo", "ld_alpha": 0.5, "ref_model": "m", "ref_adapters": ["a"]}
    _, text = preferred({**SWIFT_KEYS, **more}, capsys, "ms-swift")
    assert "ld_alpha 0.5" in section(text, TRAINED) and "ref_adapters" in section(text, TRAINED)
    assert "ref_model m" not in text
    for run in (
        {"rlhf_type": "grpo"},
        {"rlhf_type": "cpo"},
        {"rlhf_type": "dpo", "loss_type": "hinge"},
    ):
        with pytest.raises(ConfigError, match="has no counterpart"):
            converted({**SWIFT_KEYS, **run}, capsys)
    _, text = converted({**SWIFT_KEYS, "loss_type": "cross"}, capsys)
    assert "loss_type cross: the loss is cross-entropy here" in section(text, TRAINED)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {"loss": "dpo", "beta": 0.1, "sft_weight": 0.0}),
        ({"rl_beta": 0.3, "dpo_label_smoothing": 0.1}, {"beta": 0.3, "label_smoothing": 0.1}),
        ({"trl": {"beta": 0.4}, "rl_beta": 0.3}, {"beta": 0.4}),
        (
            {"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.5]},
            {"sft_weight": 0.5},
        ),
        ({"rl": "ipo"}, {"loss": "ipo", "beta": 0.1}),
        ({"rl": "orpo", "orpo_alpha": 0.2}, {"loss": "orpo", "beta": 0.2, "sft_weight": 1.0}),
        (
            {"rl": "simpo", "rl_beta": 2.5, "simpo_gamma": 1.0},
            {"simpo_gamma": 1.0, "beta": 2.5, "sft_weight": 1.0},
        ),
        ({"rl": "simpo", "cpo_alpha": 0.0}, {"simpo_gamma": 0.5, "beta": 0.1, "sft_weight": 0.0}),
        (
            {"rl": "kto", "kto_desirable_weight": 0.5},
            {"desirable_weight": 0.5, "undesirable_weight": 1.0},
        ),
    ],
)
def test_axolotl(capsys: Any, changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    config, text = preferred({**AXOLOTL_DPO, **changes}, capsys, "axolotl")
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.sources[0].columns == {"messages": "conversation"} and "field_" not in text
    assert config.lora_dropout == 0


def test_the_data_of_axolotl(capsys: Any) -> None:
    entries = [
        {"path": "Intel/orca_dpo_pairs", "type": "chatml.intel", "split": "train"},
        {
            "path": "own.jsonl",
            "type": {
                "field_prompt": "q",
                "field_chosen": "good",
                "prompt_format": "[INST] {prompt}",
            },
        },
        {"path": "odd", "type": "bradley_terry.chat_template", "revision": "v1"},
    ]
    config, text = preferred({**AXOLOTL_DPO, "datasets": entries}, capsys, "axolotl")
    columns = [source.columns for source in config.sources]
    assert columns == [{"prompt": "question"}, {"prompt": "q", "chosen": "good"}, None]
    assert (
        "dataset Intel/orca_dpo_pairs: type chatml.intel: the tokenizer's chat template"
        in section(text, DIFFERS)
    )
    for name in (
        "own.jsonl: prompt_format [INST] {prompt}",
        "odd: type bradley_terry",
        "odd: revision v1",
    ):
        assert f"dataset {name}" in section(text, TRAINED)
    more = {
        "dpo_use_weighting": True,
        "trl": {"sync_ref_model": True},
        "precompute_ref_log_probs": True,
    }
    _, text = preferred({**AXOLOTL_DPO, **more}, capsys, "axolotl")
    assert "dpo_use_weighting true" in section(
        text, TRAINED
    ) and "trl: sync_ref_model true" in section(text, TRAINED)
    for rl in ("grpo", "ebft"):
        with pytest.raises(ConfigError, match=f"rl {rl} has no counterpart"):
            converted({**AXOLOTL_DPO, "rl": rl}, capsys)
