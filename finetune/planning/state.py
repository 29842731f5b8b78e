"""Weights, gradients and optimizer of a run, and the buffers that go with them, by the way it is
sharded.

P is all parameters, P_t the trained ones, N processes. Formulas under DeepSpeed are read off its
0.19.8 source.
"""

from __future__ import annotations

from math import ceil

from finetune.planning.workload import PHASES, STEP, TRAINING, Location, Phase, Term, Workload

MOMENT, MASTER, GRADIENT = 4, 4, 4  # bytes: float32, each
_GLOO_THREADS = 2  # torch ProcessGroupGloo.hpp, Options: collectives that run at once
_SUMMING: tuple[Phase, ...] = ("rows", "reduce", "update")
_ZERO = "ZeRO paper (Rajbhandari et al. 2020)"
_STAGE3 = "deepspeed 0.19.8 runtime/zero/stage3.py"
_STAGE2 = "deepspeed 0.19.8 runtime/zero/stage_1_and_2.py"
_GLOO = "torch ProcessGroupGloo.cpp"


def state_terms(work: Workload) -> list[Term]:
    """What does not depend on the microbatch, zero terms included."""
    if work.sharding.stage == 3:
        return _zero3(work)
    return _zero12(work) if work.sharding.engine else _plain(work)


def _moments(work: Workload, numbers: int) -> int:
    """Bytes of the optimizer's moments for so many trained parameters."""
    shape = work.shape
    if work.optimizer == "adafactor":  # of a matrix a number for each row and column
        sides = sum((m.inputs + m.outputs) * m.experts * count for m, count in shape.matrices)
        tables = (shape.vocabulary + shape.hidden) * (1 if shape.tied else 2)
        return MOMENT * (sides + tables + shape.small)
    if work.optimizer == "adamw-8bit":  # a scale for 256 numbers; vectors stay in 32 bits
        return round(2 * (1 + MOMENT / 256) * (numbers - shape.small)) + 2 * MOMENT * shape.small
    if not work.muon:
        return 2 * MOMENT * numbers
    matrices = work.shape.block_matrices
    return MOMENT * matrices + 2 * MOMENT * (numbers - matrices)


def _held(work: Workload) -> str:
    return f"P, linear layers in {work.quantization}" if work.quantised else "P"


def _quantised(work: Workload) -> list[Term]:
    """What layers in few bits need beside their numbers."""
    if not work.quantised:
        return []
    c, ours = work.computing.element_bytes, "ours: modeling/quantisation.py"
    largest = max(matrix.numbers for matrix, _count in work.quantised)
    whole = c * work.weight_numbers if work.sharding.stage == 3 else 0
    return [
        Term(
            "weights",
            work.scale_bytes,
            "device",
            f"scales of {work.quantization}",
            "bitsandbytes 0.50",
            PHASES,
        ),
        Term(
            "buffers",
            c * largest,
            "device",
            f"{c} B x largest linear layer, dequantised",
            ours,
            ("rows",),
        ),
        Term(
            "load",
            whole,
            "device",
            "all weights in few bits, before they are spread",
            ours,
            ("load",),
        ),
    ]


def _plain(work: Workload) -> list[Term]:
    """One process, or DDP."""
    how, trained = work.computing, work.trained
    trained_bytes = how.adapter_bytes if work.adapter else how.weight_bytes
    held = how.weight_bytes * (work.weight_numbers - trained) + trained_bytes * trained
    # One process reads a mapped file when it first computes with it; several compare or send its
    # weights before.
    there = TRAINING if work.mapped and work.processes == 1 else PHASES
    moments, optimizer = "8 B x P_t", "torch.optim.AdamW: two float32 moments"
    if work.muon:
        moments, optimizer = "4 B x blocks' matrices + 8 B x the rest", f"{optimizer}; Muon: one"
    elif work.optimizer != "adamw":
        moments, optimizer = {
            "adamw-8bit": (
                "2 B x P_t",
                "bitsandbytes AdamW8bit: two moments in 8 bits, with scales",
            ),
            "adafactor": ("4 B x rows and columns", "transformers Adafactor"),
        }[work.optimizer]
    terms = [
        Term(
            "weights",
            held,
            "device",
            f"{how.weight_bytes} B x {_held(work)}",
            "ours: training/build.py",
            there,
        ),
        *_quantised(work),
        Term(
            "gradients",
            trained_bytes * trained,
            "device",
            f"{trained_bytes} B x P_t",
            f"{_ZERO}, sec. 3.1",
            STEP,
        ),
        Term("optimizer", _moments(work, trained), "device", moments, optimizer),
    ]
    if not work.fused:
        formula = "4 B x P_t: intermediate tensors of the update"
        terms.append(
            Term(
                "buffers",
                4 * trained,
                "device",
                formula,
                "torch.optim.AdamW(foreach=True)",
                ("update",),
            )
        )
    if work.muon:
        largest = max(matrix.numbers for matrix, _count in work.shape.in_blocks)
        source = "ours: training/muon.py"
        terms.append(
            Term("buffers", 14 * largest, "device", "14 B x largest matrix", source, ("update",))
        )
    if work.processes > 1:
        # LoRA's gradients are summed flat, after all microbatches; DDP's buckets are made all the
        # same, untouched.
        if not (work.adapter and work.device_type == "cpu"):
            terms.append(
                Term(
                    "buffers",
                    4 * trained,
                    "device",
                    "4 B x P_t: buckets",
                    "torch DDP reducer",
                    PHASES,
                )
            )
        if work.adapter:
            flat = "4 B x P_t: flat sum"
            terms.append(
                Term(
                    "buffers",
                    4 * trained,
                    "device",
                    flat,
                    "ours: training/executor.py",
                    ("update",),
                )
            )
    return terms


