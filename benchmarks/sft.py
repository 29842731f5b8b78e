"""Fine-tuning beside TRL and LLaMA-Factory: the same training, each in a process of its own, one
after another.

    make bench                                # makes the peers' environments, then this; see
    docs/evidence/benchmarks_sft.md python benchmarks/sft.py --peers build/bench-venv --part fp32 --write-doc
    python benchmarks/sft.py --smoke          # two steps of a tiny model, one round: whether
    everything runs python benchmarks/sft.py --device cuda    # part `device`: 8 B parameters, for
    one card of 80 GB

A round is every contender of a part once; the next goes the other way round. Rounds of all parts
are run until each has `--repeats`, or until the next run would end after `--minutes`: called again,
it goes on where it stopped. Results are JSON below `--work-dir`, one file a part, written after
each run, and all parts there are come together in one page; those of a device are kept in
benchmarks/results/ and put into the page by benchmarks/sft_document.py. A contender whose work was
not what was planned is shown with what was different, and not ranked (benchmarks/sft_report.py); if
ours is one of them the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanochat_report import cpu_flags
from sft_document import DOCUMENT, make_document
from sft_report import CONTENDERS, OURS, PARTS, REFERENCE, make_lines, make_table

ROOT = Path(__file__).resolve().parent.parent
RANK, LEARNING_RATE, BATCH, SEED = 16, 2e-4, 8, 7
# `weights` is the file's number format: LLaMA-Factory holds frozen weights in it, whatever it
# computes in.
SMALL: dict[str, Any] = {
    "shape": "24m",
    "weights": "float32",
    "vocabulary": 16384,
    "conversations": 64,
    "cutoff_len": 1024,
    "median_tokens": 90,
    "unmeasured_steps": 1,
}
SIZES: dict[str, dict[str, Any]] = {
    "fp32": SMALL,
    "bf16": SMALL | {"weights": "bfloat16"},
    "vocab": SMALL | {"vocabulary": 151936, "conversations": 24},
    "device": {
        "shape": "8b",
        "weights": "bfloat16",
        "vocabulary": 151936,
        "conversations": 96,
        "cutoff_len": 2048,
        "median_tokens": 400,
        "unmeasured_steps": 2,  # the second still compiles kernels, for other lengths
    },
}
TINY = {"shape": "tiny", "vocabulary": 4096, "conversations": 2 * BATCH}
# What a device is, asked in another process: this one would hold some of its memory beside those
# that are measured.
SEEN = """
import json, sys, torch
from finetune.runtime.device import capabilities
found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
if found is None or found.type != sys.argv[1]:
    sys.exit(f"torch {torch.__version__} sees {found.type if found else 'no device'} here")
