"""Tensors of a checkpoint (see state.py): copied and written; read back whole, or the part that a rank holds."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from finetune.errors import FinetuneError
from finetune.runtime import device as devices
from finetune.storage import durable_files

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's
ALL_MOMENTS = (*MOMENTS, "momentum_buffer")  # and Muon's
STATE_NAME = "state.json"


def read_description(folder: Path) -> dict[str, Any]:
    description: dict[str, Any] = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    return description


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path)
    durable_files.share_file(path)


def write_description(folder: Path, description: dict[str, Any]) -> None:
    (folder / STATE_NAME).write_text(json.dumps(description, indent=1), encoding="utf-8")


class HostCopies:
    """Host memory that tensors are copied into, the same from save to save: fresh pages would be cleared each time.

    One user at a time: what was copied is gone with the next copy of that name.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A float32 copy, to be waited for (`wait`)."""
        self._devices.add(tensor.device)
        if name not in self._buffers:
            self._buffers[name] = devices.host_buffer(tensor.shape, tensor.device)
        return self._buffers[name].copy_(tensor.detach(), non_blocking=self._buffers[name].is_pinned())

    def wait(self) -> None:
        for device in self._devices:
            devices.wait_for_copies(device)

    def clear(self) -> None:
        self._buffers.clear()


@dataclass(frozen=True)
class Snapshot:
    """What one rank saves of the training state after a step, in memory that training does not touch.

    Attributes:
        files: tensors by name, by the name of the file that they go to.
        description: of the whole state, on rank 0.
    """

    files: dict[str, dict[str, torch.Tensor]]
    description: dict[str, Any] | None

    def write(self, folder: Path) -> list[str]:
        """Write the files; returns their names."""
        for name, tensors in self.files.items():
            write_tensors(folder / name, tensors)
        if self.description is None:
            return list(self.files)
        write_description(folder, self.description)
        return [*self.files, STATE_NAME]


class SavedTensors:
    """Whole tensors by name from either form on disk, one at a time."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.description = read_description(folder)
        slices = self.description["slices"]
        names = [f"{kind}-{rank:05d}.safetensors" for rank in range(slices)] if slices else [f"{kind}.safetensors"]
        self.files = [safe_open(folder / name, framework="pt") for name in names]
        self.names = frozenset(self.files[0].keys())

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        saved = {name: tuple(shape) for name, shape in self.description["shapes"].items()}
        if saved != shapes:
            wrong = sorted(name for name in saved.keys() | shapes.keys() if saved.get(name) != shapes.get(name))
            raise FinetuneError(
                f"the checkpoint's trainable parameters are not this model's: {wrong[0]} is {saved.get(wrong[0])} "
                f"there and {shapes.get(wrong[0])} here ({len(wrong)} differ)",
                where=self.folder.name,
                fix="resume with the model and LoRA settings that the run was started with",
            )

    def _shape(self, name: str) -> list[int]:
        # Of moments the name has the key in front, the shapes have not.
        of_moment = name.startswith(tuple(f"{key}." for key in ALL_MOMENTS))
        shape: list[int] = self.description["shapes"][name.split(".", 1)[1] if of_moment else name]
        return shape

    def get(self, name: str) -> torch.Tensor:
        """The whole float32 tensor, in the parameter's shape, on the CPU."""
        shape = self._shape(name)
        return self.flat(name, 0, math.prod(shape)).reshape(shape)

    def flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Numbers `start` to `stop` of the flattened tensor, float32 on the CPU, zeros where it has ended.

        Only these are read: a rank needs one of hundreds of slices of a large model's state.
        """
        numel = math.prod(self._shape(name))
        found = torch.zeros(stop - start)
        begin = 0
        for file in self.files:
            part = file.get_slice(name)
            shape = part.get_shape()
            end = min(begin + math.prod(shape), numel)  # slices are padded behind the parameter's end
            low, high = max(start, begin), min(stop, end)
            if low < high:
                found[low - start : high - start] = _flat_of(part, shape, low - begin, high - begin)
            begin += math.prod(shape)
        return found


def _flat_of(part: Any, shape: list[int], start: int, stop: int) -> torch.Tensor:
    """Numbers `start` to `stop` of a flattened tensor of a safetensors file, read by whole lines of its first axis."""
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
    """A tensor in the parameter's shape that is right where this rank's ZeRO-1/2 partition has it; None: nowhere."""
    if parameter._hp_mapping is None:
        return None
    place = parameter._hp_mapping.lp_fragment_address
    whole = torch.empty(parameter.numel())  # what is not written takes no memory
    whole[place.start : place.start + place.numel] = saved.flat(name, place.start, place.start + place.numel)
    return whole.reshape(parameter.shape)
