"""The plan of a global batch at 1 to 10,000 devices: its time, how well it fills and balances, and
what waiting costs.

    python exhaustive/scale/plan.py             # writes the section "Plan" of docs/evidence/scale.md, a few
    minutes of one core

Each device computes 32 conversations a step, so that the global batch grows with the machine. Times
of the plan are of this machine's processor; times of a step are computed (planning/traffic.py) for
Qwen3-8B trained whole under ZeRO-3 and with LoRA, on the H100 of docs/evidence/roofline.md. Speeds of
devices vary as `Spread` says.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from document import write_section

from finetune.batching.curriculum import Schedule, Stage, uniform_schedule
from finetune.batching.microbatch_schedule import MicrobatchSchedule, schedule_microbatches
from finetune.batching.sampler import GlobalBatches

DEVICES = (1, 8, 64, 128, 1_024, 10_000)
SAMPLES_PER_DEVICE = 32
CUTOFF = 4_096  # tokens
BUDGET = 4 * CUTOFF  # tokens of a packed microbatch: --micro-batch-size 4
PADDED = 4  # samples of a padded one
# bytes per second of a device: docs/evidence/roofline.md, H100
NETWORK_WITHIN, NETWORK_BETWEEN = 340e9, 45e9
# Median and log-sigma of tokens by difficulty. Conversations as of public sets of instructions: a
# median of some hundred tokens, and a mean half as high again by the long tail; a curriculum's
# difficulties differ in length.
CONVERSATIONS = ((350, 0.9),)
CURRICULUM = ((150, 0.6), (500, 0.8), (1_500, 0.7))


@dataclass(frozen=True)
class Spread:
    """How devices differ. Assumed, not measured here.

    Attributes:
        noise: standard deviation of a microbatch's time, as a share of it.
        slow_machines: share of the machines of eight that are slower all the time; slower: by this
            share.
    """

    noise: float = 0.01
    slow_machines: float = 0.005
    slower: float = 0.10


def draw_lengths(
    count: int, parts: Sequence[tuple[int, float]], seed: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of so many samples, cut off, and the difficulty of each."""
    random = np.random.default_rng(seed)
    difficulty = random.integers(0, len(parts), count)
    medians, sigmas = np.array(parts).T
    lengths = medians[difficulty] * np.exp(sigmas[difficulty] * random.standard_normal(count))
    return np.clip(lengths, 8, CUTOFF).astype(np.int64), difficulty


def _schedule(curriculum: bool) -> Schedule:
    if not curriculum:
        return uniform_schedule()
    stages = (Stage(0.3, (80, 20, 0)), Stage(0.7, (40, 40, 20)), Stage(1.0, (25, 35, 40)))
    return Schedule(tuple(f"difficulty {number}" for number in range(len(CURRICULUM))), stages)


def make_batches(
    devices: int, parts: Sequence[tuple[int, float]], steps: int
) -> tuple[GlobalBatches, np.ndarray]:
    """The global batches of a run on so many devices, and the tokens of its samples."""
    size = SAMPLES_PER_DEVICE * devices
    lengths, difficulty = draw_lengths(max(4 * size, 10_000), parts)
    return GlobalBatches(difficulty, _schedule(len(parts) > 1), size, steps, seed=1), lengths


# ---------------------------------------------------------------- what waiting costs


@dataclass(frozen=True)
class Waiting:
    """Of a step, as shares of it: time that devices wait because the plan is uneven, and because
    some are slower.
    """

    step_seconds: float
    by_imbalance: float
    by_stragglers: float


def simulate_step(
    plan: MicrobatchSchedule,
    seconds_per_token: float,
    network_seconds: float,
    *,
    lockstep: bool,
    spread: Spread,
) -> Waiting:
    """A step on devices that wait for one another: after every microbatch (`lockstep`, ZeRO-3), or
    once (DDP).
    """
    even = plan.computed_tokens * seconds_per_token

    def spent(seconds: np.ndarray) -> float:
        return float(seconds.max(axis=0).sum() if lockstep else seconds.sum(axis=1).max())

    mean, planned = float(even.sum()) / plan.world_size, spent(even)
    real = statistics.mean(spent(even * slowness(even.shape, spread, seed)) for seed in range(20))
    whole = real + network_seconds
    return Waiting(whole, (planned - mean) / whole, max(0.0, real - planned) / whole)


