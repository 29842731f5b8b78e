"""Supervised fine-tuning: `accelerate launch -m finetune.sft --config ds_configs/zero3.json`, or
`finetune.run(cfg)`.

The order in which things happen is in training/run.py; what fine-tuning prepares is in
training/prepare_sft.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.config.kinds import RunKind
from finetune.config.paths import check_paths
from finetune.config.run_config import RunConfig
from finetune.runtime.language import N_, _
from finetune.training.results import RunResult
from finetune.training.run import run_command, run_config


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: flags in, exit code out. `--help` and `--print-config` need no torch."""
    return run_command(KIND, arguments)


def run(config: RunConfig | Mapping[str, Any] | str | Path) -> RunResult:
    """Fine-tune from a RunConfig, a dict of its settings, or the path of a configuration file.

    Returns:
        The output folder, state, steps and metrics.

    Raises:
        FinetuneError: with what is wrong, where, and the fix.
    """
    return run_config(KIND, config)


def _describe(settings: Mapping[str, Any]) -> str:
    if not settings.get("model"):
        return ""
    return _("{model}, {how}").format(model=settings["model"], how=settings.get("finetuning"))


KIND = RunKind(
    name="sft",
    module="finetune.sft",
    title=N_("fine-tuning"),
    config_class=RunConfig,
    telling_settings=frozenset(),
    check=check_paths,
    describe=_describe,
    prepare="finetune.training.prepare_sft:prepare_data",
    build_trainer="finetune.training.build_sft:build_trainer",
    shape="finetune.planning.inputs:shape_of_base_model",
    workload="finetune.planning.inputs:fine_tuning_workload",
    probe="finetune.commands.doctor.data_probe:probe_sft",
    probed=("model", "tokenizer", "data"),
    rehearsal="finetune.commands.doctor.rehearsals:fine_tuning",
    ask="finetune.commands.evaluate.while_training:ask",
)


if __name__ == "__main__":
    sys.exit(main())
