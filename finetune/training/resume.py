"""Where a run starts: from scratch, from a checkpoint, or not at all because it is finished. Only
reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import StateError
from finetune.storage.checkpoint_files import newest_valid, step_of, verify
from finetune.storage.run_folder import (
    Difference,
    check_output_folder,
    describe_folder,
    differences,
    format_differences,
    read_identity,
)

logger = logging.getLogger("finetune")


@dataclass(frozen=True)
class Resume:
    """A checkpoint and its step, or None and 0.

    Attributes:
        changed: the run differs from the one in the folder, and the user allowed it.
        skipped: names of newer checkpoints that are not valid, each with the reason.
    """

    folder: Path | None
    step: int
    changed: bool = False
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return "none" if self.folder is None else self.folder.name


def decide_resume(
    output_dir: Path,
    resume: str,
    identity: dict[str, Any],
    *,
    total_steps: int,
    allow_change: bool,
    damaged: Mapping[str, str] | None = None,
    is_enough: Callable[[Mapping[str, Any], int], bool] = lambda metadata, step: False,
) -> Resume | None:
    """Decide from the output folder where the run starts; None if it is finished already.

    Checkpoints are checked by names, sizes and manifest. The ranks read the content later, each its
    share, when the process group exists (Session.agree_on_run).

    Args:
        damaged: names of checkpoints whose content was found changed, with the reason.
        is_enough: whether a finished run ended with a checkpoint of these facts and step, before
            its last step.

    Raises:
        StateError: the folder holds another run or foreign files; the checkpoint asked for is
            broken or another run's.
    """
    if resume not in ("auto", "never"):
        return _resume_path(Path(resume), output_dir, identity, allow_change, damaged or {})
    found = check_output_folder(output_dir, identity)
    if describe_folder(output_dir).kind == "empty":
        return Resume(None, 0)
    if resume == "never":
        raise StateError(
            "the output folder holds a run already, and --resume is never",
            str(output_dir),
            "choose another --output-dir, or leave --resume out to continue that run",
        )
    _refuse_differences(found, str(output_dir), allow_change)
    folder, skipped = newest_valid(output_dir, hashes=False, damaged=damaged)
    _refuse_unread([path for path, _ in skipped])
    status = describe_folder(output_dir).status or {}
    step = step_in(folder)
    if status.get("state") == "done" and (
        step >= total_steps or is_enough(metadata_of(folder), step)
    ):
        return None
    reasons = tuple((path.name, why) for path, why in skipped)
    return Resume(folder, step, changed=bool(found), skipped=reasons)


def _refuse_unread(skipped: list[Path]) -> None:
    """Raise StateError if a checkpoint cannot be read: a failing mount or disk is no reason to lose
    its steps by resuming from an older one.
    """
    for folder in skipped:
        validity = verify(folder, hashes=False)
        if validity.unread:
            raise StateError(
                f"{folder.name} cannot be read: {validity.why}",
                str(folder.parent),
                "see to this machine's mount or the disk and start again; to go on from an older"
                " checkpoint, move this one away",
            )


def _resume_path(
    folder: Path,
    output_dir: Path,
    identity: dict[str, Any],
    allow_change: bool,
    damaged: Mapping[str, str],
) -> Resume:
    validity = verify(folder, hashes=False)
    if not validity.valid or folder.name in damaged:
        raise StateError(
            f"the checkpoint is not valid: {damaged.get(folder.name, validity.why)}",
            str(folder),
            "python -m finetune checkpoints RUN lists the valid ones; --resume auto takes the"
            " newest",
        )
    saved = (validity.manifest or {}).get("metadata", {}).get("identity", {})
    found = differences(saved, identity)
    _refuse_differences(found, str(folder), allow_change)
    if describe_folder(output_dir).kind != "empty":
        found += check_output_folder(output_dir, identity)
        _refuse_differences(found, str(output_dir), allow_change)
    return Resume(folder, step_in(folder), changed=bool(found))


def _refuse_differences(found: list[Difference], where: str, allow_change: bool) -> None:
    if not found:
        return
    if allow_change:
        logger.warning("resuming although the run was changed:\n%s", format_differences(found))
        return
    raise StateError(
        f"this is not the run in the folder:\n{format_differences(found)}",
        where,
        "choose another --output-dir for a new run; give the old values to continue the old one; or"
        " continue it changed, on your own account, with --allow-data-change",
    )


def metadata_of(folder: Path | None) -> dict[str, Any]:
    """Return the metadata in a checkpoint's manifest; empty without a checkpoint."""
    manifest = None if folder is None else verify(folder, hashes=False).manifest
    return {} if manifest is None else dict(manifest["metadata"])


def identity_begun(output_dir: Path, resume: str) -> dict[str, Any]:
    """Return the identity of the run that would be resumed; empty for a new one. What is wrong with
    it is reported later.

    Args:
        resume: auto, never, or the folder of a checkpoint.
    """
    if resume == "never":
        return {}
    if resume == "auto":
        return read_identity(output_dir) or {}
    return dict(metadata_of(Path(resume)).get("identity", {}))


def step_in(folder: Path | None) -> int:
    """Optimizer steps done in a checkpoint; 0 for none."""
    return 0 if folder is None else int(step_of(folder.name) or 0)
