"""What a run came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import ExitCode
from finetune.storage.run_log import read_jsonl_tolerant

EXIT_CODES = {"done": ExitCode.DONE, "stopped": ExitCode.STOPPED, "failed": ExitCode.FAILED}


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        output_dir: the run folder: the adapter or model, logs and checkpoints.
        state: "done", or "stopped" (by a signal, with a checkpoint saved).
        steps: optimizer steps done.
        metrics: of the last evaluation and the last logged step.
        first_step: done before this start; None where it did nothing, as the run was finished.
    """

    output_dir: Path
    state: str
    steps: int
    metrics: dict[str, Any] = field(default_factory=dict)
    first_step: int | None = None

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.state]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The logged steps and evaluations of this start, in order, read from the run folder: a week's are many.

        A number that is not finite is None.
        """
        if self.first_step is None:
            return []
        steps = list(read_jsonl_tolerant(self.output_dir / "trainer_log.jsonl"))
        events = list(read_jsonl_tolerant(self.output_dir / "events.jsonl"))
        begin = max(number for number, event in enumerate(events) if event["event"] == "start")
        evaluations = [
            {name: value for name, value in event.items() if name not in ("event", "time")}
            for event in events[begin:]
            if event["event"] == "eval"
        ]
        own = [*(line for line in steps if line["step"] > self.first_step), *evaluations]
        return sorted(own, key=lambda line: line["step"])  # what is equal stays in order: an evaluation ends its step
