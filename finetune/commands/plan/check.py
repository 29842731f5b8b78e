"""`plan --check RUN`: what would have been predicted of a run, beside what it logged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from finetune.config.config_files import read_file
from finetune.config.kinds import kind_names, kind_of_settings, run_kind
from finetune.config.resolution import resolve_object
from finetune.errors import DataError
from finetune.planning.advice import KEPT_BY_GLIBC
from finetune.planning.auto import with_values
from finetune.planning.inputs import DTYPE_BYTES, shape_for, workload_of
from finetune.planning.memory import memory_of
from finetune.planning.traffic import flops_per_token
from finetune.planning.workload import Cluster, Workload
from finetune.runtime.language import N_, _
from finetune.storage.run_log import read_jsonl_tolerant

LIMIT = 0.15
WARM_UP_STEPS = 2
MIB = 2**20
NAMES = {"device": N_("peak of a device: {numbers}"), "host": N_("peak of a process on the host: {numbers}")}


@dataclass(frozen=True)
class Compared:
    """One number, predicted and measured, in bytes."""

    name: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Of the prediction, as a fraction of what was measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Checked:
    """A run against its plan.

    Attributes:
        tokens_per_second, flops_per_second: medians over the logged steps after the first two; of all devices; None
            where the run logged none.
        efficiency: of the devices' peak; None where it is not known.
    """

    run: str
    compared: tuple[Compared, ...]
    tokens_per_second: float | None
    flops_per_second: float | None
    efficiency: float | None

    @property
    def agrees(self) -> bool:
        """All within 15%."""
        return all(abs(number.error) <= LIMIT for number in self.compared)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "run": self.run,
            "agrees": self.agrees,
            "limit": LIMIT,
            "compared": [
                {"name": n.name, "predicted_bytes": n.predicted, "measured_bytes": n.measured, "error": n.error}
                for n in self.compared
            ],
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second": self.flops_per_second,
            "efficiency": self.efficiency,
        }

    def text(self) -> str:
        """For people."""
        numbers = _("predicted {predicted:,.0f} MiB, measured {measured:,.0f} MiB, {error:+.1%}")
        lines = [
            _(NAMES[number.name]).format(
                numbers=numbers.format(
                    predicted=number.predicted / MIB, measured=number.measured / MIB, error=number.error
                )
            )
            for number in self.compared
        ]
        if self.tokens_per_second is not None and self.flops_per_second is not None:
            share = "" if self.efficiency is None else _(", {share:.1%} of the peak").format(share=self.efficiency)
            lines.append(f"{self.tokens_per_second:,.0f} tok/s, {self.flops_per_second / 1e12:,.3g} TFLOP/s{share}")
        if any(number.name == "host" and number.error < -LIMIT for number in self.compared):
            lines.append(_(KEPT_BY_GLIBC))
        return "\n".join([*lines, _("within 15%") if self.agrees else _("missed by more than 15%")])


def check_run(run: Path, model_config: Path | None) -> Checked:
    """Compare a finished run with its plan. The run is read, never written.

    Raises:
        DataError: it did not log what it started with, or its peak memory.
        ConfigError: its model cannot be planned for.
    """
    compared, work, cluster, peak = _compared(run, model_config)
    speed = _speed(run)
    rate = None if speed is None else speed * flops_per_token(work)
    share = rate / (peak * cluster.devices) if rate and peak else None
    return Checked(run.name, compared, speed, rate, share)


def compare_memory(run: Path) -> tuple[Compared, ...]:
    """The memory of a finished run beside its plan. Raises as `check_run` does."""
    return _compared(run, None)[0]


def _compared(run: Path, model_config: Path | None) -> tuple[tuple[Compared, ...], Workload, Cluster, float | None]:
    """The numbers, what was planned for, and the peak of a device in FLOP/s, where it is known."""
    events = _events(run)
    start = next((event for event in reversed(events) if event["event"] == "start"), None)
    end = next((event for event in reversed(events) if event["event"] == "end" and "peak_host_bytes" in event), None)
    if start is None or end is None or not (run / "run.yaml").exists():
        raise DataError(
            "this run did not log its peak memory: it has not ended, failed, or is of an older version",
            where=str(run),
            fix="check a run that trained to its end or to a signal with this version",
        )
    execution = next((event for event in reversed(events) if event["event"] == "execution"), {})
    work, cluster = _planned(run, start, execution.get("chosen", {}), model_config)
    memory = memory_of(work)
    compared = []
    if cluster.device_type == "cpu":
        with_framework = memory.process() + sum(t.bytes for t in memory.terms if t.kind == "framework")
        compared.append(Compared("host", with_framework, max(end["peak_host_bytes"])))
    else:
        of_devices = [peak for peak in end["peak_device_bytes"] if peak]
        context = sum(t.bytes for t in memory.terms if t.kind == "framework" and t.location == "device")
        if of_devices:  # what torch allocated: the context is not in it
            compared.append(Compared("device", memory.device() - context, max(of_devices)))
    return tuple(compared), work, cluster, start.get("peak_flops")


def _planned(
    run: Path, start: dict[str, Any], chosen: dict[str, Any], model_config: Path | None
) -> tuple[Workload, Cluster]:
    """The workload of the run as it started, with the microbatches that it had instead of the largest there may be.

    Args:
        chosen: what the start put where the configuration says auto.
    """
    processes = int(start["world_size"])
    path = run / "run.yaml"
    kind = kind_of_settings(read_file(path)) or run_kind(kind_names()[0])
    config = with_values(resolve_object(path, processes, kind.config_class).config, chosen)
    cluster = Cluster(devices_per_node=processes, device_type=start["device_type"])
    work = workload_of(config, shape_for(config, model_config), cluster)
    if start["dtype"] in DTYPE_BYTES and DTYPE_BYTES[start["dtype"]] != work.computing.element_bytes:
        config = config.model_copy(update={"dtype": start["dtype"]})
        work = workload_of(config, work.shape, cluster)
    tokens, count = int(start["plan"]["heaviest_row_tokens"]), int(start["plan"]["rows_per_rank"][2])
    longest = min(work.longest, tokens)
    work = replace(work, microbatch_tokens=tokens, targets=tokens, longest=longest, microbatches=count)
    return work, cluster


def _events(run: Path) -> list[dict[str, Any]]:
    try:
        return list(read_jsonl_tolerant(run / "events.jsonl"))
    except OSError as error:
        raise DataError(
            f"no run is there: {error.strerror}", where=str(run / "events.jsonl"), fix="name a run's --output-dir"
        ) from error


def _speed(run: Path) -> float | None:
    try:
        lines = islice(read_jsonl_tolerant(run / "trainer_log.jsonl"), WARM_UP_STEPS, None)
        speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    except OSError:
        return None  # a run without a logged step
    return median(speeds) if speeds else None
