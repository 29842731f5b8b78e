"""What the product does with files, each as nodes do it that share a folder
(exhaustive/shared_folder.py).

An operation is a function of a `Cluster`; it returns what happened, in words, and raises
AssertionError where something is lost or a message is false.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "exhaustive"), str(ROOT / "tests")]

import shared_folder
from shared_folder import SharedFolder

PATIENCE_SECONDS = 120.0
PRELOADED = (
    "finetune.commands.clean.leftovers",
    "finetune.commands.merge.command",
    "finetune.commands.merge.merging",
    "finetune.data.cache",
    "finetune.data.corpus.preparation",
    "finetune.runs.reader",
    "numpy",
    "safetensors.numpy",
    "transformers",
)
_fork = multiprocessing.get_context("fork")


def preload() -> None:
    """What the processes need is imported before they are forked."""
    for name in PRELOADED:
        importlib.import_module(name)


class Task:
    """A function at work on a node; `result` is what it returned, `{"error": text}` for an error of
    the package.
    """

    def __init__(
        self, cluster: Cluster, node: int, work: Callable[..., Any], *arguments: Any
    ) -> None:
        self._receive, send = _fork.Pipe(duplex=False)
        paths = (tuple(map(str, cluster.shared.nodes)), str(cluster.onto))
        self.process = _fork.Process(
            target=_on_node, args=(send, node, *paths, cluster.patch, work, arguments)
        )
        self.process.start()
        send.close()
        cluster.tasks.append(self)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def result(self) -> Any:
        assert self._receive.poll(PATIENCE_SECONDS), "nothing came"
        found = self._receive.recv()
        self.process.join()
        assert "bug" not in (found if isinstance(found, dict) else {}), found["bug"]
        return found


def _on_node(
    send: Any,
    node: int,
    nodes: tuple[str, ...],
    onto: str,
    patch: Callable[[], None],
    work: Any,
    arguments: Any,
) -> None:
    from finetune.errors import FinetuneError

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable(logging.WARNING)
    shared_folder.on_node(node, nodes, onto)
    patch()
    try:
        found = work(Path(onto), *arguments)
    except FinetuneError as error:
        found = {"error": str(error)}
    except BaseException:
        found = {"bug": traceback.format_exc()}
    send.send(found)
    os._exit(0)


class Cluster:
    """Nodes that share one folder, which each sees at `onto`."""

    def __init__(self, shared: SharedFolder, onto: Path, patch: Callable[[], None]) -> None:
        self.shared, self.onto, self.patch = shared, onto, patch
        self.tasks: list[Task] = []
        onto.mkdir(exist_ok=True)

    def end(self) -> None:
        """Leave nothing at work."""
        for task in self.tasks:
            task.kill()

    def relieve(self) -> None:
        """Somebody has read the message and made room."""
        self.shared.set(quota_bytes=1e18)

    def start(self, node: int, work: Callable[..., Any], *arguments: Any) -> Task:
        return Task(self, node, work, *arguments)

    def do(self, node: int, work: Callable[..., Any], *arguments: Any) -> Any:
        return self.start(node, work, *arguments).result()


def _error(found: Any) -> str:
    """The error's text in a line; "" for none."""
    return (
        re.sub(r"\s*\n\s*", "; ", found["error"])
        if isinstance(found, dict) and "error" in found
        else ""
    )


def _until_good(cluster: Cluster, do: Callable[[], Any]) -> tuple[list[str], Any]:
    """Do it, and once more where it fails; the first time's error, and what it gave."""
    found = do()
    errors = [_error(found)] if _error(found) else []
    if errors:
        cluster.relieve()
        found = do()
        assert not _error(found), [*errors, _error(found)]
    return errors, found


# ---------------------------------------------------------------- the run lock


def _hold(folder: Path, seconds: float, ready: str = "") -> str:
    from finetune.storage.run_lock import RunLock

    with RunLock(folder / "run", 0.5):
        (folder / "run" / f"held{ready}").touch()
        time.sleep(seconds)
    return "held"


