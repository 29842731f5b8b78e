"""A run of any kind, from the command line (or from Python) to its exit code. The steps, in order:

1. `run_command` or `run_config`: resolve the settings (config/resolution.py)
2. `_check`: what can be seen without torch: paths, packages, the environment
3. the kind's `prepare` (prepare.py, pretraining/prepare.py): tokenizer, samples, the list of global
  batches; it decides those settings of auto that decide what is trained
4. `decide_resume` (resume.py): where the run starts. Until here nothing is written; what is wrong
  is refused
5. `Session` (session.py): the run folder's lock, identity and logs
6. `execute` (execute.py): the process group, the final settings, the kind's `build` (build.py,
  pretraining/build.py), the loop of transformers.Trainer (trainer.py, executor.py), the output,
  the status
7. `_exit_code`

A kind of run is a `RunKind` (finetune/sft.py, finetune/pretrain.py, finetune/dpo.py).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.config.base_config import BaseConfig
from finetune.config.kinds import RunKind, run_kind
from finetune.config.resolution import Resolved, format_config, resolve, resolve_object, to_yaml
from finetune.errors import INTERRUPTED, ConfigError, ExitCode, FinetuneError, raise_problems
from finetune.runtime.launch_environment import (
    LaunchWorld,
    import_bitsandbytes,
    launch_world,
    prepare_environment,
    probe_torch_npu,
)
from finetune.runtime.parent_watchdog import die_with_launcher
from finetune.storage import durable_files
from finetune.storage.run_folder import read_status
from finetune.storage.run_log import setup_console, success
from finetune.training.results import RunResult, check_evaluated, ended_early

logger = logging.getLogger("finetune")

# An elastic launcher ends all workers as soon as one exits. If every rank is refused, local rank 0
# prints the error and the others wait this long so that it is not lost. A rank that is still alive
# afterwards was refused alone, or has no such launcher, and prints the error itself.
QUIET_RANK_SECONDS = 3.0


def run_command(kind: RunKind, arguments: Sequence[str] | None) -> int:
    """Run the command: flags in, exit code out. `--help` and `--print-config` need no torch."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    world = launch_world()
    setup_console(world.rank)
    return _exit_code(world, lambda: _run_arguments(kind, arguments, world))


def _run_arguments(kind: RunKind, arguments: Sequence[str], world: LaunchWorld) -> RunResult | None:
    if not world.launched:
        kind.start_processes(arguments)
    resolved = resolve(arguments, world_size=world.world_size, model_class=kind.config_class)
    if resolved.print_config:
        if world.is_main:
            sys.stdout.write(format_config(resolved) + "\n")
        return None
    with durable_files.explain_full_disk(str(resolved.config.output_dir)):
        return _run(kind, resolved, world)


def run(config: BaseConfig | Mapping[str, Any] | str | Path) -> RunResult:
    """Run from a configuration object, a dict of settings, or the path of a configuration file.

    Args:
        config: the configuration. Its `kind` decides the kind of run; without one its class or its
            setting names do, and the default is fine-tuning.

    Returns:
        The output folder, state, steps and metrics.

    Raises:
        FinetuneError: with what is wrong, where, and the fix.

    >>> import finetune
    >>> result = finetune.run({"model": "data_samples/tiny-qwen3",
    ...                        "data": "data_samples/train.jsonl",
    ...                        "output_dir": "runs/example", "max_steps": 2, "device_type": "cpu"})
    >>> result.state, result.steps, sorted(result.metrics)[:2]
    ('done', 2, ['grad_norm', 'learning_rate'])
    """
    return run_config(run_kind(config), config)


def run_config(kind: RunKind, config: BaseConfig | Mapping[str, Any] | str | Path) -> RunResult:
    """Run from a configuration object, a dict of settings, or the path of a configuration file."""
    world = launch_world()
    setup_console(world.rank)
    resolved = resolve_object(config, world.world_size, kind.config_class)
    with _unchanged_environment(), durable_files.explain_full_disk(str(resolved.config.output_dir)):
        return _run(kind, resolved, world)


