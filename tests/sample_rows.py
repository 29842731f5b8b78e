"""The rows of the shipped data files, for the tests of what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "data_samples"


def read_records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def prompt(row: dict[str, Any]) -> str:
    return f"{row['instruction']}\n{row['input']}".strip()
