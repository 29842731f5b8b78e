"""For tests: what goes wrong in a rank, on purpose. A rank calls such a function before its run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def follow_steps(before: Callable[[int], None]) -> None:
    """Call `before(step)` (1-based) before each optimizer step of this rank."""
    from finetune.training.executor import StepExecutor

    original = StepExecutor.run

    def run(self: StepExecutor, model: torch.nn.Module, batch: Any) -> Any:
        before(batch.step + 1)
        return original(self, model, batch)

    StepExecutor.run = run


def environment_of_one_rank(rank: int, which: int, name: str, value: str) -> None:
    if rank == which:
        os.environ[name] = value


def long_quiet(rank: int, seconds: float) -> None:
    """A rank that is refused with the others is quiet for so long, however busy the machine is."""
    from finetune.training import run

    run.QUIET_RANK_SECONDS = seconds


def note_memory(rank: int, after_step: int, path: str) -> None:
    """Write the bytes of CUDA that this process holds at the end of a step; 0 without a device."""
    from finetune.training.trainer import RunTrainer

    original = RunTrainer.end_of_step

    def end_of_step(self: RunTrainer) -> None:
        original(self)
        if self.state.global_step == after_step:
            held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
            Path(path).write_text(str(held))

    RunTrainer.end_of_step = end_of_step


def wrap_microbatch_losses(wrap: Callable[..., torch.Tensor]) -> None:
    """Let `wrap(original, model, microbatch, device, head)` compute a microbatch's losses."""
    from finetune.modeling import objective as execution

    original = execution.microbatch_losses
    execution.microbatch_losses = lambda *arguments: wrap(original, *arguments)


def hooked(losses: torch.Tensor, hook: Callable[..., Any]) -> torch.Tensor:
    """The same losses, whose gradients go through `hook` in the backward pass."""
    losses = losses.clone()
    losses.register_hook(hook)
    return losses


