"""The training state, free of how many processes or which ZeRO stage hold it: trainable weights and
moments.

The moments are Adam's two, Muon's momentum, or what another optimizer holds for the parameter
(saved_tensors.py).

Three forms on disk, all safetensors plus `state.json`:

whole   `weights.safetensors`, `moments.safetensors`: float32, whole tensors by parameter name.
        LoRA, which peft reads as it is, and one process.
parts   `weights-<rank>.safetensors`, `moments-<rank>.safetensors`: whole tensors, each in the files
        of one rank, which `writers` in `state.json` says. All parameters on several processes, but
        for ZeRO-3.
slices  The same names: full-parameter ZeRO-3, where no rank could hold a whole. Each rank's flat
        slice of each parameter; slices in rank order, cut to the parameter's size, are the
        parameter.

Any form loads into any layout. Weights enter the model before DeepSpeed makes its engine (setting
its float32 masters afterwards is not enough: the first forward would still use the old weights);
moments enter after.

Of DeepSpeed (0.19.8) this uses deepspeed.utils.safe_* (documented) and, because its state is empty
before the first step, the optimizer's `state` of each flat group; a test pins the attributes used.
Its own checkpoints are not used: they are pickles, and belong to one ZeRO stage and one number of
processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from finetune.storage.checkpoint_files import share_out
from finetune.training.loss_scale import read_scale, restore_scale
from finetune.training.optimizers import restored_state, step_count
from finetune.training.saved_tensors import (
    ALL_MOMENTS,
    MOMENTS,
    STATE_NAME,
    HostCopies,
    Records,
    SavedTensors,
    Snapshot,
    held_part,
    local_slice,
    read_description,
    write_description,
    write_tensors,
)

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
        """Copy what `save` would write here, and write it later: training may go on. Every rank
        must call.
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
        """Which rank writes a parameter and its moments, where the ranks share them."""
        return (
            share_out(self._sizes(), world_size) if self.form == "parts" and world_size > 1 else {}
        )

    def _own(self, rank: int, world_size: int) -> frozenset[str]:
        """The parameters that this rank writes."""
        writers = self._writers(world_size)
        everything = self.form == "slices" or (rank == 0 and not writers)
        return frozenset(
            name for name, _ in trainable(self.model) if everything or writers.get(name) == rank
        )

    def _files(self, rank: int, world_size: int) -> dict[str, tuple[str | None, ...]]:
        """Names of this rank's files of tensors, and which tensors of each parameter they hold:
        None is the weight.
        """
        shared = self.form == "slices" or (self.form == "parts" and world_size > 1)
        suffix = f"-{rank:05d}" if shared else ""
        files: dict[str, tuple[str | None, ...]] = {f"weights{suffix}.safetensors": (None,)}
        # Of step 0 there are no moments: torch and DeepSpeed make them in the first step.
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
        """Of moments, those that the parameter's optimizer has."""
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
        # The setters of deepspeed.utils write into what is there, and before the first step nothing
        # is. ZeRO-3 keeps the flat groups under one name, ZeRO-1/2 under another.
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
        # DeepSpeed links all groups when the first group has stepped (_optimizer_step calls
        # _lazy_init_hp_params_optimizer_state), at which time the others have no state yet, and
        # never again; safe_get_full_optimizer_state then raises on some ranks. May go when each
        # group is linked after its own step.
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
    """A context in which a ZeRO-3 parameter is whole and what rank 0 writes to it is kept; nothing
    for others.
    """
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    # With a rank that modifies it, what it holds at the end is broadcast and partitioned again;
    # without one, it is dropped.
    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def _fill_partitioned(parameter: Any, saved: SavedTensors, name: str) -> None:
    """Set the weights of a ZeRO-3 parameter before there is an engine. Every rank calls."""
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
    """Weights by parameter name with a checkpoint's in place of those that it has, in the dtype
    that they have.
    """
    saved = SavedTensors(folder, "weights")
    return weights | {
        name: saved.get(name).reshape(weights[name].shape).to(weights[name].dtype)
        for name in saved.description["shapes"].keys() & weights.keys()
    }


def whole_weights(
    model: torch.nn.Module, dtype: torch.dtype | None, *, keep: bool
) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name on the CPU, whole whatever holds them. Every rank calls.

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
