"""Training on preferences: what it brings on the bundled pairs, and how fast it is beside TRL's
DPOTrainer.

    python benchmarks/dpo.py learning         # fine-tuning, then pairs or more fine-tuning, three
    seeds python benchmarks/dpo.py speed            # in CPU time of one thread, which other work
    hardly changes python benchmarks/dpo.py page             # docs/evidence/preferences_benchmark.md of what
    there is

learning: the bundled base is fine-tuned on train.jsonl. From there two runs a seed take the same
records in the same steps: one trains on pairs, the other fine-tunes on their chosen answers, so
that both see the same questions and right answers. Each at that of three rates with which the first
seed answers most questions of preference_valid.jsonl. Both answer the held-out records, whose
questions are in no pair.

speed: both sides train one pass over the same pairs in the same order, LoRA on one random model,
each in a process of its own, in turn. What entered the models is compared document by document, the
first step's loss and log-probabilities by number; a contender whose work differs ends the
benchmark.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data_samples"
DOCUMENT = ROOT / "docs" / "evidence" / "preferences_benchmark.md"
START_STEPS, START_RATE = 300, 1e-3
RATES = {"dpo": (3e-4, 1e-4, 3e-5), "sft": (1e-3, 3e-4, 1e-4)}
SEEDS = (42, 43, 44)
PAIRS, BATCH, RANK = 48, 8, 16
MODEL = {"shape": "24m", "weights": "float32", "vocabulary": 16384, "cutoff_len": 1024, "seed": 7}
CONTENDERS: dict[str, dict[str, Any]] = {
    "ours": {},
    "trl": {},
    "trl-tuned": {"gradient_checkpointing": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("learning", "speed", "page"))
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "bench-dpo")
    parser.add_argument("--steps", type=int, default=40, help="of learning, behind fine-tuning")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of speed")
    options = parser.parse_args()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    if options.part == "learning":
        measure_learning(options.work_dir, options.steps)
    elif options.part == "speed":
        measure_speed(options.work_dir, options.repeats)
    DOCUMENT.write_text(page(options.work_dir), encoding="utf-8")
    print(DOCUMENT.read_text(encoding="utf-8"))


def run(*arguments: str) -> str:
    """What a command prints; its failure ends the benchmark with its words."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(arguments)}\nexit code {done.returncode}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_records(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


# ---------------------------------------------------------------------- learning


def measure_learning(work: Path, steps: int) -> None:
    """Runs that are done are not made again."""
    chosen = [{**row, "output": row["chosen"]} for row in records(DATA / "preference_train.jsonl")]
    for row in chosen:
        del row["chosen"], row["rejected"], row["topic"]
    data = {
        "dpo": DATA / "preference_train.jsonl",
        "sft": write_records(work / "chosen.jsonl", chosen),
    }
    start = work / "start"
    train(
        "sft", start, DATA / "tiny-qwen3", DATA / "train.jsonl", START_STEPS, START_RATE, SEEDS[0]
    )
    tried = {kind: {} for kind in RATES}
    for kind, rates in RATES.items():
        for rate in rates:
            model = work / f"{kind}-{rate:g}-{SEEDS[0]}"
            train(kind, model, start, data[kind], steps, rate, SEEDS[0])
            tried[kind][rate] = sum(answered(model, "preference_valid").values())
    rates = {kind: max(found, key=found.__getitem__) for kind, found in tried.items()}
    found: dict[str, Any] = {
        "steps": steps,
        "rates": rates,
        "tried": tried,
        "start": answered(start),
    }
    for kind, rate in rates.items():
        models = [work / f"{kind}-{rate:g}-{seed}" for seed in SEEDS]
        for seed, model in zip(SEEDS, models, strict=True):
            train(kind, model, start, data[kind], steps, rate, seed)
        found[kind] = [answered(model) for model in models]
    for seed in SEEDS:
        taken = {
            (work / f"{kind}-{rates[kind]:g}-{seed}" / "samples.jsonl").read_text("utf-8")
            for kind in RATES
        }
        if len(taken) > 1:
            raise SystemExit(
                f"seed {seed}: the two kinds of runs did not take the same records in the same"
                " steps"
            )
    (work / "learning.json").write_text(json.dumps(found), encoding="utf-8")


def train(
    kind: str, folder: Path, model: Path, data: Path, steps: int, rate: float, seed: int
) -> None:
    if (folder / "model.safetensors").exists():
        return
    print(f"{folder.name} ...", file=sys.stderr, flush=True)
    settings = {
        "model": str(model),
        "data": str(data),
        "output_dir": str(folder),
        "finetuning": "full",
        "max_steps": steps,
        "learning_rate": rate,
        "global_batch_size": 32,
        "micro_batch_size": 16,
        "seed": seed,
        "curriculum_seed": seed,
        "device_type": "cpu",
        "save_steps": 0,
        "report_to": "none",
        "log_samples": True,
        "use_curriculum": "difficulty" in records(data)[0],
    }
    if kind == "dpo":
        settings["sft_weight"] = 1.0
    config = folder.with_suffix(".json")
    config.write_text(json.dumps(settings), encoding="utf-8")
    run("-m", f"finetune.{kind}", "--config", str(config))


