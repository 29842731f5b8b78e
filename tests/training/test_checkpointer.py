"""A save by several ranks into one folder: each seals what it wrote, whatever the others are writing meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from finetune.storage.checkpoint_files import verify
from finetune.storage.run_log import RunLog
from finetune.training.checkpointer import Checkpointer
from finetune.training.control import Control


class Saved:
    """A state that writes one file, as rank 0's share of a sliced one."""

    def save(self, folder: Path, *, rank: int, world_size: int) -> list[str]:
        save_file({"x": torch.zeros(3)}, folder / "weights-00000.safetensors")
        return ["weights-00000.safetensors"]


def test_a_name_of_another_rank_that_does_not_stay_is_nobodys_loss(tmp_path: Path):
    """safetensors writes under a name of its own and renames: rank 1's must not be taken for a file of rank 0's."""
    passing: list[Path] = []

    def model_files(weights: object) -> Callable[[Path], None]:
        return write_model_files

    def write_model_files(folder: Path) -> None:
        state_folder = folder.parent
        passing.append(state_folder / ".tmpAbC")  # rank 1 begins
        passing[0].write_bytes(b"half")
        assert (state_folder / "weights-00000.safetensors").exists()
        (folder / "config.json").write_text("{}")
        (folder / "templates").mkdir()
        (folder / "templates" / "tool.jinja").write_text("x")

    class Ranks(Control):
        def gather(self, item: object) -> list[object]:
            if passing:
                passing[0].unlink(missing_ok=True)  # rank 1 is done, and the file has its own name
            return super().gather(item)

    saver = Checkpointer(
        tmp_path,
        Ranks(1),
        rank=0,
        world_size=1,
        metadata={"seed": 1},
        model_files=model_files,
        keep=2,
        runlog=RunLog(None),
        sample_log=None,
    )
    saver.save(7, Saved())
    name = saver.last
    found = verify(tmp_path / name)
    assert name == "checkpoint-7" and found.valid, found.why
    manifest = json.loads(next((tmp_path / name).glob("*manifest*")).read_text())
    assert sorted(manifest["files"]) == ["config.json", "templates/tool.jinja", "weights-00000.safetensors"]
    assert passing and not list(tmp_path.glob(".staging*"))
