"""The run folder: which run it holds, the run's status and samples. `RunLock` decides who may
write.

.lock               held by one process of the run while it works; names its holder
.lock.claim         replaces the lock if the file system has none that all machines see
run_identity.json   what must be equal for a run to be resumed here
run.yaml            the resolved configuration
status.json         running, done, failed or stopped, with the exit code
samples.jsonl       one line per optimizer step: {"step": from 1, "ids": [record numbers]}
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from finetune.errors import FinetuneError, StateError
from finetune.storage import durable_files
from finetune.storage.run_lock import CLAIM_NAME, LOCK_NAME, RunLock, now_utc
from finetune.storage.run_log import StepLog
from finetune.storage.shared_storage import is_shared, refresh_directory_cache

__all__ = ["RunLock"]  # for modules that work with run folders

IDENTITY_NAME = "run_identity.json"
CONFIG_NAME = "run.yaml"
STATUS_NAME = "status.json"
FILE_LIMIT_BYTES = 16 << 20
# Files that are neither a run's nor a user's: left by a start that was refused or killed, a mount
# or a file manager.
_IGNORED_NAMES = {LOCK_NAME, CLAIM_NAME, "logs", f".{IDENTITY_NAME}.tmp", "lost+found", ".DS_Store"}

logger = logging.getLogger("finetune")

RunState = Literal["running", "done", "failed", "stopped"]


class Difference(NamedTuple):
    """One fact in which a run differs from the run in its output folder; None means "not known
    there".
    """

    name: str
    old: Any
    new: Any


@dataclass(frozen=True)
class FolderDescription:
    """What an output folder holds.

    `kind` is "empty" (or missing), "run" (a run of this package) or "other"; the rest is None if
    the file is missing or cannot be read.
    """

    kind: Literal["empty", "run", "other"]
    identity: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    status: dict[str, Any] | None = None


def _json_text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _read_block(path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any] | None:
    """Return names and values from a file; None if it is missing, cannot be read or holds something
    else.
    """
    try:
        content = parse(durable_files.read_bytes(path, FILE_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return content if isinstance(content, dict) else None


def write_status(
    run_folder: Path | str, state: RunState, exit_code: int | None, **facts: Any
) -> None:
    """Write `status.json` atomically. A refused run has no status: it writes nothing.

    Args:
        exit_code: of the process; None while it runs.
        facts: JSON-serializable: step, checkpoint, message, ...
    """
    if state not in get_args(RunState):
        raise ValueError(f"{state!r} is not one of {get_args(RunState)}")
    content = {
        "state": state,
        "exit_code": exit_code,
        "written_at": now_utc(),
        **facts,
    }
    durable_files.replace_file(Path(run_folder) / STATUS_NAME, _json_text(content))


def read_status(run_folder: Path | str) -> dict[str, Any] | None:
    """Return the content of `status.json`, or None if it cannot be read."""
    return _read_block(Path(run_folder) / STATUS_NAME, json.loads)


def write_identity(run_folder: Path | str, identity: Mapping[str, Any]) -> None:
    """Write `run_identity.json`: the facts that `check_output_folder` compares. The first file a
    run writes.
    """
    durable_files.replace_file(Path(run_folder) / IDENTITY_NAME, _json_text(identity))


def read_identity(run_folder: Path | str) -> dict[str, Any] | None:
    """Return the content of `run_identity.json`, or None if it cannot be read."""
    return _read_block(Path(run_folder) / IDENTITY_NAME, json.loads)


def list_anew(run_folder: Path) -> None:
    """Let this machine forget what it has cached of a shared folder. Only for the holder of the
    folder's lock.
    """
    if is_shared(run_folder):
        # a name that is ignored, in case this process is killed here
        refresh_directory_cache(run_folder / f".{IDENTITY_NAME}.tmp")


def describe_folder(output_dir: Path | str) -> FolderDescription:
    """Describe an output folder, without changing or trusting anything in it.

    Raises:
        StateError: the path is not a folder, or the folder cannot be read.
    """
    folder = Path(output_dir)
    try:
        names = {
            name for name in os.listdir(folder) if not durable_files.is_still_open(name)
        } - _IGNORED_NAMES
    except FileNotFoundError:
        # The link itself is checked: another rank may have made the folder meanwhile.
        if not os.path.islink(folder) or os.path.exists(folder):
            return FolderDescription("empty")
        raise StateError(
            "the output folder is a link to nothing", str(folder), "choose another --output-dir"
        ) from None
    except OSError as error:
        raise StateError(
            f"the output folder cannot be read: {error.strerror}",
            str(folder),
            "choose another --output-dir",
        ) from error
    if not names:
        return FolderDescription("empty")
    return FolderDescription(
        kind="run" if IDENTITY_NAME in names else "other",
        identity=read_identity(folder),
        config=_read_block(folder / CONFIG_NAME, yaml.safe_load),
        status=read_status(folder),
    )


def check_output_folder(output_dir: Path | str, identity: Mapping[str, Any]) -> list[Difference]:
    """Return how the run in an output folder differs from this one; nothing for an empty folder or
    the same run.

    Args:
        output_dir: need not exist; it is only read.
        identity: facts that identify this run (model, data fingerprint, schedule hash, global batch
            size, seed, total steps, tokenizer hash, ...), JSON-serializable; compared as they are
            after a write and a read.

    Raises:
        StateError: the folder holds files but no run of this package, or its identity cannot be
            read.
    """
    description = describe_folder(output_dir)
    if description.kind == "empty":
        return []
    if description.kind == "other":
        raise StateError(
            "the output folder is not empty and not a run of this package (it has no"
            f" {IDENTITY_NAME})",
            str(output_dir),
            "choose an empty or new --output-dir",
        )
    if description.identity is None:
        raise _unreadable(Path(output_dir) / IDENTITY_NAME)
    return differences(description.identity, identity)


def _unreadable(path: Path) -> StateError:
    """Explain why a file cannot be used: the system cannot read it, or its content is broken."""
    try:
        durable_files.read_bytes(path, FILE_LIMIT_BYTES)
    except OSError as error:
        return StateError(
            f"{path.name} in the output folder cannot be read: {error.strerror or error}",
            str(path.parent),
            "see to this machine's mount or the disk and start again",
        )
    return StateError(
        f"{path.name} in the output folder is broken, so it cannot be told whether this is the"
        " same run",
        str(path.parent),
        "choose an empty or new --output-dir",
    )


def differences(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> list[Difference]:
    """Return how a run differs from one whose identity was saved."""
    old = dict(saved)
    new = json.loads(_json_text(identity))
    if "lr_batch_exponent" in new:  # runs of 0.1.0 used the square root, without this setting
        old.setdefault("lr_batch_exponent", 0.5)
    # The weights identify the model, independent of its location. Runs of 0.1.0 have only its path,
    # and some later ones no commit of a model on the hub.
    weights = [str(facts.get("weights", "@None")) for facts in (old, new)]
    ignored = "weights" if any(known.endswith("@None") for known in weights) else "model"
    return [
        Difference(name, old.get(name), new.get(name))
        for name in new | old
        if name != ignored and old.get(name) != new.get(name)
    ]


def format_differences(differences: Sequence[Difference]) -> str:
    """Return a line for each difference, for an error message."""
    return "\n".join(
        f"{name}: {old!r} in the folder, {new!r} now" for name, old, new in differences
    )


class SampleLog(StepLog):
    """`samples.jsonl`: which records every optimizer step took, one flushed write per step.

    Args:
        path: the file; made if it is missing.
        resume_step: optimizer steps done; 0 starts an empty log.
    """

    def __init__(self, path: Path | str, resume_step: int = 0) -> None:
        super().__init__(path, resume_step)
        expected = range(1, resume_step + 1)
        if self.kept_steps != list(expected):
            missing = min(set(expected).difference(self.kept_steps), default=resume_step)
            logger.warning(
                "%s is not whole up to step %d, from which the run resumes; "
                "lines are missing from step %d",
                self.path, resume_step, missing,
            )  # fmt: skip

    def append(self, step: int, ids: Sequence[int]) -> None:
        """Write the line of one optimizer step.

        Args:
            step: counted from 1.
            ids: record numbers of the step's global batch, counted from 0 through the data files in
                order.
        """
        self.write({"step": int(step), "ids": [int(number) for number in ids]})


# ---------------------------------------------------------------- results


def put_output(output_dir: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a staging folder, check the files, then move them into `output_dir`,
    durably. One rank calls this.

    Raises:
        FinetuneError: a file is incomplete (`reopen`).
    """
    staging = output_dir / ".staging-0-output"
    durable_files.remove_tree(staging, missing_ok=True)
    staging.mkdir()
    write(staging)
    for path in sorted(staging.iterdir()):
        if not durable_files.is_still_open(path.name):
            durable_files.share_file(path)
            durable_files.sync_file(path)
            reopen(path)
            durable_files.move(path, output_dir / path.name)
    durable_files.sync_folder(output_dir)
    durable_files.remove_tree(staging)


def reopen(path: Path) -> None:
    """Check that a library has really written a JSON or safetensors file.

    Libraries lose the error of closing a file, which is when storage over a network reports that it
    is full or over quota.

    Raises:
        FinetuneError: it is incomplete.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            # checks the header, and the file's length against it
            with safe_open(path, framework="np"):
                pass
    except (ValueError, SafetensorError) as error:
        raise FinetuneError(
            f"{path.name} was written, and is not whole: {error}",
            str(path.parent.parent),
            "see whether the disk or your quota there is full, then start the same command again",
        ) from error
