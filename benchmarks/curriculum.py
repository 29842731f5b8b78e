"""The staged curriculum against the same samples in uniform order.

    python benchmarks/curriculum.py                    # six runs of about a minute each on one core
    python benchmarks/curriculum.py --seeds 1 2 3 4 5 --steps 300 --work-dir runs/curriculum

For each seed two runs differ in one thing, the order of the samples. One has the default stages. The other has one
stage for the whole run, whose mix is the number of samples of each difficulty that the first run took: so every step
has the run's overall mix, and as the order within a difficulty is the same, both runs take the same samples equally
often. That is checked on what the runs logged, sample by sample. Then both are evaluated on the held-out records by
`python -m finetune eval`. Runs that are done are not made again, so the same command continues after a stop. The table
goes into docs/curriculum_benchmark.md whichever wins.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "curriculum_benchmark.md"
DATA = ROOT / "data_samples"
ARMS = ("curriculum", "uniform")


def main() -> int:
    options = _options()
    work = options.work_dir
    work.mkdir(parents=True, exist_ok=True)
    pairs, drawn = [], {}
    for seed in options.seeds:
        staged = _train(work, "curriculum", seed, options, stages=None)
        drawn = _taken_per_difficulty(staged)
        uniform = _train(work, "uniform", seed, options, stages=[{"until": 1.0, "mix": list(drawn.values())}])
        _check_same_samples(staged, uniform)
        pairs.append((staged, uniform))
    results = {arm: [_evaluate(pair[number]) for pair in pairs] for number, arm in enumerate(ARMS)}
    base = _evaluate(DATA / "tiny-qwen3")
    text = _document(options, drawn, base, results)
    options.document.write_text(text, encoding="utf-8")
    print(text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--work-dir", type=Path, default=ROOT / "runs" / "curriculum_benchmark")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    return parser.parse_args()


def _train(work: Path, arm: str, seed: int, options: argparse.Namespace, stages: list[dict] | None) -> Path:
    """The folder of a finished run."""
    folder = work / f"{arm}-{seed}"
    settings: dict[str, Any] = {
        "model": str(DATA / "tiny-qwen3"),
        "data": str(DATA / "train.jsonl"),
        "valid_data": str(DATA / "valid.jsonl"),
        "output_dir": str(folder),
        "max_steps": options.steps,
        "learning_rate": options.learning_rate,
        "micro_batch_size": 4,
        "global_batch_size": 32,
        "seed": seed,
        "curriculum_seed": seed,
        "device_type": "cpu",
        "save_steps": 0,
        "report_to": "none",
        "log_samples": True,
    }
    if stages is not None:
        settings["curriculum"] = {"stages": stages}
    config = work / f"{arm}-{seed}.json"
    config.write_text(json.dumps(settings), encoding="utf-8")
    print(f"{arm}, seed {seed} ...", file=sys.stderr, flush=True)
    _run("finetune.sft", "--config", str(config))
    return folder


def _run(module: str, *arguments: str) -> str:
    """What a command prints; its failure ends the benchmark with its words."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def _samples(run: Path) -> Counter[int]:
    """How often the run took each record, from its own log."""
    lines = (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return Counter(record for line in lines for record in json.loads(line)["ids"])


def _difficulties() -> list[str]:
    return [json.loads(line)["difficulty"] for line in (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()]


def _taken_per_difficulty(run: Path) -> dict[str, int]:
    difficulties, counts = _difficulties(), Counter[str]()
    for record, times in _samples(run).items():
        counts[difficulties[record]] += times
    return {name: counts[name] for name in ("explain", "reasoning", "topology")}


def _check_same_samples(staged: Path, uniform: Path) -> None:
    first, second = _samples(staged), _samples(uniform)
    if first != second:
        different = sum((first - second).values())
        raise SystemExit(f"{staged.name} and {uniform.name} differ in {different} samples: the comparison is void")
    if (staged / "samples.jsonl").read_bytes() == (uniform / "samples.jsonl").read_bytes():
        raise SystemExit(f"{staged.name} and {uniform.name} took their samples in the same order: nothing to compare")


def _evaluate(model: Path) -> dict[str, Any]:
    """What `eval --json` says of one model, kept beside the run."""
    kept = model.parent / f"{model.name}.eval.json" if (model / "samples.jsonl").exists() else None
    if kept is None or not kept.exists():
        print(f"eval {model.name} ...", file=sys.stderr, flush=True)
        said = _run(
            "finetune", "eval", "--json", "--device-type", "cpu", "--max-new-tokens", "250",
            "--model", str(model), "--data", str(DATA / "valid.jsonl"),
        )  # fmt: skip
        if kept is None:
            return json.loads(said)["models"][0]
        kept.write_text(said, encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))["models"][0]


def _document(
    options: argparse.Namespace, drawn: dict[str, int], base: dict[str, Any], results: dict[str, list[dict[str, Any]]]
) -> str:
    total = sum(drawn.values())
    mix = ", ".join(f"{count:,} {level} ({count / total:.0%})" for level, count in drawn.items())
    levels = list(results["curriculum"][0]["levels"])
    lines = [
        "# Curriculum against uniform order",
        "",
        "Written by `python benchmarks/curriculum.py`; do not edit.",
        "",
        f"LoRA on `data_samples/tiny-qwen3`, {options.steps} steps of 32 samples of `data_samples/train.jsonl`, "
        f"learning rate {options.learning_rate:g}, seeds {', '.join(map(str, options.seeds))}. Per seed two runs take "
        f"the same samples equally often (checked by record number): {mix}. With the curriculum they come in the "
        "default stages; uniform, every step has that overall mix. Held-out records: `data_samples/valid.jsonl`, "
        "50 per difficulty. "
        "Mean ± standard deviation over the seeds; differences are taken seed by seed and signed so that above zero "
        "the curriculum is better.",
        "",
    ]
    for title, key, digits in (("Loss per target", "loss", 4), ("Exact answers, of 50 a difficulty", "correct", 1)):
        lines += [f"## {title}", "", "| difficulty | base | curriculum | uniform | curriculum better by | verdict |"]
        lines.append("|---|---|---|---|---|---|")
        for level in [*levels, None]:
            if key == "correct" and not _of(base, level)["answered"]:
                continue
            lines.append(_line(level, key, digits, base, results))
        lines.append("")
    lines += [
        "A verdict is given only where the mean difference is more than twice its standard error; else the runs cannot "
        "tell the two apart. One tiny model and one data set: it says little about others.",
        "",
    ]
    return "\n".join(lines)


def _of(model: dict[str, Any], level: str | None) -> dict[str, Any]:
    return model["overall"] if level is None else model["levels"][level]


def _line(
    level: str | None, key: str, digits: int, base: dict[str, Any], results: dict[str, list[dict[str, Any]]]
) -> str:
    values = {arm: [_of(model, level)[key] for model in results[arm]] for arm in ARMS}
    sign = -1 if key == "loss" else 1
    gains = [sign * (ours - theirs) for ours, theirs in zip(values["curriculum"], values["uniform"], strict=True)]
    cells = [level or "all", f"{_of(base, level)[key]:.{digits}f}"]
    cells += [_spread(values[arm], digits) for arm in ARMS]
    return f"| {' | '.join([*cells, _spread(gains, digits), _verdict(gains)])} |"


def _spread(values: list[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def _verdict(gains: list[float]) -> str:
    if len(gains) < 2:
        return "one seed: none"
    error = statistics.stdev(gains) / len(gains) ** 0.5
    mean = statistics.fmean(gains)
    if abs(mean) <= 2 * error or mean == 0:
        return "not told apart"
    return "curriculum" if mean > 0 else "uniform"


if __name__ == "__main__":
    sys.exit(main())
