"""Settings that depend on one another: which of them win, and what follows from them. See
`precedence.Rule`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

from finetune.config.adapter_config import BEYOND_PLAIN_LORA, QUANTIZED_ON, quantization_problems
from finetune.config.names import flag
from finetune.config.precedence import Precedence, Resolution, Rule
from finetune.config.sources import as_sources, with_columns
from finetune.errors import ConfigError

MICRO, ACCUMULATION, GLOBAL = "micro_batch_size", "gradient_accumulation_steps", "global_batch_size"


def processes(world_size: int) -> str:
    """`1 process`, `2 processes`."""
    return f"{world_size} process{'' if world_size == 1 else 'es'}"


def multiples_around(number: int, factor: int) -> str:
    """The nearest positive multiples of `factor`, as `28 or 32`."""
    below = number // factor * factor
    return " or ".join(
        str(multiple) for multiple in dict.fromkeys([below, below + factor]) if multiple
    )


def divisors_around(number: int, near: int) -> str:
    """The nearest divisors of `number` on both sides of `near`, as `3 or 5`."""
    below = next((d for d in range(min(near, number), 0, -1) if number % d == 0), None)
    above = next((d for d in range(near + 1, number + 1) if number % d == 0), None)
    return " or ".join(str(divisor) for divisor in (below, above) if divisor)


def batch_problem(global_batch_size: int, micro_batch_size: int) -> tuple[str, str]:
    """`(what, fix)` for a global batch that the micro-batch does not divide."""
    return (
        f"{GLOBAL} {global_batch_size} is not a multiple of {MICRO} {micro_batch_size}",
        (
            f"nearest that agree: {GLOBAL} {multiples_around(global_batch_size, micro_batch_size)},"
            f" or {MICRO} {divisors_around(global_batch_size, micro_batch_size)}"
        ),
    )


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 1."""
    return type(value) is int and value >= 1


def refuse_product(
    resolution: Resolution, whole: str, factors: tuple[str, ...], product: int
) -> None:
    """The problem of a batch that is given with all its factors, and is not their product."""
    named = " x ".join(f"{name} {resolution.value(name)}" for name in factors)
    # Defaults that nobody touched are no place to look at, unless there is nothing else.
    names = (*factors, whole)
    given = tuple(name for name in names if resolution.precedence(name) > Precedence.DEFAULT)
    resolution.refuse(
        f"{named} x {processes(resolution.world_size)} is {product}, not {whole}"
        f" {resolution.value(whole)}",
        given or names,
        f"nearest that agrees: {whole} {product}; or leave {ACCUMULATION} out, it is derived",
    )


def resolve_batch(resolution: Resolution) -> None:
    """Of micro-batch, accumulation and global batch the two of highest precedence win, and the
    third is derived.

    At equal precedence the micro-batch is kept before the global batch and that before
    accumulation: the micro-batch is what fits into memory, the global batch is the training itself,
    accumulation is only how the one makes the other.
    """
    if (
        resolution.value(ACCUMULATION) is not None
        and resolution.precedence(MICRO) == Precedence.DEFAULT
    ):
        # auto is for where the number of microbatches follows from their size.
        resolution.derive(MICRO, 1, f"1 with {ACCUMULATION}")
    values = {name: resolution.value(name) for name in (MICRO, GLOBAL, ACCUMULATION)}
    if values[GLOBAL] == "auto" and is_count(values[MICRO]) and is_count(values[ACCUMULATION]):
        _derive_global(resolution, values[MICRO], "auto", values[ACCUMULATION])
        return
    if not all(
        is_count(value) or (value is None and name == ACCUMULATION)
        for name, value in values.items()
    ):
        return
    precedence = {name: resolution.precedence(name) for name in values}
    if values[ACCUMULATION] is not None and len(set(precedence.values())) == 1:
        product = values[MICRO] * values[ACCUMULATION] * resolution.world_size
        if product != values[GLOBAL]:
            refuse_product(resolution, GLOBAL, (MICRO, ACCUMULATION), product)
        return
    third = min(values, key=lambda name: (precedence[name], name != ACCUMULATION, name != GLOBAL))
    derive = {ACCUMULATION: _derive_accumulation, GLOBAL: _derive_global, MICRO: _derive_micro}[
        third
    ]
    derive(resolution, values[MICRO], values[GLOBAL], values[ACCUMULATION])


