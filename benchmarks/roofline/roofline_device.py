"""Real steps of the roofline's cases on a device that is here: time, peak memory, kernels and waits
of each.

    cd benchmarks/roofline
    # the cases below
    python roofline_device.py --json h100.json
    # those named so, and what takes time
    python roofline_device.py --only 8B --profile
    # whether it runs, on two small models
    python roofline_device.py --device cpu --tiny
    # beside what was predicted
    python roofline_device.py --compare ../results/roofline_h100.json

The model has random weights, made on the device; all else is the product's own, built as in
roofline_runs.py: adapter, attention, fused layers, loss, executor, optimizer. Seconds are the
median of the steps after the first two, the host waiting for the device once at the beginning of
each. docs/evidence/roofline.md sets them beside the prediction.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
# As a run's own start sets it (runtime/device.py).
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch  # noqa: E402
from roofline import row_tokens  # noqa: E402
from roofline_cpu import SMALL  # noqa: E402
from roofline_runs import Case, StepsAreDone, build, run_config  # noqa: E402

WARM_UP_STEPS, MEASURED_STEPS = 2, 3


@dataclass
class Measured:
    """One case on the device.

    Attributes:
        step_seconds: median. every_step: all of them, the first two included. kernels,
        busy_seconds: of one step, all its microbatches; only with --profile, as is `longest`.
        waits: places where the host waited for the device in one step, and how often.
        peak_bytes: of torch's allocator, allocated and reserved.
    """

    name: str
    case: dict[str, Any]
    rows: int
    tokens: int
    step_seconds: float = 0.0
    every_step: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    reserved_bytes: int = 0
    kernels: int = 0
    busy_seconds: float = 0.0
    waits: dict[str, int] = field(default_factory=dict)
    longest: list[tuple[str, int, float]] = field(default_factory=list)
    error: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds else 0.0


def cases() -> dict[str, Case]:
    """By name. Rows are of a step of one device: fewer where a step is long."""
    full: dict[str, Any] = {"finetuning": "full"}
    off = {"gradient_checkpointing": False}
    eight, d12 = (
        Case("Qwen/Qwen3-8B", rows=4),
        Case("nanochat-d12", rows=1, settings={"device_batch_size": 32}),
    )
    wide = replace(eight, tokens=8192, documents=16, rows=2)  # four rows of 2,048 in one
    return {
        "8B lora": eight,
        "8B lora, no checkpointing": replace(eight, settings=off),
        "8B lora, plain layers": replace(eight, settings={"fused_layers": "off"}),
        "8B lora, compiled layers": replace(eight, settings={"fused_layers": "compile"}),
        "8B lora, peft's": replace(eight, settings={"fused_lora": False}),
        "d12": d12,
        "d12 compiled": replace(d12, settings={**d12.settings, "compile": True}),
        "0.6B lora": replace(eight, model="Qwen/Qwen3-0.6B"),
        "4B lora": replace(eight, model="Qwen/Qwen3-4B"),
        "14B lora": replace(eight, model="Qwen/Qwen3-14B"),
        "8B lora, rows of 4 x 2048": wide,
        "8B lora, rows of 4 x 2048, no checkpointing": replace(wide, settings=off),
        "8B lora 8192": replace(eight, tokens=8192, rows=2),
        "8B lora 32768": replace(eight, tokens=32768, rows=1),
        "Llama 8B lora, rows of 4 x 2048": replace(wide, model="meta-llama/Llama-3.1-8B"),
        "32B lora, rows of 4 x 2048": replace(wide, model="Qwen/Qwen3-32B", rows=1),
        "0.6B full 8192": Case("Qwen/Qwen3-0.6B", 8192, rows=4, settings=full),
        "4B full 8192": Case("Qwen/Qwen3-4B", 8192, rows=2, settings=full),
    }


def tiny_cases() -> dict[str, Case]:
    small = Case("small", 256, rows=2, config=SMALL, settings={"dtype": "float32"})
    pretraining = {"device_batch_size": 2, "dtype": "float32", "vocab_size": 1000}
    return {"small lora": small, "small d2": Case("nanochat-d2", 128, rows=1, settings=pretraining)}


@contextlib.contextmanager
def _waits(device: torch.device, found: Counter[str]) -> Iterator[None]:
    """Count where the host waits for a CUDA device."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in seen:
        if "synchroniz" in str(warning.message):
            found[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


def _profiled(found: Measured, profile: Any) -> None:
    """What one step gave the device to do."""
    kernels: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.name] += 1
            seconds[event.name] += event.self_device_time_total / 1e6
    found.kernels = sum(
        count for name, count in kernels.items() if not name.startswith(("Memcpy", "Memset"))
    )
    found.busy_seconds = sum(seconds.values())
    found.longest = [(name[:120], kernels[name], spent) for name, spent in seconds.most_common(25)]


def measure(name: str, case: Case, device: torch.device, *, profile: bool) -> Measured:
    """Train a few steps of a case; an error is kept, because the next case may have room."""
    from finetune.training.session import _forget_accelerate

    steps = WARM_UP_STEPS + MEASURED_STEPS + 1 + profile
    case = replace(case, steps=steps, device_type=device.type)
    made = Measured(name, asdict(case), case.rows, case.rows * row_tokens(case))
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = run_config(case).model_copy(update={"output_dir": folder})
            _train(build(case, config, case.layers(), on=device.type), made, case, device, profile)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        made.error = f"{type(error).__name__}: {str(error)[:400]}"
    finally:
        _forget_accelerate()
        gc.collect()
        if device.type == "cuda":
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    return made