def answered(model: Path, data: str = "valid") -> dict[str, int]:
    """Right answers to the questions of a bundled file, by difficulty where it has any."""
    kept = model.with_name(f"{model.name}.{data}.json")
    if not kept.exists():
        rows, questions = records(DATA / f"{data}.jsonl"), model.with_name(f"{data}.jsonl")
        write_records(
            questions, [{**row, "output": row.get("chosen", row.get("output"))} for row in rows]
        )
        options = (
            "--json",
            "--device-type",
            "cpu",
            "--max-new-tokens",
            "250",
            "--batch-size",
            "100",
        )
        kept.write_text(
            run(
                "-m", "finetune", "eval", "--model", str(model), "--data", str(questions), *options
            ),
            encoding="utf-8",
        )
    found = json.loads(kept.read_text(encoding="utf-8"))["models"][0]
    levels = found["levels"] or {"all": found["overall"]}
    return {name: level["correct"] for name, level in levels.items() if level["answered"]}


# ---------------------------------------------------------------------- speed


def measure_speed(work: Path, repeats: int) -> None:
    from sft_inputs import write_model

    model = work / "model"
    if not model.exists():
        write_model(model, MODEL, "cpu")
    rows = records(DATA / "preference_train.jsonl")[:PAIRS]
    data, ordered = write_records(work / "pairs.jsonl", rows), work / "ordered.jsonl"
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(repeats):
        for name in CONTENDERS:
            print(f"{name}, round {number + 1} ...", file=sys.stderr, flush=True)
            output = work / f"{name}-{number}"
            shutil.rmtree(output, ignore_errors=True)  # a run would go on from it
            asked = {
                "library": name.partition("-")[0],
                "own": CONTENDERS[name],
                "model": str(model),
                "data": str(data),
                "ordered": str(ordered),
                "output": str(output),
                "result": str(work / f"{name}-{number}.result.json"),
                "batch": BATCH,
                "rank": RANK,
                "learning_rate": 5e-6,
                "threads": 1,
            }
            given = work / f"{name}-{number}.work.json"
            given.write_text(json.dumps(asked), encoding="utf-8")
            run("benchmarks/dpo_process.py", str(given))
            results[name].append(json.loads(Path(asked["result"]).read_text(encoding="utf-8")))
            if name == "ours":
                write_ordered(ordered, rows, output)
    for name, rounds in results.items():
        for one in rounds:
            check_equal(name, one, results["ours"][0])
    for one in (one for rounds in results.values() for one in rounds):
        one["computed"] = [step["computed"] for step in one.pop("steps")]
    (work / "speed.json").write_text(json.dumps(results), encoding="utf-8")


