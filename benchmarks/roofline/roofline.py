"""Roofline: what a step asks of a device that is not here, counted on fake tensors, and the time
that would take.

    cd benchmarks/roofline
    # the table of docs/evidence/roofline.md (make roofline)
    python roofline.py
    python roofline.py --model Qwen/Qwen3-8B --set lora_r=32 --set gradient_checkpointing=false
    python roofline.py --model nanochat-d12 --set device_batch_size=32 --device A100 --json out.json
    # renew roofline_counts.json
    python roofline.py --update-counts
    # a small model's real step on this CPU beside it
    python roofline.py --check-cpu
    # what Inductor makes of a step beside `fused`
    python roofline.py --check-compiled

The step is the product's own (roofline_runs.py), recorded operator by operator (roofline_trace.py)
for a model of two blocks and of four; the whole model's figures follow from the two linearly,
unless --layers all. A kernel takes the longest of its operations at the rate of products, its bytes
at the rate of memory, and the least time of a kernel; kernels run one after another, the host keeps
ahead, and nothing overlaps the network. `fused` is the same trace with neighbours that are no
products and no attention fused perfectly: what a compiler can reach at best. Of several replicas
(--processes) the collectives are traced (roofline_network.py); what ZeRO-3 gathers and reduces, its
state and its update are finetune/planning's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
os.environ.setdefault("DS_ACCELERATOR", "cpu")
COUNTS = HERE / "roofline_counts.json"
GB = 10**9
MACHINE = 8  # devices of a machine


@dataclass(frozen=True)
class Device:
    """What a device reaches.

    Attributes:
        products, attention: operations per second, 16 bit.
        memory: bytes per second. network, between: bytes per second that one device sends within
            its machine, and to another.
        kernel: least seconds of a kernel.
        device_type: which branch of the code runs there.
    """

    products: float
    attention: float
    memory: float
    network: float
    between: float
    kernel: float = 2.5e-6
    device_type: str = "cuda"


# Assumed: of the published dense 16-bit peaks (runtime/device.py) and memory rates, what libraries
# reach in training. H100 SXM 989 TFLOP/s, 3.35 TB/s, NVLink 450 GB/s; A100 80 GB 312, 2.04, 300;
# RTX 4090 165, 1.01, PCIe 4 32 GB/s; 910B3 313, 1.6, HCCS 196 GB/s (the share of the H100;
# simulated, nothing was measured there). Between machines one adapter of 400 Gbit/s a device
# (910B3: 200), PCIe cards 25 Gbit/s.
DEVICES = {
    "H100": Device(620e12, 400e12, 2.7e12, 340e9, 45e9),
    "A100": Device(240e12, 170e12, 1.65e12, 220e9, 45e9),
    "4090": Device(145e12, 120e12, 0.88e12, 20e9, 2.8e9),
    "910B": Device(196e12, 130e12, 1.29e12, 140e9, 22e9, device_type="npu"),
}


def seconds(kernel: Any, device: Device) -> float:
    """Time of one kernel."""
    rate = device.attention if kernel.kind == "attention" else device.products
    return max(kernel.flops / rate, kernel.bytes / device.memory, kernel.launches * device.kernel)


def totals(segment: Any, device: Device) -> dict[str, float]:
    """A segment in numbers; `fused_` are those of the perfect compiler."""
    from roofline_trace import fused

    kernels = segment.kernels
    found: dict[str, float] = {
        "product_flops": sum(k.flops for k in kernels if k.kind == "product"),
        "attention_flops": sum(k.flops for k in kernels if k.kind == "attention"),
        "waits": sum(segment.waits.values()),
        "uploads": sum(segment.uploads.values()),
        "collectives": segment.collectives.number,
        "collective_bytes": sum(segment.collectives.bytes.values()),
        "sent_bytes": segment.collectives.sent,
        "peak_bytes": segment.peak_bytes,
    }
    for prefix, some in (("", kernels), ("fused_", fused(kernels))):
        found[f"{prefix}kernels"] = sum(kernel.launches for kernel in some)
        found[f"{prefix}bytes"] = sum(kernel.bytes for kernel in some)
        found[f"{prefix}seconds"] = sum(seconds(kernel, device) for kernel in some)
    return found


def measure(case: Any, device: Device, layers: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Numbers of the first, a further and the last microbatch and of the rest of the step, of the
    whole model.
    """
    from roofline_runs import trace

    found = []
    for count in layers:
        made = trace(case, count)
        parts = {
            name: totals(getattr(made, name), device)
            for name in ("first", "second", "last", "rest")
        }
        parts["state"] = {"bytes": made.static_bytes, "trained": made.trained}
        found.append(parts)
    if len(layers) == 1:
        return found[0]
    low, high = found
    whole, (few, many) = case.layers(), layers

    def at(a: float, b: float) -> float:
        return a + (b - a) * (whole - few) / (many - few)

    return {
        part: {name: at(low[part][name], high[part][name]) for name in low[part]} for part in low
    }


