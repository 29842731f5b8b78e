"""The result of a run, and the best of its evaluations."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.base_config import BaseConfig
from finetune.errors import ConfigError, ExitCode
from finetune.storage.checkpoint_files import verify
from finetune.storage.run_log import read_jsonl_tolerant
from finetune.training.resume import metadata_of

if TYPE_CHECKING:
    from transformers import TrainerControl

    from finetune.storage.run_log import RunLog
    from finetune.training.control import Control
    from finetune.training.prepare import PreparedRun
    from finetune.training.resume import Resume

logger = logging.getLogger("finetune")

EXIT_CODES = {
    "done": ExitCode.DONE,
    "stopped": ExitCode.STOPPED,
    "failed": ExitCode.FAILED,
}


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        output_dir: the run folder: the adapter or model, logs and checkpoints.
        state: "done", or "stopped" (by a signal, with a checkpoint saved).
        steps: optimizer steps done.
        metrics: metrics of the last evaluation and the last logged step.
        first_step: steps done before this start; None if this start did nothing because the run was
            finished.
        output_step: step of the weights in the output; None if there is no output, or it existed
            before.
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
        """The logged steps and evaluations of this start, in order.

        They are read from the run folder: a run of a week has many. Values that are not finite are
        None.
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
    """Best evaluation so far, as stored in a checkpoint. NaN and inf never count.

    Ties are broken by the lower loss; otherwise a metric over few answers would pick the least
    trained step. The evaluation before the first step is ignored: nothing is trained yet and no
    checkpoint of it exists.

    Attributes:
        metric: as the log names it.
        value: of the best one; None before the first.
        loss: validation loss of the best one; None if an older checkpoint has none: then nothing
            equal is better.
        step: of the best one.
        since: evaluations after it.
        evaluated: step of the last evaluation; None before the first.
        checkpoint: name of the best one's, if it is kept.
        data: fingerprint of the validation data; None if unknown.
    """

    metric: str
    value: float | None = None
    step: int = 0
    since: int = 0
    evaluated: int | None = None
    checkpoint: str | None = None
    data: str | None = None
    loss: float | None = None

    def after(
        self,
        step: int,
        value: float,
        loss: float,
        *,
        higher: bool,
        keep: bool,
    ) -> Best:
        """Return the best after the evaluation of a step, given its value and loss.

        Args:
            higher: whether a higher value is better.
            keep: whether the best one's checkpoint is kept.
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

    def outcome(self) -> dict[str, Any]:
        """Return it for events and the status; nothing before the first."""
        if self.value is None:
            return {}
        return {
            "metric": self.metric,
            "best": self.value,
            "best_step": self.step,
        }


class Evaluations:
    """Follows the evaluations of a run: saves what is the best, and ends the run when nothing
    better has come for long.

    It continues with the best one that the checkpoint to resume from knows; every rank must make
    it.

    Attributes:
        resumed_here: name of the checkpoint that the run resumes from, if it is of this run folder:
            its content was verified.
    """

    def __init__(
        self,
        config: BaseConfig,
        data: PreparedRun,
        start: Resume,
        *,
        output_dir: Path,
        control: Control,
        runlog: RunLog,
    ) -> None:
        self.control = control
        self.runlog = runlog
        self.total_steps: int = data.batches.total_steps
        self.has_data = data.valid is not None
        self.higher = config.metrics[config.followed_metric.removeprefix("eval_").partition("/")[0]]
        self.keep = config.keep_best
        self.patience = config.early_stopping
        self.every = config.eval_steps
        # In another folder's checkpoint neither the best one nor this one can be kept.
        folder = start.folder
        if folder is not None and folder.resolve().parent != output_dir.resolve():
            folder = None
        self.resumed_here = None if folder is None else folder.name
        evaluated = evaluated_data(config, data.valid)
        best = read_best(config.followed_metric, metadata_of(folder), evaluated)
        if not self.keep:
            best = replace(best, checkpoint=None)
        elif best.value is not None and (
            best.checkpoint is None or not verify(output_dir / best.checkpoint, hashes=False).valid
        ):
            logger.warning(
                "the best checkpoint, of step %d, is not here: the best is looked for anew",
                best.step,
            )
            best = Best(best.metric, data=evaluated)
        self.best = Best(**control.share(asdict(best)))

    @property
    def enough(self) -> bool:
        """Whether the run ends because of them."""
        return 0 < self.patience <= self.best.since

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due before training: the first, before any step, or that
        of the step (1-based) that the run resumes from, which a signal prevented.
        """
        if not step:
            return self.has_data
        if self.resumed_here is None or not (self.keep or self.patience):
            return False
        due = (self.every and step % self.every == 0) or step == self.total_steps
        return bool(due) and self.best.evaluated != step

    def facts(self) -> dict[str, Any] | None:
        """Return the best one for a checkpoint's manifest; None before the first evaluation."""
        return None if self.best.evaluated is None else asdict(self.best)

    def note(self, step: int, metrics: Mapping[str, float], flow: TrainerControl) -> None:
        """Record the evaluation of a step, and make Trainer save or stop if it should.

        Collective: every rank must call it.
        """
        now = self.best.after(
            step,
            metrics[self.best.metric],
            metrics["eval_loss"],
            higher=self.higher,
            keep=self.keep,
        )
        # one decision, however the ranks round
        self.best = Best(**self.control.share(asdict(now)))
        if self.keep and step and self.best.step == step:
            flow.should_save = True
        if self.enough and step < self.total_steps:
            logger.info(
                "step %d: the last %d evaluations were not better: the run ends",
                step,
                self.best.since,
            )
            self.runlog.event(
                "early_stop", step=step, evaluations=self.best.since, **self.best.outcome()
            )
            flow.should_save = flow.should_training_stop = True


