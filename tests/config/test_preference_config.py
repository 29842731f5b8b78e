"""The settings of a run on preferences: defaults by loss, what is refused, and which kind a file is
of.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_helpers import flag_table

from finetune.config.kinds import kind_of_arguments
from finetune.config.preference_config import PreferenceConfig
from finetune.config.resolution import resolve, resolve_object, to_yaml
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError

FROZEN = Path(__file__).parents[1] / "frozen" / "preference_flags.txt"
NEEDED = ["--model", "m", "--data", "d.jsonl", "--output-dir", "out"]


def made(*flags: str) -> PreferenceConfig:
    return resolve([*NEEDED, *flags], world_size=1, model_class=PreferenceConfig).config


@pytest.mark.frozen
def test_flags_are_frozen() -> None:
    """To change a flag on purpose: PYTHONPATH=tests python -c "from run_helpers import flag_table; \
    from finetune.config.preference_config import PreferenceConfig; \
    print(flag_table(PreferenceConfig), end='')" > tests/frozen/preference_flags.txt
    """
    assert flag_table(PreferenceConfig) == FROZEN.read_text()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            [],
            {
                "loss": "dpo",
                "beta": 0.1,
                "learning_rate": 5e-6,
                "sft_weight": 0.0,
                "num_epochs": 1.0,
            },
        ),
        (["--finetuning", "full"], {"learning_rate": 5e-7}),
        (["--loss", "orpo"], {"beta": 0.1, "learning_rate": 8e-5, "sft_weight": 1.0}),
        (["--loss", "orpo", "--finetuning", "full"], {"learning_rate": 8e-6}),
        (["--loss", "simpo"], {"beta": 2.0, "simpo_gamma": 1.0, "learning_rate": 5e-6}),
        (["--loss", "simpo", "--beta", "10"], {"simpo_gamma": 5.0}),
        (
            ["--loss", "kto", "--learning-rate", "1e-4"],
            {"learning_rate": 1e-4, "desirable_weight": 1.0},
        ),
    ],
)
def test_defaults_follow_from_the_loss(flags: list[str], expected: dict[str, object]):
    config = made(*flags)
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_microbatch_has_room_for_both_answers():
    sizes = ["--micro-batch-size", "2", "--cutoff-len", "100"]
    assert (
        made(*sizes).tokens_per_microbatch == 400
        and made(*sizes, "--loss", "kto").tokens_per_microbatch == 200
    )


def test_settings_of_another_loss_are_noted():
    resolved = resolve([*NEEDED, "--simpo-gamma", "1"], world_size=1, model_class=PreferenceConfig)
    assert any("not used, because loss is dpo: simpo_gamma" in note for note in resolved.notes)


def test_which_kind_a_file_is_of(tmp_path: Path):
    """What a run wrote of its settings is read as the same run, and by commands that take several
    kinds.
    """
    config = made("--loss", "ipo")
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config))
    assert resolve_object(path, 1, PreferenceConfig).config == config
    assert kind_of_arguments(["--config", str(path)]).config_class is PreferenceConfig
    assert kind_of_arguments(["--config", str(path)], RunConfig).config_class is PreferenceConfig
    assert kind_of_arguments(["--train-data-path", "t.bin"], RunConfig).config_class is RunConfig


def test_the_best_is_of_what_evaluations_have():
    keep = ["--valid-data", "v", "--eval-steps", "2", "--keep-best", "--best-metric"]
    for metric in ("loss", "accuracy", "margin/explain"):
        assert made(*keep, metric).followed_metric == f"eval_{metric}"
    for flags, known in (
        ([*keep, "exact_match"], r"take one of loss, .*, accuracy, accuracy/explain, .*, margin, "),
        (
            [*keep, "accuracy", "--loss", "kto"],
            r"take one of loss, loss/explain, loss/reasoning, loss/topology$",
        ),
    ):
        with pytest.raises(ConfigError, match="which no evaluation has") as refused:
            made(*flags)
        assert re.search(known, refused.value.fix) and "exact_match" not in refused.value.fix


def test_answers_while_it_trains_are_refused():
    with pytest.raises(ConfigError, match="answers nothing while it trains"):
        made("--eval-generate", "5", "--valid-data", "d.jsonl")


def test_a_file_may_name_its_kind(tmp_path: Path):
    """Where every setting of the loss is left at its default, nothing else tells."""
    path = tmp_path / "run.yaml"
    path.write_text("kind: dpo\nmodel: m\ndata: d.jsonl\noutput_dir: out\n")
    assert kind_of_arguments(["--config", str(path)]).config_class is PreferenceConfig
    assert resolve_object(path, 1, PreferenceConfig).config == made()
    with pytest.raises(ConfigError, match=r"kind is 'dpo'(.|\n)*this is python -m finetune\.sft"):
        resolve_object(path, 1, RunConfig)