def _derive_accumulation(resolution: Resolution, micro: int, size: int, before: int | None) -> None:
    if size % micro:
        what, fix = batch_problem(size, micro)
        resolution.refuse(what, (GLOBAL, MICRO), fix)
        return
    at_once, count = micro * resolution.world_size, processes(resolution.world_size)
    accumulation = ceil(size / at_once)
    uneven = (
        "" if size % at_once == 0 else ", uneven: some devices have less to do in the last of them"
    )
    resolution.notes.append(
        f"{ACCUMULATION} {accumulation}{resolution.instead_of(ACCUMULATION, accumulation)}: "
        f"{GLOBAL} {size} / ({MICRO} {micro} x {count}){uneven}"
    )
    resolution.derive(ACCUMULATION, accumulation, f"derived from {GLOBAL}, {MICRO} and {count}")


def _derive_global(
    resolution: Resolution, micro: int, before: int | str, accumulation: int
) -> None:
    size, count = micro * accumulation * resolution.world_size, processes(resolution.world_size)
    resolution.notes.append(
        f"{GLOBAL} {size}{resolution.instead_of(GLOBAL, size)}: "
        f"{MICRO} {micro} x {ACCUMULATION} {accumulation} x {count}"
    )
    resolution.derive(GLOBAL, size, f"derived from {MICRO}, {ACCUMULATION} and {count}")


def _derive_micro(resolution: Resolution, before: int, size: int, accumulation: int) -> None:
    share, count = accumulation * resolution.world_size, processes(resolution.world_size)
    if size % share:
        resolution.refuse(
            f"{GLOBAL} {size} is not a whole micro-batch x {ACCUMULATION} {accumulation} x {count}",
            (GLOBAL, ACCUMULATION),
            f"nearest that agree: {GLOBAL} {multiples_around(size, share)}; "
            f"or give {MICRO} instead of {ACCUMULATION}, which need not divide by the processes",
        )
        return
    micro = size // share
    resolution.notes.append(
        f"{MICRO} {micro}{resolution.instead_of(MICRO, micro)}: "
        f"{GLOBAL} {size} / ({ACCUMULATION} {accumulation} x {count})"
    )
    resolution.derive(MICRO, micro, f"derived from {GLOBAL}, {ACCUMULATION} and {count}")


def resolve_length(resolution: Resolution) -> None:
    """Of max_steps and num_epochs the one of higher precedence wins; at equal precedence
    max_steps.
    """
    if resolution.value("max_steps") is None:
        return
    steps, epochs = resolution.values["max_steps"], resolution.values["num_epochs"]
    if resolution.precedence("num_epochs") > resolution.precedence("max_steps"):
        resolution.derive("max_steps", None, f"derived: num_epochs ({epochs.origin}) wins")
        resolution.notes.append(
            f"max_steps {steps.value} ({steps.where}) is not used: num_epochs {epochs.value} wins"
        )
    elif epochs.precedence > Precedence.DEFAULT and epochs.value != resolution.defaults.get(
        "num_epochs"
    ):
        resolution.notes.append(
            f"num_epochs {epochs.value} ({epochs.where}) is not used: max_steps {steps.value} wins"
        )


def warn_of_long_warmup(resolution: Resolution, total: str, share: str) -> None:
    """A warm-up that fills the run is allowed, and warned about.

    Args:
        total: the setting that is the number of steps.
        share: a usual warm-up as a share of them, e.g. "0.03 for 3%".
    """
    warmup, steps = resolution.value("warmup_steps"), resolution.value(total)
    if is_count(warmup) and is_count(steps) and warmup >= steps:
        resolution.notes.append(
            f"warning: warmup_steps {warmup} is not below {total} {steps}: the learning rate never"
            f" reaches its maximum; set {flag('warmup_steps')} to {share} of the steps"
        )


