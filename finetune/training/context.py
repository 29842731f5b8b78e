"""What a trainer is told of its run beside model and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from finetune.storage.run_folder import SampleLog
from finetune.storage.run_log import RunLog
from finetune.training.control import Control, StopSignals


@dataclass(frozen=True)
class RunContext:
    """The same on every rank, with rank 0's files on rank 0 only.

    Attributes:
        total_steps: optimizer steps of the whole run.
        resume_from: checkpoint folder that the run resumes from; None at its start.
        start_step: steps done there.
        difficulty_names: of the schedule; empty where samples have no difficulties.
        stage_name: step (0-based) -> name of the curriculum stage, for people; "" for none.
        learning_rate_factor: step (0-based) -> factor on the learning rate.
        epochs_per_step: passes over the data in one step.
    """

    total_steps: int
    resume_from: Path | None
    start_step: int
    difficulty_names: tuple[str, ...]
    stage_name: Callable[[int], str]
    learning_rate_factor: Callable[[int], float]
    epochs_per_step: float
    control: Control
    signals: StopSignals
    runlog: RunLog
    sample_log: SampleLog | None
