"""Checkpoints of models of 32 and 235 billion parameters: what each rank writes, hashes and reads.

    python exhaustive/scale/checkpoints.py       # all layouts, and real files by real processes: writes
    docs/evidence/scale.md

The package's own code saves, publishes, rotates, verifies and loads; ranks are threads, files are
holes of the right size (counting_disk.py). Seconds are computed of the bytes of the rank that moves
most.
"""

from __future__ import annotations

import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "exhaustive"), str(ROOT / "tests")]

import torch
from checkpoint_rates import PROCESSES, measure
from counting_disk import CountingDisk
from document import write_section
from thread_ranks import Meeting, ThreadControl

from finetune.storage.run_log import RunLog
from finetune.training.checkpointer import Checkpointer
from finetune.training.control import POLL_SECONDS
from finetune.training.session import Session
from finetune.training.state import Form, TrainingState

GB = 10**9
NEWLINE = "\n"
RATES = (50_000_000, 1_000_000_000)  # bytes per second of a disk, for each rank
# What no tensor is larger than; never touched, so it takes no memory.
NUMBERS = torch.empty(1 << 30)


@dataclass(frozen=True)
class Model:
    """The shapes of a published model's parameters (its config.json; mixtures as transformers holds
    them, fused).
    """

    name: str
    layers: int
    hidden: int
    queries: int
    keys: int
    block: dict[str, tuple[int, ...]]
    vocabulary: int = 151_936

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = {
            f"model.{name}": (self.vocabulary, self.hidden) for name in ("embed_tokens", "lm_head")
        }
        for layer in range(self.layers):
            of_layer: dict[str, tuple[int, ...]] = {
                "q_proj": (self.queries, self.hidden),
                "k_proj": (self.keys, self.hidden),
                "v_proj": (self.keys, self.hidden),
                "o_proj": (self.hidden, self.queries),
                "q_norm": (128,),
                "k_norm": (128,),
                "input_layernorm": (self.hidden,),
                "post_attention_layernorm": (self.hidden,),
                **self.block,
            }
            found |= {
                f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()
            }
        return found | {"model.norm.weight": (self.hidden,)}


DENSE = Model(
    "Qwen3-32B",
    64,
    5120,
    8192,
    1024,
    {"gate": (25600, 5120), "up": (25600, 5120), "down": (5120, 25600)},
)
MIXTURE = Model(
    "Qwen3-235B-A22B",
    94,
    4096,
    8192,
    512,
    {"router": (128, 4096), "gate_up": (128, 3072, 4096), "down": (128, 4096, 1536)},
)


class Network:
    """As much of a model as its training state looks at: names, shapes, and what a rank holds of
    each.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], ranks: int, form: Form) -> None:
        self.parameters = {name: _parameter(shape, ranks, form) for name, shape in shapes.items()}

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return iter(self.parameters.items())


def _parameter(shape: tuple[int, ...], ranks: int, form: Form) -> Any:
    if form == "parts":
        return torch.nn.Parameter(_numbers(prod(shape)).view(shape))
    parameter: Any = torch.nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_shape, parameter.ds_numel = 0, torch.Size(shape), prod(shape)
    # DeepSpeed's partition_parameters: padded to a whole number of ranks.
    parameter.ds_tensor = torch.empty(-(-prod(shape) // ranks), device="meta")
    parameter.ds_tensor.status = SimpleNamespace(name="AVAILABLE")
    parameter.ds_status, parameter.ds_secondary_tensor = SimpleNamespace(name="NOT_AVAILABLE"), None
    parameter.ds_process_group = None
    return parameter


def _numbers(count: int) -> torch.Tensor:
    return NUMBERS[:count]


class Moments(dict[Any, Any]):
    """torch's optimizer state of every parameter."""

    def __missing__(self, parameter: torch.Tensor) -> dict[str, Any]:
        whole = parameter.detach()
        return {"step": 1, "exp_avg": whole, "exp_avg_sq": whole}


def deepspeed() -> types.ModuleType:
    """Its accessors of a rank's own slices, as finetune/training/state.py calls them."""
    found = types.ModuleType("deepspeed")
    found.utils = SimpleNamespace(  # type: ignore[attr-defined]
        safe_get_local_fp32_param=lambda parameter: _numbers(parameter.ds_tensor.numel()),
        safe_get_local_optimizer_state=lambda parameter, key: _numbers(parameter.ds_tensor.numel()),
        safe_set_local_fp32_param=lambda parameter, part: parameter.ds_tensor.copy_(part),
        safe_set_local_optimizer_state=lambda parameter, part, key: parameter.ds_tensor.copy_(part),
    )
    return found


