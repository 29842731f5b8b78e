"""What a run needs of memory: terms by hand, what must be monotone, what autograd really keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_workloads import SMALL, known_shape, of_kind, workload
from tiny_models import as_trained
from transformers import CONFIG_MAPPING

from finetune.config.resolution import resolve_object
from finetune.modeling.loss import LOGITS_PER_CHUNK, TRAINED_HEAD_CHUNKS
from finetune.planning.activations import (
    LOSS_BYTES_PER_LOGIT,
    block_bytes_per_token,
    loss_bytes,
)
from finetune.planning.inputs import with_sharding, workload_of
from finetune.planning.memory import Memory, memory_of
from finetune.planning.shapes import KNOWN_MODELS, shape_of_model
from finetune.planning.traffic import (
    computed_flops_per_token,
    flops_per_token,
    host_traffic,
    network_traffic,
)
from finetune.planning.workload import Cluster, Computing, Sharding

GIVEN = {"model": "Qwen/Qwen3-8B", "data": "x.jsonl", "output_dir": "out"}
NAMES = [name for name in KNOWN_MODELS if "-4B" not in name]
DEVICES = (1, 4, 8, 16, 64)


def test_a_second_copy_within_the_node_costs_memory_and_spares_the_network():
    """hpZ (ZeRO++, Wang et al. 2023, section 3.2): M x P / (processes of a node) more."""
    shape = known_shape("Qwen/Qwen2.5-7B")
    for lora in (True, False):
        plain = workload(shape, lora=lora, sharding=Sharding(engine=True, stage=3), devices=16)
        copied = replace(plain, sharding=replace(plain.sharding, hpz=8))
        more = of_kind(copied, "weights") - of_kind(plain, "weights")
        assert more == pytest.approx(2 * plain.parameters / 8, rel=1e-6)

        across = plain.trained + (0 if lora else plain.parameters)
        assert network_traffic(copied).bytes == pytest.approx(15 / 16 * 4 * 2 * across, rel=2e-3)
        assert network_traffic(plain).bytes > network_traffic(copied).bytes
        two = replace(plain, sharding=Sharding(engine=True, stage=2))  # a reduction per microbatch
        assert network_traffic(two).bytes == pytest.approx(15 / 16 * 2 * plain.trained * 5)


def test_buffers_of_hccl_are_planned_for_several_npus_only():
    keys = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}

    def buffers(devices: int, kind: str = "npu", **more: object) -> int:
        config = resolve_object({**GIVEN, **more}, devices).config
        cluster = Cluster(1, devices, kind)
        return workload_of(config, known_shape("Qwen/Qwen3-8B"), cluster).hccl_bytes

    assert buffers(1) == buffers(8, "cuda") == 0
    assert buffers(8) == 2 * 200 * 2**20
    assert buffers(8, deepspeed=keys, hccl_buffer_mb=100) == 3 * 2 * 100 * 2**20


def test_the_state_of_full_training_is_that_of_the_zero_paper():
    """Sixteen bytes a parameter in mixed precision (section 3.1), spread by stage (figure 1)."""
    shape = known_shape("Qwen/Qwen2.5-7B")

    def state(stage: int, devices: int) -> float:
        how = Sharding(engine=True, stage=stage)
        made = memory_of(workload(shape, lora=False, sharding=how, devices=devices))
        terms = [t for t in made.terms if t.kind in ("weights", "optimizer") and "rows" in t.phases]
        return sum(t.bytes for t in terms) / shape.total

    # weights in 16 bit, masters and two moments in 32: 2 + 12
    assert state(2, 64) == pytest.approx(2 + 12 / 64, rel=1e-6)
    assert state(3, 64) == pytest.approx((2 + 12) / 64, rel=1e-6)
    assert state(2, 1) == pytest.approx(14, rel=1e-6)


def test_logits_are_bounded_by_a_chunk_and_compiled_ones_are_not():
    shape = known_shape("Qwen/Qwen2.5-7B")
    small, large = (loss_bytes(shape, Computing(2, 2), targets) for targets in (10_000, 100_000))
    chunk = LOSS_BYTES_PER_LOGIT * LOGITS_PER_CHUNK * TRAINED_HEAD_CHUNKS
    assert all(0.9 * chunk < logits <= chunk for logits in (small, large))
    compiled = loss_bytes(shape, Computing(2, 2, compiled=True), 10_000)
    assert compiled == 6 * 10_000 * shape.vocabulary
    # one target more makes two chunks of half the size: a chunk counts as full
    full = LOGITS_PER_CHUNK * TRAINED_HEAD_CHUNKS // shape.vocabulary
    given = {"lora": False, "sharding": Sharding(True, 3), "devices": 8}
    works = [
        workload(shape, **given, microbatch_tokens=full + 1, targets=n) for n in (full, full + 1)
    ]
    assert memory_of(works[0]).device() <= memory_of(works[1]).device()


def test_fused_adapters_need_weights_that_are_whole():
    shape = known_shape("Qwen/Qwen3-8B")

    def computing(kind: str = "cuda", stage: int = 0, **more: object) -> Computing:
        work = workload_of(resolve_object({**GIVEN, **more}, 1).config, shape, Cluster(1, 1, kind))
        return with_sharding(work, Sharding(stage > 0, stage)).computing

    assert computing().adds_adapters and computing(stage=2).adds_adapters
    assert not computing(stage=3).adds_adapters and not computing(fused_lora=False).adds_adapters
    assert not computing(finetuning="full").adds_adapters
    assert computing("npu").fused_layers and not computing("cpu").fused_layers
    [[block, _count]] = shape.blocks
    kept = block_bytes_per_token(block, computing())
    for without in ({"fused_lora": False}, {"fused_layers": "off"}):
        assert kept < block_bytes_per_token(block, computing(**without))


def test_weights_of_the_files_own_dtype_are_the_mapped_files():
    """Measured: loading adds nothing to a CPU process until it computes."""
    shape = known_shape("Qwen/Qwen3-0.6B")
    changes = {"device_type": "cpu", "computing": Computing(4, 4), "trained": shape.total}

    def made(file_bytes: int, devices: int = 1, sharding: Sharding = Sharding()) -> Memory:  # noqa: B008
        given = {"devices": devices, "sharding": sharding, "file_bytes": file_bytes}
        return memory_of(workload(shape, lora=False, **given, **changes))

    mapped, converted = made(4), made(2)
    assert mapped.process(("load",)) == 0
    assert converted.process(("load",)) == (4 + 2) * shape.total
    for memory in (mapped, converted):
        assert memory.process(("rows",)) >= 12 * shape.total
    # rank 0 reads all of it
    sliced = made(4, devices=2, sharding=Sharding(engine=True, stage=3))
    assert sliced.process(("load",)) == 4 * shape.total + 4 * -(-shape.total // 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_copy_that_is_saved_behind_the_training_is_there_while_it_trains(stage: int):
    shape = known_shape("Qwen/Qwen2.5-7B")
    work = workload(shape, lora=False, sharding=Sharding(engine=True, stage=stage), devices=8)
    behind, waited = memory_of(replace(work, saves_behind=True)), memory_of(work)
    copy = 12 * -(-shape.total // 8)  # each process its share
    assert behind.node() >= 8 * copy  # all processes are on one node
    for phase, more in (("gather", copy), ("update", copy), ("save", copy // 3), ("result", 0)):
        assert behind.in_phase("host", phase) - waited.in_phase("host", phase) == more


def test_gradients_in_one_bucket_are_summed_after_the_microbatches():
    """Then no activation is left; several buckets are summed among them."""
    shape = known_shape("Qwen/Qwen3-0.6B")
    for stage, size in product((2, 3), (shape.total, shape.total // 4)):
        how = Sharding(True, stage, reduce_bucket=size)
        memory = memory_of(workload(shape, lora=False, sharding=how, devices=8))
        assert _summed(memory) == ("reduce" if size == shape.total else "rows", 2 * size)


def _summed(memory: Memory) -> tuple[str, int]:
    [term] = [term for term in memory.terms if term.formula.endswith("being summed")]
    return *term.phases, term.bytes


def test_collectives_of_a_cpu_have_their_own_copies():
    """Measured: all_gather and reduce_scatter of 64 MiB take 64 MiB more, all_reduce next to none."""
    shape = known_shape("Qwen/Qwen3-0.6B")
    for stage, sum_copies in ((2, 1), (3, 2)):
        sharding = Sharding(True, stage, prefetch_bucket=10**6, reduce_bucket=shape.total)
        given = {"lora": False, "sharding": sharding, "devices": 2}
        on = {kind: workload(shape, **given, device_type=kind) for kind in ("cpu", "cuda")}
        gathered = {kind: memory_of(work).in_phase("device", "gather") for kind, work in on.items()}
        # ZeRO-2 has no bucket; two threads
        bucket = shape.total if stage == 2 else 2 * (10**6 + shape.largest_module)
        context = of_kind(on["cuda"], "framework", location="device")
        assert gathered["cpu"] - (gathered["cuda"] - context) == 2 * bucket
        assert _summed(memory_of(on["cpu"]))[1] == 2 * sum_copies * shape.total


def test_zero3_gathers_ahead_up_to_its_bounds():
    """What is gathered is bounded by DeepSpeed's numbers, not by the model."""
    shape = known_shape("Qwen/Qwen2.5-72B")
    small = Sharding(True, 3, prefetch_bucket=10**6, max_live=10**8, max_reuse_distance=10**8)
    more, reused = replace(small, max_live=3 * 10**8), replace(small, max_reuse_distance=6 * 10**8)
    live = [
        of_kind(workload(shape, lora=True, sharding=how, devices=8), "live")
        for how in (small, more, reused)
    ]
    assert live[1] - live[0] == 2 * 2 * 10**8
    assert live[2] - live[0] == 2 * (3 * 10**8 + 10**6 - 10**8)


