"""`auto`: what is chosen fits, nothing that fits is faster, explicit values stay."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import run_helpers as runs
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_workloads import known_shape

from finetune.config.kinds import KINDS
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve_object
from finetune.errors import ConfigError
from finetune.planning.auto import (
    EQUAL_SHARE,
    OFFLOADS,
    SIZES,
    Chosen,
    choose_execution,
    lowest_memory_choice,
    open_settings,
)
from finetune.planning.inputs import shape_from_scratch, workload_of
from finetune.planning.memory import fits, memory_of
from finetune.planning.plan import make_plan
from finetune.planning.traffic import step_time
from finetune.planning.workload import GIB, Cluster
from finetune.runtime import host
from finetune.runtime.host import HostUse
from finetune.training import execute, run

NAMES = ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen2.5-72B"]


def config_of(name="Qwen/Qwen3-8B", *, processes=8, offload=True, **changes):
    zero = {"stage": 3}
    if offload:
        zero |= {"offload_param": {"device": "auto"}, "offload_optimizer": {"device": "auto"}}
    given = {"model": name, "data": "x.jsonl", "output_dir": "out", "global_batch_size": 64}
    given |= {"micro_batch_size": "auto", "deepspeed": {"zero_optimization": zero}}
    return resolve_object(given | changes, processes).config


def cluster_of(device_gib, host_gib=1000, devices=8):
    sizes = [None if gib is None else int(gib * GIB) for gib in (device_gib, host_gib)]
    return Cluster(1, devices, "cuda", "", *sizes, 989e12, 50e9, 25e9)


def offloads(chosen: Chosen) -> tuple[str, str]:
    zero = chosen.config.deepspeed["zero_optimization"]
    return zero["offload_param"]["device"], zero["offload_optimizer"]["device"]


@settings(max_examples=20, deadline=None)
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
    config = config_of(name, processes=devices, finetuning=finetuning, cutoff_len=cutoff)
    shape = known_shape(name)

    def seconds(chosen: Chosen, cluster: Cluster) -> float:
        work = workload_of(chosen.config, shape, cluster)
        return step_time(work, cluster, chosen.config.tokens_per_step, 0.4).longest

    small, large = cluster_of(memory, devices=devices), cluster_of(2 * memory, devices=devices)
    chosen, roomy = choose_execution(config, shape, small), choose_execution(config, shape, large)
    assert open_settings(chosen.config) == {} and set(chosen.values) == set(open_settings(config))
    assert chosen.fits == fits(memory_of(workload_of(chosen.config, shape, small)), small)
    assert config.global_batch_size % chosen.config.micro_batch_size == 0
    if chosen.fits:
        assert roomy.fits
        # the plan of a step knows nothing of starting kernels
        assert seconds(roomy, large) <= seconds(chosen, large) * (1 + EQUAL_SHARE) ** 2
    else:
        assert chosen.values["gradient_checkpointing"] and chosen.values["micro_batch_size"] == 1


@pytest.mark.parametrize("name", NAMES[1:3])
def test_nothing_that_fits_is_clearly_faster(name: str):
    """Against a plan made for each way by itself, by explicit settings."""
    cluster, shape = cluster_of(40), known_shape(name)
    chosen = choose_execution(config_of(name), shape, cluster)
    found = {}
    sizes = [size for size in SIZES if 64 % size == 0]
    moved = (("cpu", "cpu"), ("none", "cpu"), ("none", "none"))
    for size, checkpointing, devices in product(sizes, (True, False), moved):
        blocks = zip(OFFLOADS, devices, strict=True)
        zero = {"stage": 3} | {block: {"device": kind} for block, kind in blocks}
        given = {"gradient_checkpointing": checkpointing, "micro_batch_size": size}
        explicit = config_of(name, deepspeed={"zero_optimization": zero}, **given)
        work = workload_of(explicit, shape, cluster)
        if fits(memory_of(work), cluster):
            time = step_time(work, cluster, explicit.tokens_per_step, 0.4).longest
            found[size, checkpointing, devices] = time
    config = chosen.config
    own = found[config.micro_batch_size, config.gradient_checkpointing, offloads(chosen)]
    # Kernels of a layer take at most a millisecond to start, which the plan of a step leaves out.
    slack = 4 / 3 * shape.layers * 1e-3 * 8
    assert own <= min(found.values()) * (1 + EQUAL_SHARE) + slack


def test_without_memory_to_judge_by_and_after_running_out_of_it_little_is_taken():
    shape, large = known_shape("Qwen/Qwen3-0.6B"), cluster_of(80)
    after = choose_execution(config_of(), shape, large, out_of_memory=True)
    unknown = [
        choose_execution(config_of(), shape, cluster_of(None, host)) for host in (None, 1000)
    ]
    for chosen in (after, *unknown):
        assert chosen.config.gradient_checkpointing is True and offloads(chosen) == ("cpu", "cpu")
    assert all(one.fits is None and one.values["micro_batch_size"] == 1 for one in unknown)
    assert lowest_memory_choice(config_of(), "cpu").config.gradient_checkpointing is False


def test_explicit_values_win():
    given = config_of(micro_batch_size=2, gradient_checkpointing=True, offload=False)
    assert open_settings(given) == {}
    assert choose_execution(given, known_shape(NAMES[1]), cluster_of(200)).config is given
    half = config_of(gradient_checkpointing=True)
    chosen = choose_execution(half, known_shape(NAMES[1]), cluster_of(200))
    assert chosen.config.gradient_checkpointing is True
    assert offloads(replace(chosen, config=half)) == ("auto", "auto"), "what was given was changed"
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 4, and micro_batch_size"):
        config_of(gradient_accumulation_steps=4)
    # null of older run files
    assert config_of(gradient_checkpointing=None).gradient_checkpointing == "auto"


def test_microbatches_are_no_larger_than_a_step_fills():
    shape, cluster = known_shape("Qwen/Qwen3-0.6B"), cluster_of(80)
    chosen = choose_execution(config_of(global_batch_size=16), shape, cluster, step_tokens=8000.0)
    assert chosen.config.micro_batch_size == 1  # 8,000 tokens on eight devices
    one = replace(cluster, devices_per_node=1)
    chosen = choose_execution(config_of(global_batch_size=8), shape, one, step_tokens=8 * 640.0)
    # 8,192 tokens, where 4,096 do not hold 5,120 and 16,384 gain nothing
    assert chosen.config.micro_batch_size == 4
    # 6 would fit too, and does not divide 64
    whole = {"finetuning": "full", "gradient_checkpointing": True, "offload": False}
    for gib in (17.6, 17.8, 18.0, 18.2, 18.3, 18.4):
        config = config_of(NAMES[0], processes=1, **whole)
        size = choose_execution(config, shape, cluster_of(gib, devices=1)).config.micro_batch_size
        assert 64 % size == 0 and size <= 8


def test_the_advised_batch_size_fits_and_divides_the_step():
    given = {"train_data_path": "x", "output_dir": "out", "depth": 12, "max_seq_len": 1024}
    given |= {"device_batch_size": 96, "total_batch_size": 96 * 1024}
    config = resolve_object(given, 1, PretrainConfig).config
    shape, over = shape_from_scratch(config), []
    for gib in (10, 13, 17, 21):
        cluster = Cluster(device_memory_bytes=gib * GIB, host_memory_bytes=512 * GIB)
        made = make_plan(config, shape, cluster, 0.4)
        (size,) = re.findall(r"--device-batch-size (\d+) ", " ".join(made.advice))
        assert 96 % int(size) == 0 and int(size) <= made.largest_micro_batch
        over.append(made.largest_micro_batch - int(size))
    assert any(over)


def test_ranks_with_different_memory_choose_the_same(tiny_model, tmp_path, monkeypatch):
    given = {"model": str(tiny_model), "data": "d", "output_dir": str(tmp_path / "run")}
    config = resolve_object(given | {"micro_batch_size": "auto"}, 2).config
    everyone = [(9 * GIB, 20 * GIB), (5 * GIB, 60 * GIB)]
    seen = []

    def choose(config: Any, shape: Any, cluster: Cluster, **facts: Any) -> Chosen:
        memory = cluster.device_memory_bytes, cluster.host_memory_bytes
        seen.append((*memory, cluster.devices, facts["step_tokens"]))
        return Chosen(config, {}, "", True)

    monkeypatch.setattr(execute, "choose_execution", choose)
    train, batches = SimpleNamespace(lengths=np.array([10, 30])), Mock(global_batch_size=8)
    session = Mock(world=SimpleNamespace(world_size=2, local_world_size=2, local_rank=0))
    session.control.gather.return_value = everyone
    data = SimpleNamespace(train=train, batches=batches)
    execute.final_settings(KINDS["sft"], config, {"device_type": "cpu"}, data, session)
    assert seen == [(5 * GIB, 20 * GIB, 2, 160.0)]
    assert session.runlog.event.call_args.args == ("execution",)


def test_a_run_on_a_small_machine_says_so_and_trains_the_same(tmp_path, monkeypatch, capfd):
    materials = runs.make_materials(tmp_path, records=12, layers=4)
    explicit = materials.settings(tmp_path / "explicit", max_steps=3, gradient_checkpointing=False)
    chosen = materials.settings(tmp_path / "chosen", max_steps=3, micro_batch_size="auto")
    run.run_config(KINDS["sft"], explicit)

    monkeypatch.setattr(host.HostMeter, "look", lambda _: HostUse(None, 2.0, 0, 100 * 2**20))
    result = run.run_config(KINDS["sft"], chosen)
    assert result.state == "done"
    [event] = runs.events(tmp_path / "chosen", "execution")
    assert event["chosen"] == {"gradient_checkpointing": True, "micro_batch_size": 1}
    assert "not even that fits" in event["reason"] in capfd.readouterr().err
    assert runs.sample_ids(tmp_path / "chosen") == runs.sample_ids(tmp_path / "explicit")
    pair = runs.losses(tmp_path / "chosen"), runs.losses(tmp_path / "explicit")
    assert runs.largest_relative_difference(*pair) < 1e-5
