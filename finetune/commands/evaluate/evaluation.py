"""An evaluation: prepare records, texts and tasks once, then measure each candidate in turn, with
one model in memory at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.commands.evaluate.options import EvalOptions
from finetune.commands.evaluate.records import HeldOutRecords
from finetune.commands.evaluate.scores import ModelScores, distinct_names
from finetune.commands.evaluate.tasks import Tasks
from finetune.commands.evaluate.text_bits import Texts
from finetune.errors import ConfigError
from finetune.inference.loading import (
    Source,
    check_fit,
    find_run,
    find_source,
    load_tokenizer_of,
    load_weights,
)
from finetune.modeling.hub import recorded_model
from finetune.runtime import device as devices

logger = logging.getLogger("finetune")


@dataclass(frozen=True)
class Candidate:
    """One model of the comparison."""

    name: str  # unique
    role: str  # base, adapter or model
    source: Source


def find_candidates(model: str | None, adapters: Sequence[str], *, base: bool) -> list[Candidate]:
    """Find the requested models, after the base if it is requested.

    Raises:
        ConfigError: as `find_source`; adapters on different bases; no base to compare with.
    """
    sources = [find_source(model, adapter) for adapter in adapters or [None]]
    bases = sorted({source.base for source in sources})
    if len(bases) > 1:
        raise ConfigError(
            f"the adapters stand on different bases: {', '.join(bases)}",
            "--adapter",
            "evaluate them apart, or name one base for all with --model",
        )
    roles = ["model" if source.adapter is None else "adapter" for source in sources]
    names = [source.name for source in sources]
    if base:
        sources.insert(0, _base_of(sources[0]))
        roles.insert(0, "base")
        names.insert(0, f"base {sources[0].name}")
    return list(map(Candidate, distinct_names(names), roles, sources))


def _base_of(source: Source) -> Source:
    """Return what a model was before its training.

    Raises:
        ConfigError: it is neither an adapter nor the output of a run whose base is here.
    """
    if source.adapter is not None:
        return Source(source.base, None)
    base = run_settings(source).get("model")
    run = find_run(Path(source.base))
    if run is not None and isinstance(base, str):
        # the commit that was trained, even if the branch has moved
        base = recorded_model(run.folder, base) or base
    if not isinstance(base, str) or Path(base).resolve() == Path(source.base).resolve():
        raise ConfigError(
            "there is no base to compare with: this is no adapter, and no run says what it was made"
            " from",
            f"--base, {source.base}",
            "leave --base out, or name an adapter with --adapter",
        )
    if not Path(base).exists() and base.count("/") != 1:
        raise ConfigError(
            f"the run's base model {base} is not here",
            "--base",
            "run from the folder that it was run in",
        )
    return find_source(base)


def run_settings(source: Source) -> dict[str, Any]:
    """Return the settings of the run that made a model or checkpoint, or an empty dict."""
    run = find_run(Path(source.base if source.adapter is None else source.adapter))
    return {} if run is None else run.settings


class Evaluation:
    """The data and settings that candidates are measured with.

    The tokenizer and chat template of the first candidate that is not the base render the samples
    for all candidates, so that their losses are comparable. Settings that the options leave open
    are those of the run that made it.

    Raises:
        FinetuneError: data, tasks, template or tokenizer are wrong; before any weights are read.
    """

    def __init__(self, options: EvalOptions, candidates: Sequence[Candidate]) -> None:
        self.options = options
        self.candidates = candidates
        reference = next(candidate.source for candidate in candidates if candidate.role != "base")
        self.device = torch.device(devices.choose_device_type(options.device_type))
        self.dtype = devices.choose_dtype(options.dtype, self.device.type)
        self.tokenizer = load_tokenizer_of(
            reference,
            options.template,
            trust_remote_code=options.trust_remote_code,
            chats=bool(options.data or options.apply_chat_template),
        )
        run = run_settings(reference)
        self.records = HeldOutRecords(options, self.tokenizer, run) if options.data else None
        self.texts = Texts(options, self.tokenizer, reference.base, run) if options.text else None
        self.tasks = Tasks(options, self.tokenizer) if options.tasks else None

    def facts(self) -> dict[str, Any]:
        """Return what was evaluated, as JSON without a path of this machine."""
        return {
            "data": self.records and self.records.facts(),
            "text": self.texts and self.texts.facts(),
            "tasks": self.tasks and self.tasks.facts(),
            "settings": {
                "cutoff_len": self.records and self.records.cutoff_len,
                "max_new_tokens": self.options.max_new_tokens,
                "dtype": self.dtype,
                "device_type": self.device.type,
            },
        }

    def run(self) -> list[ModelScores]:
        """Measure each candidate.

        Raises:
            FinetuneError: a model cannot be loaded, or fails.
        """
        if self.options.output is not None:
            self.options.output.mkdir(parents=True, exist_ok=True)
        return [self._measure(candidate) for candidate in self.candidates]

    def _measure(self, candidate: Candidate) -> ModelScores:
        scores = ModelScores(candidate.name, candidate.role)
        source = candidate.source
        logger.info("evaluating %s on %s, %s", candidate.name, self.device.type, self.dtype)
        model = load_weights(
            source, self.device, self.dtype, trust_remote_code=self.options.trust_remote_code
        )
        check_fit(model, self.tokenizer, source)
        for part in (self.records, self.texts, self.tasks):
            if part is not None:
                part.measure(scores, model)
        del model
        devices.empty_cache(self.device)
        return scores
