"""Kill -9 at random moments of a run, resume, and compare with the run that was left alone.

    python exhaustive/crash.py             # all kills, the table into docs/evidence/crash_table.md (`make crash`)
    python exhaustive/crash.py 1           # one kill per kind of run, printed only

All ranks are killed at once, at a random moment: one kill in five while the run starts, the others
up to half a second after a random step, so while it trains, evaluates, saves or writes its result.
Others hit runs whose saves are slowed down, while a checkpoint is written and later steps are
trained. The same command is then given again. It must end well, every step's samples must be there
once and be those of the uninterrupted run, and the trained weights must be bit-identical to its
weights. (Kills at every file-system call of a save are in tests/storage/test_checkpoint_files.py.)
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import run_helpers as runs
import run_patches

TABLE = runs.ROOT / "docs" / "evidence" / "crash_table.md"
KINDS = (("lora", "plain"), ("lora", "zero3_offload"), ("full", "plain"), ("full", "zero3_offload"))
PROCESSES, STEPS, SAVE_STEPS = 2, 12, 3
KILLS_PER_KIND = 5
# Killed while a checkpoint is written behind the training: how they train, sharding, processes.
KINDS_BEHIND = (("lora", "plain", 1), ("full", "plain", 2), ("full", "zero3_offload", 2))
KILLS_BEHIND = 4
SLOW_SYNC_SECONDS = 0.1


@dataclass(frozen=True)
class Kill:
    """One killed run and what became of it; `why` is empty where all is as it must be.

    Attributes:
        saving: step of the checkpoint that was being written; None where there was none.
    """

    finetuning: str
    layout: str
    processes: int
    after_seconds: float
    steps_done: int
    saving: int | None
    resumed_from: int
    why: str


class Crashes:
    """Kills runs of one kind after another.

    Args:
        folder: everything is written below it.
        seed: of the moments.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.materials = runs.make_materials(folder / "materials", layers=2)
        self.moments = random.Random(seed)
        self._references: dict[tuple[str, str, int], tuple[Path, float]] = {}

    def settings(self, name: str, finetuning: str, layout: str) -> dict[str, Any]:
        return self.materials.settings(
            self.folder / name,
            finetuning=finetuning,
            lora_dropout=0.3,
            max_steps=STEPS,
            save_steps=SAVE_STEPS,
            valid_data=str(self.materials.valid),
            **runs.LAYOUTS[layout],
        )

    def reference(
        self, finetuning: str, layout: str, processes: int = PROCESSES
    ) -> tuple[Path, float]:
        """The uninterrupted run, and the seconds that it took."""
        kind = (finetuning, layout, processes)
        if kind not in self._references:
            # the first of all also starts the server that ranks are forked from
            for name in ("first", "reference"):
                settings = self.settings(
                    f"{name}-{finetuning}-{layout}-{processes}", finetuning, layout
                )
                began = time.monotonic()
                runs.train(settings, processes)
            self._references[kind] = Path(settings["output_dir"]), time.monotonic() - began
        return self._references[kind]

    def kill(self, number: int, finetuning: str, layout: str) -> Kill:
        """Kill one run at a random moment, resume, compare."""
        reference, seconds = self.reference(finetuning, layout)
        settings = self.settings(f"{finetuning}-{layout}-{number}", finetuning, layout)
        run = Path(settings["output_dir"])
        began = time.monotonic()
        ranks = runs.start(settings, PROCESSES)
        if number % 5 == 0:
            time.sleep(self.moments.uniform(0.0, 0.7) * seconds)
        else:
            step = self.moments.randint(1, STEPS - 1)
            runs.wait_for(lambda: steps_done(run) >= step, 240.0, what=f"step {step}")
            time.sleep(self.moments.uniform(0.0, 1.0) * seconds / (2 * STEPS))
        ranks.kill()
        return self._resumed(
            settings, reference, (finetuning, layout, PROCESSES), time.monotonic() - began
        )

    def kill_behind(self, number: int, finetuning: str, layout: str, processes: int) -> Kill:
        """Kill a run that trains while it writes a checkpoint, resume, compare."""
        reference, _ = self.reference(finetuning, layout, processes)
        settings = self.settings(
            f"behind-{finetuning}-{layout}-{processes}-{number}", finetuning, layout
        )
        run = Path(settings["output_dir"])
        first = self.moments.choice((SAVE_STEPS, 2 * SAVE_STEPS))

        def trains_and_saves() -> bool:
            step = step_being_saved(run) if run.exists() else None
            return step is not None and first <= step < steps_done(run)

        began = time.monotonic()
        ranks = runs.start(
            settings, processes, patch=run_patches.slow_saves, patch_arguments=(SLOW_SYNC_SECONDS,)
        )
        runs.wait_for(trains_and_saves, 240.0, what="a step after the one that is being saved")
        time.sleep(self.moments.uniform(0.0, 6 * SLOW_SYNC_SECONDS))
        ranks.kill()
        return self._resumed(
            settings, reference, (finetuning, layout, processes), time.monotonic() - began
        )

    def _resumed(
        self,
        settings: dict[str, Any],
        reference: Path,
        kind: tuple[str, str, int],
        after_seconds: float,
    ) -> Kill:
        run = Path(settings["output_dir"])
        done, saving = steps_done(run), step_being_saved(run) if run.exists() else None
        runs.train(settings, kind[2])
        resumed = runs.events(run, "resume")
        resumed_from = resumed[-1]["step"] if resumed else 0
        return Kill(
            *kind, after_seconds, done, saving, resumed_from, self._differences(run, reference)
        )

    @staticmethod
    def _differences(run: Path, reference: Path) -> str:
        import torch

        wrong = []
        if runs.sample_ids(run) != runs.sample_ids(reference):
            wrong.append("other samples")
        if runs.losses(run) != runs.losses(reference):
            wrong.append("other losses")
        found, expected = runs.result_weights(run), runs.result_weights(reference)
        if found.keys() != expected.keys() or not all(
            torch.equal(found[name], expected[name]) for name in expected
        ):
            wrong.append("other weights")
        return "; ".join(wrong)


