"""Pretraining, from scratch or continued: `torchrun --nproc_per_node 4 -m finetune.pretrain
--train-data-path ...`.

The order in which things happen is in training/run.py, what pretraining prepares in
training/pretraining/prepare.py; here is how it starts its own processes for `--distributed
--world_size N`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.config.files import given_values
from finetune.config.kinds import RunKind
from finetune.config.paths import check_pretraining_paths
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve
from finetune.errors import ConfigError, FinetuneError
from finetune.runtime.language import N_, _
from finetune.training.results import RunResult
from finetune.training.run import run_command, run_config

logger = logging.getLogger("finetune")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: flags in, exit code out. `--help` and `--print-config` need no torch."""
    return run_command(KIND, arguments)


def run(config: PretrainConfig | Mapping[str, Any] | str | Path) -> RunResult:
    """Pretrain from a PretrainConfig, a dict of its settings, or the path of a configuration file,
    in this process.

    Raises:
        FinetuneError: with what is wrong, where, and the fix.
    """
    return run_config(KIND, config)


class Pretraining(RunKind):
    """Pretraining, from scratch or continued."""

    name = "pretrain"
    module = "finetune.pretrain"
    title = N_("pretraining")
    config_class = PretrainConfig
    # Other names of pretraining may be DeepSpeed's too.
    telling_settings = frozenset(
        {
            "train_data_path",
            "train_data",
            "depth",
            "total_batch_size",
            "device_batch_size",
            "num_iterations",
        }
    )
    probed = ("tokenizer", "data")

    def start_processes(self, arguments: Sequence[str]) -> None:
        """With --distributed, replace this process by torchrun with the same arguments; else do
        nothing.

        Raises:
            ConfigError: the configuration is wrong for that many processes; reported once, here.
        """
        parsed = self.parse(arguments)
        requested = given_values(parsed, PretrainConfig)
        if requested.get("distributed") is not True or parsed.help:
            return
        count = requested.get("world_size") or _devices_here(
            str(requested.get("device_type", "auto"))
        )
        if type(count) is not int or count < 1:
            return  # not a number: refused when the settings are resolved
        if resolve(arguments, world_size=count, model_class=PretrainConfig).print_config:
            return
        torchrun = [
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={count}",
            "-m",
            "finetune.pretrain",
        ]
        logger.info("starting %d processes: python -m %s ...", count, " ".join(torchrun))
        # torchrun chooses port and store; variables that an old script exported must not override
        # it.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("WORLD_SIZE", "MASTER_PORT")
        }
        os.execve(sys.executable, [sys.executable, "-m", *torchrun, *arguments], environment)

    def check(self, config: PretrainConfig) -> Sequence[FinetuneError]:
        return check_pretraining_paths(config)

    def describe(self, settings: Mapping[str, Any]) -> str:
        if settings.get("model"):
            how = settings.get("finetuning")
            return _("{model}, {how}, pretraining continued").format(
                model=settings["model"], how=how
            )
        text = _("{arch} of depth {depth}, from scratch")
        return text.format(arch=settings.get("arch"), depth=settings.get("depth"))

    def prepare(self, config: PretrainConfig, begun: Mapping[str, Any]) -> Any:
        from finetune.training.pretraining.prepare import prepare_pretraining

        return prepare_pretraining(config)

    def build(self, config: PretrainConfig, data: Any, session: Any) -> Any:
        from finetune.training.pretraining.build import build_pretraining

        return build_pretraining(config, data, session)

    def shape(self, config: PretrainConfig) -> Any:
        from finetune.planning.inputs import shape_of_pretraining

        return shape_of_pretraining(config)

    def workload(self, config: PretrainConfig, shape: Any, cluster: Any) -> Any:
        from finetune.planning.inputs import pretraining_workload

        return pretraining_workload(config, shape, cluster)

    def planned_data(self, config: PretrainConfig) -> Any:
        from finetune.planning.inputs import token_data

        return token_data(config)

    def probe(self, config: PretrainConfig) -> Iterator[Any]:
        from finetune.commands.doctor.data_probe import probe_pretrain

        return probe_pretrain(config)

    def rehearsal(self, folder: Path, processes: int, config: Any) -> dict[str, Any] | None:
        from finetune.commands.doctor.dry_run import rehearse_pretraining

        return rehearse_pretraining(folder, processes, config)


KIND = Pretraining()


def _devices_here(requested: str) -> int:
    from finetune.runtime import device as devices
    from finetune.runtime.launch_environment import probe_torch_npu

    probe_torch_npu()
    device_type = devices.choose_device_type(requested)
    count = devices.device_count(device_type)
    if count is None:
        raise ConfigError(
            "--distributed does not say how many processes, and a CPU has no number of devices",
            "--distributed",
            "add --world-size 2",
        )
    return count


if __name__ == "__main__":
    sys.exit(main())