able = capabilities(sys.argv[1])
print(json.dumps({"device": able.name, "peak_flops": able.peak_flops}))
"""


def main() -> int:
    options = _options()
    machine = _machine(options)
    deadline = time.monotonic() + 60 * options.minutes
    parts = (
        [part for part in PARTS if part != "device"] if options.part == "all" else [options.part]
    )
    results = {part: _open(part, options, machine) for part in parts}
    _run_rounds(results, options, deadline)
    everything = _with_other_parts(results, options)
    wrong = False
    for part, result in everything.items():
        print(f"\n{part}\n\n{make_table(part, result)}")
        wrong |= any(line.name == OURS and not line.ranked for line in make_lines(part, result))
    if options.write_doc and everything:
        DOCUMENT.write_text(make_document(everything), encoding="utf-8")
        print(f"\n{DOCUMENT.relative_to(ROOT)} is written")
    return int(wrong)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--part",
        choices=("all", *PARTS),
        help="default all that are for a CPU; on a device `device`",
    )
    parser.add_argument("--repeats", type=int, help="rounds of each part; default 3, on a device 1")
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.8,
        help="no run goes on for longer than this from the start",
    )
    parser.add_argument(
        "--peers", type=Path, default=ROOT / "build" / "bench-venv", help="environments, by library"
    )
    parser.add_argument(
        "--work-dir", type=Path, help="default build/bench, build/bench-DEVICE or build/bench-smoke"
    )
    parser.add_argument(
        "--only", default="", help=f"contenders, of {','.join(CONTENDERS)}; the reference is needed"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or a device type of torch")
    parser.add_argument(
        "--vocabulary", type=int, help="embeddings; default 16384, in parts vocab and device 151936"
    )
    parser.add_argument(
        "--conversations", type=int, help="default 64, in part vocab 24, in part device 96"
    )
    parser.add_argument("--threads", type=int, help="default 2, on a device one for each core")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model, two steps, one round; writes no page"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget earlier results of these parts"
    )
    parser.add_argument(
        "--write-doc", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(CONTENDERS)
    if unknown := set(options.only) - set(CONTENDERS):
        parser.error(f"--only {', '.join(sorted(unknown))}: unknown, of {', '.join(CONTENDERS)}")
    on_device = options.device != "cpu"
    options.part = options.part or ("device" if on_device else "all")
    options.repeats = options.repeats or (1 if on_device else 3)
    options.threads = options.threads or ((os.cpu_count() or 1) if on_device else 2)
    if options.part == "device" and not on_device and not options.smoke:
        parser.error("part device is for one device of 80 GB: give --device cuda")
    if options.write_doc and (options.smoke or on_device):
        parser.error(
            f"{DOCUMENT.relative_to(ROOT)} is of whole runs on a CPU; sft_document.py puts a"
            " device's into it"
        )
    kind = "smoke" if options.smoke else options.device
    options.work_dir = options.work_dir or ROOT / "build" / (
        "bench" if kind == "cpu" else f"bench-{kind}"
    )
    if options.smoke:
        options.repeats, options.fresh = 1, True
    return options


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on. Ends politely where the device, or a peer's environment, is not
    there.
    """
    missing = [
        str(python.parent.parent)
        for library in sorted(
            {CONTENDERS[name].library for name in options.only} - {"ours", "bare"}
        )
        if not (python := _python(library, options)).exists()
    ]
    if missing:
        raise SystemExit(
            f"no environment at {', '.join(missing)}: `make bench` makes them (or give --peers)"
        )
    machine = {
        "device": options.device,
        "threads": options.threads,
        "flags": cpu_flags(),
        "peak_flops": None,
    }
    machine["load_before"] = os.getloadavg()[0]
    if options.device == "cpu":
        return machine | {"device": f"CPU, {os.cpu_count()} cores"}
    environment = {**os.environ, "PYTHONPATH": _python_path("ours")}
    command = [sys.executable, "-c", SEEN, options.device]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["no reason was said"])[-1]
        raise SystemExit(f"--device {options.device}: {reason}. Nothing was run.")
    seen: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return machine | seen


def _python(library: str, options: argparse.Namespace) -> Path:
    return (
        Path(sys.executable)
        if library in ("ours", "bare")
        else options.peers.resolve() / library / "bin" / "python"
    )


def _python_path(library: str) -> str:
    """This package, and where the caller's own packages are: a peer must not find those before its
    own.
    """
    callers = os.environ.get("PYTHONPATH", "") if library in ("ours", "bare") else ""
    return os.pathsep.join(filter(None, (str(ROOT), callers)))


# ---------------------------------------------------------------------- parts


def _inputs(part: str, options: argparse.Namespace) -> dict[str, Any]:
    asked = {"vocabulary": options.vocabulary, "conversations": options.conversations}
    return {
        **SIZES[part],
        **(TINY if options.smoke else {name: number for name, number in asked.items() if number}),
        "batch": BATCH,
        "lora_r": RANK,
        "learning_rate": LEARNING_RATE,
        "seed": SEED,
    }


def _open(part: str, options: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Earlier results of the same inputs and machine, or the part's inputs made anew."""
    folder, inputs = options.work_dir.resolve() / part, _inputs(part, options)
    known = _read(folder)
    if known and not options.fresh and _is_of(known, inputs, machine):
        print(
            f"{part}: goes on from {len(known['runs'])} runs (--fresh begins anew)", file=sys.stderr
        )
        return known
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "inputs").mkdir(parents=True)
    settings = folder / "inputs.json"
    work = {"folder": str(folder / "inputs"), "inputs": inputs, "device": options.device}
    settings.write_text(json.dumps(work), encoding="utf-8")
    command = [sys.executable, str(Path(__file__).with_name("sft_inputs.py")), str(settings)]
    problem = _call(command, folder / "inputs.log", options, "ours", timeout=None)
    if problem:
        raise SystemExit(f"{part}: its inputs could not be made: {problem}")
    plan = json.loads((folder / "inputs" / "plan.json").read_text(encoding="utf-8"))
    return {"plan": plan, "machine": machine, "runs": []}


def _is_of(known: dict[str, Any], inputs: dict[str, Any], machine: dict[str, Any]) -> bool:
    same_machine = all(
        known["machine"][name] == machine[name] for name in ("device", "threads", "flags")
    )
    return same_machine and known["plan"]["settings"] == inputs


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / "results.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _with_other_parts(
    results: dict[str, dict[str, Any]], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """These parts and those of earlier calls, as far as a first round of them is done; a device's
    as far as it is.
    """
    if "device" in results:
        compared = any(
            run["name"] == REFERENCE and "failed" not in run for run in results["device"]["runs"]
        )
        return results if compared else {}
    found = {
        part: results.get(part) or _read(options.work_dir.resolve() / part)
        for part in PARTS
        if part != "device"
    }
    return {
        part: result
        for part, result in found.items()
        if result and _first_round_is_done(part, result, options)
    }


