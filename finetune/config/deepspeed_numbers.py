"""Numbers that DeepSpeed and finetune both know, and who owns them. Never imports deepspeed.

Given on one side only, they become ours; `"auto"` on DeepSpeed's side means ours; given on both sides of one file and
different, they are refused even where a flag overrides them. What is handed on to DeepSpeed says `"auto"` at each of
them, and has no `optimizer` and `scheduler` block: finetune makes both itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from finetune.config.deepspeed_keys import SCHEDULERS, lookup, refused_values, unknown_keys
from finetune.errors import ConfigError


@dataclass(frozen=True)
class Shared:
    """A number of DeepSpeed's that is also ours: `path` there, `field` here, `index` into a list there."""

    path: str
    field: str
    index: int | None = None


SHARED = (
    Shared("train_micro_batch_size_per_gpu", "micro_batch_size"),
    Shared("gradient_accumulation_steps", "gradient_accumulation_steps"),
    Shared("train_batch_size", "global_batch_size"),
    Shared("gradient_clipping", "max_grad_norm"),
    Shared("optimizer.params.lr", "learning_rate"),
    Shared("optimizer.params.betas", "adam_beta1", 0),
    Shared("optimizer.params.betas", "adam_beta2", 1),
    Shared("optimizer.params.eps", "adam_epsilon"),
    Shared("optimizer.params.weight_decay", "weight_decay"),
    Shared("scheduler.params.warmup_max_lr", "learning_rate"),
    Shared("scheduler.params.warmup_num_steps", "warmup_steps"),
    Shared("scheduler.params.total_num_steps", "max_steps"),
)
PRECISIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}


def is_said(value: Any) -> bool:
    """Whether a value of ours decides anything: neither null nor `auto`."""
    return value is not None and value != "auto"


@dataclass
class Split:
    """A DeepSpeed configuration, split into what is ours and what is handed on.

    Args:
        numbers: our name -> (value, place) for every shared number that DeepSpeed's side gives.
        deepspeed: what DeepSpeed gets, shared numbers as `"auto"`.
    """

    numbers: dict[str, tuple[Any, str]] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)


def split(config: Mapping[str, Any], where: str, ours: Mapping[str, tuple[Any, str]]) -> Split:
    """Take the shared numbers out of a DeepSpeed configuration.

    Args:
        config: the DeepSpeed keys, without a `finetune` block.
        where: their file, for messages.
        ours: our name -> (value, place) of what the same file says on our side.
    """
    result = Split(problems=list(unknown_keys(config, where)))
    said: dict[str, list[tuple[Any, str]]] = {}
    for name, value, place in _shared_values(config, where, result.problems):
        said.setdefault(name, []).append((value, place))
    for name, values in said.items():
        own = [ours[name]] if name in ours and is_said(ours[name][0]) else []
        places = own + values
        if any(value != places[0][0] for value, _ in places):
            result.problems.append(_contradiction(name, places))
        result.numbers[name] = values[0]
    result.problems += refused_values(config, where)
    dtype = ours.get("dtype", (None, ""))[0]
    result.problems += _unsettled_precision(config, where, said.get("dtype"), dtype)
    result.deepspeed = _handed_on(config)
    blocks = [name for name in ("optimizer", "scheduler") if name in config]
    if blocks:
        result.notes.append(
            f"{where}: the {' and '.join(blocks)} of DeepSpeed {'is' if len(blocks) == 1 else 'are'} read into our "
            "settings; finetune makes AdamW and the schedule itself"
        )
    return result


def _contradiction(name: str, places: list[tuple[Any, str]]) -> ConfigError:
    said = " and ".join(f"{value!r} ({place})" for value, place in places)
    return ConfigError(
        f"{name} is given twice and differently: {said}",
        ", ".join(place for _, place in places),
        'keep one of them, or write "auto" on DeepSpeed\'s side',
    )


def _shared_values(
    config: Mapping[str, Any], where: str, problems: list[ConfigError]
) -> Iterator[tuple[str, Any, str]]:
    """(our name, value, place) of every shared number that is not left to us."""
    for shared in SHARED:
        value, place = lookup(config, shared.path), f"{where}: {shared.path}"
        if value is None or value == "auto":
            continue
        if shared.index is None:
            yield shared.field, value, place
        elif isinstance(value, list | tuple) and len(value) == 2:
            if value[shared.index] != "auto":
                yield shared.field, value[shared.index], f"{place}[{shared.index}]"
        elif shared.index == 0:
            problems.append(ConfigError(f"{shared.path} is {value!r}", where, "give two numbers, [beta1, beta2]"))
    kind = lookup(config, "scheduler.type")
    if isinstance(kind, str) and kind in SCHEDULERS:
        yield "lr_scheduler", SCHEDULERS[kind], f"{where}: scheduler.type {kind}"
    enabled = {block: lookup(config, f"{block}.enabled") for block in PRECISIONS}
    for block, value in enabled.items():
        if value is True:
            yield "dtype", PRECISIONS[block], f"{where}: {block}.enabled"
    said = [value for value in enabled.values() if value is not None]
    if said and not any(said):
        block = next(block for block, value in enabled.items() if value is not None)
        yield "dtype", "float32", f"{where}: {block}.enabled false"


def _unsettled_precision(
    config: Mapping[str, Any], where: str, said: list[tuple[Any, str]] | None, dtype: Any
) -> Iterator[ConfigError]:
    """A switch that is none, or one precision switched off and the other left to us: ours must then say which it is."""
    for block, name in PRECISIONS.items():
        value = lookup(config, f"{block}.enabled")
        if value is not None and value != "auto" and not isinstance(value, bool):
            yield ConfigError(f"{block}.enabled is {value!r}", where, 'write true, false or "auto"')
        elif value is False and not said and dtype in (None, "auto", name):
            yield ConfigError(
                f"{block} is switched off, but dtype is {dtype or 'auto'}, which may take it",
                f"{where}: {block}.enabled",
                f'write "auto" there, or set dtype to float32 or {"float16" if name == "bfloat16" else "bfloat16"}',
            )


def _handed_on(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with `"auto"` at every shared number, and without what finetune makes itself."""
    handed = deepcopy(dict(config))
    for block in ("optimizer", "scheduler"):
        handed.pop(block, None)
    for shared in SHARED:
        if shared.path in handed:
            handed[shared.path] = "auto"
    if "bfloat16" in handed and "bf16" not in handed:  # the old name, which not every reader knows
        handed["bf16"] = handed.pop("bfloat16")
    for block in PRECISIONS:
        if isinstance(handed.get(block), dict) and "enabled" in handed[block]:
            handed[block]["enabled"] = "auto"
    return handed
