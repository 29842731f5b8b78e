"""Tasks of lm_eval, EleutherAI's evaluation harness, by its entry point
`lm_eval.simple_evaluate` with our loaded model.

What `lm_eval run` measures, with its defaults: no chat template unless asked for, and its seeds.
Nothing of it reaches this process: what it prints is dropped, and random states, environment and
the level of its logger are restored.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune.commands.evaluate.options import EvalOptions
from finetune.commands.evaluate.scores import Measure, ModelScores
from finetune.config.names import did_you_mean
from finetune.errors import ConfigError, FinetuneError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("finetune")

ACCURACIES = ("acc", "acc_norm")  # of a multiple choice
INSTALL = "pip install lm_eval, or leave --tasks out"


class Tasks:
    """The tasks that are asked for, found and with their data before any weights are read.

    Raises:
        ConfigError: no lm_eval, no such task, or its data cannot be had.
    """

    def __init__(self, options: EvalOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        self.options = options
        self.tokenizer = tokenizer
        names = [name.strip() for entry in options.tasks for name in entry.split(",")]
        self.names = list(dict.fromkeys(filter(None, names)))
        folder = options.tasks_path
        if folder is not None and not folder.is_dir():
            raise ConfigError(
                "there is no such folder",
                f"--tasks-path {folder}",
                "name a folder of lm_eval's YAML",
            )
        with _contained():
            try:
                import lm_eval
                from lm_eval.tasks import TaskManager
            except ImportError as error:
                raise ConfigError(
                    f"lm_eval cannot be imported: {error}", "--tasks", INSTALL
                ) from error
            self.version = lm_eval.__version__
            # lm_eval's own are thousands of files, which take seconds to look through.
            self.manager = TaskManager(include_path=folder, include_defaults=False)
            if set(self.names) - set(self.manager.all_tasks):
                self.manager = TaskManager(include_path=folder)
        for name in self.names:
            if name not in self.manager.all_tasks:
                raise ConfigError(
                    f"lm_eval has no task {name}{did_you_mean(name, self.manager.all_tasks)}",
                    "--tasks",
                    "`lm_eval ls tasks` lists its own; --tasks-path names a folder with others",
                )
        self._check()

    def _check(self) -> None:
        """Make the tasks and their documents.

        Raises:
            ConfigError: a task that cannot be made, or whose data cannot be had.
        """
        refused: list[str] = []
        try:
            with _contained(), _metrics_of_the_hub(refused, allowed=self.options.trust_remote_code):
                loaded = self.manager.load(self.names)
                # Made when they are first asked for, from the data.
                documents = {name: len(task.eval_docs) for name, task in loaded["tasks"].items()}
        # of datasets, the hub's client, Jinja, the tasks' own Python, ...
        except Exception as error:
            if not refused:
                raise ConfigError(
                    f"lm_eval cannot make the task: {type(error).__name__}: {_first_line(error)}",
                    f"--tasks {','.join(self.names)}",
                    "its data must be on this machine, or the hub in reach and HF_HUB_OFFLINE"
                    " not set",
                ) from error
        if refused:
            raise ConfigError(
                f"the metric {refused[0]} is a program on the hub, which would be run here",
                f"--tasks {','.join(self.names)}",
                "use a metric of lm_eval's own, or --trust-remote-code",
            )
        if empty := [name for name, count in documents.items() if not count]:
            raise ConfigError(f"the task {empty[0]} has no documents", "--tasks", "give it data")

    def facts(self) -> dict[str, Any]:
        asked = {
            "names": self.names,
            "num_fewshot": self.options.num_fewshot,
            "limit": self.options.limit,
        }
        return {"lm_eval": self.version, **asked, "chat_template": self.options.apply_chat_template}

    def measure(self, scores: ModelScores, model: PreTrainedModel) -> None:
        """Each metric of each task and group; of a multiple choice also its centered accuracy.

        Raises:
            FinetuneError: lm_eval fails.
        """
        options = self.options
        with _contained() as cut, _weights_left_alone(model):
            import lm_eval
            from lm_eval.models.huggingface import HFLM

            try:
                found = lm_eval.simple_evaluate(
                    HFLM(
                        pretrained=model,
                        tokenizer=copy.deepcopy(self.tokenizer),  # it may be given a padding token
                        backend="causal",
                        batch_size=options.batch_size,
                        max_length=options.context_tokens,
                        softmax_dtype="float32",
                    ),
                    tasks=self.names,
                    task_manager=self.manager,
                    num_fewshot=options.num_fewshot,
                    limit=options.limit,
                    apply_chat_template=options.apply_chat_template,
                    fewshot_as_multiturn=options.apply_chat_template,
                    bootstrap_iters=1000,  # for standard errors that have no formula
                )
            except Exception as error:
                raise FinetuneError(
                    f"lm_eval failed: {type(error).__name__}: {_first_line(error)}",
                    f"--tasks {','.join(self.names)}",
                    "see lm_eval's documentation of the task; a smaller --batch-size takes less"
                    " memory",
                ) from error
        if cut:
            logger.warning(
                "%s: lm_eval cut the beginning of %d or more prompts, which were longer than the"
                " model's context",
                scores.name,
                len(cut),
            )
        _add_results(scores, found)


def _add_results(scores: ModelScores, found: Mapping[str, Any]) -> None:
    centered = []
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            # Each document is there once for each filter; a group has none.
            documents = [one for one in found["samples"].get(task, []) if one["filter"] == kept]
            chance = _chance(found["configs"].get(task, {}), documents)
            stderr = metrics.get(f"{metric}_stderr,{kept}")
            line = {"task": task, "metric": metric, "filter": kept, "value": float(value)}
            line["stderr"] = float(stderr) if isinstance(stderr, (int, float)) else None
            line["documents"] = len(documents) or None
            values = _values(documents, metric, float(value))
            of = task if kept == "none" else f"{task} ({kept})"
            if values is None:
                scores.measures.append(Measure(metric, of, line["value"], line["stderr"]))
            else:
                ones = np.ones(len(values))
                scores.measures.append(Measure.ratio(metric, of, values, ones, line["stderr"]))
            if values is not None and chance is not None and metric in ACCURACIES:
                above = Measure.ratio(f"centered {metric}", of, values - chance, 1 - chance)
                line |= {"centered": above.value}
                if metric == ACCURACIES[0]:
                    centered.append(above)
            scores.tasks.append(line)
    scores.measures += centered
    if len(centered) > 1:
        mean = sum(measure.value for measure in centered) / len(centered)
        scores.measures.append(Measure(centered[0].name, f"mean of {len(centered)} tasks", mean))


def _chance(config: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    """The accuracy of guessing on each document, `(n,)`; None of what is no multiple choice."""
    if config.get("output_type") != "multiple_choice" or not documents:
        return None
    # Mutual information asks for each choice a second time, without the question.
    times = 2 if "acc_mutual_info" in documents[0]["metrics"] else 1
    return np.array([times / len(document["resps"]) for document in documents])


def _values(documents: Sequence[Mapping[str, Any]], metric: str, value: float) -> np.ndarray | None:
    """The metric of each document, `(n,)`, where the task's is their mean; else None."""
    found = [document.get(metric) for document in documents]
    if not found or not all(isinstance(one, (bool, int, float, np.number)) for one in found):
        return None
    values = np.array(found, dtype=np.float64)
    return values if np.isclose(values.mean(), value, rtol=1e-9, atol=1e-12) else None


