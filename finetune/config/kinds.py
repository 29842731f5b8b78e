"""The kinds of runs: the one table that every command asks.

A kind registers its name and its entry module, the one that `python -m MODULE` runs; that module's
`KIND` says everything else. What needs torch is named by a reference, `module:attribute`, and
loaded when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from finetune.config.base_config import BaseConfig
from finetune.config.config_files import read_file
from finetune.config.config_sources import BLOCK
from finetune.config.flags import Parsed, flags_of, parse
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError, FinetuneError
from finetune.runtime.language import _

# name -> entry module; the first is what a command line or a file is taken for when nothing tells.
_MODULES = {"sft": "finetune.sft", "pretrain": "finetune.pretrain", "dpo": "finetune.dpo"}


@dataclass(frozen=True)
class RunKind:
    """A kind of run.

    Attributes:
        name: as in `launch NAME` and in a run folder's identity.
        module: its entry: `python -m MODULE`, with `main` and `KIND`.
        title: what it does, for people; English, translated where it is shown.
        config_class: its settings.
        telling_settings: names that a configuration file of this kind has and one of another kind
            has not.
        check: problems of a configuration that can be seen without torch.
        describe: what a run's settings train, in a few words, e.g. the model; of plain values,
            maybe incomplete.
        prepare: reference to `prepare(config)`: tokenizer, samples and global batches, with the
            checks that need no weights; the result has `batches` and `identity`.
        build_trainer: reference to `build_trainer(config, world, data, start, session,
            device_type=, dtype=)`.
        shape: reference to `shape(config)`: the `ModelShape` that is trained, for the planner.
        workload: reference to `workload(config, shape, cluster)`: what a process has in memory, for
            the planner.
        probe: reference to `probe(config)`: doctor's checks of model and data, read as the run
            would.
        probed: names of those checks, in order.
        rehearsal: reference to `rehearsal(folder, processes, config)`: settings of a small run of
            this kind, for doctor's dry run, which has made model and data in the folder; None where
            there is nothing to rehearse.
        ask: reference to `ask(config, data)`, with what `prepare` returned: what answers validation
            prompts at each evaluation and measures the answers; None where evaluations generate
            nothing.
        planned_data: reference to `planned_data(config)`: what `plan` says of the data; None where
            it looks at none.
        start_processes: called before anything else in a process that no launcher started, with the
            command line; may replace the process by a launcher.
    """

    name: str
    module: str
    title: str
    config_class: type[BaseConfig]
    telling_settings: frozenset[str]
    check: Callable[[Any], list[FinetuneError]]
    describe: Callable[[Mapping[str, Any]], str]
    prepare: str
    build_trainer: str
    shape: str
    workload: str
    probe: str
    probed: tuple[str, ...]
    rehearsal: str | None = None
    ask: str | None = None
    planned_data: str | None = None
    start_processes: Callable[[Sequence[str]], None] | None = None

    def parse(self, arguments: Sequence[str]) -> Parsed:
        """A command line of this kind, taken apart; problems are in the result."""
        return parse(arguments, flags_of(self.config_class), self.config_class.aliases)

    def load(self, reference: str) -> Callable[..., Any]:
        """What one of the references names: `kind.load(kind.prepare)(config)`."""
        module, _, attribute = reference.partition(":")
        return getattr(import_module(module), attribute)


def register(name: str, module: str) -> None:
    """Add a kind, for this process; the module has `KIND`, and is run by `python -m`."""
    assert _MODULES.get(name, module) == module, f"there is a kind {name} in {_MODULES[name]}"
    _MODULES[name] = module


def kind_names() -> tuple[str, ...]:
    """Names of all kinds, the one that is taken when nothing tells first."""
    return tuple(_MODULES)


def run_kind(name: str) -> RunKind:
    """The kind of this name; KeyError where there is none."""
    kind: RunKind = import_module(_MODULES[name]).KIND
    return kind


def run_kinds() -> Iterator[RunKind]:
    return map(run_kind, kind_names())


def kind_title(name: str) -> str:
    """What a kind does, in the spoken language; the name itself where there is no such kind
    here.
    """
    return _(run_kind(name).title) if name in _MODULES else name


def kind_of_config(config: BaseConfig) -> RunKind:
    """The kind whose settings these are."""
    return next(kind for kind in run_kinds() if type(config) is kind.config_class)


def kind_of_settings(settings: Mapping[str, Any]) -> RunKind | None:
    """The kind that a file names, or whose names it has; None where nothing tells."""
    if settings.get("kind") in _MODULES:
        return run_kind(settings["kind"])
    return next((kind for kind in run_kinds() if kind.telling_settings & set(settings)), None)


def kind_of_source(source: BaseConfig | Mapping[str, Any] | str | Path) -> RunKind:
    """The kind of a configuration object, a dict of settings or a file; fine-tuning where nothing
    tells.

    Raises:
        ConfigError: it names a kind that there is none of, or the file cannot be read.
    """
    if isinstance(source, BaseConfig):
        return kind_of_config(source)
    content = source if isinstance(source, Mapping) else read_file(source)
    block = content.get(BLOCK, content)
    if not isinstance(block, Mapping):
        return run_kind(kind_names()[0])
    if block.get("kind", kind_names()[0]) not in kind_names():
        where = "the dict" if isinstance(source, Mapping) else str(source)
        fix = f"give {' or '.join(kind_names())}, or leave it out"
        raise ConfigError(f"kind is {block['kind']!r}", f"{where}: kind", fix)
    return kind_of_settings(block) or run_kind(kind_names()[0])


def conversation_config_class(arguments: Sequence[str]) -> type[RunConfig]:
    """The class of the settings of a command line for a run on conversations; fine-tuning's where
    nothing tells.
    """
    found = kind_of_arguments(arguments).config_class
    return found if issubclass(found, RunConfig) else RunConfig


def kind_of_arguments(arguments: Sequence[str]) -> RunKind:
    """The kind that a command line is for, by its flags and by the names in its configuration
    files.
    """
    kinds = list(run_kinds())
    parsed = {kind.name: kind.parse(arguments) for kind in kinds}
    best = min(kinds, key=lambda kind: len(parsed[kind.name].problems))
    if best is not kinds[0]:
        return best
    for path in parsed[best.name].config_files:
        try:
            content = read_file(path)
        except FinetuneError:
            continue  # reported when it is resolved
        block = content.get("finetune", content)
        if isinstance(block, dict) and (kind := kind_of_settings(block)) is not None:
            return kind
    return best
