"""Tensors of a checkpoint (see state.py): copied and written; read whole, or the part that a rank
holds.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from finetune.errors import FinetuneError
from finetune.runtime import device as devices
from finetune.storage import durable_files
from finetune.training.muon import SECOND_MOMENT

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's
# And those of Muon, NorMuon, Adafactor; of bitsandbytes' AdamW in 8 bits, which are numbers of 0 to
# 255 with a scale for 256 of them.
SCALES = ("absmax1", "absmax2")
# than their parameter's
OF_OTHER_SHAPE = ("exp_avg_sq_row", "exp_avg_sq_col", SECOND_MOMENT, *SCALES)
ALL_MOMENTS = (*MOMENTS, "momentum_buffer", "state1", "state2", *OF_OTHER_SHAPE)
STATE_NAME = "state.json"
# of files written, by name: size and SHA-256 (durable_files.write_hashed)
Records = dict[str, dict[str, Any]]


def read_description(folder: Path) -> dict[str, Any]:
    description: dict[str, Any] = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    return description


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write float32 CPU tensors into a new file, synced; returns its record
    (durable_files.write_hashed).

    Byte for byte what safetensors' `save_file` writes, which hashes nothing: the length of the
    header, the header as JSON padded to 8 bytes, then the tensors by name
    (https://github.com/huggingface/safetensors#format).
    """
    names, header, end = sorted(tensors), {}, 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": "F32",
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    contents = (
        tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data for name in names
    )
    return durable_files.write_hashed(
        path, itertools.chain([len(text).to_bytes(8, "little") + text], contents)
    )


