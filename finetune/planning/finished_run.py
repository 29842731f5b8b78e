"""What would have been predicted of a finished run: its own files, planned again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.config.kinds import run_kind
from finetune.config.resolution import resolve_object
from finetune.errors import DataError
from finetune.planning.auto import with_values
from finetune.planning.inputs import DTYPE_BYTES, shape_for, workload_of
from finetune.planning.memory import memory_of
from finetune.planning.workload import Cluster, Workload
from finetune.storage.run_log import plain_record, read_jsonl_tolerant


def read_events(run: Path) -> list[dict[str, Any]]:
    """Read the events of a run folder.

    Raises:
        DataError: the folder holds no run.
    """
    try:
        return [plain_record(event) for event in read_jsonl_tolerant(run / "events.jsonl")]
    except OSError as error:
        raise DataError(
            f"no run is there: {error.strerror}",
            where=str(run / "events.jsonl"),
            fix="name a run's --output-dir",
        ) from error


def last_event(events: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the newest event of that name."""
    return next((event for event in reversed(events) if event["event"] == name), None)


def planned_of_run(
    run: Path, events: list[dict[str, Any]], model_config: Path | None = None
) -> tuple[Workload, Cluster]:
    """Return the workload of the run at its last start, with its actual microbatches instead of the
    largest possible ones.

    Args:
        model_config: a config.json instead of the model's own.

    Raises:
        DataError: no start was logged.
        ConfigError: its model cannot be planned for.
        KeyError: an older version logged less of the start.
    """
    start, execution = last_event(events, "start"), last_event(events, "execution") or {}
    path = run / "run.yaml"
    if start is None or not path.exists():
        raise DataError(
            "this run did not log how it started",
            where=str(run),
            fix="name a run of this version that has begun to train",
        )
    processes, dtype = int(start["world_size"]), start["dtype"]
    config_class = run_kind(run / "run.yaml").config_class
    chosen = execution.get("chosen", {})  # values that the start chose for auto
    config = with_values(resolve_object(path, processes, config_class).config, chosen)
    if dtype in DTYPE_BYTES:
        config = config.model_copy(update={"dtype": dtype})
    cluster = Cluster(devices_per_node=processes, device_type=start["device_type"])
    work = workload_of(config, shape_for(config, model_config), cluster)
    tokens = int(start["plan"]["heaviest_row_tokens"])
    return replace(
        work,
        microbatch_tokens=tokens,
        targets=tokens,
        longest=min(work.longest, tokens),
        microbatches=int(start["plan"]["rows_per_rank"][2]),
    ), cluster


def peaks_of(work: Workload, cluster: Cluster) -> dict[str, int]:
    """Bytes of a process on the `host`, or on a `device` as torch counts them (without its
    context).
    """
    memory = memory_of(work)
    framework = [term for term in memory.terms if term.kind == "framework"]
    if cluster.device_type == "cpu":
        return {"host": memory.process() + sum(term.bytes for term in framework)}
    context = sum(term.bytes for term in framework if term.location == "device")
    return {"device": memory.device() - context}
