"""Runs on preferences of other tools: the loss and its settings, the data, and what is named."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from converted_runs import (
    AXOLOTL,
    DIFFERS,
    EXAMPLE,
    SWIFT_KEYS,
    TRAINED,
    TRL,
    cases,
    converted,
    section,
)

from finetune.config.preference_config import PreferenceConfig
from finetune.errors import ConfigError

# As examples/train_lora/qwen3_lora_dpo.yaml of LLaMA-Factory has it.
LLAMA_FACTORY = {**EXAMPLE, "stage": "dpo", "dataset": "dpo_en_demo", "learning_rate": 5.0e-6}
LLAMA_FACTORY |= {"pref_beta": 0.1, "pref_loss": "sigmoid"}
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
PAIRS = {"path": "owner/pairs", "type": "chat_template.default", "field_messages": "conversation"}
PAIRS |= {"field_chosen": "chosen", "field_rejected": "rejected"}
PAIRS |= {"message_property_mappings": {"role": "role", "content": "content"}}
AXOLOTL_DPO = {**AXOLOTL, "sample_packing": False, "rl": "dpo", "datasets": [PAIRS]}
PREFERRED = {"llamafactory": LLAMA_FACTORY, "trl": TRL, "axolotl": AXOLOTL_DPO}
PREFERRED["ms-swift"] = {**SWIFT_KEYS, "loss_scale": "last_round", "rlhf_type": "dpo"}
KTO = {"stage": "kto", "dataset": "kto_en_demo"}


def preferred(capsys: Any, tool: str, changes: dict[str, Any] | str) -> tuple[Any, str]:
    run = changes if isinstance(changes, str) else {**PREFERRED[tool], **changes}
    config, text = converted(run, capsys, "--from", tool)
    assert isinstance(config, PreferenceConfig)
    written = yaml.safe_load(text)
    assert written["kind"] == "dpo" and config.beta == written["beta"], "what decides is written"
    assert "python -m finetune.dpo --config THIS_FILE" in text.splitlines()[0]
    mean = "over the tokens of all chosen answers" in section(text, DIFFERS)
    assert mean == bool(written.get("sft_weight"))
    return config, text


# What a run says -> what is written.
LOSSES = """
llamafactory {} -> {loss: dpo, beta: 0.1, sft_weight: 0, label_smoothing: 0, global_batch_size: 8}
llamafactory {pref_ftx: 0.5, dpo_label_smoothing: 0.1} -> {sft_weight: 0.5, label_smoothing: 0.1}
llamafactory {pref_loss: orpo, pref_ftx: 0.25} -> {loss: orpo, sft_weight: 1.25}
llamafactory {pref_loss: simpo, simpo_gamma: 1.4} -> {simpo_gamma: 1.4}
llamafactory {stage: kto, dataset: kto_en_demo, kto_rejected_weight: 0.3} -> {undesirable_weight: 0.3}
trl {beta: 0.3} -> {loss: dpo, beta: 0.3, learning_rate: 1.0e-6}
trl {beta: 0.1, loss_type: [sigmoid, sft], loss_weights: [1, 0.2]} -> {loss: dpo, sft_weight: 0.2}
trl {beta: 0.1, loss_type: [sft, sigmoid]} -> {loss: dpo, sft_weight: 1}
trl {desirable_weight: 1.5} -> {loss: kto, desirable_weight: 1.5, undesirable_weight: 1}
trl {loss_type: simpo, simpo_gamma: 1.6, beta: 2.5, cpo_alpha: 0} -> {simpo_gamma: 1.6, beta: 2.5}
trl {trainer: orpo, beta: 0.2} -> {loss: orpo, beta: 0.2, sft_weight: 1}
ms-swift {loss_type: ipo, beta: 0.5} -> {loss: ipo, beta: 0.5}
ms-swift {loss_type: [sigmoid, sft], rpo_alpha: 0.5} -> {sft_weight: 1.5}
ms-swift {rlhf_type: simpo} -> {loss: simpo, beta: 2, simpo_gamma: 1, sft_weight: 1}
ms-swift {rlhf_type: simpo, simpo_gamma: 0.5, cpo_alpha: 0} -> {simpo_gamma: 0.5, sft_weight: 0}
ms-swift {rlhf_type: kto, undesirable_weight: 0.2, tuner_type: full} -> {undesirable_weight: 0.2}
axolotl {rl_beta: 0.3, dpo_label_smoothing: 0.1} -> {beta: 0.3, label_smoothing: 0.1}
axolotl {trl: {beta: 0.4}, rl_beta: 0.3} -> {beta: 0.4}
axolotl {dpo_loss_type: [sigmoid, sft], dpo_loss_weights: [1, 0.5]} -> {sft_weight: 0.5}
axolotl {rl: orpo, orpo_alpha: 0.2} -> {loss: orpo, beta: 0.2, sft_weight: 1}
axolotl {rl: simpo, rl_beta: 2.5, simpo_gamma: 1} -> {simpo_gamma: 1, beta: 2.5, sft_weight: 1}
axolotl {rl: kto, kto_desirable_weight: 0.5} -> {desirable_weight: 0.5, undesirable_weight: 1}
"""
# What a run says -> why it is refused.
REFUSED = """
llamafactory {pref_loss: hinge} -> has no counterpart
llamafactory {dataset: identity} -> holds no rankings
llamafactory {stage: sft, dataset: own_pairs} -> holds rankings
trl {beta: 0.1, loss_type: [sigmoid, ipo]} -> the losses here are dpo, ipo
trl {trainer: cpo} -> has no counterpart
trl {max_completion_length: 512, num_generations: 8} -> num_generations belongs to a run on rewards
trl {beta: 0.1, max_completion_length: 512} -> cannot be told which
trl {loss_type: ipo, cpo_alpha: 0.5} -> loss_type ipo has no counterpart
trl {trainer: orpo, loss_type: sigmoid} -> loss_type sigmoid .of orpo. has no counterpart
ms-swift {loss_type: hinge} -> has no counterpart
ms-swift {beta: 0} -> beta is 0
axolotl {rl: grpo} -> rl grpo has no counterpart
"""
# What a run says -> which of TRL's trainers it is taken for, and the loss.
GUESSED = """
trl {beta: 0.1, loss_type: sigmoid, max_completion_length: 512} -> dpo dpo
trl {loss_type: simpo, max_completion_length: 512} -> cpo simpo
trl {undesirable_weight: 0.5} -> kto kto
trl {loss_type: nll} -> sft none
"""


@cases(LOSSES)
def test_losses(capsys: Any, tool, changes, becomes) -> None:
    (config, text), expected = preferred(capsys, tool, changes), yaml.safe_load(becomes)
    assert {name: getattr(config, name) for name in expected} == expected
    assert not any(name in text for name in ("field_", "loss_scale"))
    assert "pref_" not in section(text, TRAINED)
    if tool == "axolotl":
        assert config.sources[0].columns == {"messages": "conversation"}


def test_by_command_line(capsys: Any) -> None:
    config, text = preferred(capsys, "trl", TRL_DPO)
    assert (config.loss, config.beta, config.lora_r, config.cutoff_len) == ("dpo", 0.1, 32, 1024)
    assert (config.global_batch_size, config.max_steps, config.lora_dropout) == (16, 1000, 0.0)
    assert "assistant_only_loss" not in text
    assert "lora_dropout 0.05: 0 is written" in section(text, DIFFERS)
    config, _ = preferred(capsys, "trl", f"{TRL_DPO} --disable_dropout false")
    assert config.lora_dropout == 0.05
    words = "--model_name_or_path m --dataset_name d.jsonl --output_dir o"
    config, _ = preferred(capsys, "trl", f"trl kto {words}")
    assert (config.loss, config.learning_rate, config.finetuning) == ("kto", 1e-6, "full")
    with pytest.raises(ConfigError, match="trl grpo has no counterpart"):
        converted(f"trl grpo {words}", capsys)
    _, text = converted(f"trl sft {words} --beta 0.1", capsys)
    assert "beta 0.1: part of a loss on preferences" in section(text, TRAINED)
    assert "taken for" not in text
    config, text = preferred(capsys, "ms-swift", SWIFT)
    assert (config.beta, config.sft_weight, config.learning_rate) == (0.1, 0.1, 1e-4)
    assert config.global_batch_size == 16 and config.hub == "modelscope"
    assert config.lora_dropout == 0 and "rlhf_type" not in text and "rpo_alpha" not in text


def test_data(capsys: Any) -> None:
    for changes, columns in (
        ({}, None),
        ({"dataset": "own_pairs"}, {"chosen": "better", "rejected": "worse"}),
        (KTO, None),
    ):
        config, _ = preferred(capsys, "llamafactory", changes)
        assert [source.columns for source in config.sources] == [columns]
    form = {"field_prompt": "q", "field_chosen": "good", "prompt_format": "[INST] {prompt}"}
    entries = [
        {"path": "Intel/orca_dpo_pairs", "type": "chatml.intel", "split": "train"},
        {"path": "own.jsonl", "type": form},
        {"path": "odd", "type": "bradley_terry.chat_template", "revision": "v1"},
    ]
    config, text = preferred(capsys, "axolotl", {"datasets": entries})
    columns = [source.columns for source in config.sources]
    assert columns == [{"prompt": "question"}, {"prompt": "q", "chosen": "good"}, None]
    differs = "dataset Intel/orca_dpo_pairs: type chatml.intel: the tokenizer's chat template"
    assert differs in section(text, DIFFERS)
    named = ("own.jsonl: prompt_format [INST]", "odd: type bradley_terry", "odd: revision v1")
    assert all(f"dataset {name}" in section(text, TRAINED) for name in named)


MORE = {
    "llamafactory": {"pref_bco_weight": 0.2, "ld_alpha": 0.5, "ref_model": "b", "new_option": 3},
    "trl": {"beta": 0.1, "ld_alpha": 0.4, "f_divergence_type": "x", "use_weighting": True},
    "ms-swift": {"ld_alpha": 0.5, "ref_adapters": ["a"]},
    "axolotl": {"dpo_use_weighting": True},
}


def test_what_they_have_more(capsys: Any) -> None:
    for tool, changes in MORE.items():
        _, text = preferred(capsys, tool, changes)
        for name in changes.keys() - {"beta"}:
            assert f"#   {name} " in section(text, TRAINED), (tool, name)
    for tool, changes, words in (
        ("llamafactory", {**KTO, "pref_ftx": 1.0}, "pref_ftx 1.0: kto has no cross-entropy"),
        ("trl", {"beta": 0.1, "sync_ref_model": True}, "sync_ref_model true"),
        ("axolotl", {"trl": {"sync_ref_model": True}}, "trl: sync_ref_model true"),
    ):
        assert words in section(preferred(capsys, tool, changes)[1], TRAINED)
    _, text = converted({**SWIFT_KEYS, "loss_type": "cross"}, capsys)
    assert "loss_type cross: the loss is cross-entropy here" in section(text, TRAINED)
    _, text = preferred(capsys, "trl", {"beta": 0.1, "label_smoothing": 0.2, "loss_type": ["ipo"]})
    assert "label_smoothing 0.2: TRL 1.16 reads it" in section(text, DIFFERS)
    for tool, changes in (
        ("llamafactory", {"ref_model": EXAMPLE["model_name_or_path"]}),
        ("ms-swift", {"ref_model": "m"}),
        ("trl", {"beta": 0.1, "f_divergence_type": "reverse_kl"}),
    ):
        assert list(changes)[-1] not in preferred(capsys, tool, changes)[1], "what happens anyway"
    both = {"beta": 0.1, "loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 0.1]}
    config, text = preferred(capsys, "trl", both)
    assert config.sft_weight == pytest.approx(0.2)
    assert "weight of sigmoid 0.5" in section(text, TRAINED)


@cases(GUESSED)
def test_what_trainer_of_trl_is_guessed_is_said(convert, tool, changes, becomes) -> None:
    (config, text), (trainer, loss) = convert(tool, changes), becomes.split()
    assert getattr(config, "loss", "none") == loss
    assert f"taken for a run of trl {trainer};" in section(text, DIFFERS)


@cases(REFUSED)
def test_what_is_trained_otherwise_is_refused(capsys: Any, tool, changes, becomes) -> None:
    with pytest.raises(ConfigError, match=becomes):
        converted({**PREFERRED[tool], **changes}, capsys, "--from", tool)
