"""Storage that is slow or shared: each misbehaviour with each thing that the product does with
files.

    python exhaustive/scale/storage.py            # all of it, into docs/evidence/scale.md (`make scale
    PART=storage`) python exhaustive/scale/storage.py flock save # those with these words in their names,
    printed only

The folder is a real network-like mount for every node (exhaustive/shared_folder.py), which needs root
and /dev/fuse. Every cell is demanded: no checkpoint lost, none called gone or invalid that is not,
no lock held twice.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "exhaustive"), str(ROOT / "tests")]

from document import write_section
from shared_folder import SharedFolder, why_not
from storage_operations import OPERATIONS, Cluster, preload

CACHED_SECONDS = 3.0
AT_ONCE = 4
WITH_RUNS = ("nothing", "caches", "what a node", "flock: ENOLCK")
INTRODUCTION = """
Two nodes share a folder. Each node is a separate FUSE mount with the kernel's caches, and a server identifies files by
their inodes, as NFS does (`exhaustive/shared_folder.py`). The nodes are processes with their own host names. They run:

- the run lock: held, refused, killed
- four saves by two ranks, with rotation
- the data cache, prepared by two nodes at the same time
- `prepare`, and its check on the other node
- a monitor that follows a run on the other node
- the export of a run and of a merge
- complete runs of two ranks that are killed and resumed immediately, with rank 0 on the other node

In each case no checkpoint may be lost, reported as missing or reported as invalid. No lock may be held twice. A pause
may only cause waiting. `make scale PART=storage` writes this section."""

# What the package renames by itself; a library's own rename (safetensors) fails with its error.
OUR_RENAMES = r"(staging-[^/]*|checkpoint-\d+|(making|merging)-[^/]*|\.(json|bin|index|yaml)(\.tmp)?|/model\.safetensors)$"


def _nothing() -> None:
    pass


def _local_locks() -> None:
    """The mount options of `local_lock=flock`, which FUSE cannot show."""
    from finetune.storage import shared_storage

    shared_storage.mount_of = lambda path: ("nfs4", "rw,local_lock=flock")


@dataclass(frozen=True)
class Misbehaviour:
    """What storage does.

    Attributes:
        settings: of the folder's server (network_file_system.Settings).
        faults: (operation, error, name, further facts) of network_file_system.Fault.
        flock_by: see SharedFolder.
        pause: seconds in which nothing is answered, from a second after the start on.
        patch: in each process.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    faults: tuple[tuple[str, int, str, dict[str, Any]], ...] = ()
    flock_by: str = "server"
    pause: float = 0.0
    patch: Callable[[], None] = _nothing

    def shared(self, place: Path) -> SharedFolder:
        return SharedFolder(place, flock_by=self.flock_by, **self.settings)


