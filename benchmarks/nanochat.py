"""Pretraining beside nanochat's own: the same windows, batches and validation bytes, on one
machine, one after another.

    git clone https://github.com/karpathy/nanochat && git -C nanochat checkout 92d63d4
    python benchmarks/nanochat.py --nanochat nanochat --work-dir runs/nanochat --write-doc

The corpus is the standard library of the running Python, prepared by `python -m finetune prepare`.
nanochat runs from its checkout, in a process of its own (benchmarks/nanochat_process.py), and gets
our tokenizer and our windows in the order of our run; its rates, schedule, decay, optimizer, start
and compilation are its own. Each run has all cores. NAME-bf16 is a variant in bfloat16, NAME@FACTOR
one at nanochat's rates times the factor, the same for both sides; by default both are run over one
grid of factors. What a work folder has is not run again. Exits with an error where tokens, windows
or validation bytes are not the same, or nothing was learned from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from nanochat_report import (
    COMMIT,
    DEPTH,
    SEQUENCE,
    VARIANTS,
    VOCABULARY,
    Measured,
    draw_plot,
    machine_facts,
    make_document,
    make_tables,
    parts_of,
)

from finetune.runtime.host import usable_cores

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "evidence" / "benchmarks_pretraining.md"
# its defaults
NANOCHAT_RATES = {"matrix-lr": 0.02, "embedding-lr": 0.3, "unembedding-lr": 0.008, "scalar-lr": 0.5}
CORES = usable_cores()
GRID = (1, 3, 6, 12)  # factors on nanochat's rates
USUAL = (
    *("nanochat", "nanochat-plain", "ours", "ours-bf16", "ours-lfm2", "ours-lfm2_value"),
    # 1 is their own
    *(f"{name}@{factor}" for name in ("nanochat", "nanochat-plain") for factor in GRID[1:]),
    *(f"{name}@{factor}" for name in ("ours", "ours-lfm2", "ours-lfm2_value") for factor in GRID),
)
STEP_LINE = re.compile(r"^step (\d+)/\d+ .*\| dt: ([\d.]+)ms")


@dataclass(frozen=True)
class Corpus:
    """What all variants read, made from our own run's plan.

    Attributes:
        windows: the data set's number of each window, in the order of training.
        valid_bytes: of text, in the windows that are validated on.
    """

    folder: Path
    tokens: Path
    windows: list[int]
    sha256: str  # of all windows
    valid_bytes: int
    valid_tokens: int


def main() -> int:
    options = _options()
    work = options.work_dir.resolve()
    work.mkdir(parents=True, exist_ok=True)
    corpus = _prepare(work, options)
    facts, runs = machine_facts(options), []
    for variant in options.only:
        runs.append(_run(variant, work, corpus, options))
        report = {"options": facts, "runs": [asdict(run) for run in runs]}
        (work / "report.json").write_text(
            json.dumps(report, indent=1, default=str), encoding="utf-8"
        )
    text = make_tables(
        runs, options, valid_bytes=corpus.valid_bytes, valid_tokens=corpus.valid_tokens
    )
    print(text)
    draw_plot(runs, work / "bits_per_byte.png", options)
    if options.write_doc:
        DOCUMENT.write_text(make_document(text, options), encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="variants: " + "; ".join(f"{name}: {words}" for name, words in VARIANTS.items()),
    )
    parser.add_argument(
        "--nanochat", type=Path, required=True, help=f"checkout of karpathy/nanochat at {COMMIT}"
    )
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument(
        "--tokens", type=int, default=2**21, help="tokens that each variant trains on"
    )
    parser.add_argument(
        "--total-batch-size", type=int, default=8192, help="tokens of an optimizer step"
    )
    parser.add_argument("--device-batch-size", type=int, default=8, help="windows at a time")
    parser.add_argument(
        "--evaluations", type=int, default=8, help="after the first, which is before training"
    )
    parser.add_argument("--eval-tokens", type=int, default=2**17)
    parser.add_argument("--only", default=",".join(USUAL), help=f"of {','.join(VARIANTS)}")
    parser.add_argument(
        "--ours", default="", help="more flags for our runs, as one word: '--matrix-lr 0.03'"
    )
    parser.add_argument(
        "--write-doc", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    options.only = options.only.split(",")
    options.steps = options.tokens // options.total_batch_size
    options.every = max(1, options.steps // options.evaluations)
    unknown = [
        name
        for name in options.only
        if not re.fullmatch(f"({'|'.join(VARIANTS)})(-bf16)?(@[0-9]+([.][0-9]+)?)?", name)
    ]
    problems = [
        f"--only {name}: unknown, of {', '.join(VARIANTS)}; -bf16, @FACTOR" for name in unknown
    ]
    if any("@" in name for name in options.only) and re.search("lr|optimizer", options.ours):
        problems.append("--ours sets rates, and so does @FACTOR")
    at_a_time = options.device_batch_size * SEQUENCE
    for name, number, divisor in (
        ("--tokens", options.tokens, options.total_batch_size),
        ("--total-batch-size", options.total_batch_size, at_a_time),
        ("--eval-tokens", options.eval_tokens, at_a_time),
    ):
        if number < divisor or number % divisor:
            problems.append(f"{name} {number} is not a multiple of {divisor}")
    if not (options.nanochat / "scripts" / "base_train.py").is_file():
        problems.append(f"--nanochat {options.nanochat} has no scripts/base_train.py")
    if problems:
        parser.error("; ".join(problems))
    return options


# ---------------------------------------------------------------------- the corpus


def _prepare(work: Path, options: argparse.Namespace) -> Corpus:
    tokens = work / "tokens"
    _call(
        [
            sys.executable,
            "-m",
            "finetune",
            "prepare",
            "--data",
            *_library(),
            "--output-dir",
            str(tokens),
        ]
        + ["--vocab-size", str(VOCABULARY), "--valid-fraction", "0.05", "--on-bad-row", "drop"],
        work / "prepare.log",
    )
    from finetune.config.pretrain_config import PretrainConfig
    from finetune.training.pretraining.prepare import prepare_pretraining

    data = prepare_pretraining(PretrainConfig(**_our_settings(tokens, work / "none", options)))
    order = [int(i) for step in range(options.steps) for i in data.batches.indices(step)]
    valid = np.stack([data.valid[i][0] for i in range(len(data.valid))])
    if valid[:, 1:].size != options.eval_tokens:
        raise SystemExit(
            f"the validation data have {valid[:, 1:].size} tokens in windows: lower --eval-tokens"
        )
    np.save(
        work / "train_windows.npy", np.stack([data.train[i][0] for i in order]).astype(np.uint16)
    )
    np.save(work / "valid_windows.npy", valid.astype(np.uint16))
    np.save(work / "bytes_per_token.npy", data.bytes_per_token)
    print(
        f"{data.train.stream.tokens:,} tokens in {len(data.train.stream.documents) - 1:,} documents"
        f" to train on, {data.passes:.2f} passes; validation on"
        f" {data.bytes_per_token[valid[:, 1:]].sum():,} bytes"
    )
    digest = hashlib.sha256(
        (work / "train_windows.npy").read_bytes() + (work / "valid_windows.npy").read_bytes()
    )
    return Corpus(
        work,
        tokens,
        order,
        digest.hexdigest(),
        int(data.bytes_per_token[valid[:, 1:]].sum()),
        options.eval_tokens,
    )


def _library() -> list[str]:
    """Globs of the standard library's sources, without what is installed in its folder."""
    root = Path(sysconfig.get_path("stdlib"))
    folders = sorted(
        path for path in root.iterdir() if path.is_dir() and not path.name.endswith("-packages")
    )
    with_sources = [folder for folder in folders if next(folder.rglob("*.py"), None)]
    return [str(root / "*.py"), *(str(folder / "**" / "*.py") for folder in with_sources)]


