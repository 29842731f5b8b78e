"""Training on preferences: `python -m finetune.dpo --model ... --data pairs.jsonl --output-dir
...`.

The order in which things happen is in training/run.py; what such a run prepares and builds is in
training/preferences/.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.config.kinds import RunKind
from finetune.config.paths import check_paths
from finetune.config.preference_config import PreferenceConfig
from finetune.runtime.language import N_, _
from finetune.training.results import RunResult
from finetune.training.run import run_command, run_config


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: flags in, exit code out. `--help` and `--print-config` need no torch."""
    return run_command(KIND, arguments)


def run(config: PreferenceConfig | Mapping[str, Any] | str | Path) -> RunResult:
    """Train on preferences from a PreferenceConfig, a dict of its settings, or the path of a
    configuration file.

    Raises:
        FinetuneError: with what is wrong, where, and the fix.
    """
    return run_config(KIND, config)


def _describe(settings: Mapping[str, Any]) -> str:
    if not settings.get("model"):
        return ""
    text = _("{model}, {how}, by {loss}")
    return text.format(
        model=settings["model"], how=settings.get("finetuning"), loss=settings.get("loss")
    )


KIND = RunKind(
    name="dpo",
    module="finetune.dpo",
    title=N_("training on preferences"),
    config_class=PreferenceConfig,
    telling_settings=frozenset(
        {
            "loss",
            "beta",
            "label_smoothing",
            "simpo_gamma",
            "sft_weight",
            "desirable_weight",
            "undesirable_weight",
        }
    ),
    check=check_paths,
    describe=_describe,
    prepare="finetune.training.preferences.prepare:prepare_data",
    build_trainer="finetune.training.preferences.build:build_trainer",
    shape="finetune.planning.inputs:shape_of_base_model",
    workload="finetune.planning.inputs:preference_workload",
    probe="finetune.commands.doctor.data_probe:probe_sft",
    probed=("model", "tokenizer", "data"),
    rehearsal="finetune.commands.doctor.rehearsals:preferences",
)


if __name__ == "__main__":
    sys.exit(main())
