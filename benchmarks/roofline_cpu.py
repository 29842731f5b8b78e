"""The roofline's prediction beside a real step: a small model on one core of this CPU, with peaks measured beside it.

Measured are each product of the step at its own shape and dtype, a copy between arrays larger than the caches, and an
operator on one number; predicted is the sum over the recorded operators. Seconds are those of the thread's own CPU time,
the least of several, because other programs may run here.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from roofline_runs import Case, StepsAreDone, build, device_branch, run_config, trace
from roofline_trace import Kernel

SMALL = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
COPIED = 64 * 2**20
REPEATS, MEASURED_STEPS = 5, 8


def least(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Least seconds of the thread's CPU time."""
    found = []
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        found.append(time.thread_time() - begin)
    return min(found)


class Peaks:
    """What this CPU reaches on one core."""

    def __init__(self) -> None:
        source, target = torch.rand(COPIED // 4), torch.rand(COPIED // 4)
        self.bytes_per_second = 2 * COPIED / least(lambda: target.copy_(source))
        one = torch.ones(1)
        self.kernel = least(lambda: [one.add(one) for _ in range(1000)]) / 1000
        self._products: dict[Any, float] = {}

    def seconds(self, kernel: Kernel) -> float:
        """Predicted time of one operator."""
        moved = kernel.bytes / self.bytes_per_second
        if kernel.kind != "product" or any(len(shape) != 2 for shape in kernel.shapes[-2:]):
            rate = max((flops / spent for (_, flops), spent in self._products.items()), default=1e12)
            return max(kernel.flops / rate, moved, self.kernel)
        key = ((kernel.shapes[-2:], kernel.dtype), kernel.flops)
        if key not in self._products:
            left, right = (torch.rand(shape).to(kernel.dtype) for shape in kernel.shapes[-2:])
            self._products[key] = least(lambda: left @ right)
        return self._products[key]


def measured(case: Case) -> list[float]:
    """Seconds of each step of the real run."""
    config, marks = run_config(case), []
    with tempfile.TemporaryDirectory() as folder, device_branch(case):
        trainer = build(case, config.model_copy(update={"output_dir": folder}), case.layers())
        step = trainer.training_step

        def training_step(model: Any, inputs: Any, *arguments: Any) -> Any:
            marks.append(time.thread_time())
            if inputs.step == case.steps:
                raise StepsAreDone
            return step(model, inputs, *arguments)

        trainer.training_step = training_step
        try:
            trainer.train()
        except StepsAreDone:
            pass
    return [end - begin for begin, end in zip(marks, marks[1:], strict=False)]


def check() -> int:
    """Print prediction and measurement of LoRA and full training."""
    torch.set_num_threads(1)
    peaks = Peaks()
    print(f"copy {peaks.bytes_per_second / 1e9:.1f} GB/s, an operator {1e6 * peaks.kernel:.1f} us, one core")
    print("| training | operators | predicted ms | measured ms | error |\n|---|---|---|---|---|")
    for finetuning in ("lora", "full"):
        settings = {"finetuning": finetuning, "dtype": "float32"}
        case = Case("small", 1024, settings=settings, config=SMALL, device_type="cpu", steps=MEASURED_STEPS)
        made = trace(case, case.layers())
        kernels = [kernel for part in (made.first, made.second, made.rest) for kernel in part.kernels]
        for kernel in kernels:  # products first: the others' rate is that of the fastest
            if kernel.kind == "product":
                peaks.seconds(kernel)
        predicted = sum(map(peaks.seconds, kernels))
        real = min(measured(case)[1:])
        print(
            f"| {finetuning} | {len(kernels):,} | {1e3 * predicted:,.0f} | {1e3 * real:,.0f} | {predicted / real - 1:+.0%} |"
        )
    return 0
