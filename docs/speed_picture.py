"""The README's chart of training speed, from committed results: `python docs/speed_picture.py`. A
test says when it is old.
"""

from __future__ import annotations

import json
from pathlib import Path

from concept_pictures import DARK, GREY, IMAGES, Drawing

ROOT = Path(__file__).resolve().parents[1]
H100 = ROOT / "benchmarks" / "results" / "lora_8b_h100.json"
CPU_PAGE = ROOT / "docs" / "evidence" / "benchmarks_sft.md"
SIDE_BY_SIDE = "2026-11-26"  # the day on which all were measured on one machine
OF_CPU = {
    "ours": "finetune",
    "llamafactory-tuned": "LLaMA-Factory, tuned",
    "trl-tuned": "TRL, tuned",
}
FILE = "speed.svg"
BAR_LEFT, BAR_WIDTH = 220, 360


def on_the_gpu() -> list[tuple[str, int, float]]:
    """Return name, tokens per second and peak GB of the runs that were measured side by side."""
    runs = json.loads(H100.read_text(encoding="utf-8"))["runs"]
    return [
        (run["name"], run["tokens_per_second"], run["peak_gb"])
        for run in runs
        if run["date"] == SIDE_BY_SIDE
    ]


def on_the_cpu() -> list[tuple[str, int, float]]:
    """Return the same of the float32 table of the benchmark's page."""
    table = CPU_PAGE.read_text(encoding="utf-8").partition("## float32")[2].partition("\n## ")[0]
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in OF_CPU:
            found.append((OF_CPU[cells[0]], int(cells[3].replace(",", "")), float(cells[7])))
    return found


def speed() -> str:
    panels = (
        ("LoRA, 8B, one H100 80GB, bfloat16: tokens per second (peak memory)", on_the_gpu()),
        ("LoRA, small model, two CPU cores, float32", on_the_cpu()),
    )
    rows = sum(len(runs) for _, runs in panels)
    drawing = Drawing(20 + 46 * len(panels) + 28 * rows)
    y = 26
    for title, runs in panels:
        drawing.text(20, y, title, GREY)
        most = max(rate for _, rate, _ in runs)
        for name, rate, peak in runs:
            y += 28
            own = name.startswith("finetune")
            drawing.text(BAR_LEFT - 10, y, name, DARK, "end")
            drawing.box(
                BAR_LEFT, y - 15, BAR_WIDTH * rate / most, 20, "#1a7f37" if own else "#8c959f"
            )
            text = f"{rate:,} ({peak:.1f} GB)"
            drawing.text(BAR_LEFT + BAR_WIDTH * rate / most + 8, y, text)
        y += 46
    return drawing.svg()


if __name__ == "__main__":
    (IMAGES / FILE).write_text(speed(), encoding="utf-8")