def write_description(folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    return durable_files.write_hashed(
        folder / STATE_NAME, [json.dumps(description, indent=1).encode()]
    )


class HostCopies:
    """Host memory that tensors are copied into, the same from save to save: fresh pages would be
    cleared each time.

    One user at a time: what was copied is gone with the next copy of that name.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A float32 copy, to be waited for (`wait`)."""
        self._devices.add(tensor.device)
        if name not in self._buffers:
            self._buffers[name] = devices.host_buffer(tensor.shape, tensor.device)
        return self._buffers[name].copy_(
            tensor.detach(), non_blocking=self._buffers[name].is_pinned()
        )

    def wait(self) -> None:
        for device in self._devices:
            devices.wait_for_copies(device)

    def clear(self) -> None:
        self._buffers.clear()


@dataclass(frozen=True)
class Snapshot:
    """What one rank saves of the training state after a step, in memory that training does not
    touch.

    Attributes:
        files: tensors by name, by the name of the file that they go to.
        description: of the whole state, on rank 0.
    """

    files: dict[str, dict[str, torch.Tensor]]
    description: dict[str, Any] | None

    def write(self, folder: Path) -> Records:
        """Write the files."""
        records = {
            name: write_tensors(folder / name, tensors) for name, tensors in self.files.items()
        }
        if self.description is not None:
            records[STATE_NAME] = write_description(folder, self.description)
        return records


class SavedTensors:
    """Tensors by name from any form on disk, one at a time; a file is opened when something in it
    is asked for.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind
        self.description = read_description(folder)
        self._slices: int = self.description["slices"]
        self._writers: dict[str, int] = self.description.get("writers", {})
        self._opened: dict[str, Any] = {}
        self._names: dict[str, frozenset[str]] = {}

    def __contains__(self, name: str) -> bool:
        file = self._name_of_file(0 if self._slices else self._writers.get(self._parameter(name)))
        if file not in self._names:
            # A rank that had nothing to write wrote no file.
            self._names[file] = frozenset(
                self._open(file).keys() if (self.folder / file).exists() else ()
            )
        return name in self._names[file]

    def _name_of_file(self, rank: int | None) -> str:
        return f"{self.kind}.safetensors" if rank is None else f"{self.kind}-{rank:05d}.safetensors"

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(self.folder / file, framework="pt")
        return self._opened[file]

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        saved = {name: tuple(shape) for name, shape in self.description["shapes"].items()}
        if saved != shapes:
            wrong = sorted(
                name for name in saved.keys() | shapes.keys() if saved.get(name) != shapes.get(name)
            )
            raise FinetuneError(
                f"the checkpoint's trainable parameters are not this model's: {wrong[0]} is"
                f" {saved.get(wrong[0])} there and {shapes.get(wrong[0])} here ({len(wrong)}"
                " differ)",
                where=self.folder.name,
                fix="resume with the model and LoRA settings that the run was started with",
            )

    @staticmethod
    def _parameter(name: str) -> str:
        # Of moments the name has the key in front, what describes the parameter has not.
        of_moment = name.startswith(tuple(f"{key}." for key in ALL_MOMENTS))
        return name.split(".", 1)[1] if of_moment else name

    def _shape(self, name: str) -> list[int]:
        if name.startswith(tuple(f"{key}." for key in OF_OTHER_SHAPE)):
            file = self._name_of_file(self._writers.get(self._parameter(name)))
            return list(self._open(file).get_slice(name).get_shape())
        shape: list[int] = self.description["shapes"][self._parameter(name)]
        return shape

    def get(self, name: str) -> torch.Tensor:
        """The whole float32 tensor, in the parameter's shape, on the CPU."""
        shape = self._shape(name)
        return self.flat(name, 0, math.prod(shape)).reshape(shape)

    def flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Numbers `start` to `stop` of the flattened tensor, float32 on the CPU, zeros where it has
        ended.

        Only these are read: a rank needs one of hundreds of slices of a large model's state.
        """
        found = torch.zeros(stop - start)
        for file, begin, low, high in self._places(name, start, stop):
            part = self._open(file).get_slice(name)
            found[low - start : high - start] = _flat_of(
                part, part.get_shape(), low - begin, high - begin
            )
        return found

    def _places(self, name: str, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Where the numbers `start` to `stop` lie: a file, the number that it begins with, and
        which of them it has.
        """
        stop = min(stop, math.prod(self._shape(name)))
        if start >= stop:
            return
        if not self._slices:
            yield self._name_of_file(self._writers.get(self._parameter(name))), 0, start, stop
            return
        # of each; the last are padded behind the end
        size = -(-math.prod(self._shape(name)) // self._slices)
        for rank in range(start // size, -(-stop // size)):
            yield (
                self._name_of_file(rank),
                rank * size,
                max(start, rank * size),
                min(stop, (rank + 1) * size),
            )


def _flat_of(part: Any, shape: list[int], start: int, stop: int) -> torch.Tensor:
    """Numbers `start` to `stop` of a flattened tensor of a safetensors file, read by whole lines of
    its first axis.
    """
    line = math.prod(shape[1:]) or 1
    first = start // line
    lines = part[first : -(-stop // line)] if shape else part[...]
    flat: torch.Tensor = lines.flatten()[start - first * line : stop - first * line]
    return flat


def local_slice(saved: SavedTensors, name: str, parameter: Any) -> torch.Tensor:
    """This rank's flat slice of a saved tensor, padded with zeros to DeepSpeed's partition size."""
    size = parameter.ds_tensor.numel()
    rank = dist.get_rank(parameter.ds_process_group)
    return saved.flat(name, rank * size, (rank + 1) * size)


def held_part(saved: SavedTensors, name: str, parameter: Any) -> torch.Tensor | None:
    """A tensor in the parameter's shape that is right where this rank's ZeRO-1/2 partition has it;
    None: nowhere.
    """
    if parameter._hp_mapping is None:
        return None
    place = parameter._hp_mapping.lp_fragment_address
    whole = torch.empty(parameter.numel())  # what is not written takes no memory
    whole[place.start : place.start + place.numel] = saved.flat(
        name, place.start, place.start + place.numel
    )
    return whole.reshape(parameter.shape)