def batch_problems(config: Any) -> list[tuple[str, str]]:
    """A micro-batch that does not go with accumulation or the global batch."""
    accumulation, given = config.gradient_accumulation_steps, config.model_fields_set
    if config.micro_batch_size == "auto":
        # Left out beside accumulation it is 1: resolve_batch.
        if accumulation is None or "micro_batch_size" not in given:
            return []
        what = f"gradient_accumulation_steps is {accumulation}, and micro_batch_size is auto"
        return [(what, "leave one of them out: the number of microbatches follows from their size")]
    # With accumulation given and the global batch left to its default, the global batch is still to
    # be derived.
    complete = accumulation is None or "global_batch_size" in given
    known = config.global_batch_size != "auto"  # else the microbatch becomes a divisor
    if complete and known and config.global_batch_size % config.micro_batch_size:
        return [batch_problem(config.global_batch_size, config.micro_batch_size)]
    return []


def evaluation_problems(config: Any) -> list[tuple[str, str]]:
    """Settings that need evaluations, of a run that has none."""
    found = []
    for name in ("keep_best", "early_stopping"):
        given = getattr(config, name)
        if given and not config.validates:
            what = f"{name} is {str(given).lower()}, and there is no validation data"
            found.append((what, f"give validation data, or leave {flag(name)} out"))
        elif given and not config.eval_steps:
            what = (
                f"{name} is {str(given).lower()}, and eval_steps 0 evaluates at the beginning and"
                " the end only"
            )
            found.append((what, "set --eval-steps to a number of steps below the run's"))
    return found


def metric_problems(config: Any) -> list[tuple[str, str]]:
    """A metric of the best evaluation that evaluations do not have; answers that there is nothing
    to ask for.
    """
    metric, levels = config.best_metric, config.curriculum.levels if config.use_curriculum else ()
    known = [
        name for kind in config.metrics for name in (kind, *(f"{kind}/{level}" for level in levels))
    ]
    found = []
    if metric not in known:
        found.append(
            (f"best_metric is {metric}, which no evaluation has", f"take one of {', '.join(known)}")
        )
    elif metric.startswith("exact_match") and config.eval_generate is None:
        found.append(
            (
                f"best_metric is {metric}, and evaluations answer nothing",
                "set --eval-generate, e.g. to 50",
            )
        )
    if config.eval_generate is not None and not config.validates:
        what = f"eval_generate is {config.eval_generate}, and there is no validation data"
        found.append((what, f"give validation data, or leave {flag('eval_generate')} out"))
    return found


def optimizer_problems(config: Any, device_type: str) -> list[tuple[str, str]]:
    """An optimizer that the rest of the run does not go with."""
    name, found = config.optimizer, []
    if name == "adamw":
        return []
    if not config.trains_all_weights:
        what = f"optimizer is {name}, and finetuning is lora: the state of an adapter is small"
        found.append((what, "leave --optimizer out, or train all parameters (--finetuning full)"))
    if config.deepspeed:
        what = f"optimizer is {name}, and DeepSpeed shards AdamW's two flat moments"
        found.append((what, "train without DeepSpeed (--deepspeed none), or leave --optimizer out"))
    if name == "adamw-8bit" and device_type not in (*QUANTIZED_ON, "auto"):
        what = (
            f"optimizer is {name}, and bitsandbytes has it on CUDA and CPUs, not on {device_type}"
        )
        found.append((what, "take adafactor, or leave --optimizer out"))
    return found


def check_device(config: Any, device_type: str) -> None:
    """Raise ConfigError where the run asks for what this kind of device does not have."""
    for setting, problems in (
        ("quantization", quantization_problems),
        ("optimizer", optimizer_problems),
    ):
        for what, fix in problems(config, device_type):
            raise ConfigError(what, where=flag(setting), fix=fix)


def split_problems(config: Any) -> list[tuple[str, str]]:
    """A split that has nothing to split, or by a field whose name is taken from it by `columns`."""
    field = config.split_by
    if field is None:
        return []
    if config.valid_split is None:
        return [
            ("split_by is given, and nothing is split", "give valid_split as well, or leave it out")
        ]
    mappings = [
        source.columns or {} for source in with_columns(as_sources(config.data), config.columns)
    ]
    hides = next(
        (columns for columns in mappings if field in columns and field not in columns.values()),
        None,
    )
    if hides is None:
        return []
    what = f"split_by is {field}, a name that columns gives to '{hides[field]}'"
    return [(what, f"split by {hides[field]}, or by another field")]


