"""The settings of a run on preferences: defaults by loss, and which kind a file is of."""

from __future__ import annotations

import pytest

from finetune.config.kinds import kind_of_arguments, run_kind
from finetune.config.preference_config import PreferenceConfig
from finetune.config.resolution import resolve, resolve_object, to_yaml
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError

NEEDED = ["--model", "m", "--data", "d.jsonl", "--output-dir", "out"]


def made(flags: str = "") -> PreferenceConfig:
    return resolve([*NEEDED, *flags.split()], world_size=1, model_class=PreferenceConfig).config


def test_defaults_follow_from_the_loss():
    for flags, expected in (
        ("", {"loss": "dpo", "beta": 0.1, "learning_rate": 5e-6, "sft_weight": 0.0}),
        ("--loss orpo", {"beta": 0.1, "learning_rate": 8e-5, "sft_weight": 1.0}),
        ("--loss simpo", {"beta": 2.0, "simpo_gamma": 1.0, "learning_rate": 5e-6}),
        ("--loss simpo --beta 10", {"simpo_gamma": 5.0}),
        # a microbatch has room for both answers
        ("--micro-batch-size 2 --cutoff-len 100", {"tokens_per_microbatch": 400}),
        ("--micro-batch-size 2 --cutoff-len 100 --loss kto", {"tokens_per_microbatch": 200}),
    ):
        config = made(flags)
        assert {name: getattr(config, name) for name in expected} == expected


def test_the_best_is_of_what_evaluations_have():
    keep = "--valid-data v --eval-steps 2 --keep-best --best-metric"
    for metric in ("loss", "accuracy", "margin/explain"):
        assert made(f"{keep} {metric}").followed_metric == f"eval_{metric}"
    levels = "loss, loss/explain, loss/reasoning, loss/topology"
    for flags, known in (
        (f"{keep} exact_match", f"take one of {levels}, accuracy, accuracy/explain, "),
        (f"{keep} accuracy --loss kto", f"take one of {levels}"),
    ):
        with pytest.raises(ConfigError, match="which no evaluation has") as refused:
            made(flags)
        assert refused.value.fix.startswith(known) and "exact_match" not in refused.value.fix


def test_what_is_refused():
    with pytest.raises(ConfigError, match="answers nothing while it trains"):
        made("--eval-generate 5 --valid-data d.jsonl")
    for flags, words in (
        ("--global-batch-size 1", "mismatches the samples"),
        ("--sft-weight 1", "sft_weight is of pairs"),
        ("--desirable-weight 0 --undesirable-weight 0", "both weights of kto are 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            made(f"--loss kto {flags}")


def test_which_kind_a_file_is_of(tmp_path):
    """A file may name its kind: if every setting is at its default, nothing else tells."""
    path = tmp_path / "run.yaml"
    arguments = ["--config", str(path)]
    named = "kind: dpo\nmodel: m\ndata: d.jsonl\noutput_dir: out\n"
    config = made("--loss ipo")
    for text, expected in ((to_yaml(config), config), (named, made())):
        path.write_text(text)
        assert resolve_object(path, 1, PreferenceConfig).config == expected
        assert kind_of_arguments(arguments).config_class is PreferenceConfig
        assert kind_of_arguments(arguments, RunConfig).config_class is PreferenceConfig
    with pytest.raises(ConfigError, match=r"kind is 'dpo'(.|\n)*this is python -m finetune\.sft"):
        resolve_object(path, 1, RunConfig)
    assert run_kind(config).config_class is PreferenceConfig
    assert kind_of_arguments(["--train-data-path", "t.bin"], RunConfig).config_class is RunConfig
