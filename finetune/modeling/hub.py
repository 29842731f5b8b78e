"""Where a model named `owner/name` comes from (Hugging Face's hub or ModelScope), and its
commit.
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
    """Return the configuration with its model as a folder or `owner/name@commit`.

    If the run's folder, or the folder of the checkpoint to resume from, has the commit of the run's
    first start, that commit is used. Otherwise it is the commit that the revision points to now. So
    every file of the model is from one commit. The run's identity holds it, and all ranks compare
    it.

    Raises:
        ConfigError: ModelScope was requested and cannot provide the model.
    """
    model = config.base_model
    if model is None or not is_hub_id(model):
        return config
    found = from_modelscope(model, getattr(config, "hub", "auto"))
    if found == model:
        found = _begun_with(config, model) or _pinned(model)
    return config.model_copy(update={"model": found})


def _begun_with(config: BaseConfig, model: str) -> str | None:
    """Return the model with the commit of the run that is resumed."""
    if config.resume == "never":
        return None
    found = None
    if config.resume != "auto":
        found = recorded_model(Path(config.resume).expanduser().absolute().parent, model)
    return found or recorded_model(Path(config.output_dir), model)


def from_modelscope(model: str, hub: str = "auto") -> str:
    """Return the folder of a model that comes from ModelScope; `model` itself for any other.

    Args:
        hub: auto is ModelScope if USE_MODELSCOPE_HUB is 1 or true, as in LLaMA-Factory.

    Raises:
        ConfigError: ModelScope's package is not installed, or it has no such model.
    """
    where = "--hub modelscope"
    if hub == "auto" and os.environ.get("USE_MODELSCOPE_HUB", "").lower() in ("1", "true", "yes"):
        hub = "modelscope"
        where = "USE_MODELSCOPE_HUB"
    if hub != "modelscope" or not is_hub_id(model):
        return model
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ConfigError(
            "models of ModelScope need its package, which is not installed",
            where,
            "pip install modelscope, or give --model a folder",
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
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"ModelScope does not give {model}: {reason}",
            where,
            "check the name, the revision and the network; with HF_HUB_OFFLINE only what is in its"
            " cache is found",
        ) from error


def folder_of(model: str) -> Path | None:
    """Return the folder of a model on this machine: its own, or that of its commit in the hub's
    cache; None if there is neither.
    """
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_id(model):
        return Path(model).expanduser()
    name, revision = split_revision(model)
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _pinned(model: str) -> str:
    """Return `owner/name@commit` for what a name points to now. If that cannot be found out, return
    the name: loading will report why.
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
    """Return the model with the commit that a run started with, if it was given the same name."""
    if not output_dir.is_dir():
        return None
    described = describe_folder(output_dir)
    if (described.config or {}).get("model") != model:
        return None
    weights = str((described.identity or {}).get("weights"))
    name, _ = split_revision(model)
    if not weights.startswith(f"{name}@") or split_revision(weights)[1] in (None, "None"):
        return None
    return weights
