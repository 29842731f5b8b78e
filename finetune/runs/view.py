"""A run as it is seen from outside, while it runs and afterwards: the one view that `monitor` and
`report` show.

`runs.reader` fills it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from finetune.batching.curriculum import Schedule, schedule_of
from finetune.config.fields import CurriculumConfig
from finetune.config.kinds import run_kind
from finetune.runs.step_table import Points, StepTable

State = Literal["waiting", "running", "done", "failed", "stopped", "vanished"]
ENDED: tuple[State, ...] = ("done", "failed", "stopped", "vanished")


class Message(NamedTuple):
    """Something that should be seen: an event, or a line of a rank's log."""

    time: float | None  # seconds since 1970, if known
    level: str  # WARNING or ERROR
    rank: int
    text: str
    event: dict[str, Any] | None = None


@dataclass(frozen=True)
class CurrentStage:
    """The stage of the curriculum that a run is in: its number from 1, how many there are, and its
    shares by difficulty.
    """

    number: int
    of: int
    shares: dict[str, float]


@dataclass
class RunView:
    """What is known about a run.

    Attributes:
        source: the run folder, or the console's copy.
        state: "waiting" before the first step; "vanished" if status.json has "running" but the
            process does not exist.
        steps: lines of trainer_log.jsonl, ascending.
        events: lines of events.jsonl, in order; for a console its evaluations and checkpoints.
        config, identity, status: the run's own files; empty if they are missing.
        messages: warnings and errors, in order of time as far as it is known.
        written_at: when the run last wrote a step or an event, in seconds since 1970.
        stage_text: the stage, as a console showed it.
    """

    source: Path
    state: State = "waiting"
    steps: StepTable = field(default_factory=StepTable)
    events: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    written_at: float | None = None
    stage_text: str = ""
    console_total_steps: int | None = None

    @property
    def kind(self) -> str:
        """The name of the kind of run; "" where it is not known."""
        if name := self.identity.get("kind") or self.config.get("kind"):
            return str(name)
        return run_kind(self.config).name if self.config else ""

    @property
    def step(self) -> int:
        """Steps done, as far as they are logged."""
        return int(self.steps.last["step"]) if self.steps else int(self.start.get("step") or 0)

    @property
    def total_steps(self) -> int | None:
        known = (self.start.get("total_steps"), self.identity.get("total_steps"))
        return next((int(total) for total in known if total), self.console_total_steps)

    @property
    def starts(self) -> list[dict[str, Any]]:
        return self.events_named("start")

    @property
    def start(self) -> dict[str, Any]:
        return self.last_event("start")

    @property
    def checkpoint(self) -> dict[str, Any]:
        return self.last_event("checkpoint")

    def last_event(self, name: str) -> dict[str, Any]:
        """Return the last event of this name; empty before it."""
        return next((event for event in reversed(self.events) if event["event"] == name), {})

    def events_named(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in names]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Evaluations by step; where a run went back, those of the training that was thrown away
        are left out.
        """
        kept = {event["step"]: event for event in self.standing("eval")}
        return [kept[step] for step in sorted(kept)]

    def standing(self, *names: str) -> list[dict[str, Any]]:
        """Events that have a step, without those of training that was thrown away: a later start
        was before it.
        """
        kept: list[dict[str, Any]] = []
        for event in self.events:
            if event["event"] in names and type(event.get("step")) is int:
                kept.append(event)
            elif event["event"] == "start" and kept:
                kept = [earlier for earlier in kept if earlier["step"] <= event.get("step", 0)]
        return kept

    @property
    def difficulties(self) -> list[str]:
        """Difficulties that were trained or evaluated, in the order of the configuration."""
        names = self._named_by("tokens", "eval_loss")
        curriculum = self.config.get("curriculum")
        known = curriculum.get("levels") if isinstance(curriculum, dict) else None
        known = [str(name) for name in known] if isinstance(known, list) else []
        return [name for name in known if name in names] + sorted(names - set(known))

    @property
    def sources(self) -> list[str]:
        """Sources that were mixed or evaluated, by name."""
        return sorted(self._named_by("source_tokens", "eval_source_loss"))

    def _named_by(self, of_step: str, of_evaluation: str) -> set[str]:
        """Return each NAME in the fields `of_step/NAME` of the last steps and `of_evaluation/NAME`
        of the last evaluation.
        """
        fields = {name for record in self.steps.recent for name in record}
        fields = {name for name in fields if name.startswith(f"{of_step}/")}
        evaluated = self.last_event("eval")
        fields |= {name for name in evaluated if name.startswith(f"{of_evaluation}/")}
        return {name.partition("/")[2] for name in fields}

    @property
    def schedule(self) -> Schedule | None:
        """The curriculum of a run that has one; None if the configuration is not as this package
        writes it.
        """
        if not (self.config.get("use_curriculum") and self.difficulties):
            return None
        try:
            return schedule_of(CurriculumConfig.model_validate(self.config["curriculum"]))
        except (LookupError, ValueError):
            return None

    @property
    def stage(self) -> CurrentStage | None:
        """The stage of the last step: the stage that holds the step's middle, as in the run."""
        schedule, total = self.schedule, self.total_steps
        if schedule is None or not total or not self.step:
            return None
        past = sum(stage.until * total <= self.step - 0.5 for stage in schedule.stages[:-1])
        shares = map(float, schedule.shares(past))
        by_difficulty = dict(zip(schedule.difficulties, shares, strict=True))
        return CurrentStage(past + 1, len(schedule.stages), by_difficulty)

    @property
    def stage_name(self) -> str:
        """`2/3`; "" without stages."""
        stage = self.stage
        return f"{stage.number}/{stage.of}" if stage else self.stage_text.removeprefix("stage ")

    @property
    def step_seconds(self) -> float | None:
        """Mean time of the last steps; evaluation and saving not counted."""
        recent = [record.get("step_seconds") for record in self.steps.recent]
        known = [seconds for seconds in recent if seconds]
        return sum(known) / len(known) if known else None

    @property
    def eta_seconds(self) -> float | None:
        """Time for the steps that are left; 0 if the run has ended."""
        if self.state in ENDED:
            return 0.0
        if not self.total_steps or not self.steps:
            return None
        if self.step_seconds is None:
            return self.steps.last.get("eta_seconds")
        return (self.total_steps - self.step) * self.step_seconds

    @property
    def elapsed_seconds(self) -> float | None:
        """Since the last start, until now or the end."""
        began = self.start.get("time")
        if began is None:
            return None
        last = self.events[-1]
        ended = last["time"] if last["event"] == "end" else self.written_at
        return max(0.0, (ended if self.state in ENDED and ended else time.time()) - began)

    @property
    def silent_seconds(self) -> float:
        """Seconds since an active run last wrote a step or an event."""
        if not self.written_at or self.state != "running":
            return 0.0
        return max(0.0, time.time() - self.written_at)

    def values(self, name: str) -> Points:
        """(step, value) of a field of the steps, where it has a finite value."""
        return self.steps.points(name)

    def evaluated(self, name: str = "eval_loss") -> list[tuple[int, float]]:
        """(step, value) of a field of the evaluations."""
        return [
            (event["step"], event[name])
            for event in self.evaluations
            if is_finite_number(event.get(name))
        ]


def is_finite_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < float("inf")
    )