@contextlib.contextmanager
def _unchanged_environment() -> Iterator[None]:
    """Put the environment back as it was: another run in this process must not take our RANK for a
    launcher's.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _run(kind: RunKind, resolved: Resolved, world: LaunchWorld) -> RunResult:
    """Steps 2 to 6."""
    die_with_launcher(world)
    _check(kind, resolved, world)

    # torch is loaded from here on: the checks above answer without waiting for it.
    with _collector_paused():
        from finetune.modeling.hub import with_model_found
        from finetune.runtime import device as devices
        from finetune.training.resume import decide_resume, identity_begun
        from finetune.training.session import Session
    requested = with_model_found(resolved.config)
    device_type = devices.choose_device_type(requested.device_type)
    devices.check_local_ranks(device_type, world)
    dtype = devices.choose_dtype(requested.dtype, device_type)
    backend = devices.choose_backend(getattr(requested, "backend", "auto"), device_type)
    data = kind.prepare(requested, identity_begun(Path(requested.output_dir), requested.resume))
    decided = {
        "device_type": device_type,
        "dtype": dtype,
        **data.decided,
    }
    total_steps = data.batches.total_steps
    check_evaluated(requested, total_steps)
    output_dir = Path(requested.output_dir)
    # Rank 0 may have started this very run by now.
    resume = requested.resume if world.is_main or requested.resume != "never" else "auto"
    session = Session(
        output_dir,
        world,
        identity=data.identity,
        config_yaml=to_yaml(resolved.config, data.decided),
        decide=lambda damaged: decide_resume(
            output_dir,
            resume,
            data.identity,
            total_steps=total_steps,
            allow_change=requested.allow_data_change,
            damaged=damaged,
            is_enough=partial(ended_early, requested),
        ),
        log_samples=requested.log_samples,
    )
    if session.start is None:
        logger.info(
            "this run is finished: %s holds its output; choose another --output-dir for a new run",
            output_dir,
        )
        status = read_status(output_dir) or {}
        # fewer than total_steps after early stopping
        return RunResult(output_dir, "done", status.get("step", total_steps))
    with session:
        # The libraries that build a model take seconds to load; a locked or foreign folder is
        # refused before that.
        with _collector_paused():
            import_bitsandbytes()  # transformers' Trainer imports peft
            from finetune.training.execute import execute
        return execute(kind, requested, decided, data, session, backend=backend)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """While libraries are imported: they make a million objects that stay, and looking for garbage
    among them, again and again, is a fifth of the time that the imports take.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check(kind: RunKind, resolved: Resolved, world: LaunchWorld) -> None:
    """Say what was noted while resolving, prepare the environment, and refuse what can be seen to
    be wrong.
    """
    config = resolved.config
    for note in resolved.notes:
        probably_wrong = note.startswith("warning: ")
        logger.log(
            logging.WARNING if probably_wrong else logging.INFO,
            "%s",
            note.removeprefix("warning: "),
        )
    probe_torch_npu()
    for line in prepare_environment(
        world,
        use_deepspeed=bool(config.deepspeed),
        timeout_seconds=config.timeout_seconds,
        npu_variables=config.npu_variables,
    ):
        logger.info("environment: %s", line)
    raise_problems([*kind.check(config), *_missing_packages(config)])


def _missing_packages(config: BaseConfig) -> list[FinetuneError]:
    """Packages that this configuration needs and that are not installed."""
    trackers = () if config.report_to == "auto" else config.report_to
    needed: dict[str, str] = {name: f"--report-to {name}" for name in trackers if name != "none"}
    if config.deepspeed:
        needed["deepspeed"] = "the configuration has DeepSpeed keys"
    if (quantization := getattr(config, "quantization", "none")) != "none":
        needed["bitsandbytes"] = f"--quantization {quantization}"
    if getattr(config, "optimizer", "") == "adamw-8bit":
        needed["bitsandbytes"] = "--optimizer adamw-8bit"
    return [
        ConfigError(f"{name} is not installed", where=why, fix=f"pip install {name}")
        for name, why in needed.items()
        if find_spec(name) is None
    ]


def _exit_code(world: LaunchWorld, run: Callable[[], RunResult | None]) -> int:
    """Run, and turn the outcome into an exit code; known errors become a message without a
    traceback.
    """
    try:
        result = run()
    except FinetuneError as error:
        if world.local_rank != 0:
            time.sleep(QUIET_RANK_SECONDS)
        of_rank = f"rank {world.rank}: " if world.local_rank else ""
        sys.stderr.write(f"[ERROR] {of_rank}{error}\n")
        sys.stderr.flush()
        return int(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("[ERROR] interrupted before training began\n")
        return INTERRUPTED
    if result is None:
        return int(ExitCode.DONE)
    if world.is_main and result.state == "done":
        best = result.output_step not in (None, result.steps)
        made_of = f", made of step {result.output_step}, the best" if best else ""
        success(f"done: {result.steps} steps, output in {result.output_dir}{made_of}")
    return int(result.exit_code)