def limit_microbatch_tokens(
    rank: int, on_rank: int, limit_tokens: int, from_step: int = 1, where: str = "forward"
) -> None:
    """One rank's memory holds microbatches of so many tokens only, from a step on, in either pass."""
    if rank != on_rank:
        return
    now = [0]
    follow_steps(lambda step: now.__setitem__(0, step))

    def exhausted(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("test: out of memory in the backward pass")

    def wrap(
        original: Callable[..., torch.Tensor], model: Any, microbatch: Any, *arguments: Any
    ) -> torch.Tensor:
        too_large = now[0] >= from_step and microbatch.tokens > limit_tokens
        if too_large and where == "forward":
            raise torch.OutOfMemoryError(f"test: out of memory: {microbatch.tokens} tokens")
        losses = original(model, microbatch, *arguments)
        return hooked(losses, exhausted) if too_large else losses

    wrap_microbatch_losses(wrap)


def limit_device_memory(rank: int, limit_tokens: int, token_bytes: int = 4 << 20) -> None:
    """The device's allocator refuses microbatches of more tokens: each holds so many bytes until its
    backward. On a CPU, which has no such limit, the error is raised here.
    """
    true_float32(rank)  # so that losses of other microbatches can be compared
    limited: list[bool] = []

    def wrap(
        original: Callable[..., torch.Tensor], model: Any, microbatch: Any, device: Any, *rest: Any
    ) -> Any:
        losses = original(model, microbatch, device, *rest)
        if device.type != "cuda":
            if microbatch.tokens > limit_tokens:
                raise torch.OutOfMemoryError(f"{microbatch.tokens} tokens where {limit_tokens} fit")
            return losses
        if not limited:
            limited.append(True)
            torch.cuda.empty_cache()
            # Beside what tokens hold: room for the model's own activations, gradients and moments.
            bound = torch.cuda.memory_reserved() + limit_tokens * token_bytes + (128 << 20)
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(bound / whole)
        memory = torch.empty(microbatch.tokens * token_bytes, dtype=torch.uint8, device=device)
        return hooked(losses, lambda gradient, memory=memory: gradient)  # holds it

    wrap_microbatch_losses(wrap)


def true_float32(rank: int) -> None:
    """Products of float32 without TF32 on a device too."""
    from finetune.runtime import device

    device.use_fast_matmul = lambda device_type: None


def spoil_losses(
    rank: int, on_rank: int, steps: tuple[int, ...], factor: float, where: str = "loss"
) -> None:
    """Multiply one rank's losses, or only their gradients, by a factor in these steps (1-based)."""
    if rank != on_rank:
        return
    now = [0]
    follow_steps(lambda step: now.__setitem__(0, step))

    def wrap(original: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        losses = original(*arguments)
        if now[0] not in steps:
            return losses
        return losses * factor if where == "loss" else hooked(losses, lambda grad: grad * factor)

    wrap_microbatch_losses(wrap)


def overflow_then_stop(rank: int, overflow: int, stop: int) -> None:
    """Gradients that are infinite in one step, and SIGTERM in another (1-based)."""
    spoil_losses(rank, 0, (overflow,), float("inf"), "gradient")
    signal_self(rank, 0, stop, signal.SIGTERM)


def delay(rank: int, on_rank: int, seconds: float) -> None:
    """Start one rank later than the others."""
    import time

    if rank == on_rank:
        time.sleep(seconds)


def other_data(rank: int, on_rank: int, path: str, seconds: float) -> None:
    """Give one rank other training data; rank 0 comes later: the run folder cannot tell the others."""
    from finetune.data import dataset

    delay(rank, 0, seconds)
    original = dataset.prepare_samples
    if rank == on_rank:
        dataset.prepare_samples = lambda paths, *arguments, **options: original(
            (path,), *arguments, **options
        )


def pause_steps(rank: int, seconds: float) -> None:
    """Make each step take at least so long, so that a test can act while the run is at work."""
    import time

    follow_steps(lambda step: time.sleep(seconds))


def signal_self(rank: int, on_rank: int, step: int, number: int) -> None:
    """Send this rank a signal in a step (1-based)."""
    follow_steps(lambda now: rank == on_rank and now == step and os.kill(os.getpid(), number))


def signal_while_asking(rank: int, on_rank: int, microbatch: int, number: int) -> None:
    """Send this rank a signal when the model is asked before the run, in a microbatch (1-based)."""
    from finetune.training.preferences import trainer

    original, asked = trainer.log_probabilities, [0]

    def log_probabilities(*arguments: Any) -> torch.Tensor:
        asked[0] += 1
        if rank == on_rank and asked[0] == microbatch:
            os.kill(os.getpid(), number)
        return original(*arguments)

    trainer.log_probabilities = log_probabilities


def kill_self(rank: int, on_rank: int, step: int) -> None:
    """SIGKILL this rank before a step (1-based)."""
    signal_self(rank, on_rank, step, signal.SIGKILL)


def short_lock_wait(rank: int, seconds: float) -> None:
    """Wait for a locked run folder for `seconds` instead of 30."""
    from finetune.storage import run_lock

    run_lock.RunLock.__init__.__defaults__ = (seconds,)


def fill_disk(rank: int, folder: str, step: int, leave_bytes: int) -> None:
    """Before a step (1-based), fill the file system of `folder` up to so many bytes."""

    def fill(now: int) -> None:
        if rank == 0 and now == step:
            with Path(folder, "filler").open("wb", buffering=0) as file:
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(4096))
                file.truncate(max(0, file.tell() - leave_bytes))

    follow_steps(fill)


def slow_saves(rank: int, seconds: float) -> None:
    """Let each sync of a file or folder that a thread of a save asks for take at least so long."""
    import threading
    import time

    from finetune.storage import durable_files

    plain = durable_files._sync_descriptor

    def sync(descriptor: int) -> None:
        plain(descriptor)
        if threading.current_thread().name.startswith("save"):
            time.sleep(seconds)

    durable_files._sync_descriptor = sync


def note_hashes(rank: int, record: str) -> None:
    """Append `<rank> <checkpoint>/<file>` for every file that this rank reads to hash it."""
    from finetune.storage import durable_files

    plain = durable_files.hash_file

    def noted(path: Path) -> str:
        with open(record, "a") as file:
            file.write(f"{rank} {path.parent.name}/{path.name}\n")
        return plain(path)

    durable_files.hash_file = noted


def watch_opened_files(rank: int, folder: str, record: str) -> None:
    """Append the path of every file that this rank opens below `folder` to the file `record`."""
    import sys

    descriptor = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    busy = [False]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or busy[0] or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        busy[0] = True
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if Path(path).is_relative_to(folder):
            os.write(descriptor, (path + "\n").encode())
        busy[0] = False

    sys.addaudithook(hook)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def stranger(rank: int, proof: str) -> None:
    """Instead of rank 1: somebody who reached the store, and sends a pickle to the ranks."""
    if rank == 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        group = dist.new_group(backend="gloo")
        # Ranks compare digests (`Control.have_one`): with another one of the checkpoints they see
        # they ask whether a network may be why, with another one of the run for the whole.
        for numbers in (8, 1, 8):
            said = torch.zeros(numbers, dtype=torch.int64)
            dist.send(said, 0, group=group)
            dist.broadcast(said, 0, group=group)
        sent = torch.frombuffer(bytearray(pickle.dumps(Bomb(proof))), dtype=torch.uint8)
        # As all_gather_object sends it: the length, then the bytes, padded to the longest.
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(lengths, torch.tensor([len(sent)]), group=group)
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(sent)] = sent
        dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded, group=group)
        os._exit(0)


def exchange(rank: int, folder: str) -> None:
    """Instead of a run: what ranks give each other, written down as it arrived."""
    import torch.distributed as dist

    from finetune.training.control import Control

    if not dist.is_initialized():  # a second start would meet keys of the first in the store
        dist.init_process_group("gloo")
    control = Control(2)
    values = ["short", [1e-320, float("nan"), -0.0, 0.1 + 0.2, float("inf"), 2**60 + 1]][rank]
    found = [control.gather((rank, values, "x" * 1000 * rank, None)), control.share({"mine": rank})]
    found += [control.sum([0.1 * (rank + 1), rank]), control.token()]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def note_collectives(rank: int, benchmarks: str, record: str) -> None:
    """Write down what rank 0 sends in each microbatch and in the rest of each step but the last."""
    import sys

    if rank:
        return
    sys.path.insert(0, benchmarks)
    from roofline_network import Collectives, Listener, agreements

    from finetune.training.executor import StepExecutor

    parts = [Collectives()]
    running = contextlib.ExitStack()
    original, enter = StepExecutor.run, StepExecutor._microbatch

    def microbatch(self: StepExecutor, *arguments: Any, **options: Any) -> Any:
        parts.append(Collectives())
        return enter(self, *arguments, **options)

    def run(self: StepExecutor, model: torch.nn.Module, batch: Any) -> Any:
        if batch.step:
            with open(record, "a") as file:
                file.write(json.dumps([part.plain() for part in parts]) + "\n")
        else:
            running.enter_context(agreements(lambda: parts[-1]))
            running.enter_context(Listener(lambda: parts[-1]))
        parts.clear()
        result = original(self, model, batch)
        parts.append(Collectives())
        return result

    StepExecutor.run, StepExecutor._microbatch = run, microbatch
