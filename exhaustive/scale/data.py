"""The preparation of 10 million conversations, for real, and the start after it: writes "Data" of
docs/evidence/scale.md.

    python exhaustive/scale/data.py [--rows N] [--peer-rows N,N] [--folder FOLDER] [--peers FOLDER]

Memory is the sum over all processes of their share of each page (Pss), looked at every half second;
"private" leaves out the pages of files, which the system takes back when it needs them. What is
made lies in FOLDER and is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "exhaustive" / "scale")]

import psutil
from data_document import section
from document import write_section

SUBJECTS = (
    "router",
    "switch",
    "bridge",
    "gateway",
    "firewall",
    "packet",
    "frame",
    "segment",
    "route",
    "port",
)
WORDS = (
    "forwards",
    "drops",
    "marks",
    "counts",
    "queues",
    "reads",
    "tags",
    "sends",
    "keeps",
    "checks",
)
CUTOFF_LEN, PROCESSES, LOCAL_RANKS = 128, 2, 8
ROWS_AT_ONCE = 10_000
LOOK_SECONDS = 0.5
LOST_SECONDS = 10  # of work on a shard that is not finished, when the process is killed
PROCESS = ROOT / "exhaustive" / "scale" / "data_process.py"


def write_rows(path: Path, rows: int) -> None:
    """Short conversations: a question of five words, an answer of four."""
    with path.open("w", encoding="ascii") as file:
        for first in range(0, rows, ROWS_AT_ONCE):
            file.write("".join(map(_row, range(first, min(rows, first + ROWS_AT_ONCE)))))


def _row(row: int) -> str:
    one, two = SUBJECTS[row % 10], SUBJECTS[row // 10 % 10]
    question, answer = f"What does {one} {row} do?", f"It {WORDS[row // 100 % 10]} the {two}."
    return (
        f'{{"messages": [{{"role": "user", "content": "{question}"}}, '
        f'{{"role": "assistant", "content": "{answer}"}}]}}\n'
    )


def write_model(folder: Path) -> None:
    """A model of a few numbers, with the tokenizer and the template that all contenders read
    alike.
    """
    from sft_inputs import _write_model

    settings = {
        "shape": "tiny",
        "vocabulary": 4096,
        "cutoff_len": CUTOFF_LEN,
        "seed": 1,
        "weights": "float32",
    }
    _write_model(folder, settings, "cpu")


class Watch:
    """Looks at a process and its children while they live, and at how much they have on disk."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.peak_bytes = self.peak_private_bytes = self.peak_disk_bytes = 0
        self._process, self._folder, self._end = psutil.Process(pid), folder, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes = [self._process, *self._process.children(recursive=True)]
                shares = [_shares(process.pid) for process in processes]
                self.peak_bytes = max(self.peak_bytes, sum(whole for whole, _ in shares))
                self.peak_private_bytes = max(
                    self.peak_private_bytes, sum(own for _, own in shares)
                )
            self.peak_disk_bytes = max(self.peak_disk_bytes, disk_bytes(self._folder))


def _shares(pid: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return 0, 0
    sizes = {name: int(value) * 1024 for name, value, _ in map(str.split, lines)}
    return sizes["Pss:"], sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]


def disk_bytes(folder: Path) -> int:
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(here, name)).st_blocks * 512
    return total