def _write_parquet(corpus: Corpus, base: Path) -> None:
    """The documents as nanochat's loader reads them; its last file is for validation (and not read
    here).
    """
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoTokenizer

    from finetune.data.corpus.token_shards import TokenShards

    tokenizer = AutoTokenizer.from_pretrained(corpus.tokens / "tokenizer")
    folder = base / "base_data_climbmix"
    folder.mkdir(parents=True, exist_ok=True)
    for number, split in enumerate(("train", "val")):
        shards = TokenShards(corpus.tokens, split=split)
        bounds = shards.documents.tolist()
        texts = [
            tokenizer.decode(shards.slice(start + 1, stop), clean_up_tokenization_spaces=False)
            for start, stop in zip(bounds, bounds[1:], strict=False)
        ]
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(
            table, folder / f"shard_{number:05d}.parquet", row_group_size=1024
        )


# ---------------------------------------------------------------------- runs


def _run(variant: str, work: Path, corpus: Corpus, options: argparse.Namespace) -> Measured:
    print(f"{variant} ...", file=sys.stderr, flush=True)
    folder = work / variant
    sizes = [
        options.tokens,
        options.total_batch_size,
        options.device_batch_size,
        options.every,
        options.eval_tokens,
    ]
    inputs = {
        "sizes": sizes,
        "windows": corpus.sha256,
        "ours": options.ours,
        "rates": _factor(variant, options),
    }
    result = folder / "measured.json"
    if folder.exists():
        kept = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        if kept.get("inputs") != inputs:
            raise SystemExit(
                f"{folder} is not of this run, or broke off: choose another --work-dir, or"
                " remove it"
            )
        bits = {int(step): value for step, value in kept["measured"].pop("bits_per_byte").items()}
        return Measured(**kept["measured"], bits_per_byte=bits)
    folder.mkdir()
    run = _run_ours if variant.startswith("ours") else _run_nanochat
    measured = run(variant, folder, corpus, options)
    steps = sorted(measured.bits_per_byte)
    if len(measured.step_seconds) != options.steps or steps[0] != 0 or steps[-1] != options.steps:
        raise SystemExit(
            f"{variant}: {len(measured.step_seconds)} steps of {options.steps}, evaluated at"
            f" {steps}"
        )
    if (
        not measured.smallest_gradient_norm > 0
        or not measured.bits_per_byte[steps[-1]] < measured.bits_per_byte[0]
    ):
        raise SystemExit(f"{variant} learned nothing: {measured}")
    result.write_text(
        json.dumps({"inputs": inputs, "measured": asdict(measured)}), encoding="utf-8"
    )
    return measured


