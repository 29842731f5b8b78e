"""Which models are compared: a model or its adapters, and what they were before their training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import ConfigError
from finetune.inference.loading import Source, find_run, find_source
from finetune.modeling.hub import recorded_model


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
