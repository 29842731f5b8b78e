"""Find and load models and tokenizers: a folder, a run's output, an adapter or a hub id."""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from finetune.config.paths import is_hub_id, split_revision
from finetune.data.encoding.render import stop_token_ids
from finetune.data.encoding.templates import load_tokenizer, read_tokenizer
from finetune.errors import ConfigError, DataError
from finetune.modeling.adapter import check_adapter_file
from finetune.modeling.hub import from_modelscope
from finetune.modeling.model_config import (
    check_weights,
    load_model_config,
    warn_of_missing_embeddings,
)
from finetune.modeling.pretrained import DTYPES
from finetune.modeling.quantization import NOTE_NAME, quantized_loading
from finetune.runtime.launch_environment import import_bitsandbytes
from finetune.storage.checkpoint_files import list_checkpoints
from finetune.storage.run_folder import describe_folder
from finetune.storage.run_log import read_jsonl_tolerant

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger("finetune")


@dataclass(frozen=True)
class Source:
    """Where a model comes from: the base, and the folder of an adapter on it or None."""

    base: str
    adapter: Path | None

    @property
    def name(self) -> str:
        """A short name, without the machine's folders."""
        location = self.base if self.adapter is None else str(self.adapter)
        return Path(location).resolve().name if Path(location).expanduser().exists() else location


def find_source(model: str | None, adapter: str | None = None) -> Source:
    """Find what `--model` and `--adapter` name. A folder with an adapter means the adapter on its
    base.

    Raises:
        ConfigError: neither given, no adapter there, or its base is not to be found.
    """
    if model is None and adapter is None:
        raise ConfigError(
            "there is no model",
            "--model",
            "give --model a model's folder, the output folder of a run, or a hub id (owner/name)",
        )
    if adapter is None and model is not None and _holds_adapter(Path(model).expanduser()):
        model, adapter = None, model
    if adapter is None:
        assert model is not None
        _check_folder(Path(model).expanduser())
        return Source(from_modelscope(model), None)
    folder = Path(adapter).expanduser()
    if not _holds_adapter(folder):
        _check_folder(folder)
        folder = _downloaded_adapter(adapter)
    return Source(from_modelscope(model or _base_of(folder)), folder)


def _holds_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def _check_folder(folder: Path) -> None:
    """Raise ConfigError for a run without a result."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    checkpoints = list_checkpoints(folder)
    if checkpoints or (folder / "run.yaml").is_file():
        newest = f", or give its checkpoint {checkpoints[-1]}" if checkpoints else ""
        raise ConfigError(
            "the run is not finished: it has no model yet", str(folder), f"wait for it{newest}"
        )


def _downloaded_adapter(name: str) -> Path:
    """Return the folder of an adapter on the hub, preferably this machine's copy."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    fix = (
        "give --adapter a folder with adapter_config.json and adapter_model.safetensors, or a"
        " hub id"
    )
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # never a pickle
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError("no adapter is there (no adapter_config.json)", name, fix)
    try:
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        except LocalEntryNotFoundError:
            folder = Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError, HFValidationError) as error:
        raise ConfigError(
            f"the adapter cannot be loaded: {str(error).splitlines()[0]}", name, fix
        ) from error
    if not _holds_adapter(folder):
        raise ConfigError("no adapter is there (no adapter_config.json)", name, fix)
    return folder


def _base_of(folder: Path) -> str:
    """Return the base model that an adapter names."""
    path = folder / "adapter_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        base = settings["base_model_name_or_path"]
        if not isinstance(base, str) or not base:
            raise ValueError("it names no base model")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the adapter's settings cannot be read: {error}", str(path), "copy the adapter again"
        ) from error
    is_path = base.count("/") > 1 or base.startswith((".", "/", "~"))
    if is_path and not Path(base).expanduser().is_dir():
        raise ConfigError(
            f"the adapter's base model {base} is not here",
            str(path),
            f"name the base's folder: --model BASE --adapter {folder}",
        )
    revision = settings.get("revision")
    return f"{base}@{revision}" if revision and is_hub_id(base) else base


@dataclass(frozen=True)
class Origin:
    """The run that made a model. Settings and identity are empty if they cannot be read."""

    folder: Path
    settings: dict[str, Any]
    identity: dict[str, Any]

    def evaluations(self, up_to_step: int | None = None) -> list[dict[str, Any]]:
        """Return the run's evaluations in order; none if the log cannot be read."""
        last = math.inf if up_to_step is None else up_to_step
        found = []
        try:
            for event in read_jsonl_tolerant(self.folder / "events.jsonl"):
                step = event.get("step")
                if event.get("event") == "eval" and isinstance(step, int) and step <= last:
                    found.append(event)
        except (OSError, DataError):
            return []
        return found


def find_run(result: Path) -> Origin | None:
    """Return the run whose output folder or checkpoint this is, or None."""
    result = result.expanduser().resolve()
    for folder in (result, result.parent):
        if folder.is_dir() and (described := describe_folder(folder)).kind == "run":
            return Origin(folder, described.config or {}, described.identity or {})
    return None