def _call(command: list[str], log: Path, **environment: str) -> float:
    """Run to the end, output into a file; returns seconds."""
    # A cache of its own, so that every run compiles, and all find the same.
    own = {"TORCHINDUCTOR_CACHE_DIR": str(log.with_suffix(".inductor")), "HF_HUB_OFFLINE": "1"}
    threads = {"OMP_NUM_THREADS": str(CORES), "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command,
            stdout=file,
            stderr=file,
            cwd=ROOT,
            check=False,
            env={**os.environ, **own, **threads, **environment},
        )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)[:500]} failed:\n{log.read_text(encoding='utf-8')[-4000:]}"
        )
    return time.perf_counter() - began


def _run_nanochat(
    variant: str, folder: Path, corpus: Corpus, options: argparse.Namespace
) -> Measured:
    name, in_bf16, given = parts_of(variant)
    own_loader = name == "nanochat-own-loader"
    if own_loader:
        _write_parquet(corpus, folder)
    flags = {
        "device-type": "cpu",
        "depth": DEPTH,
        "max-seq-len": SEQUENCE,
        "window-pattern": "L",
        "device-batch-size": options.device_batch_size,
        "total-batch-size": options.total_batch_size,
        "num-iterations": options.steps,
        "eval-every": options.every,
        "eval-tokens": options.eval_tokens,
        "core-metric-every": -1,
        "sample-every": -1,
    }
    flags |= {flag: rate * float(given) for flag, rate in NANOCHAT_RATES.items()} if given else {}
    settings = {
        "checkout": str(options.nanochat.resolve()),
        "flags": [f"--{name}={value}" for name, value in flags.items()],
        "tokenizer": str(corpus.tokens / "tokenizer"),
        "bytes_per_token": str(corpus.folder / "bytes_per_token.npy"),
        "train_windows": None if own_loader else str(corpus.folder / "train_windows.npy"),
        "valid_windows": str(corpus.folder / "valid_windows.npy"),
        "plain": name == "nanochat-plain",
        "eval_every": options.every,
        "report": str(folder / "report.json"),
    }
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    wall = _call(
        [
            sys.executable,
            "-u",
            str(Path(__file__).with_name("nanochat_process.py")),
            str(folder / "settings.json"),
        ],
        folder / "log.txt",
        NANOCHAT_BASE_DIR=str(folder),
        NANOCHAT_DTYPE="bfloat16" if in_bf16 else "float32",
    )
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    for evaluation in report["evaluations"]:
        if (evaluation["bytes"], evaluation["tokens"]) != (corpus.valid_bytes, corpus.valid_tokens):
            raise SystemExit(
                f"{variant} was validated on other text: {evaluation}, not {corpus.valid_bytes}"
                " bytes"
            )
    lines = map(STEP_LINE.match, (folder / "log.txt").read_text(encoding="utf-8").splitlines())
    return Measured(
        variant,
        _factor(variant, options),
        report["parameters"],
        [float(line[2]) / 1000 for line in lines if line],
        report["evaluations"][0]["seconds"],
        wall,
        {evaluation["step"]: evaluation["bpb"] for evaluation in report["evaluations"]},
        min(report["gradient_norms"].values()),
    )


