"""The merge itself; `self_test` then checks that what was written answers as the adapter did.

The base model is in memory once. Logits are taken with the adapter on, then the adapter is added to
the weights in place. The result is written, dropped, and read again by plain transformers, so the
test covers the files.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.commands.merge.model_card import rounding_text, write_card
from finetune.commands.merge.options import MergeOptions
from finetune.commands.merge.self_test import (
    TEMPLATE_NAME,
    TOLERANCES,
    Rounding,
    SelfTest,
    agreement,
    check_logits,
    check_tokenizer,
    distance,
    load_written,
    logits,
    self_test_prompts,
)
from finetune.errors import ConfigError
from finetune.inference.loading import (
    Source,
    check_fit,
    end_ids,
    load_tokenizer_of,
    load_weights,
    trained_on,
    with_adapter,
)
from finetune.modeling.model_config import load_model_config, warn_of_text_alone
from finetune.modeling.pretrained import DTYPES
from finetune.runtime import device as devices
from finetune.storage import durable_files

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger("finetune")

SHARD_SIZE = "5GB"


def merge_into(folder: Path, source: Source, options: MergeOptions, *, name: str) -> SelfTest:
    """Write the merged model, its tokenizer and its card, which calls it `name`, into an empty
    folder.

    Raises:
        ConfigError, DataError: files that do not fit, or an adapter that cannot be merged.
        FinetuneError: the self-test failed.
    """
    assert source.adapter is not None
    trust = options.trust_remote_code
    device = torch.device(devices.choose_device_type(options.device_type))
    tokenizer = load_tokenizer_of(source, options.template, trust_remote_code=trust)
    base_dtype = _dtype_of(source.base, trust)
    dtype = base_dtype if options.dtype == "auto" else options.dtype
    # A sum in 16 bits is already rounded: another dtype gets the sum in float32, rounded once.
    sum_dtype = base_dtype if dtype == base_dtype else "float32"
    rounded, before = _quantization(source, options)
    load = partial(
        load_weights, Source(source.base, None), device, sum_dtype, trust_remote_code=trust
    )
    base = load(rounded=rounded)
    check_fit(base, tokenizer, source)
    warn_of_text_alone(base, load_model_config(source.base, trust_remote_code=trust))
    _check_space(folder, base, DTYPES[dtype], files=2 if options.format == "gguf" else 1)
    prompts = self_test_prompts(base, tokenizer)
    logger.info("adding %s to %s", source.adapter, source.base)
    adapted_logits, effect = _write_merged(
        folder, base, tokenizer, source.adapter, prompts, DTYPES[dtype]
    )
    del base
    gc.collect()
    devices.empty_cache(device)
    rounding = None
    if before != "none":
        other_base = load(rounded="none" if rounded != "none" else before)
        other = with_adapter(other_base, source.adapter).eval()
        other_logits = logits(other, prompts)
        del other
        difference = distance(other_logits, adapted_logits)
        rounding = Rounding(before, rounded, difference, agreement(other_logits, adapted_logits))
        logger.info("%s", rounding_text(rounding))
    trained_with = source.adapter / TEMPLATE_NAME if options.template is None else None
    texts = check_tokenizer(folder, tokenizer, trained_with, trust_remote_code=trust)
    logger.info("self-test: loading the merged model and comparing it with the adapter")
    written = load_written(
        folder, dtype=DTYPES[dtype], use_safetensors=True, trust_remote_code=trust
    )
    written_logits = logits(written.to(device), prompts)
    test = SelfTest(
        prompts=len(prompts),
        tokens=sum(map(len, prompts)),
        difference=distance(written_logits, adapted_logits),
        tolerance=TOLERANCES[dtype],
        effect=effect,
        agreement=agreement(written_logits, adapted_logits),
        texts=texts,
        rounding=rounding,
    )
    check_logits(test, dtype)
    write_card(
        folder,
        source,
        name=name,
        dtype=dtype,
        test=test,
    )
    return test


def _write_merged(
    folder: Path,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapter: Path,
    prompts: Sequence[Sequence[int]],
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], float]:
    """Merge in place and save. Return the adapted model's logits before that, and how far they are
    from the base's.
    """
    # The head is its own from here on, for the base's logits as well: they stay what they were.
    tied = base.config.get_text_config().tie_word_embeddings
    adapted = _adapted(base, adapter)
    adapted_logits = logits(adapted, prompts)
    with adapted.disable_adapter():
        effect = distance(logits(adapted, prompts), adapted_logits)
    if effect == 0:
        logger.warning(
            "the adapter changes no logit: the merged model will be its base (fix: name a trained"
            " adapter)"
        )
    merged = _merge(adapted, adapter).to(dtype)
    if tied:
        _tie_again(merged)
    merged.config.dtype = dtype
    eos = merged.config.get_text_config().eos_token_id
    merged.generation_config.eos_token_id = list(end_ids(tokenizer, merged.generation_config, eos))
    merged.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)
    return adapted_logits, effect


def _quantization(source: Source, options: MergeOptions) -> tuple[str, str]:
    """Return how the base's weights are rounded before the adapter is added, and how they were in
    the adapter's run, if known.

    Raises:
        ConfigError: bitsandbytes is needed and not installed.
    """
    assert source.adapter is not None
    known = trained_on(source.adapter)
    rounded = known if options.quantization == "auto" else options.quantization
    if (known, rounded) != ("none", "none") and find_spec("bitsandbytes") is None:
        raise ConfigError(
            "bitsandbytes is not installed", "--quantization", "pip install bitsandbytes"
        )
    return rounded, known if known != "none" else rounded


def _dtype_of(base: str, trust_remote_code: bool) -> str:
    """Return the dtype of the base's weights.

    Raises:
        ConfigError: quantized weights, to which nothing can be added.
    """
    config = load_model_config(base, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "the base model's weights are quantized: an adapter cannot be added to them exactly",
            base,
            "give --model the model that the quantized one was made from",
        )
    named = str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")
    return named if named in DTYPES else "float32"


def _check_space(folder: Path, model: PreTrainedModel, dtype: torch.dtype, files: int) -> None:
    """Raise ConfigError if there is no disk space for the weights.

    With GGUF they exist twice for a while.
    """
    needed = files * sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    free = durable_files.free_bytes(folder)
    if needed > free:
        raise ConfigError(
            f"the merged model takes {durable_files.format_bytes(needed)},"
            f" {durable_files.format_bytes(free)} are free",
            "--output-dir",
            "free some space, or choose a folder on another disk",
        )


# ---------------------------------------------------------------- adapter and base


def _adapted(base: PreTrainedModel, adapter: Path) -> PeftModel:
    """Return the base with the adapter inside it.

    If the adapter changes one of two tied embeddings, untie them first: added to a shared weight,
    its change would come out at the other end too.
    """
    config = base.config.get_text_config()
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    with _quiet():
        adapted = with_adapter(base, adapter)
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = adapted.peft_config["default"].peft_type.value
        raise ConfigError(
            f"an adapter of kind {kind} cannot be merged", str(adapter), "serve it as an adapter"
        )
    if tied and (
        base.get_output_embeddings() is not head or base.get_input_embeddings() is not embedding
    ):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        config.tie_word_embeddings = base.config.tie_word_embeddings = False
    return adapted.eval()


def _merge(adapted: PeftModel, adapter: Path) -> PreTrainedModel:
    try:
        with _quiet():
            # Not safe_merge: it rounds the change to the base's dtype before adding. Numbers that
            # are not finite are found by the self-test.
            return adapted.merge_and_unload()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"the adapter cannot be merged: {str(error).splitlines()[0]}",
            str(adapter),
            "serve it as an adapter",
        ) from error


def _tie_again(merged: PreTrainedModel) -> None:
    """Let head and embedding be one weight again if the adapter changed both in the same way."""
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
        config = merged.config
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = True


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress peft's warning about tied embeddings, which `_adapted` unties."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Model with `tie_word_embeddings=True`")
        yield
