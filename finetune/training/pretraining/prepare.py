"""Prepare a pretraining run: token streams, windows, global batches, and the model's shape."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.config.paths import split_revision
from finetune.config.pretrain_config import PretrainConfig
from finetune.errors import ConfigError, DataError
from finetune.training.prepare import PreparedRun

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from finetune.batching.sampler import GlobalBatches
    from finetune.data.corpus.windows import JoinedWindows, Windows

logger = logging.getLogger("finetune")

# Settings that make a run this run, besides its data and the order of it.
IDENTITY_SETTINGS = (
    "arch",
    "depth",
    "max_seq_len",
    "total_batch_size",
    "seed",
    "optimizer",
    "matrix_lr",
    "embedding_lr",
    "unembedding_lr",
    "learning_rate",
    "lr_scale",
    "lr_scaling",
    "warmup_steps",
    "lr_scheduler",
    "warmdown_ratio",
    "final_lr_fraction",
    "weight_decay",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
# And besides those where a model is continued.
CONTINUED_SETTINGS = ("model", "finetuning")
ADAPTER_SETTINGS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")


@dataclass(frozen=True, kw_only=True)
class PreparedTexts(PreparedRun):
    """What is known about a run on texts.

    Attributes:
        bytes_per_token: int `(vocabulary,)`, for bits per byte; None without a tokenizer.
    """

    batches: GlobalBatches
    train: Windows | JoinedWindows
    valid: Windows | None
    model_config: PretrainedConfig
    bytes_per_token: np.ndarray | None

    @property
    def passes(self) -> float:
        """Number of passes of the run through the training tokens."""
        return self.batches.total_steps * self.batches.global_batch_size / len(self.train)


def prepare_pretraining(config: PretrainConfig) -> PreparedTexts:
    """Tokenizer, token streams, windows and global batches, with the checks that need no
    weights.
    """
    from finetune.data.corpus.token_shards import TokenShards
    from finetune.data.corpus.tokenizer import bytes_per_token, tokenizer_hash, vocabulary_of
    from finetune.data.corpus.windows import JoinedWindows, Windows, training_windows
    from finetune.modeling.scratch import scratch_config

    if config.wandb_project is not None:
        os.environ["WANDB_PROJECT"] = config.wandb_project
    model_config, tokenizer = _continued(config) if config.model else (None, _tokenizer(config))
    size = config.vocab_size or (None if tokenizer is None else vocabulary_of(tokenizer))
    known: dict[str, Any] = {
        "vocab_size": size,
        "tokenizer_hash": None if tokenizer is None else tokenizer_hash(tokenizer),
        "embeddings": None if model_config is None else model_config.get_text_config().vocab_size,
    }
    train = training_windows(config, **known)
    streams = [
        part.stream for part in (train.parts if isinstance(train, JoinedWindows) else (train,))
    ]
    valid = None
    if config.valid_data_path:
        limit = max(1, config.eval_tokens // config.max_seq_len)
        valid_stream = TokenShards(config.valid_data_path, split="val", **known)
        valid = Windows(valid_stream, config.max_seq_len, limit=limit, name="--valid-data-path")
    if len(train) < config.global_batch_size:
        raise DataError(
            f"the training data are {len(train):,} windows of {config.max_seq_len:,} tokens, fewer"
            f" than the {config.global_batch_size:,} of one global batch"
            f" ({config.total_batch_size:,} tokens)",
            "--train-data-path",
            f"give more data, or a --total-batch-size of at most {len(train) * config.max_seq_len}",
        )
    vocabulary = max(*(stream.headers[0].vocabulary for stream in streams), size or 0)
    if model_config is None:
        model_config = scratch_config(
            config.arch,
            config.depth,
            vocab_size=vocabulary,
            max_seq_len=config.max_seq_len,
            bos_token_id=getattr(tokenizer, "bos_token_id", None),
            eos_token_id=getattr(tokenizer, "eos_token_id", None),
        )
    batches = _global_batches(config, train, _total_steps(config, model_config))
    return PreparedTexts(
        tokenizer=tokenizer,
        model_config=model_config,
        train=train,
        valid=valid,
        batches=batches,
        bytes_per_token=None if tokenizer is None else bytes_per_token(tokenizer),
        identity=_identity(config)
        | {
            "vocabulary": vocabulary,
            "total_steps": batches.total_steps,
            "data": (
                streams[0].fingerprint
                if len(streams) == 1
                else [stream.fingerprint for stream in streams]
            ),
            "schedule": batches.fingerprint(),
        },
    )


def _continued(config: PretrainConfig) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Configuration and tokenizer of the model that is continued, with the checks that need no
    weights.
    """
    from finetune.data.encoding.templates import read_tokenizer
    from finetune.modeling.model_config import warn_of_missing_embeddings
    from finetune.modeling.pretrained import check_model

    assert config.model is not None
    model_config = check_model(config)
    tokenizer = read_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    warn_of_missing_embeddings(model_config, tokenizer)
    longest = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if longest and config.max_seq_len > longest:
        raise ConfigError(
            f"max_seq_len is {config.max_seq_len}, and the model was made for at most {longest}"
            " tokens",
            "--max-seq-len",
            f"give at most {longest}",
        )
    return model_config, tokenizer


