"""The roofline beside a real step on one core of this CPU: a small model, with peaks measured
beside it.

Measured are each product and each attention of the step at its own shape and dtype, a copy into new
memory, and an operator on one number; predicted is the sum over the recorded operators. Seconds are
those of the thread's own CPU time, the least of several, because other programs may run here.

`fused`, the bound of what a compiler can reach, stands beside what Inductor makes of the same
microbatch.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from roofline_runs import Case, StepsAreDone, build, device_branch, run_config, trace
from roofline_trace import Kernel, fused
from torch.nn.functional import scaled_dot_product_attention

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
COPIED = 8 * 2**20  # bytes, as large as the step's tensors
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
        source, one = torch.rand(COPIED // 4), torch.ones(1)
        self.bytes_per_second = 2 * COPIED / least(source.clone)
        self.kernel = least(lambda: [one.add(one) for _ in range(1000)]) / 1000
        self._known: dict[Any, float] = {}

    def seconds(self, kernel: Kernel) -> float:
        """Predicted time of one operator."""
        if kernel.kind == "other":
            return max(kernel.bytes / self.bytes_per_second, self.kernel)
        key = (kernel.name, kernel.shapes, kernel.strides, kernel.dtype)
        if key not in self._known:
            self._known[key] = least(
                _attention(kernel) if kernel.kind == "attention" else _product(kernel)
            )
        return self._known[key]


def _product(kernel: Kernel) -> Callable[[], Any]:
    # Laid out as in the step: 16-bit products of a transposed matrix copy it first.
    left, right = (
        torch.empty_strided(shape, strides, dtype=kernel.dtype).uniform_()
        for shape, strides in zip(kernel.shapes[-2:], kernel.strides[-2:], strict=True)
    )
    return lambda: left @ right


def _attention(kernel: Kernel) -> Callable[[], Any]:
    """Attention of a document, causal; the backward from a gradient."""
    backward = "backward" in kernel.name
    q, k, v = (
        torch.rand(s).to(kernel.dtype).requires_grad_(backward)
        for s in kernel.shapes[backward : backward + 3]
    )
    output = scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    if not backward:
        return lambda: scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    gradient = torch.rand_like(output)
    return lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)


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
        with contextlib.suppress(StepsAreDone):
            trainer.train()
    return [end - begin for begin, end in zip(marks, marks[1:], strict=False)]


def check() -> int:
    """Print prediction and measurement of LoRA and full training."""
    torch.set_num_threads(1)
    peaks = Peaks()
    print(
        f"new copy {peaks.bytes_per_second / 1e9:.1f} GB/s, an operator {1e6 * peaks.kernel:.1f}"
        " us, one core"
    )
    print("| training | operators | predicted ms | measured ms | error |\n|---|---|---|---|---|")
    for finetuning in ("lora", "full"):
        settings = {"finetuning": finetuning, "dtype": "float32"}
        case = Case(
            "small", 1024, settings=settings, config=SMALL, device_type="cpu", steps=MEASURED_STEPS
        )
        made = trace(case, case.layers())
        kernels = [
            kernel for part in (made.first, made.second, made.rest) for kernel in part.kernels
        ]
        predicted = sum(map(peaks.seconds, kernels))
        real = min(measured(case)[1:])
        cells = f"{finetuning} | {len(kernels):,} | {1e3 * predicted:,.0f} | {1e3 * real:,.0f}"
        print(f"| {cells} | {predicted / real - 1:+.0%} |", flush=True)
    return 0


def check_compiled() -> int:
    """Print kernels and bytes of a pretraining microbatch: operators, `fused`, and as Inductor
    schedules it here.
    """
    from torch._inductor import compile_fx, metrics

    torch.set_num_threads(1)
    settings = {"device_batch_size": 2, "dtype": "float32", "vocab_size": 8192}
    case = Case("nanochat-d4", 512, rows=1, settings=settings, device_type="cpu")
    operators = trace(case, case.layers()).first.kernels
    # Inductor counts only while it logs what it counted, and not what it finds in its cache.
    torch._logging.set_logs(inductor_metrics=True)
    for logger in (compile_fx.inductor_metrics_log, compile_fx.inductor_metrics_log.parent):
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    torch.compiler.config.force_disable_caches = True
    metrics.reset()
    measured(replace(case, settings={**settings, "compile": True}))
    print("| microbatch | kernels | GB |\n|---|---|---|")
    for name, kernels in (("operators", operators), ("fused", fused(operators))):
        print(
            f"| {name} | {sum(k.launches for k in kernels):,} |"
            f" {sum(k.bytes for k in kernels) / 1e9:.3f} |"
        )
    print(
        f"| Inductor | {len(metrics.nodes_num_elem):,} | {metrics.num_bytes_accessed / 1e9:.3f} |"
    )
    return 0
