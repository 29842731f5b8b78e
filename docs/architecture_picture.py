"""docs/images/architecture.svg, from the imports: `python docs/architecture_picture.py`. A test
says when it is old.

A line for each folder, from what people call down to what everything stands on; a dot where it
imports the folder of that column. Dots only to the right of the diagonal: imports point down.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
# folder -> what it is for; from the top down.
FOLDERS = {
    "commands": "one folder a command: arguments in, exit code out",
    "runs": "a run folder read and followed from outside",
    "inference": "a model loaded and asked: engines, sampling",
    "training": "trainers, executor, checkpointer; a run prepared and started",
    "planning": "what a run needs, and how long it takes",
    "modeling": "model, attention, loss, adapter",
    "data": "records to samples; data/corpus: text to token shards",
    "batching": "which samples are step k, and who takes them",
    "storage": "durable files, checkpoints, run folder, run log",
    "config": "settings: schema, sources, flags, DeepSpeed's keys, kinds of runs",
    "runtime": "devices, processes and nodes of this machine; language",
}
ROW, LEFT, TEXT, GRID, CELL = 34, 24, 150, 640, 34


def imports() -> dict[str, set[str]]:
    """For each folder the other folders that its modules import, wherever the import stands."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        found[folder] = set()
        for path in (ROOT / "finetune" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                for name in names:
                    package, _, rest = name.partition(".")
                    if package == "finetune" and rest.split(".")[0] in FOLDERS:
                        found[folder].add(rest.split(".")[0])
        found[folder].discard(folder)
    return found


def picture() -> str:
    """The SVG's text."""
    names, found = list(FOLDERS), imports()
    width, height = GRID + CELL * len(names) + LEFT, 130 + ROW * len(names)
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" font-family="system-ui, sans-serif"'
            ' font-size="14">'
        ),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for column, name in enumerate(names):
        x = GRID + CELL * column + CELL / 2
        lines.append(
            f'<text transform="translate({x + 5:.0f} 104) rotate(-60)" fill="#57606a">{name}</text>'
        )
    for number, name in enumerate(names):
        y = 115 + ROW * number
        if number % 2 == 0:
            lines.append(
                f'<rect x="8" y="{y}" width="{width - 16}" height="{ROW}" rx="4" fill="#f6f8fa"/>'
            )
        middle = y + ROW / 2 + 5
        lines.append(
            f'<text x="{LEFT}" y="{middle:.0f}" font-weight="600" fill="#1f2328">{name}/</text>'
        )
        lines.append(
            f'<text x="{TEXT}" y="{middle:.0f}" fill="#1f2328">{escape(FOLDERS[name])}</text>'
        )
        for column, other in enumerate(names):
            x, centre = GRID + CELL * column + CELL / 2, y + ROW / 2
            if other == name:
                lines.append(
                    f'<rect x="{x - 7:.0f}" y="{centre - 7:.0f}" width="14" height="14" rx="3"'
                    ' fill="#d0d7de"/>'
                )
            elif other in found[name]:
                colour = "#0969da" if column > number else "#cf222e"
                lines.append(f'<circle cx="{x:.0f}" cy="{centre:.0f}" r="6" fill="{colour}"/>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
