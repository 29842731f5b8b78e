"""What a run came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import ExitCode

EXIT_CODES = {"done": ExitCode.DONE, "stopped": ExitCode.STOPPED, "failed": ExitCode.FAILED}


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        output_dir: the run folder: the adapter or model, logs and checkpoints.
        state: "done", or "stopped" (by a signal, with a checkpoint saved).
        steps: optimizer steps done.
        metrics: of the last evaluation and the last logged step.
        history: the logged steps and evaluations of this process, in order.
    """

    output_dir: Path
    state: str
    steps: int
    metrics: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.state]