ENGINES = {"engine": st.just(True), "offload_optimizer": st.booleans()}
SHARDINGS = st.one_of(
    st.builds(Sharding, stage=st.sampled_from([1, 2]), **ENGINES),
    st.builds(
        Sharding,
        stage=st.just(3),
        offload_param=st.booleans(),
        reduce_bucket=st.integers(1, 10**9),
        max_reuse_distance=st.integers(1, 10**10),
        **ENGINES,
    ),
)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    lora=st.booleans(),
    sharding=SHARDINGS,
    tokens=st.integers(2, 10**6),
    device_type=st.sampled_from(["npu", "cuda", "cpu"]),
)
def test_more_devices_never_need_more_each(name, lora, sharding, tokens, device_type):
    given, needs = {"lora": lora, "sharding": sharding, "device_type": device_type}, []
    for devices in DEVICES:
        sizes = {"microbatch_tokens": tokens, "targets": tokens, "microbatches": -(-64 // devices)}
        work = workload(known_shape(name), devices=devices, local_processes=1, **given, **sizes)
        memory = memory_of(work)
        needs.append((memory.device(), memory.node()))
    for earlier, later in pairwise(needs):
        assert later[0] <= earlier[0] and later[1] <= earlier[1]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    lora=st.booleans(),
    devices=st.sampled_from(DEVICES),
    stage=st.sampled_from([2, 3]),
)
def test_offload_moves_bytes_and_loses_none(name, lora, devices, stage):
    shape, state = known_shape(name), ("weights", "optimizer", "gradients", "buffers")
    plain = Sharding(engine=True, stage=stage)
    moved = replace(plain, offload_optimizer=True)
    pairs = [(plain, moved), (moved, replace(moved, offload_param=True))][: stage - 1]
    for pair in pairs:
        old, new = (workload(shape, lora=lora, sharding=how, devices=devices) for how in pair)
        assert memory_of(new).device() <= memory_of(old).device()
        assert of_kind(new, *state, location="host") >= of_kind(old, *state, location="host")
        for kind in ("weights", "optimizer"):
            assert of_kind(new, kind) == of_kind(old, kind)
        assert of_kind(new, "gradients") + of_kind(new, "buffers") >= of_kind(old, "gradients")
        assert host_traffic(new).bytes > host_traffic(old).bytes


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    lora=st.booleans(),
    sharding=st.one_of(st.just(Sharding()), SHARDINGS),
    tokens=st.integers(2, 10**5),
    more=st.integers(0, 10**5),
)
def test_longer_microbatches_and_checkpointing_off_never_need_less(
    name, lora, sharding, tokens, more
):
    given = {"lora": lora, "sharding": sharding, "devices": 8}
    short = workload(known_shape(name), microbatch_tokens=tokens, targets=tokens, **given)
    long = replace(short, microbatch_tokens=tokens + more, targets=tokens + more)
    kept = replace(short, computing=replace(short.computing, checkpointing=False))
    assert memory_of(short).device() <= memory_of(long).device()
    assert memory_of(short).device() <= memory_of(kept).device()
    assert flops_per_token(short) <= computed_flops_per_token(short)
    assert computed_flops_per_token(kept) == flops_per_token(kept)


