"""The form of token shards on disk. Public, frozen by a test.

NAME.bin    the ids, one after another, little-endian, uint16 where every id is below 65,536, else
uint32 NAME.index  int64, little-endian, (documents + 1,): where each document starts, and the
number of tokens NAME.json   the header, below

The `.bin` is the last of the three to get its name, so that a shard under its name is whole.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import DataError
from finetune.storage.durable_files import read_bytes

FORMAT = "finetune tokens"
# What `python -m finetune prepare` writes beside the shards; its "finished" is null until all is
# there.
PLAN_FILE, PLAN_FORMAT, PLAN_VERSION = "prepare.json", "finetune prepared data", 1
TOKENIZER_FOLDER = "tokenizer"
VERSION = 1
IDS_OF_UINT16 = 1 << 16
INDEX_DTYPE = "<i8"
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_LIMIT_BYTES = 1 << 20
_MAKE_AGAIN = "delete the shard's .bin, .index and .json and run `python -m finetune prepare` again"


def dtype_for(vocabulary: int) -> str:
    """The name of the smallest of our number formats that holds every id of a vocabulary."""
    return "uint16" if vocabulary <= IDS_OF_UINT16 else "uint32"


@dataclass(frozen=True)
class TokenHeader:
    """What is known of one shard, or of several as one."""

    dtype: str  # uint16 or uint32
    tokens: int
    documents: int  # a file without header counts as one document
    vocabulary: int  # number of ids; every id is below it
    tokenizer_hash: str = ""  # see `tokenizer.tokenizer_hash`; empty where it is unknown
    separator_id: int | None = None  # the id every document starts with; None where it is unknown
    sha256: str = ""  # of the .bin; of several shards, of their list
    index_sha256: str = ""  # of the .index
    # (unit, document in it) of the input after the last document; for restarts
    continues_at: tuple[int, int] = (0, 0)

    @property
    def size_bytes(self) -> int:
        """Of the .bin file."""
        return self.tokens * np.dtype(DTYPES[self.dtype]).itemsize

    def to_json(self) -> str:
        """The content of NAME.json."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"


def header_path(path: Path) -> Path:
    """NAME.json of NAME.bin."""
    return path.with_suffix(".json")


def index_path(path: Path) -> Path:
    """NAME.index of NAME.bin."""
    return path.with_suffix(".index")


def read_header(path: Path) -> TokenHeader | None:
    """The header of a .bin file; None where there is no file of that name, or it is no header of
    ours.

    Raises:
        DataError: a header of ours that cannot be read, of another version, or with a value that
            cannot be.
    """
    source = header_path(path)
    try:
        content = json.loads(read_bytes(source, _LIMIT_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(
            f"the header cannot be read: {error.strerror}", str(source), _MAKE_AGAIN
        ) from error
    except ValueError as error:
        raise DataError(f"the header is no JSON: {error}", str(source), _MAKE_AGAIN) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    if content.get("version") != VERSION:
        raise DataError(
            f"the header has version {content.get('version')!r}, and this program reads version"
            f" {VERSION}",
            str(source),
            "use the version of finetune that wrote it, or prepare the data again",
        )
    values: dict[str, Any] = {field.name: content.get(field.name) for field in fields(TokenHeader)}
    wrong = [f"{name} is {value!r}" for name, value in values.items() if not _RULES[name](value)]
    if wrong:
        raise DataError(f"the header is damaged: {', '.join(wrong)}", str(source), _MAKE_AGAIN)
    values["continues_at"] = tuple(values["continues_at"])
    return TokenHeader(**values)


def _count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


_RULES = {
    "dtype": lambda value: value in DTYPES,
    "tokens": lambda value: _count(value, 1),
    "documents": lambda value: _count(value, 1),
    "vocabulary": lambda value: _count(value, 1),
    "tokenizer_hash": _hash,
    "separator_id": lambda value: value is None or _count(value),
    "sha256": _hash,
    "index_sha256": _hash,
    "continues_at": lambda value: (
        isinstance(value, list) and len(value) == 2 and all(map(_count, value))
    ),
}
