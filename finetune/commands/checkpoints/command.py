"""`python -m finetune checkpoints RUN`: the checkpoints of a run, a line each: name, step, size,
valid or why not.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from finetune.config.fields import Text, setting
from finetune.config.options import Options, read_options
from finetune.errors import ExitCode, StateError
from finetune.storage.checkpoint_files import list_checkpoints, step_of, verify
from finetune.storage.durable_files import format_bytes, is_taken, walk_files
from finetune.storage.run_folder import CONFIG_NAME, IDENTITY_NAME, STATUS_NAME


def describe_checkpoints(run_folder: Path | str) -> list[dict[str, Any]]:
    """Return every checkpoint of a run, lowest step first: name, step, size_bytes, valid, why. All
    files are read and hashed.

    Raises:
        StateError: the folder is not a run's.
    """
    folder = Path(run_folder)
    checkpoints = list_checkpoints(folder)
    if not checkpoints and not any(
        (folder / name).is_file() for name in (IDENTITY_NAME, CONFIG_NAME, STATUS_NAME)
    ):
        what = "is not a folder"
        if folder.is_dir():
            what = "is not a run: it holds no checkpoint and no file of a run"
        raise StateError(f"{str(folder)!a} {what}", fix="give the --output-dir of a run")
    described = []
    for checkpoint in checkpoints:
        validity = verify(checkpoint)
        if not validity.valid and not is_taken(checkpoint):
            continue  # the run has removed it since it was listed
        described.append(
            {
                "name": checkpoint.name,
                "step": step_of(checkpoint.name),
                "size_bytes": _size_bytes(checkpoint),
                "valid": validity.valid,
                "why": validity.why,
            }
        )
    return described


def _size_bytes(checkpoint: Path) -> int:
    """Return the bytes of all files, or of what is not a folder itself; 0 if it cannot be
    read.
    """
    try:
        if checkpoint.is_symlink() or not checkpoint.is_dir():
            return os.lstat(checkpoint).st_size
        return sum(walk_files(checkpoint)[0].values())
    except OSError:
        return 0


class CheckpointsOptions(Options):
    """The command line."""

    usage: ClassVar[str] = "python -m finetune checkpoints RUN [--json]"
    summary: ClassVar[str] = (
        "List the checkpoints of a run, verifying every file of them (size and SHA-256)."
    )
    epilog: ClassVar[str] = (
        "Exit code: 0 one is valid, or there is none; 1 none of them is valid; 2 not a run."
    )
    positional: ClassVar[tuple[str, ...]] = ("run",)

    run: Text = setting(
        group="options", unit="RUN", description="The run's folder (its --output-dir)."
    )
    as_json: bool = setting(
        False, alias="json", group="output", description="One JSON object instead of lines."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list. 0: at least one is valid, or there is none; 1: some, but none is valid.

    Raises:
        StateError: the folder is not a run's.
    """
    options = read_options(CheckpointsOptions, argv)
    checkpoints = describe_checkpoints(options.run)
    if options.as_json:
        sys.stdout.write(
            json.dumps({"run": options.run, "checkpoints": checkpoints}, indent=2) + "\n"
        )
    elif not checkpoints:
        sys.stdout.write("no checkpoints yet\n")
    else:
        width = max(len(checkpoint["name"]) for checkpoint in checkpoints)
        for checkpoint in checkpoints:
            verdict = "valid" if checkpoint["valid"] else f"invalid: {checkpoint['why']}"
            size = format_bytes(checkpoint["size_bytes"])
            sys.stdout.write(
                f"{checkpoint['name']:<{width}}  step {checkpoint['step']}  {size:>10}  {verdict}\n"
            )
    none_valid = bool(checkpoints) and not any(checkpoint["valid"] for checkpoint in checkpoints)
    return int(ExitCode.FAILED if none_valid else ExitCode.DONE)
