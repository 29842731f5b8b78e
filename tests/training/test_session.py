"""Where a run starts, decided with what the ranks read: nothing is lost or written before all agree."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from file_system_calls import watched

from finetune.errors import StateError
from finetune.runtime.launch_environment import launch_world
from finetune.storage import durable_files
from finetune.storage.checkpoint_files import CheckpointWriter, list_checkpoints, verify
from finetune.storage.run_folder import write_identity
from finetune.training.resume import Resume, decide_resume
from finetune.training.session import Session

IDENTITY = {"kind": "sft", "seed": 1}


def save(run: Path, step: int) -> None:
    with CheckpointWriter(run, step, f"t{step}") as writer:
        (writer.folder / "state.json").write_text(json.dumps({"step": step, "padding": "a" * 100}))
        writer.publish(writer.seal(["state.json"]), {"identity": IDENTITY})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (5, 10, 15):
        save(folder, step)
    write_identity(folder, IDENTITY)
    (folder / "trainer_log.jsonl").write_text(
        "".join(json.dumps({"step": step}) + "\n" for step in range(1, 16))
    )
    return folder


def session(run: Path, resume: str = "auto", **identity: Any) -> Session:
    own = IDENTITY | identity
    options: dict[str, Any] = {"total_steps": 100, "allow_change": bool(identity)}
    return Session(
        run,
        launch_world(),
        identity=own,
        config_yaml="a: 1\n",
        log_samples=False,
        decide=lambda damaged: decide_resume(run, resume, own, damaged=damaged, **options),
    )


def damage(checkpoint: Path) -> None:
    path = checkpoint / "state.json"
    path.write_text(path.read_text().replace("aaa", "bbb"))


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path): path.read_bytes() for path in paths if path.parent.name != "logs"}


def test_what_cannot_be_read_here_is_no_reason_to_go_back(run, monkeypatch):
    """A stale mount on one node would take one checkpoint after the other."""
    before = content(run)

    def stale(paths: list[Path]) -> list[str]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(paths[0]))

    monkeypatch.setattr(durable_files, "hash_files", stale)
    said = "rank 0 cannot read the checkpoint: 'state.json' cannot be read"
    with pytest.raises(StateError, match=said), session(run) as started:
        started.agree_on_run(60)
    assert content(run) == before


def test_a_start_that_waited_for_the_folder_sees_what_was_saved_meanwhile(run: Path) -> None:
    waiting = session(run)
    save(run, 20)
    with waiting as started:
        assert started.start is not None and started.start.step == started.steps_done == 20


def test_the_smallest_of_the_nodes_out_of_memory_notes_counts(run: Path) -> None:
    """Some nodes that share the folder may not see the last one yet."""
    started = session(run)
    for notes, smallest in (
        ([None, {"token_budget": 96}, {"token_budget": 192}], {"token_budget": 96}),
        ([None, None], None),
    ):
        started.control = SimpleNamespace(gather=lambda mine, notes=notes: notes)
        assert started.out_of_memory_note() == smallest


def test_a_checkpoint_of_another_folder_takes_the_place_of_the_own_one(run, tmp_path):
    """Its own of that step is not trusted for the other's sake: the two of one name are two."""
    backup = Path(shutil.copytree(run / "checkpoint-10", tmp_path / "backup" / "checkpoint-10"))
    with session(run, str(run / "checkpoint-10")) as started:
        started.agree_on_run(60)
    found = [folder.name for folder in list_checkpoints(run)]
    assert found == ["checkpoint-5", "checkpoint-10"], "a newer one is another training's"
    damage(run / "checkpoint-10")
    with session(run, str(backup)) as started:
        started.agree_on_run(60)
        assert started.start is not None and started.start.folder == backup
    assert [folder.name for folder in list_checkpoints(run)] == ["checkpoint-5"]
    assert verify(run / "checkpoint-5").valid


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "new"])
def test_rank_0_may_come_between_any_two_looks_of_another(run, tmp_path, begun):
    """Until they meet, ranks look at the folder at any moment, and rank 0 makes and locks it."""
    wanted = session(run).start if begun else Resume(None, 0)
    looks = 0

    def hook(name: str, original: Any, args: Any, named: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == number:  # its own do not count
            with session(folder):
                assert (folder / ".lock").exists()
        return original(*args, **named)

    for number in range(1, 1000):
        looks = 0
        folder = run if begun else tmp_path / f"new-{number}"
        with watched(hook):
            assert session(folder).start == wanted
        if looks < number:  # there was no such look any more
            break
    assert number > 4


def test_a_damaged_path_is_refused_and_nothing_written(run: Path, tmp_path: Path) -> None:
    backup = Path(shutil.copytree(run / "checkpoint-10", tmp_path / "backup" / "checkpoint-10"))
    damage(backup)
    before, new = content(run), tmp_path / "new"
    for folder, identity in ((run, {"seed": 2}), (new, {})):
        refused = pytest.raises(StateError, match="the checkpoint is not valid: content changed")
        with refused, session(folder, str(backup), **identity) as started:
            started.agree_on_run(60)
    assert content(run) == before and content(new) == {}
    with session(new, str(run / "checkpoint-10")) as started:  # which is as free as it was
        started.agree_on_run(60)
