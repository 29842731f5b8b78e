"""Tasks of lm_eval, EleutherAI's evaluation harness, by its entry point
`lm_eval.simple_evaluate` with our loaded model.

It measures what `lm_eval run` measures, with its defaults: no chat template unless requested, and
its seeds. Its output is dropped, because it may quote prompts.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.commands.evaluate.options import EvalOptions
from finetune.commands.evaluate.scores import Measure, ModelScores
from finetune.config.fields import did_you_mean
from finetune.errors import ConfigError, FinetuneError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("finetune")


class Tasks:
    """The tasks of `--tasks`, found and with their data before any weights are read.

    Raises:
        ConfigError: no lm_eval, no such task, or its data is not available.
    """

    def __init__(self, options: EvalOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        self.options = options
        self.tokenizer = tokenizer
        names = [name.strip() for name in ",".join(options.tasks).split(",")]
        self.names = list(dict.fromkeys(filter(None, names)))
        folder = options.tasks_path
        if folder is not None and not folder.is_dir():
            raise ConfigError(
                "there is no such folder",
                f"--tasks-path {folder}",
                "name a folder of lm_eval's YAML",
            )
        with _quiet():
            try:
                import lm_eval
                from lm_eval.tasks import TaskManager
            except ImportError as error:
                raise ConfigError(
                    f"lm_eval cannot be imported: {error}",
                    "--tasks",
                    "pip install lm_eval, or leave --tasks out",
                ) from error
            self.version = lm_eval.__version__
            # lm_eval's own tasks are thousands of files, which take seconds to read.
            self.manager = TaskManager(include_path=folder, include_defaults=False)
            if not set(self.names) <= set(self.manager.all_tasks):
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
        """Load the tasks and their documents.

        Raises:
            ConfigError: a task that cannot be loaded, or whose data is not available.
        """
        refused: list[str] = []
        where = f"--tasks {','.join(self.names)}"
        try:
            with _quiet(), _metrics_of_the_hub(refused, allowed=self.options.trust_remote_code):
                tasks = self.manager.load(self.names)["tasks"]
                # `eval_docs` loads the data
                empty = [name for name, task in tasks.items() if not task.eval_docs]
        # of datasets, the hub's client, Jinja, the tasks' own Python, ...
        except Exception as error:
            if not refused:
                raise ConfigError(
                    f"lm_eval cannot make the task: {_describe(error)}",
                    where,
                    "its data must be on this machine, or the hub in reach and HF_HUB_OFFLINE"
                    " not set",
                ) from error
        if refused:
            raise ConfigError(
                f"the metric {refused[0]} is a program on the hub, which would be run here",
                where,
                "use a metric of lm_eval's own, or --trust-remote-code",
            )
        if empty:
            raise ConfigError(f"the task {empty[0]} has no documents", "--tasks", "give it data")

    def facts(self) -> dict[str, Any]:
        """Return what is evaluated, as JSON."""
        return {
            "lm_eval": self.version,
            "names": self.names,
            "num_fewshot": self.options.num_fewshot,
            "limit": self.options.limit,
            "chat_template": self.options.apply_chat_template,
        }

    def measure(self, scores: ModelScores, model: PreTrainedModel) -> None:
        """Add each metric of each task and group, and the centered accuracy of multiple choices.

        Raises:
            FinetuneError: lm_eval fails.
        """
        options = self.options
        with _quiet() as cuts, _weights_left_alone(model):
            import lm_eval
            from lm_eval.models.huggingface import HFLM

            try:
                found = lm_eval.simple_evaluate(
                    HFLM(
                        pretrained=model,
                        tokenizer=copy.deepcopy(self.tokenizer),  # it may get a padding token
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
                    f"lm_eval failed: {_describe(error)}",
                    f"--tasks {','.join(self.names)}",
                    "see lm_eval's documentation of the task; a smaller --batch-size takes less"
                    " memory",
                ) from error
        if cuts.count:
            logger.warning(
                "%s: lm_eval cut the beginning of %d or more prompts, which were longer than the"
                " model's context",
                scores.name,
                cuts.count,
            )
        _add_results(scores, found)


def _add_results(scores: ModelScores, found: Mapping[str, Any]) -> None:
    centered: list[Measure] = []
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            # Each document appears once for each filter; a group has none.
            documents = [one for one in found["samples"].get(task, []) if one["filter"] == name]
            stderr = metrics.get(f"{metric}_stderr,{name}")
            line = {
                "task": task,
                "metric": metric,
                "filter": name,
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, (int, float)) else None,
                "documents": len(documents) or None,
            }
            scores.tasks.append(line)
            of = task if name == "none" else f"{task} ({name})"
            values = _values(documents, metric, line["value"])
            if values is None:
                scores.measures.append(Measure(metric, of, line["value"], line["stderr"]))
                continue
            ones = np.ones(len(values))
            scores.measures.append(Measure.ratio(metric, of, values, ones, line["stderr"]))
            output_type = found["configs"].get(task, {}).get("output_type")
            if output_type == "multiple_choice" and metric in ("acc", "acc_norm"):
                chance = _chance(documents)
                above = Measure.ratio(f"centered {metric}", of, values - chance, 1 - chance)
                line["centered"] = above.value
                if metric == "acc":
                    centered.append(above)
    scores.measures += centered
    if len(centered) > 1:
        mean = sum(measure.value for measure in centered) / len(centered)
        scores.measures.append(Measure("centered acc", f"mean of {len(centered)} tasks", mean))


def _chance(documents: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return the accuracy of guessing on each multiple choice, `(n,)`."""
    # Mutual information scores each choice a second time, without the question.
    times = 2 if "acc_mutual_info" in documents[0]["metrics"] else 1
    return np.array([times / len(document["resps"]) for document in documents])


def _values(documents: Sequence[Mapping[str, Any]], metric: str, mean: float) -> np.ndarray | None:
    """Return the metric of each document, `(n,)`, or None if the task's value is not their mean."""
    found = [document.get(metric) for document in documents]
    if not found or not all(isinstance(one, (bool, int, float, np.number)) for one in found):
        return None
    values = np.array(found, dtype=np.float64)
    return values if np.isclose(values.mean(), mean, rtol=1e-9, atol=1e-12) else None


class _CutPrompts(logging.Handler):
    """Counts lm_eval's warnings that it cut a prompt. All its records may quote prompts."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "runcat" in str(record.msg)


@contextlib.contextmanager
def _quiet() -> Iterator[_CutPrompts]:
    """Drop what lm_eval prints and logs. A terminal keeps its progress bars."""
    import datasets

    datasets.disable_progress_bars()
    harness_logger = logging.getLogger("lm_eval")
    harness_logger.setLevel(logging.WARNING)
    harness_logger.propagate = False
    cuts = _CutPrompts()
    harness_logger.addHandler(cuts)
    sink = io.StringIO()
    errors = sys.stderr if sys.stderr.isatty() else sink
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(errors):
            yield cuts
    finally:
        harness_logger.removeHandler(cuts)


@contextlib.contextmanager
def _weights_left_alone(model: PreTrainedModel) -> Iterator[None]:
    """Keep lm_eval from tying weights, which is wrong for an adapter's layers."""
    model.tie_weights = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.tie_weights


@contextlib.contextmanager
def _metrics_of_the_hub(refused: list[str], *, allowed: bool) -> Iterator[None]:
    """Refuse metrics from the hub, where lm_eval loads those that it does not know as a program."""
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


def _describe(error: BaseException) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line[:300]}"