def steps_done(run: Path) -> int:
    log = run / "trainer_log.jsonl"
    return len(log.read_bytes().splitlines()) if log.exists() else 0


def step_being_saved(run: Path) -> int | None:
    return next((int(path.name.split("-")[1]) for path in run.glob(".staging-*")), None)


def table(kills: list[Kill]) -> str:
    """The committed page."""
    held = sum(not kill.why for kill in kills)
    lines = [
        "# Kill -9 at random moments",
        "",
        (
            f"Each run has {STEPS} steps on a CPU and saves a checkpoint every {SAVE_STEPS} steps."
            " LoRA runs have dropout 0.3. All"
        ),
        (
            "processes are killed at a random moment, then the same command runs again. Every step"
            " must have the same samples and"
        ),
        "the same loss, and the final weights must be bit-identical to an uninterrupted run.",
        "`make crash` writes this page.",
        "",
        (
            f"The last {len(KINDS_BEHIND) * KILLS_BEHIND} were killed while a checkpoint was being"
            " written and later steps were being"
        ),
        (
            'trained. Writing was slowed down for that. If no step is listed under "being saved",'
            " a save had just ended."
        ),
        "",
        f"**{held} of {len(kills)} hold.**",
        "",
        (
            "| trained | sharding | processes | killed after | steps logged by then | being saved |"
            " resumed from step | |"
        ),
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for kill in kills:
        sharding = "DDP" if kill.layout == "plain" else kill.layout.replace("_", " + ")
        lines.append(
            f"| {kill.finetuning} | {sharding} | {kill.processes} | {kill.after_seconds:.2f} s |"
            f" {kill.steps_done} | {'' if kill.saving is None else kill.saving} |"
            f" {kill.resumed_from} | {kill.why or 'holds'} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> int:
    per_kind = int(arguments[0]) if arguments else KILLS_PER_KIND
    per_kind_behind = int(arguments[0]) if arguments else KILLS_BEHIND
    every = len(KINDS) * per_kind + len(KINDS_BEHIND) * per_kind_behind
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory() as folder:
        crashes = Crashes(Path(folder), seed=20)
        for finetuning, layout in KINDS:
            for number in range(per_kind):
                kills.append(crashes.kill(number, finetuning, layout))
                print(f"{len(kills)}/{every} {kills[-1]}", flush=True)
        for kind in KINDS_BEHIND:
            for number in range(per_kind_behind):
                kills.append(crashes.kill_behind(number, *kind))
                print(f"{len(kills)}/{every} {kills[-1]}", flush=True)
    page = table(kills)
    print(page)
    if not arguments:
        TABLE.write_text(page, encoding="utf-8")
    return int(any(kill.why for kill in kills))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