class Work:
    """Runs contenders on one file."""

    def __init__(self, folder: Path, rows: int, peers: Path) -> None:
        self.folder, self.rows, self.peers = folder, rows, peers
        self.data = folder / f"rows{rows}.jsonl"
        if not self.data.exists():
            write_rows(self.data, rows)
        columns = {"messages": "messages"}
        tags = {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        }
        described = {
            "file_name": self.data.name,
            "formatting": "sharegpt",
            "columns": columns,
            "tags": tags,
        }
        (folder / "dataset_info.json").write_text(
            json.dumps({self.data.stem: described}), encoding="utf-8"
        )

    def start(self, contender: str, name: str, **environment: str) -> subprocess.Popen[bytes]:
        cache = self.cache(contender)
        cache.mkdir(exist_ok=True)
        work = {
            "contender": contender,
            "model": str(self.folder / "model"),
            "data": str(self.data),
            "cache": str(cache),
        }
        work |= {
            "result": str(self.folder / f"{name}.json"),
            "log": str(self.folder / f"{name}.log"),
        }
        work |= {"cutoff_len": CUTOFF_LEN, "processes": PROCESSES, "rows": self.rows}
        settings = self.folder / f"{name}.settings.json"
        settings.write_text(json.dumps(work), encoding="utf-8")
        is_ours = contender in ("ours", "invented")
        python = sys.executable if is_ours else str(self.peers / contender / "bin" / "python")
        given = {**os.environ, "PYTHONPATH": str(ROOT) if is_ours else "", "OMP_NUM_THREADS": "1"}
        output = (self.folder / f"{name}.out").open("wb")
        return subprocess.Popen(
            [python, str(PROCESS), str(settings)],
            env=given | environment,
            stdout=output,
            stderr=output,
        )

    def cache(self, contender: str) -> Path:
        return self.folder / f"cache-{contender.replace('invented', 'ours')}-{self.rows}"

    def remove(self, contender: str) -> None:
        shutil.rmtree(self.cache(contender), ignore_errors=True)
        self.data.unlink()

    def result(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def whole(self, contender: str, name: str) -> dict[str, Any]:
        """Run to the end, watched."""
        begin = time.perf_counter()
        process = self.start(contender, name)
        watch = Watch(process.pid, self.cache(contender))
        code = process.wait()
        watch.stop()
        found: dict[str, Any] = {"wall_seconds": time.perf_counter() - begin, "code": code}
        found |= {
            "peak": watch.peak_bytes,
            "private": watch.peak_private_bytes,
            "disk": watch.peak_disk_bytes,
        }
        return found | (self.result(name) if code == 0 else {})

    def killed_and_resumed(self, part: float) -> dict[str, Any]:
        """Kill when that part of the records is in finished shards; then go on."""
        begin = time.perf_counter()
        process = self.start("ours", "killed")
        watch = Watch(process.pid, self.cache("ours"))
        while (finished := self._finished_records()) < part * self.rows:
            if process.poll() is not None:
                raise SystemExit(
                    f"ended too early: {(self.folder / 'killed.out').read_text()[-2000:]}"
                )
            time.sleep(1)
        time.sleep(LOST_SECONDS)
        children = psutil.Process(process.pid).children(recursive=True)
        cpu = sum(sum(one.cpu_times()[:2]) for one in [psutil.Process(process.pid), *children])
        process.kill()
        process.wait()
        watch.stop()
        before = time.perf_counter() - begin
        if psutil.wait_procs(children, timeout=20)[1]:
            raise SystemExit("a process outlived the killed one")
        after = self.whole("ours", "resumed")
        peaks = {
            "peak": watch.peak_bytes,
            "private": watch.peak_private_bytes,
            "disk": watch.peak_disk_bytes,
        }
        joined = {name: max(value, after[name]) for name, value in peaks.items()}
        joined["cpu_seconds"] = cpu + after["cpu_seconds"]
        return (
            after
            | joined
            | {
                "before_kill": before,
                "kept_records": finished,
                "after_kill": after["wall_seconds"],
            }
        )

    def _finished_records(self) -> int:
        states = sorted(self.cache("ours").glob(".making-*/scratch/state-*.json"))
        with contextlib.suppress(OSError, IndexError):
            return int(json.loads(states[-1].read_bytes())["place"]["records"])
        return 0

    def ranks(self, count: int) -> list[dict[str, Any]]:
        """So many processes of one node at once, with the samples made before."""
        who = [
            {"RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": str(count)} for n in range(count)
        ]
        started = [
            self.start("ours", f"rank{n}", **environment) for n, environment in enumerate(who)
        ]
        if any(process.wait() for process in started):
            raise SystemExit((self.folder / "rank0.out").read_text()[-2000:])
        return [self.result(f"rank{n}") for n in range(count)]


def measure(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """What is found, by name; each as soon as it is."""
    folder = options.folder
    write_model(folder / "model")
    if options.start_rows:
        yield from start(options)
    for rows in options.peer_rows:
        work = Work(folder, rows, options.peers)
        for contender in ("ours", "trl", "llamafactory"):
            yield f"{contender} {rows}", work.whole(contender, contender) | {"rows": rows}
            shutil.rmtree(work.cache(contender))
        work.remove("ours")
    if options.rows:
        work = Work(folder, options.rows, options.peers)
        yield (
            "large",
            work.killed_and_resumed(0.3)
            | {
                "rows": options.rows,
                "bytes": work.data.stat().st_size,
            },
        )


def start(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The start with samples that are there."""
    work = Work(options.folder, options.start_rows, options.peers)
    made = work.whole("invented", "invented")
    yield (
        "entry",
        {"rows": options.start_rows, "bytes": disk_bytes(work.cache("ours")), "code": made["code"]},
    )
    os.sync()  # what is mapped and not yet written out would count as private
    for ranks in (1, LOCAL_RANKS):
        yield f"start {ranks}", work.ranks(ranks)
    work.remove("ours")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument(
        "--peer-rows",
        type=lambda text: [int(word) for word in text.split(",") if word != "0"],
        default=[100_000, 1_000_000],
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "scale-data")
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "bench-venv")
    parser.add_argument("--start-rows", type=int, default=10_000_000)
    parser.add_argument(
        "--found",
        type=Path,
        help="JSON of what was found before, for a part at a time (0 rows: none)",
    )
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    found: dict[str, Any] = {}
    if options.found and options.found.exists():
        found = json.loads(options.found.read_text(encoding="utf-8"))
    try:
        for name, value in measure(options):
            found[name] = {"found": value, "load": os.getloadavg()[2]}
            print(name, json.dumps(found[name]), flush=True)
            if options.found:
                options.found.write_text(json.dumps(found, indent=1), encoding="utf-8")
    finally:
        shutil.rmtree(options.folder)
    if {"large", "entry"} <= set(found):
        write_section("Data", section(found))


if __name__ == "__main__":
    main()
