"""Training on preferences: `python -m finetune.dpo --model ... --data pairs.jsonl --output-dir
...`.

The order in which things happen is in training/run.py. A run on preferences is built in the same
way as fine-tuning, with its own trainer (training/preferences/).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.config.preference_config import PreferenceConfig
from finetune.runtime.language import N_, _
from finetune.sft import FineTuning
from finetune.training.results import RunResult
from finetune.training.run import run_command, run_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: flags in, exit code out. `--help` and `--print-config` need no torch."""
    return run_command(KIND, arguments)


def run(config: PreferenceConfig | Mapping[str, Any] | str | Path) -> RunResult:
    """Train on preferences from a PreferenceConfig, a dict of its settings, or the path of a
    configuration file.

    Raises:
        FinetuneError: with what is wrong, where, and the fix.
    """
    return run_config(KIND, config)


class PreferenceTraining(FineTuning):
    """Training on preferences."""

    name = "dpo"
    module = "finetune.dpo"
    title = N_("training on preferences")
    config_class = PreferenceConfig
    telling_settings = frozenset(
        {
            "loss",
            "beta",
            "label_smoothing",
            "simpo_gamma",
            "sft_weight",
            "desirable_weight",
            "undesirable_weight",
        }
    )

    def describe(self, settings: Mapping[str, Any]) -> str:
        if not settings.get("model"):
            return ""
        text = _("{model}, {how}, by {loss}")
        return text.format(
            model=settings["model"], how=settings.get("finetuning"), loss=settings.get("loss")
        )

    def prepare(self, config: Any, begun: Mapping[str, Any]) -> Any:
        from finetune.training.prepare import prepare_preferences

        return prepare_preferences(config, begun)

    def build(self, config: Any, data: Any, session: Any) -> Any:
        from finetune.batching.steps import AnswerBatches
        from finetune.modeling.preference_loss import WeighedHead
        from finetune.training.build import build_fine_tuning
        from finetune.training.preferences.trainer import PreferenceTrainer

        return build_fine_tuning(
            config,
            data,
            session,
            trainer_class=PreferenceTrainer,
            batches_class=AnswerBatches,
            head_class=WeighedHead,
        )

    def workload(self, config: Any, shape: Any, cluster: Any) -> Any:
        from finetune.planning.inputs import preference_workload

        return preference_workload(config, shape, cluster)

    def rehearsal(self, folder: Path, processes: int, config: Any) -> dict[str, Any] | None:
        from finetune.commands.doctor.dry_run import rehearse_preferences

        return rehearse_preferences(folder, processes, config)


KIND = PreferenceTraining()


if __name__ == "__main__":
    sys.exit(main())
