"""Samples on their way to the disk: shards of tokens that are kept through a kill, and the arrays
made of them at last.

A shard is finished by its state, a JSON file that says what came before it and what its files hash
to; whoever goes on checks the hashes, so nothing need be synced. What belongs to no finished shard
is written anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from finetune.data.passes import SAMPLE_FACTS
from finetune.storage.durable_files import hash_files, replace_file, save_array

SHARD_TOKENS = 16 << 20  # at most, but for the last part that goes into it
SCRATCH = "scratch"  # folder of what is removed at the end
# one file a shard: samples one after another
TOKEN_ARRAYS = {"tokens": np.int32, "supervised": np.bool_}
TOKEN_BYTES = 5  # in both

# One file for all samples each. Sample i has the tokens from offsets[i] to offsets[i + 1], counted
# through all shards. `places` is (N, 2): file number and line of each sample's record; `order`
# (N,): the samples by difficulty, those of one difficulty in the order of the data. For the others
# see `Samples`.
SAMPLE_ARRAYS = {
    "offsets": np.int64,
    "lengths": np.int32,
    "places": np.int64,
    "row_ids": np.int64,
    "levels": np.int16,
    "supervised_counts": np.int32,
    "order": np.int64,
}
# of preferences, too
PREFERENCE_ARRAYS = {"first_lengths": np.int32, "first_supervised": np.int32, "labels": np.int8}
_COLUMNS = {
    "row_ids": "row",
    "levels": "level",
    "supervised_counts": "targets",
    "lengths": "length",
}
_PREFERENCE_COLUMNS = {
    "first_lengths": "first_length",
    "first_supervised": "first_targets",
    "labels": "label",
}
# the content, in this order
_HASHED = ("levels", "offsets", "row_ids", "supervised", "supervised_counts", "tokens")


def token_file(folder: Path, name: str, shard: int) -> Path:
    """`tokens-00000.bin`, `supervised-00000.bin`, ...: bare numbers."""
    return folder / f"{name}-{shard:05d}.bin"


def map_tokens(folder: Path, name: str, shard: int) -> np.ndarray:
    """The tokens or the mask of a shard, read-only `(tokens,)`."""
    return np.asarray(np.memmap(token_file(folder, name, shard), TOKEN_ARRAYS[name], mode="r"))


class ShardWriter:
    """Parts of samples -> shards, in order.

    Args:
        folder: where they go; a killed writer's finished shards are taken over.

    Attributes:
        states: what `finish` was given for each finished shard, with its own `samples`, `tokens`
            and `files` (SHA-256).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / SCRATCH).mkdir(exist_ok=True)
        self.states = _finished(folder)
        self._open: ExitStack | None = None
        self._begin()

    @property
    def is_full(self) -> bool:
        return self._tokens >= SHARD_TOKENS

    def add(self, facts: np.ndarray, **arrays: np.ndarray) -> None:
        """Append samples: SAMPLE_FACTS `(N,)`, and what `TOKEN_ARRAYS` names, `(T,)`."""
        if not len(facts):
            return
        if self._open is None:
            self._open = ExitStack()
            for name in TOKEN_ARRAYS:
                path = token_file(self.folder, name, len(self.states))
                self._files[name] = self._open.enter_context(path.open("wb"))
        self._facts.append(facts)
        self._tokens += len(arrays["tokens"])
        for name, dtype in TOKEN_ARRAYS.items():
            data = np.ascontiguousarray(arrays[name], dtype).view(np.uint8).data
            self._files[name].write(data)
            self._digests[name].update(data)

    def finish(self, state: dict[str, Any]) -> None:
        """End the shard; `state` is what is needed to go on after it. Nothing where it has no
        sample.
        """
        if not self._facts:
            return
        self.close()
        number = len(self.states)
        facts = np.concatenate(self._facts)
        save_array(_facts_file(self.folder, number), facts)
        hashes = {
            token_file(self.folder, name, number).name: d.hexdigest()
            for name, d in self._digests.items()
        }
        hashes[f"{SCRATCH}/{_facts_file(self.folder, number).name}"] = hash_files(
            [_facts_file(self.folder, number)]
        )[0]
        state = {**state, "samples": len(facts), "tokens": self._tokens, "files": hashes}
        replace_file(_state_file(self.folder, number), json.dumps(state).encode())
        self.states.append(state)
        self._begin()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _begin(self) -> None:
        self._facts: list[np.ndarray] = []
        self._tokens = 0
        self._files: dict[str, IO[bytes]] = {}
        self._digests = {name: hashlib.sha256() for name in TOKEN_ARRAYS}


def _facts_file(folder: Path, shard: int) -> Path:
    return folder / SCRATCH / f"facts-{shard:05d}.npy"


def _state_file(folder: Path, shard: int) -> Path:
    return folder / SCRATCH / f"state-{shard:05d}.json"


def _finished(folder: Path) -> list[dict[str, Any]]:
    """The states of the shards up to the first that is not there as it was."""
    states: list[dict[str, Any]] = []
    while (path := _state_file(folder, len(states))).is_file():
        states.append(json.loads(path.read_bytes()))
    there = [
        path for state in states for name in state["files"] if (path := folder / name).is_file()
    ]
    found = dict(zip(there, hash_files(there), strict=True))
    whole = [
        all(found.get(folder / name) == digest for name, digest in state["files"].items())
        for state in states
    ]
    kept = states[: [*whole, False].index(False)]
    for number in range(len(kept), len(states)):
        _state_file(folder, number).unlink()
    return kept


def write_arrays(
    folder: Path, states: Sequence[dict[str, Any]], *, of_preferences: bool = False
) -> str:
    """Make `SAMPLE_ARRAYS` of all shards; return a hash of tokens, masks, difficulties and record
    numbers.

    Where records lie in which file is not part of it. `of_preferences` makes `PREFERENCE_ARRAYS`,
    too.
    """
    columns = _COLUMNS | _PREFERENCE_COLUMNS if of_preferences else _COLUMNS
    samples = sum(state["samples"] for state in states)
    shapes: dict[str, tuple[int, ...]] = {"offsets": (samples + 1,), "places": (samples, 2)}
    arrays = {
        name: np.lib.format.open_memmap(
            folder / f"{name}.npy", "w+", dtype, shapes.get(name, (samples,))
        )
        for name, dtype in (SAMPLE_ARRAYS | (PREFERENCE_ARRAYS if of_preferences else {})).items()
    }
    done = tokens = 0
    for number, state in enumerate(states):
        facts = np.load(_facts_file(folder, number), mmap_mode="r", allow_pickle=False)
        assert facts.dtype == SAMPLE_FACTS
        here = slice(done, done + len(facts))
        for name, column in columns.items():
            arrays[name][here] = facts[column]
        arrays["places"][here, 0], arrays["places"][here, 1] = facts["file"], facts["line"]
        arrays["offsets"][done + 1 : done + len(facts) + 1] = tokens + np.cumsum(
            facts["length"], dtype=np.int64
        )
        done, tokens = done + len(facts), tokens + state["tokens"]
    arrays["order"][:] = np.argsort(arrays["levels"], kind="stable")
    digest = hashlib.sha256()
    for name in (*_HASHED, *(PREFERENCE_ARRAYS if of_preferences else ())):
        digest.update(name.encode())
        for piece in [arrays[name]] if name in arrays else _shards(folder, name, len(states)):
            digest.update(np.ascontiguousarray(piece).data)
    for array in arrays.values():
        array.flush()
    return digest.hexdigest()


def _shards(folder: Path, name: str, count: int) -> Iterator[np.ndarray]:
    return (map_tokens(folder, name, number) for number in range(count))
