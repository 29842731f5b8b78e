"""docs/images/tour.gif, the demo with its monitor and report: `python docs/animation.py`.

Runs `make demo` in a terminal of tmux, the monitor in a second one and `report` at the end, and
captures what they show. Takes a few minutes. Needs tmux, chromium and a font with Chinese (Debian:
fonts-droid-fallback).
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text
from screen_pictures import IMAGES, ROOT, Page, browser

CHINESE = r"[\u3000-\uffef]+"
COLUMNS, ROWS = 120, 34
WIDTH, HEIGHT = 960, 600  # of the picture
LARGEST_BYTES = 1_000_000
LOOK_SECONDS = 2.0
SHOWN = {"demo": 5, "monitor": 9, "end": 1}  # frames
SCROLLED = (0, 350, 700, 1050)  # of the report, in pixels
FRAME_MS, LAST_FRAME_MS = 900, 2500


def tmux(*words: str) -> str:
    command = ["tmux", "-L", "animation", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def start(name: str, command: str) -> None:
    size = ["-x", str(COLUMNS), "-y", str(ROWS)]
    tmux(
        "new-session",
        "-d",
        "-s",
        name,
        *size,
        "-c",
        str(ROOT),
        f"LC_ALL=C.UTF-8 {command}; sleep 600",
    )


def capture(name: str) -> str:
    """Return what a terminal shows now, with its colors, and without the paths of this machine."""
    screen = tmux("capture-pane", "-e", "-p", "-t", name)
    return screen.replace(f"{Path(sys.prefix).parent}/", "").replace(str(Path.home()), "~")


def record() -> tuple[dict[str, list[str]], Path]:
    """Return the screens of the demo, of its monitor and of the demo's end, and the run's folder."""
    screens: dict[str, list[str]] = {"demo": [], "monitor": []}
    earlier = set(ROOT.glob("runs/demo-*/events.jsonl"))
    start("demo", f"{sys.executable} launchers/demo.py")
    try:
        while not (found := set(ROOT.glob("runs/demo-*/events.jsonl")) - earlier):
            time.sleep(LOOK_SECONDS)
        folder = found.pop().parent.relative_to(ROOT)
        start("monitor", f"{sys.executable} -m finetune monitor {folder}")
        while "talk to it" not in (screen := capture("demo")):
            screens["demo"].append(screen)
            screens["monitor"].append(capture("monitor"))
            time.sleep(LOOK_SECONDS)
        time.sleep(LOOK_SECONDS)
        return {**screens, "end": [capture("demo")]}, folder
    finally:
        tmux("kill-server")


def spread(screens: list[str], count: int) -> list[str]:
    """Return different screens that are not blank, evenly spread over the time."""
    pairs = zip(screens, ["", *screens], strict=False)
    different = [screen for screen, before in pairs if screen.strip() and screen != before]
    count = min(count, len(different))
    return [different[round(i * (len(different) - 1) / max(count - 1, 1))] for i in range(count)]


def draw_screen(page: Page, screen: str, title: str) -> Image.Image:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    text = Text.from_ansi(screen.rstrip("\n"))
    text.highlight_regex(CHINESE, "not blink")  # a part of its own, so that what follows is aligned
    console.print(text)
    picture = console.export_svg(title=title)
    # rich squeezes each text to one column a character; Chinese ones have two.
    picture = re.sub(rf' textLength="[^"]*"(?=[^>]*>[^<]*{CHINESE})', "", picture)
    style = "body { margin: 0; background: #292929 } svg { width: 100% }"
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as file:
        file.write(f"<meta charset=utf-8><style>{style}</style>{picture}")
        file.flush()
        page.call("Page.navigate", url=f"file://{file.name}")
        page.wait("document.readyState === 'complete'")
        return photograph(page)


def photograph(page: Page) -> Image.Image:
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        page.picture(Path(file.name))
        return Image.open(io.BytesIO(Path(file.name).read_bytes())).convert("RGB")


def main() -> None:
    seen, folder = record()
    subprocess.run([sys.executable, "-m", "finetune", "report", str(folder)], cwd=ROOT, check=True)
    titles = {"demo": "make demo", "end": "make demo", "monitor": "python -m finetune monitor"}
    with browser() as page:
        page.size(WIDTH, HEIGHT)
        frames = [
            draw_screen(page, screen, titles[name])
            for name in ("demo", "monitor", "end")
            for screen in spread(seen[name], SHOWN[name])
        ]
        page.call("Page.navigate", url=f"file://{ROOT / folder / 'report.html'}")
        page.wait("document.readyState === 'complete'")
        for top in SCROLLED:
            page.run(f"window.scrollTo(0, {top})")
            time.sleep(0.3)
            frames.append(photograph(page))
    few = [frame.quantize(64, dither=Image.Dither.NONE) for frame in frames]
    durations = [FRAME_MS] * (len(few) - 1) + [LAST_FRAME_MS]
    path = IMAGES / "tour.gif"
    few[0].save(path, save_all=True, append_images=few[1:], duration=durations, loop=0)
    assert path.stat().st_size <= LARGEST_BYTES, f"{path.stat().st_size} bytes"


if __name__ == "__main__":
    main()
