"""Weights, gradients and optimizer of a run, and the buffers that go with them, by the way it is sharded. No torch.

P is all parameters, P_t the trained ones, N processes. Formulas under DeepSpeed are read off its 0.19.8 source.
"""

from __future__ import annotations

from math import ceil

from finetune.planning.memory_terms import PHASES, STEP, TRAINING, Phase, Place, Term, Workload

MOMENT_BYTES, MASTER_BYTES, GRADIENT_BYTES = 4, 4, 4  # float32, each
_GLOO_THREADS = 2  # torch ProcessGroupGloo.hpp, Options: collectives that run at once
_SUMMING: tuple[Phase, ...] = ("rows", "reduce", "update")
_ZERO = "ZeRO paper (Rajbhandari et al. 2020)"
_STAGE3 = "deepspeed 0.19.8 runtime/zero/stage3.py"
_STAGE2 = "deepspeed 0.19.8 runtime/zero/stage_1_and_2.py"
_GATHERED = "deepspeed 0.19.8 runtime/zero/partition_parameters.py"
_GLOO = "torch ProcessGroupGloo.cpp"


def state_terms(work: Workload) -> list[Term]:
    """What does not depend on the row, zero terms included."""
    if work.sharding.stage == 3:
        return _zero3(work)
    return _zero12(work) if work.sharding.engine else _plain(work)


def _moments(work: Workload, numbers: int) -> int:
    """Bytes of the optimizer's moments for so many trained parameters."""
    if not work.muon:
        return 2 * MOMENT_BYTES * numbers
    matrices = work.shape.layers * work.shape.block_matrices
    return MOMENT_BYTES * matrices + 2 * MOMENT_BYTES * (numbers - matrices)


def _plain(work: Workload) -> list[Term]:
    """One process, or DDP."""
    how, trained = work.computing, work.trained
    frozen = work.parameters - trained
    held = how.weight_bytes * frozen + (how.adapter_bytes if work.adapter else how.weight_bytes) * trained
    # One process reads a mapped file when it first computes with it; several compare or send its weights before.
    there = TRAINING if work.mapped and work.processes == 1 else PHASES
    terms = [
        Term("weights", held, "device", f"{how.weight_bytes} B x P", "ours: training/build_sft.py", there),
        _gradients(work, trained),
        Term(
            "optimizer",
            _moments(work, trained),
            "device",
            "4 B x blocks' matrices + 8 B x the rest" if work.muon else "8 B x P_t",
            "torch.optim.AdamW: two float32 moments" + ("; Muon: one" if work.muon else ""),
        ),
        Term(
            "buffers",
            0 if work.fused else 4 * trained,
            "device",
            "4 B x P_t: intermediate tensors of the update",
            "torch.optim.AdamW(foreach=True)",
            ("update",),
        ),
    ]
    if how.autocast:
        cast = how.element_bytes * work.shape.passed
        terms.append(Term("weights", cast, "device", "2 B x matrices: cast for the row", "torch.amp", ("rows",)))
    if work.muon:
        largest = max(matrix.numbers for matrix in work.shape.matrices)
        terms.append(Term("buffers", 14 * largest, "device", "14 B x largest matrix", "torch.optim.Muon", ("update",)))
    if work.processes > 1:
        # LoRA's gradients are summed flat, after all rows; DDP's buckets are made all the same, and stay untouched.
        touched = 4 * trained if not (work.adapter and work.device_type == "cpu") else 0
        terms.append(Term("buffers", touched, "device", "4 B x P_t: buckets", "torch DDP reducer", PHASES))
        if work.adapter:
            terms.append(
                Term("buffers", 4 * trained, "device", "4 B x P_t: flat sum", "ours: execution.py", ("update",))
            )
    return terms


def _gradients(work: Workload, numbers: int) -> Term:
    size = work.computing.adapter_bytes if work.adapter else work.computing.weight_bytes
    return Term("gradients", size * numbers, "device", f"{size} B x P_t", f"{_ZERO}, sec. 3.1", STEP)


def _zero12(work: Workload) -> list[Term]:
    """ZeRO-1 and ZeRO-2."""
    how, sharding, share = work.computing, work.sharding, work.share
    c, place = how.element_bytes, "host" if sharding.offload_optimizer else "device"
    bucket = _touched(work, sharding.reduce_bucket)
    buckets = c * bucket * (2 if sharding.overlap and work.device_type != "cpu" else 1)
    largest = work.largest_trained
    terms = [
        Term("weights", c * work.parameters, "device", f"{c} B x P", f"{_ZERO}, sec. 5.1-5.2", PHASES),
        Term("weights", MASTER_BYTES * share, place, "4 B x P_t / N: float32 masters", f"{_STAGE2}: __init__", PHASES),
        Term("optimizer", _moments(work, share), place, "8 B x P_t / N", f"{_ZERO}, sec. 5.1"),
        Term(
            "buffers", buckets, "device", f"{c} B x reduce_bucket_size", f"{_STAGE2}: setup_buckets", ("rows", "reduce")
        ),
        _summed(work, 1, f"{_STAGE2}: allreduce_bucket flattens"),
        Term("buffers", c * work.trained, "device", f"{c} B x P_t: flat copy", f"{_STAGE2}: __init__", ("load",)),
        Term(
            "buffers",
            c * work.trained if work.gloo else 0,
            "device",
            f"{c} B x P_t: gloo's flat output",
            f"deepspeed 0.19.8 runtime/utils.py: all_gather_into_tensor_dp_groups; {_GLOO}: allgather",
            ("gather",),
        ),
    ]
    if sharding.stage < 2:
        terms.append(Term("gradients", 4 * work.trained, "device", "4 B x P_t", f"{_ZERO}, sec. 5.1", _SUMMING))
    if sharding.offload_optimizer:
        terms += [
            Term(
                "gradients", GRADIENT_BYTES * share, "host", "4 B x P_t / N", f"{_STAGE2}: initialize_optimizer_states"
            ),
            Term(
                "buffers",
                c * share,
                "host",
                f"{c} B x P_t / N: weights on their way back",
                f"{_STAGE2}: __init__",
                PHASES,
            ),
            *(
                Term("buffers", c * largest, there, f"{c} B x largest trained tensor", f"{_STAGE2}: temp_grad_buffer")
                for there in ("device", "host")
            ),
            Term(
                "gradients",
                c * share if work.rows > 1 else 0,
                "host",
                f"{c} B x P_t / N: sum over rows",
                f"{_STAGE2}: accumulated_grads_in_cpu",
            ),
        ]
    else:
        terms += [
            Term("gradients", GRADIENT_BYTES * share, "device", "4 B x P_t / N", f"{_ZERO}, sec. 5.2", _SUMMING),
            Term("gradients", 4 * share, "device", "4 B x P_t / N: flat copy", f"{_STAGE2}: step", ("update",)),
        ]
    return terms


