"""`plan --check RUN`: compare what a plan would have predicted for a run with what it logged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from finetune.errors import DataError
from finetune.planning.finished_run import last_event, peaks_of, planned_of_run, read_events
from finetune.planning.plan import KEPT_BY_GLIBC
from finetune.planning.traffic import flops_per_token
from finetune.runtime.language import N_, _
from finetune.storage.run_log import read_jsonl_tolerant

LIMIT = 0.15
WARM_UP_STEPS = 2
MIB = 2**20
NAMES = {
    "device": N_("peak of a device: {numbers}"),
    "host": N_("peak of a process on the host: {numbers}"),
}


@dataclass(frozen=True)
class Compared:
    """One peak, predicted and measured."""

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Error of the prediction, as a fraction of the measured value."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True)
class Checked:
    """A run against its plan.

    Attributes:
        tokens_per_second, flops_per_second: medians over the logged steps after the first two, of
            all devices; None if the run logged none.
        efficiency: of the devices' peak; None if it is unknown.
    """

    run: str
    compared: tuple[Compared, ...]
    tokens_per_second: float | None
    flops_per_second: float | None
    efficiency: float | None

    @property
    def agrees(self) -> bool:
        """All within 15%."""
        return all(abs(peak.error) <= LIMIT for peak in self.compared)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        compared = [{**asdict(peak), "error": peak.error} for peak in self.compared]
        return {
            **asdict(self),
            "agrees": self.agrees,
            "limit": LIMIT,
            "compared": compared,
        }

    def text(self) -> str:
        """For people."""
        lines = []
        for peak in self.compared:
            numbers = _(
                "predicted {predicted:,.0f} MiB, measured {measured:,.0f} MiB, {error:+.1%}"
            ).format(
                predicted=peak.predicted_bytes / MIB,
                measured=peak.measured_bytes / MIB,
                error=peak.error,
            )
            lines.append(_(NAMES[peak.name]).format(numbers=numbers))
        if self.tokens_per_second is not None and self.flops_per_second is not None:
            speed = (
                f"{self.tokens_per_second:,.0f} tok/s, {self.flops_per_second / 1e12:,.3g} TFLOP/s"
            )
            if self.efficiency is not None:
                speed += _(", {share:.1%} of the peak").format(share=self.efficiency)
            lines.append(speed)
        if any(peak.name == "host" and peak.error < -LIMIT for peak in self.compared):
            lines.append(_(KEPT_BY_GLIBC))
        lines.append(_("within 15%") if self.agrees else _("missed by more than 15%"))
        return "\n".join(lines)


def check_run(run: Path, model_config: Path | None) -> Checked:
    """Compare a finished run with its plan. The run is read, never written.

    Raises:
        DataError: it did not log what it started with, or its peak memory.
        ConfigError: its model cannot be planned for.
    """
    events = read_events(run)
    end = _end(run, events)
    work, cluster = planned_of_run(run, events, model_config)
    speed, peak = _speed(run), (last_event(events, "start") or {}).get("peak_flops")
    rate = None if speed is None else speed * flops_per_token(work)
    share = rate / (peak * cluster.devices) if rate and peak else None
    return Checked(run.name, _compared(peaks_of(work, cluster), end), speed, rate, share)


def compare_memory(run: Path) -> tuple[Compared, ...]:
    """Compare the memory of a finished run with its plan. Raises as `check_run` does."""
    events = read_events(run)
    end = _end(run, events)
    # The run itself writes it, since 0.2: to plan again takes torch and the model's code, which are
    # seconds for any reader.
    return _compared(end.get("planned_peak_bytes") or peaks_of(*planned_of_run(run, events)), end)


def _end(run: Path, events: list[dict[str, Any]]) -> dict[str, Any]:
    end = last_event([event for event in events if "peak_host_bytes" in event], "end")
    if end is None:
        raise DataError(
            "this run did not log its peak memory: it has not ended, failed, or is of an older"
            " version",
            where=str(run),
            fix="check a run that trained to its end or to a signal with this version",
        )
    return end


def _compared(planned: dict[str, int], end: dict[str, Any]) -> tuple[Compared, ...]:
    peaks = {name: max(filter(None, end[f"peak_{name}_bytes"]), default=0) for name in planned}
    return tuple(Compared(name, planned[name], peak) for name, peak in peaks.items() if peak)


def _speed(run: Path) -> float | None:
    try:
        lines = islice(read_jsonl_tolerant(run / "trainer_log.jsonl"), WARM_UP_STEPS, None)
        speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    except OSError:
        return None  # a run without a logged step
    return median(speeds) if speeds else None
