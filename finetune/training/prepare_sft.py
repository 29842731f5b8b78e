"""What fine-tuning knows before a model or a process group exists: tokenizer, samples, global
batches.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.adapter_config import adapter_identity
from finetune.config.fields import source_names
from finetune.config.paths import split_revision
from finetune.config.run_config import RunConfig, check_device
from finetune.errors import DataError
from finetune.planning.learning_defaults import learning_defaults
from finetune.training.resume import identity_begun

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from finetune.batching.sampler import GlobalBatches
    from finetune.data.dataset import Samples

logger = logging.getLogger("finetune")

# Settings that make a run this run, besides its data and schedule. What only executes it (devices,
# micro-batch, packing, ZeRO stage, checkpointing) is not among them, and may change when a run is
# resumed.
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


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before a model or a process group exists."""

    tokenizer: PreTrainedTokenizerBase
    train: Samples
    valid: Samples | None
    batches: GlobalBatches
    difficulty_names: tuple[str, ...]
    source_names: tuple[str, ...]  # of the training data; empty where it is not mixed
    valid_source_names: tuple[str, ...]  # empty where there is one
    stages: tuple[float, ...]
    packing: bool
    padding_id: int
    identity: dict[str, Any]
    # What is in place of auto, of the settings that decide what is trained.
    derived: Mapping[str, Any] = field(default_factory=dict)


def prepare_data(config: RunConfig) -> Prepared:
    """Tokenizer, samples, and the list of global batches, with the checks that need no weights."""
    return prepare_with(config, {"kind": "sft"})


def prepare_with(config: RunConfig, identity: dict[str, Any]) -> Prepared:
    """The same of any run that starts from a model and its tokenizer.

    Args:
        identity: what makes the run this run, besides what all such runs have in theirs.
    """
    from finetune.data.dataset import samples_of
    from finetune.data.encoding.templates import load_tokenizer
    from finetune.modeling import model_config as models
    from finetune.runtime.device import choose_device_type

    model_config = models.load_model_config(
        config.model, trust_remote_code=config.trust_remote_code
    )
    tokenizer = load_tokenizer(
        config.model, template=config.template, trust_remote_code=config.trust_remote_code
    )
    models.check_unquantised(model_config)
    device_type = choose_device_type(config.device_type)
    check_device(config, device_type)
    models.check_weights(config.model)
    if config.finetuning == "lora":
        models.check_adapter(model_config, config)
        _warn_of_untrained_stops(config, tokenizer)
    difficulties = config.curriculum.levels if config.use_curriculum else None
    train = samples_of(config, tokenizer, difficulties)
    valid = samples_of(config, tokenizer, difficulties, "valid") if config.validates else None
    for prepared in filter(None, (train, valid)):
        models.check_ids(model_config, prepared, tokenizer)
    models.warn_of_missing_embeddings(model_config, tokenizer)
    learning = learning_defaults(
        config,
        width=models.width(model_config),
        samples=len(train),
        begun=identity_begun(Path(config.output_dir), config.resume),
    )
    if learning.reason:
        logger.info("%s", learning.reason)
    config = config.model_copy(update=learning.values)
    batches = _global_batches(config, train)
    difficulty_names = difficulties if difficulties and train.report.difficulty_field_found else ()
    _check_metric(config.best_metric, valid, difficulty_names)
    return Prepared(
        tokenizer=tokenizer,
        train=train,
        valid=valid,
        batches=batches,
        difficulty_names=difficulty_names,
        source_names=() if batches.mix is None else batches.mix.names,
        valid_source_names=source_names(config.held_out) if len(config.held_out) > 1 else (),
        stages=tuple(stage.until for stage in batches.schedule.stages),
        packing=_packs(config, model_config),
        padding_id=models.padding_id(model_config, tokenizer),
        identity=identity
        | _identity(config, train, batches)
        | {"weights": models.weights_identity(config.model)},
        derived=learning.values,
    )


