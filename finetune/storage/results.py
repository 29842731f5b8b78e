"""Results: files that a library wrote, looked at and put into their folder under their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.storage.durable_files import (
    is_still_open,
    move,
    remove_tree,
    share_file,
    sync_file,
    sync_folder,
)


def put_output(output_dir: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside, reopen what it wrote, then move its files in, durably. On
    one rank.

    Raises:
        FinetuneError: a file is not whole (`reopen`).
    """
    staging = output_dir / ".staging-0-output"
    remove_tree(staging, missing_ok=True)
    staging.mkdir()
    write(staging)
    for path in sorted(staging.iterdir()):
        if not is_still_open(path.name):
            share_file(path)
            sync_file(path)
            reopen(path)
            move(path, output_dir / path.name)
    sync_folder(output_dir)
    remove_tree(staging)


def reopen(path: Path) -> None:
    """Look whether a library has really written a JSON or safetensors file.

    They lose the error of a file's close, which is where storage over a network says that it is
    full or over quota.

    Raises:
        FinetuneError: it is not whole.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            # its header, and whether the file is as long as that says
            with safe_open(path, framework="np"):
                pass
    except (ValueError, SafetensorError) as error:
        raise FinetuneError(
            f"{path.name} was written, and is not whole: {error}",
            str(path.parent.parent),
            "see whether the disk or your quota there is full, then start the same command again",
        ) from error