def kept_bytes(model, tokens: int) -> int:
    """Bytes that a forward pass of two documents keeps for its backward, parameters aside."""

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(tokens)[None]
    given = {"use_cache": False, "logits_to_keep": 1, "document_lengths": (tokens - 24, 24)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, position_ids=ids, **given)
    return sum(kept.values())


KEPT = [(kind, "float32") for kind in ("qwen3", "llama", "nanochat", "qwen2", "mixtral")]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*KEPT, ("qwen3", "bfloat16"), ("nanochat", "bfloat16"), ("qwen3_moe", "bfloat16")],
)
def test_a_block_keeps_what_autograd_keeps_of_it(kind: str, dtype: str):
    """The difference of models with three blocks and with one, in bytes that autograd holds."""
    tokens, found, size = 64, [], 4 if dtype == "float32" else 2
    for layers in (1, 3):
        sizes = {**SMALL, "num_hidden_layers": layers, "head_dim": 16}
        sizes |= {"moe_intermediate_size": 160, "num_experts": 16}
        model = as_trained(CONFIG_MAPPING[kind](**sizes)).to(getattr(torch, dtype))
        found.append(kept_bytes(model.requires_grad_(True).train(), tokens))
    [[block, _count]] = shape_of_model(model).blocks
    how = Computing(size, size, float32_attention=size == 2)
    computed = block_bytes_per_token(block, how) * tokens
    # not counted: an element per token of each norm and head, the copy that joins documents
    assert computed == pytest.approx((found[1] - found[0]) / 2, rel=0.15)
