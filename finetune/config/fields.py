"""Building blocks of settings: names as people type them, typed fields with group and unit, strict
models, the sources of `data`, and the curriculum's stages.

Also how the values of several sources become one configuration: which source wins, and rules that
more than one kind of run has.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from finetune.errors import ConfigError


def normal(name: str) -> str:
    """`--Learning-Rate`, `learning-rate` and `learning_rate` are one name."""
    return name.lstrip("-").replace("-", "_").lower()


def flag(name: str) -> str:
    """Return the flag of a field: `--learning-rate`."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name of which `name` is most probably a typo; None if none is near.

    A name that begins or ends with what was typed (`zero` for `zero_optimization`) counts as near.
    """
    by_normal = {normal(candidate): candidate for candidate in known}
    typed = normal(name)
    close = get_close_matches(typed, by_normal, n=1, cutoff=0.6)
    if not close and len(typed) >= 3:
        close = [
            candidate
            for candidate in by_normal
            if candidate.startswith(typed) or candidate.endswith(typed)
        ][:1]
    return by_normal[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` to end a message with, or nothing where no known name is near."""
    guess = nearest(name, known)
    return f"; did you mean {guess!r}?" if guess else ""


_ELSEWHERE = json.loads(Path(__file__).with_name("names_elsewhere.json").read_text("utf-8"))
# Name in transformers, LLaMA-Factory, nanochat and training scripts in use -> our name for it.
FOREIGN: dict[str, str] = {
    name: ours for ours, names in _ELSEWHERE["same"].items() for name in names.split()
}
# Name -> (why it is not a setting here, what to do instead).
OTHERWISE: dict[str, tuple[str, str]] = {
    name: (entry["why"], entry["fix"])
    for entry in _ELSEWHERE["otherwise"]
    for name in entry["names"].split()
}


class UnknownName(ConfigError):
    """A name that is not a setting.

    Attributes:
        guess: the setting that was probably meant; None if there is no likely one.
    """

    def __init__(self, what: str, where: str, fix: str, guess: str | None = None) -> None:
        super().__init__(what, where, fix)
        self.guess = guess


def unknown_name(name: str, where: str, known: Iterable[str], *, flags: bool) -> UnknownName:
    """Return the error for a name that is not a setting, with its replacement or the nearest
    setting.

    Args:
        known: names of the settings that exist there.
        flags: whether to write names as flags in the fix.
    """
    known, typed = list(known), normal(name)
    kind, shown = ("flag", flag) if flags else ("setting", str)
    if FOREIGN.get(typed) in known:
        ours = FOREIGN[typed]
        return UnknownName(
            f"{name} is called {shown(ours)} here", where, f"write {shown(ours)}", ours
        )
    why, fix = OTHERWISE.get(typed, ("", ""))
    if (typed == "quantization" or "--quantization" in fix) and "quantization" not in known:
        what = (
            f"{name} is not a {kind} here: only fine-tuning trains an adapter on a base in few bits"
        )
        return UnknownName(what, where, "remove it; finetune.sft has --quantization nf4 and int8")
    if typed in OTHERWISE:
        return UnknownName(f"{name} is not a {kind} here: {why}", where, fix)
    if typed.startswith("no_") and typed[3:] in known:
        return UnknownName(
            f"unknown {kind} {name}", where, f"write {shown(typed[3:])} false", typed[3:]
        )
    guess = nearest(name, known)
    fix = f"did you mean {shown(guess)}?" if guess else "see --help for the names"
    return UnknownName(f"unknown {kind} {name}", where, fix, guess)


# The order of `--help`, `--print-config` and run.yaml.
GROUPS = (
    "model and data",
    "batch and length",
    "optimizer",
    "adapter",
    "preferences",
    "curriculum",
    "device",
    "saving and resuming",
    "evaluation and logging",
    "data preparation",
)