def _zero3(work: Workload) -> list[Term]:
    """ZeRO-3, weights included."""
    how, sharding, share, shape = work.computing, work.sharding, work.share, work.shape
    c, place = how.element_bytes, "host" if sharding.offload_optimizer else "device"
    weights: Place = "host" if sharding.offload_param else "device"
    resident = _resident(work)
    reused = sharding.max_reuse_distance // 2 + sharding.prefetch_bucket
    live = min(work.parameters - resident, max(sharding.max_live, reused) + shape.largest_module)
    bucket = min(live, sharding.prefetch_bucket + shape.largest_module)
    group = min(share, sharding.sub_group)
    terms = [
        Term(
            "weights",
            c * ceil(work.parameters / work.processes),
            weights,
            f"{c} B x P / N",
            f"{_ZERO}, sec. 5.3",
            PHASES,
        ),
        Term(
            "live",
            c * resident,
            "device",
            f"{c} B x parameters up to {sharding.persistence_threshold:,} numbers, always whole",
            "deepspeed: stage3_param_persistence_threshold",
        ),
        Term(
            "live",
            c * live,
            "device",
            f"{c} B x min(P, max(max_live_parameters, max_reuse_distance / 2 + prefetch bucket) + largest module)",
            "deepspeed 0.19.8 partitioned_param_coordinator.py: fetched ahead, and kept where the backward is near",
            ("gather", "rows"),
        ),
        Term(
            "live",
            c * bucket,
            "device",
            f"{c} B x (prefetch bucket + largest module): as it was gathered, until its last weight is used",
            f"{_GATHERED}: AllGatherCoalescedHandle.wait copies each weight out of it",
            ("rows",),
        ),
        Term(
            "buffers",
            c * min(live, _GLOO_THREADS * bucket) if work.gloo else 0,
            "device",
            f"{c} B x {_GLOO_THREADS} x (prefetch bucket + largest module): gloo's flat outputs, one a thread",
            f"{_GLOO}: allgather",
            ("gather",),
        ),
        Term(
            "weights",
            MASTER_BYTES * share,
            place,
            "4 B x P_t / N: float32 masters",
            f"{_STAGE3}: _create_fp32_partitions",
        ),
        Term("optimizer", _moments(work, share), place, "8 B x P_t / N", f"{_ZERO}, sec. 5.1"),
        Term("gradients", GRADIENT_BYTES * share, place, "4 B x P_t / N", f"{_STAGE3}: grad_partitions_flat_buffer"),
        Term(
            "buffers",
            c * _touched(work, sharding.reduce_bucket),
            "device",
            f"{c} B x reduce_bucket_size",
            f"{_STAGE3}: ipg_buckets",
        ),
        _summed(
            work,
            2 if work.gloo else 1,
            "deepspeed 0.19.8 runtime/comm/coalesced_collectives.py: reduce_scatter_coalesced"
            + (f"; {_GLOO}: reduce_scatter copies" if work.gloo else ""),
        ),
    ]
    if sharding.offload_optimizer:
        terms.append(
            Term(
                "gradients",
                4 * share,
                "host",
                "4 B x P_t / N: the optimizer's own",
                f"{_STAGE3}: initialize_optimizer_states",
            )
        )
    else:
        terms.append(
            Term("gradients", 4 * group, "device", "4 B x sub-group: flat copy", f"{_STAGE3}: step", ("update",))
        )
    return terms


def _summed(work: Workload, copies: int, source: str) -> Term:
    """Copies of a bucket while it is summed over processes: after the rows where one bucket holds all gradients."""
    c, bucket = work.computing.element_bytes, work.sharding.reduce_bucket
    phases: tuple[Phase, ...] = ("rows",) if bucket < work.trained else ("reduce",)
    formula = f"{c * copies} B x min(P_t, reduce_bucket_size): being summed"
    return Term("buffers", c * copies * min(work.trained, bucket), "device", formula, source, phases)


def _resident(work: Workload) -> int:
    """Parameters that ZeRO-3 keeps whole on every device."""
    threshold = work.sharding.persistence_threshold
    matrices = sum(m.numbers for m in work.shape.matrices if m.numbers <= threshold) * work.shape.layers
    return work.shape.small + matrices + work.adapter


def _touched(work: Workload, bucket: int) -> int:
    """Numbers of a bucket that cost memory: all on a device; on a CPU, pages that were never written cost none."""
    return min(bucket, work.trained) if work.device_type == "cpu" else bucket
