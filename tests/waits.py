"""For tests: what would make the host wait for a device, counted operator by operator on any
device.

Under `Waits` every operator that autograd or the model calls is looked at: one whose result the
host needs (a number, the size of what comes back) waits on CUDA and Ascend
(torch.cuda.set_sync_debug_mode says which; its list is the source). On a simulated device copies
between it and the host are seen too.
"""

from __future__ import annotations

import collections
import json
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Numbers that the host reads, and results whose size depends on numbers.
_READS = "_local_scalar_dense equal nonzero masked_select _unique2 unique_dim"
READS = frozenset(f"aten::{name}" for name in _READS.split())
_INDEXED = "index index_put index_put_ _index_put_impl_"
INDEXED = frozenset(f"aten::{name}" for name in _INDEXED.split())


class Waits(TorchDispatchMode):
    """Counts what would wait, by operator and place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _waits(func._schema.name, args, kwargs, result):
            lines = [x for x in traceback.extract_stack()[:-1] if "/torch/" not in x.filename]
            places = [f"{Path(x.filename).name}:{x.lineno}" for x in reversed(lines[-3:])]
            where = " < ".join(places)
            self.found[f"{func._schema.name} at {where}"] += 1
        return result


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    if name in READS:
        return True
    if name in INDEXED:
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("aten::_to_copy", "aten::copy_"):
        source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], result)
        if source.device == target.device:
            return False
        host = source if source.device.type == "cpu" else target
        return not (kwargs.get("non_blocking", len(args) > 2 and args[2]) and host.is_pinned())
    return False


def audit_rows(rank: int, output: str) -> None:
    """A patch of a run (run_patches): write what each step's microbatches found to a file."""
    from finetune.training.executor import StepExecutor

    original = StepExecutor._run_microbatches

    def run(self: StepExecutor, model: torch.nn.Module, batch: Any, microbatches: list[Any]) -> Any:
        with Waits() as waits:
            result = original(self, model, batch, microbatches)
        with open(output, "a", encoding="utf-8") as file:
            file.write(json.dumps({"rows": len(microbatches), "found": waits.found}) + "\n")
        return result

    StepExecutor._run_microbatches = run


def audit_steps(rank: int, output: str) -> None:
    """A patch of a run: the same for whole steps, with what the host does at the end."""
    from finetune.training.trainer import RunTrainer

    begin, end = RunTrainer.training_step, RunTrainer.end_of_step
    at_work: list[Waits] = []

    def training_step(self: RunTrainer, *arguments: Any, **options: Any) -> torch.Tensor:
        if not at_work:
            at_work.append(Waits())
            at_work[0].__enter__()
        return begin(self, *arguments, **options)

    def end_of_step(self: RunTrainer) -> None:
        end(self)
        record = {"rows": len(self._batch.microbatches), "found": at_work[0].found}
        with open(output, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        at_work[0].found.clear()
        if self.state.global_step == self.total_steps:
            at_work.pop().__exit__(None, None, None)

    RunTrainer.training_step, RunTrainer.end_of_step = training_step, end_of_step