# Keys of a record that formats know and that data may have under other names (data/formats.py).
COLUMNS = (
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "history",
    "prompt",
    "completion",
    "response",
    "text",
    "system",
    "tools",
    "chosen",
    "rejected",
    "rejected_response",
    "rejected_messages",
    "label",
)
Reporter = Literal["none", "tensorboard", "wandb", "swanlab", "trackio"]


def setting(
    default: Any = ...,
    description: str = "",
    *,
    group: str,
    unit: str = "",
    shown_default: str = "",
    depends_on: str = "",
    **rules: Any,
) -> Any:
    """Make a pydantic field with what the help shows of it.

    Args:
        default: the default, or `...` if the setting is required. Leave it out and pass
            `default_factory` in `rules` if it follows from settings that are declared earlier.
        description: one sentence for `--help` and the JSON Schema.
        group: its heading in the help, one of the class's `groups`.
        unit: unit of the number, e.g. `samples`, `tokens`, `seconds`.
        shown_default: how the help writes a computed default, e.g. `2 x lora_r`.
        depends_on: the setting that a computed default follows from.
        rules: bounds and anything else `pydantic.Field` takes.
    """
    given = {
        "group": group,
        "unit": unit,
        "shown_default": shown_default,
        "depends_on": depends_on,
    }
    shown: dict[str, Any] = {name: text for name, text in given.items() if text}
    if "default_factory" not in rules:
        rules["default"] = default
    return Field(description=description, json_schema_extra=shown, **rules)


data_setting = partial(setting, group="model and data")
batch_setting = partial(setting, group="batch and length")
optimizer_setting = partial(setting, group="optimizer")
adapter_setting = partial(setting, group="adapter")
curriculum_setting = partial(setting, group="curriculum")
device_setting = partial(setting, group="device")
saving_setting = partial(setting, group="saving and resuming")
logging_setting = partial(setting, group="evaluation and logging")
preparation_setting = partial(setting, group="data preparation")


def redefined(model_class: type[BaseModel], name: str, **changes: Any) -> Any:
    """Return an inherited setting with another default or description; group, unit and bounds
    stay.
    """
    return FieldInfo.merge_field_infos(model_class.model_fields[name], **changes)


def _one_or_many(value: Any, *, one: Any = str) -> Any:
    """Make a list of a single value; JSON and YAML lists become the tuples that the fields hold."""
    if isinstance(value, one):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _names(keyword: str) -> Callable[[Any], Any]:
    """Return a validator for names, which may also be joined by commas (no module or reporter has a
    comma in its name). `keyword` stands alone.
    """

    def split(value: Any) -> Any:
        value = _one_or_many(value)
        if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
            return value
        names = tuple(part.strip() for name in value for part in name.split(","))
        return keyword if names == (keyword,) else names

    return split


def _columns(value: Any) -> Any:
    """Return `prompt=question,response=answer` as a mapping; check it, or a mapping from a file."""
    if isinstance(value, str):
        halves = (pair.partition("=") for pair in value.split(","))
        pairs = [(ours.strip(), theirs.strip()) for ours, _, theirs in halves]
    elif isinstance(value, dict) and all(isinstance(name, str) for name in value.values()):
        pairs = list(value.items())
    else:
        return value
    if found := list(_column_problems(pairs)):
        raise rule_broken(*found)
    return dict(pairs)


def _column_problems(pairs: list[tuple[str, str]]) -> Iterator[Problem]:
    for ours, theirs in pairs:
        if not ours or not theirs:
            fix = "write KEY=NAME, e.g. prompt=question,response=answer"
            yield f"{ours}={theirs} is half a column", fix
        elif ours not in COLUMNS:
            fix = f"the columns are {', '.join(COLUMNS)}; difficulty_field names a difficulty"
            yield f"unknown column {ours!r}{did_you_mean(ours, COLUMNS)}", fix
    for side, names in zip(("left", "right"), zip(*pairs, strict=True), strict=False):
        for name, times in Counter(names).items():
            if name and times > 1:
                yield f"the column {name!r} is named twice", f"name it once {side} of ="