def lock(cluster: Cluster) -> str:
    """Node 0 holds, node 1 is refused; node 0 ends, node 1 holds; killed, and both try again."""
    holder = cluster.start(0, _hold, 60.0, "1")
    _until(cluster.shared.disk / "run" / "held1", holder)
    refused = _error(cluster.do(1, _hold, 0.0))
    assert "another run works in this folder: process" in refused, f"not refused: {refused}"
    holder.kill()
    after_kill = _error(cluster.do(1, _hold, 0.0))
    again = cluster.do(0, _hold, 0.0)
    assert again == "held", again
    assert cluster.do(1, _hold, 0.0) == "held", "not free after a good end"
    if not after_kill:
        return "the other node is refused; the lock is free after kill -9"
    assert "rm " in after_kill, after_kill
    told = after_kill[after_kill.index("if it is gone") :]
    return f'the other node is refused, also after kill -9 ("{told}"); the same node is not'


def _until(path: Path, task: Task) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline and task.process.is_alive(), f"{path.name} did not come"
        time.sleep(0.02)


# ---------------------------------------------------------------- checkpoints


def _slice(rank: int, step: int, size_bytes: int) -> bytes:
    return random.Random(f"{rank} {step}").randbytes(size_bytes)


def _write_slice(folder: Path, rank: int, step: int, size_bytes: int) -> Any:
    """A rank's part of a save, as the checkpointer does it."""
    from finetune.storage.checkpoint_files import CheckpointWriter

    with CheckpointWriter(folder / "run", step, f"t{step}") as writer:
        name = f"weights-{rank:05d}.safetensors"
        # As a library writes it: under another name first.
        (writer.folder / f".tmp{rank}").write_bytes(_slice(rank, step, size_bytes))
        os.rename(writer.folder / f".tmp{rank}", writer.folder / name)
        return writer.seal([name])


def _publish(folder: Path, step: int, records: dict[str, Any]) -> Any:
    from finetune.storage.checkpoint_files import CheckpointWriter, list_checkpoints, rotate

    with CheckpointWriter(folder / "run", step, f"t{step}") as writer:
        published = writer.publish(records, {})
    removed = rotate(
        folder / "run", 2, known_valid={each.name for each in list_checkpoints(folder / "run")}
    )
    return [published.name, removed]


def _newest(folder: Path) -> Any:
    """As a command that looks on sees them."""
    from finetune.storage.checkpoint_files import newest_valid

    found, skipped = newest_valid(folder / "run")
    return [found.name if found is not None else "checkpoint-0", [why for _, why in skipped]]


def _resumed(folder: Path) -> Any:
    """As rank 0 of a run that starts sees them."""
    from finetune.storage.run_folder import list_anew
    from finetune.storage.run_lock import RunLock

    with RunLock(folder / "run"):
        list_anew(folder / "run")
        return _newest(folder)


def save(cluster: Cluster, size_bytes: int = 200_000) -> str:
    """Four saves by two nodes, two kept; after each, the other node looks for the newest checkpoint
    at once.
    """
    (cluster.shared.disk / "run").mkdir(exist_ok=True)
    errors = []
    for step in range(1, 5):
        for attempt in range(4):  # as many errors as are put in
            parts = [cluster.start(rank, _write_slice, rank, step, size_bytes) for rank in (0, 1)]
            records = [part.result() for part in parts]
            failed = next((_error(found) for found in records if _error(found)), "")
            found = (
                {"error": failed}
                if failed
                else cluster.do(0, _publish, step, records[0] | records[1])
            )
            if not _error(found):
                break
            assert attempt < 3, f"failed again and again: {_error(found)}"
            errors.append(_error(found))
            cluster.relieve()
            assert step < 2 or cluster.do(1, _newest)[0] == f"checkpoint-{step - 1}", (
                "the previous one is not valid"
            )
            cluster.do(0, _clean)
        name, skipped = cluster.do(1, _newest)
        # A moment ago's, perhaps, but nothing that is there is called broken.
        assert not skipped and name in (f"checkpoint-{step - 1}", f"checkpoint-{step}"), [
            step,
            name,
            skipped,
        ]
    late = cluster.shared.lag_seconds
    time.sleep(late)
    resumed = cluster.do(1, _resumed)
    assert resumed == ["checkpoint-4", []], f"the other node would resume from {resumed}"
    kept = sorted(
        path.name
        for path in (cluster.shared.disk / "run").iterdir()
        if not path.name.startswith(".")
    )
    assert kept == ["checkpoint-3", "checkpoint-4"], kept
    if errors:
        return f'one save fails and the previous checkpoint remains; the next save succeeds: "{errors[0][:150]}"'
    return "saved, rotated, resumed on the other node" + (f" {late:.0f} s later" if late else "")


