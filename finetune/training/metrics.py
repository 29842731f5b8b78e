"""Metrics that a line of the log has in addition to loss, gradient norm and learning rate.

To add a metric, write a function here and its entry in `METRICS`. `StepMeter` adds up what the
function needs from every step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune.batching.steps import LossGroups, StepBatch
from finetune.planning.traffic import flops_utilisation
from finetune.runtime.progress import ProgressLine

if TYPE_CHECKING:
    from finetune.batching.sampler import GlobalBatches


@dataclass(frozen=True)
class ComputeCost:
    """The cost of training, for the utilization of the devices.

    Attributes:
        flops_per_token: operations of training.
        peak_flops: of one device; None where it is unknown.
        devices: of the run.
    """

    flops_per_token: int
    peak_flops: float | None
    devices: int


@dataclass
class Interval:
    """The steps between two lines of the log, over all ranks. Evaluation and saving are not in the
    seconds.

    Attributes:
        groups: what losses are summed by.
        cost: None where the run does not count its arithmetic.
        group_tokens: the number of targets of each group.
        sums: what the objective added up; of the token loss, of each group's targets.
    """

    groups: LossGroups
    cost: ComputeCost | None
    group_tokens: np.ndarray
    sums: Sequence[float] = ()
    steps: int = 0
    tokens: int = 0
    samples: int = 0
    seconds: float = 0.0
    loader_wait_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def speed(interval: Interval) -> dict[str, Any]:
    steps = max(1, interval.steps)
    return {
        "tokens_per_second": round(interval.tokens_per_second, 1),
        "samples_per_second": round(interval.samples / max(interval.seconds, 1e-9), 2),
        "step_seconds": round(interval.seconds / steps, 4),
        "loader_wait_seconds": round(interval.loader_wait_seconds / steps, 4),
    }


def model_flops_utilisation(interval: Interval) -> dict[str, Any]:
    """`mfu`: a fraction; null where the device's peak is unknown."""
    cost = interval.cost
    if cost is None:
        return {}
    used = flops_utilisation(
        interval.tokens_per_second, cost.flops_per_token, cost.peak_flops, cost.devices
    )
    return {"mfu": None if used is None else round(used, 4)}


def per_difficulty(interval: Interval) -> dict[str, Any]:
    return _named_facts("", interval, interval.groups.by_difficulty)


def per_source(interval: Interval) -> dict[str, Any]:
    return _named_facts("source_", interval, interval.groups.by_source)


def _named_facts(
    prefix: str, interval: Interval, by: Callable[[Sequence[float]], dict[str, float]]
) -> dict[str, Any]:
    """Targets, their share and their mean loss; no loss where there were no targets."""
    facts: dict[str, Any] = {}
    counts = by(interval.group_tokens.tolist())
    losses = by(interval.sums[: len(interval.groups)])
    for name, tokens in counts.items():
        facts |= target_share(prefix, name, counts)
        if tokens:
            facts[f"{prefix}loss/{name}"] = losses[name] / tokens
    return facts


def target_share(prefix: str, name: str, counts: Mapping[str, float]) -> dict[str, Any]:
    tokens, total = counts[name], max(1, sum(counts.values()))
    return {f"{prefix}tokens/{name}": tokens, f"{prefix}share/{name}": round(tokens / total, 4)}


def mean_losses(
    groups: LossGroups, sums: Sequence[float], tokens: Sequence[int]
) -> dict[str, float]:
    """Return an evaluation's mean loss of each difficulty and source that has targets; sums and
    targets are by group.
    """
    found: dict[str, float] = {}
    for name, by in (("loss", groups.by_difficulty), ("source_loss", groups.by_source)):
        counts = by(tokens)
        found |= {
            f"{name}/{one}": loss / counts[one] for one, loss in by(sums).items() if counts[one]
        }
    return found


# In the order of the line.
Metric = Callable[[Interval], dict[str, Any]]
METRICS: tuple[Metric, ...] = (speed, model_flops_utilisation, per_difficulty, per_source)


def progress_text(logs: dict[str, Any]) -> str:
    """Return the text that people see for a line of the log while the run works."""
    text = f"loss {logs['loss']:.4f}  {logs['tokens_per_second']:,.0f} tok/s"
    if "mfu" not in logs:
        return text
    mfu = "unknown" if logs["mfu"] is None else f"{logs['mfu']:.1%}"
    return f"{text}  lr {logs['learning_rate']:.3g}  dt {logs['step_seconds']:.3f} s  mfu {mfu}"


class ConsoleProgress:
    """The progress line of a run, from the first line of its log on. Only rank 0 shows it."""

    def __init__(self, batches: GlobalBatches) -> None:
        self.batches = batches
        self._line: ProgressLine | None = None

    def show(self, step: int, logs: dict[str, Any]) -> None:
        total, stages = self.batches.total_steps, self.batches.schedule.stages
        if self._line is None:
            self._line = ProgressLine(total, step)
        eta_seconds = (total - step) * logs["step_seconds"]
        stage = ""
        if len(stages) > 1:
            stage = f"stage {self.batches.stage(step - 1) + 1}/{len(stages)}"
        self._line.update(
            step,
            stage=stage,
            facts=progress_text(logs),
            eta_seconds=eta_seconds,
        )

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


class StepMeter:
    """Adds up what was trained between two lines of the log, and the time that training took.

    Args:
        groups: what losses are summed by.
        sums: how many numbers the objective adds up.
        device: where losses are.
    """

    def __init__(
        self, groups: LossGroups, sums: int, device: torch.device, cost: ComputeCost | None
    ) -> None:
        self.groups = groups
        self.cost = cost
        # On the device: reading a loss after every step would make the host wait for the device.
        self._sums = torch.zeros(sums, device=device)
        self._mark: float | None = None
        self._interval = self._new_interval()

    def _new_interval(self) -> Interval:
        return Interval(self.groups, self.cost, np.zeros(len(self.groups), dtype=np.int64))

    def add_step(self, batch: StepBatch, sums: torch.Tensor) -> None:
        """A step of the whole global batch; the sums are those of this rank's microbatches."""
        self._interval.steps += 1
        self._interval.tokens += batch.tokens
        self._interval.samples += len(batch.indices)
        self._interval.group_tokens += batch.group_tokens
        self._sums += sums

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        # The clock starts with the first batch: what comes before (engine, first evaluation) is no
        # training.
        if self._mark is None:
            self._mark = time.perf_counter()
        began = time.perf_counter()
        yield
        self._interval.loader_wait_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count as training."""
        self._collect_seconds()
        yield
        if self._mark is not None:
            self._mark = time.perf_counter()

    def _collect_seconds(self) -> None:
        if self._mark is not None:
            now = time.perf_counter()
            self._interval.seconds += now - self._mark
            self._mark = now

    def take(self, sum_over_ranks: Callable[[torch.Tensor], None]) -> Interval:
        """Return what was added since the last call. Collective: every rank must call it."""
        self._collect_seconds()
        if len(self._sums):
            sum_over_ranks(self._sums)
        taken, self._interval = self._interval, self._new_interval()
        taken.sums = self._sums.tolist()
        self._sums.zero_()
        return taken