MISBEHAVIOURS = (
    Misbehaviour("nothing wrong"),
    Misbehaviour(
        f"caches of {CACHED_SECONDS:.0f} s: names, absent names, listings, sizes",
        dict.fromkeys(("entry_seconds", "absent_seconds", "listing_seconds", "attribute_seconds"), CACHED_SECONDS),
    ),
    Misbehaviour("what a node makes is hidden from others, 2 s", {"lag_seconds": 2.0}),
    Misbehaviour("ESTALE, once, at opening and at reading", {}, tuple(
        (operation, errno.ESTALE, "", {"node": node}) for operation in ("open", "read") for node in (0, 1)
    )),
    Misbehaviour("EIO, once, at opening and at reading", {}, tuple(
        (operation, errno.EIO, "", {"node": node}) for operation in ("open", "read") for node in (0, 1)
    )),
    Misbehaviour("EIO, once, at writing", {}, (("write", errno.EIO, "", {}),)),
    Misbehaviour("flock: ENOLCK", {"flock": errno.ENOLCK}),
    Misbehaviour("flock: EOPNOTSUPP", {"flock": errno.EOPNOTSUPP}),
    Misbehaviour("flock: ENOSYS", {"flock": errno.ENOSYS}),
    Misbehaviour("flock of each node alone (local_lock)", flock_by="kernel", patch=_local_locks),
    Misbehaviour("rename done, ENOENT reported, each time", {}, (
        ("rename|rename2", errno.ENOENT, OUR_RENAMES, {"done": True, "times": -1}),
    )),
    Misbehaviour("fsync of folders: EINVAL", {}, (("fsyncdir", errno.EINVAL, "", {"times": -1}),)),
    Misbehaviour("a disk of 50 MB/s", {"bytes_per_second": 50e6}),
    Misbehaviour("a pause of 30 s", pause=30.0),
    Misbehaviour("quota: EDQUOT at close, the data lost", {"quota_bytes": 250_000}),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    misbehaviour: str
    operation: str
    holds: bool
    text: str


def try_one(misbehaviour: Misbehaviour, operation: str, place: Path) -> Cell:
    """One operation on one kind of storage."""
    place.mkdir()
    with misbehaviour.shared(place) as shared:
        for name, number, path, facts in misbehaviour.faults:
            shared.fail(name, number, path, **facts)
        if misbehaviour.pause:
            shared.pause(misbehaviour.pause)
        cluster = Cluster(shared, place / "shared", misbehaviour.patch)
        try:
            text, holds = OPERATIONS[operation](cluster), True
        except AssertionError as error:
            text, holds = str(error), False
        finally:
            cluster.end()
    return Cell(misbehaviour.name, operation, holds, text)


def cells(words: list[str]) -> Iterator[Cell]:
    """In order, several at a time: most of the time is spent waiting."""
    asked = [
        (misbehaviour, operation)
        for misbehaviour in MISBEHAVIOURS
        for operation in OPERATIONS
        if all(word in f"{misbehaviour.name} {operation}" for word in words)
    ]
    preload()
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(AT_ONCE, mp_context=multiprocessing.get_context("fork")) as pool,
    ):
        places = [Path(folder) / str(number) for number in range(len(asked))]
        yield from pool.map(try_one, *zip(*asked, strict=True), places)


def run_cells(words: list[str]) -> Iterator[Cell]:
    """Whole runs, on a few kinds of storage."""
    if not all(word in "run" for word in words):
        return
    from storage_runs import killed_and_resumed

    for misbehaviour in MISBEHAVIOURS:
        if misbehaviour.name.startswith(WITH_RUNS):
            with (
                tempfile.TemporaryDirectory() as folder,
                SharedFolder(
                    Path(folder) / "shared", flock_by=misbehaviour.flock_by, **misbehaviour.settings
                ) as shared,
            ):
                try:
                    # A claim of a killed process is for its own machine to take over.
                    text = killed_and_resumed(
                        shared, Path(folder), elsewhere="flock" not in misbehaviour.name
                    )
                    yield Cell(misbehaviour.name, "run", True, text)
                except (AssertionError, TimeoutError) as error:
                    yield Cell(misbehaviour.name, "run", False, str(error))


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    found = []
    for cell in chain(cells(sys.argv[1:]), run_cells(sys.argv[1:])):
        print(
            f"{'holds' if cell.holds else 'FAILS'}  {cell.misbehaviour} / {cell.operation}:"
            f" {cell.text}",
            flush=True,
        )
        found.append(cell)
    if not sys.argv[1:]:
        write_section("Storage", section(found))
    return int(not all(cell.holds for cell in found))


def section(found: list[Cell]) -> str:
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        f"**{sum(cell.holds for cell in found)} of {len(found)} hold.**",
        "",
        "| storage | operation | what happened | |",
        "|---|---|---|---|",
    ]
    for cell in sorted(
        found, key=lambda cell: [each.name for each in MISBEHAVIOURS].index(cell.misbehaviour)
    ):
        text = re.sub(
            r"/[^ \"']*/shared\b", "FOLDER", cell.text.replace("|", "\\|").replace("\n", " ")
        )
        lines.append(
            f"| {cell.misbehaviour} | {cell.operation} | {text} |"
            f" {'holds' if cell.holds else 'FAILS'} |"
        )
    lines += [
        "",
        (
            "Largest case actually run: two nodes on one machine, 200 kB files, and caches that last"
            " 3 s instead of 60 s."
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
