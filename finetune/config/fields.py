"""The parts that settings are made of: typed fields with group and unit, strict models, and the
curriculum's stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
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
    """A pydantic field with its group in the help, its unit, and the default in words where it is
    computed.

    Args:
        default: the default, or `...` where the setting is required; leave it and pass
            `default_factory` in `rules` where it follows from other settings (they must be declared
            earlier).
        description: one sentence for `--help` and the JSON Schema.
        group: its heading in the help; of a run's settings one of `GROUPS`, see below.
        unit: unit of the number, e.g. `samples`, `tokens`, `seconds`.
        depends_on: the setting that a computed default follows from.
        shown_default: how a computed default reads, e.g. `2 x lora_r`.
        rules: bounds and anything else `pydantic.Field` takes.
    """
    extra = {"group": group, "unit": unit, "shown_default": shown_default, "depends_on": depends_on}
    if "default_factory" not in rules:
        rules["default"] = default
    return Field(
        description=description, json_schema_extra={k: v for k, v in extra.items() if v}, **rules
    )


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
    """An inherited setting with another default or description; group, unit and bounds stay."""
    return FieldInfo.merge_field_infos(model_class.model_fields[name], **changes)


def _one_or_many(value: Any) -> Any:
    """A single string is a list of one; JSON and YAML lists become the tuples that the fields
    hold.
    """
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _names(keyword: str) -> Callable[[Any], Any]:
    """Names may also be joined by commas (no module or reporter has one in its name); `keyword`
    stands alone.
    """

    def split(value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            return value
        if not all(isinstance(name, str) for name in value):
            return tuple(value)
        names = tuple(part.strip() for name in value for part in name.split(","))
        return keyword if names == (keyword,) else names

    return split


def _columns(value: Any) -> Any:
    """`prompt=question,response=answer` as a mapping; its problems, and those of a mapping from a
    file.
    """
    if isinstance(value, str):
        halves = (pair.partition("=") for pair in value.split(","))
        pairs = [(ours.strip(), theirs.strip()) for ours, _, theirs in halves]
    elif isinstance(value, dict) and all(isinstance(name, str) for name in value.values()):
        pairs = list(value.items())
    else:
        return value
    found = []
    for ours, theirs in pairs:
        if not ours or not theirs:
            found.append(
                (
                    f"{ours}={theirs} is half a column",
                    "write KEY=NAME, e.g. prompt=question,response=answer",
                )
            )
        elif ours not in COLUMNS:
            what = f"unknown column {ours!r}{did_you_mean(ours, COLUMNS)}"
            found.append(
                (what, f"the columns are {', '.join(COLUMNS)}; difficulty_field names a difficulty")
            )
    for number, side in enumerate(("left", "right")):
        names = Counter(pair[number] for pair in pairs)
        twice = [name for name, times in names.items() if name and times > 1]
        found += [
            (f"the column {name!r} is named twice", f"name it once {side} of =") for name in twice
        ]
    if found:
        raise rule_broken(found)
    return dict(pairs)


def shown_of(info: FieldInfo) -> dict[str, Any]:
    """What `setting` notes of a field: group, unit, shown_default, depends_on; those that were
    given.
    """
    return dict(info.json_schema_extra) if isinstance(info.json_schema_extra, dict) else {}


def ordered_fields(model_class: type[BaseModel]) -> list[str]:
    """Names of the fields as people should see them: by group, a class's own before the inherited
    ones.
    """
    fields = model_class.model_fields
    groups_in_order: Sequence[str] = getattr(model_class, "groups", GROUPS)
    inherited = {
        name for base in model_class.__mro__[1:] for name in getattr(base, "__annotations__", {})
    }
    groups = {name: shown_of(info)["group"] for name, info in fields.items()}
    order = sorted(
        fields, key=lambda name: (groups_in_order.index(groups[name]), name in inherited)
    )
    return [fields[name].alias or name for name in order]


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
# A path on a command line; in a run's settings paths stay texts, as run.yaml has them.
PathOption = Annotated[
    Path, BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value)
]


def rule_broken(problems: list[tuple[str, str]]) -> PydanticCustomError:
    """An error for pydantic that carries `(what, fix)` pairs through to `schema_errors`."""
    text = "; ".join(what for what, _ in problems)
    return PydanticCustomError("rule_broken", "{text}", {"text": text, "problems": problems})


class Strict(BaseModel):
    """No conversion between types, no unknown names, no change after construction, no NaN or
    infinity.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    def problems(self) -> list[tuple[str, str]]:
        """Fields that contradict one another, as `(what, fix)`; needs no file, device or number of
        processes.
        """
        return []

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if problems := self.problems():
            raise rule_broken(problems)
        return self


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

    def problems(self) -> list[tuple[str, str]]:
        found = []
        repeated = sorted({level for level in self.levels if self.levels.count(level) > 1})
        if repeated:
            found.append(
                (f"levels names {', '.join(repeated)} more than once", "name each difficulty once")
            )
        for number, stage in enumerate(self.stages, 1):
            if len(stage.mix) != len(self.levels):
                what = (
                    f"stage {number} has {len(stage.mix)} weights for {len(self.levels)}"
                    " difficulties"
                )
                found.append((what, f"give one weight for each of {', '.join(self.levels)}"))
            elif sum(stage.mix) <= 0:
                found.append(
                    (
                        f"the weights of stage {number} are all zero",
                        "give a difficulty a weight above 0",
                    )
                )
        if self.stages[0].ramp == "linear":
            found.append(
                (
                    "stage 1 ramps linearly, and there is no mix before it",
                    'give stage 1 the ramp "step"',
                )
            )
        ends = [stage.until for stage in self.stages]
        if any(later <= earlier for earlier, later in zip(ends, ends[1:], strict=False)):
            found.append(
                (
                    f"the stages end at {ends}, which does not increase",
                    "order the stages by `until`",
                )
            )
        if ends[-1] != 1.0:
            found.append(
                (
                    f"the last stage ends at {ends[-1]}, not at 1.0",
                    "set `until` of the last stage to 1.0",
                )
            )
        return found
