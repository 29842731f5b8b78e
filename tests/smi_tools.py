"""Stand-ins for npu-smi and nvidia-smi: programs that print one of the texts in `smi_outputs/`."""

from __future__ import annotations

from pathlib import Path

OUTPUTS = Path(__file__).resolve().parent / "smi_outputs"


def make_tools(folder: Path, tools: dict[str, str]) -> None:
    """Write an executable for each tool name; queries that a text does not answer fail, as old drivers' do."""
    folder.mkdir(exist_ok=True)
    for name, file in tools.items():
        tool = folder / name
        tool.write_text(f'#!/bin/sh\ncase "$1" in --query*) exit 2;; esac\ncat "{OUTPUTS / file}"\n')
        tool.chmod(0o755)
