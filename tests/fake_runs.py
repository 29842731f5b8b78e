"""Run folders as a run leaves them, made without training: for tests of what looks at runs."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DIFFICULTIES = ("explain", "reasoning", "topology")
MIXES = ((80.0, 20.0, 0.0), (40.0, 40.0, 20.0), (25.0, 35.0, 40.0))


def line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def step(number: int, **more: Any) -> dict[str, Any]:
    """A line of trainer_log.jsonl of a run with difficulties."""
    record = {"step": number, "loss": 2.0 / number, "grad_norm": 1.0, "learning_rate": 1e-4}
    record |= {"tokens_per_second": 1000.0 + number, "samples_per_second": 20.0}
    record |= {"step_seconds": 0.5, "loader_wait_seconds": 0.001}
    for name in DIFFICULTIES[: 2 + (number > 30)]:
        record |= {f"loss/{name}": 1.0 / number, f"tokens/{name}": 100, f"share/{name}": 0.5}
    return record | more


def make_preference_run(folder: Path) -> Path:
    """A run on preferences after 40 steps, evaluated before its first and at its last."""
    make_run(folder, steps=0)
    names = ("accuracy", "margin", "chosen_reward", "rejected_reward", "reference_point")
    values = [(n / 50, n / 40, n / 80, -n / 80, n / 20) for n in range(1, 41)]
    own = [dict(zip(names, each, strict=True)) for each in values]
    steps = [line(step(n, **each)) for n, each in enumerate(own, 1)]
    (folder / "trainer_log.jsonl").write_text("".join(steps))
    with open(folder / "events.jsonl", "a") as events:
        for at, measured in ((0, own[0]), (40, own[29])):
            event = {"event": "eval", "time": time.time(), "step": at, "eval_loss": 2.0}
            event |= {f"eval_{name}": value for name, value in measured.items()}
            events.write(line(event | {"eval_accuracy/explain": 0.25}))
    return folder


def start_event(number: int = 0, **more: Any) -> dict[str, Any]:
    facts = {"event": "start", "time": time.time() - 60, "step": number, "total_steps": 100}
    facts |= {"device_type": "cpu", "world_size": 1, "dtype": "float32", "global_batch_size": 10}
    return facts | more


def make_run(
    folder: Path,
    steps: int = 40,
    *,
    state: str = "running",
    exit_code: int | None = None,
    **status: Any,
) -> Path:
    """A run folder as a run of 100 steps leaves it after so many; its lock names this process."""
    folder.mkdir(parents=True)
    (folder / "run_identity.json").write_text(json.dumps({"kind": "sft", "total_steps": 100}))
    stages = [
        {"until": u, "mix": list(mix), "ramp": "step"}
        for u, mix in zip((0.3, 0.7, 1.0), MIXES, strict=True)
    ]
    config = {"model": "data_samples/tiny", "use_curriculum": True, "finetuning": "lora"}
    config["curriculum"] = {"levels": list(DIFFICULTIES), "stages": stages}
    (folder / "run.yaml").write_text(json.dumps(config))
    (folder / "status.json").write_text(
        json.dumps({"state": state, "exit_code": exit_code} | status)
    )
    sign(folder, os.getpid())
    (folder / "trainer_log.jsonl").write_text("".join(line(step(n)) for n in range(1, steps + 1)))
    events = [start_event(), {"event": "eval", "time": time.time(), "step": 0, "eval_loss": 2.5}]
    saved = {"event": "checkpoint", "step": 20, "name": "checkpoint-20", "size_bytes": 10}
    for event in (saved, {"event": "nonfinite", "step": 7, "ids": [1, 2]}):
        events.append(event | {"time": time.time()})
    (folder / "events.jsonl").write_text("".join(map(line, events)))
    return folder


def sign(folder: Path, pid: int, host: str | None = None, since: float | None = None) -> None:
    signed_at = datetime.fromtimestamp(time.time() if since is None else since, UTC)
    facts = {"pid": pid, "host": host or socket.gethostname()}
    facts["since"] = signed_at.isoformat(timespec="seconds")
    (folder / ".lock").write_text(json.dumps(facts))