def _global_batches(
    config: PretrainConfig, train: Windows | JoinedWindows, total_steps: int
) -> GlobalBatches:
    """Return the global batches. After every step each weighted source's share is within one window
    of its weight.
    """
    import numpy as np

    from finetune.batching.curriculum import Schedule, Stage, uniform_schedule
    from finetune.batching.sampler import GlobalBatches
    from finetune.data.corpus.windows import JoinedWindows

    schedule, sources = uniform_schedule(), np.zeros(len(train), dtype=np.int64)
    if config.data_weights:
        # By number and not by path: a folder that was moved is the same source.
        names = tuple(f"source {number}" for number in range(1, len(config.data_weights) + 1))
        assert isinstance(train, JoinedWindows)
        schedule = Schedule(names, (Stage(1.0, source_weights(config, train)),))
        sources = train.sources
    return GlobalBatches(sources, schedule, config.global_batch_size, total_steps, config.seed)


def source_weights(config: PretrainConfig, train: JoinedWindows) -> tuple[float, ...]:
    """Return the weights of the entries as numbers; `natural` is the number of windows."""
    pairs = zip(config.data_weights, train.parts, strict=True)
    return tuple(float(len(part)) if weight == "natural" else weight for weight, part in pairs)


def _identity(config: PretrainConfig) -> dict[str, Any]:
    # The same form as in runs that were started before best-fit windows existed.
    identity: dict[str, Any] = {
        "kind": "pretrain",
        "document_aligned": config.windows == "document",
    }
    if config.windows == "best-fit":
        identity["windows"] = config.windows
    if config.model is None:
        if config.lr_scaling:
            identity["lr_batch_exponent"] = config.lr_batch_exponent
        return identity | {name: getattr(config, name) for name in IDENTITY_SETTINGS}
    from finetune.modeling.model_config import weights_identity

    names: tuple[str, ...] = IDENTITY_SETTINGS + CONTINUED_SETTINGS
    if config.finetuning == "lora":
        names += ADAPTER_SETTINGS
    identity |= {name: getattr(config, name) for name in names}
    identity["model"] = split_revision(config.model)[0]  # its commit is in "weights"
    return identity | {"weights": weights_identity(config.model)}


def _tokenizer(config: PretrainConfig) -> PreTrainedTokenizerBase | None:
    from finetune.data.corpus.token_shards import tokenizer_folder
    from finetune.data.corpus.tokenizer import open_tokenizer

    folder = config.tokenizer or tokenizer_folder(config.train_data_path, split="train")
    if folder is None:
        logger.warning(
            "no tokenizer: no bits per byte, no samples, and the result has none. Fix: --tokenizer"
            " FOLDER, or prepare the data with python -m finetune prepare, which puts one beside"
            " the token files"
        )
        return None
    return open_tokenizer(folder)


def _total_steps(config: PretrainConfig, model_config: PretrainedConfig) -> int:
    """num_iterations, or as many as the tokens that the ratio asks for."""
    if config.num_iterations is not None:
        return config.num_iterations
    from finetune.modeling.scratch import make_empty_model
    from finetune.planning.traffic import matrix_parameters

    parameters = matrix_parameters(make_empty_model(model_config))
    steps = max(
        1, math.floor(config.target_param_data_ratio * parameters / config.total_batch_size)
    )
    logger.info(
        "%d steps: %g tokens for each of %s parameters",
        steps,
        config.target_param_data_ratio,
        f"{parameters:,}",
    )
    return steps
