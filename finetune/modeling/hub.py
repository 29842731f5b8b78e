"""Where a model named `owner/name` comes from, Hugging Face's hub or ModelScope's, and which commit
of it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeVar

from finetune.config.base_config import BaseConfig
from finetune.config.paths import is_hub_id, split_revision
from finetune.errors import ConfigError
from finetune.storage.run_folder import describe_folder

logger = logging.getLogger("finetune")

AnyConfig = TypeVar("AnyConfig", bound=BaseConfig)


def with_model_found(config: AnyConfig) -> AnyConfig:
    """The configuration with its model as all that follows takes it: a folder, or
    `owner/name@commit`.

    The commit is that of the run's first start where its folder, or that of the checkpoint to
    resume from, has one, else what the revision stands for now: every file of the model is then of
    one commit, and the run's identity has it, which all ranks compare.

    Raises:
        ConfigError: the model is to come from ModelScope, and cannot.
    """
    model = config.base_model
    if model is None or not is_hub_id(model):
        return config
    found = from_modelscope(model, getattr(config, "hub", "auto"))
    if found == model:
        found = _begun_with(config, model) or _pinned(model)
    return config.model_copy(update={"model": found})


def _begun_with(config: BaseConfig, model: str) -> str | None:
    """The model with the commit of the run that is resumed."""
    if config.resume == "never":
        return None
    folders = [Path(config.output_dir)]
    if config.resume != "auto":
        folders.insert(0, Path(config.resume).expanduser().absolute().parent)
    return next(filter(None, (recorded_model(folder, model) for folder in folders)), None)


def from_modelscope(model: str, hub: str = "auto") -> str:
    """The folder of a model that comes from ModelScope; `model` itself where it does not.

    Args:
        hub: auto is ModelScope where USE_MODELSCOPE_HUB is 1 or true, as LLaMA-Factory has it.

    Raises:
        ConfigError: its package is not installed, or it has no such model.
    """
    asked = os.environ.get("USE_MODELSCOPE_HUB", "").lower() in ("1", "true", "yes")
    if not is_hub_id(model) or not (hub == "modelscope" or (hub == "auto" and asked)):
        return model
    where = "--hub modelscope" if hub == "modelscope" else "USE_MODELSCOPE_HUB"
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        fix = "pip install modelscope, or give --model a folder"
        raise ConfigError(
            "models of ModelScope need its package, which is not installed", where, fix
        ) from error
    from huggingface_hub import constants

    name, revision = split_revision(model)
    given = {} if revision is None else {"revision": revision}
    logger.info("%s comes from ModelScope", model)
    try:
        return str(
            snapshot_download(name, local_files_only=bool(constants.HF_HUB_OFFLINE), **given)
        )
    except Exception as error:  # its own errors have no class in common
        raise ConfigError(
            f"ModelScope does not give {model}:"
            f" {(str(error).splitlines() or [type(error).__name__])[0]}",
            where,
            "check the name, the revision and the network; with HF_HUB_OFFLINE only what is in its"
            " cache is found",
        ) from error


def folder_of(model: str) -> Path | None:
    """The folder of a model on this machine: its own, or that of its commit in the hub's cache;
    None without either.
    """
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_id(model):
        return Path(model).expanduser()
    name, revision = split_revision(model)
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _pinned(model: str) -> str:
    """`owner/name@commit` for what a name stands for now; the name where nobody can say, and
    loading will say why.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError
    from transformers.utils.hub import extract_commit_hash

    name, revision = split_revision(model)
    try:
        commit = extract_commit_hash(hf_hub_download(name, "config.json", revision=revision), None)
    except (OSError, ValueError, HfHubHTTPError):
        return model
    return model if commit is None else f"{name}@{commit}"


def recorded_model(output_dir: Path, model: str) -> str | None:
    """The model with the commit that a run began with, where it was given the same name."""
    if not output_dir.is_dir():
        return None
    described = describe_folder(output_dir)
    weights = (described.identity or {}).get("weights")
    name, _ = split_revision(model)
    same = (described.config or {}).get("model") == model and str(weights).startswith(f"{name}@")
    return str(weights) if same and split_revision(str(weights))[1] not in (None, "None") else None
