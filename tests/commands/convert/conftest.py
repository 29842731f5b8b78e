from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from converted_runs import AXOLOTL, EXAMPLE, INFO, SWIFT_KEYS, TRL, converted

BASES = {"llamafactory": EXAMPLE, "trl": TRL, "axolotl": AXOLOTL, "ms-swift": SWIFT_KEYS}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    return tmp_path


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str]]:
    """Convert a plain run of a tool with changes: the settings, and the file's text."""

    def made(tool: str, changes: dict[str, Any], *arguments: str) -> tuple[Any, str]:
        return converted({**BASES[tool], **changes}, capsys, "--from", tool, *arguments)

    return made
