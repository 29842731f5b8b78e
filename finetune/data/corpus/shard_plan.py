"""`prepare.json`: what a folder of token shards was begun with, and whether it is finished."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.corpus.shard_header import (
    PLAN_FILE,
    PLAN_FORMAT,
    PLAN_VERSION,
    TOKENIZER_FOLDER,
    TokenHeader,
)
from finetune.data.corpus.shard_writer import SHARD_NAME
from finetune.errors import StateError
from finetune.storage.durable_files import is_still_open, read_bytes, replace_file
from finetune.storage.run_lock import CLAIM_NAME, LOCK_NAME

_LIMIT_BYTES = 1 << 20
_PLAN_TEMPORARY = f".{PLAN_FILE}.tmp"
_OURS = {
    PLAN_FILE,
    _PLAN_TEMPORARY,
    TOKENIZER_FOLDER,
    f".{TOKENIZER_FOLDER}.tmp",
    LOCK_NAME,
    CLAIM_NAME,
}
_PARTS = ("settings", "corpus", "finished")


@dataclass(frozen=True)
class Plan:
    """What a folder's content follows from."""

    settings: dict[str, Any]  # those that the result depends on, by name
    corpus: dict[str, Any]  # its SHA-256, documents and bytes
    finished: dict[str, Any] | None = None  # None until everything is there; then what there is

    def write(self, folder: Path) -> None:
        """Put the plan into its folder, replacing an older one."""
        content = {
            "format": PLAN_FORMAT,
            "version": PLAN_VERSION,
            **{name: getattr(self, name) for name in _PARTS},
        }
        replace_file(folder / PLAN_FILE, (json.dumps(content, indent=1) + "\n").encode())

    def is_whole(self, splits: dict[str, list[TokenHeader]]) -> bool:
        """Whether these shards are all that the finished folder had."""
        return self.finished is not None and all(
            self.finished[split]["shards"] == len(headers) for split, headers in splits.items()
        )

    def check_settings(self, folder: Path, now: dict[str, Any]) -> None:
        """StateError: the folder was begun with other settings."""
        before = self.settings
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        changed = [f"{name} was {before.get(name)}, now {now.get(name)}" for name in names]
        if changed:
            raise StateError(
                f"the output folder was begun with other settings: {'; '.join(changed)}",
                str(folder),
                "give the same settings to resume it, or choose another --output-dir",
            )

    def check_corpus(self, folder: Path, now: dict[str, Any]) -> None:
        """StateError: the folder was begun with other documents."""
        if self.corpus != now:
            raise StateError(
                f"the output folder was begun with other data: {_described(self.corpus)} then,"
                f" {_described(now)} now",
                str(folder),
                "give the same --data (the order of the files counts), or choose another"
                " --output-dir",
            )


def _described(corpus: dict[str, Any]) -> str:
    return (
        f"{corpus.get('documents')} documents of {corpus.get('bytes')} bytes"
        f" ({str(corpus.get('sha256'))[:8]})"
    )


def read_plan(folder: Path) -> Plan | None:
    """The plan of a folder that was begun; None for one with nothing in it.

    Raises:
        StateError: the folder holds other things, or a plan that is none.
    """
    names = {path.name for path in folder.iterdir() if not is_still_open(path.name)}
    strange = sorted(name for name in names if name not in _OURS and not SHARD_NAME.fullmatch(name))
    if PLAN_FILE not in names:
        strange = strange or sorted(names - {LOCK_NAME, CLAIM_NAME, _PLAN_TEMPORARY})
    if strange:
        what = ", ".join(strange[:3]) + (
            f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        )
        raise StateError(
            f"the output folder already holds other things: {what}",
            str(folder),
            "choose another --output-dir",
        )
    if PLAN_FILE not in names:
        return None
    try:
        content = json.loads(read_bytes(folder / PLAN_FILE, _LIMIT_BYTES))
        known = content["format"] == PLAN_FORMAT and content["version"] == PLAN_VERSION
        plan = Plan(**{name: content[name] for name in _PARTS})
        known = known and isinstance(plan.settings, dict) and isinstance(plan.corpus, dict)
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise StateError(
            f"{PLAN_FILE} is damaged, or of another version",
            str(folder),
            "delete the folder, or choose another",
        )
    return plan
