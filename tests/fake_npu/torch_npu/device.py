"""The device itself: `torch.npu`, and one fallback that runs every operator on CPU tensors behind
the npu ones.

An npu tensor is an empty shell; its numbers are a CPU tensor kept beside it, by the shell's
storage, because autograd's saved copies of a tensor share nothing else with it.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

KEY = "PrivateUse1"
DEVICE_COUNT = int(os.environ.get("FAKE_NPU_COUNT", "2"))

# ---------------------------------------------------------------- numbers behind the shells

_numbers: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}
_sweep_at = 4096


def is_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def unwrap(value: Any) -> Any:
    """The CPU tensor behind an npu tensor, the CPU for the npu device; anything else as it is."""
    if is_npu(value):
        return _numbers[value.untyped_storage()._cdata][1]
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


def wrap(value: Any) -> Any:
    """An npu tensor for a CPU tensor; anything else as it is."""
    return _shell(value) if isinstance(value, torch.Tensor) and not is_npu(value) else value


def _shell(numbers: torch.Tensor) -> torch.Tensor:
    shell = torch._C._acc.create_empty_tensor(tuple(numbers.shape), numbers.dtype)
    storage = shell.untyped_storage()
    # The weak reference also keeps the storage's address from being given to another one.
    _numbers[storage._cdata] = (StorageWeakRef(storage), numbers)
    _sweep()
    return shell


def _sweep() -> None:
    """Forget the numbers of shells that are gone, whenever there are twice as many as last time."""
    global _sweep_at
    if len(_numbers) < _sweep_at:
        return
    for key in [key for key, (storage, _) in _numbers.items() if storage.expired()]:
        del _numbers[key]
    _sweep_at = max(4096, 2 * len(_numbers))


# ---------------------------------------------------------------- operators

# How often the host has read from the device: each time it would wait for all that was queued.
host_reads = [0]


def run_on_cpu(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: on the CPU tensors; what it writes to is returned as it came."""
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    result = operator(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs))
    if to_host:
        host_reads[0] += any(is_npu(value) for value in pytree.tree_leaves((args, kwargs)))
        return result  # .cpu()
    returns, arguments = operator._schema.returns, operator._schema.arguments
    if returns and all(
        value.alias_info is not None and value.alias_info.is_write for value in returns
    ):
        written = [_argument_written(value, arguments, args, kwargs) for value in returns]
        return written[0] if len(written) == 1 else tuple(written)
    return pytree.tree_map(wrap, result)


def _argument_written(value: Any, arguments: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The argument that an in-place or out= operator returns."""
    for number, argument in enumerate(arguments):
        alias = argument.alias_info
        if alias is not None and alias.before_set == value.alias_info.before_set:
            return args[number] if number < len(args) else kwargs[argument.name]
    raise AssertionError("an operator returns what it did not get")


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> torch.Tensor:
    host_reads[0] += is_npu(source) and not is_npu(target)
    unwrap(target).copy_(unwrap(source))
    return target


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    unwrap(target).resize_(source.shape).copy_(unwrap(source))
    return target


def _number(tensor: torch.Tensor) -> Any:
    host_reads[0] += 1
    return unwrap(tensor).item()


def _empty(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return _shell(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, *, dtype=None, **_):
    return _shell(torch.empty(size, dtype=dtype))


_OWN = {
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_local_scalar_dense": _number,
    "record_stream": lambda tensor, stream: None,
    "_fused_sdp_choice": lambda *args, **kwargs: 0,  # attention by plain products
    "view": lambda tensor, size: _shell(unwrap(tensor).reshape(size)),
    # so that `model.to(device)` keeps its parameters, and with them tied weights and optimizers
    "_has_compatible_shallow_copy_type": lambda tensor, other: True,
}

_SHARE_THE_STORAGE = {"detach", "alias"}  # C++ makes these, and the numbers follow
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


_AUTOCAST_TO_16_BITS = "mm bmm addmm baddbmm matmul linear scaled_dot_product_attention".split()


def _autocast(operator: Any) -> Any:
    """The operator on tensors cast to autocast's dtype, with autocast off inside."""

    def cast(value: Any) -> Any:
        is_wide = is_npu(value) and value.dtype == torch.float32
        return value.to(torch.get_autocast_dtype("npu")) if is_wide else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("npu", enabled=False):
            return operator(*pytree.tree_map(cast, args), **pytree.tree_map(cast, kwargs))

    return kernel


def _register_operators() -> list[torch.library.Library]:
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run_on_cpu, KEY)
    everything.fallback(torch.library.fallthrough_kernel, f"Autocast{KEY}")
    aten = torch.library.Library("aten", "IMPL")
    for name, kernel in _OWN.items():
        aten.impl(name, kernel, KEY)
    for name in _AUTOCAST_TO_16_BITS:
        aten.impl(name, _autocast(getattr(torch.ops.aten, name).default), f"Autocast{KEY}")
    for full_name in torch._C._dispatch_get_all_op_names():
        name = full_name.removeprefix("aten::")
        if name == full_name or name in _OWN or name in _SHARE_THE_STORAGE:
            continue
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if not any(has_kernel(full_name, key) for key in _COMPOSITE):
            continue
        # Composite kernels win over a fallback, so each of these gets it by name.
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is not None:
            aten.impl(name, _bound(operator), KEY)
    return [everything, aten]