def shown_of(info: FieldInfo) -> dict[str, Any]:
    """Return what `setting` was given for the help: group, unit, shown_default, depends_on."""
    return dict(info.json_schema_extra) if isinstance(info.json_schema_extra, dict) else {}


Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
NpuTuning = Annotated[
    Literal["none"] | tuple[Literal["core-binding", "task-queue"], ...],
    BeforeValidator(
        _names("none"),
        json_schema_input_type=Literal["none", "core-binding", "task-queue"] | list[str],
    ),
]
# Whether activations are recomputed; null is the old word for auto.
Recompute = Annotated[
    bool | Literal["auto"], BeforeValidator(lambda value: "auto" if value is None else value)
]
# Steps, or below 1 a fraction of them.
Warmup = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)]
# A number of records, or below 1 a share of them.
Share = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)]
Paths = Annotated[
    tuple[Text, ...], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])
]
Names = Annotated[
    Literal["all-linear"] | tuple[Text, ...],
    BeforeValidator(
        _names("all-linear"), json_schema_input_type=Literal["all-linear"] | str | list[str]
    ),
]
Reporters = Annotated[
    Literal["auto"] | tuple[Reporter, ...],
    BeforeValidator(
        _names("auto"), json_schema_input_type=Literal["auto"] | Reporter | list[Reporter]
    ),
]
# Key of our formats -> the key that the data has for it.
Columns = Annotated[
    dict[Text, Text], BeforeValidator(_columns, json_schema_input_type=str | dict[str, str])
]
Many = BeforeValidator(_one_or_many)
# A path on a command line; in a run's settings paths stay strings, as run.yaml has them.
PathOption = Annotated[
    Path, BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value)
]
# What is wrong, and the fix.
Problem = tuple[str, str]


def rule_broken(*problems: Problem) -> PydanticCustomError:
    """Return an error that carries the problems through pydantic (config/options.py unpacks it)."""
    text = "; ".join(what for what, _ in problems)
    return PydanticCustomError("rule_broken", "{text}", {"text": text, "problems": problems})