def step(case: Any, device: Device, rows: int, layers: tuple[int, ...]) -> dict[str, Any]:
    """One optimizer step of so many microbatches on one device: numbers for people and machines."""
    # DDP makes its buckets anew in the second step, and reduces them in the last microbatch.
    traced = replace(case, rows=min(rows, 3), steps=3) if case.world.launched else case
    parts = measure(traced, device, layers)
    first, second, last, rest = (parts[name] for name in ("first", "second", "last", "rest"))
    state = parts["state"]["bytes"]
    if case.zero3:
        rest, state = zero3(planned(case, rows), device)
    between = max(0, rows - 2)
    whole = {
        name: first[name] + between * second[name] + (rows > 1) * last[name] + rest[name]
        for name in first
    }
    network = whole["sent_bytes"]
    network_seconds = network / (device.network if case.processes <= MACHINE else device.between)
    # The activations of a microbatch lie above what is there between steps.
    kept = max(part["peak_bytes"] for part in (first, second, last)) - parts["state"]["bytes"]
    whole["peak_bytes"] = max(state + kept, rest["peak_bytes"])
    return {
        "model": case.model,
        "settings": dict(case.settings),
        "tokens": case.tokens,
        "zero3": case.zero3,
        "processes": case.processes,
        "rows": rows,
        "row": first,
        "further_row": second,
        "last_row": last,
        "rest": rest,
        "step": whole,
        "network_bytes": network,
        "network_seconds": network_seconds,
        "tokens_per_second": rows * row_tokens(case) / (whole["seconds"] + network_seconds),
        "fused_tokens_per_second": (
            rows * row_tokens(case) / (whole["fused_seconds"] + network_seconds)
        ),
    }


def row_tokens(case: Any) -> int:
    return (
        int(case.settings.get("device_batch_size", 1)) * case.tokens
        if case.pretraining
        else case.tokens
    )


