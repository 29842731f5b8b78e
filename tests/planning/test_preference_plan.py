"""A run on preferences in the plan: microbatches of whole pairs, and the reference that costs a
forward.
"""

from __future__ import annotations

from dataclasses import replace

from plan_workloads import known_shape

from finetune.config.preference_config import PreferenceConfig
from finetune.planning.inputs import fine_tuning_workload, preference_workload, with_micro_batch
from finetune.planning.traffic import (
    computed_flops_per_token,
    forward_flops_per_token,
    network_traffic,
)
from finetune.planning.workload import Cluster

SHAPE, CLUSTER = known_shape("Qwen/Qwen3-8B"), Cluster(devices_per_node=2)
ZERO3 = {"zero_optimization": {"stage": 3}}


def made(**changes: object) -> PreferenceConfig:
    sizes = {"micro_batch_size": 2, "global_batch_size": 32, "cutoff_len": 1000}
    return PreferenceConfig(model="Qwen/Qwen3-8B", data="d", output_dir="o", **sizes, **changes)


def test_a_microbatch_holds_both_answers_of_its_pairs():
    for loss, tokens in (("dpo", 4000), ("kto", 2000)):
        work = preference_workload(made(loss=loss), SHAPE, CLUSTER)
        assert (work.microbatch_tokens, work.longest, work.microbatches) == (tokens, 1000, 8)
        larger = with_micro_batch(work, made(loss=loss), 4)
        assert (larger.microbatch_tokens, larger.microbatches) == (2 * tokens, 4)


def test_the_adapter_off_is_another_forward():
    """Of a model that is trained whole the reference is asked once, before the run."""
    config = made(deepspeed=ZERO3)
    asked = preference_workload(config, SHAPE, CLUSTER)
    alone = replace(fine_tuning_workload(config, SHAPE, CLUSTER), documents=2)
    more = computed_flops_per_token(asked) - computed_flops_per_token(alone)
    assert asked.asks_reference and more == forward_flops_per_token(alone)
    assert network_traffic(asked).bytes > 1.2 * network_traffic(alone).bytes
    for other in (made(loss="simpo"), made(finetuning="full")):
        assert not preference_workload(other, SHAPE, CLUSTER).asks_reference