def _bound(operator: Any) -> Any:
    return lambda *args, **kwargs: run_on_cpu(operator, *args, **kwargs)


# ---------------------------------------------------------------- torch.npu


class _Nothing:
    """A stream or an event: everything is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = lambda self, *args: None


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


def _module() -> types.ModuleType:
    npu = types.ModuleType("torch.npu")
    current = [0]

    def set_device(device: Any) -> None:
        index = _index(device)
        if not 0 <= index < DEVICE_COUNT:
            raise RuntimeError(f"npu:{index} of {DEVICE_COUNT} simulated devices")
        current[0] = index

    npu.is_available = npu.is_initialized = lambda: DEVICE_COUNT > 0
    npu.device_count = lambda: DEVICE_COUNT
    npu.current_device = lambda: current[0]
    npu.set_device = set_device
    npu.get_device_name = lambda *_: "simulated npu"
    npu._is_in_bad_fork = lambda: False
    npu.manual_seed = npu.manual_seed_all = lambda seed: None
    npu.empty_cache = npu.synchronize = npu.reset_peak_memory_stats = lambda *_: None
    npu.mem_get_info = lambda device=None: (48 * 2**30, 64 * 2**30)
    for name in ("memory_allocated", "memory_reserved"):
        vars(npu).update(dict.fromkeys((name, f"max_{name}"), lambda *_: 0))
    npu.get_rng_state = lambda *_: torch.get_rng_state()
    npu.set_rng_state = lambda state, *_: None
    npu.random = types.SimpleNamespace(
        get_rng_state=npu.get_rng_state, get_rng_state_all=lambda: [torch.get_rng_state()]
    )
    npu.is_bf16_supported = lambda including_emulation=False: True
    npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    npu.Stream, npu.Event = type("Stream", (_Nothing,), {}), type("Event", (_Nothing,), {})
    npu.current_stream = npu.default_stream = lambda *_: None
    return npu


_libraries: list[torch.library.Library] = []  # registrations end with their library


def register() -> types.ModuleType:
    """Make `npu` a device of this process; returns `torch.npu`."""
    npu = _module()
    _setup_privateuseone_for_python_backend("npu", backend_module=npu)
    sys.modules["torch.npu"] = npu
    _libraries.extend(_register_operators())
    # Page-locked memory is the backend's own allocator's, which this one has not: a mark on the
    # tensor stands for it.
    torch.Tensor.pin_memory = _pinned
    torch.Tensor.is_pinned = lambda tensor, device=None: getattr(tensor, "simulated_pinned", False)
    return npu


def _pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    assert tensor.device.type == "cpu", "only dense CPU tensors can be pinned"
    pinned = tensor.clone()
    pinned.simulated_pinned = True
    return pinned
