"""`auto`: what is chosen fits, nothing that fits is faster, explicit values stay, and ranks choose
alike.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import run_helpers as runs
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_workloads import known_shape

from finetune.config.kinds import KINDS
from finetune.config.resolution import resolve_object
from finetune.errors import ConfigError
from finetune.planning.auto import (
    EQUAL_SHARE,
    SIZES,
    Chosen,
    choose_execution,
    lowest_memory_choice,
    open_settings,
)
from finetune.planning.inputs import workload_of
from finetune.planning.memory import fits, memory_of
from finetune.planning.traffic import step_time
from finetune.planning.workload import GIB, Cluster
from finetune.runtime import device, host
from finetune.runtime.host import HostUse
from finetune.training import execute, run

PRESETS = Path(__file__).parents[2] / "ds_configs"
NAMES = ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen2.5-72B"]
OPEN = {"device": "auto"}


def config_of(
    name: str = "Qwen/Qwen3-8B", *, processes: int = 8, offload: bool = True, **changes: Any
) -> Any:
    zero = {"stage": 3} | ({"offload_param": OPEN, "offload_optimizer": OPEN} if offload else {})
    given = {"model": name, "data": "x.jsonl", "output_dir": "out", "global_batch_size": 64}
    given |= {
        "micro_batch_size": "auto",
        "deepspeed": {"zero_optimization": copy.deepcopy(zero)},
    } | changes
    return resolve_object(given, processes).config


def cluster_of(
    device_gib: float | None, host_gib: float | None = 1000, *, devices: int = 8
) -> Cluster:
    def size(gib: float | None) -> int | None:
        return None if gib is None else int(gib * GIB)

    return Cluster(
        devices_per_node=devices, device_memory_bytes=size(device_gib), host_memory_bytes=size(host_gib),
        peak_flops=989e12, network_bytes_per_second=50e9, host_bytes_per_second=25e9,
    )  # fmt: skip


def offloads(chosen: Chosen) -> tuple[str, str]:
    zero = chosen.config.deepspeed["zero_optimization"]
    return zero["offload_param"]["device"], zero["offload_optimizer"]["device"]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(["lora", "full"]),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([512, 2048, 8192]),
    st.floats(8, 200),
)
def test_what_is_chosen_fits_and_more_memory_is_never_slower(
    name: str, finetuning: str, devices: int, cutoff: int, memory: float
):
    config, shape = (
        config_of(name, processes=devices, finetuning=finetuning, cutoff_len=cutoff),
        known_shape(name),
    )

    def seconds(chosen: Chosen, cluster: Cluster) -> float:
        work = workload_of(chosen.config, shape, cluster)
        found = step_time(work, cluster, chosen.config.tokens_per_step, 0.4).longest
        assert found is not None
        return found

    small, large = cluster_of(memory, devices=devices), cluster_of(2 * memory, devices=devices)
    chosen, roomy = choose_execution(config, shape, small), choose_execution(config, shape, large)
    assert open_settings(chosen.config) == {} and set(chosen.values) == set(open_settings(config))
    assert chosen.fits == fits(memory_of(workload_of(chosen.config, shape, small)), small)
    assert config.global_batch_size % chosen.config.micro_batch_size == 0
    if chosen.fits:
        assert roomy.fits
        # What a step takes by the plan, which knows nothing of starting kernels, may be as much
        # longer.
        assert seconds(roomy, large) <= seconds(chosen, large) * (1 + EQUAL_SHARE) ** 2
    else:
        assert chosen.values["gradient_checkpointing"] and chosen.values["micro_batch_size"] == 1


@pytest.mark.parametrize("name", NAMES[:3])
def test_nothing_that_fits_is_clearly_faster(name: str):
    """Against a plan made for each way by itself, by explicit settings."""
    cluster, shape = cluster_of(40), known_shape(name)
    chosen = choose_execution(config_of(name), shape, cluster)
    found = {}
    for size in (size for size in SIZES if 64 % size == 0):
        for checkpointing in (True, False):
            for devices in (("cpu", "cpu"), ("none", "cpu"), ("none", "none")):
                zero = {"stage": 3}
                zero |= {
                    block: {"device": kind}
                    for block, kind in zip(
                        ("offload_param", "offload_optimizer"), devices, strict=True
                    )
                }
                keys = {"zero_optimization": zero}
                given = config_of(
                    name,
                    gradient_checkpointing=checkpointing,
                    micro_batch_size=size,
                    deepspeed=keys,
                )
                work = workload_of(given, shape, cluster)
                if fits(memory_of(work), cluster):
                    time = step_time(work, cluster, given.tokens_per_step, 0.4).longest
                    found[size, checkpointing, devices] = time
    own = found[
        chosen.config.micro_batch_size,
        chosen.config.gradient_checkpointing,
        offloads(chosen),
    ]
    # Kernels of a layer take at most a millisecond to start, which the plan of a step leaves out.
    slack = 4 / 3 * shape.layers * 1e-3 * 8
    assert own <= min(found.values()) * (1 + EQUAL_SHARE) + slack


def test_little_memory_is_spared_and_much_is_used():
    shape = known_shape("Qwen/Qwen3-32B")
    tight, roomy = (
        choose_execution(config_of("Qwen/Qwen3-32B"), shape, cluster_of(gib)) for gib in (13, 140)
    )
    assert (
        tight.fits
        and offloads(tight) == ("cpu", "cpu")
        and tight.config.gradient_checkpointing is True
    )
    assert roomy.fits and offloads(roomy) == ("none", "none")
    assert roomy.config.micro_batch_size * roomy.config.cutoff_len >= 4096
    assert "GiB" in roomy.reason


def test_explicit_values_win():
    given = config_of(micro_batch_size=2, gradient_checkpointing=True, offload=False)
    assert (
        open_settings(given) == {}
        and choose_execution(given, known_shape(NAMES[1]), cluster_of(200)).config is given
    )
    half = config_of(gradient_checkpointing=True)
    chosen = choose_execution(half, known_shape(NAMES[1]), cluster_of(200))
    assert (
        chosen.config.gradient_checkpointing is True
        and "gradient_checkpointing" not in chosen.values
    )
    assert half.deepspeed["zero_optimization"]["offload_param"] == OPEN, (
        "the given configuration was changed"
    )


def test_without_memory_to_judge_by_the_sparing_way_is_taken():
    shape = known_shape("Qwen/Qwen3-0.6B")
    for cluster in (cluster_of(None, None), cluster_of(None)):
        chosen = choose_execution(config_of(), shape, cluster)
        assert (
            chosen.fits is None
            and offloads(chosen) == ("cpu", "cpu")
            and chosen.values["micro_batch_size"] == 1
        )
        assert chosen.config.gradient_checkpointing is True
    assert lowest_memory_choice(config_of(), "cpu").config.gradient_checkpointing is False


def test_after_out_of_memory_nothing_is_kept_that_could_go():
    shape, roomy = known_shape("Qwen/Qwen3-0.6B"), cluster_of(80)
    before, after = (
        choose_execution(config_of(), shape, roomy, out_of_memory=out) for out in (False, True)
    )
    assert before.config.gradient_checkpointing is False and offloads(before) == ("none", "none")
    assert after.config.gradient_checkpointing is True and offloads(after) == ("cpu", "cpu")


def test_microbatches_are_no_larger_than_a_step_fills():
    shape, config = known_shape("Qwen/Qwen3-0.6B"), config_of(global_batch_size=16)
    chosen = choose_execution(config, shape, cluster_of(80), step_tokens=16 * 500.0)
    assert chosen.config.micro_batch_size == 1  # 8,000 tokens on eight devices


def test_of_the_sizes_that_hold_a_whole_step_the_smallest_is_of_use():
    shape, one = (
        known_shape("Qwen/Qwen3-0.6B"),
        replace(cluster_of(80), nodes=1, devices_per_node=1),
    )
    chosen = choose_execution(config_of(global_batch_size=8), shape, one, step_tokens=8 * 640.0)
    # 8,192 tokens, where 4,096 do not hold 5,120 and 16,384 gain nothing
    assert chosen.config.micro_batch_size == 4


def test_the_number_of_microbatches_cannot_be_given_too():
    with pytest.raises(
        ConfigError, match="gradient_accumulation_steps is 4, and micro_batch_size is auto"
    ):
        config_of(gradient_accumulation_steps=4)
    assert "start chooses" in config_of().describe_batch(8)[0]


def test_null_of_older_run_files_is_auto():
    assert config_of(gradient_checkpointing=None).gradient_checkpointing == "auto"


def test_the_preset_that_the_plan_prefers():
    config = resolve_object(PRESETS / "qwen32b_lora_auto.json", 16).config
    guide = resolve_object(PRESETS / "qwen32b_lora_zero3.json", 16).config
    cluster = Cluster(2, 8, "npu", "910B3", int(64 * GIB), int(512 * GIB), 313e12, 25e9, 20e9)
    chosen = choose_execution(config, known_shape("Qwen/Qwen3-32B"), cluster)
    assert chosen.fits and offloads(chosen)[0] == "none"
    assert chosen.config.micro_batch_size * chosen.config.cutoff_len >= 8192
    same = set(type(config).model_fields) - {
        "micro_batch_size",
        "gradient_accumulation_steps",
        "deepspeed",
        "output_dir",
    }
    assert all(
        getattr(config, name) == getattr(guide, name) for name in same - {"gradient_checkpointing"}
    )


def test_ranks_with_different_memory_choose_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    materials = runs.make_materials(tmp_path, records=8)
    config = resolve_object(materials.settings(tmp_path / "run", micro_batch_size="auto"), 2).config
    everyone = [(9 * GIB, 20 * GIB), (5 * GIB, 60 * GIB)]
    seen = []

    def choose(config: Any, shape: Any, cluster: Cluster, **facts: Any) -> Chosen:
        seen.append(
            (
                cluster.device_memory_bytes,
                cluster.host_memory_bytes,
                cluster.devices,
                facts["step_tokens"],
            )
        )
        return Chosen(config, {}, "", True)

    monkeypatch.setattr(execute, "choose_execution", choose)
    data = SimpleNamespace(
        train=SimpleNamespace(lengths=np.array([10, 30])),
        batches=SimpleNamespace(global_batch_size=8),
    )
    events: list[Any] = []
    session = SimpleNamespace(
        control=SimpleNamespace(gather=lambda item: everyone),
        out_of_memory_note=lambda: None,
        runlog=SimpleNamespace(event=lambda name, **facts: events.append((name, facts))),
        world=SimpleNamespace(world_size=2, local_world_size=2, local_rank=0),
    )
    for _rank in range(2):
        execute.final_settings(KINDS["sft"], config, {"device_type": "cpu"}, data, session)
    assert seen == [(5 * GIB, 20 * GIB, 2, 160.0)] * 2 and events[0][0] == "execution"


def test_a_run_on_a_small_machine_says_so_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    materials = runs.make_materials(tmp_path, records=12, layers=4)
    explicit = materials.settings(tmp_path / "explicit", max_steps=3, gradient_checkpointing=False)
    chosen = materials.settings(tmp_path / "chosen", max_steps=3, micro_batch_size="auto")
    runs.train(explicit)

    def look(self: Any) -> HostUse:
        return HostUse(None, 2.0, 0, 100 * 2**20)

    assert callable(device.free_memory_bytes)
    monkeypatch.setattr(host.HostMeter, "look", look)
    result = run.run_config(KINDS["sft"], chosen)
    assert result.state == "done"
    [event] = runs.events(tmp_path / "chosen", "execution")
    assert event["chosen"] == {"gradient_checkpointing": True, "micro_batch_size": 1}
    assert (
        "not even that fits" in event["reason"] and "not even that fits" in capfd.readouterr().err
    )
    assert runs.sample_ids(tmp_path / "chosen") == runs.sample_ids(tmp_path / "explicit")
    pair = runs.losses(tmp_path / "chosen"), runs.losses(tmp_path / "explicit")
    assert runs.largest_relative_difference(*pair) < 1e-5
    assert json.loads((tmp_path / "chosen" / "status.json").read_text())["state"] == "done"