def training_state(shapes: dict[str, tuple[int, ...]], ranks: int, form: Form) -> TrainingState:
    model: Any = Network(shapes, ranks, form)
    if form == "parts":
        optimizer = SimpleNamespace(state=Moments({None: {"step": 1}}))
        return TrainingState(model, optimizer=optimizer, form=form)
    flat = SimpleNamespace(state={None: {"step": 1}}, param_groups=[])
    zero = SimpleNamespace(optimizer=flat, fp32_partitioned_groups_flat=[])
    return TrainingState(
        model, engine=SimpleNamespace(optimizer=zero, fp16_enabled=lambda: False), form=form
    )


@dataclass
class Layout:
    """A run on so many ranks, whose checkpoints lie in `folder`."""

    model: Model
    ranks: int
    form: Form
    folder: Path
    disk: CountingDisk = field(default_factory=CountingDisk)
    meeting: Meeting = field(init=False)

    def save(self, steps: list[int], keep: int) -> list[dict[int, Counter[str]]]:
        """What each save moves, rotation included, by rank."""
        found: list[dict[int, Counter[str]]] = []
        self.meeting = Meeting(self.ranks)
        shapes = self.model.shapes()

        def rank(number: int) -> None:
            saver = Checkpointer(
                self.folder,
                ThreadControl(self.meeting),
                rank=number,
                world_size=self.ranks,
                metadata={"seed": 1},
                model_files=lambda weights: (
                    lambda folder: (folder / "tokenizer.json").write_text("{}")
                ),
                keep=keep,
                runlog=RunLog(None),
                sample_log=None,
            )
            state = training_state(shapes, self.ranks, self.form)
            for step in steps:
                saver.save(step, state)
                self.meeting.barrier.wait()
                if number == 0:
                    found.append(self.disk.take())
                self.meeting.barrier.wait()

        self._with(rank)
        return found

    def resume(self, step: int) -> dict[int, Counter[str]]:
        """What verifying and loading move, by rank."""
        checkpoint, shapes = self.folder / f"checkpoint-{step}", self.model.shapes()
        self.meeting = Meeting(self.ranks)

        def rank(number: int) -> None:
            world = SimpleNamespace(rank=number, world_size=self.ranks)
            session: Any = SimpleNamespace(world=world, control=ThreadControl(self.meeting))
            problem = Session.problem_in(session, checkpoint)
            assert problem is None, problem
            state = training_state(shapes, self.ranks, self.form)
            with torch.device("meta"):
                state.load_weights(checkpoint)
                state.load_moments(checkpoint)

        self._with(rank)
        return self.disk.take()

    def _with(self, rank: Any) -> None:
        with self.disk.in_place(), patch.dict(sys.modules, {"deepspeed": deepspeed()}):
            self.meeting.run(rank)


def most(counted: dict[int, Counter[str]], what: str) -> int:
    """Of the rank that has most."""
    return max(counted[rank][what] for rank in counted)


def in_all(counted: dict[int, Counter[str]], what: str) -> int:
    return sum(counter[what] for counter in counted.values())


@dataclass(frozen=True)
class Case:
    """A layout that saves, and the numbers of ranks that resume."""

    model: Model
    ranks: int
    form: Form
    resuming: tuple[int, ...]
    keep: int = 2


CASES = (
    Case(DENSE, 16, "slices", (16, 64)),
    Case(DENSE, 64, "slices", (64, 16)),
    Case(MIXTURE, 64, "slices", (64, 128), keep=3),
    Case(DENSE, 16, "parts", ()),
)
FORMS = {"slices": "ZeRO-3", "parts": "DDP, ZeRO-1/2"}


