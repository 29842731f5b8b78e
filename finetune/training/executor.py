"""One optimizer step executed here: microbatches forward and backward, gradients summed over ranks.

The gradient does not depend on how the microbatches are cut or where they run. It is the gradient
of (the objective's sum over microbatches) / (its denominator of the global batch). For the token
loss that is the sum of the targets' losses / the number of targets. DDP and DeepSpeed average over
ranks, so their loss is scaled by the world size first. Comments about other packages refer to
accelerate 1.15, DeepSpeed 0.19.8 and torch 2.13.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from finetune.batching.collate import Microbatch
from finetune.batching.steps import Execution, StepBatch, StepBatches
from finetune.errors import FinetuneError
from finetune.modeling.loss import ChunkedHead
from finetune.modeling.objective import Objective, TokenLoss
from finetune.runtime import device as devices
from finetune.training.control import Control

if TYPE_CHECKING:
    from accelerate import Accelerator


REHEARSAL = -1  # instead of a microbatch's number
# Samples that are planned in advance to find the largest microbatch. This takes a second or two on
# any number of devices.
LOOKED_AT_SAMPLES = 2_000_000
FEWEST_LOOKED_AT = 4


@dataclass(frozen=True)
class StepResult:
    """The result of one step on this rank.

    Attributes:
        loss: scalar; its mean over ranks is the loss of the global batch.
        sums: what the objective adds up, of this rank's microbatches; of the token loss
            `(groups,)`, losses per group.
    """

    loss: torch.Tensor
    sums: torch.Tensor


class StepOutOfMemory(Exception):
    """A device ran out of memory where the step cannot be tried again in this process."""


class StepExecutor:
    """Executes steps on a model that accelerate has wrapped.

    Args:
        flat_reduce: sum gradients with one all-reduce at the end of the step instead of DDP's
            buckets. For LoRA, whose gradients are small: no collective runs during microbatches, so
            a rank that runs out of memory can report it and all ranks try again. (With DDP's
            buckets or ZeRO the peers would wait for that rank in a collective.)
        objective: what is minimized.
        largest: a microbatch that is run with weight 0 in the first step. If it does not fit, the
            run fails now and not days later.
        on_out_of_memory: called after each retry with the step (0-based), the old and the new
            execution, and the error.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        step_batches: StepBatches,
        control: Control,
        *,
        seed: int,
        head: ChunkedHead | None,
        flat_reduce: bool,
        largest: Microbatch | None,
        objective: Objective | None = None,
        on_out_of_memory: Callable[[int, Execution, Execution, str], None] = lambda *retry: None,
    ) -> None:
        self.accelerator = accelerator
        self.step_batches = step_batches
        self.control = control
        self.seed = seed
        self.head = head
        self.largest = largest
        self.objective: Objective = objective or TokenLoss()
        self.on_out_of_memory = on_out_of_memory
        self.is_deepspeed = accelerator.distributed_type.value == "DEEPSPEED"
        self.flat_reduce = flat_reduce and not self.is_deepspeed and accelerator.num_processes > 1
        self.can_retry = not self.is_deepspeed and (
            self.flat_reduce or accelerator.num_processes == 1
        )
        # DDP's buckets and ZeRO average over ranks; the flat sum and a single process do not.
        self.scale = 1 if self.can_retry else accelerator.num_processes

    def run(self, model: torch.nn.Module, batch: StepBatch) -> StepResult:
        """Forward and backward of all microbatches; afterwards gradients are those of the global
        batch on every rank.

        Raises:
            StepOutOfMemory: a device ran out of memory under DDP buckets or ZeRO.
            FinetuneError: not even one sample a microbatch fits.
        """
        microbatches = batch.microbatches
        # Loader processes prefetch several batches. They may have planned them before this step, or
        # an earlier one, shrank the microbatches. Their own copy of `step_batches` is never
        # updated.
        if batch.execution != self.step_batches.execution:
            microbatches = list(
                self.step_batches.microbatches(batch.indices, self.step_batches.execution)
            )
        while True:
            result, error = self._try_microbatches(model, batch, microbatches)
            # Every rank must call this, even if its microbatches fit: all ranks have to split their
            # part of the batch again, in the same way.
            failed_somewhere = self.can_retry and self.control.any(result is None)
            if result is not None and not failed_somewhere:
                break
            self._shrink(model, batch, error)
            microbatches = list(
                self.step_batches.microbatches(batch.indices, self.step_batches.execution)
            )
        self.largest = None  # tried once: it has fitted
        if self.flat_reduce:
            self._sum_gradients(model)
        return result

    def _try_microbatches(
        self, model: torch.nn.Module, batch: StepBatch, microbatches: list[Microbatch]
    ) -> tuple[StepResult | None, str | None]:
        """Return the result, or the error if memory did not suffice and the step can be tried
        again.
        """
        try:
            return self._run_microbatches(model, batch, microbatches), None
        except Exception as caught:  # each device backend raises its own type
            if not devices.is_out_of_memory(caught):
                raise
            error = str(caught).splitlines()[0]
            if not self.can_retry:
                raise StepOutOfMemory(error) from caught
            # Not `caught` itself: its traceback holds the frames, and with them the tensors that
            # did not fit.
            return None, error

    def _run_microbatches(
        self, model: torch.nn.Module, batch: StepBatch, microbatches: list[Microbatch]
    ) -> StepResult:
        device = self.accelerator.device
        loss = torch.zeros((), device=device)
        self.objective.begin(model, batch, microbatches)
        groups = len(self.step_batches.groups)
        sums = torch.zeros(self.objective.sums(groups), device=device)
        denominator = self.objective.denominator(batch)
        weight = self.scale / denominator
        work = [(number, microbatch, weight) for number, microbatch in enumerate(microbatches)]
        if self.largest is not None:
            # The rehearsal has its own number: it runs after every start and must not change the
            # dropout of the other microbatches.
            work.insert(0, (REHEARSAL, self.largest, 0.0))
        for number, microbatch, weight_here in work:
            with self._microbatch(model, batch.step, number, last=number == len(microbatches) - 1):
                microbatch = microbatch.to(device)
                scored = self.objective.score(model, microbatch, self.head, groups=groups)
                microbatch_loss = scored.total * weight_here
                self._backward(model, microbatch_loss)
            if weight_here:
                # Not the microbatch's loss: the reported one has another scale, and is summed in
                # float32.
                loss += scored.total.detach().to(loss.dtype) * (
                    self.accelerator.num_processes / denominator
                )
                sums += scored.sums
            # Else they, and what their graph holds on to, would live through the next forward.
            del microbatch, scored, microbatch_loss
        return StepResult(loss, sums)

    @contextlib.contextmanager
    def _microbatch(
        self, model: torch.nn.Module, step: int, number: int, *, last: bool
    ) -> Iterator[None]:
        """Seed the microbatch and set whether its backward is the one that ends the
        accumulation.
        """
        _seed(
            microbatch_seed(self.seed, step, number, self.accelerator.process_index),
            self.accelerator.device,
        )
        # Trainer's loop has set it for its own accumulation (one item a step: always True). It is
        # what AcceleratedOptimizer.step and .zero_grad go by: they do nothing while it is False.
        self.accelerator.gradient_state._set_sync_gradients(last)
        wrapped: Any = model  # DeepSpeed's engine, or DDP
        if self.is_deepspeed:
            # The engine counts micro-steps against its configuration, which is 1; the schedule has
            # the real number. The boundary must be set before the forward too (documented with the
            # method), and be the same on every rank: ZeRO reduces there. Every rank has the same
            # number of microbatches, if necessary an empty one (batching/collate.py).
            wrapped.set_gradient_accumulation_boundary(is_boundary=last)
            yield
        elif self.accelerator.num_processes > 1 and (self.flat_reduce or not last):
            # DDP decides in the forward whether the backward that follows reduces, so both are
            # inside.
            with wrapped.no_sync():
                yield
        else:
            yield

    def _backward(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        if self.is_deepspeed:
            # Do not use accelerator.backward: its DeepSpeedEngineWrapper calls engine.step() after
            # the last microbatch, but the trainer checks the gradients first. The loss contains the
            # weight already, so it must not be divided by the engine's accumulation steps.
            engine: Any = model
            engine.backward(loss, scale_wrt_gas=False)
        else:
            self.accelerator.backward(loss)

    def _sum_gradients(self, model: torch.nn.Module) -> None:
        # The same list on every rank: a microbatch without targets gives zeros, not None
        # (modeling/loss.py).
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        for gradient, summed in zip(
            gradients, _unflatten_dense_tensors(flat, gradients), strict=True
        ):
            gradient.copy_(summed)

    def _shrink(self, model: torch.nn.Module, batch: StepBatch, error: str | None) -> None:
        """Half the tokens of a microbatch from here on; the same global batch in more
        microbatches.
        """
        old = self.step_batches.execution
        new = old.smaller(self.step_batches.longest)
        if new is None:
            raise cannot_shrink_error(
                self.step_batches, batch.step, error, rehearsed=self.largest is not None
            )
        # Gradients of the microbatches that went well, which are part of what takes memory and
        # would count twice. The collector first: a failed backward leaves cycles that hold tensors,
        # and the cache gives back only free blocks.
        model.zero_grad(set_to_none=True)
        gc.collect()
        devices.empty_cache(self.accelerator.device)
        self.step_batches.execution = new
        if self.largest is not None:
            self.largest = largest_microbatch(self.step_batches)
        self.on_out_of_memory(batch.step, old, new, error or "on another rank")


def cannot_shrink_error(
    step_batches: StepBatches, step: int, error: str | None, *, rehearsed: bool
) -> FinetuneError:
    """Return the error for microbatches that cannot be made smaller; names the sample that they
    must hold.

    Args:
        step: 0-based.
        rehearsed: the microbatch may be another step's: the largest of the run was being tried.
    """
    # Packed microbatches must have room for the longest sample of the data, padded ones hold one of
    # this step each.
    anywhere = rehearsed or step_batches.execution.token_budget is not None
    candidates = (
        np.arange(len(step_batches.samples)) if anywhere else step_batches.batches.indices(step)
    )
    worst = int(candidates[step_batches.samples.lengths[candidates].argmax()])
    record, tokens = (
        int(step_batches.samples.record_ids[worst]),
        int(step_batches.samples.lengths[worst]),
    )
    return FinetuneError(
        "out of memory with microbatches that cannot be made smaller"
        f" ({step_batches.execution.describe()}): record {record} of the data alone has {tokens}"
        f" tokens; {error or 'another rank'}",
        where=f"step {step + 1}",
        fix=(
            "lower --cutoff-len, turn --gradient-checkpointing on, or shard the model and offload "
            "(ds_configs/zero3.json)"
        ),
    )


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators that dropout may draw from: the host's, and this device's."""
    # Do not use torch.manual_seed: it seeds every device type that torch was built for. For each
    # type that is not in use it records a formatted stack (torch 2.13, cuda/__init__.py,
    # _lazy_call): 0.6 ms, and 40 calls of stat.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def microbatch_seed(seed: int, step: int, microbatch: int, rank: int) -> int:
    """Seed of one microbatch's dropout: never restored, always derived.

    Args:
        microbatch: its place in the rank's schedule of the step, or `REHEARSAL`.
    """
    digest = hashlib.sha256(f"{seed}:{step}:{microbatch}:{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def largest_microbatch(step_batches: StepBatches) -> Microbatch:
    """Return the planned microbatch with the largest number of tokens; the same on every rank.

    All steps are searched, or an even choice of them (`looked_at_steps`).
    """
    best, best_tokens = np.empty(0, dtype=np.int64), -1
    for step in looked_at_steps(step_batches):
        indices = step_batches.batches.indices(step)
        plan = step_batches.plan(indices, step_batches.execution)
        if plan.largest_microbatch_tokens > best_tokens:
            rank, micro_step = np.unravel_index(
                plan.computed_tokens.argmax(), plan.computed_tokens.shape
            )
            best, best_tokens = (
                indices[plan.of_rank(int(rank))[micro_step]],
                plan.largest_microbatch_tokens,
            )
    return step_batches.microbatch(best, packing=step_batches.execution.token_budget is not None)


def looked_at_steps(step_batches: StepBatches, *, most: int = 400) -> range:
    """Return all steps, or an even choice of them with about `LOOKED_AT_SAMPLES` samples.

    Planning every step would take longer than the first training step, if the run is long or on
    thousands of devices.
    """
    total = len(step_batches)
    samples_per_step = max(1, len(step_batches.batches.indices(0)))
    count = max(FEWEST_LOOKED_AT, min(most, LOOKED_AT_SAMPLES // samples_per_step))
    return range(0, total, max(1, total // count))
