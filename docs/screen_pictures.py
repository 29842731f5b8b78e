"""Pictures of what the programs show: `python docs/screen_pictures.py runs/demo-TIME
runs/smollm2-TIME`, the folders of a `make demo` and a `make smollm2`.

demo.png shows the end of the demo. monitor.png, report.png and chat.png show the run of SmolLM2 and
its adapter. Into docs/images/, each below 200 KB. Needs chromium and a font with Chinese
(Debian: fonts-droid-fallback).
"""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "launchers"), str(ROOT / "tests")]
import demo  # noqa: E402
from browser import Page, browser  # noqa: E402

from finetune.commands.monitor.command import MachineWatch  # noqa: E402
from finetune.commands.monitor.dashboard import Dashboard  # noqa: E402
from finetune.runs.reader import open_run  # noqa: E402

IMAGES = ROOT / "docs" / "images"
LARGEST_BYTES = 200_000
# SmolLM2 knows no Chinese: the Chinese page is asked in English, too.
QUESTIONS = {
    "en": ("Who are you?", "What is the capital of Italy?"),
    "zh": ("What are you called?", "State the length of a MAC address."),
}


def terminal(width: int, height: int) -> Console:
    size = {"width": width, "height": height}
    return Console(
        record=True, force_terminal=True, color_system="truecolor", file=io.StringIO(), **size
    )


def save(page: Page, name: str) -> None:
    """Save a picture, with as many colors as a GIF has if it is too large otherwise."""
    path = IMAGES / name
    page.picture(path)
    if path.stat().st_size > LARGEST_BYTES:
        with Image.open(path) as picture:
            few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    assert path.stat().st_size <= LARGEST_BYTES, f"{name} is too large"


def shoot(page: Page, content: str, name: str, selector: str, width: int = 1400) -> None:
    """A picture of one element of a page that is written here."""
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as file:
        file.write(
            f"<!doctype html><meta charset=utf-8><style>body {{ margin: 0 }}</style>{content}"
        )
        file.flush()
        page.size(width, 900)
        page.call("Page.navigate", url=f"file://{file.name}")
        page.wait("document.readyState === 'complete'")
        box = page.run(
            f"(() => {{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [Math.ceil(r.width), Math.ceil(r.height)]; })()"
        )
        page.size(*box)
        save(page, name)


def draw_demo(page: Page, folder: Path) -> None:
    """The tables that the demo ends with, from what it left."""
    models, given = demo.read_evaluation(folder)
    records, training = demo.read_rows(ROOT / demo.VALID), demo.read_rows(ROOT / demo.TRAIN)
    console = terminal(116, 60)
    console.print(demo.answers_table(given, records))
    console.print(demo.figures_table(models, given, records, training))
    # rich squeezes each text to one column a character; Chinese ones have two.
    picture = re.sub(
        r' textLength="[^"]*"(?=[^>]*>[^<]*[\u3000-\uffef])',
        "",
        console.export_svg(title="make demo"),
    )
    shoot(page, picture, "demo.png", "svg", 1460)


def draw_run(page: Page, folder: Path) -> None:
    """The monitor on a run, and the run's report."""
    console = terminal(104, 31)
    view, machine = open_run(str(folder), None).poll(), MachineWatch(None).look()
    console.print(Dashboard(view, machine, " q quit"))
    picture = console.export_svg(title=f"python -m finetune monitor {folder}")
    shoot(page, picture, "monitor.png", "svg", 1300)
    subprocess.run([sys.executable, "-m", "finetune", "report", str(folder)], cwd=ROOT, check=True)
    page.size(1200, 1290)
    page.call("Page.navigate", url=f"file://{(ROOT / folder / 'report.html').resolve()}")
    page.wait("document.readyState === 'complete'")
    save(page, "report.png")


def draw_chat(page: Page, folder: Path) -> None:
    """The chat page on a desktop and, in Chinese and dark, on a phone, beside each other."""
    words = [
        sys.executable,
        "-m",
        "finetune",
        "serve",
        "--model",
        str(folder),
        "--port",
        "0",
        "--device-type",
        "cpu",
    ]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            line = next(line for line in server.stdout or () if "http://127.0.0.1:" in line)
            url = "http://127.0.0.1:" + line.split("http://127.0.0.1:")[1].split("/")[0].split()[0]
            with tempfile.TemporaryDirectory() as made:
                for language, questions in QUESTIONS.items():
                    phone = language == "zh"
                    page.size(*((360, 760) if phone else (1200, 760)), phone=phone, dark=phone)
                    page.call("Page.navigate", url=url)
                    page.wait(
                        "document.readyState === 'complete' && typeof state === 'object' &&"
                        " state.model !== null",
                        120,
                    )
                    page.run(f"speak({language!r}); byId('temperature').value = '0'; beginAnew()")
                    for question in questions:
                        page.run("byId('question').focus()")
                        page.type(question)
                        page.press("Enter")
                        page.wait(
                            "state.running === null && state.turns.at(-1).role === 'assistant'", 120
                        )
                    page.picture(Path(made, f"{language}.png"))
                pictures = "".join(
                    f'<img src="file://{made}/{language}.png">' for language in QUESTIONS
                )
                shoot(
                    page,
                    f'<div style="display: inline-flex; gap: 20px">{pictures}</div>',
                    "chat.png",
                    "div",
                    1600,
                )
        finally:
            server.send_signal(signal.SIGINT)


def main() -> None:
    demo_run, real_run = map(Path, sys.argv[1:])
    with browser() as page:
        draw_demo(page, demo_run)
        draw_run(page, real_run)
        draw_chat(page, real_run)


if __name__ == "__main__":
    main()