def _zero12(work: Workload) -> list[Term]:
    """ZeRO-1 and ZeRO-2."""
    c, sharding, share = work.computing.element_bytes, work.sharding, work.share
    offload = sharding.offload_optimizer
    location: Location = "host" if offload else "device"
    buckets = (
        c
        * _touched(work, sharding.reduce_bucket)
        * (2 if sharding.overlap and not work.gloo else 1)
    )
    bucket = f"{c} B x reduce_bucket_size"
    gathered = (
        f"deepspeed 0.19.8 runtime/utils.py: all_gather_into_tensor_dp_groups; {_GLOO}: allgather"
    )
    terms = [
        Term(
            "weights",
            c * work.weight_numbers,
            "device",
            f"{c} B x {_held(work)}",
            f"{_ZERO}, sec. 5.1-5.2",
            PHASES,
        ),
        *_quantised(work),
        Term(
            "weights",
            MASTER * share,
            location,
            "4 B x P_t / N: float32 masters",
            f"{_STAGE2}: __init__",
            PHASES,
        ),
        Term("optimizer", _moments(work, share), location, "8 B x P_t / N", f"{_ZERO}, sec. 5.1"),
        Term("buffers", buckets, "device", bucket, f"{_STAGE2}: setup_buckets", ("rows", "reduce")),
        _summed(work, 1, f"{_STAGE2}: allreduce_bucket flattens"),
        Term(
            "buffers",
            c * work.trained,
            "device",
            f"{c} B x P_t: flat copy",
            f"{_STAGE2}: __init__",
            ("load",),
        ),
    ]
    if work.gloo:
        flat = f"{c} B x P_t: gloo's flat output"
        terms.append(Term("buffers", c * work.trained, "device", flat, gathered, ("gather",)))
    if sharding.stage < 2:
        terms.append(
            Term(
                "gradients", 4 * work.trained, "device", "4 B x P_t", f"{_ZERO}, sec. 5.1", _SUMMING
            )
        )
    if offload:
        return terms + _zero2_on_host(work)
    return [
        *terms,
        Term(
            "gradients", GRADIENT * share, "device", "4 B x P_t / N", f"{_ZERO}, sec. 5.2", _SUMMING
        ),
        Term(
            "gradients",
            4 * share,
            "device",
            "4 B x P_t / N: flat copy",
            f"{_STAGE2}: step",
            ("update",),
        ),
    ]


def _zero2_on_host(work: Workload) -> list[Term]:
    """Gradients, and what goes with them, where the optimizer is offloaded."""
    c, share = work.computing.element_bytes, work.share
    back, added = (
        f"{c} B x P_t / N: weights on their way back",
        f"{c} B x P_t / N: sum over microbatches",
    )
    largest, temporary = f"{c} B x largest trained tensor", f"{_STAGE2}: temp_grad_buffer"
    terms = [
        Term(
            "gradients",
            GRADIENT * share,
            "host",
            "4 B x P_t / N",
            f"{_STAGE2}: initialize_optimizer_states",
        ),
        Term("buffers", c * share, "host", back, f"{_STAGE2}: __init__", PHASES),
        Term("buffers", c * work.largest_trained, "device", largest, temporary),
        Term("buffers", c * work.largest_trained, "host", largest, temporary),
    ]
    if work.microbatches > 1:
        terms.append(
            Term("gradients", c * share, "host", added, f"{_STAGE2}: accumulated_grads_in_cpu")
        )
    return terms