class Strict(BaseModel):
    """No conversion between types, no unknown names, no change after construction, no NaN or
    infinity.
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
    )

    def problems(self) -> Iterable[Problem]:
        """Return fields that contradict one another; needs no file, device or number of
        processes.
        """
        return ()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if problems := list(self.problems()):
            raise rule_broken(*problems)
        return self


class Settings(Strict):
    """What a command line sets: the settings of a run, or the options of a command.

    Attributes:
        command: how a run is started.
        groups: headings of the help, in order.
        aliases: other spelling -> field.
        positional: fields that stand without a flag, in order; the last may be a list.
    """

    command: ClassVar[str] = ""
    groups: ClassVar[tuple[str, ...]] = GROUPS
    aliases: ClassVar[Mapping[str, str]] = {}
    positional: ClassVar[tuple[str, ...]] = ()


def ordered_fields(model_class: type[Settings]) -> list[str]:
    """Return the names of the fields as people should see them: by group, a class's own before the
    inherited ones.
    """
    fields = model_class.model_fields
    inherited = {
        name for base in model_class.__mro__[1:] for name in getattr(base, "__annotations__", {})
    }

    def position(name: str) -> tuple[int, bool]:
        return model_class.groups.index(shown_of(fields[name])["group"]), name in inherited

    return [fields[name].alias or name for name in sorted(fields, key=position)]


class StageConfig(Strict):
    """An interval of the run with its own mix of difficulties."""

    until: float = Field(
        gt=0, le=1, description="Where the stage ends, as a fraction of the run's steps."
    )
    mix: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Many] = Field(
        description="One weight per difficulty, in the order of `levels`; only their ratios count."
    )
    ramp: Literal["step", "linear"] = Field(
        default="step",
        description=(
            "How the mix is reached: at once, or linearly over the stage from the previous stage's"
            " mix."
        ),
    )


# 0-30%, 30-70%, 70-100% of the run.
DEFAULT_STAGES = (
    StageConfig(until=0.3, mix=(80.0, 20.0, 0.0)),
    StageConfig(until=0.7, mix=(40.0, 40.0, 20.0)),
    StageConfig(until=1.0, mix=(25.0, 35.0, 40.0)),
)


class CurriculumConfig(Strict):
    """Which difficulties (`levels` in files) there are, and how they are mixed over the run."""

    levels: Annotated[tuple[Text, ...], Many] = Field(
        ("explain", "reasoning", "topology"),
        min_length=1,
        description="The values of the difficulty field, in order.",
    )
    stages: Annotated[tuple[StageConfig, ...], Many] = Field(
        DEFAULT_STAGES, min_length=1, description="The stages in order; the last one ends at 1.0."
    )

    def problems(self) -> Iterator[Problem]:
        repeated = sorted({level for level in self.levels if self.levels.count(level) > 1})
        if repeated:
            what = f"levels names {', '.join(repeated)} more than once"
            yield what, "name each difficulty once"
        count = len(self.levels)
        for number, stage in enumerate(self.stages, 1):
            if len(stage.mix) != count:
                yield (
                    f"stage {number} has {len(stage.mix)} weights for {count} difficulties",
                    f"give one weight for each of {', '.join(self.levels)}",
                )
            elif sum(stage.mix) <= 0:
                what = f"the weights of stage {number} are all zero"
                yield what, "give a difficulty a weight above 0"
        if self.stages[0].ramp == "linear":
            what = "stage 1 ramps linearly, and there is no mix before it"
            yield what, 'give stage 1 the ramp "step"'
        ends = [stage.until for stage in self.stages]
        if ends != sorted(set(ends)):
            what = f"the stages end at {ends}, which does not increase"
            yield what, "order the stages by `until`"
        if ends[-1] != 1.0:
            what = f"the last stage ends at {ends[-1]}, not at 1.0"
            yield what, "set `until` of the last stage to 1.0"


NATURAL = "natural"
HUB_PREFIXES = ("hub:", "modelscope:")  # of a data set by name (data/reading/hub_data.py)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _weight(value: Any) -> float | str:
    if value == NATURAL:
        return NATURAL
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        fix = f"give a number above 0, or {NATURAL} for the source's size"
        raise rule_broken((f"a weight is {value!r}", fix))
    return float(value)


def _weights(value: Any) -> Any:
    """Make a list of a single weight; on the command line numbers are strings."""
    value = _one_or_many(value, one=str | int | float)
    if not isinstance(value, tuple):
        return value
    return tuple(
        float(one) if isinstance(one, str) and NUMBER.fullmatch(one) else one for one in value
    )


Weight = Annotated[
    float | Literal["natural"],
    PlainValidator(_weight, json_schema_input_type=float | Literal["natural"]),
]
Weights = Annotated[
    tuple[Weight, ...],
    BeforeValidator(_weights, json_schema_input_type=list[float | Literal["natural"]]),
]


class DataSource(Strict):
    """One source of samples."""

    path: Text = Field(description="A file, folder or glob.")
    weight: Weight | None = Field(
        default=None, description="Its part of the samples; natural is the number of its samples."
    )
    columns: Columns | None = Field(
        default=None, description="Names of the format -> fields of the records."
    )
    difficulty: Text | None = Field(
        default=None, description="The difficulty of all its records, instead of their own."
    )
    max_samples: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        default=None, description="Use only this many of its records, the first ones."
    )

    @model_serializer(mode="wrap")
    def _given(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in values_of(self).items() if value is not None}


def _tag(value: Any) -> str:
    return "source" if isinstance(value, dict | DataSource) else "path"


_Entry = Annotated[
    Annotated[Text, Tag("path")] | Annotated[DataSource, Tag("source")], Discriminator(_tag)
]
# Paths, and paths with more settings. A path alone stays a string, in run.yaml too.
DataEntries = Annotated[
    tuple[_Entry, ...],
    BeforeValidator(
        partial(_one_or_many, one=str | dict | DataSource), json_schema_input_type=str | list[str]
    ),
]


def as_sources(entries: Sequence[str | DataSource]) -> tuple[DataSource, ...]:
    """Return the entries of `data` or `valid_data`, each path alone as a DataSource."""
    return tuple(
        entry if isinstance(entry, DataSource) else DataSource(path=entry) for entry in entries
    )


def with_common(
    sources: Sequence[DataSource],
    columns: Mapping[str, str] | None,
    max_samples: int | None = None,
) -> tuple[DataSource, ...]:
    """Return the sources, with these settings where they do not have their own."""
    common = {"columns": columns and dict(columns), "max_samples": max_samples}
    return tuple(
        source.model_copy(
            update={name: value for name, value in common.items() if getattr(source, name) is None}
        )
        for source in sources
    )


def source_names(sources: Sequence[DataSource]) -> tuple[str, ...]:
    """Return a distinct short name for each source: a file's without suffix, else the path, else
    the path with a number.
    """
    paths = [source.path for source in sources]
    short = [Path(path).stem for path in paths]
    names = [
        name if short.count(name) == 1 and name else path
        for name, path in zip(short, paths, strict=True)
    ]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({names[:number].count(name) + 1})"
        for number, name in enumerate(names)
    )


ACCUMULATION = "gradient_accumulation_steps"


class Precedence(IntEnum):
    """The higher of two sources wins. The files of `--config` are `FILE`, `FILE + 1`, ... in the
    order given.
    """

    DEFAULT = 0
    FILE = 1
    DEEPSPEED = 1_000_000  # the file of --deepspeed
    FLAG = 1_000_001
    OVERRIDE = 1_000_002  # of a Python caller


@dataclass(frozen=True)
class SourcedValue:
    """A value and its source.

    Args:
        value: the value as read.
        precedence: that of its source, a `Precedence` or one of the files above `FILE`.
        origin: what `--print-config` shows, e.g. `default`, `ds_configs/zero3.json`,
            `--learning-rate`.
        location: the exact location for an error message, if it is not the origin.
    """

    value: Any
    precedence: int
    origin: str
    location: str = ""

    @property
    def where(self) -> str:
        """The exact location."""
        return self.location or self.origin


@dataclass
class Resolution:
    """The values from all sources, while one configuration is made from them.

    Args:
        model_class: the settings that are made.
        world_size: number of processes.
        values: the winning value of every field that has one.
        derived: names that were computed here rather than decided by anyone.
        unread: whether a file could not be read at all, so that nothing is known of what it sets.
    """

    model_class: type[Settings]
    world_size: int = 1
    values: dict[str, SourcedValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)
    derived: set[str] = field(default_factory=set)
    unread: bool = False

    def add_defaults(self) -> None:
        """Add the defaults that depend on nothing else."""
        for name, info in self.model_class.model_fields.items():
            if not info.is_required() and info.default_factory is None:
                self.values[name] = SourcedValue(info.default, Precedence.DEFAULT, "default")

    def default(self, name: str) -> Any:
        """Return the default of a setting."""
        return self.model_class.model_fields[name].default

    def value(self, name: str) -> Any:
        """Return the winning value, None if there is none."""
        return self.values[name].value if name in self.values else None

    def is_given(self, name: str) -> bool:
        """Return whether a source gives the setting a value other than None."""
        return self.precedence(name) > Precedence.DEFAULT

    def precedence(self, name: str) -> int:
        """Return the precedence of the winning value; None counts as a default."""
        return Precedence.DEFAULT if self.value(name) is None else self.values[name].precedence

    def derive(self, name: str, value: Any, origin: str) -> None:
        """Set a value that follows from others."""
        self.values[name] = SourcedValue(value, Precedence.DEFAULT, origin)
        self.derived.add(name)

    def instead_of(self, name: str, value: Any) -> str:
        """Return ` instead of 8 (ds.json)` if `value` replaces another, else nothing. Call it
        before `derive`.
        """
        before = self.values.get(name)
        if before is None or before.value in (None, "auto", value):
            return ""
        return f" instead of {before.value} ({before.where})"

    def refuse(self, what: str, names: Iterable[str], fix: str) -> None:
        """Note a problem of several settings together."""
        where = ", ".join(dict.fromkeys(self.values[name].where for name in names))
        self.problems.append(ConfigError(what, where, fix))


# Derives what the user left open, or notes a problem. A value of the wrong type is left alone: the
# schema rejects it.
Rule = Callable[[Resolution], None]


def processes(world_size: int) -> str:
    """Return `1 process` or `2 processes`."""
    return f"{world_size} process{'' if world_size == 1 else 'es'}"


def multiples_around(number: int, factor: int) -> str:
    """Return the nearest positive multiples of `factor`, as `28 or 32`."""
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def divisors_around(number: int, near: int) -> str:
    """Return the nearest divisors of `number` on both sides of `near`, as `3 or 5`."""
    below = next((d for d in range(min(near, number), 0, -1) if number % d == 0), None)
    above = next((d for d in range(near + 1, number + 1) if number % d == 0), None)
    return " or ".join(str(divisor) for divisor in (below, above) if divisor)


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 1."""
    return type(value) is int and value >= 1


