"""What a run came to, and how that becomes an exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import ExitCode, FinetuneError
from finetune.runtime.device import LaunchWorld
from finetune.storage.run_log import success

# A rank that is refused together with its peers leaves the talking to one of them, and stays long enough for that one
# to be heard: an elastic launcher ends all workers as soon as one has exited.
QUIET_RANK_SECONDS = 3.0

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


def exit_with(world: LaunchWorld, run: Callable[[], RunResult | None]) -> int:
    """Run, and turn the outcome into an exit code; known errors become words without a traceback."""
    try:
        result = run()
    except FinetuneError as error:
        if world.local_rank == 0:
            print(f"[ERROR] {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(QUIET_RANK_SECONDS)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("[ERROR] interrupted before training began", file=sys.stderr)
        return 130
    if result is None:
        return int(ExitCode.DONE)
    if world.is_main and result.state == "done":
        success(f"done: {result.steps} steps, output in {result.output_dir}")
    return int(result.exit_code)