def slowness(shape: tuple[int, ...], spread: Spread, seed: int) -> np.ndarray:
    """float64[ranks, micro-steps]: how much longer each microbatch takes."""
    random = np.random.default_rng(seed)
    machines = -(-shape[0] // 8)
    slow = np.ones(machines)
    slow[random.permutation(machines)[: round(spread.slow_machines * machines)]] += spread.slower
    return (1 + spread.noise * random.standard_normal(shape)) * np.repeat(slow, 8)[: shape[0], None]


def step_costs(devices: int, *, whole: bool) -> tuple[float, float]:
    """Seconds of a device for a token, and seconds of a step's network, of Qwen3-8B: ZeRO-3
    (`whole`) or LoRA and DDP.

    The planner's formulas, with the H100 of docs/evidence/roofline.md; the network overlaps nothing.
    """
    from finetune.config.resolution import resolve_object
    from finetune.planning.inputs import workload_of
    from finetune.planning.shapes import known_config, shape_of_config
    from finetune.planning.traffic import EFFICIENCY, computed_flops_per_token, network_traffic
    from finetune.planning.workload import Cluster
    from finetune.runtime.device import peak_flops

    model = "Qwen/Qwen3-8B"
    values = {
        "model": model,
        "data": ["unused"],
        "output_dir": "unused",
        "cutoff_len": CUTOFF,
        "max_steps": 10,
    }
    values |= {
        "finetuning": "full" if whole else "lora",
        "micro_batch_size": BUDGET // CUTOFF,
        "use_curriculum": False,
    }
    values |= {
        "global_batch_size": SAMPLES_PER_DEVICE * devices,
        "gradient_checkpointing": True,
        "dtype": "bfloat16",
    }
    if whole:
        values["deepspeed"] = {"zero_optimization": {"stage": 3}}
    cluster = Cluster(max(1, devices // 8), min(8, devices), "cuda")
    work = workload_of(
        resolve_object(values, devices).config, shape_of_config(known_config(model), model), cluster
    )
    work = replace(work, longest=1024)  # of a document: what attention pays for
    rate = NETWORK_WITHIN if devices <= 8 else NETWORK_BETWEEN
    peak = peak_flops("NVIDIA H100 80GB HBM3")
    return computed_flops_per_token(work) / (peak * EFFICIENCY), network_traffic(work).bytes / rate


# ---------------------------------------------------------------- the table


@dataclass
class Row:
    """Of one size and one way; means over the steps that were planned."""

    devices: int
    name: str
    samples: int
    tokens: float
    micro_steps: float
    fill: float
    imbalance: float
    lockstep: float
    chosen: float
    seconds: float
    whole: Waiting
    lora: Waiting


def measure(
    devices: int, name: str, parts: Sequence[tuple[int, float]], *, packed: bool, steps: int
) -> Row:
    """Plan some steps as a rank does (batching/steps.py)."""
    batches, lengths = make_batches(devices, parts, max(steps, 10))
    limit = {"token_budget": BUDGET} if packed else {"samples_per_microbatch": PADDED}
    plans, spent, chosen = [], [], []
    for number in range(steps):
        begin = time.process_time()
        indices = batches.indices(number * (len(batches) // steps))
        chosen.append(time.process_time() - begin)
        of_step = lengths[indices]
        begin = time.process_time()
        plan = schedule_microbatches(of_step, devices, **limit)
        plan.of_rank(devices - 1)
        spent.append(time.process_time() - begin)
        plans.append(plan)
    waiting = {
        whole: simulate_step(
            plans[0], *step_costs(devices, whole=whole), lockstep=whole, spread=Spread()
        )
        for whole in (True, False)
    }

    def mean(value: Callable[[MicrobatchSchedule], float]) -> float:
        return statistics.mean(value(plan) for plan in plans)

    return Row(
        devices,
        name,
        len(of_step),
        mean(lambda plan: plan.tokens),
        mean(lambda plan: plan.micro_steps),
        mean(
            lambda plan: (
                plan.packing_efficiency if packed else plan.tokens / int(plan.computed_tokens.sum())
            )
        ),
        mean(lambda plan: plan.imbalance),
        mean(lambda plan: plan.lockstep_imbalance),
        min(chosen),
        min(spent),
        waiting[True],
        waiting[False],
    )


def line(row: Row) -> str:
    share = 100 * row.seconds / row.whole.step_seconds
    cells = [
        f"{row.devices:,}",
        row.name,
        f"{row.samples:,}",
        f"{row.tokens / 1e6:,.2f}",
        f"{row.micro_steps:.1f}",
        f"{row.fill:.1%}",
        f"{row.imbalance:.3f}",
        f"{row.lockstep:.3f}",
        f"{1000 * row.chosen:,.1f}",
        f"{1000 * row.seconds:,.1f}",
        f"{share:.2f}%",
    ]
    for waiting in (row.whole, row.lora):
        cells += [
            f"{waiting.step_seconds:.2f}",
            f"{waiting.by_imbalance:.1%}",
            f"{waiting.by_stragglers:.1%}",
        ]
    return "| " + " | ".join(cells) + " |"


COLUMNS = (
    "devices", "lengths", "samples", "M tokens", "microbatches per device", "fill", "imbalance", "lockstep",
    "samples chosen ms", "plan ms", "of a ZeRO-3 step", "ZeRO-3 step s", "lost by imbalance",
    "by stragglers", "LoRA step s", "lost by imbalance", "by stragglers",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n|--:|---{'|--:' * (len(COLUMNS) - 2)}|"
TEXT = """\
Every rank plans every global batch itself (`schedule_microbatches`). Planning therefore runs on one core and grows with
the number of devices. Each device computes {samples} conversations per step, truncated at {cutoff:,} tokens. Their
lengths are log-normal with a median of {median} tokens and sigma {sigma}. *Curriculum* mixes three difficulties of
{medians} tokens: 80/20/0, then 40/40/20, then 25/35/40. *Packed* microbatches hold {budget:,} tokens, *padded* ones
{padded} samples. `make scale PART=plan` writes this section.

{table}

- "Samples chosen" and "plan" are CPU times of the fastest of {steps} steps. A step is planned before it starts or, with
  `--dataloader-num-workers`, during the previous step.
- At its start a run plans steps to find its largest microbatch and to print its table. Each of the two plans about
  2 million samples. At 10,000 devices they take {start_seconds:.1f} s together.
- Fill is the share of the microbatches' capacity that holds tokens (padded: the share of what is computed). Imbalance
  is the busiest device divided by the mean. Lockstep is the same ratio if devices wait after every microbatch.
- Padded microbatches of one micro-step have similar lengths, and the first micro-step has the longest. Many devices
  wait there. Packing, the default, has no such loss.
- Step times are computed, not measured: Qwen3-8B with checkpointing, fully trained under ZeRO-3 and with LoRA under
  DDP. The planner's formulas assume 40% of an H100's peak, 340 GB/s within a machine of eight devices and 45 GB/s
  between machines ([roofline.md](roofline.md)). No computation overlaps the network.
- "Lost" is the share of the step in which the mean device waits for the busiest device, and beyond that for slower
  devices (mean of 20 draws). A microbatch's time is assumed to have a standard deviation of 1%, and 0.5% of the
  machines are always 10% slower. From 100 machines on, one is slow and all wait for it. A plan could help only if it
  knew which machine is slow.

Largest case actually run: the complete plan for 10,000 devices and {largest:,} samples, made by one process.
"""


def write_document(rows: Sequence[Row], steps: int) -> None:
    largest = max(rows, key=lambda row: row.samples)
    ways = [
        row for row in rows if row.devices == max(DEVICES) and row.name == "conversations, packed"
    ]
    looked = max(4, 2_000_000 // largest.samples) + max(4, min(50, 2_000_000 // largest.samples))
    write_section(
        "Plan",
        TEXT.format(
            samples=SAMPLES_PER_DEVICE,
            cutoff=CUTOFF,
            median=CONVERSATIONS[0][0],
            sigma=CONVERSATIONS[0][1],
            medians=", ".join(f"{median:,}" for median, _ in CURRICULUM),
            budget=BUDGET,
            padded=PADDED,
            steps=steps,
            table="\n".join([HEAD, *map(line, rows)]),
            largest=largest.samples,
            start_seconds=looked * ways[0].seconds,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=5, help="global batches that are planned of each row"
    )
    options = parser.parse_args()
    rows = [
        measure(
            devices,
            f"{name}, {'packed' if packed else 'padded'}",
            parts,
            packed=packed,
            steps=options.steps,
        )
        for name, parts in (("conversations", CONVERSATIONS), ("curriculum", CURRICULUM))
        for packed in (True, False)
        for devices in DEVICES
    ]
    write_document(rows, options.steps)
    for row in rows:
        print(line(row))


if __name__ == "__main__":
    main()