def refuse_product(
    resolution: Resolution, whole: str, factors: tuple[str, ...], product: int
) -> None:
    """Note the problem of a batch that is given with all its factors and is not their product."""
    named = " x ".join(f"{name} {resolution.value(name)}" for name in factors)
    # Do not point the user at settings left at their default, unless all of them are.
    names = (*factors, whole)
    resolution.refuse(
        f"{named} x {processes(resolution.world_size)} is {product}, not {whole}"
        f" {resolution.value(whole)}",
        list(filter(resolution.is_given, names)) or names,
        f"nearest that agrees: {whole} {product}; or leave {ACCUMULATION} out, it is derived",
    )


def warn_of_long_warmup(resolution: Resolution, total: str, share: str) -> None:
    """Warn about a warm-up that fills the run; it is allowed.

    Args:
        total: the setting with the number of steps.
        share: a usual warm-up as a share of them, e.g. "0.03 for 3%".
    """
    warmup, steps = resolution.value("warmup_steps"), resolution.value(total)
    if is_count(warmup) and is_count(steps) and warmup >= steps:
        resolution.notes.append(
            f"warning: warmup_steps {warmup} is not below {total} {steps}: the learning rate never"
            f" reaches its maximum; set {flag('warmup_steps')} to {share} of the steps"
        )