class _Cuts(logging.Handler):
    """Keeps lm_eval's warnings that a prompt was cut, and nothing of what else it says, which may
    be from prompts.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "runcat" in str(record.msg):
            self.found.append("cut")


@contextlib.contextmanager
def _contained() -> Iterator[list[str]]:
    """lm_eval's noise kept from our output, and its settings from the process; what it said of cut
    prompts.
    """
    import datasets

    harness_logger, cuts = logging.getLogger("lm_eval"), _Cuts()
    level, propagate = harness_logger.level, harness_logger.propagate
    environment = dict(os.environ)
    python, numpy = random.getstate(), np.random.get_state()
    bars = datasets.is_progress_bar_enabled()
    sink = io.StringIO()
    harness_logger.addHandler(cuts)
    harness_logger.setLevel(logging.WARNING)
    harness_logger.propagate = False
    datasets.disable_progress_bars()
    try:
        with (
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sys.stderr if sys.stderr.isatty() else sink),
            torch.random.fork_rng(),
        ):
            yield cuts.found
    finally:
        harness_logger.removeHandler(cuts)
        harness_logger.setLevel(level)
        harness_logger.propagate = propagate
        if bars:
            datasets.enable_progress_bars()
        random.setstate(python)
        np.random.set_state(numpy)
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _weights_left_alone(model: PreTrainedModel) -> Iterator[None]:
    """lm_eval ties weights anew, which it cannot know to be right of an adapter's layers."""
    model.tie_weights = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.tie_weights


@contextlib.contextmanager
def _metrics_of_the_hub(refused: list[str], *, allowed: bool) -> Iterator[None]:
    """lm_eval takes a metric that it does not know from the hub, as a program: refused unless
    allowed.
    """
    import evaluate

    def refuse(name: str, *_: Any, **__: Any) -> None:
        refused.append(name)
        raise RuntimeError("not trusted")

    before = evaluate.load
    if not allowed:
        evaluate.load = refuse
    try:
        yield
    finally:
        evaluate.load = before


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]