def _arch(name: str) -> str:
    return name.removeprefix("ours-") if "lfm2" in name else "nanochat"


def _factor(variant: str, options: argparse.Namespace) -> float:
    """On nanochat's rates, which go with the square root of the batch; what is given, or what our
    laws make of them.
    """
    name, _, given = parts_of(variant)
    if given or not name.startswith("ours"):
        return float(given or 1)
    from finetune.config.pretrain_config import PretrainConfig
    from finetune.modeling.scratch import make_empty_model, scratch_config
    from finetune.planning.traffic import matrix_parameters
    from finetune.training.optimizers import REFERENCE_BATCH_TOKENS, scaled_rates

    config = PretrainConfig(
        train_data_path="x", output_dir="y", total_batch_size=options.total_batch_size
    )
    model = make_empty_model(
        scratch_config(_arch(name), DEPTH, vocab_size=VOCABULARY, max_seq_len=SEQUENCE)
    )
    worth = config.target_param_data_ratio * matrix_parameters(model)
    rates = scaled_rates(config, width=1, worth_tokens=worth, run_tokens=options.tokens)
    return rates.matrix / (
        NANOCHAT_RATES["matrix-lr"] * math.sqrt(options.total_batch_size / REFERENCE_BATCH_TOKENS)
    )


def _our_settings(tokens: Path, output: Path, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_data_path": str(tokens),
        "valid_data_path": str(tokens),
        "output_dir": str(output),
        "depth": DEPTH,
        "max_seq_len": SEQUENCE,
        "device_batch_size": options.device_batch_size,
        "total_batch_size": options.total_batch_size,
        "num_iterations": options.steps,
        "eval_steps": options.every,
        "eval_tokens": options.eval_tokens,
        "device_type": "cpu",
        "save_steps": 0,
        "sample_every": 0,
        "logging_steps": 1,
        "report_to": "none",
        "log_samples": True,
    }


def _run_ours(variant: str, folder: Path, corpus: Corpus, options: argparse.Namespace) -> Measured:
    name, in_bf16, given = parts_of(variant)
    processes = 2 if name == "ours-2-processes" else 1
    settings = _our_settings(corpus.tokens, folder / "run", options) | {
        "dtype": "bfloat16" if in_bf16 else "float32",
        "compile": name != "ours-eager",
        "arch": _arch(name),
        "lr_scale": float(given) / _factor(variant.partition("@")[0], options) if given else 1.0,
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value).lower())]
    for path in ("train_data_path", "valid_data_path", "output_dir"):
        flags[flags.index(f"--{path}") + 1] = settings[path]  # paths keep their case
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] * (
        processes > 1
    )
    wall = _call(
        [sys.executable, *launcher, "-m", "finetune.pretrain", *flags, *options.ours.split()],
        folder / "log.txt",
        OMP_NUM_THREADS=str(max(1, CORES // processes)),
    )
    run = folder / "run"
    trained = [index for line in _lines(run / "samples.jsonl") for index in line["ids"]]
    if not _same_steps(trained, corpus.windows, options.total_batch_size // SEQUENCE):
        raise SystemExit(f"{variant} was trained on other windows than planned")
    steps = list(_lines(run / "trainer_log.jsonl"))
    events = list(_lines(run / "events.jsonl"))
    evaluations = [event for event in events if event["event"] == "eval"]
    begin = next(event["time"] for event in events if event["event"] == "start")
    return Measured(
        variant,
        _factor(variant, options),
        _parameters(run),
        [line["step_seconds"] for line in steps],
        evaluations[0]["time"] - begin,
        wall,
        {event["step"]: event["eval_bpb"] for event in evaluations},
        min(line["grad_norm"] for line in steps),
    )


def _same_steps(trained: list[int], planned: list[int], size: int) -> bool:
    """Whether each step had its windows, in whatever order within the step."""
    return len(trained) == len(planned) and all(
        sorted(trained[i : i + size]) == sorted(planned[i : i + size])
        for i in range(0, len(planned), size)
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _parameters(run: Path) -> int:
    from safetensors import safe_open

    with safe_open(run / "model.safetensors", framework="numpy") as file:
        names = list(file.keys())  # a safetensors file, not a dict: it cannot be iterated
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


if __name__ == "__main__":
    sys.exit(main())
