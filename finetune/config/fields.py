"""The parts that settings are made of: typed fields with group and unit, strict models, the sources
of `data`, and the curriculum's stages.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from finetune.config.names import did_you_mean

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
    given = {"group": group, "unit": unit, "shown_default": shown_default, "depends_on": depends_on}
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

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

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
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


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
        float(one) if isinstance(one, str) and _NUMBER.fullmatch(one) else one for one in value
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
