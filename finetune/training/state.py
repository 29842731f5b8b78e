"""The training state, free of how many processes or which ZeRO stage hold it: trainable weights and
moments.

The moments are Adam's two, Muon's momentum, or what another optimizer holds for the parameter
(`SavedTensors`).

Three forms on disk, all safetensors plus `state.json`:

whole   `weights.safetensors`, `moments.safetensors`: float32, whole tensors by parameter name.
        LoRA, which peft reads as it is, and one process.
parts   `weights-<rank>.safetensors`, `moments-<rank>.safetensors`: whole tensors, each in the files
        of one rank, which `writers` in `state.json` names. All parameters on several processes,
        except under ZeRO-3.
slices  The same names: full-parameter ZeRO-3, where no rank could hold a whole. Each rank's flat
        slice of each parameter; slices in rank order, cut to the parameter's size, are the
        parameter.

Any form loads into any layout. Weights enter the model before DeepSpeed makes its engine (setting
its float32 masters afterwards is not enough: the first forward would still use the old weights);
moments enter after.

From DeepSpeed (0.19.8) this uses the documented deepspeed.utils.safe_* functions. Because the state
is empty before the first step, it also uses the optimizer's `state` of each flat group. A test pins
the attributes used. DeepSpeed's own checkpoints are not used: they are pickles, and belong to one
ZeRO stage and one number of processes.

float16's loss scale is saved as well, in the same form for torch's GradScaler and DeepSpeed's
DynamicLossScaler. Without it, a resumed run would start again at 65,536 and skip steps until the
scale is low enough. Those steps would differ from the uninterrupted run's. Both scalers double the
scale after a number of steps without overflow (a window) and halve it at an overflow. DeepSpeed may
let a few overflows pass first (hysteresis).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open

from finetune.errors import FinetuneError
from finetune.runtime import device as devices
from finetune.storage import durable_files
from finetune.storage.checkpoint_files import share_out
from finetune.training.muon import SECOND_MOMENT
from finetune.training.optimizers import restored_state, step_count

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's
# And the moments of Muon, NorMuon, Adafactor and bitsandbytes' 8-bit AdamW. The latter are values
# from 0 to 255, with one scale for 256 values.
SCALES = ("absmax1", "absmax2")
# than their parameter's
OF_OTHER_SHAPE = ("exp_avg_sq_row", "exp_avg_sq_col", SECOND_MOMENT, *SCALES)
ALL_MOMENTS = (*MOMENTS, "momentum_buffer", "state1", "state2", *OF_OTHER_SHAPE)
STATE_NAME = "state.json"
# of files written, by name: size and SHA-256 (durable_files.write_hashed)
Records = dict[str, dict[str, Any]]
NUMBER_BYTES = 12  # of a trained number in a checkpoint: float32 weight and Adam's two moments

Form = Literal["whole", "parts", "slices"]
Work = Callable[[], "dict[str, Any] | None"]


def trainable(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return (
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )


class TrainingState:
    """Reads and writes the state of one model and its optimizer.

    Args:
        model: the unwrapped model.
        engine: DeepSpeed's engine; None without DeepSpeed.
        optimizer: torch's optimizer; None under DeepSpeed.
        scaler: of float16's losses; None under DeepSpeed and in other dtypes.
        form: on disk.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        engine: Any = None,
        optimizer: Any = None,
        scaler: Any = None,
        form: Form = "whole",
    ) -> None:
        self.model = model
        self.engine = engine
        self.optimizer = optimizer
        self.scaler = scaler
        self.form = form

    # ------------------------------------------------------------------ write

    def save(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        do: Callable[[Work], Any] = lambda work: work(),
    ) -> Records:
        """Write this rank's files. Every rank must call: tensors are gathered.

        Args:
            do: does this rank's part of a file's writing; called by all ranks alike, as
                `Control.together` must be.
        """
        self._link_stage_1_and_2()
        own = self._own(rank, world_size)
        records: Records = {}
        failure: OSError | None = None
        for name, keys in self._files(rank, world_size).items():
            tensors = self._collect(keys, names=own if failure is None else frozenset())
            try:
                if record := do(
                    partial(write_tensors, folder / name, tensors) if tensors else lambda: None
                ):
                    records[name] = record
            except OSError as error:
                # The other ranks are in the next gathering already: take part in it to its end,
                # then raise.
                failure = error
            del tensors  # one kind is gone again before the next is collected
        if failure is not None:
            raise failure
        if rank == 0:
            records[STATE_NAME] = write_description(folder, self._description(world_size))
        return records

    def snapshot(self, copies: HostCopies, *, rank: int, world_size: int) -> Snapshot:
        """Copy what `save` would write here, to be written later while training continues.

        Collective: every rank must call it.
        """
        self._link_stage_1_and_2()
        own = self._own(rank, world_size)
        files = {
            name: self._collect(keys, names=own, copy=copies.copy)
            for name, keys in self._files(rank, world_size).items()
        }
        copies.wait()
        description = self._description(world_size) if rank == 0 else None
        return Snapshot({name: tensors for name, tensors in files.items() if tensors}, description)

    def snapshot_bytes(self, rank: int, world_size: int) -> int:
        """Host memory that a snapshot takes on this rank, with two moments for every weight."""
        sizes, own = self._sizes(), self._own(rank, world_size)
        return sum(NUMBER_BYTES * size for name, size in sizes.items() if name in own)

    def _sizes(self) -> dict[str, int]:
        """Numbers of each parameter that a file holds."""
        if self.form == "slices":
            partitioned: Iterable[tuple[str, Any]] = trainable(self.model)
            return {name: parameter.ds_tensor.numel() for name, parameter in partitioned}
        return {name: getattr(p, "ds_numel", p.numel()) for name, p in trainable(self.model)}

    def _writers(self, world_size: int) -> dict[str, int]:
        """Return which rank writes a parameter and its moments, if the ranks share the work."""
        return (
            share_out(self._sizes(), world_size) if self.form == "parts" and world_size > 1 else {}
        )

    def _own(self, rank: int, world_size: int) -> frozenset[str]:
        """Return the parameters that this rank writes."""
        writers = self._writers(world_size)
        everything = self.form == "slices" or (rank == 0 and not writers)
        return frozenset(
            name for name, _ in trainable(self.model) if everything or writers.get(name) == rank
        )

    def _files(self, rank: int, world_size: int) -> dict[str, tuple[str | None, ...]]:
        """Return the names of this rank's tensor files, and which of a parameter's tensors they
        hold: None is the weight.
        """
        shared = self.form == "slices" or (self.form == "parts" and world_size > 1)
        suffix = f"-{rank:05d}" if shared else ""
        files: dict[str, tuple[str | None, ...]] = {f"weights{suffix}.safetensors": (None,)}
        # At step 0 there are no moments: torch and DeepSpeed make them in the first step.
        if self.optimizer_step():
            files[f"moments{suffix}.safetensors"] = (
                MOMENTS if self.engine is not None else ALL_MOMENTS
            )
        return files

    def collect_weights(self, *, keep: bool) -> dict[str, torch.Tensor]:
        """Whole float32 trainable weights by name on ranks that `keep`; every rank must call."""
        return self._collect(
            (None,), names=frozenset(name for name, _ in trainable(self.model) if keep)
        )

    def _collect(
        self,
        keys: tuple[str | None, ...],
        *,
        names: frozenset[str],
        copy: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: (
            tensor.detach().float().cpu().contiguous()
        ),
    ) -> dict[str, torch.Tensor]:
        """Float32 CPU tensors by name; every rank takes part, and keeps those of the parameters
        named.

        Without another `copy` they may be the trained ones themselves, which the next step changes.
        """
        tensors = {}
        # The order of named_parameters is the same on every rank: each _get may be a collective.
        for name, parameter in trainable(self.model):
            for key in self._held(parameter, keys):
                tensor = self._get(parameter, key)
                # Copied out at once where it is kept, and let go where not: one whole tensor on the
                # device at a time.
                if name in names:
                    saved_name = name if key is None else f"{key}.{name}"
                    tensors[saved_name] = copy(saved_name, tensor)
        return tensors

    def _held(
        self, parameter: torch.nn.Parameter, keys: tuple[str | None, ...]
    ) -> tuple[str | None, ...]:
        """Return the moments that the parameter's optimizer has."""
        if self.engine is not None or keys == (None,):
            return keys
        return tuple(key for key in keys if key in self.optimizer.state[parameter])

    def _description(self, world_size: int) -> dict[str, Any]:
        shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in trainable(self.model)}
        slices = world_size if self.form == "slices" else 0
        facts: dict[str, Any] = {"slices": slices, "optimizer_step": self.optimizer_step()}
        if writers := self._writers(world_size):
            facts["writers"] = writers
        scale = read_scale(self.scaler, self.engine)
        return facts | ({} if scale is None else {"loss_scale": scale}) | {"shapes": shapes}

    def _get(self, parameter: torch.nn.Parameter, key: str | None) -> torch.Tensor:
        if self.engine is None:
            return parameter if key is None else self.optimizer.state[parameter][key]
        from deepspeed import utils

        # Full-parameter ZeRO-3 reads its own slice, which needs no other rank. With LoRA under
        # ZeRO-3, as under ZeRO-1/2, the whole is gathered; an adapter is small, and rank 0 writes a
        # file that peft can read.
        if self.form == "slices":
            return (
                utils.safe_get_local_fp32_param(parameter)
                if key is None
                else utils.safe_get_local_optimizer_state(parameter, key)
            )
        return (
            utils.safe_get_full_fp32_param(parameter)
            if key is None
            else utils.safe_get_full_optimizer_state(parameter, key)
        )

    def optimizer_step(self) -> int:
        """Steps that the optimizer has taken: without those that were skipped."""
        # Of DeepSpeed: the optimizer below ZeRO's, whose states are those of flat groups. They all
        # have one step, so the largest is as good as any; a parameter that never had a gradient has
        # none.
        optimizer = self.optimizer if self.engine is None else self.engine.optimizer.optimizer
        steps = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        return max(steps, default=0)

    # ------------------------------------------------------------------ read

    def load_weights(self, folder: Path) -> None:
        """Copy saved weights into the model, before any engine or DDP wraps it. Partitioned
        parameters are gathered.

        Raises:
            FinetuneError: the saved parameters are not those of this model.
        """
        saved = SavedTensors(folder, "weights")
        parameters = dict(trainable(self.model))
        saved.check(
            {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
        )
        for name, parameter in parameters.items():
            # In place, so that ties, hooks and the dtype stay the parameter's.
            with torch.no_grad():
                if hasattr(parameter, "ds_id"):
                    _fill_partitioned(parameter, saved, name)
                else:
                    parameter.copy_(saved.get(name))

    def load_moments(self, folder: Path) -> None:
        """Set moments, step count and loss scale (under DeepSpeed float32 masters too) at the start
        of training.
        """
        description = read_description(folder)
        restore_scale(description.get("loss_scale"), self.scaler, self.engine)
        step = description["optimizer_step"]
        if step == 0:
            return
        saved = SavedTensors(folder, "moments")
        if self.engine is None:
            self._load_plain(saved, step)
        else:
            self._seed_engine(step)
            # Weights once more: the engine made its float32 masters from the model's, which 16 bits
            # had rounded.
            self._load_engine(saved, SavedTensors(folder, "weights"))

    def _load_plain(self, saved: SavedTensors, step: int) -> None:
        for name, parameter in trainable(self.model):
            moments = {
                key: saved.get(f"{key}.{name}").to(parameter)
                for key in ALL_MOMENTS
                if f"{key}.{name}" in saved
            }
            self.optimizer.state[parameter] = restored_state(
                self.optimizer, parameter, moments, step
            )

    def _seed_engine(self, step: int) -> None:
        """Give each flat group the state that its first step would make, so that there is something
        to set.
        """
        # The setters of deepspeed.utils write into existing state, and before the first step there
        # is none. ZeRO-3 keeps the flat groups under one name, ZeRO-1/2 under another.
        zero = self.engine.optimizer
        flats = (
            zero.fp32_partitioned_groups_flat
            if hasattr(zero, "fp32_partitioned_groups_flat")
            else None
        )
        for flat in flats if flats is not None else zero.single_partition_of_fp32_groups:
            zero.optimizer.state[flat] = {
                "step": step_count(step, zero.optimizer, flat),
                **{key: torch.zeros_like(flat.data) for key in MOMENTS},
            }
        self._link_stage_1_and_2()

    def _link_stage_1_and_2(self) -> None:
        """Let parameters of ZeRO-1/2 see their slices of the flat state."""
        # DeepSpeed links all groups once, when the first group has stepped (_optimizer_step calls
        # _lazy_init_hp_params_optimizer_state). At that time the other groups have no state yet, so
        # safe_get_full_optimizer_state later raises on some ranks. Remove this when DeepSpeed links
        # each group after its own step.
        zero: Any = getattr(self.engine, "optimizer", None)
        if hasattr(zero, "_hp_optimizer_states_linked"):
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _load_engine(self, moments: SavedTensors, weights: SavedTensors) -> None:
        from deepspeed import utils

        sources: dict[str | None, SavedTensors] = {None: weights, **dict.fromkeys(MOMENTS, moments)}
        for name, parameter in trainable(self.model):
            for key, saved in sources.items():
                saved_name = name if key is None else f"{key}.{name}"
                if hasattr(parameter, "ds_id"):  # partitioned: ZeRO-3
                    # Not safe_set_full_*: ZeRO-3's set_full_hp_param narrows the whole tensor and
                    # knows no padding, so it raises on the last rank where the ranks do not divide
                    # the size.
                    part = local_slice(saved, saved_name, parameter)
                    if key is None:
                        utils.safe_set_local_fp32_param(parameter, part)
                    else:
                        utils.safe_set_local_optimizer_state(parameter, part, key)
                elif (whole := held_part(saved, saved_name, parameter)) is None:
                    continue  # another rank's
                elif key is None:
                    utils.safe_set_full_fp32_param(parameter, whole)
                else:
                    utils.safe_set_full_optimizer_state(parameter, whole, key)


def gathered(parameter: torch.nn.Parameter) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a ZeRO-3 parameter is whole and what rank 0 writes to it is kept;
    nothing for others.
    """
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    # With a rank that modifies it, what it holds at the end is broadcast and partitioned again;
    # without one, it is dropped.
    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def _fill_partitioned(parameter: Any, saved: SavedTensors, name: str) -> None:
    """Set the weights of a ZeRO-3 parameter before there is an engine. Every rank must call it."""
    # A second partition (zero_hpz_partition_size) is made of the first while that is written, and
    # one on NVMe is not in memory: those DeepSpeed fills from rank 0's copy.
    apart = parameter.ds_status.name == "NOT_AVAILABLE" and parameter.ds_secondary_tensor is None
    if apart and parameter.ds_tensor.status.name == "AVAILABLE":
        parameter.ds_tensor.copy_(local_slice(saved, name, parameter))
        return
    with gathered(parameter):
        if dist.get_rank() == 0:
            parameter.copy_(saved.get(name))


def with_saved(folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by parameter name, replaced by a checkpoint's where it has them.

    Each weight keeps its dtype.
    """
    saved = SavedTensors(folder, "weights")
    return weights | {
        name: saved.get(name).reshape(weights[name].shape).to(weights[name].dtype)
        for name in saved.description["shapes"].keys() & weights.keys()
    }


def whole_weights(
    model: torch.nn.Module, dtype: torch.dtype | None, *, keep: bool
) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, whole, on the CPU. Every rank must call it.

    Args:
        dtype: of the parameters; None: as they are.
        keep: on the rank that wants them; the others get nothing.
    """
    weights = {}
    for name, parameter in model.named_parameters():
        with gathered(parameter):
            if keep:
                weights[name] = parameter.detach().to("cpu", dtype or parameter.dtype, copy=True)
    if keep:
        for name, buffer in model.state_dict(keep_vars=True).items():
            # buffers are whole on every rank, also under ZeRO-3
            if not isinstance(buffer, torch.nn.Parameter):
                weights[name] = buffer.detach().cpu().clone()
    return weights


# ------------------------------------------------------------------ files


def read_description(folder: Path) -> dict[str, Any]:
    description: dict[str, Any] = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    return description


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write float32 CPU tensors into a new file, synced; returns its record
    (durable_files.write_hashed).

    The bytes are the same as from safetensors' `save_file`, which computes no hash. The format is
    the length of the header, the header as JSON padded to 8 bytes, then the tensors by name.

    Source: https://github.com/huggingface/safetensors#format
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
        """Return a float32 copy, to be waited for (`wait`)."""
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
    """One rank's part of the training state after a step, in memory that training does not
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
        """Return the whole float32 tensor, in the parameter's shape, on the CPU."""
        shape = self._shape(name)
        return self.flat(name, 0, math.prod(shape)).reshape(shape)

    def flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of the flattened tensor, float32 on the CPU, zeros
        beyond its end.

        Only these are read: a rank needs only one of the hundreds of slices that a large model's
        state has.
        """
        found = torch.zeros(stop - start)
        for file, begin, low, high in self._places(name, start, stop):
            part = self._open(file).get_slice(name)
            found[low - start : high - start] = _flat_of(
                part, part.get_shape(), low - begin, high - begin
            )
        return found

    def _places(self, name: str, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield where the elements `start` to `stop` are stored.

        Each item is a file, the index of its first element, and which elements it has.
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
    """Return elements `start` to `stop` of a safetensors file's flattened tensor.

    Whole rows along its first axis are read.
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
    """Return a tensor in the parameter's shape that is right where this rank's ZeRO-1/2 partition
    has it; None: nowhere.
    """
    if parameter._hp_mapping is None:
        return None
    place = parameter._hp_mapping.lp_fragment_address
    whole = torch.empty(parameter.numel())  # what is not written takes no memory
    whole[place.start : place.start + place.numel] = saved.flat(
        name, place.start, place.start + place.numel
    )
    return whole.reshape(parameter.shape)


# ------------------------------------------------------------------ loss scale


def read_scale(scaler: Any, engine: Any) -> dict[str, float] | None:
    """Return the scale and the steps since it was last changed or an overflow seen; None if there
    is no scale.

    Args:
        scaler: torch.amp.GradScaler; None without one.
        engine: DeepSpeed's engine; None without DeepSpeed.
    """
    if scaler is not None:
        state = scaler.state_dict()
        return (
            {"scale": float(state["scale"]), "good_steps": int(state["_growth_tracker"])}
            if state
            else None
        )
    dynamic = _dynamic(engine)
    if dynamic is None:
        return None
    return {
        "scale": float(dynamic.cur_scale),
        "good_steps": int(dynamic.cur_iter - dynamic.last_overflow_iter - 1),
        "hysteresis": int(dynamic.cur_hysteresis),
    }


def restore_scale(saved: dict[str, float] | None, scaler: Any, engine: Any) -> None:
    """Set what `read_scale` returned, wherever it was read."""
    if saved is None:
        return
    if scaler is not None and (state := scaler.state_dict()):
        good_steps = int(saved["good_steps"]) % int(state["growth_interval"])
        scaler.load_state_dict(state | {"scale": saved["scale"], "_growth_tracker": good_steps})
    dynamic = _dynamic(engine)
    if dynamic is not None:
        dynamic.cur_scale = saved["scale"]
        dynamic.last_overflow_iter, dynamic.cur_iter = -1, int(saved["good_steps"])
        dynamic.cur_hysteresis = int(saved.get("hysteresis", dynamic.delayed_shift))


def _dynamic(engine: Any) -> Any:
    if engine is None or not engine.fp16_enabled():
        return None
    scaler = engine.optimizer.loss_scaler
    return scaler if scaler.dynamic else None  # one that the user has fixed has no state