def planned(case: Any, rows: int) -> Any:
    """The planner's workload of the whole model, for what is not traced: the network, and ZeRO-3's
    state.
    """
    from roofline_runs import empty_model, run_config

    from finetune.planning.inputs import workload_of
    from finetune.planning.shapes import shape_of_model
    from finetune.planning.workload import Cluster

    config = run_config(case)
    if case.zero3:
        deepspeed = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
        config = config.model_copy(update={"deepspeed": deepspeed})
    cluster = Cluster(max(1, case.processes // MACHINE), min(MACHINE, case.processes), "cuda")
    return replace(
        workload_of(config, shape_of_model(empty_model(case, case.layers())), cluster),
        microbatches=rows,
    )


def zero3(work: Any, device: Device) -> tuple[dict[str, float], float]:
    """The rest of the step and the state's bytes under ZeRO-3, by the planner's formulas."""
    from finetune.planning.memory import state_terms
    from finetune.planning.traffic import network_traffic

    state = sum(
        term.bytes
        for term in state_terms(work)
        if term.location == "device" and "rows" in term.phases
    )
    # AdamW reads and writes masters and two moments, reads gradients, writes the 16-bit weights.
    update = (6 * 4 + 4 + 2) * work.share
    launches = max(1, work.share // (320 * 65536))
    spent = max(update / device.memory, launches * device.kernel)
    rest = dict.fromkeys(
        ("product_flops", "attention_flops", "uploads", "collectives", "collective_bytes"), 0.0
    )
    rest |= {"sent_bytes": network_traffic(work).bytes}
    rest |= {"waits": 2.0, "peak_bytes": 0.0}  # the norm and the overflow check
    for prefix in ("", "fused_"):
        rest |= {f"{prefix}kernels": launches, f"{prefix}bytes": update, f"{prefix}seconds": spent}
    return rest, state


# ---------------------------------------------------------------- the table


def cases() -> list[tuple[Any, int]]:
    """The rows of docs/evidence/roofline.md, with microbatches of a step."""
    from roofline_runs import Case

    full: dict[str, Any] = {"finetuning": "full"}
    off = {"gradient_checkpointing": False}
    large = "Qwen/Qwen3-32B"
    found = [Case(f"Qwen/Qwen3-{size}") for size in ("0.6B", "4B", "8B", "14B")]
    found += [
        Case("Qwen/Qwen3-8B", settings=off),
        Case("Qwen/Qwen3-8B", 8192),
        Case("Qwen/Qwen3-8B", 32768),
    ]
    found += [Case("meta-llama/Llama-3.1-8B"), Case("meta-llama/Llama-3.1-8B", 8192)]
    found += [
        Case("Qwen/Qwen3-0.6B", 8192, settings=full),
        Case("Qwen/Qwen3-4B", 8192, settings=full),
    ]
    found += [Case("Qwen/Qwen3-8B", 8192, settings=full, zero3=True, processes=8)]
    found += [Case("meta-llama/Llama-3.1-8B", 8192, settings=full, zero3=True, processes=8)]
    found += [Case(large, tokens, zero3=True, processes=16) for tokens in (2048, 8192)]
    rows = [(case, 4) for case in found]
    return [*rows, (Case("nanochat-d12", settings={"device_batch_size": 32}), 1)]


HEADER = (
    "| model | training | row | kernels a row | GB a row | TFLOP a row | waits | row ms | step ms |"
    " tok/s | peak GiB | collectives: number, GB | fused: kernels | row ms | tok/s |\n"
    + "|---" * 15
    + "|"
)


def line(case: Any, found: dict[str, Any]) -> str:
    """A row of the table."""
    row, whole = found["row"], found["step"]
    how = [case.settings.get("finetuning", "pretraining" if case.pretraining else "lora")]
    how += [f"{'ZeRO-3' if case.zero3 else 'DDP'} x {case.processes}"] if case.processes > 1 else []
    how += [f"{name}={value}" for name, value in case.settings.items() if name != "finetuning"]
    cells = [
        case.model.rpartition("/")[2],
        ", ".join(how),
        f"{row_tokens(case):,}",
        f"{row['kernels']:,.0f}",
        f"{row['bytes'] / GB:,.0f}",
        f"{(row['product_flops'] + row['attention_flops']) / 1e12:,.1f}",
        f"{row['waits']:.0f} + {found['rest']['waits']:.0f}",
        f"{1e3 * row['seconds']:,.0f}",
        f"{1e3 * (whole['seconds'] + found['network_seconds']):,.0f}",
        f"{found['tokens_per_second']:,.0f}",
        f"{whole['peak_bytes'] / 2**30:,.1f}",
        sent_in(found),
        f"{row['fused_kernels']:,.0f}",
        f"{1e3 * row['fused_seconds']:,.0f}",
        f"{found['fused_tokens_per_second']:,.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def sent_in(found: dict[str, Any]) -> str:
    """Collectives of a step and what a device sends; of ZeRO-3 the planner has no number."""
    number = "" if found["zero3"] else f"{found['step']['collectives']:,.0f}, "
    return f"{number}{found['network_bytes'] / GB:,.2f}" if found["processes"] > 1 else "0"


# ---------------------------------------------------------------- committed counts


def counted_cases() -> dict[str, tuple[Any, int]]:
    """Small cases whose counts are committed, each with its blocks."""
    from roofline_runs import Case

    small = "Qwen/Qwen3-0.6B"
    return {
        "lora": (Case(small, rows=1, steps=1), 2),
        "lora without checkpointing": (
            Case(small, rows=1, steps=1, settings={"gradient_checkpointing": False}),
            2,
        ),
        "full": (Case(small, rows=1, steps=1, settings={"finetuning": "full"}), 2),
        "pretraining": (
            Case("nanochat-d12", rows=1, steps=1, settings={"device_batch_size": 4}),
            2,
        ),
    }


def counts() -> dict[str, dict[str, dict[str, int]]]:
    """Kernels, bytes, waits, uploads, peak and collectives of the counted cases, per part of a
    step.
    """
    from roofline_runs import trace

    found = {}
    for name, (case, layers) in counted_cases().items():
        made = trace(case, layers)
        names = ("kernels", "bytes", "waits", "uploads", "peak_bytes")
        parts = {part: totals(getattr(made, part), DEVICES["H100"]) for part in ("first", "rest")}
        found[name] = {part: {n: int(values[n]) for n in names} for part, values in parts.items()}
    return found | counted_collectives()


def counted_collectives() -> dict[str, dict[str, dict[str, int]]]:
    """Number of collectives and bytes of their inputs, per part of a step of eight processes: two
    blocks.
    """
    from roofline_runs import Case, trace
    from roofline_zero3 import zero3_trace

    small, full = "Qwen/Qwen3-0.6B", {"finetuning": "full"}
    eight: dict[str, Any] = {"tokens": 512, "processes": 8, "rows": 2}
    traces = {
        "lora, DDP x 8": trace(Case(small, steps=3, **eight), 2),
        "full, DDP x 8": trace(Case(small, steps=3, settings=full, **eight), 2),
        "pretraining, DDP x 8": trace(Case("nanochat-d2", steps=3, **eight), 2),
        "lora, ZeRO-3 x 8": zero3_trace(Case(small, **eight), 2),
        "full, ZeRO-3 x 8": zero3_trace(Case(small, settings=full, **eight), 2),
    }
    return {
        name: {
            part: _counted(getattr(made, part).collectives) for part in ("first", "last", "rest")
        }
        for name, made in traces.items()
    }


def _counted(found: Any) -> dict[str, int]:
    from roofline_network import AGREEMENT

    sent = sum(found.bytes.values())
    return {
        "collectives": found.number,
        "collective_bytes": sent,
        "agreements": found.numbers[AGREEMENT],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        help="one model instead of the table: a name of roofline_runs.MODELS, nanochat-dN",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a row (window)")
    parser.add_argument("--documents", type=int, default=4, help="of a row, of one length")
    parser.add_argument(
        "--supervised", type=float, default=1.0, help="share of the tokens that are targets"
    )
    parser.add_argument("--rows", type=int, default=4, help="microbatches of a step on one device")
    parser.add_argument("--partitioned", action="store_true", help="weights too: ZeRO-3")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="devices of the run; more than 8 in several machines",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the run (YAML)",
    )
    parser.add_argument("--device", choices=list(DEVICES), default="H100")
    parser.add_argument("--layers", default="2,4", help="blocks to trace, two numbers; or all")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument(
        "--update-counts", action="store_true", help="write the counts that a test compares with"
    )
    parser.add_argument(
        "--check-cpu", action="store_true", help="predict and measure a small model's step here"
    )
    parser.add_argument(
        "--check-compiled",
        action="store_true",
        help="what Inductor makes of a step, beside `fused`",
    )
    options = parser.parse_args()
    if options.update_counts:
        COUNTS.write_text(json.dumps(counts(), indent=2) + "\n", encoding="utf-8")
        return 0
    if options.check_cpu:
        from roofline_cpu import check

        return check()
    if options.check_compiled:
        from roofline_cpu import check_compiled

        return check_compiled()
    found = []
    print(HEADER)
    for case, rows in chosen(options):
        layers = (
            (case.layers(),)
            if options.layers == "all"
            else tuple(map(int, options.layers.split(",")))
        )
        made = step(case, DEVICES[options.device], rows, layers)
        found.append({"device": options.device, **made})
        print(line(case, made), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def chosen(options: argparse.Namespace) -> list[tuple[Any, int]]:
    """The cases that were asked for."""
    import yaml
    from roofline_runs import Case

    device_type = DEVICES[options.device].device_type
    settings = {
        name: yaml.safe_load(value)
        for name, _, value in (entry.partition("=") for entry in options.set)
    }
    if options.model is None:
        table = cases()
        return [
            (replace(c, device_type=device_type, settings={**c.settings, **settings}), n)
            for c, n in table
        ]
    case = Case(
        options.model,
        options.tokens,
        options.documents,
        options.supervised,
        zero3=options.partitioned,
        device_type=device_type,
        settings=settings,
        processes=options.processes,
    )
    return [(case, options.rows)]


if __name__ == "__main__":
    sys.exit(main())
