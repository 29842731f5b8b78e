"""A full disk: the run stops with a clear error, and goes on when there is room again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_helpers
import run_patches
from run_helpers import Materials

from finetune.__main__ import main as finetune
from finetune.sft import main as train


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, of 8 MiB or the size that the test asks for."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    size = f"size={getattr(request, 'param', '8m')}"
    words = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(mount)]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"mounting a small tmpfs is not allowed here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("disk_full"))


def test_no_room_for_a_line(materials, small_disk):
    """Between checkpoints only logs are written."""
    output_dir = small_disk / "run"
    own = {"max_steps": 60, "learning_rate": 1e-4, "report_to": "tensorboard"}
    settings = materials.settings(output_dir, **own)
    fill = {"patch": run_patches.fill_disk, "patch_arguments": (str(small_disk), 4, 0)}
    output = run_helpers.train(settings, expect=1, **fill).output()
    assert "the run folder's disk is full: No space left on device" in output
    assert "as there is no checkpoint yet" in output and "Traceback" not in output
    (small_disk / "filler").unlink()
    run_helpers.train(settings)
    assert len(run_helpers.sample_ids(output_dir)) == len(run_helpers.losses(output_dir)) == 60
    names = [event["event"] for event in run_helpers.lines(output_dir / "events.jsonl")]
    assert names.count("start") == 2 and names[-1] == "end", "no event follows half of another"


@pytest.mark.parametrize("small_disk", ["16k"], indirect=True)
def test_no_room_for_the_first_files_of_a_run_or_a_command(
    materials, small_disk, monkeypatch, capsys
):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = small_disk.parent / "run.yaml"
    config.write_text(json.dumps(materials.settings(small_disk / "run", max_steps=2)))
    assert train(["--config", str(config)]) == 1
    said = capsys.readouterr().err
    assert "[ERROR] the disk is full: No space left on device" in said
    assert f"where: {small_disk}/run" in said and "Traceback" not in said
    shutil.rmtree(small_disk / "run")
    words = f"prepare --data {materials.data} --text-field output --tokenizer {materials.model}"
    assert finetune([*words.split(), "--output-dir", str(small_disk / "tokens")]) != 0
    said = capsys.readouterr().err
    assert "No space left on device" in said and "Traceback" not in said
