"""The reference model of preference training: the model before the run. There is never a second
model in memory.

With an adapter the reference is the same model with the adapter off, evaluated microbatch by
microbatch. A fully trained model is evaluated once, before its first step. The log-probabilities
are then stored in the run's folder, for a run that resumes, and in the cache, for other runs like
it. Training and validation data have separate files (KTO's have two each), so that a run may resume
with other validation data. None of them is a `.safetensors` file at the top of the run folder: that
folder is handed out as a model, and engines load every such file in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from finetune.batching.collate import Microbatch
from finetune.data import cache
from finetune.errors import DataError, StateError
from finetune.modeling.lora import adapter_off
from finetune.modeling.loss import ChunkedHead, microbatch_losses
from finetune.modeling.preference_loss import document_sums
from finetune.storage import durable_files

logger = logging.getLogger("finetune")

Side = Literal["train", "valid", "train-mismatched", "valid-mismatched"]
MISMATCHED = "-mismatched"
_FOLDER, _CACHED_NAME, _MISSING = "reference", "reference.st", "is missing"
# What each side is called, and the fix if it is not known.
_SIDES = {
    "train": (
        "training data",
        (
            "put the file back, or start anew with another --output-dir; an adapter (--finetuning"
            " lora) needs none"
        ),
    ),
    "valid": ("validation data", "give the validation data that the run began with, or none"),
}


class Reference(Protocol):
    """The model before the run."""

    def log_probabilities(
        self, model: torch.nn.Module, microbatch: Microbatch, head: ChunkedHead | None
    ) -> torch.Tensor:
        """`(documents,)`: of the answers of a microbatch that is on the device, without
        gradient.
        """


class AdapterOff:
    """The model that is trained, without its adapter and without dropout."""

    def log_probabilities(
        self, model: torch.nn.Module, microbatch: Microbatch, head: ChunkedHead | None
    ) -> torch.Tensor:
        with adapter_off(model):
            return log_probabilities(model, microbatch, head)


class Table:
    """The log-probabilities from before the first step.

    Args:
        values: float32 `(samples, documents of one)`, where the microbatches are.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def log_probabilities(
        self, model: torch.nn.Module, microbatch: Microbatch, head: ChunkedHead | None
    ) -> torch.Tensor:
        assert microbatch.answers is not None
        return self.values[microbatch.answers.samples].flatten()


def log_probabilities(
    model: torch.nn.Module, microbatch: Microbatch, head: ChunkedHead | None
) -> torch.Tensor:
    """Return the log-probabilities `(documents,)` of the answers now, without dropout and without
    gradient.
    """
    assert microbatch.answers is not None
    with torch.no_grad(), _evaluating(model):
        losses = microbatch_losses(model, microbatch, microbatch.input_ids.device, head)
        return -document_sums(losses, microbatch.answers.targets)


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@dataclass(frozen=True)
class SavedReference:
    """The log-probabilities of the answers of one side's samples by the model before the run; rank
    0 reads and writes.

    Attributes:
        side: which data; "mismatched" are KTO's prompts with the answers of other samples.
        parts: what they depend on: weights, data, dtype.
        drawn: bool (N,), the samples (or pairs of them) that the run asks about.
        folder: of the run.
        others: folders of runs that this one may resume from.
        cache_dir: where they are kept for other runs.
        fresh: whether the model is as it was before the run.
        pairs: int64 (N,), of "mismatched" sides: which (objective.py).
    """

    side: Side
    parts: Mapping[str, str]
    drawn: np.ndarray
    folder: Path
    others: tuple[Path, ...]
    cache_dir: Path
    fresh: bool
    pairs: np.ndarray | None = None

    @property
    def name(self) -> str:
        """Name of the file in the run's folder."""
        return f"{_FOLDER}/{self.side}.st"

    def find(self) -> torch.Tensor | str:
        """Float32 `(N, documents of one)`, NaN for samples that are not drawn; or why there is
        none.
        """
        cached = cache.find(self.cache_dir, self._cache_key())
        paths = [folder / self.name for folder in (self.folder, *self.others)]
        whys = set()
        for path in [*paths, *([] if cached is None else [cached / _CACHED_NAME])]:
            found = self._read(path)
            if isinstance(found, torch.Tensor):
                return found
            whys.add(found)
        return " and ".join(sorted(whys - {_MISSING})) or _MISSING

    def _read(self, path: Path) -> torch.Tensor | str:
        try:
            with safe_open(path, framework="pt") as file:
                parts = file.metadata() or {}
                samples, values = file.get_tensor("samples"), file.get_tensor("values")
        except FileNotFoundError:
            return _MISSING
        except (OSError, SafetensorError) as error:
            return f"cannot be read ({error})"
        digest = _digest(samples, values)
        if parts.get("sha256", digest) != digest:  # files of older versions have none
            return "is damaged"
        if parts.get("weights") != self.parts["weights"]:
            return "is of another model"
        if parts.get("data") != self.parts["data"]:
            return "is of other data"
        dtype = parts.get("dtype")
        if self.fresh and dtype != self.parts["dtype"]:
            return "is of another dtype"
        table = torch.full((len(self.drawn), values.shape[1]), torch.nan)
        table[samples] = values
        unknown = self.drawn.copy()
        unknown[samples.numpy()] = False
        if unknown.any():
            return f"lacks {int(unknown.sum()):,} of the samples that this run draws"
        if dtype != self.parts["dtype"]:
            logger.warning(
                "%s was computed in %s, and this run computes in %s",
                path,
                dtype,
                self.parts["dtype"],
            )
        return table

    def refusal(self, why: str) -> StateError:
        """Return the error if they can no longer be computed: the model has been trained since."""
        data, fix = _SIDES[self.side.removesuffix(MISMATCHED)]
        what = f"what the model said of the {data} before the run is not known: {self.name} {why}"
        return StateError(what, str(self.folder), fix)

    def store(self, table: torch.Tensor) -> None:
        """Write them to the run's folder and, if missing there, to the cache, which need not be
        writable.
        """
        samples = torch.from_numpy(np.flatnonzero(self.drawn))
        values = table[samples]
        metadata = {**self.parts, "sha256": _digest(samples, values)}
        content = save({"samples": samples, "values": values}, metadata=metadata)
        path = self.folder / self.name
        # The values that a run began with are kept if it resumes with other validation data.
        if self.fresh or not path.exists():
            path.parent.mkdir(exist_ok=True)
            durable_files.replace_file(path, content)

        def make(folder: Path) -> dict[str, Any]:
            durable_files.replace_file(folder / _CACHED_NAME, content)
            return {}

        key = self._cache_key()
        if cache.find(self.cache_dir, key) is None:
            try:
                cache.open_or_make(self.cache_dir, key, make, what="references")
            except DataError as error:
                logger.warning("%s", error)

    def _cache_key(self) -> dict[str, str]:
        return {
            **self.parts,
            "drawn": hashlib.sha256(np.packbits(self.drawn).tobytes()).hexdigest(),
        }


def _digest(samples: torch.Tensor, values: torch.Tensor) -> str:
    """Return the SHA-256 of the sample indices and their saved values."""
    return hashlib.sha256(samples.numpy().tobytes() + values.numpy().tobytes()).hexdigest()