def evaluated_data(config: BaseConfig, valid: Any) -> str | None:
    """Return what identifies the data of evaluations, and the answers that they ask for; None if
    unknown. Evaluations of other data are not compared.
    """
    fingerprint: str | None = getattr(valid, "fingerprint", None)
    if fingerprint is None or not config.followed_metric.startswith("eval_exact_match"):
        return fingerprint
    # Omit settings at their default, so that checkpoints from before the setting existed still
    # match.
    fields_of = type(config).model_fields
    others = {name: getattr(config, name) for name in ("answer_field", "max_new_tokens")}
    changed = [
        f":{name}={value}" for name, value in others.items() if value != fields_of[name].default
    ]
    return f"{fingerprint}:{getattr(config, 'eval_generate', None)}{''.join(changed)}"


def read_best(metric: str, metadata: Mapping[str, Any], data: str | None = None) -> Best:
    """Return a checkpoint's best evaluation; an empty one if it is of another metric or data."""
    found = metadata.get("best") or {}
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
    """Return whether a finished run ended with its newest checkpoint, of this step, because no
    evaluation was better for as long as the settings allow.

    Args:
        metadata: the checkpoint's facts.
    """
    best = read_best(config.followed_metric, metadata)
    # If a signal came before the step's evaluation, the evaluation followed the checkpoint and was
    # not better: the run ended.
    late = best.evaluated not in (None, step)
    return 0 < config.early_stopping <= best.since + late


def check_evaluated(config: BaseConfig, total_steps: int) -> None:
    """Raise ConfigError for a run that must follow its evaluations and ends with the first."""
    name = "keep_best" if config.keep_best else "early_stopping"
    if getattr(config, name) and config.eval_steps >= total_steps:
        raise ConfigError(
            f"{name} is set, and the only evaluation is after the last of {total_steps} steps",
            f"--eval-steps {config.eval_steps}",
            f"evaluate more often, e.g. --eval-steps {max(1, total_steps // 10)}",
        )
