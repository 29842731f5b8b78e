"""A worker that trains nothing: does what it was told to in its first attempt."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from finetune.runtime.launch_environment import launch_world
from finetune.runtime.parent_watchdog import die_with_launcher

world = launch_world()
die_with_launcher(world)
folder, what = Path(sys.argv[1]), sys.argv[2]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
signals: list[int] = []


def note(text: str) -> None:
    with (folder / f"rank{world.rank}.txt").open("a") as file:
        file.write(f"{attempt} {text}\n")


def on_signal(number: int, frame: object) -> None:
    signals.append(number)
    note(f"signal {number}")


note(f"started {os.getpid()} {' '.join(sys.argv[3:])}".strip())
if what == "wait":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    # at once: print writes the end of the line by itself, and ranks share the pipe
    os.write(1, b"[INFO] waiting\n")
    while not signals:
        time.sleep(0.05)
    time.sleep(float(os.environ.get("SAVE_SECONDS", "0.5")))  # the checkpoint
    note("saved")
    sys.exit(3)
# One that fails has the others ended: not before they have written down that they were there.
while not all((folder / f"rank{rank}.txt").exists() for rank in range(world.world_size)):
    time.sleep(0.02)
fails, _, others = what.partition("-")
code = int(fails.removeprefix("exit")) if fails.startswith("exit") else 0
if code and attempt == 1:
    if world.rank == world.world_size - 1:
        print(f"[ERROR] exit code {code}, by order of the test", file=sys.stderr)
        sys.exit(code)
    if others == "others-wait":  # as in a collective
        time.sleep(600)
if what == "step-then-crash" and attempt == 1:
    (folder / "trainer_log.jsonl").write_text('{"step": 1}\n')
if "crash" in what and attempt == 1:
    raise RuntimeError("by order of the test")
os.write(1, b"[SUCCESS] done\n")
