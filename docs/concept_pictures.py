"""Pictures of docs/concepts/concepts.md, drawn of what the package computes: `python
docs/concept_pictures.py`. A test says when they are old.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from finetune.batching.curriculum import plan_counts, schedule_of
from finetune.batching.curriculum_sampler import CurriculumSampler
from finetune.batching.microbatch_schedule import schedule_microbatches
from finetune.config.fields import CurriculumConfig

IMAGES = Path(__file__).resolve().parent / "images"
COLOURS = ("#54aeff", "#bf8700", "#cf222e")
DARK, GREY, LIGHT = "#1f2328", "#57606a", "#d0d7de"
WIDTH = 760
LEFT = 130


class Drawing:
    """An SVG that grows downwards."""

    def __init__(self, height: int) -> None:
        self.lines = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
                f' width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif"'
                ' font-size="14">'
            ),
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none"
    ) -> None:
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3"'
            f' fill="{fill}" stroke="{edge}"/>'
        )

    def text(self, x: float, y: float, words: str, fill: str = DARK, anchor: str = "start") -> None:
        self.lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"'
            f' text-anchor="{anchor}">{escape(words)}</text>'
        )

    def svg(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


def global_batch() -> str:
    """One step of eight samples on one, two and four devices: the same samples."""
    names = ["explain"] * 40 + ["reasoning"] * 40 + ["topology"] * 20
    samples = (
        CurriculumSampler(names, global_batch_size=8, total_steps=30).batches.indices(12).tolist()
    )
    drawing = Drawing(236)
    drawing.text(20, 28, f"step 13 of 30: samples {', '.join(map(str, samples))}")
    for row, devices in enumerate((1, 2, 4)):
        y = 52 + 60 * row
        drawing.text(20, y + 25, f"{devices} device{'s' if devices > 1 else ''}")
        each = len(samples) // devices
        for device in range(devices):
            drawing.box(LEFT - 4 + device * each * 75, y - 2, each * 75 - 4, 44, "#f6f8fa", LIGHT)
        for place, sample in enumerate(samples):
            colour = COLOURS[("explain", "reasoning", "topology").index(names[sample])]
            drawing.box(LEFT + 2 + place * 75, y + 4, 64, 32, colour)
            drawing.text(LEFT + 34 + place * 75, y + 25, str(sample), "#ffffff", "middle")
    return drawing.svg()


def microbatch_schedule() -> str:
    """Twelve samples of different lengths in microbatches of at most 1,024 tokens, on two ranks."""
    lengths = np.array([900, 120, 300, 80, 640, 410, 220, 510, 60, 330, 150, 280])
    schedule = schedule_microbatches(lengths, 2, token_budget=1024, samples_per_microbatch=None)
    left = LEFT + 50
    scale, drawing = (WIDTH - left - 30) / 1024, Drawing(70 + 2 * schedule.micro_steps * 44)
    drawing.text(
        20, 28, f"{len(lengths)} samples, {lengths.sum():,} tokens, room for 1,024 in a microbatch"
    )
    for step in range(schedule.micro_steps):
        for rank in range(2):
            y = 46 + (2 * step + rank) * 44 + 4 * step
            drawing.text(20, y + 21, f"micro-step {step + 1}, rank {rank}", GREY)
            x = float(left)
            drawing.box(x, y, 1024 * scale, 30, "#f6f8fa", LIGHT)
            for position in schedule.of_rank(rank)[step]:
                width = lengths[position] * scale
                drawing.box(x, y, width - 1.5, 30, COLOURS[0])
                drawing.text(x + width / 2, y + 20, str(lengths[position]), "#ffffff", "middle")
                x += width
    return drawing.svg()


def curriculum() -> str:
    """The default curriculum over 50 steps of 32 samples."""
    config, steps, batch = CurriculumConfig(), 50, 32
    counts = plan_counts(schedule_of(config), steps, batch)
    drawing, width = Drawing(270), (WIDTH - LEFT - 30) / steps
    for number, name in enumerate(config.levels):
        drawing.box(LEFT + number * 150, 14, 14, 14, COLOURS[number])
        drawing.text(LEFT + 20 + number * 150, 26, name)
    for step, row in enumerate(counts):
        y = 230.0
        for number, count in enumerate(row.tolist()):
            y -= count * 180 / batch
            drawing.box(LEFT + step * width, y, width - 1.5, count * 180 / batch, COLOURS[number])
    drawing.text(20, 60, f"{batch} samples")
    drawing.text(20, 230, "0")
    drawing.text(LEFT, 254, "step 1", GREY)
    drawing.text(WIDTH - 30, 254, f"step {steps}", GREY, "end")
    return drawing.svg()


def checkpoints() -> str:
    """A run that is killed after step 47 with a checkpoint every 20 steps, and its second start."""
    drawing, width = Drawing(200), (WIDTH - LEFT - 30) / 60
    for row, (name, first, last) in enumerate((("first start", 0, 47), ("second start", 40, 60))):
        y = 50 + 66 * row
        drawing.text(20, y + 19, name)
        drawing.box(LEFT + first * width, y, (last - first) * width, 28, COLOURS[0])
        for step in (20, 40, 60):
            if first < step <= last:
                drawing.box(LEFT + step * width - 4, y - 5, 8, 38, DARK)
    drawing.box(LEFT + 40 * width, 50, 7 * width, 28, "#ffd8b5")
    drawing.text(LEFT + 47 * width + 6, 69, "killed", COLOURS[2])
    drawing.text(LEFT, 28, "black: a checkpoint, there whole or not at all", GREY)
    drawing.text(LEFT + 40 * width, 172, "steps 41 to 47 again, of the same samples", GREY, "start")
    for step in (0, 20, 40, 60):
        drawing.text(LEFT + step * width, 192, str(step), GREY, "middle")
    return drawing.svg()


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    drawn = (global_batch, microbatch_schedule, curriculum, checkpoints)
    return {f"concept_{draw.__name__}.svg": draw() for draw in drawn}


if __name__ == "__main__":
    for name, picture in pictures().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")