def rows_of(case: Case, folder: Path) -> tuple[list[str], list[str]]:
    """Lines of the tables of saves and of resumes."""
    layout = Layout(case.model, case.ranks, case.form, folder)
    counted = layout.save(list(range(1, case.keep + 2)), case.keep)[-1]  # one that removes another
    name = f"{case.model.name}, {FORMS[case.form]}, {case.ranks}"
    written, hashed = most(counted, "written"), most(counted, "hashed")
    moved = f"{in_all(counted, 'written') / GB:,.0f} | {written / GB:.1f} | {hashed / GB:.1f}"
    read = f"{in_all(counted, 'read') / 1e6:.1f} | {most(counted, 'main') / 1e6:.1f}"
    messages = layout.meeting.sent_bytes[1] / (case.keep + 1) / 1e3
    saves = [f"| {name} | {case.keep} | {moved} | {read} | {messages:.1f} | {seconds(written)} |"]
    resumes = []
    for ranks in case.resuming:
        found = Layout(case.model, ranks, case.form, folder).resume(case.keep + 1)
        content, loaded = most(found, "read"), most(found, "loaded")
        disk = max(
            counter["read"] + counter["loaded"] - counter["again"] for counter in found.values()
        )
        all_read = in_all(found, "read") / GB
        files = most(found, "loaded_files")
        numbers = (
            f"{all_read:,.0f} | {content / GB:.1f} | {loaded / GB:.1f} | {disk / GB:.1f} | {files}"
        )
        resumes.append(f"| {name} | {ranks} | {numbers} | {seconds(disk)} |")
    return saves, resumes


def seconds(moved: int) -> str:
    return " | ".join(f"{moved / rate:,.0f} s" for rate in RATES)


def text_of(saves: list[str], resumes: list[str], real: dict[str, float]) -> str:
    gb, rule = real["bytes"] / GB, "|---" * 10 + "|"
    return f"""
The package's own code saves, publishes, rotates, verifies and loads checkpoints. Ranks are threads and files are sparse
files of the right size. Every byte written to or read from a file is counted for its rank
(`exhaustive/scale/counting_disk.py`). GB is 10^9 bytes. Columns marked "all" sum over the ranks; the others show the rank
that moves the most. Seconds are computed from the bytes of that rank, at 50 MB/s and at 1 GB/s per rank.

**Save.** Each rank writes 12 bytes per parameter that it holds, and hashes them while writing. Only the files of a
tokenizer or an adapter are read back. Rotation reads nothing, regardless of how many checkpoints are kept. The ranks
exchange one record per file. The thread that synchronizes with the other ranks moves no large data, so no collective
waits for a file. While other threads write, the ranks check every {POLL_SECONDS:.0f} s whether all have finished.

| model, layout, ranks | kept | written, all | written | hashed | read, all (MB) | moved by the synchronizing thread (MB) \
| sent (kB) | 50 MB/s | 1 GB/s |
{rule}
{NEWLINE.join(saves)}

**Resume.** One rank reads and hashes each file once. If the number of ranks equals or divides the number that saved,
each rank verifies the files that it loads, so its node already holds them in memory. Weights are loaded twice: for the
model and for DeepSpeed's float32 master weights. "From the disk" counts only what a rank has not read before.

| saved by | ranks | verified, all | verified | loaded | from the disk | files opened to load | 50 MB/s | 1 GB/s |
{rule[: 4 * 9 + 1]}
{NEWLINE.join(resumes)}

**Real files**, on {real["cores"]:.0f} cores and one disk that was also busy with other work. {PROCESSES} processes write
0.54 GB each at the same time. With the earlier method (safetensors' `save_file`, fsync, then reading back), each gets
{real["old"]:.0f} MB/s, or {real["old_core"]:.0f} MB per core second. Hashing while writing the same bytes gives
{real["new"]:.0f} MB/s ({real["new_core"]:.0f} MB per core second). A {gb:.1f} GB checkpoint (all parameters, DDP) is
saved in {real["save_seconds"]:.1f} s. All processes together verify it in {real["verify_seconds"]:.1f} s. No rank spent
more than {real["longest_wait_seconds"]:.1f} s in a collective.

Largest case actually run: {gb:.1f} GB written, hashed, published, verified and loaded by {PROCESSES} processes. Larger
cases are counted as above. `make scale PART=checkpoints` writes this section.
"""


def main() -> None:
    saves, resumes = [], []
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="scale-") as folder:
            of_saves, of_resumes = rows_of(case, Path(folder))
        saves += of_saves
        resumes += of_resumes
        print("\n".join(of_saves + of_resumes), flush=True)
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        real = measure(Path(folder))
    print(real)
    write_section("Checkpoints", text_of(saves, resumes, real))


if __name__ == "__main__":
    main()
