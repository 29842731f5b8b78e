"""One optimizer step executed here: rows forward and backward, gradients summed over ranks.

However the rows are cut and wherever they run, the gradient is that of (sum of target losses) / (targets of the global
batch). DDP and DeepSpeed average over ranks, so their loss is scaled by the world size first.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from finetune.data.collate import Row
from finetune.data.steps import Execution, StepBatch, StepRows
from finetune.errors import FinetuneError
from finetune.modeling.loss import ChunkedHead, row_losses
from finetune.runtime import device as devices
from finetune.training.control import Control

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("finetune")


@dataclass(frozen=True)
class StepResult:
    """What one step gave on this rank.

    Attributes:
        loss: scalar; its mean over ranks is the loss of the global batch.
        level_losses: `(levels,)`: sums of target losses of this rank's rows per level.
    """

    loss: torch.Tensor
    level_losses: torch.Tensor


class OutOfMemory(Exception):
    """A device ran out of memory where the step cannot be tried again in this process."""


class StepExecutor:
    """Executes steps on a model that accelerate has wrapped.

    Args:
        flat_reduce: sum gradients with one all-reduce at the end of the step instead of DDP's buckets. For LoRA, whose
            gradients are small: no collective runs while rows do, so a rank that runs out of memory can say so and all
            try again. (With DDP's buckets or ZeRO the peers would wait in a collective for it.)
        heaviest: a row that is run with weight 0 in the first step: if it does not fit, it shows now and not days on.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        rows: StepRows,
        control: Control,
        *,
        seed: int,
        head: ChunkedHead | None,
        flat_reduce: bool,
        heaviest: Row | None,
    ) -> None:
        self.accelerator, self.rows, self.control = accelerator, rows, control
        self.seed, self.head, self.heaviest = seed, head, heaviest
        self.is_deepspeed = accelerator.distributed_type.value == "DEEPSPEED"
        self.flat_reduce = flat_reduce and not self.is_deepspeed and accelerator.num_processes > 1
        self.can_retry = not self.is_deepspeed and (self.flat_reduce or accelerator.num_processes == 1)
        # DDP's buckets and ZeRO average over ranks; the flat sum and a single process do not.
        self.scale = 1 if self.can_retry else accelerator.num_processes

    def run(self, model: torch.nn.Module, batch: StepBatch) -> StepResult:
        """Forward and backward of all rows; afterwards gradients are those of the global batch on every rank.

        Raises:
            OutOfMemory: a device ran out of memory under DDP buckets or ZeRO.
            FinetuneError: not even one sample a row fits.
        """
        rows = batch.rows
        if batch.execution != self.rows.execution:  # a prefetched batch, planned before an out-of-memory
            rows = list(self.rows.rows(batch.indices, self.rows.execution))
        while True:
            try:
                result, error = self._run_rows(model, batch, rows), None
            except Exception as caught:
                if not devices.is_out_of_memory(caught):
                    raise
                if not self.can_retry:
                    raise OutOfMemory(str(caught).splitlines()[0]) from caught
                result, error = None, str(caught).splitlines()[0]
            if not self.can_retry or not self.control.any(error is not None):
                break
            self._shrink(model, batch, error)
            rows = list(self.rows.rows(batch.indices, self.rows.execution))
        self.heaviest = None
        if self.flat_reduce:
            self._sum_gradients(model)
        return result

    def _run_rows(self, model: torch.nn.Module, batch: StepBatch, rows: list[Row]) -> StepResult:
        device = self.accelerator.device
        loss = torch.zeros((), device=device)
        level_losses = torch.zeros(self.rows.levels + 1, device=device)
        weight = self.scale / batch.supervised_tokens
        work = [(row, weight) for row in rows]
        if self.heaviest is not None:
            work.insert(0, (self.heaviest, 0.0))
        for number, (row, row_weight) in enumerate(work):
            with self._row(model, batch.step, number, last=number == len(work) - 1):
                losses = row_losses(model, row, device, self.head)
                row_loss = losses.sum() * row_weight
                self._backward(model, row_loss)
            if row_weight:
                detached = losses.detach().to(loss.dtype)
                loss += detached.sum() * (self.accelerator.num_processes / batch.supervised_tokens)
                # Level -1 (none) lands in the last slot and is dropped.
                level_losses.index_add_(0, row.levels.to(device) % (self.rows.levels + 1), detached)
        return StepResult(loss, level_losses[: self.rows.levels])

    @contextlib.contextmanager
    def _row(self, model: torch.nn.Module, step: int, number: int, *, last: bool) -> Iterator[None]:
        """Seed the row and set whether its backward is the one that ends the accumulation."""
        torch.manual_seed(row_seed(self.seed, step, number, self.accelerator.process_index))
        self.accelerator.gradient_state._set_sync_gradients(last)
        if self.is_deepspeed:
            model.set_gradient_accumulation_boundary(is_boundary=last)
            yield
        elif self.accelerator.num_processes > 1 and (self.flat_reduce or not last):
            with model.no_sync():
                yield
        else:
            yield

    def _backward(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        if self.is_deepspeed:
            # engine.backward without accelerate's wrapper, which would call engine.step() at once: the trainer looks
            # at the gradients first.
            model.backward(loss, scale_wrt_gas=False)
        else:
            self.accelerator.backward(loss)

    def _sum_gradients(self, model: torch.nn.Module) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(summed)

    def _shrink(self, model: torch.nn.Module, batch: StepBatch, error: str | None) -> None:
        """Half the tokens of a row from here on; the same global batch in more rows."""
        old = self.rows.execution
        new = old.smaller(int(self.rows.samples.lengths.max()))
        if new is None:
            raise floor_error(self.rows, batch.step, error, rehearsed=self.heaviest is not None)
        model.zero_grad(set_to_none=True)
        gc.collect()
        devices.empty_cache(self.accelerator.device)
        self.rows.execution = new
        if self.heaviest is not None:
            self.heaviest = heaviest_row(self.rows)
        self.on_out_of_memory(batch.step, old, new, error or "on another rank")

    def on_out_of_memory(self, step: int, old: Execution, new: Execution, error: str) -> None:
        """Told after each retry; the trainer replaces it to write the event."""
        logger.warning("step %d ran out of memory (%s): %s -> %s", step + 1, error, old.describe(), new.describe())


def floor_error(rows: StepRows, step: int, error: str | None, *, rehearsed: bool) -> FinetuneError:
    """The error for rows that cannot be made smaller; names the sample that they must hold.

    Args:
        step: 0-based.
        rehearsed: the row may be another step's: the heaviest was being tried.
    """
    # Packed rows must have room for the longest sample of the data, padded ones hold one of this step each.
    anywhere = rehearsed or rows.execution.token_budget is not None
    candidates = np.arange(len(rows.samples)) if anywhere else rows.batches.indices(step)
    worst = int(candidates[rows.samples.lengths[candidates].argmax()])
    return FinetuneError(
        f"out of memory with rows that cannot be made smaller ({rows.execution.describe()}): row "
        f"{int(rows.samples.row_ids[worst])} of the data alone has {int(rows.samples.lengths[worst])} tokens; "
        f"{error or 'another rank'}",
        where=f"step {step + 1}",
        fix="lower --cutoff-len, turn --gradient-checkpointing on, or shard the model and offload "
        "(ds_configs/zero3.json)",
    )


def row_seed(seed: int, step: int, row: int, rank: int) -> int:
    """Seed of one row's dropout: never restored, always derived."""
    digest = hashlib.sha256(f"{seed}:{step}:{row}:{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def heaviest_row(rows: StepRows, *, looked_at_steps: int = 400) -> Row:
    """The planned row with the most tokens, from all steps or an even choice of them; the same on every rank."""
    total = len(rows)
    stride = max(1, total // looked_at_steps)
    best, best_tokens = None, -1
    for step in range(0, total, stride):
        indices = rows.batches.indices(step)
        lengths = rows.samples.lengths[indices]
        for rank_rows in rows.execution.plan(lengths).rows:
            for positions in rank_rows:
                tokens = _computed_tokens(lengths[positions], packing=rows.execution.token_budget is not None)
                if tokens > best_tokens:
                    best, best_tokens = indices[positions], tokens
    return rows.row(best, packing=rows.execution.token_budget is not None)


def _computed_tokens(lengths, *, packing: bool) -> int:
    if len(lengths) == 0:
        return 0
    return int(lengths.sum() if packing else lengths.max() * len(lengths))
