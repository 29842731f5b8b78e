"""A week in half an hour: 200,000 optimizer steps of a model that computes nothing, and then what
reads the run.

Trainer's loop, sampler, curriculum, logs, TensorBoard, evaluation and checkpoints are a run's own;
the losses are made up, with a gradient for every parameter. On the way the clock jumps, and the
rank's log is rotated from outside. `python exhaustive/scale/long.py` (30 minutes on one core) writes its
section of docs/evidence/scale.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "exhaustive"), str(ROOT / "tests")]

import file_system_calls
import psutil
import run_helpers
import run_patches

WEEK_SECONDS = 7 * 86_400
PROGRESS_SECONDS = 10  # between two lines of progress in a rank's log
HOUR = 3600.0
MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What happens on the way, in steps.

    Attributes:
        look_every: between two looks at the process.
        nan_every, spike_every: a loss that is NaN, and one that is 5 above the others.
        look_seconds: between two looks of a log at its own name.
    """

    steps: int
    look_every: int
    nan_every: int
    spike_every: int
    look_seconds: float = 1.0

    @property
    def nan_steps(self) -> list[int]:
        return list(range(self.nan_every, self.steps + 1, self.nan_every))

    @property
    def spike_steps(self) -> list[int]:
        """Those that the guard can tell: its window of 128 steps is full, and the step was not
        skipped.
        """
        steps = range(self.spike_every, self.steps + 1, self.spike_every)
        return [step for step in steps if step > 130 and step % self.nan_every]

    def clock_offset(self, step: int) -> float:
        """The clock is an hour fast from a third of the run on, and an hour slow from two thirds
        on.
        """
        return (0.0, HOUR, -HOUR)[min(2, 3 * (step - 1) // self.steps)]


def settings(materials: run_helpers.Materials, output_dir: Path, plan: Plan) -> dict[str, Any]:
    """Of the run: everything is logged, and saved and evaluated as often as a week's run would."""
    return materials.settings(
        output_dir,
        valid_data=str(materials.valid),
        finetuning="full",
        micro_batch_size=8,  # one microbatch a step
        lora_r=None,
        max_steps=plan.steps,
        learning_rate=1e-4,
        save_steps=max(1, plan.steps // 200),
        eval_steps=max(1, plan.steps // 100),
        report_to="auto",
        log_samples=True,
    )


# ---------------------------------------------------------------- in the process that trains


def prepare(rank: int, output_dir: str, watch: str, numbers: dict[str, int]) -> None:
    """Before the run: put the losses in the place of the model's, and look at the process on the
    way.
    """
    from finetune.storage import run_log

    plan, real_time = Plan(**numbers), time.time
    step_now = [0]
    watching = Watch(Path(watch), plan.look_every)

    def before(step: int) -> None:
        step_now[0] = step
        watching.look(step)
        if step == plan.steps * 2 // 5:
            rotate_by_name(Path(output_dir))
        if step == plan.steps * 7 // 10:
            rotate_by_cutting(Path(output_dir))

    run_log.LOOK_SECONDS = plan.look_seconds
    run_patches.follow_steps(before)
    run_patches.wrap_microbatch_losses(lambda original, *given: made_up(plan, step_now[0], *given))
    time.time = lambda: real_time() + plan.clock_offset(step_now[0])


def made_up(plan: Plan, step: int, model: Any, microbatch: Any, device: Any, head: Any) -> Any:
    """Losses `(targets,)` that fall as a run's do; their gradient is the same for every parameter's
    first number.
    """
    import torch

    noise = math.sin(step * 12.9898) * 43_758.5453 % 1.0
    loss = 0.8 + 2.0 * math.exp(-4.0 * step / plan.steps) + 0.1 * noise
    loss += 5.0 if step % plan.spike_every == 0 else 0.0
    factor = math.nan if step % plan.nan_every == 0 else 1.0  # of the gradient too
    touched = torch.stack([parameter.view(-1)[0] for parameter in parameters_of(model)]).sum()
    return ((touched * 1e-3 + loss) * factor).expand(len(microbatch.targets))


@functools.cache
def parameters_of(model: Any) -> tuple[Any, ...]:
    return tuple(model.parameters())


class Watch:
    """Looks at this process every so many steps, and writes down what it sees, a line each."""

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every, self.process = path, every, psutil.Process()
        self.calls: Counter[str] = Counter()
        self.last = (time.perf_counter(), time.process_time())
        self.original = file_system_calls.watched(self._count)
        self.original.__enter__()

    def _count(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls[name] += 1
        return original(*args, **kwargs)

    def look(self, step: int) -> None:
        if step % self.every:
            return
        now, calls = (time.perf_counter(), time.process_time()), dict(self.calls)
        seen = {
            "step": step,
            "rss_bytes": self.process.memory_info().rss,
            "open_files": self.process.num_fds(),
            "threads": self.process.num_threads(),
            "blocks": sys.getallocatedblocks(),
            "step_seconds": (now[0] - self.last[0]) / self.every,
            "step_cpu_seconds": (now[1] - self.last[1]) / self.every,
            "calls": calls,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(seen) + "\n")
        self.calls.clear()
        self.last = (time.perf_counter(), time.process_time())


def rotate_by_name(output_dir: Path) -> None:
    """As logrotate does by default: the log gets another name, and nobody tells the run."""
    for path in (output_dir / "logs").glob("*-rank*.log"):
        path.rename(path.with_suffix(".log.1"))


def rotate_by_cutting(output_dir: Path) -> None:
    """As logrotate does with copytruncate."""
    for path in (output_dir / "logs").glob("*-rank*.log"):
        shutil.copy(path, path.with_suffix(".log.2"))
        os.truncate(path, 0)


# ---------------------------------------------------------------- what it came to


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def check(output_dir: Path, plan: Plan) -> dict[str, Any]:
    """Counters of the run, which must be exact; what was asked for beside what was found."""
    events = list(lines_of(output_dir / "events.jsonl"))
    steps = [line["step"] for line in lines_of(output_dir / "trainer_log.jsonl")]
    samples = [line["step"] for line in lines_of(output_dir / "samples.jsonl")]

    def of(name: str) -> list[int]:
        return [event["step"] for event in events if event["event"] == name]

    assert steps == samples == list(range(1, plan.steps + 1)), "a line for each step, in order"
    assert of("nonfinite") == plan.nan_steps, "NaN steps"
    assert of("spike") == plan.spike_steps, "spikes"
    assert json.loads((output_dir / "status.json").read_text())["state"] == "done"
    times = [event["time"] for event in events]
    assert min(after - before for before, after in zip(times, times[1:], strict=False)) < -HOUR, (
        "the clock went back"
    )
    said = "".join(path.read_text() for path in sorted((output_dir / "logs").iterdir()))
    assert said.count("was skipped: loss or gradients") == len(plan.nan_steps), (
        "no line of the log was lost"
    )
    assert len(list((output_dir / "logs").iterdir())) == 3
    return {
        "nonfinite": len(plan.nan_steps),
        "spikes": len(plan.spike_steps),
        "events": len(events),
    }


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line that lies nearest to the points, by least squares."""
    x, y = zip(*points, strict=True)
    return statistics.linear_regression(x, y).slope


def sizes(output_dir: Path) -> dict[str, int]:
    """Bytes of the run's files that grow, by what they are."""

    def total(pattern: str) -> int:
        return sum(path.stat().st_size for path in output_dir.glob(pattern))

    names = ("trainer_log.jsonl", "samples.jsonl", "events.jsonl", "tensorboard/*", "logs/*")
    return {name: total(name) for name in names}


# ---------------------------------------------------------------- readers


# Runs a command of the package; says the processor time and the most memory that its process has
# taken.
MEASURED = """
import sys, time
from finetune.__main__ import main
main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.process_time(), int(peak.split()[1]) * 1024, file=sys.stderr)
"""


def measured(arguments: Sequence[str]) -> list[str]:
    """Seconds by the clock and of the processor, and the most memory in MiB, of a command of the
    package.
    """
    began = time.perf_counter()
    words = [sys.executable, "-c", MEASURED, *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    seconds = time.perf_counter() - began
    processor, peak_bytes = map(float, done.stderr.splitlines()[-1].split())
    return [f"{seconds:.1f}", f"{processor:.1f}", f"{peak_bytes / MIB:,.0f}"]


def refresh_seconds(folder: Path) -> tuple[float, float]:
    """Of the monitor's picture after a line more, by the clock and of the processor: medians of
    several.
    """
    from rich.console import Console

    from finetune.commands.monitor.dashboard import Dashboard, Machine
    from finetune.runs.reader import open_run

    reader = open_run(folder)
    console = Console(file=open(os.devnull, "w"), width=160, height=50, force_terminal=True)  # noqa: SIM115
    last, seconds = reader.poll().steps.last, []
    for number in range(1, 8):
        with (folder / "trainer_log.jsonl").open("a") as file:
            file.write(json.dumps(last | {"step": last["step"] + number}) + "\n")
        began, processor_began = time.perf_counter(), time.process_time()
        console.print(Dashboard(reader.poll(), Machine()))
        seconds.append((time.perf_counter() - began, time.process_time() - processor_began))
    by_clock, of_processor = zip(*seconds, strict=True)
    return statistics.median(by_clock), statistics.median(of_processor)


def longer(source: Path, folder: Path, times: int) -> Path:
    """A copy of a run (without checkpoints) with so many times its steps."""
    ignored = shutil.ignore_patterns(
        "checkpoint-*", "tensorboard", "samples.jsonl", "*.safetensors"
    )
    shutil.copytree(source, folder, ignore=ignored)
    with (source / "trainer_log.jsonl").open() as file:
        rests = [line.partition(", ")[2] for line in file]
    with (folder / "trainer_log.jsonl").open("w") as file:
        file.writelines(
            f'{{"step": {number}, {rest}' for number, rest in enumerate(rests * times, 1)
        )
    return folder


def failed(source: Path, folder: Path) -> Path:
    """A copy with a rank's log of one week, that ended with an error."""
    longer(source, folder, 1)
    shutil.rmtree(folder / "logs")
    (folder / "logs").mkdir()
    status = {
        "state": "failed",
        "exit_code": 1,
        "error": "loss or gradients were NaN or inf in 10 steps in a row",
    }
    (folder / "status.json").write_text(json.dumps(status))
    said = (
        "2026-01-01 00:00:00,000 [INFO] step {0}/200000  stage 2/3  loss 1.2345  12,345 tok/s  ETA"
        " 100:00:00\n"
    )
    with (folder / "logs" / "20260101-000000-1-rank0.log").open("w") as file:
        file.writelines(said.format(number) for number in range(WEEK_SECONDS // PROGRESS_SECONDS))
        file.write(
            "2026-01-07 23:59:59,000 [ERROR] loss or gradients were NaN or inf in 10 steps in a"
            " row\n"
        )
    return folder


# ---------------------------------------------------------------- the whole


def document(
    plan: Plan, seen: list[dict[str, Any]], found: dict[str, Any], readers: list[list[str]]
) -> str:
    begin, end = seen[len(seen) // 20 : len(seen) // 10], seen[-len(seen) // 20 :]
    settled = seen[len(seen) // 20 :]
    growth = slope([(look["step"] / 10_000, look["rss_bytes"] / 1024) for look in settled])

    def span(name: str, scale: float = 1.0, form: str = "{:,.0f}") -> tuple[str, str]:
        return tuple(
            form.format(statistics.mean(look[name] for look in part) / scale)
            for part in (begin, end)
        )

    rows = [
        ("resident memory, MiB", *span("rss_bytes", MIB)),
        ("blocks of Python objects, thousands", *span("blocks", 1000, "{:,.1f}")),
        ("open files", *span("open_files")),
        ("threads", *span("threads")),
        ("time per step with saves and evaluations, ms", *span("step_seconds", 1e-3, "{:.2f}")),
        ("CPU time per step, ms", *span("step_cpu_seconds", 1e-3, "{:.2f}")),
    ]
    table = "\n".join(f"| {name} | {first} | {last} |" for name, first, last in rows)
    a_step = {name: size / plan.steps for name, size in found["sizes"].items()}
    week = a_step["trainer_log.jsonl"] * WEEK_SECONDS / 1e9
    files = "\n".join(
        f"| `{name}` | {found['sizes'][name] / MIB:,.1f} | {a_step[name]:,.0f} |"
        for name in found["sizes"]
    )
    read = "\n".join("| " + " | ".join(row) + " |" for row in readers)
    return f"""
`make scale PART=long` runs {plan.steps:,} optimizer steps of a complete run with a model that computes nothing. The run
includes Trainer's loop, sampler, curriculum, logs, TensorBoard, {found["evaluations"]} evaluations, and
{found["saves"]} checkpoints, of which 2 are kept.

{found["nonfinite"]} losses were NaN and {found["spikes"]} were spikes. Each of them, and no other, was skipped or
reported. After a third of the run the clock jumped one hour ahead, and later two hours back. The rank's log was rotated
once by renaming and once by copying and truncating. The run took {found["seconds"] / 60:.0f} minutes of wall time.

| | first steps | last steps |
|---|---:|---:|
{table}

Resident memory grew by {growth:,.0f} KiB per 10,000 steps (least squares, without the first twentieth). No object is
kept per step; `tests/scale/test_long.py` counts them.

| file | MiB | bytes per step |
|---|---:|---:|
{files}

These files are neither rotated nor thinned: every step keeps its line. At one step per second, a week is
{WEEK_SECONDS:,} steps and {week:.1f} GB of `trainer_log.jsonl`. `--logging-steps 10` reduces that to a tenth. A rank's
log has one line per 10 s: 6 MB per week.

| reader | steps in the run | seconds | CPU seconds | memory, MiB | |
|---|---:|---:|---:|---:|---|
{read}

The load average was {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, so CPU time shows the cost of a step or a
reader better than wall time. CPU time also grows by a third when other programs run.

Largest case actually run: {plan.steps:,} steps in one process on a CPU. The longer runs for the readers repeat its lines
several times.
"""


def measure_readers(folder: Path, run: Path, steps: int) -> list[list[str]]:
    runs = [(run, steps)]
    if steps == 200_000:
        runs.append((longer(run, folder / "longer", 5), 5 * steps))
    rows = []
    for one, count in runs:
        numbers = measured(["report", str(one), "--lang", "en"])
        page = (one / "report.html").stat().st_size / 1e6
        rows.append(["`report`", f"{count:,}", *numbers, f"a page of {page:.2f} MB"])
        rows.append(
            [
                "`monitor`, first refresh",
                f"{count:,}",
                *measured(["monitor", str(one), "--once"]),
                "",
            ]
        )
        scratch = shutil.copytree(
            one, folder / f"refreshed-{count}", ignore=shutil.ignore_patterns("checkpoint-*")
        )
        seconds, processor = refresh_seconds(scratch)
        rows.append(
            [
                "`monitor`, each later refresh",
                f"{count:,}",
                f"{seconds:.3f}",
                f"{processor:.3f}",
                "",
                "",
            ]
        )
        shutil.rmtree(scratch)
    numbers = measured(["diagnose", str(failed(run, folder / "failed"))])
    rows.append(["`diagnose`", f"{steps:,}", *numbers, "a rank's log of one week"])
    rows.append(
        ["`checkpoints`", f"{steps:,}", *measured(["checkpoints", str(run)]), "2 small ones"]
    )
    return rows


def train(folder: Path, plan: Plan) -> float:
    """The run, in a process of its own; its seconds."""
    made = run_helpers.make_materials(folder / "materials", records=3000)
    (folder / "settings.json").write_text(json.dumps(settings(made, folder / "run", plan)))
    began = time.perf_counter()
    words = [sys.executable, __file__, "--folder", str(folder), "--train", json.dumps(asdict(plan))]
    with (folder / "console.log").open("w") as log:
        subprocess.run(
            words,
            stdout=log,
            stderr=log,
            check=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return time.perf_counter() - began


def train_here(folder: Path, numbers: dict[str, int]) -> int:
    import torch

    from finetune.sft import main as sft

    torch.set_num_threads(1)
    prepare(0, str(folder / "run"), str(folder / "watch.jsonl"), numbers)
    return sft(["--config", str(folder / "settings.json")])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=200_000)
    options.add_argument("--folder", type=Path, default=ROOT / "build" / "scale-long")
    options.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    options.add_argument(
        "--read", action="store_true", help="only measure the readers of the run that is there"
    )
    given = options.parse_args()
    if given.train is not None:
        return train_here(given.folder, given.train)
    plan = Plan(
        given.steps,
        max(1, given.steps // 200),
        max(7, given.steps // 97),
        max(150, given.steps // 41),
    )
    if not given.read:
        shutil.rmtree(given.folder, ignore_errors=True)
        given.folder.mkdir(parents=True)
        seconds = train(given.folder, plan)
        (given.folder / "seconds.json").write_text(json.dumps(seconds))
    run = given.folder / "run"
    for name in ("longer", "failed"):
        shutil.rmtree(given.folder / name, ignore_errors=True)
    found = check(run, plan) | {
        "sizes": sizes(run),
        "seconds": json.loads((given.folder / "seconds.json").read_text()),
    }
    names = [event["event"] for event in lines_of(run / "events.jsonl")]
    found |= {"evaluations": names.count("eval"), "saves": names.count("checkpoint")}
    seen = list(lines_of(given.folder / "watch.jsonl"))
    text = document(plan, seen, found, measure_readers(given.folder, run, plan.steps))
    print(text)
    if plan.steps == 200_000:
        from document import write_section

        write_section("Long runs", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
