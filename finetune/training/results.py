"""What a run came to, and which of its evaluations was the best."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.base_config import BaseConfig
from finetune.errors import ConfigError, ExitCode
from finetune.storage.run_log import read_jsonl_tolerant

if TYPE_CHECKING:
    from transformers import TrainerControl

    from finetune.training.control import RunContext

logger = logging.getLogger("finetune")

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
        output_step: step of the weights that the output is made of; None where there is none, or it
            was there before.
    """

    output_dir: Path
    state: str
    steps: int
    metrics: dict[str, Any] = field(default_factory=dict)
    first_step: int | None = None
    output_step: int | None = None

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.state]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The logged steps and evaluations of this start, in order, read from the run folder: a
        week's are many.

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
        # what is equal stays in order: an evaluation ends its step
        return sorted(own, key=lambda line: line["step"])


@dataclass(frozen=True)
class Best:
    """The best evaluation so far: what a checkpoint says of it. NaN or inf never is.

    Of equal values the one with the lower loss is better, so that few answers do not choose the
    least trained. The evaluation before the first step does not count: there is no checkpoint of
    it, and nothing trained in one.

    Attributes:
        metric: as the log names it.
        value: of the best one; None before the first.
        loss: validation loss of the best one; None where an older checkpoint does not say: nothing
            equal is better.
        step: of the best one.
        since: evaluations after it.
        evaluated: step of the last evaluation; None before the first.
        checkpoint: the best one's, where it is kept.
        data: fingerprint of the validation data; None where it is not known.
    """

    metric: str
    value: float | None = None
    step: int = 0
    since: int = 0
    evaluated: int | None = None
    checkpoint: str | None = None
    data: str | None = None
    loss: float | None = None

    def after(self, step: int, value: float, loss: float, *, higher: bool, keep: bool) -> Best:
        """With the evaluation of a step, its value and its loss; `higher`: whether a higher value
        is better.
        """
        if step == 0:
            return self
        if math.isfinite(value) and math.isfinite(loss) and self._is_worse(value, loss, higher):
            checkpoint = f"checkpoint-{step}" if keep else None
            return replace(
                self,
                value=value,
                loss=loss,
                step=step,
                since=0,
                evaluated=step,
                checkpoint=checkpoint,
            )
        return replace(self, since=self.since + 1, evaluated=step)

    def _is_worse(self, value: float, loss: float, higher: bool) -> bool:
        if self.value is None:
            return True
        if value == self.value:
            return self.loss is not None and loss < self.loss
        return (value > self.value) == higher

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    def told(self) -> dict[str, Any]:
        """What an event says of it; nothing before the first."""
        return (
            {}
            if self.value is None
            else {"metric": self.metric, "best": self.value, "best_step": self.step}
        )


class Evaluations:
    """Follows the evaluations of a run: saves what is the best, and ends the run when nothing
    better has come for long.

    Args:
        higher: whether a higher value of the metric is better.
        keep: the best one's checkpoint.
        patience: evaluations without a better one, after which the run ends; 0: any number.
    """

    def __init__(
        self, best: Best, context: RunContext, *, higher: bool, keep: bool, patience: int
    ) -> None:
        self.best = best
        self.context = context
        self.higher = higher
        self.keep = keep
        self.patience = patience

    @property
    def enough(self) -> bool:
        return 0 < self.patience <= self.best.since

    def note(self, step: int, metrics: Mapping[str, float], flow: TrainerControl) -> None:
        """Take in an evaluation after so many steps, and tell Trainer what follows of it. Every
        rank calls.
        """
        now = self.best.after(
            step,
            metrics[self.best.metric],
            metrics["eval_loss"],
            higher=self.higher,
            keep=self.keep,
        )
        # one decision, however the ranks round
        self.best = Best(**self.context.control.share(now.facts()))
        if self.keep and step and self.best.step == step:
            flow.should_save = True
        if self.enough and step < self.context.total_steps:
            logger.info(
                "step %d: the last %d evaluations were not better: the run ends",
                step,
                self.best.since,
            )
            self.context.runlog.event(
                "early_stop", step=step, evaluations=self.best.since, **self.best.told()
            )
            flow.should_save = flow.should_training_stop = True


def read_best(metric: str, metadata: Mapping[str, Any] | None, data: str | None = None) -> Best:
    """What a checkpoint's facts say of the best evaluation; the beginning where they are of another
    metric or data.
    """
    found = (metadata or {}).get("best") or {}
    names = {each.name for each in fields(Best)}
    if found.get("metric") != metric:
        return Best(metric, data=data)
    if data is not None and found.get("data") not in (None, data):
        logger.warning(
            "the validation data, or what is asked of it, is another than before: the best is"
            " looked for anew"
        )
        return Best(metric, data=data)
    return replace(Best(**{name: found[name] for name in names & found.keys()}), data=data)


def ended_early(config: BaseConfig, metadata: Mapping[str, Any], step: int) -> bool:
    """Whether a finished run ended with its newest checkpoint, of this step, because nothing better
    had come for long.

    Args:
        metadata: the checkpoint's facts.
    """
    best = read_best(config.followed_metric, metadata)
    # Where a signal came before the step's evaluation, that followed the checkpoint, and was not
    # better: the run ended.
    late = best.evaluated not in (None, step)
    return 0 < config.early_stopping <= best.since + late


def check_evaluated(config: BaseConfig, total_steps: int) -> None:
    """Raise ConfigError for a run that is to follow its evaluations and ends with the first."""
    name = "keep_best" if config.keep_best else "early_stopping"
    if getattr(config, name) and config.eval_steps >= total_steps:
        raise ConfigError(
            f"{name} is set, and the only evaluation is after the last of {total_steps} steps",
            f"--eval-steps {config.eval_steps}",
            f"evaluate more often, e.g. --eval-steps {max(1, total_steps // 10)}",
        )
