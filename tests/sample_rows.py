"""Rows of data files: those of the shipped ones, and those that a test writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.data.reading.files import expand_sources

FOLDER = Path(__file__).resolve().parent.parent / "data_samples"


def read_records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[Any]) -> Path:
    """A line each, of records or of texts as they are."""
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def expand_paths(paths: list[str | Path]) -> tuple[Path, ...]:
    """The files of some entries of `--data`."""
    return tuple(file.path for file in expand_sources(paths))


def chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def prompt(row: dict[str, Any]) -> str:
    return f"{row['instruction']}\n{row['input']}".strip()
