"""`auto`: choose gradient checkpointing, the microbatch size and what is offloaded, from the plan
and the available memory.

Every combination of the open settings is planned. Of the combinations that fit, the one with the
shortest step is chosen. If several take about as long, the one that offloads least is chosen, then
the one that needs the least memory. All of them execute the same global batches.

The choice is a pure function: ranks that pass the same numbers choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any

from finetune.config.base_config import BaseConfig
from finetune.planning.inputs import workload_of
from finetune.planning.memory import fits, memory_of
from finetune.planning.shapes import ModelShape
from finetune.planning.traffic import (
    EFFICIENCY,
    computed_flops_per_token,
    host_traffic,
    network_traffic,
)
from finetune.planning.workload import GIB, Cluster, Workload
from finetune.runtime.language import _

# the blocks of `zero_optimization` whose device may be auto
OFFLOADS = ("offload_param", "offload_optimizer")
# Microbatch sizes that are tried, in samples, and the number of tokens beyond which a larger
# microbatch gains nothing worth its memory.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MOST_MICROBATCH_TOKENS = 16_384
# Combinations whose steps differ by less than this are treated as equally fast.
EQUAL_SHARE = 0.03
# Assumptions about a device of which nothing is known. They only affect the choice. They are an
# accelerator's arithmetic, its bandwidth in use over the network and to the host, and the time in
# which a host launches a layer's kernels, forward and backward. On the H100 that was measured,
# whose host was slow, 120 kernels took 9 ms (docs/evidence/roofline.md).
PEAK_FLOPS = {"cpu": 2e11}
OTHER_PEAK_FLOPS = 3e14
NETWORK_BYTES_PER_SECOND, HOST_BYTES_PER_SECOND = 25e9, 20e9
LAYER_SECONDS = 4e-3


@dataclass(frozen=True)
class Chosen:
    """The chosen settings.

    Attributes:
        config: the final settings, with a value wherever they were auto.
        values: what was chosen, by the names of the settings; empty if nothing was auto.
        reason: for people; "" if nothing was auto.
        fits: whether it fits, as in the plan; None if the memory is unknown, in which case the
            choice that needs the least memory was taken.
    """

    config: BaseConfig
    values: Mapping[str, Any]
    reason: str
    fits: bool | None


@dataclass(frozen=True)
class _Way:
    values: dict[str, Any]
    config: BaseConfig
    need_bytes: int
    seconds: float
    fits: bool | None

    @property
    def offloads(self) -> int:
        """Count what is offloaded: of choices that should take as long, the one that moves the
        fewest parts is better.
        """
        return sum(self.values.get(name) == "cpu" for name in OFFLOADS)


def open_settings(config: BaseConfig) -> dict[str, tuple[Any, ...]]:
    """Return the open settings with their possible values, ordered from the least memory."""
    found: dict[str, tuple[Any, ...]] = {}
    zero = (config.deepspeed or {}).get("zero_optimization") or {}
    for block in OFFLOADS:
        if (zero.get(block) or {}).get("device") == "auto":
            found[block] = ("cpu", "none")
    if config.gradient_checkpointing == "auto":
        found["gradient_checkpointing"] = (True, False)
    if getattr(config, "micro_batch_size", None) == "auto":
        found["micro_batch_size"] = SIZES
    return found


def with_values(config: BaseConfig, values: Mapping[str, Any]) -> BaseConfig:
    """Return the configuration with these values."""
    if not values:
        return config
    updates = {name: value for name, value in values.items() if name not in OFFLOADS}
    devices = {name: values[name] for name in OFFLOADS if name in values}
    if devices and config.deepspeed is not None:
        # Each block anew: a YAML alias makes both one object.
        zero = dict(config.deepspeed["zero_optimization"])
        for name, device in devices.items():
            zero[name] = {**zero[name], "device": device}
        updates["deepspeed"] = {**config.deepspeed, "zero_optimization": zero}
    return config.model_copy(update=updates)


def lowest_memory_choice(
    config: BaseConfig, device_type: str, decided: Mapping[str, Any] | None = None
) -> Chosen:
    """Return what is taken if no plan can be made: the sizes of the model are not known, or there
    is no memory to judge by. For `decided` see `choose_execution`.
    """
    values = {name: choices[0] for name, choices in open_settings(config).items()}
    if device_type == "cpu" and "gradient_checkpointing" in values:
        # a host's memory is large compared with what one step keeps
        values["gradient_checkpointing"] = False
    reason = _("auto: {values}, because the memory that is needed, or that there is, is not known")
    return Chosen(
        with_values(config, {**(decided or {}), **values}),
        values,
        reason.format(values=_named(values)) if values else "",
        None,
    )


def choose_execution(
    config: BaseConfig,
    shape: ModelShape,
    cluster: Cluster,
    *,
    decided: Mapping[str, Any] | None = None,
    step_tokens: float | None = None,
    out_of_memory: bool = False,
    workload: Callable[[Any, ModelShape, Cluster], Workload] = workload_of,
) -> Chosen:
    """Replace auto by a value in every setting of the configuration.

    Args:
        decided: values of other settings, which go into the final settings with what is chosen.
        cluster: devices with the memory that is free.
        step_tokens: tokens of a global batch, over all devices; None: assume that all samples have
            the maximum length.
        out_of_memory: whether the last start ran out of memory. If so, the choice that needs the
            least memory is taken, and the recorded limit bounds the microbatch size
            (training/build.py, make_execution).
        workload: function for the kind of run, if the caller has it.
    """
    choices = open_settings(config)
    decided = decided or {}
    if not choices:
        return Chosen(with_values(config, decided), {}, "", None)
    if out_of_memory:
        choices = {
            name: few if name == "micro_batch_size" else few[:1] for name, few in choices.items()
        }
    ways = []
    for combination in product(*choices.values()):
        values = dict(zip(choices, combination, strict=True))
        made = with_values(config, {**decided, **values})
        tokens = step_tokens or made.tokens_per_step
        work = workload(made, shape, cluster)
        size = values.get("micro_batch_size", 1)
        if size > 1:
            divides = made.tokens_per_step // work.sample_tokens % size == 0
            # Of those that hold a whole step the smallest is of use too: then a step is one
            # microbatch.
            is_filled = work.microbatch_tokens * work.processes < 2 * tokens
            if not divides or not is_filled or work.microbatch_tokens > MOST_MICROBATCH_TOKENS:
                continue
        if hasattr(made, "micro_batch_size"):
            count = ceil(tokens / (work.processes * work.microbatch_tokens))
            work = replace(work, microbatches=max(1, count))
        memory = memory_of(work)
        need = memory.node() if cluster.device_type == "cpu" else memory.device()
        seconds = _seconds(work, cluster, tokens)
        ways.append(_Way(values, made, need, seconds, fits(memory, cluster)))
    if all(way.fits is None for way in ways):
        return lowest_memory_choice(config, cluster.device_type, decided)
    fitting = [way for way in ways if way.fits]
    if not fitting:
        least = min(ways, key=lambda way: way.need_bytes)
        text = _("auto: {values}; by the plan not even that fits: it needs {need:.1f} GiB")
        reason = text.format(values=_named(least.values), need=least.need_bytes / GIB)
        return Chosen(least.config, least.values, reason, False)
    shortest = min(way.seconds for way in fitting)
    equal = [way for way in fitting if way.seconds <= shortest * (1 + EQUAL_SHARE)]
    best = min(equal, key=lambda way: (way.offloads, way.need_bytes))
    return Chosen(best.config, best.values, _reason(best, ways, cluster), True)


def _seconds(work: Workload, cluster: Cluster, step_tokens: float) -> float:
    """Estimate a step's seconds, to compare choices: compute, launches, transfers; no overlap."""
    peak = cluster.peak_flops or PEAK_FLOPS.get(cluster.device_type, OTHER_PEAK_FLOPS)
    computing = computed_flops_per_token(work) * step_tokens / work.processes / (peak * EFFICIENCY)
    # a forward is a third
    layers = work.shape.layers * (4 / 3 if work.computing.checkpointing else 1)
    starting = 0.0 if cluster.device_type == "cpu" else work.microbatches * layers * LAYER_SECONDS
    network = network_traffic(work).bytes / (
        cluster.network_bytes_per_second or NETWORK_BYTES_PER_SECOND
    )
    host = host_traffic(work).bytes / (cluster.host_bytes_per_second or HOST_BYTES_PER_SECOND)
    return computing + starting + network + host


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {str(value).lower()}" for name, value in values.items())


def _reason(best: _Way, ways: list[_Way], cluster: Cluster) -> str:
    on_cpu = cluster.device_type == "cpu"
    there = cluster.host_memory_bytes if on_cpu else cluster.device_memory_bytes
    text = _("auto: {values}; by the plan it needs {need:.1f} of {there:.1f} GiB")
    reason = text.format(
        values=_named(best.values), need=best.need_bytes / GIB, there=(there or 0) / GIB
    )
    faster = [way for way in ways if way.seconds < best.seconds and not way.fits]
    if faster:
        nearest = min(faster, key=lambda way: way.need_bytes)
        text = _("; what would be faster does not fit: {values} needs {need:.1f} GiB")
        reason += text.format(values=_named(nearest.values), need=nearest.need_bytes / GIB)
    return reason