def trained_on(adapter: Path) -> str:
    """Return the quantization of an adapter's base in training, from the adapter's note or its run:
    nf4, int8, or "none" if unknown.

    Raises:
        ConfigError: the note cannot be read.
    """
    note = adapter.expanduser() / NOTE_NAME
    if not note.is_file():
        run = find_run(adapter)
        return str((run.settings if run else {}).get("quantization", "none"))
    try:
        kind = json.loads(note.read_text(encoding="utf-8"))["quantization"]
        if kind not in ("none", "nf4", "int8"):
            raise ValueError(f"quantization is {kind!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the adapter's note cannot be read: {error}", str(note), "copy the adapter again"
        ) from error
    return str(kind)


def load_tokenizer_of(
    source: Source, template: str | None, *, trust_remote_code: bool, chats: bool = True
) -> PreTrainedTokenizerBase:
    """Load the tokenizer and chat template of the training: the adapter's own if it has one.

    Args:
        chats: whether it needs a chat template.
    """
    own = source.adapter is not None and any(source.adapter.glob("tokenizer*"))
    place = str(source.adapter) if own else source.base
    if not chats and template is None:
        return read_tokenizer(place, trust_remote_code=trust_remote_code)
    return load_tokenizer(place, template, trust_remote_code=trust_remote_code)


def load_weights(
    source: Source,
    device: torch.device,
    dtype: str,
    *,
    trust_remote_code: bool,
    rounded: str = "none",
) -> PreTrainedModel:
    """Load the model in eval mode on its device, with the adapter's layers inside.

    Args:
        rounded: nf4 or int8: quantize the base's weights as `--quantization` does, and dequantize
            them to the dtype.

    Raises:
        ConfigError: no safetensors weights, or an adapter that does not fit the base.
    """
    check_weights(source.base)
    repository, revision = split_revision(source.base)
    if not sys.stderr.isatty():
        disable_progress_bar()
    config = load_model_config(source.base, trust_remote_code=trust_remote_code)
    quantized: dict[str, Any] = {}
    if rounded != "none":
        quantized = quantized_loading(rounded, DTYPES[dtype], device, zero3=False)
    # Only transformers' eager attention applies a softcap. Otherwise transformers chooses.
    softcapped = getattr(config, "attn_logit_softcapping", None)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            repository,
            revision=revision,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation="eager" if softcapped else None,
            use_safetensors=True,  # a .bin file is a pickle; pickles are never read
            trust_remote_code=trust_remote_code,
            **quantized,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model's weights cannot be read: {str(error).splitlines()[0]}",
            source.base,
            "the folder needs model.safetensors (or its shards with an index)",
        ) from error
    if rounded != "none":
        # it would warn about dequantizing, which is intended
        logging.getLogger("transformers.integrations.bitsandbytes").setLevel(logging.ERROR)
        model = model.dequantize(DTYPES[dtype])
    if source.adapter is not None:
        if rounded == "none" and (kind := trained_on(source.adapter)) != "none":
            logger.info(
                "the adapter was trained on a base in %s; here it stands on one in %s", kind, dtype
            )
        # Generation needs the model itself, with the adapter's layers but without peft's wrapper.
        model = with_adapter(model, source.adapter).get_base_model()
    return model.to(device).eval().requires_grad_(False)


def with_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Put the adapter's layers into a model.

    Raises:
        ConfigError: the adapter does not fit the model.
        FinetuneError: its file is empty or cannot be read.
    """
    import_bitsandbytes()
    from peft import PeftModel

    check_adapter_file(folder, trained=False)
    try:
        with warnings.catch_warnings():
            # peft reads an attribute that transformers has renamed.
            warnings.filterwarnings(
                "ignore",
                message="`is_gradient_checkpointing` is deprecated",
                category=FutureWarning,
            )
            return PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(
            f"the adapter does not fit the model: {str(error).splitlines()[0]}",
            str(folder),
            "give --model the base that the adapter was trained on",
        ) from error


def end_ids(
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig,
    config_eos: int | list[int] | None,
) -> tuple[int, ...]:
    """Return every token that ends an answer, from the template's turns, the tokenizer and the
    model's settings.
    """
    ends = set(stop_token_ids(tokenizer))
    padding = tokenizer.added_tokens_decoder.get(tokenizer.pad_token_id)
    # often <|endoftext|>: what follows it belongs to another document
    if padding is not None and padding.special:
        ends.add(tokenizer.pad_token_id)
    for named in (generation.eos_token_id, config_eos):
        ends.update([named] if isinstance(named, int) else named or ())
    return tuple(sorted(ends))


def check_fit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Source) -> None:
    """Raise DataError if tokenizer and model do not belong together."""
    warn_of_missing_embeddings(model.config, tokenizer)
    if tokenizer.backend_tokenizer is None:
        raise DataError(
            "the tokenizer has no fast form", source.base, "use a model with a tokenizer.json"
        )
