"""docs/evidence/scale.md: each script of this folder writes the tables of its own section, and nothing
else.
"""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "scale.md"


def write_section(title: str, body: str, document: Path = DOCUMENT) -> None:
    """Replace what stands under `## title`.

    Raises:
        ValueError: the page has no such heading, or the text has one of its level.
    """
    lines = document.read_text(encoding="utf-8").splitlines()
    if any(line.startswith(("# ", "## ")) for line in body.splitlines()):
        raise ValueError("a section has headings below its own only")
    begin = lines.index(f"## {title}") + 1
    end = next(
        (number for number in range(begin, len(lines)) if lines[number].startswith("## ")),
        len(lines),
    )
    text = "\n".join([*lines[:begin], "", body.strip(), "", *lines[end:]]).rstrip()
    document.write_text(text + "\n", encoding="utf-8")
