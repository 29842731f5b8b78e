"""Prepare a run: what is known before its process group and its model exist. Conversations and
preferences; texts are in pretraining/prepare.py.

Nothing is written, and no weights are read. Settings may still say auto here. Those that decide
what is trained are decided by the model's configuration and the number of samples, and returned in
`PreparedRun.decided`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.config.fields import source_names
from finetune.config.paths import split_revision
from finetune.config.preference_config import LOSSES, PreferenceConfig
from finetune.config.run_config import RunConfig, adapter_identity, check_device
from finetune.errors import DataError
from finetune.planning.learning_defaults import learning_defaults

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


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """What is known about a run before its process group and its model exist.

    Attributes:
        identity: what identifies the run, in JSON form.
        batches: the list of global batches.
        train: the training samples, with `lengths`.
        valid: the validation samples; None without.
        tokenizer: None if the run has none.
        model_config: transformers' configuration of the model.
        decided: what auto became, of the settings that decide what is trained.
        ask: answers validation prompts at each evaluation and scores the answers; None if
            evaluations generate nothing.
    """

    identity: dict[str, Any]
    batches: Any
    train: Any
    valid: Any = None
    tokenizer: PreTrainedTokenizerBase | None = None
    model_config: PretrainedConfig | None = None
    decided: Mapping[str, Any] = field(default_factory=dict)
    ask: Callable[..., dict[str, float]] | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedConversations(PreparedRun):
    """What is known about a run that starts from a model and its tokenizer.

    Attributes:
        trained_token_ids: tokens whose embeddings are trained with an adapter.
        source_names: of the training data; empty if it is not mixed.
        valid_source_names: empty if there is one source.
    """

    batches: GlobalBatches
    train: Samples
    valid: Samples | None
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    trained_token_ids: tuple[int, ...] = ()
    difficulty_names: tuple[str, ...] = ()
    source_names: tuple[str, ...] = ()
    valid_source_names: tuple[str, ...] = ()
    packing: bool = False
    padding_id: int = 0


def prepare_fine_tuning(
    config: RunConfig, begun: Mapping[str, Any] | None = None
) -> PreparedConversations:
    return _prepare(config, begun, {"kind": "sft"})


def prepare_preferences(
    config: PreferenceConfig, begun: Mapping[str, Any] | None = None
) -> PreparedConversations:
    settings = ("loss", "beta", *LOSSES[config.loss].settings)
    own = {"kind": "dpo", **{name: getattr(config, name) for name in settings}}
    return _prepare(config, begun, own)


def _prepare(
    config: RunConfig, begun: Mapping[str, Any] | None, identity: dict[str, Any]
) -> PreparedConversations:
    """Read tokenizer and samples and make the list of global batches.

    Args:
        begun: the identity of the resumed run, whose values auto keeps; None for a new run.
        identity: what identifies this run, in addition to what all such runs record.
    """
    from finetune.batching.curriculum import build_schedule
    from finetune.batching.mixing import mix_of, source_warnings
    from finetune.batching.sampler import GlobalBatches, count_steps
    from finetune.data.dataset import samples_of
    from finetune.data.encoding.templates import load_tokenizer
    from finetune.modeling import model_config as models
    from finetune.modeling.attention import can_pack
    from finetune.modeling.pretrained import check_model
    from finetune.runtime.device import choose_device_type

    model_config = check_model(config)
    check_device(config, choose_device_type(config.device_type))
    packing = config.packing and can_pack(model_config)
    if config.packing and not packing:
        logger.warning(
            "documents are not known to stay apart in packed sequences of a %s model: packing is"
            " off (fix: --packing false)",
            model_config.model_type,
        )
    tokenizer = load_tokenizer(
        config.model, template=config.template, trust_remote_code=config.trust_remote_code
    )
    trained_token_ids: tuple[int, ...] = ()
    if config.finetuning == "lora":
        trained_token_ids = _trained_token_ids(config, tokenizer)
    difficulties = config.curriculum.levels if config.use_curriculum else None
    train = samples_of(config, tokenizer, difficulties)
    valid = samples_of(config, tokenizer, difficulties, "valid") if config.validates else None
    padding_id = models.padding_id(model_config, tokenizer)
    models.warn_of_missing_embeddings(model_config, tokenizer)
    for samples in filter(None, (train, valid)):
        models.check_ids(model_config, samples, tokenizer)
    difficulty_names = difficulties if difficulties and train.report.difficulty_field_found else ()
    _check_metric(config.best_metric, valid, difficulty_names)

    learning = learning_defaults(
        config, width=models.width(model_config), samples=len(train), begun=begun
    )
    if learning.reason:
        logger.info("%s", learning.reason)
    batch_size = learning.values.get("global_batch_size", config.global_batch_size)
    mix = mix_of(config.sources, train.source_starts)
    valid_source_names = source_names(config.held_out) if len(config.held_out) > 1 else ()
    schedule, difficulty_ids = build_schedule(config, train.difficulties, train.record_ids)
    total_steps = count_steps(len(train), batch_size, config.num_epochs, config.max_steps)
    batches = GlobalBatches(
        difficulty_ids,
        schedule,
        batch_size,
        total_steps,
        config.curriculum_seed,
        mix=mix,
        by_difficulty=train.by_difficulty,
    )
    for warning in source_warnings(batches.source_draws()):
        logger.warning("%s", warning)
    for name, unused in batches.unused.items():
        logger.warning(
            "difficulty %s has weight 0 in every stage: its %d samples are not trained on",
            name,
            unused,
        )

    for name in IDENTITY_SETTINGS:
        identity[name] = learning.values.get(name, getattr(config, name))
    weights = models.weights_identity(config.model)
    identity["model"] = split_revision(config.model)[0]  # its commit is in "weights"
    if config.optimizer != "adamw":
        identity["optimizer"] = config.optimizer
    if config.finetuning == "lora":
        targets = config.lora_target_modules
        identity["lora_target_modules"] = targets if isinstance(targets, str) else list(targets)
        identity |= adapter_identity(config)
    identity |= {
        "total_steps": total_steps,
        "data": train.fingerprint,
        "schedule": batches.fingerprint(),
        "weights": weights,
    }
    return PreparedConversations(
        identity=identity,
        batches=batches,
        train=train,
        valid=valid,
        tokenizer=tokenizer,
        model_config=model_config,
        decided=learning.values,
        trained_token_ids=trained_token_ids,
        difficulty_names=difficulty_names,
        source_names=() if mix is None else mix.names,
        valid_source_names=valid_source_names,
        packing=packing,
        padding_id=padding_id,
    )


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


def _trained_token_ids(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens whose embeddings are trained with an adapter; warn if answers must end with
    a token that the adapter cannot teach.
    """
    from finetune.data.encoding.render import trained_end_ids
    from finetune.modeling.untrained_tokens import trained_token_ids, untrained_tokens

    ends = trained_end_ids(tokenizer)
    taught: list[int] = []
    if config.train_tokens:
        taught = trained_token_ids(config.model, tokenizer, config.train_tokens, ends)
    if config.train_tokens == ("auto",):
        named = ", ".join(str(tokenizer.convert_ids_to_tokens(token)) for token in taught)
        logger.info(
            "train_tokens auto: %s",
            named or "none found, the tokens that end answers are all trained",
        )
    if "lm_head" not in (*config.lora_target_modules, *config.modules_to_save):
        untrained = untrained_tokens(config.model, tokenizer, ends) or ()
        missing = [
            token for token in untrained if tokenizer.convert_tokens_to_ids(token) not in taught
        ]
        if missing:
            logger.warning(
                "%s was never trained in this base model: its head cannot tell it from other"
                " unused tokens, so answers will not end well (fix: --train-tokens auto,"
                " --finetuning full, or --lora-target-modules with lm_head among the names)",
                " and ".join(missing),
            )
    return tuple(taught)