def _global_batches(config: RunConfig, train: Samples) -> GlobalBatches:
    """The list of global batches. Warns of samples that it takes often, or never."""
    from finetune.batching.curriculum import build_schedule
    from finetune.batching.mixing import mix_of, source_warnings
    from finetune.batching.sampler import GlobalBatches, count_steps

    schedule, difficulty_ids = build_schedule(config, train.difficulties, train.record_ids)
    batches = GlobalBatches(
        difficulty_ids,
        schedule,
        config.samples_per_step,
        count_steps(len(train), config.samples_per_step, config.num_epochs, config.max_steps),
        config.curriculum_seed,
        mix=mix_of(config.sources, train.source_starts),
        by_difficulty=train.by_difficulty,
    )
    for warning in source_warnings(batches.source_draws()):
        logger.warning("%s", warning)
    for name, samples in batches.unused.items():
        logger.warning(
            "difficulty %s has weight 0 in every stage: its %d samples are not trained on",
            name,
            samples,
        )
    return batches


def _packs(config: RunConfig, model_config: PretrainedConfig) -> bool:
    from finetune.modeling.attention import can_pack

    if config.packing and not can_pack(model_config):
        logger.warning(
            "documents are not known to stay apart in packed sequences of a %s model: packing is"
            " off (fix: --packing false)",
            model_config.model_type,
        )
        return False
    return config.packing


def _check_metric(metric: str, valid: Samples | None, difficulty_names: tuple[str, ...]) -> None:
    """Raise DataError where the best evaluation is that of a difficulty, and no evaluation has
    it.
    """
    kind, _, name = metric.partition("/")
    # whether there are answers is seen where they are asked for
    if valid is None or not name or kind == "exact_match":
        return
    if (
        name not in difficulty_names
        or not (valid.difficulties == difficulty_names.index(name)).any()
    ):
        raise DataError(
            f"no validation record is of difficulty {name!r}, so no evaluation has {metric}",
            "--best-metric",
            "add such records to --valid-data, or take another metric",
        )


def _warn_of_untrained_stops(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn where answers must end with a token that LoRA, as asked for, cannot teach."""
    from finetune.data.encoding.render import trained_end_ids
    from finetune.modeling.untrained_tokens import untrained_tokens

    taught = token_ids(config, tokenizer)
    if config.train_tokens == ("auto",):
        named = ", ".join(str(tokenizer.convert_ids_to_tokens(token)) for token in taught)
        logger.info(
            "train_tokens auto: %s",
            named or "none found, the tokens that end answers are all trained",
        )
    if "lm_head" in (*config.lora_target_modules, *config.modules_to_save):
        return
    untrained = untrained_tokens(config.model, tokenizer, trained_end_ids(tokenizer)) or ()
    if missing := [
        token for token in untrained if tokenizer.convert_tokens_to_ids(token) not in taught
    ]:
        logger.warning(
            "%s was never trained in this base model: its head cannot tell it from other unused"
            " tokens, so answers will not end well (fix: --train-tokens auto, --finetuning full, or"
            " --lora-target-modules with lm_head among the names)",
            " and ".join(missing),
        )


def token_ids(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens whose embeddings are trained beside an adapter."""
    from finetune.data.encoding.render import trained_end_ids
    from finetune.modeling.untrained_tokens import trained_token_ids

    if not config.train_tokens or config.trains_all_weights:
        return []
    return trained_token_ids(
        config.model, tokenizer, config.train_tokens, trained_end_ids(tokenizer)
    )


def _identity(config: RunConfig, train: Samples, batches: GlobalBatches) -> dict[str, Any]:
    """What makes this run this run, as plain JSON."""
    identity: dict[str, Any] = {name: getattr(config, name) for name in IDENTITY_SETTINGS}
    identity["model"] = split_revision(config.model)[0]  # its commit is in "weights"
    if config.optimizer != "adamw":
        identity["optimizer"] = config.optimizer
    if config.finetuning == "lora":
        targets = config.lora_target_modules
        identity["lora_target_modules"] = targets if isinstance(targets, str) else list(targets)
        identity |= adapter_identity(config)
    return identity | {
        "total_steps": batches.total_steps,
        "data": train.fingerprint,
        "schedule": batches.fingerprint(),
    }
