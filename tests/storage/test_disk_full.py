"""A full disk: the run stops with a clear error, and the previous checkpoint is as good as
before.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_helpers
import run_patches
from run_helpers import Materials

from finetune.storage.checkpoint_files import list_checkpoints, verify


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, of 8 MiB or the size that the test asks for."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={getattr(request, 'param', '8m')}",
            "tmpfs",
            str(mount),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"mounting a small tmpfs is not allowed here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("disk_full"))


@pytest.mark.parametrize(
    ("processes", "leave_bytes", "changes"),
    [
        (1, 40_960, {}),
        (1, 0, {}),
        (2, 40_960, {"finetuning": "full", **run_helpers.LAYOUTS["zero3"]}),
    ],
    ids=["no room for a checkpoint", "no room for a line", "ZeRO-3 slices"],
)
def test_enospc(materials, small_disk, processes, leave_bytes, changes):
    output_dir = small_disk / "run"
    settings = materials.settings(output_dir, save_steps=2, max_steps=6, **changes)
    reference = materials.settings(
        materials.folder / f"reference-{processes}", save_steps=2, max_steps=6, **changes
    )
    filled = {"patch": run_patches.fill_disk, "patch_arguments": (str(small_disk), 4, leave_bytes)}
    ranks = run_helpers.train(settings, processes, expect=1, launched=True, **filled)
    assert "No space left on device" in ranks.output()
    assert "Traceback" not in ranks.output()
    assert [folder.name for folder in list_checkpoints(output_dir)] == ["checkpoint-2"]
    assert verify(output_dir / "checkpoint-2").valid
    assert not list(output_dir.glob(".staging-*"))

    (small_disk / "filler").unlink()
    run_helpers.train(settings, processes, launched=True)
    run_helpers.train(reference, processes, launched=True)
    assert run_helpers.events(output_dir, "resume")[-1]["checkpoint"] == "checkpoint-2"
    assert run_helpers.sample_ids(output_dir) == run_helpers.sample_ids(
        Path(reference["output_dir"])
    )
    assert run_helpers.losses(output_dir) == run_helpers.losses(Path(reference["output_dir"]))


def test_enospc_while_a_line_is_logged(materials, small_disk):
    """Between checkpoints only logs are written."""
    output_dir = small_disk / "run"
    settings = materials.settings(
        output_dir, max_steps=60, learning_rate=1e-4, report_to="tensorboard"
    )
    filled = {"patch": run_patches.fill_disk, "patch_arguments": (str(small_disk), 4, 0)}
    ranks = run_helpers.train(settings, expect=1, **filled)
    assert "the run folder's disk is full: No space left on device" in ranks.output()
    assert "as there is no checkpoint yet" in ranks.output()
    assert "Traceback" not in ranks.output()
    (small_disk / "filler").unlink()
    run_helpers.train(settings)
    assert len(run_helpers.sample_ids(output_dir)) == len(run_helpers.losses(output_dir)) == 60
    names = [event["event"] for event in run_helpers.lines(output_dir / "events.jsonl")]
    assert names.count("start") == 2 and names[-1] == "end", "no event follows half of another"


@pytest.mark.parametrize("small_disk", ["4k", "16k"], indirect=True)
def test_a_disk_without_room_for_the_first_files(materials, small_disk, run_cli):
    """Before a checkpoint, and before the folder's own files."""
    config = small_disk.parent / "run.yaml"
    config.write_text(json.dumps(materials.settings(small_disk / "run", max_steps=2)))
    done = run_cli(["--config", config])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "[ERROR] the disk is full: No space left on device" in done.stderr
    assert f"where: {small_disk}/run" in done.stderr


@pytest.mark.parametrize("small_disk", ["16k"], indirect=True)
def test_commands_on_a_full_disk(materials, small_disk, run_cli):
    """What a command writes beside a run: each says what is full."""
    run = materials.folder / "commands"
    run_helpers.train(materials.settings(run, max_steps=2))
    model = Path(materials.settings(run)["model"])
    commands = (
        ["report", str(run), "--output", str(small_disk / "report.html")],
        ["prepare", "--data", str(materials.settings(run)["data"]), "--text-field", "output"]
        + ["--tokenizer", str(model), "--output-dir", str(small_disk / "tokens")],
    )
    for command in commands:
        done = run_cli(command, module="finetune")
        assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
        assert "No space left on device" in done.stderr, command