def _zero3(work: Workload) -> list[Term]:
    """ZeRO-3, weights included."""
    c, sharding, share = work.computing.element_bytes, work.sharding, work.share
    location: Location = "host" if sharding.offload_optimizer else "device"
    weights: Location = "host" if sharding.offload_param else "device"
    part, bucket = (
        c * ceil(work.weight_numbers / work.processes),
        c * _touched(work, sharding.reduce_bucket),
    )
    scattered = "deepspeed 0.19.8 runtime/comm/coalesced_collectives.py: reduce_scatter_coalesced"
    group, copy_source = min(share, sharding.sub_group), f"{_STAGE3}: initialize_optimizer_states"
    copy = Term(
        "gradients",
        4 * group,
        "device",
        "4 B x sub-group: flat copy",
        f"{_STAGE3}: step",
        ("update",),
    )
    if sharding.offload_optimizer:
        copy = Term(
            "gradients", 4 * share, "host", "4 B x P_t / N: the optimizer's own", copy_source
        )
    return [
        Term("weights", part, weights, f"{c} B x {_held(work)} / N", f"{_ZERO}, sec. 5.3", PHASES),
        *_quantised(work),
        Term(
            "weights",
            c * ceil(work.weight_numbers / sharding.hpz) if sharding.hpz > 1 else 0,
            weights,
            f"{c} B x P / hpZ: the second copy, within a node",
            "deepspeed 0.19.8 runtime/zero/partition_parameters.py: _partition_param_sec",
            STEP,
        ),
        *_gathered(work),
        Term(
            "weights",
            MASTER * share,
            location,
            "4 B x P_t / N: float32 masters",
            f"{_STAGE3}: _create_fp32_partitions",
        ),
        Term("optimizer", _moments(work, share), location, "8 B x P_t / N", f"{_ZERO}, sec. 5.1"),
        Term(
            "gradients",
            GRADIENT * share,
            location,
            "4 B x P_t / N",
            f"{_STAGE3}: grad_partitions_flat_buffer",
        ),
        Term("buffers", bucket, "device", f"{c} B x reduce_bucket_size", f"{_STAGE3}: ipg_buckets"),
        (
            _summed(work, 2, f"{scattered}; {_GLOO}: reduce_scatter copies")
            if work.gloo
            else _summed(work, 1, scattered)
        ),
        copy,
    ]


def _gathered(work: Workload) -> list[Term]:
    """Weights that are whole on a device under ZeRO-3, and the buffers that they are gathered
    into.
    """
    c, sharding, largest = work.computing.element_bytes, work.sharding, work.shape.largest_module
    resident = _resident(work)
    reused = sharding.max_reuse_distance // 2 + sharding.prefetch_bucket
    live = min(max(0, work.weight_numbers - resident), max(sharding.max_live, reused) + largest)
    bucket = min(live, sharding.prefetch_bucket + largest)
    names = "(prefetch bucket + largest module)"
    terms = [
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
            f"{c} B x min(P, max(max_live_parameters, max_reuse_distance / 2 + prefetch bucket) +"
            " largest module)",
            "deepspeed 0.19.8 partitioned_param_coordinator.py: fetched ahead, and kept where the"
            " backward is near",
            ("gather", "rows"),
        ),
        Term(
            "live",
            c * bucket,
            "device",
            f"{c} B x {names}: as it was gathered, until its last weight is used",
            "deepspeed 0.19.8 runtime/zero/partition_parameters.py: AllGatherCoalescedHandle.wait"
            " copies each weight out of it",
            ("rows",),
        ),
    ]
    if work.gloo:
        flat, size = (
            f"{c} B x {_GLOO_THREADS} x {names}: gloo's flat outputs, one a thread",
            _GLOO_THREADS * bucket,
        )
        terms.append(
            Term("buffers", c * min(live, size), "device", flat, f"{_GLOO}: allgather", ("gather",))
        )
    return terms


def _summed(work: Workload, copies: int, source: str) -> Term:
    """Copies of a bucket while it is summed over processes: after the last microbatch, where it
    holds them all.
    """
    c, bucket = work.computing.element_bytes, work.sharding.reduce_bucket
    phases: tuple[Phase, ...] = ("rows",) if bucket < work.trained else ("reduce",)
    formula = f"{c * copies} B x min(P_t, reduce_bucket_size): being summed"
    return Term(
        "buffers", c * copies * min(work.trained, bucket), "device", formula, source, phases
    )


def _resident(work: Workload) -> int:
    """Parameters that ZeRO-3 keeps whole on every device."""
    threshold = work.sharding.persistence_threshold
    matrices = sum(m.numbers * count for m, count in work.shape.matrices if m.numbers <= threshold)
    return work.shape.small + matrices + work.adapter


def _touched(work: Workload, bucket: int) -> int:
    """Numbers of a bucket that cost memory: all on a device; on a CPU, pages that were never
    written cost none.
    """
    return min(bucket, work.trained) if work.device_type == "cpu" else bucket
