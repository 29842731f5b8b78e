"""How a run is executed, of whatever kind: resolve, check, prepare data (before any process group), decide where to
start, then build and train. What is theirs, `sft` and
`pretrain` say with a `RunKind`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.config.kinds import RunKind
from finetune.config.resolution import Resolved, format_config, resolve, resolve_object, to_yaml
from finetune.config.run_config import BaseConfig
from finetune.errors import ConfigError, FinetuneError, raise_problems
from finetune.runtime.device import LaunchWorld, launch_world, prepare_environment, probe_torch_npu
from finetune.runtime.parent_watchdog import die_with_launcher
from finetune.storage.run_log import setup_console
from finetune.training.results import RunResult, exit_with

logger = logging.getLogger("finetune")


def run_command(kind: RunKind, arguments: Sequence[str] | None) -> int:
    """The command: flags in, exit code out. `--help` and `--print-config` need no torch."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    world = launch_world()
    setup_console(world.rank)
    return exit_with(world, lambda: _command(kind, arguments, world))


def _command(kind: RunKind, arguments: Sequence[str], world: LaunchWorld) -> RunResult | None:
    if kind.start_processes is not None and not world.launched:
        kind.start_processes(arguments)
    resolved = resolve(arguments, world_size=world.world_size, model_class=kind.config_class)
    if resolved.print_config:
        if world.is_main:
            sys.stdout.write(format_config(resolved) + "\n")
        return None
    return train(kind, resolved, world)


def run_object(kind: RunKind, config: BaseConfig | Mapping[str, Any] | str | Path) -> RunResult:
    """Run from a configuration object, a dict of settings, or the path of a configuration file."""
    world = launch_world()
    setup_console(world.rank)
    resolved = resolve_object(config, world.world_size, kind.config_class)
    with unchanged_environment():
        return train(kind, resolved, world)


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """Put the environment back as it was: another run in this process must not take our RANK for a launcher's."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def train(kind: RunKind, resolved: Resolved, world: LaunchWorld) -> RunResult:
    """Execute the run that a resolved configuration describes."""
    die_with_launcher(world)
    config = resolved.config
    for note in resolved.notes:
        probably_wrong = note.startswith("warning: ")
        logger.log(logging.WARNING if probably_wrong else logging.INFO, "%s", note.removeprefix("warning: "))
    probe_torch_npu()
    for line in prepare_environment(
        world, use_deepspeed=bool(config.deepspeed), timeout_seconds=config.timeout_seconds
    ):
        logger.info("environment: %s", line)
    raise_problems([*kind.check(config), *missing_packages(config)])

    from finetune.runtime import device as devices
    from finetune.training.session import Session, decide_resume

    device_type = devices.choose_device_type(config.device_type)
    devices.check_local_ranks(device_type, world)
    dtype = devices.choose_dtype(config.dtype, device_type)
    backend = devices.choose_backend(getattr(config, "backend", "auto"), device_type)
    data = kind.call(kind.prepare, config)
    output_dir = Path(config.output_dir)
    total_steps = data.batches.total_steps
    # Another rank may look when rank 0 has begun this very run.
    resume = config.resume if world.is_main or config.resume != "never" else "auto"
    session = Session(
        output_dir,
        world,
        identity=data.identity,
        config_yaml=to_yaml(config),
        decide=lambda: decide_resume(
            output_dir, resume, data.identity, total_steps=total_steps, allow_change=config.allow_data_change
        ),
        log_samples=config.log_samples,
    )
    if session.start is None:
        logger.info("this run is finished: %s holds its output; choose another --output-dir for a new run", output_dir)
        return RunResult(output_dir, "done", total_steps)
    with session:
        from finetune.training.execute import execute
        from finetune.training.session import process_group

        with process_group(device_type, world, config.timeout_seconds, backend):
            session.joined(config.timeout_seconds)
            trainer = kind.call(
                kind.build_trainer, config, world, data, session.start, session, device_type=device_type, dtype=dtype
            )
            return execute(trainer, session)


def missing_packages(config: BaseConfig) -> list[FinetuneError]:
    """Packages that this configuration needs and that are not installed."""
    trackers = () if config.report_to == "auto" else config.report_to
    needed = {name: f"--report-to {name}" for name in trackers if name != "none"}
    if config.deepspeed:
        needed["deepspeed"] = "the configuration has DeepSpeed keys"
    return [
        ConfigError(f"{name} is not installed", where=why, fix=f"pip install {name}")
        for name, why in needed.items()
        if find_spec(name) is None
    ]