def _first_round_is_done(part: str, result: dict[str, Any], options: argparse.Namespace) -> bool:
    done = {(run["name"], run["dtype"]) for run in result["runs"]}
    missing = [
        f"{name} {dtype}"
        for name, dtype in PARTS[part]
        if name in options.only and (name, dtype) not in done
    ]
    if missing:
        print(f"{part}: not shown, {', '.join(missing)} still to run", file=sys.stderr)
    return not missing


# ---------------------------------------------------------------------- runs


def _order(parts: list[str], options: argparse.Namespace) -> Iterator[tuple[int, str, str, str]]:
    """Round, part, contender and number format; every other round backwards."""
    for number in range(options.repeats):
        for part in parts:
            for name, dtype in PARTS[part][:: -1 if number % 2 else 1]:
                if name in options.only:
                    yield number, part, name, dtype


def _run_rounds(
    results: dict[str, dict[str, Any]], options: argparse.Namespace, deadline: float
) -> None:
    for number, part, name, dtype in _order(list(results), options):
        runs = results[part]["runs"]
        same = [run for run in runs if (run["name"], run["dtype"]) == (name, dtype)]
        if any(run["round"] == number for run in same):
            continue
        left = deadline - time.monotonic()
        if left < 1.1 * max((run["wall_seconds"] for run in same), default=0) or left <= 0:
            print(
                f"the time is over before {part} {name} {dtype}, round {number + 1}; call again",
                file=sys.stderr,
            )
            return
        print(f"round {number + 1}, {part}, {name} {dtype} ...", file=sys.stderr, flush=True)
        run = _run(name, dtype, part, options, left)
        if run is None:
            print(
                "the time is over: this run was ended, and counts for nothing; call again",
                file=sys.stderr,
            )
            return
        runs.append(
            {"name": name, "dtype": dtype, "round": number, "library": CONTENDERS[name].library}
            | run
        )
        path = options.work_dir.resolve() / part / "results.json"
        path.write_text(json.dumps(results[part], indent=1), encoding="utf-8")


def _run(
    name: str, dtype: str, part: str, options: argparse.Namespace, seconds: float
) -> dict[str, Any] | None:
    """One process; None if it was ended for time. What it leaves behind but its result and log is
    removed.
    """
    contender, folder = CONTENDERS[name], options.work_dir.resolve() / part
    output, result, settings = (
        folder / f"{name}-{dtype}{suffix}" for suffix in ("", ".json", ".settings.json")
    )
    work = {
        "library": contender.library,
        "own": contender.own | (contender.on_device if part == "device" else {}),
        "dtype": dtype,
        "device": options.device,
        "threads": options.threads,
        "inputs": _inputs(part, options),
        "folder": str(folder / "inputs"),
        "output": str(output),
        "result": str(result),
        "launched": time.time(),
    }
    result.unlink(missing_ok=True)
    settings.write_text(json.dumps(work), encoding="utf-8")
    script = Path(__file__).with_name("sft_process.py")
    began = time.monotonic()
    try:
        command = [str(_python(contender.library, options)), str(script), str(settings)]
        problem = _call(
            command, output.with_suffix(".log"), options, contender.library, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None
    finally:
        for left in folder.glob(f"{output.name}*"):
            if left.is_dir():
                shutil.rmtree(left)
    measured = {"failed": problem} if problem else json.loads(result.read_text(encoding="utf-8"))
    return measured | {"wall_seconds": time.monotonic() - began}


def _call(
    command: list[str],
    log: Path,
    options: argparse.Namespace,
    library: str,
    *,
    timeout: float | None,
) -> str | None:
    """Run to the end, output into a file; returns the last line of what went wrong.

    Raises:
        subprocess.TimeoutExpired: it was ended.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    # Caches of its own for each run: the second round of a contender would find tokens made and
    # kernels compiled.
    caches = {"HF_HOME": "hf", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    own = {name: str(log.with_name(f"{log.stem}-{folder}")) for name, folder in caches.items()}
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command,
            stdout=file,
            stderr=file,
            cwd=log.parent,
            check=False,
            timeout=timeout,
            env={**os.environ, **threads, **offline, **own, "PYTHONPATH": _python_path(library)},
        )
    if done.returncode == 0:
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return (lines[-1] if lines else f"exit code {done.returncode}").replace("|", "/")[:300]


if __name__ == "__main__":
    sys.exit(main())
