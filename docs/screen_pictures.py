"""Pictures of what the programs show: `python docs/screen_pictures.py runs/demo-TIME`, the folder
of a `make demo`.

Trains a run for two minutes, stops it once and resumes it, so that monitor and report have
something to show; serves the demo's adapter. Needs chromium. Into docs/images/: demo.png,
monitor.png, report.png, chat.png.
"""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "launchers"), str(ROOT / "tests")]
import demo  # noqa: E402
from browser import Page, browser  # noqa: E402

from finetune.commands.monitor.command import MachineWatch  # noqa: E402
from finetune.commands.monitor.dashboard import Dashboard  # noqa: E402
from finetune.runs.reader import open_run  # noqa: E402

IMAGES = ROOT / "docs" / "images"
STEPS, STOPPED_AT, SHOWN_AT = 200, 120, 170
QUESTIONS = {
    "en": ("Which network does 192.168.7.77/27 belong to?", "What is VXLAN used for?"),
    "zh": ("什么是 DHCP？", "18 台路由器全互联需要多少条链路？"),
}


def terminal(width: int, height: int) -> Console:
    size = {"width": width, "height": height}
    return Console(
        record=True, force_terminal=True, color_system="truecolor", file=io.StringIO(), **size
    )


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
        page.picture(IMAGES / name)


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
    """The monitor in the middle of a run, and its report when it is done."""
    words = [
        sys.executable,
        "-m",
        "finetune",
        "sft",
        "--config",
        "ds_configs/zero3.json",
        "--deepspeed",
        "none",
    ]
    words += [
        "--device-type",
        "cpu",
        "--max-steps",
        str(STEPS),
        "--eval-steps",
        "25",
        "--save-steps",
        "50",
    ]
    words += ["--output-dir", str(folder)]
    for step in (STOPPED_AT, SHOWN_AT):
        run = subprocess.Popen(words, cwd=ROOT)
        while (
            not (folder / "events.jsonl").exists()
            or (reader := open_run(str(folder), None)).poll().step < step
        ):
            assert run.poll() is None, "the run ended early"
            time.sleep(0.1)
        if step == STOPPED_AT:
            run.send_signal(signal.SIGTERM)
            run.wait()
    watch = MachineWatch(None)
    console = terminal(104, 31)
    console.print(Dashboard(reader.poll(), watch.look(), " q quit"))
    shoot(
        page,
        console.export_svg(title=f"python -m finetune monitor {folder}"),
        "monitor.png",
        "svg",
        1300,
    )
    run.wait()
    subprocess.run([sys.executable, "-m", "finetune", "report", str(folder)], cwd=ROOT, check=True)
    page.size(1200, 1290)
    page.call("Page.navigate", url=f"file://{(ROOT / folder / 'report.html').resolve()}")
    page.wait("document.readyState === 'complete'")
    page.picture(IMAGES / "report.png")


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
    folder = Path(sys.argv[1])
    with browser() as page:
        draw_demo(page, folder)
        draw_chat(page, folder)
        draw_run(page, Path("runs") / time.strftime("pictures-%H%M%S"))


if __name__ == "__main__":
    main()