def _clean(folder: Path) -> Any:
    from finetune.storage.checkpoint_files import clean_staging

    return clean_staging(folder / "run")


# ---------------------------------------------------------------- the data cache


def _cached(folder: Path, notes: str) -> Any:
    import numpy as np

    from finetune.data.cache import open_or_make
    from finetune.storage.durable_files import save_array

    def make(target: Path) -> dict[str, Any]:
        with open(notes, "a") as file:
            file.write("made\n")
        time.sleep(0.3)
        save_array(target / "tokens.npy", np.arange(100_000))
        return {"rows": 100_000}

    entry = open_or_make(folder / "cache", {"data": "1"}, make)
    return int(np.load(entry / "tokens.npy", mmap_mode="r").sum())


def cache(cluster: Cluster) -> str:
    """Two nodes ask at once, then one again."""
    notes = cluster.onto.parent / "made"
    notes.write_text("")

    def both() -> Any:
        tasks = [cluster.start(node, _cached, str(notes)) for node in (0, 1)]
        found = [task.result() for task in tasks]
        return next((each for each in found if _error(each)), found)

    errors, found = _until_good(cluster, both)
    after = cluster.do(1, _cached, str(notes))
    assert set(map(str, [*found, after])) == {str(sum(range(100_000)))}, [found, after]
    left = [
        name for name in os.listdir(cluster.shared.disk / "cache") if name.startswith(".making")
    ]
    assert not left, left
    made = notes.read_text().count("made")
    said = f'one start fails, the next succeeds: "{errors[0][:120]}"; ' if errors else ""
    return said + (
        "prepared once, used by both" if made == 1 else f"made {made} times, both use one"
    )


# ---------------------------------------------------------------- prepare's shards


def _prepare(folder: Path, data: str) -> Any:
    from finetune.data.corpus.preparation import PrepareSettings, prepare_tokens

    settings = PrepareSettings(vocab_size=280, shard_tokens=4000, valid_fraction=0.2)
    prepared = prepare_tokens((data,), folder / "tokens", settings, num_workers=1)
    return [prepared.made, sum(len(headers) for headers in prepared.splits.values())]


def prepare(cluster: Cluster) -> str:
    """Made on one node, checked at once on the other, where nothing may be missing."""
    data, numbers = cluster.onto.parent / "corpus.jsonl", random.Random(0)
    data.write_text(
        "".join(
            json.dumps({"text": f"link {numbers.random()} router " * 3}) + "\n" for _ in range(400)
        )
    )
    errors, made = _until_good(cluster, lambda: cluster.do(0, _prepare, str(data)))
    time.sleep(cluster.shared.lag_seconds)
    more, checked = _until_good(cluster, lambda: cluster.do(1, _prepare, str(data)))
    errors += more
    assert checked[0] == 0 and checked[1] == made[1] >= 2, [made, checked]
    said = "prepared on one node, complete on the other"
    return said if not errors else f'fails, the same command goes on: "{errors[0][:120]}"; {said}'


# ---------------------------------------------------------------- who reads while a run writes


