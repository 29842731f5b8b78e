"""Supervised fine-tuning: `accelerate launch -m finetune.sft --config ds_configs/zero3.json`, or `finetune.run(cfg)`.

Reads top to bottom in the order things happen: resolve, check, prepare data (before any process group), decide where to
start, then build and train.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config import RunConfig
from finetune.config_file import Resolved, check_paths, format_config, resolve, resolve_object, to_yaml
from finetune.device import LaunchWorld, launch_world, prepare_environment, probe_torch_npu
from finetune.errors import ConfigError, FinetuneError, raise_problems
from finetune.orphans import die_with_launcher
from finetune.results import RunResult, exit_with
from finetune.runlog import setup_console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.batching.sampler import GlobalBatches
    from finetune.data.dataset import Samples
    from finetune.training.session import Resume, Session

logger = logging.getLogger("finetune")

# Settings that make a run this run, besides its data and schedule. What only executes it (devices, micro-batch,
# packing, ZeRO stage, checkpointing) is not among them, and may change when a run goes on.
IDENTITY_SETTINGS = (
    "model",
    "finetuning",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "global_batch_size",
    "seed",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "lr_scheduler",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: flags in, exit code out. `--help` and `--print-config` need no torch."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    world = launch_world()
    setup_console(world.rank)
    return exit_with(world, lambda: _command(arguments, world))


def _command(arguments: Sequence[str], world: LaunchWorld) -> RunResult | None:
    resolved = resolve(arguments, world_size=world.world_size)
    if resolved.print_config:
        if world.is_main:
            print(format_config(resolved))
        return None
    return train(resolved, world)


def run(config: RunConfig | Mapping[str, Any] | str | Path) -> RunResult:
    """Fine-tune from a RunConfig, a dict of its settings, or the path of a configuration file.

    Returns:
        The output folder, state, steps and metrics.

    Raises:
        FinetuneError: with what is wrong, where, and the fix.
    """
    world = launch_world()
    setup_console(world.rank)
    return train(resolve_object(config, world_size=world.world_size), world)


def train(resolved: Resolved, world: LaunchWorld) -> RunResult:
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
    raise_problems([*check_paths(config), *missing_packages(config)])

    from finetune import device as devices
    from finetune.training.session import Session, decide_resume

    device_type = devices.choose_device_type(config.device_type)
    devices.check_local_ranks(device_type, world)
    dtype = devices.choose_dtype(config.dtype, device_type)
    data = prepare_data(config)
    output_dir = Path(config.output_dir)
    start = decide_resume(
        output_dir,
        config.resume,
        data.identity,
        total_steps=data.batches.total_steps,
        allow_change=config.allow_data_change,
    )
    if start is None:
        logger.info("this run is finished: %s holds its output; choose another --output-dir for a new run", output_dir)
        return RunResult(output_dir, "done", data.batches.total_steps)
    session = Session(
        output_dir,
        world,
        identity=data.identity,
        config_yaml=to_yaml(config),
        start=start,
        log_samples=config.log_samples,
    )
    with session:
        return _train(config, world, data, start, session, device_type, dtype)


def missing_packages(config: RunConfig) -> list[FinetuneError]:
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


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before a model or a process group exists."""

    tokenizer: PreTrainedTokenizerBase
    train: Samples
    valid: Samples | None
    batches: GlobalBatches
    level_names: tuple[str, ...]
    stages: tuple[float, ...]
    packing: bool
    identity: dict[str, Any]


def prepare_data(config: RunConfig) -> Prepared:
    """Tokenizer, samples, and the list of global batches, with the checks that need no weights."""
    from finetune.batching.curriculum import build_schedule
    from finetune.batching.sampler import GlobalBatches, count_steps
    from finetune.data.dataset import prepare_samples
    from finetune.data.templates import load_tokenizer
    from finetune.modeling.attention import can_pack
    from finetune.modeling.pretrained import check_embeddings, check_lora_targets, check_weights, load_model_config

    model_config = load_model_config(config.model, trust_remote_code=config.trust_remote_code)
    tokenizer = load_tokenizer(config.model, template=config.template, trust_remote_code=config.trust_remote_code)
    check_embeddings(model_config, tokenizer, config.model)
    check_weights(config.model)
    if config.finetuning == "lora":
        check_lora_targets(model_config, config.lora_target_modules, trust_remote_code=config.trust_remote_code)
    levels = config.curriculum.levels if config.use_curriculum else None
    train, valid = (
        prepare_samples(
            paths,
            tokenizer,
            cutoff_len=config.cutoff_len,
            levels=levels,
            difficulty_field=config.difficulty_field,
            on_bad_row=config.on_bad_row,
            cache_dir=config.cache_dir,
            num_proc=config.preprocessing_num_workers,
        )
        if paths
        else None
        for paths in (config.data, config.valid_data)
    )
    schedule, level_ids = build_schedule(config, train.levels, train.row_ids)
    total_steps = count_steps(len(train), config.global_batch_size, config.num_epochs, config.max_steps)
    batches = GlobalBatches(level_ids, schedule, config.global_batch_size, total_steps, config.curriculum_seed)
    for name, samples in batches.unused.items():
        logger.warning("level %s has weight 0 in every stage: its %d samples are not trained on", name, samples)
    packing = config.packing
    if packing and not can_pack(model_config):
        logger.warning(
            "documents are not known to stay apart in packed rows of a %s model: packing is off (fix: --packing false)",
            model_config.model_type,
        )
        packing = False
    return Prepared(
        tokenizer=tokenizer,
        train=train,
        valid=valid,
        batches=batches,
        level_names=levels if levels and (train.levels >= 0).any() else (),
        stages=tuple(stage.until for stage in schedule.stages),
        packing=packing,
        identity=_identity(config, train, batches),
    )


def _identity(config: RunConfig, train: Samples, batches: GlobalBatches) -> dict[str, Any]:
    """What makes this run this run, as plain JSON."""
    identity: dict[str, Any] = {"kind": "sft", **{name: getattr(config, name) for name in IDENTITY_SETTINGS}}
    if config.finetuning == "lora":
        targets = config.lora_target_modules
        identity["lora_target_modules"] = targets if isinstance(targets, str) else list(targets)
    return identity | {
        "total_steps": batches.total_steps,
        "data": train.fingerprint,
        "schedule": batches.fingerprint(),
    }


def _train(
    config: RunConfig, world: LaunchWorld, data: Prepared, start: Resume, session: Session, device_type: str, dtype: str
) -> RunResult:
    from finetune.training.build_sft import build_trainer
    from finetune.training.run import execute
    from finetune.training.session import process_group

    with process_group(device_type, world, config.timeout_seconds):
        session.joined()
        trainer = build_trainer(config, world, data, start, session, device_type=device_type, dtype=dtype)
        return execute(trainer, session)


if __name__ == "__main__":
    sys.exit(main())