def note_unused(
    resolution: Resolution, unused: Iterable[tuple[tuple[str, ...], bool, str]]
) -> None:
    """Note settings that the user gave and that this run does not read.

    Args:
        unused: (names, whether the run does not read them, why).
    """
    for names, holds, reason in unused:
        given = filter(resolution.is_given, names)
        named = ", ".join(f"{name} ({resolution.values[name].where})" for name in given)
        if holds and named:
            resolution.notes.append(f"not used, because {reason}: {named}")


def resolve_data_weights(resolution: Resolution, *, data: str = "data") -> None:
    """Let the weights of higher precedence win, and drop weights of data that was replaced.

    Args:
        data: the setting with the entries that are weighted.
    """
    named, weights = resolution.values.get(data), resolution.values["data_weights"]
    if not named or not weights.value:
        return
    if named.precedence >= Precedence.FLAG > weights.precedence:
        resolution.derive("data_weights", [], f"dropped: {data} is from {named.origin}")
        resolution.notes.append(
            f"data_weights ({weights.where}) is dropped, because {data} is from {named.origin}"
        )
    elif weights.precedence > named.precedence and isinstance(named.value, list | tuple | dict):
        given = [named.value] if isinstance(named.value, dict) else list(named.value)
        entries = [
            {name: value for name, value in entry.items() if name != "weight"}
            if isinstance(entry, dict)
            else entry
            for entry in given
        ]
        if entries != given:
            resolution.values[data] = replace(named, value=entries)
            resolution.notes.append(
                f"the weights in {data} ({named.where}) are not used: data_weights is"
                f" {weights.where}"
            )
