"""What a model said before it was trained whole: in the run's folder, and in the cache for other runs like it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from finetune.data import cache
from finetune.errors import StateError
from finetune.storage import durable_files

logger = logging.getLogger("finetune")

NAME = "reference.safetensors"


@dataclass(frozen=True)
class SavedReference:
    """The log-probabilities of answers by the model before the run; rank 0 reads and writes.

    Attributes:
        parts: what they depend on: weights, data, dtype.
        folder: of the run.
        others: folders of runs that this one may go on from.
        cache_dir: where they are kept for other runs.
        fresh: whether the model is as it was before the run.
    """

    parts: Mapping[str, str]
    folder: Path
    others: tuple[Path, ...]
    cache_dir: Path
    fresh: bool

    def find(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor] | None:
        """The tables by name, with these shapes; None where there are none of this model and data."""
        cached = cache.find(self.cache_dir, self.parts)
        for folder in (self.folder, *self.others, *([] if cached is None else [cached])):
            if (tables := self._read(folder / NAME)) is not None and shapes == {
                name: tuple(table.shape) for name, table in tables.items()
            }:
                return tables
        return None

    def _read(self, path: Path) -> dict[str, torch.Tensor] | None:
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}) != dict(self.parts):
                    return None
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            logger.warning("%s cannot be read, and is looked for elsewhere: %s", path, error)
            return None

    def check_fresh(self) -> None:
        """Raise StateError where they can no longer be made: the model has been trained since."""
        if not self.fresh:
            raise StateError(
                f"{NAME} is missing, or is of other data or another model: what the model said before the run, with "
                "which every step compares",
                str(self.folder),
                "put the file back, or start anew with another --output-dir; an adapter (--finetuning lora) needs none",
            )

    def store(self, tables: Mapping[str, torch.Tensor]) -> None:
        """Write them to the run's folder and, if nobody has yet, to the cache."""
        content = save({name: table.contiguous() for name, table in tables.items()}, metadata=dict(self.parts))
        if self._read(self.folder / NAME) is None:
            durable_files.replace_file(self.folder / NAME, content)

        def make(folder: Path) -> dict[str, Any]:
            durable_files.replace_file(folder / NAME, content)
            return {}

        if cache.find(self.cache_dir, self.parts) is None:
            cache.open_or_make(self.cache_dir, self.parts, make)
