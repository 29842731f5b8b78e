"""Write token shards one after another, each atomically, and resume after a kill.

`prepare.json` records which settings and data a folder was started with, and whether it is
finished.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.corpus.token_shards import (
    DTYPES,
    INDEX_DTYPE,
    PLAN_FILE,
    PLAN_FORMAT,
    PLAN_VERSION,
    TOKENIZER_FOLDER,
    TokenHeader,
    header_path,
    index_path,
    read_header,
    shard_damage,
)
from finetune.data.shards import ShardFile
from finetune.errors import DataError, StateError
from finetune.storage.durable_files import (
    is_still_open,
    read_bytes,
    remove_tree,
    replace_file,
    sync_folder,
)
from finetune.storage.run_lock import CLAIM_NAME, LOCK_NAME

logger = logging.getLogger("finetune")

SPLITS = ("train", "val")
_SHARD_NAME = re.compile(r"\.?(train|val)-\d{5}\.(bin|index|json)(\.tmp)?")
_MAX_SHARDS = 100_000  # five digits: names sort as numbers do
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


@dataclass(frozen=True)
class ShardKind:
    """What all shards of one preparation share; see `TokenHeader`."""

    dtype: str
    vocabulary: int
    tokenizer_hash: str
    separator_id: int
    shard_tokens: int


def shard_path(folder: Path, split: str, number: int) -> Path:
    """`train-00000.bin`, `val-00000.bin`, ..."""
    return folder / f"{split}-{number:05d}.bin"


class ShardWriter:
    """Documents -> shards of one split, in order.

    A shard ends before the document that would bring it above `shard_tokens`; a longer document
    fills a shard alone.

    Args:
        folder: where the shards go; only this writer writes shards of its split there.
        finished: headers of the existing shards; writing resumes after them.
    """

    _file: ShardFile | None  # of the unfinished shard
    _tokens: int
    _starts: array[int]

    def __init__(
        self, folder: Path, split: str, kind: ShardKind, finished: list[TokenHeader]
    ) -> None:
        self.folder = folder
        self.split = split
        self.kind = kind
        self.headers = list(finished)
        self._begin()

    @property
    def position(self) -> tuple[int, int]:
        """(unit, document in it) of the input from which this split resumes."""
        return self.headers[-1].continues_at if self.headers else (0, 0)

    def add(self, ids: np.ndarray, unit: int, document: int) -> None:
        """Append one document (its separator included) that is number `document` of an input
        unit.
        """
        if self._tokens and self._tokens + len(ids) > self.kind.shard_tokens:
            self.finish()
        if self._file is None:
            self._file = ShardFile(shard_path(self.folder, self.split, len(self.headers)))
        self._file.write(ids.astype(DTYPES[self.kind.dtype], copy=False))
        self._starts.append(self._tokens)
        self._tokens += len(ids)
        self._continues_at = (unit, document + 1)

    def finish(self) -> None:
        """Give the shard its name, durably: index, header, then the tokens. Nothing without a
        document.
        """
        if self._file is None:
            return
        index = np.array([*self._starts, self._tokens], dtype=INDEX_DTYPE).tobytes()
        header = TokenHeader(
            self.kind.dtype,
            self._tokens,
            len(self._starts),
            self.kind.vocabulary,
            self.kind.tokenizer_hash,
            self.kind.separator_id,
            self._file.finish(),
            hashlib.sha256(index).hexdigest(),
            self._continues_at,
        )
        replace_file(index_path(self._file.path), index)
        replace_file(header_path(self._file.path), header.to_json().encode())
        self._file.publish()
        self.headers.append(header)
        self._begin()

    def close(self) -> None:
        """Let go of a shard that is not finished."""
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        if len(self.headers) >= _MAX_SHARDS:
            raise DataError(
                f"more than {_MAX_SHARDS} shards are needed",
                str(self.folder),
                "raise --shard-tokens",
            )
        self._file = None
        self._tokens = 0
        self._starts = array("q")


def finished_shards(folder: Path, split: str, kind: ShardKind) -> list[TokenHeader]:
    """The finished shards of a split up to the first that is missing or damaged, by SHA-256.

    A damaged shard is logged; it and all after it are to be made again: each begins where the one
    before it ended.

    Raises:
        StateError: shards of another tokenizer.
    """
    kept: list[TokenHeader] = []
    while (path := shard_path(folder, split, len(kept))).is_file():
        header = None
        try:
            header = read_header(path)
            fault = "its header is missing" if header is None else shard_damage(path, header)
        except DataError as problem:
            fault = problem.what
        if header is None or fault:
            logger.warning("%s is made again: %s", path, fault)
            break
        if (header.tokenizer_hash, header.vocabulary) != (kind.tokenizer_hash, kind.vocabulary):
            raise StateError(
                "the tokenizer in the output folder is not the one the shards were made with",
                str(path),
                "put the tokenizer folder back as it was, or prepare into another --output-dir",
            )
        kept.append(header)
    return kept


def remove_unfinished(folder: Path, split: str, kept: int) -> None:
    """Remove the files of all shards of a split but the first `kept` ones."""
    whole = {shard_path(folder, split, number).stem for number in range(kept)}
    for file in sorted(folder.iterdir()):
        is_of_split = _SHARD_NAME.fullmatch(file.name) and file.name.lstrip(".").startswith(split)
        if is_of_split and file.stem not in whole:
            remove_tree(file, missing_ok=True)
    sync_folder(folder)


@dataclass(frozen=True)
class Plan:
    """What a folder's content follows from."""

    settings: dict[str, Any]  # those that the result depends on, by name
    corpus: dict[str, Any]  # its SHA-256, documents and bytes
    finished: dict[str, Any] | None = None  # what there is; None until everything is written

    def write(self, folder: Path) -> None:
        """Put the plan into its folder, replacing an older one."""
        content = {"format": PLAN_FORMAT, "version": PLAN_VERSION, **asdict(self)}
        replace_file(folder / PLAN_FILE, (json.dumps(content, indent=1) + "\n").encode())

    def is_whole(self, splits: dict[str, list[TokenHeader]]) -> bool:
        """Whether these shards are all that the finished folder had."""
        return self.finished is not None and all(
            self.finished[split]["shards"] == len(headers) for split, headers in splits.items()
        )

    def check_settings(self, folder: Path, now: dict[str, Any]) -> None:
        """StateError: the folder was started with other settings."""
        before = self.settings
        changed = [
            f"{name} was {before.get(name)}, now {now.get(name)}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise StateError(
                f"the output folder was begun with other settings: {'; '.join(changed)}",
                str(folder),
                "give the same settings to resume it, or choose another --output-dir",
            )

    def check_corpus(self, folder: Path, now: dict[str, Any]) -> None:
        """StateError: the folder was started with other documents."""
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
    """Read the plan of a folder; None for an empty one.

    Raises:
        StateError: the folder holds other things, or a damaged plan.
    """
    names = {path.name for path in folder.iterdir() if not is_still_open(path.name)}
    begun = PLAN_FILE in names
    ours = _OURS if begun else {LOCK_NAME, CLAIM_NAME, _PLAN_TEMPORARY}
    others = sorted(name for name in names - ours if not (begun and _SHARD_NAME.fullmatch(name)))
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise StateError(
            f"the output folder already holds other things: {', '.join(others[:3])}{more}",
            str(folder),
            "choose another --output-dir",
        )
    if not begun:
        return None
    try:
        content = json.loads(read_bytes(folder / PLAN_FILE, _LIMIT_BYTES))
        known = (content.pop("format"), content.pop("version")) == (PLAN_FORMAT, PLAN_VERSION)
        plan = Plan(**content)
        known = known and isinstance(plan.settings, dict) and isinstance(plan.corpus, dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise StateError(
            f"{PLAN_FILE} is damaged, or of another version",
            str(folder),
            "delete the folder, or choose another",
        )
    return plan