def _train(trainer: Any, made: Measured, case: Case, device: torch.device, profile: bool) -> None:
    step, marks, waits = trainer.training_step, [], Counter[str]()
    watched = WARM_UP_STEPS + MEASURED_STEPS
    running, made_profiles = contextlib.ExitStack(), []

    def mark() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    def training_step(model: Any, inputs: Any, *arguments: Any) -> Any:
        running.close()
        mark()
        if inputs.step == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if inputs.step == watched:
            if device.type == "cuda":
                made.peak_bytes = torch.cuda.max_memory_allocated()
                made.reserved_bytes = torch.cuda.max_memory_reserved()
            running.enter_context(_waits(device, waits))
        if inputs.step == watched + 1 and profile:
            activities = [getattr(torch.profiler.ProfilerActivity, device.type.upper())]
            profiler = running.enter_context(torch.profiler.profile(activities=activities))
            made_profiles.append(profiler)
        if inputs.step == case.steps:
            raise StepsAreDone
        return step(model, inputs, *arguments)

    trainer.training_step = training_step
    with contextlib.suppress(StepsAreDone), running:
        trainer.train()
    made.every_step = [end - begin for begin, end in zip(marks, marks[1:], strict=False)]
    made.step_seconds = statistics.median(made.every_step[WARM_UP_STEPS:watched])
    made.waits = dict(waits)
    if made_profiles:
        _profiled(made, made_profiles[0])


def compare(path: Path, device: str) -> None:
    """Print what was measured beside the roofline's prediction and the planner's; needs no
    device.
    """
    from roofline import DEVICES, planned, step

    from finetune.planning.memory import memory_of

    print(
        "| case | tokens | busy ms | predicted | step ms | tok/s | peak GiB | traced | planned |"
        " kernels | traced |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for entry in json.loads(path.read_text(encoding="utf-8")):
        case, rows = Case(**{**entry["case"], "steps": 2}), entry["rows"]
        # The compiler is not traced: a whole step has the bound by perfect fusion, layers a kernel
        # each.
        whole, layers = case.settings.get("compile"), case.settings.get("fused_layers") == "compile"
        without = ("compile",) if whole else ("fused_layers",) if layers else ()
        case = replace(
            case,
            settings={name: value for name, value in case.settings.items() if name not in without},
        )
        found = step(case, DEVICES[device], rows, (2, 4))["step"]
        busy = f"{1e3 * entry['busy_seconds']:,.0f}" if entry["kernels"] else "-"
        cells = [entry["name"], f"{entry['tokens']:,}", busy]
        cells += [f"{1e3 * found['fused_seconds' if whole else 'seconds']:,.0f}"]
        cells += [
            f"{1e3 * entry['step_seconds']:,.0f}",
            f"{entry['tokens'] / entry['step_seconds']:,.0f}",
        ]
        cells += [f"{size / 2**30:.1f}" for size in (entry["peak_bytes"], found["peak_bytes"])]
        cells += [
            f"{memory_of(planned(Case(**entry['case']), rows)).device() / 2**30:.1f}",
            f"{entry['kernels']:,}" if entry["kernels"] else "-",
        ]
        cells += ["-" if whole else f"{found['kernels']:,.0f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="a device type of torch")
    parser.add_argument(
        "--only", default="", help="cases whose name contains one of these, separated by commas"
    )
    parser.add_argument(
        "--profile", action="store_true", help="one more step: kernels, and which take longest"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="two small models in place of the cases"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no case begins later than this"
    )
    parser.add_argument("--json", type=Path, help="write all numbers there, after every case")
    parser.add_argument(
        "--compare", type=Path, help="print these results beside the predictions; runs nothing here"
    )
    parser.add_argument(
        "--named",
        default="H100",
        help="the device that --compare predicts for: one of roofline.py's",
    )
    options = parser.parse_args()
    if options.compare is not None:
        compare(options.compare, options.named)
        return 0
    os.environ["DS_ACCELERATOR"] = options.device
    device, started, found = torch.device(options.device), time.monotonic(), []
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    print(f"{name}, torch {torch.__version__}")
    print(
        "| case | tokens a step | step ms | tok/s | peak GiB | reserved GiB | kernels a step | busy"
        " ms | waits a step |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for title, case in (tiny_cases() if options.tiny else cases()).items():
        if not any(part in title for part in options.only.split(",")):
            continue
        if time.monotonic() - started > 60 * options.minutes:
            break
        made = measure(title, case, device, profile=options.profile)
        found.append({"device": name, "torch": torch.__version__, **asdict(made)})
        cells = [
            title,
            f"{made.tokens:,}",
            f"{1e3 * made.step_seconds:,.0f}",
            f"{made.tokens_per_second:,.0f}",
        ]
        cells += [
            f"{made.peak_bytes / 2**30:.1f}",
            f"{made.reserved_bytes / 2**30:.1f}",
            f"{made.kernels:,}",
        ]
        cells += [
            f"{1e3 * made.busy_seconds:,.0f}",
            f"{sum(made.waits.values())}",
            made.error[:200],
        ]
        print("| " + " | ".join(cells).rstrip("| ") + " |", flush=True)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(entry["error"] for entry in found))


if __name__ == "__main__":
    sys.exit(main())
