"""Checkpoint folders: every kill, every power loss, every error of the disk, every damaged file."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_system_calls import PowerLoss, breaking, killed_at, watched
from safetensors.numpy import load_file, save_file

from finetune.__main__ import main as finetune
from finetune.commands.checkpoints import command as checkpoints_command
from finetune.errors import ConfigError, FinetuneError
from finetune.storage import checkpoint_files, durable_files
from finetune.storage.checkpoint_files import (
    CheckpointWriter,
    clean_staging,
    list_checkpoints,
    newest_valid,
    rotate,
    set_aside,
    verify,
)

METADATA = {
    "global_batch_size": 8,
    "seed": 42,
    "schedule_hash": "ab" * 32,
    "packages": {"torch": "2.13.0"},
}
NAMES = ("adapter_model.safetensors", "moments/slices-0.safetensors", "trainer_state.json")


def contents(step: int) -> dict[str, bytes]:
    """What the files of a step hold: different for every step and file."""
    generator = random.Random(step)
    return {name: generator.randbytes(100 + 10 * index) for index, name in enumerate(NAMES)}


def write_by_os(path: Path, data: bytes) -> None:
    """As a rank's library would, but by calls that the tests see; in two writes, unsynced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(descriptor, data[:50])
    os.write(descriptor, data[50:])
    os.close(descriptor)


def save(run_folder: Path, step: int, token: str = "t0") -> Path:
    with CheckpointWriter(run_folder, step, token) as writer:
        os.mkdir(writer.folder / "moments")
        files = contents(step)
        # Tensors are hashed as they are written, what others write is read back.
        hashed = {name: [files[name][:50], memoryview(files[name])[50:]] for name in NAMES[:2]}
        records = {
            name: durable_files.write_hashed(writer.folder / name, parts)
            for name, parts in hashed.items()
        }
        write_by_os(writer.folder / NAMES[2], files[NAMES[2]])
        return writer.publish(records | writer.seal(NAMES[2:]), METADATA)


def save_and_rotate(run_folder: Path, step: int, token: str = "t0") -> None:
    """As a run that went on from the checkpoint of the step before."""
    written = save(run_folder, step, token)
    rotate(run_folder, 2, known_valid={written.name, f"checkpoint-{step - 1}"})


def assert_holds(folder: Path, step: int) -> None:
    assert folder.name == f"checkpoint-{step}"
    assert {name: (folder / name).read_bytes() for name in NAMES} == contents(step)


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def make_before(folder: Path, third: str) -> None:
    """A run with checkpoints 1 and 2, and at step 3 nothing, a valid one or a broken one."""
    folder.mkdir()
    save(folder, 1)
    save(folder, 2)
    if third != "none":
        save(folder, 3)
    if third == "broken":
        (folder / "checkpoint-3" / NAMES[0]).write_bytes(b"")