def write_ordered(path: Path, rows: list[dict[str, Any]], run_folder: Path) -> None:
    """The pairs as TRL reads them, in the order in which our run took them."""
    lines = (run_folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    order = [record for line in lines for record in json.loads(line)["ids"]]
    if sorted(order) != list(range(len(rows))):
        raise SystemExit("our run did not train on each pair once")
    made = []
    for record in order:
        row = rows[record]
        question = "\n".join(filter(None, (row["instruction"], row["input"])))
        sides = {
            side: [{"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")
        }
        made.append({"prompt": [{"role": "user", "content": question}], **sides})
    write_records(path, made)


def check_equal(name: str, one: dict[str, Any], ours: dict[str, Any]) -> None:
    """The same documents with the same trained tokens in every step, and the same numbers at the
    first.
    """
    documents, expected = (
        [step["documents"] for step in result["steps"]] for result in (one, ours)
    )
    if documents != expected:
        raise SystemExit(f"{name}: other documents entered the model than ours")
    if one["trained_parameters"] != ours["trained_parameters"]:
        raise SystemExit(f"{name}: trains {one['trained_parameters']:,} parameters")
    loss, norm, *log_probs = one["logged"][0]
    if abs(loss - math.log(2)) > 1e-4 or not min(step[1] for step in one["logged"]) > 0:
        raise SystemExit(f"{name}: the first loss is {loss}, not log 2, or a gradient norm is 0")
    for value, reference in zip(log_probs, ours["logged"][0][2:], strict=True):
        if abs(value - reference) > 1e-4 * abs(reference):
            raise SystemExit(
                f"{name}: the first log-probabilities are {log_probs}, ours {ours['logged'][0][2:]}"
            )


# ---------------------------------------------------------------------- page


def page(work: Path) -> str:
    lines = [
        "# Preferences, measured",
        "",
        "This page is written by `python benchmarks/dpo.py`. Do not edit it.",
        "",
    ]
    if (work / "learning.json").exists():
        lines += learning_lines(json.loads((work / "learning.json").read_text(encoding="utf-8")))
    if (work / "speed.json").exists():
        lines += speed_lines(json.loads((work / "speed.json").read_text(encoding="utf-8")))
    return "\n".join(lines) + "\n"


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def learning_lines(found: dict[str, Any]) -> list[str]:
    totals = {kind: [sum(one.values()) for one in found[kind]] for kind in RATES}
    gains = [ours - theirs for ours, theirs in zip(totals["dpo"], totals["sft"], strict=True)]
    mean, right = statistics.fmean(gains), statistics.fmean(totals["dpo"] + totals["sft"])
    # Of the seeds, and of 100 questions that are answered right so often.
    error = math.hypot(
        statistics.stdev(gains) / len(gains) ** 0.5, (right * (100 - right) / 100) ** 0.5
    )
    verdict = "the difference is not significant"
    if abs(mean) > 2 * error:
        verdict = "pairs win" if mean > 0 else "fine-tuning wins"
    tried = "; ".join(
        f"{kind} {', '.join(f'{right} at {rate}' for rate, right in found['tried'][kind].items())}"
        for kind in RATES
    )
    lines = [
        "## After fine-tuning",
        "",
        wrapped(
            f"The start is `data_samples/tiny-qwen3` with all parameters trained for {START_STEPS}"
            f" steps of 32 records from `train.jsonl` at learning rate {START_RATE:g}. All seeds"
            f" ({', '.join(map(str, SEEDS))}) continue from this start for {found['steps']} steps"
            " of 32, with the same records in the same steps:"
        ),
        "",
        f"- **pairs**: `preference_train.jsonl` (dpo, beta 0.1, `--sft-weight 1`, learning rate"
        f" {found['rates']['dpo']:g})",
        f"- **fine-tuning**: their chosen answers (learning rate {found['rates']['sft']:g})",
        "",
        wrapped(
            "The table counts right answers to the held-out questions in `valid.jsonl`, 50 of each"
            f" difficulty. The learning rates were chosen by the right answers of seed {SEEDS[0]} to"
            f" the 100 questions in `preference_valid.jsonl`. They are {tried}."
        ),
        "",
        "| difficulty | at the start | pairs | fine-tuning |",
        "|---|---|---|---|",
    ]
    for name, start in [*found["start"].items(), ("all", sum(found["start"].values()))]:
        columns = [
            [sum(one.values()) if name == "all" else one[name] for one in found[kind]]
            for kind in RATES
        ]
        cells = [f"{statistics.fmean(c):.1f} ({', '.join(map(str, c))})" for c in columns]
        lines.append(f"| {name} | {start} | {' | '.join(cells)} |")
    each = ", ".join(f"{gain:+d}" for gain in gains)
    text = wrapped(
        f"Compared with fine-tuning, pairs change the number of right answers out of 100 by {each},"
        f" seed by seed. The error from seeds and questions is {error:.1f}: {verdict}."
    )
    return [*lines, "", text, ""]


def speed_lines(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    versions = results["ours"][0]["versions"]
    lines = [
        "## Speed compared with TRL",
        "",
        wrapped(
            f"The task is LoRA at rank {RANK} on all linear layers, in float32. The model is a"
            f" random Qwen3 with 24 million parameters (vocabulary {MODEL['vocabulary']:,}). It"
            f" trains on {PAIRS} of the bundled pairs in steps of {BATCH}. The first step is not"
            f" measured. Versions: trl {versions['trl']}, torch {versions['torch']}."
        ),
        "",
        wrapped(
            "Every step's documents and trained tokens are equal, and so are the first loss and"
            " log-probabilities (1e-4). `trl` has its defaults, which include gradient"
            " checkpointing; `trl-tuned` runs without it. Each run has one thread, and times are"
            ' its CPU seconds. The column "by wall time" has the ratios of the same rounds by wall time. Peak memory'
            " is that of the process."
        ),
        "",
        (
            "| system | rounds | pairs per CPU second | speedup of ours (each round)"
            " | by wall time | tokens computed | peak, GB | our peak, relative to it |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    rates, by_clock = (
        {
            name: [BATCH * len(one[key][1:]) / sum(one[key][1:]) for one in rounds]
            for name, rounds in results.items()
        }
        for key in ("cpu_seconds", "step_seconds")
    )
    peaks = {
        name: statistics.median(one["peak_bytes"] for one in rounds)
        for name, rounds in results.items()
    }
    for name, rounds in results.items():
        cells = [name, str(len(rounds)), f"{statistics.median(rates[name]):.2f}"]
        cells += [
            "-" if name == "ours" else ratios(one["ours"], one[name]) for one in (rates, by_clock)
        ]
        share = "-" if name == "ours" else f"{peaks['ours'] / peaks[name]:.0%}"
        cells += [f"{sum(rounds[0]['computed']):,}", f"{peaks[name] / 1e9:.2f}", share]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def ratios(ours: list[float], theirs: list[float]) -> str:
    rounds = [one / other for one, other in zip(ours, theirs, strict=True)]
    return f"{statistics.median(rounds):.2f} ({', '.join(f'{ratio:.2f}' for ratio in rounds)})"


if __name__ == "__main__":
    main()
