"""Checkpoint folders: every kill, every power loss, every error of the disk, every damaged file."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_system_calls import PowerLoss, breaking, killed_at, watched

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

METADATA = {"global_batch_size": 8, "schedule_hash": "ab" * 32, "packages": {"torch": "2.13.0"}}
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


def save(run_folder: Path, step: int, token: str = "t0", **facts: Any) -> Path:
    with CheckpointWriter(run_folder, step, token) as writer:
        os.mkdir(writer.folder / "moments")
        files = contents(step)
        # Tensors are hashed as they are written, what others write is read back.
        records = {
            name: durable_files.write_hashed(
                writer.folder / name, [files[name][:50], memoryview(files[name])[50:]]
            )
            for name in NAMES[:2]
        }
        write_by_os(writer.folder / NAMES[2], files[NAMES[2]])
        return writer.publish(records | writer.seal(NAMES[2:]), METADATA | facts)


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
    for step in (1, 2) if third == "none" else (1, 2, 3):
        save(folder, step)
    if third == "broken":
        (folder / "checkpoint-3" / NAMES[0]).write_bytes(b"")


def test_a_save_is_a_valid_checkpoint_with_a_readable_manifest(run_folder, monkeypatch):
    folder = save(run_folder, 7)
    assert names_in(run_folder) == ["checkpoint-7"]
    assert_holds(folder, 7)
    monkeypatch.setattr(durable_files, "PARALLEL_HASHING_FROM_BYTES", 1)
    text = (folder / "manifest.json").read_text()
    manifest = json.loads(text)
    assert manifest == verify(folder).manifest and str(run_folder) not in text
    assert (manifest["step"], manifest["schema_version"], manifest["metadata"]) == (7, 1, METADATA)
    for name, data in contents(7).items():
        record = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert manifest["files"][name] == record


@pytest.mark.parametrize("kind", ["valid", "file", "link"])
def test_a_valid_one_of_the_same_step_is_kept_and_another_moved_aside(run_folder, kind, caplog):
    target = run_folder / "checkpoint-3"
    if kind == "valid":
        save(run_folder, 3)
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(run_folder)
    before = os.stat(target).st_ino
    with caplog.at_level(logging.WARNING, "finetune"):
        assert_holds(save(run_folder, 3, "t1"), 3)
    if kind == "valid":
        assert os.stat(target).st_ino == before and names_in(run_folder) == ["checkpoint-3"]
        return
    assert names_in(run_folder) == [".invalid-checkpoint-3-1", "checkpoint-3"]
    assert "moved aside to .invalid-checkpoint-3-1" in caplog.text
    set_aside(target, "for the test")
    assert ".invalid-checkpoint-3-2" in names_in(run_folder)


def test_what_is_not_published(run_folder, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "VISIBLE_WITHIN_SECONDS", 0.3)
    far = {"far.json": {"size_bytes": 3, "sha256": "0" * 64}}
    for written, sealed, records, facts, words in (
        ("training_args.bin", True, {}, {}, "must not hold"),
        ("manifest.json", True, {}, {}, "must not hold"),
        ("stray.json", False, {}, {}, "no rank sealed.*stray"),
        ("", False, far, {}, "(?s)not seen.*far.json.*all nodes share"),
        ("", False, {}, {"loss": float("nan")}, "plain JSON"),
    ):
        with (
            pytest.raises(FinetuneError, match=words),
            CheckpointWriter(run_folder, 1, "t") as writer,
        ):
            if written:
                write_by_os(writer.folder / written, b"x" * 60)
            writer.publish(records | (writer.seal([written]) if sealed else {}), facts)
        assert names_in(run_folder) == []
    for step, token in ((1, "../x"), (1, "a-b"), (-1, "a")):
        with pytest.raises(ValueError):
            CheckpointWriter(run_folder, step, token)


def test_ranks_that_fail_together_remove_their_staging_folder_together(run_folder):
    """None may stop at what another has removed already."""
    with CheckpointWriter(run_folder, 1, "t") as writer:
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


def test_a_file_is_hashed_as_it_is_written(run_folder, monkeypatch):
    """In chunks, of which the system takes parts; synced on the way; nothing is read."""
    data, calls, plain = random.Random(1).randbytes(100_000), [], os.write
    monkeypatch.setattr(durable_files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(durable_files, "SYNC_EVERY_BYTES", 30_000)

    def hook(name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> object:
        calls.append(name)
        return plain(args[0], args[1][:700]) if name == "write" else original(*args, **kwargs)

    path = run_folder / "tensors"
    parts = [data[:1], b"", memoryview(data)[1:-5], data[-5:]]
    with watched(hook):
        record = durable_files.write_hashed(path, parts)
    assert path.read_bytes() == data
    assert record == {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert "read" not in calls and calls.count("fsync") == 4 and calls[-2:] == ["fsync", "close"]
    with pytest.raises(FileExistsError):
        durable_files.write_hashed(path, [b"other"])
    assert path.read_bytes() == data


def check_after_a_stop(folder: Path, third: str) -> int:
    """What must hold after any stop of `save_and_rotate(folder, 3)`; the step of a resume."""
    found, _ = newest_valid(folder)
    assert found is not None
    step = checkpoint_files.step_of(found.name)
    assert step in (2, 3)
    assert_holds(found, step)
    if third == "broken":  # never thrown away
        paths = [folder / name / NAMES[0] for name in ("checkpoint-3", ".invalid-checkpoint-3-1")]
        assert any(path.exists() and path.read_bytes() == b"" for path in paths)
    clean_staging(folder)
    assert not [name for name in os.listdir(folder) if name.startswith((".staging", ".removing"))]
    save_and_rotate(folder, step + 1, "t9")
    found, skipped = newest_valid(folder)
    assert found is not None and skipped == []
    assert_holds(found, step + 1)
    return step


@pytest.mark.parametrize(
    ("third", "torn", "stride"),
    [
        ("none", True, 1),
        ("none", False, 3),
        ("broken", False, 4),
        pytest.param("none", False, 1, marks=pytest.mark.slow),
    ],
)
def test_killed_at_every_call_of_a_save(tmp_path, third, torn, stride):
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
    assert steps[0] == 2


@pytest.mark.parametrize("third", ["none", "valid", "broken"])
def test_power_lost_after_every_call_of_a_save(tmp_path, third):
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


@pytest.mark.parametrize(
    ("third", "error_number", "fix"),
    [
        ("none", errno.EROFS, "mounted for writing"),
        ("none", errno.EFBIG, "ulimit"),
        ("broken", errno.EIO, ""),
    ],
)
def test_an_error_of_the_disk_at_every_call_of_a_save(tmp_path, third, error_number, fix):
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
                assert str(folder) in str(error) and error.exit_code == 1
                told = os.strerror(error_number) in error.what
                assert told or "written but does not verify" in error.what
                assert fix in error.fix or "checkpoint-3 could not" not in str(error)
        outcomes.add(outcome)
        step = check_after_a_stop(folder, third)
        assert step == 3 or outcome == "refused"
        shutil.rmtree(folder)
        if len(names) <= number:
            break
    assert outcome == "saved" and outcomes == {"saved", "refused"}


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def replace_by_link(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, 90), r"bytes, not|not JSON|digest"),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b"\n"), r"bytes, not|digest"),
    "bit flipped": (flip_bit, r"content changed|digest|not JSON|lacks its parts"),
    "deleted": (lambda path: path.unlink(), r"missing"),
    "a link": (replace_by_link, r"link"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), r"special file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), r"empty folder|missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_of_every_file_is_found_and_skipped(tmp_path, damage):
    act, why = DAMAGES[damage]
    for number, name in enumerate([*NAMES, "manifest.json"]):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        good, bad = save(run, 1), save(run, 2)
        act(bad / name)
        validity = verify(bad)
        assert not validity.valid and validity.manifest is None, name
        assert re.search(why, validity.why), validity.why
        assert newest_valid(run) == (good, [(bad, validity.why)])


def forge(folder: Path, **changes: object) -> None:
    """A manifest whose digest is right, as someone who knows the format would write it."""
    content = json.loads((folder / "manifest.json").read_text()) | changes
    del content["digest"]
    text = json.dumps(content, sort_keys=True, indent=1) + "\n"
    content["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content, sort_keys=True, indent=1) + "\n")


def test_a_manifest_that_is_changed_nonsense_or_forged(run_folder, tmp_path):
    folder = save(run_folder, 1)
    path = folder / "manifest.json"
    good, generator = path.read_bytes(), random.Random(0)
    for position in range(0, len(good), 3):
        bad = bytearray(good)
        bad[position] ^= 1 << generator.randrange(8)
        path.write_bytes(bad)
        assert not verify(folder, hashes=False).valid, position
    for text in (
        *("", "null", "{}", "\x00", "[" * 100_000, '{"schema_version": 1' + "0" * 5000 + "}"),
        '{"schema_version": 1, "step": 1, "files": {"a": 3}, "metadata": {}}',
        '{"schema_version": 2, "step": 1, "files": {}, "metadata": {}}',
        '{"schema_version": 1, "step": NaN, "files": {}, "metadata": {}}',
    ):
        path.write_text(text)
        assert "manifest.json" in verify(folder).why, text[:50]
    path.write_bytes(good)
    forge(folder)
    shutil.copytree(folder, tmp_path / "checkpoint-1")
    assert verify(tmp_path / "checkpoint-1").valid, (
        "the forger knows the format, and it may be copied"
    )
    files = json.loads(good)["files"]
    (run_folder / "secret.json").write_text("{}")
    record = {"size_bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    for name in ("../secret.json", f"{run_folder}/secret.json", "moments/../trainer_state.json"):
        forge(folder, files={**files, name: record})
        assert "missing file" in verify(folder).why
    (folder / "optimizer.pt").write_text("{}")
    forge(folder, files={**files, "optimizer.pt": record})
    assert "kind that no checkpoint holds" in verify(folder).why, "a pickle"
    (folder / "optimizer.pt").unlink()
    for step in (2, True):
        forge(folder, files=files, step=step)
        assert f"is of step {step}" in verify(folder).why
    forge(folder, step=1, files={**files, NAMES[0]: {**files[NAMES[0]], "sha256": None}})
    assert "no size and SHA-256" in verify(folder).why


def test_things_that_are_no_checkpoint_folder(run_folder, tmp_path):
    real = save(run_folder, 1)
    (run_folder / "checkpoint-2").symlink_to(real)
    (run_folder / "checkpoint-3").write_text("")
    (run_folder / "checkpoint-4").mkdir()
    for name in ("-05", "-", "-6-old", "--1"):
        (run_folder / f"checkpoint{name}").mkdir()
    found = [path.name for path in list_checkpoints(run_folder)]
    assert found == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    newest, skipped = newest_valid(run_folder)
    link = "not a folder (links are not followed)"
    assert newest == real
    assert [why.split(":")[0] for _, why in skipped] == ["manifest.json is missing", link, link]
    for path in (run_folder / "checkpoint-9", run_folder / "checkpoint-05", Path("checkpoint-1\0")):
        assert not verify(path).valid
    assert newest_valid(tmp_path / "nowhere") == (None, [])


def test_rotation_keeps_the_newest_valid_ones_and_leaves_what_it_does_not_know(run_folder):
    for step in (1, 2, 10, 20):
        save(run_folder, step)
    (run_folder / "checkpoint-3").mkdir()
    (run_folder / "checkpoint-3" / "work.txt").write_text("somebody's")
    (run_folder / "checkpoint-20" / NAMES[0]).unlink()
    known = {"checkpoint-10", "checkpoint-2"}
    assert rotate(run_folder, 2, known_valid=known) == ["checkpoint-1"]
    assert names_in(run_folder) == [f"checkpoint-{step}" for step in (10, 2, 20, 3)]
    save(run_folder, 30, best={"checkpoint": "checkpoint-2"})
    known |= {"checkpoint-30"}
    assert rotate(run_folder, 2, known_valid=known) == [], "the best one stays"
    for step in (40, 50):
        save(run_folder, step)
        known |= {f"checkpoint-{step}"}
    assert rotate(run_folder, 2, known_valid=known) == [f"checkpoint-{n}" for n in (30, 10, 2)]
    with pytest.raises(ConfigError, match="below 2"):
        rotate(run_folder, 1, known_valid=())


@pytest.mark.parametrize("keep", [2, 5])
def test_rotation_reads_no_content_and_waits_for_two_that_are_known(run_folder, monkeypatch, keep):
    """A run that went on from another folder's checkpoint knows nothing of those that lie here."""
    for step in range(1, 7):
        save(run_folder, step)
    monkeypatch.setattr(durable_files, "hash_file", None)
    for known in ((), {"checkpoint-6"}):
        assert rotate(run_folder, keep, known_valid=known) == []
    removed = [f"checkpoint-{step}" for step in range(6 - keep, 0, -1)]
    assert rotate(run_folder, keep, known_valid={"checkpoint-5", "checkpoint-6"}) == removed