# ------------------------------------------------------------------------------------ a normal save
def test_a_save_is_a_valid_checkpoint_with_a_readable_manifest(run_folder: Path) -> None:
    folder = save(run_folder, 7)
    assert names_in(run_folder) == ["checkpoint-7"]
    assert_holds(folder, 7)
    validity = verify(folder)
    assert (validity.valid, validity.why) == (True, "")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == validity.manifest
    assert (
        manifest["step"] == 7
        and manifest["schema_version"] == 1
        and manifest["metadata"] == METADATA
    )
    for name, data in contents(7).items():
        assert manifest["files"][name] == {
            "size_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    assert str(run_folder) not in (folder / "manifest.json").read_text()


def test_several_processes_write_into_one_staging_folder(run_folder: Path) -> None:
    tensors = {rank: {"moment": np.full(5, rank, np.float32)} for rank in range(3)}
    writers = [CheckpointWriter(run_folder, 4, "shared") for _ in range(3)]
    records = {}
    for rank, writer in enumerate(writers):
        with writer:
            save_file(tensors[rank], writer.folder / f"slices-{rank}.safetensors")
            records.update(writer.seal([f"slices-{rank}.safetensors"]))
    with writers[0] as writer:
        folder = writer.publish(records, METADATA)
    assert verify(folder).valid
    for rank in range(3):
        np.testing.assert_array_equal(
            load_file(folder / f"slices-{rank}.safetensors")["moment"], tensors[rank]["moment"]
        )


def test_large_files_are_hashed_in_parallel_with_the_same_result(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "PARALLEL_HASHING_FROM_BYTES", 1)
    folder = save(run_folder, 1)
    monkeypatch.undo()
    assert verify(folder).valid


def test_a_valid_checkpoint_of_the_same_step_is_kept(run_folder: Path) -> None:
    inode = os.stat(save(run_folder, 3)).st_ino
    assert os.stat(save(run_folder, 3, "t1")).st_ino == inode
    assert names_in(run_folder) == ["checkpoint-3"]


@pytest.mark.parametrize("kind", ["broken", "file", "link"])
def test_an_invalid_one_of_the_same_step_is_moved_aside(
    run_folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = run_folder / "checkpoint-3"
    if kind == "broken":
        save(run_folder, 3)
        (target / "trainer_state.json").unlink()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(run_folder)
    with caplog.at_level(logging.WARNING, "finetune"):
        assert_holds(save(run_folder, 3, "t1"), 3)
    assert names_in(run_folder) == [".invalid-checkpoint-3-1", "checkpoint-3"]
    assert "moved aside to .invalid-checkpoint-3-1" in caplog.text
    set_aside(target, "for the test")
    assert ".invalid-checkpoint-3-2" in names_in(run_folder)


@pytest.mark.parametrize(
    "name", ["training_args.bin", "rng_state.pth", "optimizer.pt", "manifest.json", "x.PY"]
)
def test_publish_refuses_what_no_checkpoint_holds(run_folder: Path, name: str) -> None:
    with (
        pytest.raises(FinetuneError, match="must not hold"),
        CheckpointWriter(run_folder, 1, "t") as writer,
    ):
        write_by_os(writer.folder / name, b"x" * 60)
        writer.publish(writer.seal([name]), {})
    assert names_in(run_folder) == []


def test_publish_refuses_files_that_are_unsealed_absent_or_facts_that_are_not_json(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "VISIBLE_WITHIN_SECONDS", 0.3)
    with (
        pytest.raises(FinetuneError, match="no rank sealed.*stray"),
        CheckpointWriter(run_folder, 1, "t") as writer,
    ):
        write_by_os(writer.folder / "stray.json", b"x" * 60)
        writer.publish({}, {})
    with pytest.raises(FinetuneError, match="(?s)not seen.*far.json.*all nodes share"):  # noqa: SIM117
        with CheckpointWriter(run_folder, 1, "t") as writer:
            writer.publish({"far.json": {"size_bytes": 3, "sha256": "0" * 64}}, {})
    with (
        pytest.raises(FinetuneError, match="plain JSON"),
        CheckpointWriter(run_folder, 1, "t") as writer,
    ):
        writer.publish({}, {"loss": float("nan")})
    assert names_in(run_folder) == []


def test_a_token_or_step_that_would_leave_the_folder_is_refused(run_folder: Path) -> None:
    for step, token in ((1, "../x"), (1, ""), (1, "a-b"), (-1, "a")):
        with pytest.raises(ValueError):
            CheckpointWriter(run_folder, step, token)


def test_ranks_that_fail_together_remove_their_staging_folder_together(run_folder: Path) -> None:
    """Every rank discards when the save is given up; none may stop at what another has removed
    already.
    """
    writer = CheckpointWriter(run_folder, 1, "t")
    with writer:
        for number in range(300):
            (writer.folder / f"folder-{number}").mkdir()
            (writer.folder / f"folder-{number}" / "file.json").write_text("{}")
    children = []
    for _ in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            writer.discard()
            os._exit(0)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert names_in(run_folder) == []


def test_a_file_is_hashed_as_it_is_written(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, of which the system takes parts; synced on the way; nothing is read; a file that
    is there stays.
    """
    data, calls, plain = random.Random(1).randbytes(100_000), [], os.write
    monkeypatch.setattr(durable_files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(durable_files, "SYNC_EVERY_BYTES", 30_000)

    def hook(
        name: str, original: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        calls.append(name)
        return plain(args[0], args[1][:700]) if name == "write" else original(*args, **kwargs)

    path = run_folder / "tensors"
    with watched(hook):
        record = durable_files.write_hashed(
            path, [data[:1], b"", memoryview(data)[1:-5], data[-5:]]
        )
    assert path.read_bytes() == data
    assert record == {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert "read" not in calls and calls.count("fsync") == 4 and calls[-2:] == ["fsync", "close"]
    assert path.stat().st_mode & 0o777 == durable_files.new_file_mode()
    with pytest.raises(FileExistsError):
        durable_files.write_hashed(path, [b"other"])
    assert path.read_bytes() == data


# ----------------------------------------------------------------------------- kills and power loss
def check_after_a_stop(folder: Path, third: str) -> int:
    """What must hold after any stop of `save_and_rotate(folder, 3)`; the step that a resume would
    go on from.
    """
    found, _ = newest_valid(folder)
    assert found is not None
    step = checkpoint_files.step_of(found.name)
    assert step in (2, 3)
    assert_holds(found, step)
    if third == "broken":  # never thrown away
        broken = [
            path
            for path in (folder / "checkpoint-3", folder / ".invalid-checkpoint-3-1")
            if path.exists()
        ]
        assert any(
            (path / NAMES[0]).read_bytes() == b"" for path in broken if (path / NAMES[0]).exists()
        )
    clean_staging(folder)
    assert not [name for name in os.listdir(folder) if name.startswith((".staging", ".removing"))]
    save_and_rotate(folder, step + 1, "t9")
    found, skipped = newest_valid(folder)
    assert found is not None and skipped == []
    assert_holds(found, step + 1)
    return step


@pytest.mark.parametrize("third", ["none", "valid", "broken"])
@pytest.mark.parametrize(
    ("torn", "stride"), [(False, 3), pytest.param(False, 1, marks=pytest.mark.slow), (True, 1)]
)
def test_killed_at_every_call_of_a_save(
    tmp_path: Path, third: str, torn: bool, stride: int
) -> None:
    before = tmp_path / "before"
    make_before(before, third)
    steps = []
    for number in range(0, 10_000, stride):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(before, folder)
        killed = killed_at(number, lambda folder=folder: save_and_rotate(folder, 3), torn=torn)
        steps.append(check_after_a_stop(folder, third))
        shutil.rmtree(folder)
        if not killed:
            break
    assert len(steps) > (7 if torn else 100 // stride) and not killed
    assert steps == sorted(steps) and steps[-1] == 3  # once the new one is there it stays
    assert steps[0] == (3 if third == "valid" else 2)


@pytest.mark.parametrize("third", ["none", "valid", "broken"])
def test_power_lost_after_every_call_of_a_save(tmp_path: Path, third: str) -> None:
    run = tmp_path / "run"
    make_before(run, third)
    steps: dict[str, list[int]] = {"all": [], "none": [], "below": []}

    def after_call(disk: PowerLoss) -> None:
        for names_kept in steps:
            folder = tmp_path / "restored"
            disk.restore(folder, names_kept=names_kept)
            if rotating:
                assert all(verify(checkpoint).valid for checkpoint in list_checkpoints(folder))
            steps[names_kept].append(check_after_a_stop(folder, third))
            shutil.rmtree(folder)

    disk, rotating = PowerLoss(run, after_call), False
    with watched(disk.hook):
        save(run, 3)
    # Back from the save: the new checkpoint outlives the loss of everything that was not synced.
    assert [found[-1] for found in steps.values()] == [3, 3, 3]
    made = len(steps["none"])
    assert made > (15 if third == "valid" else 20)
    rotating = True
    with watched(disk.hook):
        assert rotate(run, 2, known_valid={"checkpoint-2", "checkpoint-3"}) == ["checkpoint-1"]
    assert len(steps["none"]) > made and all(set(found[made:]) == {3} for found in steps.values())


def test_the_power_loss_model_sees_a_missing_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without fsync the same save does not outlive a power loss."""
    run = tmp_path / "run"
    make_before(run, "none")
    disk = PowerLoss(run, lambda _: None)
    monkeypatch.setattr(durable_files, "_sync_descriptor", lambda descriptor: None)
    with watched(disk.hook):
        save(run, 3)
    for names_kept in ("all", "none", "below"):
        disk.restore(tmp_path / f"restored-{names_kept}", names_kept=names_kept)
        found, _ = newest_valid(tmp_path / f"restored-{names_kept}")
        assert found is not None and found.name == "checkpoint-2"


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("third", ["none", "broken"])
def test_an_error_of_the_disk_at_every_call_of_a_save(
    tmp_path: Path, third: str, error_number: int
) -> None:
    before = tmp_path / "before"
    make_before(before, third)
    outcomes = set()
    for number in range(10_000):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(before, folder)
        with breaking(number, error_number) as names:
            try:
                save_and_rotate(folder, 3)
                outcome = "saved"
            except FinetuneError as error:
                outcome = "refused"
                assert str(folder) in str(error)
                assert (
                    "written but does not verify" in error.what
                    or os.strerror(error_number) in error.what
                )
                assert error.exit_code == 1
        outcomes.add(outcome)
        step = check_after_a_stop(folder, third)
        assert step == 3 or outcome == "refused"
        shutil.rmtree(folder)
        if len(names) <= number:
            break
    assert outcome == "saved" and outcomes == {"saved", "refused"}


# -------------------------------------------------------------------------------------- a full disk
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(
            "a small disk is needed and this user may not mount one (the limit on file sizes is"
            " tested instead)"
        )
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stops_with_the_numbers_and_keeps_the_previous_checkpoint(
    small_disk: Path,
) -> None:
    save(small_disk, 1)
    with pytest.raises(FinetuneError) as caught, CheckpointWriter(small_disk, 2, "t") as writer:
        durable_files.write_hashed(writer.folder / "model.safetensors", [b"head", bytes(4 << 20)])
    text = str(caught.value)
    assert "checkpoint-2 could not be written: No space left on device" in text
    assert (
        "free some space" in text
        and "The previous checkpoint is checkpoint-1" in text
        and str(small_disk) in text
    )
    assert names_in(small_disk) == ["checkpoint-1"]
    assert newest_valid(small_disk) == (small_disk / "checkpoint-1", [])
    assert_holds(save(small_disk, 2), 2)


def test_a_limit_on_file_sizes_stops_with_the_numbers(run_folder: Path, tmp_path: Path) -> None:
    save(run_folder, 1)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with CheckpointWriter(run_folder, 2, "t") as writer:
                save_file(
                    {"weights": np.zeros(1000, np.float32)}, writer.folder / "model.safetensors"
                )
        except FinetuneError as error:
            os.write(os.open(tmp_path / "said", os.O_CREAT | os.O_WRONLY), str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = (tmp_path / "said").read_text()
    assert "checkpoint-2 could not be written: File too large; needed more than" in said
    assert "ulimit" in said and "The previous checkpoint is checkpoint-1" in said
    assert names_in(run_folder) == ["checkpoint-1"]


def test_another_error_is_passed_on_and_the_staging_folder_removed(run_folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), CheckpointWriter(run_folder, 2, "t"):
        raise ZeroDivisionError
    assert names_in(run_folder) == []


# ---------------------------------------------------------------------------------- damaged folders
def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def replace_by_link(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda path: os.truncate(path, path.stat().st_size - 1),
        r"bytes, not|not JSON|digest",
    ),
    "emptied": (lambda path: path.write_bytes(b""), r"0 bytes"),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b"\n"), r"bytes, not|digest"),
    "bit flipped": (flip_bit, r"content changed|digest|not JSON|lacks its parts"),
    "deleted": (lambda path: path.unlink(), r"missing"),
    "renamed": (lambda path: path.rename(path.with_name("other.json")), r"missing|extra"),
    "a link": (replace_by_link, r"link"),
    "a pipe": (replace_by_pipe, r"special file"),
    "a folder": (replace_by_folder, r"empty folder|missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*NAMES, "manifest.json"])
def test_every_damage_of_every_file_is_found_and_skipped(
    run_folder: Path, name: str, damage: str
) -> None:
    save(run_folder, 1)
    path = save(run_folder, 2) / name
    act, why = DAMAGES[damage]
    act(path)
    validity = verify(run_folder / "checkpoint-2")
    assert not validity.valid and validity.manifest is None
    assert re.search(why, validity.why), validity.why
    assert newest_valid(run_folder) == (
        run_folder / "checkpoint-1",
        [(run_folder / "checkpoint-2", validity.why)],
    )


def test_any_flipped_bit_of_the_manifest_is_found(run_folder: Path) -> None:
    path = save(run_folder, 1) / "manifest.json"
    good = path.read_bytes()
    generator = random.Random(0)
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << generator.randrange(8)
        path.write_bytes(bad)
        assert not verify(path.parent, hashes=False).valid, position
    path.write_bytes(good)
    assert verify(path.parent).valid


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", '{"schema_version": 1}', "[" * 100_000, '{"schema_version": 1' + "0" * 5000 + "}", "\x00",
     '{"schema_version": 1, "step": 1, "files": [], "metadata": {}}',
     '{"schema_version": 1, "step": 1, "files": {"a": 3}, "metadata": {}}',
     '{"schema_version": 2, "step": 1, "files": {}, "metadata": {}}',
     '{"schema_version": 1, "step": NaN, "files": {}, "metadata": {}}'],
)  # fmt: skip
def test_a_nonsense_manifest_is_an_answer_not_an_error(run_folder: Path, text: str) -> None:
    path = save(run_folder, 1) / "manifest.json"
    path.write_text(text)
    validity = verify(path.parent)
    assert not validity.valid and "manifest.json" in validity.why


def forge(folder: Path, **changes: object) -> None:
    """A manifest whose digest is right, as someone who knows the format would write it."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["digest"]
    content.update(changes)
    text = json.dumps(content, sort_keys=True, indent=1) + "\n"
    content["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content, sort_keys=True, indent=1) + "\n")


def test_a_forged_manifest_cannot_point_elsewhere_or_take_another_step(run_folder: Path) -> None:
    folder = save(run_folder, 1)
    forge(folder)
    assert verify(folder).valid  # the forger knows the format
    files = json.loads((folder / "manifest.json").read_text())["files"]
    (run_folder / "secret.json").write_text("{}")
    record = {"size_bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    for name in (
        "../secret.json",
        str(run_folder / "secret.json"),
        "moments/../trainer_state.json",
    ):
        forge(folder, files={**files, name: record})
        assert "missing file" in verify(folder).why
    forge(folder, files=files, step=2)
    assert "is of step 2" in verify(folder).why
    forge(folder, step=True)
    assert "is of step True" in verify(folder).why
    forge(folder, step=1, files={**files, NAMES[0]: {**files[NAMES[0]], "sha256": None}})
    assert "no size and SHA-256" in verify(folder).why


def test_things_that_are_no_checkpoint_folder(run_folder: Path, tmp_path: Path) -> None:
    real = save(run_folder, 1)
    (run_folder / "checkpoint-2").symlink_to(real)
    (run_folder / "checkpoint-3").write_text("")
    (run_folder / "checkpoint-4").mkdir()
    for name in (
        "checkpoint-05",
        "checkpoint-",
        "checkpoint-6-old",
        "checkpoint--1",
        "Checkpoint-7",
        ".staging-8-t",
    ):
        (run_folder / name).mkdir()
    assert [path.name for path in list_checkpoints(run_folder)] == [
        f"checkpoint-{step}" for step in (1, 2, 3, 4)
    ]
    found, skipped = newest_valid(run_folder)
    assert found == real
    assert [why.split(":")[0] for _, why in skipped] == [
        "manifest.json is missing", "not a folder (links are not followed)", "not a folder (links are not followed)"
    ]  # fmt: skip
    assert not verify(run_folder / "absent").valid and not verify(run_folder / "checkpoint-9").valid
    assert (
        not verify(run_folder / "checkpoint-05").valid and not verify(Path("checkpoint-1\0")).valid
    )
    assert newest_valid(tmp_path / "nowhere") == (None, [])


def test_a_checkpoint_may_be_copied_to_another_run_but_not_renamed(
    run_folder: Path, tmp_path: Path
) -> None:
    folder = save(run_folder, 5)
    shutil.copytree(folder, tmp_path / "checkpoint-5")
    assert verify(tmp_path / "checkpoint-5").valid
    folder.rename(run_folder / "checkpoint-6")
    assert "is of step 5" in verify(run_folder / "checkpoint-6").why


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("forged", [False, True])
@pytest.mark.parametrize(
    "name",
    ["training_args.bin", "optimizer.pt", "scheduler.pt", "pytorch_model.bin", "adapter_model.bin", "rng_state.pth",
     "rng_state_0.pth", "scaler.pt", "latest", ".metadata", "zero_pp_rank_0_mp_rank_00_optim_states.pt",
     "global_step3/mp_rank_00_model_states.pt", "model.safetensors.pkl", "data.pickle"],
)  # fmt: skip
def test_a_salted_pickle_makes_the_folder_invalid_and_is_never_opened(
    run_folder: Path, tmp_path: Path, name: str, forged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(marker))
    save(run_folder, 1)
    folder = save(run_folder, 2)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(bomb)
    if forged:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        forge(
            folder,
            files={
                **files,
                name: {"size_bytes": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()},
            },
        )
    opened: list[str] = []
    builtin_open = io.open
    monkeypatch.setattr(
        "builtins.open",
        lambda file, *rest, **more: opened.append(str(file)) or builtin_open(file, *rest, **more),
    )

    def hook(
        call: str,
        original: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        if call == "open":
            opened.append(os.fspath(args[0]))  # type: ignore[arg-type]
        return original(*args, **kwargs)

    with watched(hook):
        found, skipped = newest_valid(run_folder)
        assert checkpoints_command.main([str(run_folder)]) == 0
        assert rotate(run_folder, 2, known_valid={"checkpoint-1", "checkpoint-2"}) == []
    assert found == run_folder / "checkpoint-1"
    assert (
        name in skipped[0][1]
        and ("kind that no checkpoint holds" if forged else "extra file") in skipped[0][1]
    )
    assert opened and not [path for path in opened if path.endswith(name)]
    assert not marker.exists()
    pickle.loads(bomb)
    assert marker.exists()  # it would have


# ----------------------------------------------------------------------------------------- rotation
def test_rotation_keeps_the_newest_valid_ones_and_leaves_what_it_does_not_know(
    run_folder: Path,
) -> None:
    for step in (1, 2, 10, 20):
        save(run_folder, step)
    (run_folder / "checkpoint-3").mkdir()
    (run_folder / "checkpoint-3" / "work.txt").write_text("somebody's")
    (run_folder / "checkpoint-20" / NAMES[0]).unlink()
    known = {"checkpoint-10", "checkpoint-2"}
    assert rotate(run_folder, 2, known_valid=known) == ["checkpoint-1"]
    assert names_in(run_folder) == [
        "checkpoint-10",
        "checkpoint-2",
        "checkpoint-20",
        "checkpoint-3",
    ]
    save(run_folder, 30)
    assert rotate(run_folder, 3, known_valid=known | {"checkpoint-30"}) == []
    assert rotate(run_folder, 2, known_valid=known | {"checkpoint-30"}) == ["checkpoint-2"]


@pytest.mark.parametrize("keep", [2, 3, 5])
def test_rotation_reads_no_content_and_waits_for_two_that_are_known(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """A run that went on from another folder's checkpoint knows nothing of those that lie here."""
    for step in range(1, 7):
        save(run_folder, step)
    monkeypatch.setattr(durable_files, "hash_file", None)
    assert (
        rotate(run_folder, keep, known_valid=())
        == rotate(run_folder, keep, known_valid={"checkpoint-6"})
        == []
    )
    removed = [f"checkpoint-{step}" for step in range(6 - keep, 0, -1)]
    assert rotate(run_folder, keep, known_valid={"checkpoint-5", "checkpoint-6"}) == removed


def test_rotation_below_two_is_refused(run_folder: Path) -> None:
    with pytest.raises(ConfigError, match="below 2"):
        rotate(run_folder, 1, known_valid=())


def test_rotation_deletes_nothing_through_a_link(run_folder: Path, tmp_path: Path) -> None:
    for step in (2, 3):
        save(run_folder, step)
    outside = tmp_path / "checkpoint-1"
    shutil.copytree(run_folder / "checkpoint-2", outside)
    (run_folder / "checkpoint-1").symlink_to(outside)
    (run_folder / ".staging-1-t").symlink_to(outside)
    assert rotate(run_folder, 2, known_valid={"checkpoint-2", "checkpoint-3"}) == []
    assert clean_staging(run_folder) == [".staging-1-t"]
    assert names_in(outside) == [
        "adapter_model.safetensors",
        "manifest.json",
        "moments",
        "trainer_state.json",
    ]


def test_cleaning_takes_only_what_saves_and_removals_leave(run_folder: Path) -> None:
    keep = [
        "checkpoint-1",
        ".invalid-checkpoint-2-1",
        ".staging",
        ".staging-x-t",
        ".removing-me",
        "samples.jsonl",
    ]
    for name in [*keep, ".staging-12-abc", ".removing-checkpoint-3"]:
        (run_folder / name).mkdir()
        (run_folder / name / "file").write_text("")
    assert clean_staging(run_folder) == [".removing-checkpoint-3", ".staging-12-abc"]
    assert names_in(run_folder) == sorted(keep)


# -------------------------------------------------------------------------------------- the command
def test_the_command_lists_a_line_each(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (9, 10):
        save(run_folder, step)
    (run_folder / "checkpoint-10" / "optimizer.pt").write_bytes(b"x" * 2000)
    assert checkpoints_command.main([str(run_folder)]) == 0
    size = sum(
        path.stat().st_size for path in (run_folder / "checkpoint-9").rglob("*") if path.is_file()
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "checkpoint-9",
        "step",
        "9",
        *durable_files.format_bytes(size).split(),
        "valid",
    ]
    assert (
        lines[1].endswith("invalid: extra file, not in the manifest: 'optimizer.pt'")
        and len(lines) == 2
    )
    assert checkpoints_command.main([str(run_folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(entry["name"], entry["step"], entry["valid"]) for entry in told] == [
        ("checkpoint-9", 9, True),
        ("checkpoint-10", 10, False),
    ]
    # the step has a digit more
    assert told[0]["size_bytes"] == size and told[1]["size_bytes"] == size + 1 + 2000
    shutil.rmtree(run_folder / "checkpoint-9")
    assert checkpoints_command.main([str(run_folder)]) == 1


def test_the_command_on_a_run_without_checkpoints_and_on_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    assert finetune(["checkpoints", str(tmp_path / "run")]) == 2
    assert finetune(["checkpoints", str(tmp_path / "nowhere")]) == 2
    assert "is not a run" in capsys.readouterr().err
    (tmp_path / "run" / "run.yaml").write_text("model: m\n")
    assert checkpoints_command.main([str(tmp_path / "run")]) == 0
    assert "no checkpoints yet" in capsys.readouterr().out


def test_the_file_layer_imports_no_torch() -> None:
    code = (
        "import sys; import finetune.commands.checkpoints.command, finetune.storage.run_folder;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'safetensors', 'pickle')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert durable_files.format_bytes(size_bytes) == text
