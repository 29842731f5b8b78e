"""The kinds of runs: the one table that every command asks.

A kind is a subclass of `RunKind` in its entry module, the one that `python -m MODULE` runs. That
module's `KIND` is its one instance. Its methods import what needs torch when they are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from finetune.config.base_config import BaseConfig
from finetune.config.files import BLOCK, read_file
from finetune.config.options import Parsed, parse
from finetune.errors import ConfigError, FinetuneError

# name -> entry module; the first is the default, if neither flags nor files show the kind.
_MODULES = {
    "sft": "finetune.sft",
    "pretrain": "finetune.pretrain",
    "dpo": "finetune.dpo",
}


class RunKind:
    """A kind of run.

    Attributes:
        name: as in `launch NAME` and in a run folder's identity.
        module: its entry: `python -m MODULE`, with `main` and `KIND`.
        title: what it does, for people; English, translated where it is shown.
        config_class: its settings.
        telling_settings: names that only configuration files of this kind have.
        probed: names of the checks that `probe` yields, in order.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    title: ClassVar[str]
    config_class: ClassVar[type[BaseConfig]]
    telling_settings: ClassVar[frozenset[str]] = frozenset()
    probed: ClassVar[tuple[str, ...]] = ()

    def parse(self, arguments: Sequence[str]) -> Parsed:
        """Parse a command line of this kind; problems are in the result."""
        return parse(arguments, self.config_class)

    def start_processes(self, arguments: Sequence[str]) -> None:
        """Replace this process by a launcher, if the command line asks for one.

        Called before anything else in a process that no launcher started.
        """

    def check(self, config: Any) -> Sequence[FinetuneError]:
        """Return the problems of a configuration that can be seen without torch."""
        raise NotImplementedError

    def describe(self, settings: Mapping[str, Any]) -> str:
        """Describe in a few words what a run trains, e.g. the model.

        Args:
            settings: of the run, as JSON has them; some may be missing.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ training

    def prepare(self, config: Any, begun: Mapping[str, Any]) -> Any:
        """Read tokenizer and data, make the list of global batches, and check all but the weights.

        Args:
            config: the settings; some may be auto.
            begun: the identity of the resumed run; empty for a new run.

        Returns: a `PreparedRun` (training/prepare.py).
        """
        raise NotImplementedError

    def build(self, config: Any, data: Any, session: Any) -> Any:
        """Fill the parts that the trainer is made of; the process group exists.

        Args:
            config: the final settings.
            data: the result of `prepare`.

        Returns: `RunParts` (training/trainer.py).
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ plan and doctor

    def shape(self, config: Any) -> Any:
        """Return the `ModelShape` of the trained model, for the planner."""
        raise NotImplementedError

    def workload(self, config: Any, shape: Any, cluster: Any) -> Any:
        """Return the `Workload` of a process, for the planner."""
        raise NotImplementedError

    def planned_data(self, config: Any) -> Any:
        """Return what `plan` reports about the data; None if it reads none."""
        return None

    def probe(self, config: Any) -> Iterator[Any]:
        """Yield doctor's checks of model and data, read as the run would."""
        raise NotImplementedError

    def rehearsal(self, folder: Path, processes: int, config: Any) -> dict[str, Any] | None:
        """Return settings of a small run of this kind, for doctor's dry run, which has made model
        and data in the folder; None if there is nothing to rehearse.
        """
        return None


class _Kinds(Mapping[str, RunKind]):
    """The kinds by name; each is imported on first use."""

    def __getitem__(self, name: str) -> RunKind:
        kind: RunKind = import_module(_MODULES[name]).KIND
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)

    def __contains__(self, name: object) -> bool:
        return name in _MODULES  # without importing it


KINDS = _Kinds()


def register(name: str, module: str) -> None:
    """Add a kind, for this process; the module has `KIND`, and is run by `python -m`."""
    assert _MODULES.get(name, module) == module, f"there is a kind {name} in {_MODULES[name]}"
    _MODULES[name] = module


def run_kind(source: BaseConfig | Mapping[str, Any] | str | Path) -> RunKind:
    """Return the kind of a configuration object, a dict of settings or a configuration file;
    fine-tuning if nothing shows the kind.

    Raises:
        ConfigError: it names a kind that does not exist, or the file cannot be read.
    """
    if isinstance(source, BaseConfig):
        return next(kind for kind in KINDS.values() if type(source) is kind.config_class)
    content = source if isinstance(source, Mapping) else read_file(source)
    settings = content.get(BLOCK, content)
    default = next(iter(KINDS))
    if isinstance(settings, Mapping) and settings.get("kind", default) not in KINDS:
        where = "the dict" if isinstance(source, Mapping) else str(source)
        fix = f"give {' or '.join(KINDS)}, or leave it out"
        raise ConfigError(f"kind is {settings['kind']!r}", f"{where}: kind", fix)
    return _shown_kind(settings) or KINDS[default]


def kind_of_arguments(
    arguments: Sequence[str], config_class: type[BaseConfig] = BaseConfig
) -> RunKind:
    """Return the kind of a command line, by its flags and by the names in its configuration files.

    Args:
        config_class: only kinds whose settings are of this class are considered.
    """
    kinds = [kind for kind in KINDS.values() if issubclass(kind.config_class, config_class)]
    parsed = {kind.name: kind.parse(arguments) for kind in kinds}
    best = min(kinds, key=lambda kind: len(parsed[kind.name].problems))
    if best is not kinds[0]:
        return best
    for path in parsed[best.name].config_files:
        try:
            content = read_file(path)
        except FinetuneError:
            continue  # reported when it is resolved
        shown = _shown_kind(content.get(BLOCK, content))
        if shown in kinds:
            return shown
    return best


def _shown_kind(settings: Any) -> RunKind | None:
    """Return the kind that settings name, or whose names they have; None if nothing shows it."""
    if not isinstance(settings, Mapping):
        return None
    if settings.get("kind") in KINDS:
        return KINDS[settings["kind"]]
    return next((kind for kind in KINDS.values() if kind.telling_settings & set(settings)), None)