def test_removals_take_nothing_through_a_link_and_nothing_else(run_folder, tmp_path):
    for step in (2, 3):
        save(run_folder, step)
    outside = tmp_path / "checkpoint-1"
    shutil.copytree(run_folder / "checkpoint-2", outside)
    before = names_in(outside)
    (run_folder / "checkpoint-1").symlink_to(outside)
    (run_folder / ".staging-1-t").symlink_to(outside)
    kept = [".invalid-checkpoint-2-1", ".staging", ".staging-x-t", ".removing-me", "samples.jsonl"]
    for name in [*kept, ".staging-12-abc", ".removing-checkpoint-3"]:
        (run_folder / name).mkdir()
        (run_folder / name / "file").symlink_to(outside)
    assert rotate(run_folder, 2, known_valid={"checkpoint-2", "checkpoint-3"}) == []
    assert clean_staging(run_folder) == [".staging-1-t", ".staging-12-abc"]
    assert names_in(run_folder) == sorted([*kept, *(f"checkpoint-{step}" for step in (1, 2, 3))])
    assert names_in(outside) == before


def test_the_command_lists_a_line_each(run_folder, tmp_path, capsys):
    assert finetune(["checkpoints", str(run_folder)]) == 2
    assert finetune(["checkpoints", str(tmp_path / "nowhere")]) == 2
    assert "is not a run" in capsys.readouterr().err
    (run_folder / "run.yaml").write_text("model: m\n")
    assert checkpoints_command.main([str(run_folder)]) == 0
    assert "no checkpoints yet" in capsys.readouterr().out
    for step in (9, 10):
        save(run_folder, step)
    (run_folder / "checkpoint-10" / "optimizer.pt").write_bytes(b"x" * 2000)
    assert checkpoints_command.main([str(run_folder)]) == 0
    size = sum(path.stat().st_size for path in (run_folder / "checkpoint-9").rglob("*.*"))
    first, second = capsys.readouterr().out.splitlines()
    shown = durable_files.format_bytes(size)
    assert first.split() == ["checkpoint-9", "step", "9", *shown.split(), "valid"]
    assert second.endswith("invalid: extra file, not in the manifest: 'optimizer.pt'")
    assert checkpoints_command.main([str(run_folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    # the step has a digit more
    for entry, expected in zip(found, ((9, True, size), (10, False, size + 2001)), strict=True):
        assert (entry["step"], entry["valid"], entry["size_bytes"]) == expected
    shutil.rmtree(run_folder / "checkpoint-9")
    assert checkpoints_command.main([str(run_folder)]) == 1
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 3 << 50: "3072.0 TiB"}
    assert [durable_files.format_bytes(size) for size in sizes] == list(sizes.values())
