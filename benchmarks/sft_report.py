"""What benchmarks/sft.py measured: whether the work was equal, tables, and docs/evidence/benchmarks_sft.md.

A contender is ranked only if what entered its model is what the plan says: the same conversations
(tokens and trained places), in as many steps of as many conversations, with as many trained
parameters; the first loss of the same batch equal, gradients there, and the mean loss of the pass
within a hundredth. Any other is shown with what was different.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

OURS, REFERENCE = "ours", "bare"
# relative, where the first batch is the same
FIRST_LOSS_LIMITS = {"float32": 1e-4, "bfloat16": 5e-3}
MEAN_LOSS_LIMIT = 0.01  # relative; the adapters begin with other random numbers
GIGABYTE = 1e9


@dataclass(frozen=True)
class Contender:
    """A library with its own settings on top of what all share (benchmarks/sft_process.py)."""

    library: str
    words: str
    own: dict[str, Any] = field(default_factory=dict)
    # and these, where activations are more than the memory
    on_device: dict[str, Any] = field(default_factory=dict)


# Of a global batch of 8 in a part; 8 B parameters keep 8 MiB for a token of theirs where nothing is
# recomputed.
TWO_AT_ONCE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
FOUR_AT_ONCE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
TRL_TUNED = {"padding_free": True, "max_length": None, "gradient_checkpointing": False}
LLAMAFACTORY_TUNED = {
    "train_sampling_strategy": "group_by_length",
    "disable_shuffling": False,
    "disable_gradient_checkpointing": True,
}
CONTENDERS = {
    OURS: Contender(
        "ours",
        "this package with its defaults: packed, and on a device `micro_batch_size: auto`",
        on_device={"micro_batch_size": "auto"},
    ),
    "ours-checkpointed": Contender(
        "ours", "with gradient checkpointing", {"gradient_checkpointing": True}
    ),
    "ours-padded": Contender("ours", "`packing: false`", {"packing": False}),
    REFERENCE: Contender(
        "bare",
        "minimal packed loop with transformers and peft, as reference; on a device with"
        " torch's varlen attention",
        on_device={"row_tokens": 4096},
    ),
    "bare-checkpointed": Contender(
        "bare", "with gradient checkpointing", {"gradient_checkpointing": True}
    ),
    "trl": Contender(
        "trl", "TRL with its defaults: padded, gradient checkpointing, the loss in chunks"
    ),
    "trl-grouped": Contender(
        "trl", "`trl`, grouped by length", {"train_sampling_strategy": "group_by_length"}
    ),
    "trl-packed": Contender(
        "trl",
        "`packing=True`, one row of the cutoff's length per step",
        {"packing": True, "per_device_train_batch_size": 1},
    ),
    "trl-tuned": Contender(
        "trl",
        "`padding_free=True`, without checkpointing; on a device 4 conversations at a time",
        TRL_TUNED,
        FOUR_AT_ONCE,
    ),
    "trl-liger": Contender(
        "trl",
        "`trl-tuned` with `use_liger_kernel=True`",
        TRL_TUNED | {"use_liger_kernel": True},
        FOUR_AT_ONCE,
    ),
    "llamafactory": Contender(
        "llamafactory", "LLaMA-Factory with its defaults: padded, gradient checkpointing"
    ),
    "llamafactory-packed": Contender(
        "llamafactory",
        "`neat_packing: true`, one row of the cutoff's length per step",
        {"neat_packing": True, "per_device_train_batch_size": 1},
    ),
    "llamafactory-tuned": Contender(
        "llamafactory",
        "grouped by length, without checkpointing; on a device 2 conversations at a time",
        LLAMAFACTORY_TUNED,
        TWO_AT_ONCE,
    ),
    "llamafactory-liger": Contender(
        "llamafactory",
        "`llamafactory-tuned` with `enable_liger_kernel: true`",
        LLAMAFACTORY_TUNED | {"enable_liger_kernel": True},
        TWO_AT_ONCE,
    ),
}
ON_DEVICE_ONLY = ("ours-checkpointed", "bare-checkpointed", "trl-liger", "llamafactory-liger")
# What a run must have done before its time ends comes first.
ON_DEVICE = (
    *(
        OURS,
        REFERENCE,
        "trl",
        "llamafactory",
        "ours-checkpointed",
        "trl-tuned",
        "llamafactory-tuned",
    ),
    *("bare-checkpointed", "trl-liger", "llamafactory-liger"),
)
# Contender and number format. The vocabulary's part leaves LLaMA-Factory out: whole float32 logits
# of a padded batch, their softmax and their gradient are more memory than two cores come with.
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "fp32": tuple((name, "float32") for name in CONTENDERS if name not in ON_DEVICE_ONLY),
    "bf16": tuple(
        (name, "bfloat16")
        for name in CONTENDERS
        if name not in ("ours-padded", "trl-grouped", *ON_DEVICE_ONLY)
    ),
    "vocab": (
        *((name, "float32") for name in (OURS, REFERENCE, "trl", "trl-packed", "trl-tuned")),
        (OURS, "bfloat16"),
    ),
    "device": tuple((name, "bfloat16") for name in ON_DEVICE),
}


@dataclass(frozen=True)
class Line:
    """The repetitions of one contender in one number format, in order."""

    name: str
    dtype: str
    runs: list[dict[str, Any]]
    differences: list[str]

    @property
    def ranked(self) -> bool:
        return not self.differences


def tokens_per_second(run: dict[str, Any]) -> float:
    """Tokens of conversations, padding not counted, over all steps after the first (of fewer steps:
    the last one).
    """
    first = min(run["unmeasured_steps"], len(run["steps"]) - 1)
    return float(
        sum(step["tokens"] for step in run["steps"][first:]) / sum(run["step_seconds"][first:])
    )


def differences(
    run: dict[str, Any], plan: dict[str, Any], reference: dict[str, Any], dtype: str
) -> list[str]:
    """What a run did otherwise than planned or than the reference; nothing means equal work."""
    if "failed" in run:
        return [f"failed: {run['failed']}"]
    return [*_other_inputs(run, plan), *_other_training(run, plan, reference, dtype)]


def _other_inputs(run: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    found = []
    for kind in ("tokens", "supervised"):
        done, planned = (sum(step[kind] for step in side["steps"]) for side in (run, plan))
        if done != planned:
            found.append(
                f"{done:,} {kind} tokens, not {planned:,}".replace(" tokens tokens", " tokens")
            )
    done, planned = (
        Counter(name for step in side["steps"] for name in step["conversations"])
        for side in (run, plan)
    )
    if done != planned:
        found.append(f"{(planned - done).total()} of {planned.total()} conversations were others")
    sizes, planned_sizes = (
        [len(step["conversations"]) for step in side["steps"]] for side in (run, plan)
    )
    if sizes != planned_sizes:
        found.append(f"other global batches: {_batches(sizes)}, not {_batches(planned_sizes)}")
    return found


def _batches(sizes: list[int]) -> str:
    fewest, most = min(sizes, default=0), max(sizes, default=0)
    return (
        f"{len(sizes)} steps of {fewest if fewest == most else f'{fewest} to {most}'} conversations"
    )


def _other_training(
    run: dict[str, Any], plan: dict[str, Any], reference: dict[str, Any], dtype: str
) -> list[str]:
    found = []
    # Beside a reference of another number format, its own is what is held.
    expected = (
        reference
        if reference.get("dtype", dtype) == dtype
        else {**reference, "frozen_dtype": dtype}
    )
    for kind in ("trained_parameters", "threads", "device", "frozen_dtype"):
        if run[kind] != expected[kind]:
            found.append(f"{kind.replace('_', ' ')} {run[kind]}, not {expected[kind]}")
    if len(run["losses"]) != len(run["steps"]):
        found.append(f"{len(run['losses'])} losses of {len(run['steps'])} steps")
    if not run["gradient_norms"] or not all(
        math.isfinite(norm) and norm > 0 for norm in run["gradient_norms"]
    ):
        found.append("a gradient norm that is not above 0")
    if not run["losses"] or "failed" in reference:
        return found
    if run["steps"][0]["conversations"] == plan["steps"][0]["conversations"]:
        found += _other_loss(
            "first loss", run["losses"][0], reference["losses"][0], FIRST_LOSS_LIMITS[dtype]
        )
    return found + _other_loss("mean loss", mean_loss(run), mean_loss(reference), MEAN_LOSS_LIMIT)


def _other_loss(words: str, loss: float, expected: float, limit: float) -> list[str]:
    same = abs(loss - expected) <= limit * abs(expected)  # false for NaN too
    return [] if same else [f"{words} {loss:.5f}, not {expected:.5f}"]


def mean_loss(run: dict[str, Any]) -> float:
    """Over the trained tokens of the pass."""
    weights = [step["supervised"] for step in run["steps"]]
    return sum(loss * weight for loss, weight in zip(run["losses"], weights, strict=False)) / sum(
        weights
    )


def make_lines(part: str, result: dict[str, Any]) -> list[Line]:
    """One line for each contender that ran, fastest first, those of other work below.

    Raises:
        ValueError: the reference has not run, so that nothing can be compared.
    """
    runs, plan = result["runs"], result["plan"]
    reference = next(
        (run for run in runs if run["name"] == REFERENCE and "failed" not in run), None
    )
    if reference is None:
        raise ValueError(f"part {part} has no run of {REFERENCE}")
    lines = []
    for name, dtype in PARTS[part]:
        own = [run for run in runs if (run["name"], run["dtype"]) == (name, dtype)]
        if own:
            found = dict.fromkeys(
                text for run in own for text in differences(run, plan, reference, dtype)
            )
            lines.append(
                Line(name, dtype, sorted(own, key=lambda run: int(run["round"])), list(found))
            )
    return sorted(lines, key=lambda line: (not line.ranked, -_speed(line)))


def _speed(line: Line) -> float:
    speeds = [tokens_per_second(run) for run in line.runs if "failed" not in run]
    return statistics.median(speeds) if speeds else 0.0


def make_table(part: str, result: dict[str, Any]) -> str:
    """The part's table. Speeds are medians of the repetitions; ratios are of runs of the same
    round.
    """
    lines = make_lines(part, result)
    peak = result["machine"].get("peak_flops")
    heads = ["system", "dtype", "rounds", "tok/s", "speedup of ours (each round)"]
    heads += ["MFU"] * bool(peak) + [
        "computed per token",
        "to the end of the first step, s",
        "peak, GB",
    ]
    heads += (
        ["first loss", "mean loss", "smallest gradient norm"]
        + ["attention"] * bool(peak)
        + ["work"]
    )
    ours = {
        (line.dtype, run["round"]): tokens_per_second(run)
        for line in lines
        for run in line.runs
        if line.name == OURS and line.ranked
    }
    rows = [_row(line, ours, result["plan"], peak) for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def _row(
    line: Line, ours: dict[tuple[str, int], float], plan: dict[str, Any], peak: float | None
) -> list[str]:
    runs = [run for run in line.runs if "failed" not in run]
    verdict = "equal" if line.ranked else f"not ranked: {'; '.join(line.differences)}"
    if not runs:
        return [line.name, line.dtype, "0", *["-"] * (8 + 2 * bool(peak)), verdict]
    beside = [(run, ours.get((line.dtype, run["round"]))) for run in runs]
    ratios = [speed / tokens_per_second(run) for run, speed in beside if speed is not None]
    ratio = (
        f"{statistics.median(ratios):.2f} ({', '.join(f'{one:.2f}' for one in ratios)})"
        if ratios
        else "-"
    )
    computed = sum(step["computed"] for step in runs[0]["steps"]) / sum(
        step["tokens"] for step in runs[0]["steps"]
    )
    mfu = [f"{_speed(line) * plan['flops_per_token'] / peak:.1%}"] if peak else []
    return [
        line.name,
        line.dtype,
        str(len(runs)),
        f"{_speed(line):,.0f}",
        # A run of other work has a speed, but no place beside ours.
        ratio if line.ranked and line.name != OURS else "-",
        *mfu,
        f"{computed:.2f}",
        f"{statistics.median(run['start_seconds'] for run in runs):.1f}",
        f"{max(run['peak_bytes'] for run in runs) / GIGABYTE:.2f}",
        f"{runs[0]['losses'][0]:.4f}" if runs[0]["losses"] else "-",
        f"{mean_loss(runs[0]):.4f}",
        f"{min((norm for run in runs for norm in run['gradient_norms']), default=0):.2g}",
        *([f"{runs[0]['attention']}{', recomputed' * runs[0]['recomputes']}"] if peak else []),
        verdict,
    ]
