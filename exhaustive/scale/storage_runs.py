"""A run of two ranks on two nodes that share its folder (exhaustive/shared_folder.py): killed, and
resumed elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "exhaustive"), str(ROOT / "tests")]

import run_helpers as runs
import run_patches
import shared_folder
from shared_folder import SharedFolder

STEPS, SAVE_STEPS = 8, 2


def on_node(rank: int, nodes: tuple[str, ...], onto: str) -> None:
    """A rank on its node, in steps that are long enough to be killed in."""
    shared_folder.on_node(rank, nodes, onto)
    run_patches.pause_steps(rank, 0.3)


def killed_and_resumed(shared: SharedFolder, place: Path, *, elsewhere: bool) -> str:
    """Train, kill all ranks, and give the command again at once.

    Args:
        elsewhere: rank 0 comes back on the other node.
    """
    materials = runs.make_materials(place / "materials")
    output_dir = place / "run"
    output_dir.mkdir()
    settings = materials.settings(output_dir, max_steps=STEPS, save_steps=SAVE_STEPS)
    nodes, log = tuple(map(str, shared.nodes)), shared.disk / "trainer_log.jsonl"
    ranks = runs.start(settings, 2, patch=on_node, patch_arguments=(nodes, str(output_dir)))
    runs.wait_for(
        lambda: log.exists() and len(log.read_bytes().splitlines()) >= STEPS - 2, what="steps"
    )
    ranks.kill()
    newest = max(
        (int(path.name.split("-")[1]) for path in shared.disk.glob("checkpoint-*")), default=0
    )
    again = nodes[::-1] if elsewhere else nodes
    ranks = runs.start(settings, 2, patch=on_node, patch_arguments=(again, str(output_dir)))
    codes = ranks.wait()
    assert codes == [0, 0], ranks.output()[-1500:]
    resumed = [event["step"] for event in runs.events(shared.disk, "resume")]
    assert newest and resumed == [newest], f"resumed from {resumed}, not from {newest}"
    assert not runs.events(shared.disk, "skipped_checkpoint") and not list(
        shared.disk.glob(".invalid-*")
    )
    assert len(runs.sample_ids(shared.disk)) == len(runs.losses(shared.disk)) == STEPS
    return (
        "killed, resumed from its newest checkpoint with rank 0 on"
        f" {'the other' if elsewhere else 'the same'} node"
    )
