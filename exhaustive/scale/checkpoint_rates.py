"""Checkpoints of a few GB by real processes on a real disk: how fast they are written, hashed,
verified and loaded.

Beside the package's writer stands what it had before: safetensors' `save_file`, fsync, then each
file read back for its hash.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from finetune.storage import durable_files
from finetune.storage.run_log import RunLog
from finetune.training.checkpointer import Checkpointer
from finetune.training.control import Control
from finetune.training.session import Session
from finetune.training.state import TrainingState, write_tensors

PROCESSES = 4
MATRIX = (4096, 4096)
MATRICES = 24  # 1.6 GB of weights, 4.8 GB in all
MB = 10**6


def old_write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path)
    durable_files.sync_file(path)
    durable_files.hash_file(path)


def tensors_of(rank: int) -> dict[str, torch.Tensor]:
    """Different numbers for every rank, 67 MB each."""
    generator = torch.Generator().manual_seed(rank)
    return {
        f"layers.{number}.weight": torch.randn(MATRIX, generator=generator) for number in range(8)
    }


def rates(rank: int, folder: Path, meet: Callable[[], object]) -> dict[str, float]:
    """MB/s of one rank's file of 0.54 GB, old and new, while the others write theirs; and MB in a
    second of a core.
    """
    tensors = tensors_of(rank)
    size = sum(tensor.nbytes for tensor in tensors.values())
    found = {}
    for name, write in (("old", old_write), ("new", write_tensors)):
        path = folder / f"{name}-{rank}.safetensors"
        meet()
        began, worked = time.monotonic(), time.process_time()
        write(path, tensors)
        found[f"{name}_core"] = size / MB / (time.process_time() - worked)
        meet()
        found[name] = size / MB / (time.monotonic() - began)
    same = (folder / f"old-{rank}.safetensors").read_bytes() == (
        folder / f"new-{rank}.safetensors"
    ).read_bytes()
    assert same, "the file is not what safetensors writes"
    for name in ("old", "new"):
        (folder / f"{name}-{rank}.safetensors").unlink()
    return found


class State:
    """torch's optimizer state: the parameters stand in for their moments, so that four processes
    fit the machine.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.state = {
            p: {"step": torch.tensor(1.0), "exp_avg": p.data, "exp_avg_sq": p.data}
            for p in parameters
        }


def run(rank: int, folder: Path) -> dict[str, float]:
    """A save and a resume of the whole; seconds, and the longest that this rank was in a
    collective.
    """
    control = Control(PROCESSES)
    longest = [0.0]
    plain = dist.all_reduce

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.monotonic()
        found = plain(*arguments, **options)
        longest[0] = max(longest[0], time.monotonic() - began)
        return found

    dist.all_reduce = timed
    few = list(tensors_of(0).values())
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(few[number % len(few)]) for number in range(MATRICES)]
    )
    found = rates(rank, folder, lambda: control.any(False))
    state = TrainingState(model, optimizer=State(list(model)), form="parts")
    saver = Checkpointer(
        folder,
        control,
        rank=rank,
        world_size=PROCESSES,
        metadata={"seed": 1},
        model_files=lambda weights: lambda folder: None,
        keep=2,
        runlog=RunLog(None),
        sample_log=None,
    )
    longest[0] = 0.0
    began = time.monotonic()
    saver.save(1, state, wait=True)
    found["save_seconds"] = time.monotonic() - began
    world: Any = SimpleNamespace(rank=rank, world_size=PROCESSES)
    session: Any = SimpleNamespace(world=world, control=control)
    began = time.monotonic()
    assert Session.problem_in(session, folder / "checkpoint-1") is None
    found["verify_seconds"] = time.monotonic() - began
    found["longest_wait_seconds"] = longest[0]
    state.load_weights(folder / "checkpoint-1")
    return found


def one_process(rank: int, folder: str, store: str, results: Any) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, PROCESSES), rank=rank, world_size=PROCESSES
    )
    torch.set_num_threads(1)
    results.put((rank, run(rank, Path(folder))))
    dist.destroy_process_group()


def measure(folder: Path) -> dict[str, float]:
    """The slowest of the processes each, and the bytes of the checkpoint."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = str(folder / "store")
    children = [
        context.Process(target=one_process, args=(rank, str(folder), store, results))
        for rank in range(PROCESSES)
    ]
    for child in children:
        child.start()
    found = dict(results.get(timeout=900) for _ in children)
    for child in children:
        child.join()
    size = sum(path.stat().st_size for path in (folder / "checkpoint-1").iterdir())
    shutil.rmtree(folder / "checkpoint-1")
    slowest: dict[str, float] = {"bytes": size, "cores": os.cpu_count() or 1}
    for name in found[0]:
        pick = min if name.startswith(("old", "new")) else max
        slowest[name] = pick(found[rank][name] for rank in found)
    return slowest
