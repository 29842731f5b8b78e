"""Models and workloads that the tests of planning share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache

from finetune.planning.memory import memory_of
from finetune.planning.shapes import ModelShape, known_config, shape_of_config
from finetune.planning.workload import Computing, Sharding, Workload

SMALL = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 256,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@cache
def known_shape(name: str) -> ModelShape:
    return shape_of_config(known_config(name), name)


def lora_parameters(shape: ModelShape, rank: int, adapted: Collection[str]) -> int:
    """Two matrices a linear layer (Hu et al. 2021, section 4.1)."""
    sides = (m.inputs + m.outputs for m in shape.matrices if m.linear and m.name in adapted)
    return rank * sum(sides)


def workload(
    shape: ModelShape, *, lora: bool, sharding: Sharding, devices: int, **changes
) -> Workload:
    size = 2
    adapted = shape.adapted("all-linear") if lora else frozenset()
    adapter = lora_parameters(shape, 16, adapted)
    made = Workload(
        shape=shape,
        computing=Computing(
            element_bytes=size,
            weight_bytes=size if lora or sharding.engine else 4,
            adapted=adapted,
            adapter_bytes=(size if sharding.engine else 4) if lora else 0,
            checkpointing=True,
        ),
        sharding=sharding,
        trained=adapter or shape.total,
        adapter=adapter,
        processes=devices,
        local_processes=min(8, devices),
        microbatches=4,
    )
    return replace(made, **changes)


def of_kind(work: Workload, *kinds: str, location: str | None = None) -> int:
    return sum(
        t.bytes for t in memory_of(work).terms if t.kind in kinds and location in (None, t.location)
    )