def note_unused(
    resolution: Resolution, unused: Iterable[tuple[tuple[str, ...], bool, str]]
) -> None:
    """Note settings that somebody gave and that this run does not read.

    Args:
        unused: (names, whether the run does not read them, why).
    """
    for names, holds, reason in unused:
        given = [name for name in names if resolution.precedence(name) > Precedence.DEFAULT]
        if holds and given:
            named = ", ".join(f"{name} ({resolution.values[name].where})" for name in given)
            resolution.notes.append(f"not used, because {reason}: {named}")


def resolve_validation_data(resolution: Resolution) -> None:
    """`--data` by flag drops the validation data of the files, which belongs to the data that was
    replaced.
    """
    data, valid = resolution.values.get("data"), resolution.values.get("valid_data")
    if data and valid and valid.value and data.precedence >= Precedence.FLAG > valid.precedence:
        resolution.derive("valid_data", [], f"dropped: data is from {data.origin}")
        resolution.notes.append(
            f"valid_data ({valid.where}) is dropped, because data is from {data.origin}; "
            f"give {flag('valid_data')} to validate"
        )
        return
    for path in sorted(_listed(resolution.value("data")) & _listed(resolution.value("valid_data"))):
        resolution.notes.append(
            f"warning: {path} is in data and in valid_data: the validation loss will look too good"
        )


def _listed(value: Any) -> set[str]:
    """The paths of `data` or `valid_data`, as far as they are well-formed."""
    entries = value if isinstance(value, list | tuple) else [value]
    paths = (entry.get("path") if isinstance(entry, dict) else entry for entry in entries)
    return {path for path in paths if isinstance(path, str)}


def resolve_data_weights(resolution: Resolution, *, data: str = "data") -> None:
    """Of weights from different places the higher count, and weights of data that was replaced go
    with it.

    Args:
        data: the setting with the entries that are weighted.
    """
    named, weights = resolution.values.get(data), resolution.values.get("data_weights")
    if not named or not weights or not weights.value:
        return
    if named.precedence >= Precedence.FLAG > weights.precedence:
        resolution.derive("data_weights", [], f"dropped: {data} is from {named.origin}")
        resolution.notes.append(
            f"data_weights ({weights.where}) is dropped, because {data} is from {named.origin}"
        )
    elif weights.precedence > named.precedence and isinstance(named.value, list | tuple | dict):
        given = [named.value] if isinstance(named.value, dict) else list(named.value)
        entries = [_unweighted(entry) for entry in given]
        if entries != given:
            resolution.values[data] = replace(named, value=entries)
            resolution.notes.append(
                f"the weights in {data} ({named.where}) are not used: data_weights is"
                f" {weights.where}"
            )


def _unweighted(entry: Any) -> Any:
    return (
        {name: value for name, value in entry.items() if name != "weight"}
        if isinstance(entry, dict)
        else entry
    )


def _note_unused(resolution: Resolution) -> None:
    follows = bool(resolution.value("keep_best") or resolution.value("early_stopping"))
    adapter = (
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "fused_lora",
        *BEYOND_PLAIN_LORA,
    )
    adam = ("adam_beta1", "adam_beta2", "adam_epsilon")
    curriculum = ("curriculum", "curriculum_seed")
    note_unused(
        resolution,
        (
            (adapter, resolution.value("finetuning") == "full", "finetuning is full"),
            (adam, resolution.value("optimizer") == "adafactor", "optimizer is adafactor"),
            (curriculum, resolution.value("use_curriculum") is False, "use_curriculum is false"),
            (
                ("answer_field", "max_new_tokens"),
                resolution.value("eval_generate") is None,
                "eval_generate is not set",
            ),
            (("best_metric",), not follows, "neither keep_best nor early_stopping is set"),
        ),
    )


RULES_FOR_FINE_TUNING: tuple[Rule, ...] = (
    resolve_batch,
    resolve_length,
    partial(warn_of_long_warmup, total="max_steps", share="0.03 for 3%"),
    resolve_validation_data,
    resolve_data_weights,
    _note_unused,
)
