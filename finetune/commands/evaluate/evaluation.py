"""An evaluation: records, texts and tasks once, then each candidate in turn, one in memory at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.commands.evaluate.options import GENERATIONS_NAME, EvalOptions
from finetune.commands.evaluate.records import HeldOutRecords
from finetune.commands.evaluate.scores import ModelScores
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
from finetune.storage.run_log import JsonLines


@dataclass(frozen=True)
class Candidate:
    """One model of the comparison; `role` is base, adapter or model, `name` one that no other
    has.
    """

    name: str
    role: str
    source: Source


def find_candidates(model: str | None, adapters: Sequence[str], *, base: bool) -> list[Candidate]:
    """The models asked for, after the base where it is wanted.

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
    found = [("model" if source.adapter is None else "adapter", source) for source in sources]
    if base:
        found.insert(0, ("base", _base_of(sources[0])))
    names = [("base " if role == "base" else "") + source.name for role, source in found]
    return [
        Candidate(
            name if names.count(name) == 1 else f"{name} ({names[: number + 1].count(name)})",
            role,
            source,
        )
        for number, (name, (role, source)) in enumerate(zip(names, found, strict=True))
    ]


def _base_of(source: Source) -> Source:
    """What a model was before its training.

    Raises:
        ConfigError: it is neither an adapter nor the output of a run whose base is here.
    """
    if source.adapter is not None:
        return Source(source.base, None)
    base = run_settings(source).get("model")
    run = find_run(Path(source.base))
    if run is not None and isinstance(base, str):
        # the commit that was trained, wherever the branch is now
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
    """The settings of the run that made a model or one of its checkpoints; empty where there is
    none.
    """
    run = find_run(Path(source.base if source.adapter is None else source.adapter))
    return {} if run is None else run.settings


class Evaluation:
    """What candidates are measured on.

    The tokenizer and chat template of the first one that is not the base write the samples, for all
    candidates: only so do their losses compare. What the options leave open is as in the run that
    made it.

    Raises:
        FinetuneError: data, tasks, template or tokenizer are wrong; before any weights are read.
    """

    def __init__(self, options: EvalOptions, candidates: Sequence[Candidate]) -> None:
        self.options = options
        self.candidates = candidates
        reference = next(candidate.source for candidate in candidates if candidate.role != "base")
        self.device = torch.device(devices.choose_device_type(options.device_type))
        self.dtype = devices.choose_dtype(options.dtype, self.device.type)
        trust, chats = options.trust_remote_code, bool(options.data or options.apply_chat_template)
        self.tokenizer = load_tokenizer_of(
            reference, options.template, trust_remote_code=trust, chats=chats
        )
        run = run_settings(reference)
        self.records = HeldOutRecords(options, self.tokenizer, run) if options.data else None
        self.texts = Texts(options, self.tokenizer, reference.base, run) if options.text else None
        self.tasks = Tasks(options, self.tokenizer) if options.tasks else None

    def facts(self) -> dict[str, Any]:
        """What was evaluated, as plain JSON without a path of this machine; null for what was not
        asked for.
        """
        cutoff = None if self.records is None else self.records.cutoff_len
        settings = {"cutoff_len": cutoff, "max_new_tokens": self.options.max_new_tokens}
        parts = {"data": self.records, "text": self.texts, "tasks": self.tasks}
        return {
            **{name: None if part is None else part.facts() for name, part in parts.items()},
            "settings": {**settings, "dtype": self.dtype, "device_type": self.device.type},
        }

    def run(self, output: Path | None) -> list[ModelScores]:
        """Measure each candidate; the generations go to the new folder `output`.

        Raises:
            FinetuneError: a model cannot be loaded, or fails.
        """
        writer = None
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            writer = JsonLines(output / GENERATIONS_NAME) if self.records is not None else None
        try:
            return [self._measure(candidate, writer) for candidate in self.candidates]
        finally:
            if writer is not None:
                writer.close()

    def _measure(self, candidate: Candidate, writer: JsonLines | None) -> ModelScores:
        scores, source = ModelScores(candidate.name, candidate.role), candidate.source
        model = load_weights(
            source, self.device, self.dtype, trust_remote_code=self.options.trust_remote_code
        )
        check_fit(model, self.tokenizer, source)
        if self.records is not None:
            self.records.add_losses(scores, model)
            self.records.ask(scores, model, writer)
        if self.texts is not None:
            self.texts.measure(scores, model)
        if self.tasks is not None:
            self.tasks.measure(scores, model)
        del model
        devices.empty_cache(self.device)
        return scores
