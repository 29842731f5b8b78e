"""The staged curriculum against the same samples in uniform order, and in the stages' reverse.

    python benchmarks/curriculum.py                    # 45 runs, about an hour on one core
    python benchmarks/curriculum.py --sizes 167 --seeds 1 2 3 --work-dir runs/curriculum

For each size of the data and each seed three runs differ in one thing, the order of the samples.
`staged` has the default stages; `reversed` has them from the last to the first; `uniform` has one
stage for the whole run, whose mix is the number of samples of each difficulty that the first run
took. As the order within a difficulty is the same, all take the same samples equally often. That is
checked on what the runs logged, sample by sample; where a step's share falls between two numbers,
reversed may round a sample of each difficulty the other way. All are evaluated on the held-out
records by `python -m finetune eval`. What is done is not done again, so the same command continues
after a stop. The tables go into docs/evidence/curriculum_benchmark.md whichever wins.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from dpo import records, run

import finetune

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "evidence" / "curriculum_benchmark.md"
DATA = ROOT / "data_samples"
MODEL = DATA / "tiny-qwen3"
ARMS = ("staged", "uniform", "reversed")
LEVELS = ("explain", "reasoning", "topology")
BATCH, EPOCHS = 16, 3
# Two-sided 95% of Student's t, by degrees of freedom.
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
Stages = list[dict[str, Any]]


def main() -> int:
    options = _options()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    runs = {
        size: [_train_arms(size, seed, options) for seed in options.seeds] for size in options.sizes
    }
    results = {size: _evaluate(size, of_size, options) for size, of_size in runs.items()}
    text = _document(options, runs, results)
    options.document.write_text(text, encoding="utf-8")
    print(text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44, 45, 46])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[167, 500, 1500], help="records of train.jsonl"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "bench-curriculum")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    return parser.parse_args()


# ---------------------------------------------------------------------- runs


def _train_arms(size: int, seed: int, options: argparse.Namespace) -> dict[str, Path]:
    from finetune.config.fields import DEFAULT_STAGES

    stages = [stage.model_dump() for stage in DEFAULT_STAGES]
    staged = _train("staged", size, seed, options, stages)
    overall = list(_taken_per_difficulty(staged).values())
    uniform = _train("uniform", size, seed, options, [{"until": 1.0, "mix": overall}])
    backwards = _train("reversed", size, seed, options, _reversed(stages))
    _check_same_samples(staged, uniform, rounding=0)
    _check_same_samples(staged, backwards, rounding=1)
    return dict(zip(ARMS, (staged, uniform, backwards), strict=True))


def _reversed(stages: Stages) -> Stages:
    """The same mixes for as long, from the last to the first.

    Raises:
        SystemExit: a stage ramps, which has no reverse.
    """
    if any(stage["ramp"] != "step" for stage in stages):
        raise SystemExit("the default stages ramp: their reverse is not defined here")
    begins = [0.0, *(stage["until"] for stage in stages[:-1])]
    return [
        {"until": round(1.0 - begin, 6), "mix": list(stage["mix"])}
        for begin, stage in zip(reversed(begins), reversed(stages), strict=True)
    ]


def _train(arm: str, size: int, seed: int, options: argparse.Namespace, stages: Stages) -> Path:
    """The folder of a finished run."""
    data = options.work_dir / f"train-{size}.jsonl"
    # the file is shuffled
    lines = (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    data.write_text("".join(lines[:size]), encoding="utf-8")
    folder = options.work_dir / f"{arm}-{size}-{seed}"
    if (folder / "adapter_model.safetensors").exists():
        return folder
    settings: dict[str, Any] = {
        "model": str(MODEL),
        "data": str(data),
        "output_dir": str(folder),
        "max_steps": math.ceil(EPOCHS * size / BATCH),
        "learning_rate": options.learning_rate,
        "global_batch_size": BATCH,
        "seed": seed,
        "curriculum_seed": seed,
        "curriculum": {"stages": stages},
        "device_type": "cpu",
        "save_steps": 0,
        "report_to": "none",
        "log_samples": True,
    }
    print(f"{folder.name} ...", file=sys.stderr, flush=True)
    finetune.run(settings)
    return folder


def _samples(folder: Path) -> Counter[int]:
    """How often the run took each record, from its own log."""
    return Counter(record for step in records(folder / "samples.jsonl") for record in step["ids"])


def _difficulties() -> list[str]:
    return [record["difficulty"] for record in records(DATA / "train.jsonl")]


def _taken_per_difficulty(folder: Path) -> dict[str, int]:
    difficulties, counts = _difficulties(), Counter[str]()
    for record, times in _samples(folder).items():
        counts[difficulties[record]] += times
    return {name: counts[name] for name in LEVELS}


def _check_same_samples(first: Path, second: Path, rounding: int) -> None:
    """Raise SystemExit where the runs took other samples, beyond so many of a difficulty, or in one
    order.
    """
    taken, other = _samples(first), _samples(second)
    different = max((taken - other).total(), (other - taken).total())
    if different > rounding * len(LEVELS):
        raise SystemExit(
            f"{first.name} and {second.name} differ in {different} samples: the comparison is void"
        )
    if (first / "samples.jsonl").read_bytes() == (second / "samples.jsonl").read_bytes():
        raise SystemExit(
            f"{first.name} and {second.name} took their samples in the same order: nothing to"
            " compare"
        )


def _evaluate(
    size: int, runs: list[dict[str, Path]], options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """What `eval --json` says of the runs of one size, by arm in the order of the seeds, and of the
    base.
    """
    kept = options.work_dir / f"eval-{size}-{'-'.join(map(str, options.seeds))}.json"
    folders = [str(of_seed[arm]) for arm in ARMS for of_seed in runs]
    if not kept.exists():
        print(f"eval of {len(folders)} adapters ...", file=sys.stderr, flush=True)
        said = run(
            "-m", "finetune", "eval",
            "--json", "--device-type", "cpu", "--max-new-tokens", "120", "--batch-size", "100",
            "--model", str(MODEL), "--base", "--adapter", *folders, "--data", str(DATA / "valid.jsonl"),
        )  # fmt: skip
        kept.write_text(said, encoding="utf-8")
    base, *adapters = json.loads(kept.read_text(encoding="utf-8"))["models"]
    count = len(runs)
    return {
        "base": [base],
        **{arm: adapters[n * count : (n + 1) * count] for n, arm in enumerate(ARMS)},
    }


# ---------------------------------------------------------------------- page


def _document(options: argparse.Namespace, runs: dict[int, Any], results: dict[int, Any]) -> str:
    lines = [
        "# Curriculum against other orders",
        "",
        "This page is written by `python benchmarks/curriculum.py`. Do not edit it.",
        "",
        wrapped(
            "The task is LoRA on `data_samples/tiny-qwen3` with the first records of"
            f" `data_samples/train.jsonl`. Each run takes as many steps of {BATCH} samples as"
            f" {EPOCHS} passes have, at learning rate {options.learning_rate:g}, with seeds"
            f" {', '.join(map(str, options.seeds))}. Per seed, three runs take the same samples"
            " equally often:"
        ),
        "",
        "- `staged`: in the default stages",
        "- `uniform`: with the overall mix of the stages in every step",
        "- `reversed`: in the stages from the last to the first",
        "",
        wrapped(
            "Record numbers confirm the equal counts; `reversed` may round one sample of a"
            " difficulty the other way. The held-out records are `data_samples/valid.jsonl`, 50"
            " per difficulty. Differences are computed seed by seed, with their 95% interval"
            " (Student's t). Above zero the stages are better."
        ),
        "",
    ]
    for size, of_size in runs.items():
        taken = _taken_per_difficulty(of_size[0]["staged"])
        mix = ", ".join(
            f"{count:,} {level} ({count / sum(taken.values()):.0%})"
            for level, count in taken.items()
        )
        steps = sum(taken.values()) // BATCH
        lines += [
            f"## {size:,} records, {steps} steps, {len(of_size)} seeds",
            "",
            f"Samples taken: {mix}.",
            "",
        ]
        for title, key, digits in (
            ("loss per target", "loss", 4),
            ("exact answers of 50", "correct", 1),
        ):
            lines += [
                f"| {title} | base | staged | uniform | reversed | staged beats uniform by | and"
                " reversed by |"
            ]
            lines.append("|---|---|---|---|---|---|---|")
            lines += [
                _line(level, key, digits, results[size])
                for level in (*LEVELS, None)
                if key == "loss" or _of(results[size]["base"][0], level)["answered"]
            ]
            lines.append("")
    lines += [
        wrapped(
            "If the interval includes 0, the difference is not significant (marked ~). These"
            " results are from one small model and one type of data."
        ),
        "",
    ]
    return "\n".join(lines)


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _of(model: dict[str, Any], level: str | None) -> dict[str, Any]:
    return model["overall"] if level is None else model["levels"][level]


def _line(
    level: str | None, key: str, digits: int, results: dict[str, list[dict[str, Any]]]
) -> str:
    values = {arm: [_of(model, level)[key] for model in models] for arm, models in results.items()}
    sign = -1 if key == "loss" else 1
    cells = [
        level or "all",
        *(f"{statistics.fmean(values[arm]):.{digits}f}" for arm in ("base", *ARMS)),
    ]
    for other in ("uniform", "reversed"):
        gains = [
            sign * (ours - theirs)
            for ours, theirs in zip(values["staged"], values[other], strict=True)
        ]
        cells.append(_interval(gains, digits))
    return f"| {' | '.join(cells)} |"


def _interval(gains: list[float], digits: int) -> str:
    mean = statistics.fmean(gains)
    if len(gains) < 2:
        return f"{mean:+.{digits}f}"
    half = T95.get(len(gains) - 1, 2.0) * statistics.stdev(gains) / len(gains) ** 0.5
    return f"{mean:+.{digits}f} ± {half:.{digits}f}{' ~' if abs(mean) <= half else ''}"


if __name__ == "__main__":
    sys.exit(main())
