"""Numbers of a pretraining run that depend on one another; see `config_rules` for what a rule is."""

from __future__ import annotations

from finetune.config.rules import DEFAULT_LEVEL, Rule, Settling, divisors_around, flag, multiples_around, processes
from finetune.errors import ConfigError

DEVICE, ACCUMULATION, TOTAL, LENGTH = (
    "device_batch_size",
    "gradient_accumulation_steps",
    "total_batch_size",
    "max_seq_len",
)


def settle_tokens(settling: Settling) -> None:
    """Total batch in tokens = device batch x sequence x processes x accumulation; what is open is derived.

    The total batch is the training itself and accumulation only how it is made; so accumulation is derived, unless it
    was given by a source that comes before the total's (an old script with --batch_size and
    --gradient_accumulation_steps and no total).
    """
    device, total, length = (settling.value(name) for name in (DEVICE, TOTAL, LENGTH))
    accumulation = settling.value(ACCUMULATION)
    if not all(type(value) is int and value >= 1 for value in (device, total, length)):
        return
    if accumulation is not None and (type(accumulation) is not int or accumulation < 1):
        return
    per_micro_step = device * length * settling.world_size
    if accumulation is not None and accumulation * per_micro_step != total:
        if settling.level(ACCUMULATION) > settling.level(TOTAL):
            _derive_total(settling, accumulation * per_micro_step)
            return
        if settling.level(ACCUMULATION) == settling.level(TOTAL):
            _disagree(settling, accumulation * per_micro_step)
            return
    if total % per_micro_step:
        _indivisible(settling, per_micro_step)
        return
    derived = total // per_micro_step
    given = settling.values.get(ACCUMULATION)
    replaced = f" instead of {given.value} ({given.where})" if given and given.value not in (None, derived) else ""
    settling.derive(ACCUMULATION, derived, f"derived from {TOTAL}, {DEVICE}, {LENGTH} and processes")
    settling.notes.append(
        f"total batch size {total:,} => gradient accumulation steps: {derived}{replaced} "
        f"({device} windows x {length:,} tokens x {processes(settling.world_size)} at a time)"
    )


def _derive_total(settling: Settling, total: int) -> None:
    before = settling.values[TOTAL]
    settling.derive(TOTAL, total, f"derived from {DEVICE}, {ACCUMULATION}, {LENGTH} and processes")
    settling.notes.append(
        f"{TOTAL} {total:,} instead of {before.value:,} ({before.where}): {DEVICE} {settling.value(DEVICE)} x "
        f"{LENGTH} {settling.value(LENGTH)} x {processes(settling.world_size)} x {ACCUMULATION} "
        f"{settling.value(ACCUMULATION)}; give {flag(TOTAL)} for the same training on any number of processes"
    )


def _disagree(settling: Settling, product: int) -> None:
    settling.problems.append(
        ConfigError(
            f"{DEVICE} {settling.value(DEVICE)} x {LENGTH} {settling.value(LENGTH)} x "
            f"{processes(settling.world_size)} x {ACCUMULATION} {settling.value(ACCUMULATION)} is {product}, "
            f"not {TOTAL} {settling.value(TOTAL)}",
            ", ".join(dict.fromkeys(settling.values[name].where for name in (TOTAL, ACCUMULATION))),
            f"nearest that agrees: {TOTAL} {product}; or leave {ACCUMULATION} out, it is derived",
        )
    )


def _indivisible(settling: Settling, per_micro_step: int) -> None:
    device, total, length = (settling.value(name) for name in (DEVICE, TOTAL, LENGTH))
    fix = f"nearest that agree: {TOTAL} {multiples_around(total, per_micro_step)}"
    shares = total // (length * settling.world_size)
    if total % (length * settling.world_size) == 0:
        fix += f", or {DEVICE} {divisors_around(shares, device)}"
    settling.problems.append(
        ConfigError(
            f"{TOTAL} {total} is not a multiple of {DEVICE} {device} x {LENGTH} {length} x "
            f"{processes(settling.world_size)} = {per_micro_step}",
            ", ".join(dict.fromkeys(settling.values[name].where for name in (TOTAL, DEVICE, LENGTH))),
            fix,
        )
    )


def settle_reporting(settling: Settling) -> None:
    """--use_wandb is --report-to wandb; a run named dummy is nanochat's word for no wandb."""
    if settling.value("wandb_run_name") == "dummy":
        settling.derive("use_wandb", False, "derived: the run is named dummy")
    if settling.value("use_wandb") is not True:
        return
    trackers = settling.value("report_to")
    if settling.level("use_wandb") > settling.level("report_to"):
        settling.derive("report_to", ["wandb"], "derived from use_wandb")
    elif "wandb" not in ([trackers] if isinstance(trackers, str) else trackers or ()):
        places = ", ".join(settling.values[name].where for name in ("use_wandb", "report_to"))
        settling.problems.append(
            ConfigError(f"use_wandb is true, and report_to is {trackers}", places, "leave one of the two out")
        )


def warn_of_long_warmup(settling: Settling) -> None:
    """Warm-up and warm-down that do not both fit are allowed, and said."""
    warmup, steps = settling.value("warmup_steps"), settling.value("num_iterations")
    if type(warmup) is int and type(steps) is int and warmup >= steps >= 1:
        settling.notes.append(
            f"warning: warmup_steps {warmup} is not below num_iterations {steps}: the learning rate never gets to its "
            f"top; set {flag('warmup_steps')} to 0.1 for a tenth of the steps"
        )


def say_what_is_unused(settling: Settling) -> None:
    """Settings that somebody gave and that this run does not read."""
    single = settling.value("learning_rate") is not None
    unused = [
        (("matrix_lr", "embedding_lr", "unembedding_lr"), single, "learning_rate is the rate of everything"),
        (("world_size",), settling.value("distributed") is False, "distributed is false"),
        (("target_param_data_ratio",), settling.value("num_iterations") is not None, "num_iterations is set"),
        (("cache_dir", "preprocessing_num_workers"), True, "token files need no preparation; see finetune prepare"),
    ]
    for names, holds, reason in unused:
        given = [name for name in names if settling.level(name) > DEFAULT_LEVEL and name not in settling.derived]
        if holds and given:
            places = ", ".join(f"{name} ({settling.values[name].where})" for name in given)
            settling.notes.append(f"not used, because {reason}: {places}")


RULES_FOR_PRETRAINING: tuple[Rule, ...] = (
    settle_tokens,
    settle_reporting,
    warn_of_long_warmup,
    say_what_is_unused,
)