def _write_run(folder: Path, steps: int) -> Any:
    from finetune.storage.run_folder import RunLock, write_identity, write_status
    from finetune.storage.run_log import RunLog

    run = folder / "run"
    try:
        with RunLock(run, 0.5):
            write_identity(run, {"seed": 1})
            write_status(run, "running", None, step=0)
            log = RunLog(run)
            for step in range(1, steps + 1):
                log.step({"step": step, "loss": 1.0})
                write_status(run, "running", None, step=step)
                time.sleep(0.05)
            log.close()
            write_status(run, "done", 0, step=steps)
    except OSError as error:
        return {"error": str(error)}
    return "written"


def _watch(folder: Path, steps: int) -> Any:
    from finetune.commands.clean.leftovers import Stale, add_unfinished_checkpoints
    from finetune.runs.reader import FolderReader

    reader, states, last, orders = FolderReader(folder / "run"), [], 0, True
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        view = reader.poll()
        orders, last = orders and view.step >= last, view.step
        states += [view.state] if not states or states[-1] != view.state else []
        if (folder / "run").is_dir():  # as `clean` asks first
            add_unfinished_checkpoints(Stale([]), folder / "run")
        if view.state == "done" and view.step >= steps:
            break
        time.sleep(0.05)
    return {"states": states, "orders": orders, "step": last}


def readers(cluster: Cluster, steps: int = 40) -> str:
    """A monitor on one node follows a run on the other."""
    writer = cluster.start(0, _write_run, steps)
    _until(cluster.shared.disk / "run" / "status.json", writer)
    time.sleep(cluster.shared.lag_seconds)
    watched = cluster.start(1, _watch, steps)
    written = writer.result()
    if _error(written):
        watched.kill()
        return f'the run ends with the error: "{_error(written)[:100]}"'
    seen = watched.result()
    assert not _error(seen), seen
    assert seen["orders"] and seen["step"] == steps, seen
    assert [state for state in seen["states"] if state != "waiting"] == ["running", "done"], seen
    return "every step is shown, in order"


# ---------------------------------------------------------------- results


def _export(folder: Path) -> Any:
    from types import SimpleNamespace

    import numpy as np
    from safetensors.numpy import save_file

    from finetune.commands.merge import command, merging
    from finetune.storage.durable_files import os_error_in
    from finetune.storage.run_folder import put_output

    def write(target: Path, *_: Any, **__: Any) -> None:
        save_file({"weights": np.arange(50_000, dtype=np.float32)}, target / "model.safetensors")
        (target / "config.json").write_text("{}")

    (folder / "run").mkdir(exist_ok=True)
    try:
        put_output(folder / "run", write)
    except Exception as error:  # as the end of a run does (training/execute.py)
        if (cause := os_error_in(error)) is None:
            raise
        return {"error": str(cause)}
    merging.merge_into = write  # the files of a merge, without its model
    command.publish(SimpleNamespace(), folder / "merged", SimpleNamespace(format="safetensors"))
    return "written"


def _look(folder: Path) -> Any:
    from finetune.storage.durable_files import hash_files

    return hash_files([folder / name / "model.safetensors" for name in ("run", "merged")])


def export(cluster: Cluster) -> str:
    """The result of a run and of a merge, read at once on another node."""
    errors, _ = _until_good(cluster, lambda: cluster.do(0, _export))
    time.sleep(cluster.shared.lag_seconds)
    seen = cluster.do(1, _look)
    assert seen == [seen[0]] * 2, seen
    left = [name for name in os.listdir(cluster.shared.disk) if name.startswith(".merging")]
    assert not left, left
    return (
        "written; complete on the other node"
        if not errors
        else f'fails, then succeeds: "{errors[0][:130]}"'
    )


OPERATIONS: dict[str, Callable[[Cluster], str]] = {
    "run lock": lock,
    "save": save,
    "data cache": cache,
    "prepare": prepare,
    "monitor": readers,
    "export": export,
}
