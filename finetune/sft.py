"""Supervised fine-tuning: `accelerate launch -m finetune.sft --config ds_configs/zero3.json`, or
`finetune.run(cfg)`.

The order in which things happen is in training/run.py; what fine-tuning prepares is in
training/prepare.py, what it builds in training/build.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from finetune.config.base_config import BaseConfig
from finetune.config.kinds import RunKind
from finetune.config.paths import check_paths
from finetune.config.run_config import RunConfig
from finetune.errors import FinetuneError
from finetune.runtime.language import N_, _
from finetune.training.results import RunResult
from finetune.training.run import run_command, run_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: flags in, exit code out. `--help` and `--print-config` need no torch."""
    return run_command(KIND, arguments)


def run(config: RunConfig | Mapping[str, Any] | str | Path) -> RunResult:
    """Fine-tune from a RunConfig, a dict of its settings, or the path of a configuration file.

    Returns:
        The output folder, state, steps and metrics.

    Raises:
        FinetuneError: with what is wrong, where, and the fix.
    """
    return run_config(KIND, config)


class FineTuning(RunKind):
    """Supervised fine-tuning."""

    name = "sft"
    module = "finetune.sft"
    title = N_("fine-tuning")
    config_class: ClassVar[type[BaseConfig]] = RunConfig
    probed = ("model", "tokenizer", "data")

    def check(self, config: RunConfig) -> Sequence[FinetuneError]:
        return check_paths(config)

    def describe(self, settings: Mapping[str, Any]) -> str:
        if not settings.get("model"):
            return ""
        return _("{model}, {how}").format(model=settings["model"], how=settings.get("finetuning"))

    def prepare(self, config: RunConfig, begun: Mapping[str, Any]) -> Any:
        from finetune.training.prepare import prepare_fine_tuning

        data = prepare_fine_tuning(config, begun)
        if not config.eval_generate:
            return data
        # Generation stands above training, which is given it.
        from finetune.commands.evaluate.while_training import ask

        return replace(data, ask=ask(config, data))

    def build(self, config: RunConfig, data: Any, session: Any) -> Any:
        from finetune.training.build import build_fine_tuning

        return build_fine_tuning(config, data, session)

    def shape(self, config: RunConfig) -> Any:
        from finetune.planning.inputs import shape_of_base_model

        return shape_of_base_model(config)

    def workload(self, config: RunConfig, shape: Any, cluster: Any) -> Any:
        from finetune.planning.inputs import fine_tuning_workload

        return fine_tuning_workload(config, shape, cluster)

    def probe(self, config: RunConfig) -> Iterator[Any]:
        from finetune.commands.doctor.data_probe import probe_sft

        return probe_sft(config)

    def rehearsal(self, folder: Path, processes: int, config: Any) -> dict[str, Any] | None:
        from finetune.commands.doctor.dry_run import rehearse_fine_tuning

        return rehearse_fine_tuning(folder, processes, config)


KIND = FineTuning()


if __name__ == "__main__":
    sys.exit(main())
