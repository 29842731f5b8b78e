"""Check that the files and folders that a configuration names exist. No other check of the settings
reads the disk.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from finetune.config.base_config import BaseConfig
from finetune.config.fields import HUB_PREFIXES, did_you_mean, flag
from finetune.config.files import similar_files
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError

logger = logging.getLogger("finetune")

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:@([\w./-]+))?")


def is_hub_id(model: str) -> bool:
    """Return whether `model` is to be looked for on a hub: `org/name` or `name`, maybe `@revision`;
    no file or folder.
    """
    return bool(_HUB_ID.fullmatch(model)) and not Path(model).exists()


def split_revision(model: str) -> tuple[str, str | None]:
    """`org/name@revision` -> `org/name` and the branch, tag or commit; None of a model without one,
    and of a folder.
    """
    found = _HUB_ID.fullmatch(model) if is_hub_id(model) else None
    return (model, None) if found is None else (found[1], found[2])


@cache
def near_folder(model: str) -> str:
    """Return `; did you mean 'x'?` if `model` is no folder and one next to it has a similar name.

    The warning is logged once. Call this before the hub is queried, which takes a minute if no hub
    answers.
    """
    parent = Path(model).parent
    if Path(model).exists() or not parent.is_dir():
        return ""
    near = did_you_mean(
        model, [str(parent / path.name) for path in parent.iterdir() if path.is_dir()]
    )
    if near:
        logger.warning("%s is no folder here%s The hub is asked for it", model, near)
    return near


def check_paths(config: RunConfig) -> list[ConfigError]:
    """Return errors in the files and folders that the configuration names; empty if there are none.

    Only checks that they exist and have the right type. Reads no content and does not query the
    hub.
    """
    return [
        *_check_model(config.model),
        *_check_data(config),
        *check_folders(config),
        *_check_template(config),
    ]


def check_pretraining_paths(config: PretrainConfig) -> list[ConfigError]:
    """Do the same for pretraining; its token files are checked when they are opened."""
    model = () if config.model is None else _check_model(config.model)
    return [*model, *check_folders(config)]


def _check_model(model: str) -> Iterator[ConfigError]:
    path = Path(model)
    if path.is_file():
        yield ConfigError(
            f"model {model} is a file, not a folder",
            flag("model"),
            f"give its folder, {path.parent}",
        )
    elif not path.is_dir() and not is_hub_id(model):
        yield ConfigError(
            f"the model folder {model} does not exist", flag("model"), similar_files(path)
        )


def _check_data(config: RunConfig) -> Iterator[ConfigError]:
    for name, sources in (("data", config.sources), ("valid_data", config.valid_sources)):
        for entry in (source.path for source in sources):
            path = Path(entry)
            if entry.startswith(HUB_PREFIXES):
                continue
            if not path.exists() and not any(glob.iglob(entry, recursive=True)):
                together = [part for part in entry.split(",") if part]
                fix = (
                    f"write {flag(name)} {' '.join(together)}"
                    if len(together) > 1
                    else similar_files(path)
                )
                yield ConfigError(f"the file {entry} does not exist", flag(name), fix)


def check_folders(config: BaseConfig) -> Iterator[ConfigError]:
    """Yield errors in the folders that a run writes to or resumes from."""
    for name in ("output_dir", "cache_dir"):
        folder = getattr(config, name)
        if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
            yield ConfigError(
                f"{folder} is a file, and {name} must be a folder",
                flag(name),
                "name another folder",
            )
    if config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
        fix = (
            f"give auto, never, or the folder of a checkpoint; {similar_files(Path(config.resume))}"
        )
        yield ConfigError(
            f"resume is {config.resume}, and there is no such folder", flag("resume"), fix
        )


def _check_template(config: RunConfig) -> Iterator[ConfigError]:
    template = config.template
    if (
        template is not None
        and ("/" in template or "." in template)
        and not Path(template).is_file()
    ):
        yield ConfigError(
            f"the template file {template} does not exist",
            flag("template"),
            similar_files(Path(template)),
        )
