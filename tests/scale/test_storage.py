"""What went wrong on shared storage before (all of it: exhaustive/scale/storage.py). Needs root and
/dev/fuse.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT
from safetensors.numpy import save_file

sys.path.append(str(ROOT / "exhaustive" / "scale"))

from shared_folder import SharedFolder, why_not

from finetune.commands.doctor.host import check_locks
from finetune.errors import FinetuneError, StateError
from finetune.runs.reader import FolderReader
from finetune.storage import checkpoint_files, durable_files, run_lock, shared_storage
from finetune.storage.checkpoint_files import CheckpointWriter, newest_valid, rotate, verify
from finetune.storage.run_folder import put_output, write_status
from finetune.storage.run_lock import CLAIM_NAME, RunLock, is_held
from finetune.training.resume import decide_resume

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFolder]:
    with SharedFolder(tmp_path_factory.mktemp("shared")) as shared:
        yield shared


@pytest.fixture
def shared(mounted: SharedFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedFolder]:
    """Two nodes of an empty run folder; what is not seen is looked for as long as seconds, not as a
    minute.
    """
    monkeypatch.setattr(checkpoint_files, "UNREAD_SECONDS", 1.0)
    monkeypatch.setattr(checkpoint_files, "SEEN_WITHIN_SECONDS", 3.0)
    (mounted.nodes[0] / "run").mkdir()
    yield mounted
    mounted.heal()
    mounted.set(absent_seconds=0, listing_seconds=0, attribute_seconds=0, entry_seconds=0)
    mounted.set(flock="shared", quota_bytes=1e18)
    for path in mounted.disk.iterdir():
        durable_files.remove_tree(path)


@pytest.fixture
def runs(shared: SharedFolder) -> tuple[Path, Path]:
    """The run folder as either node has it."""
    return shared.nodes[0] / "run", shared.nodes[1] / "run"


def save(run: Path, step: int) -> Path:
    with CheckpointWriter(run, step, f"t{step}") as writer:
        (writer.folder / "state.json").write_text(f'{{"step": {step}}}')
        return writer.publish(writer.seal(["state.json"]), {"identity": {}})


def test_a_machine_without_locks_respects_the_lock_of_one_that_has_some(
    shared, runs, monkeypatch
) -> None:
    """And the other way round; both believed to be alone before."""
    for one, other, flock in ((*runs, errno.ENOLCK), (*reversed(runs), "shared")):
        with RunLock(one, 0):
            # NFS grants no exclusive lock on what is open for reading.
            assert is_held(other) is True
            shared.set(flock=flock)
            with pytest.raises(StateError, match="another run works"):
                RunLock(other, 0).__enter__()
    assert is_held(runs[1]) is False
    monkeypatch.setattr(shared_storage, "mount_of", lambda path: ("nfs", "rw,vers=3,nolock"))
    with RunLock(runs[0], 0):  # locks that only one machine sees are none
        assert (shared.disk / "run" / CLAIM_NAME).exists()


def test_files_that_are_still_open_are_nobodys(runs: tuple[Path, Path]) -> None:
    """A reader on this machine: the file stays as `.nfs...`, the checkpoint is valid, and the
    reader is left alone.
    """
    run, newest = runs[0], {"checkpoint-2", "checkpoint-3"}
    other = save(run, 1) / "other.json"
    other.write_text("x")
    with other.open() as reader:
        other.unlink()
        assert any(map(durable_files.is_still_open, os.listdir(other.parent)))
        assert verify(other.parent).valid
        save(run, 2), save(run, 3)
        # not all of it could go
        assert rotate(run, 2, known_valid=newest) == []
        left = os.listdir(run / ".removing-checkpoint-1")
        assert left and all(map(durable_files.is_still_open, left)) and reader.read() == "x"
    time.sleep(0.1)
    rotate(run, 2, known_valid=newest)
    assert {*os.listdir(run)} == newest


def test_a_listing_that_is_old_makes_no_checkpoint_invalid(shared, runs) -> None:
    """The other node believes in a checkpoint that has gone meanwhile: it looks anew instead of
    skipping it.
    """
    run, other = runs
    save(run, 1)
    shared.set(listing_seconds=1.0, entry_seconds=1.0, absent_seconds=1.0, attribute_seconds=1.0)
    assert newest_valid(other)[0] == other / "checkpoint-1"
    save(run, 2), save(run, 3), save(run, 4)
    rotate(run, 2, known_valid={"checkpoint-3", "checkpoint-4"})
    found, skipped = newest_valid(other)
    assert skipped == [] and found is not None and found.name in ("checkpoint-1", "checkpoint-4")


def test_an_error_of_the_mount_does_not_send_a_run_back(shared, runs) -> None:
    """Before, the newest checkpoint was skipped, and set aside once the mount was well again."""
    run = runs[0]
    (run / "run_identity.json").write_text("{}")
    save(run, 1), save(run, 2)
    shared.fail("open|read", errno.EIO, "checkpoint-2/manifest", times=2)
    start = decide_resume(run, "auto", {}, total_steps=9, allow_change=False)
    assert start is not None and start.name == "checkpoint-2" and not start.skipped
    shared.fail("open|read", errno.EIO, "checkpoint-2/manifest", times=-1)
    with pytest.raises(StateError, match="checkpoint-2 cannot be read.*Input/output error"):
        decide_resume(run, "auto", {}, total_steps=9, allow_change=False)


def test_an_error_of_a_close_is_not_lost(shared, runs) -> None:
    """numpy's and safetensors' own writing lose it: cache entries and results were whole by their
    hashes, and empty.
    """
    run, values = runs[0], np.arange(50_000, dtype=np.float32)
    shared.set(quota_bytes=1000)
    with pytest.raises(OSError, match="quota"):
        durable_files.save_array(run / "tokens.npy", values)
    with pytest.raises(FinetuneError, match="model.safetensors was written, and is not whole"):
        put_output(run, lambda folder: save_file({"weights": values}, folder / "model.safetensors"))
    assert not (run / "model.safetensors").exists()
    shared.set(quota_bytes=1e18)
    put_output(run, lambda folder: save_file({"weights": values}, folder / "model.safetensors"))


def test_doctor_says_where_there_are_no_locks(shared: SharedFolder, tmp_path: Path) -> None:
    folder = shared.nodes[0] / "runs" / "new"
    assert [check.verdict for check in check_locks("output", folder)] == ["ok"]
    shared.set(flock=errno.ENOLCK)
    (check,) = check_locks("output", folder)
    assert (check.verdict, check.name) == ("warn", "locks_output") and "fuse.nfslike" in check.what
    assert os.listdir(shared.disk) == ["run"] and not list(check_locks("cache", tmp_path))


def test_what_is_in_the_lock_keeps_nobody_out(shared, runs) -> None:
    shared.fail("write", errno.EIO, "/.lock$")
    with RunLock(runs[0], 0):  # it was held by a process that believed it was refused
        assert is_held(runs[1])
    # Versions without claims left their name in the lock's file at the end.
    earlier = '{"pid": 1, "host": "elsewhere", "since": "2026-01-01T00:00:00+00:00"}'
    (shared.disk / "run" / ".lock").write_text(earlier)
    shared.set(flock=errno.ENOLCK)
    with RunLock(runs[0], 0):
        assert run_lock.holder(runs[0])["pid"] == os.getpid()


def test_a_reader_goes_on_after_an_error_of_its_mount(shared, runs) -> None:
    """A monitor ended with a traceback where its log was replaced, or the folder could not be read
    for a moment.
    """
    run, other = runs
    with RunLock(run, 0):
        write_status(run, "running", None, step=1)
        (run / "trainer_log.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
        reader = FolderReader(other)
        for operation in ("", "opendir", "read", "open"):
            if operation:
                shared.fail(operation, errno.ESTALE, "", times=4, node=1)
            assert (reader.poll().step, reader.poll().state) == (1, "running")
            shared.heal()
