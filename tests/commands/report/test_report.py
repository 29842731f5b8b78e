"""`finetune report`: one file that says what the run's files say, runs nothing and fetches
nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fake_runs import DIFFICULTIES, line, make_preference_run, make_run, start_event, step
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.__main__ import main as finetune
from finetune.commands.report import figures
from finetune.commands.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    area_svg,
    line_svg,
    nice_ticks,
    tick_text,
)
from finetune.commands.report.command import build_report
from finetune.runs.reader import open_run
from finetune.runs.step_table import Points
from finetune.runtime.language import speaking

TAGS = frozenset(
    re.findall(
        r"\w+",
        "html head meta title style body main header footer section h1 h2 p span b small dl dt dd"
        " div figure figcaption table thead tbody tr th td details summary pre svg path circle"
        " text",
    )
)
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>"\' onload=1 </style></svg> &amp;'


class Page(HTMLParser):
    """What a browser would make of the page: elements with attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def rows(self) -> list[str]:
        return [" ".join(text.split()) for text in self.texts if text.strip()]


def report(folder: Path, lang: Any = "en") -> tuple[str, Page]:
    with speaking(lang):
        html = build_report(open_run(folder).poll())
    return html, Page(html)


def assert_inert(html: str, page: Page) -> None:
    """Only known elements, no script, no handler, nothing fetched, and a policy that forbids all of
    it anyway.
    """
    assert {tag for tag, _ in page.elements} <= TAGS and page.open == []
    for tag, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on")} | attributes.keys() & {
            "src",
            "href",
            "style",
        }
        assert tag != "meta" or attributes.get("http-equiv") in (None, "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    assert not re.search(r"@import|url\(|expression", style)
    (policy,) = [a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"style-src 'sha256-{digest}'" in policy
    assert "script" not in policy and "unsafe" not in policy


# ---------------------------------------------------------------- what it says


def resumed_run(folder: Path) -> Path:
    """100 steps in three starts; the first was killed at 40 and resumed from 20, the second stopped
    at 60.
    """
    make_run(folder, steps=100, state="done", exit_code=0)
    began = time.time()
    plan = {"tokens": 495.0, "rows_per_rank": [1, 1.5, 2], "fill": 0.9, "imbalance": 1.01}

    def event(name: str, after: float, /, **facts: Any) -> dict[str, Any]:
        return {"event": name, "time": began + after, **facts}

    events = [
        start_event(0, time=began, plan=plan),
        event("eval", 0, step=0, eval_loss=2.0, eval_bpb=1.5) | {"eval_loss/explain": 4.0},
        event("eval", 5, step=40, eval_loss=9.0),  # thrown away with its training
        start_event(20, time=began + 10),
        event("resume", 10, step=20, checkpoint="checkpoint-20"),
        event("signal", 20, step=60, name="SIGTERM"),
        event("end", 20, state="stopped", exit_code=3, step=60),
        start_event(
            60,
            time=began + 30,
            plan=plan,
            versions={"torch": "2.13.0"},
            parameters={"total": 1467776},
        ),
        event("eval", 40, step=50, eval_loss=0.8) | {"eval_loss/explain": 0.9},
        event("eval", 50, step=100, eval_loss=1.0, eval_bpb=1.2) | {"eval_loss/explain": 1.0},
        *(
            event("checkpoint", n, step=n, name=f"checkpoint-{n}", size_bytes=2048)
            for n in (20, 60, 100)
        ),
        event("end", 50, state="done", exit_code=0, step=100),
    ]
    (folder / "events.jsonl").write_text("".join(map(line, events)))
    (folder / "checkpoint-100").mkdir()
    return folder


def test_preferences_have_figures_and_rows(tmp_path: Path):
    html, page = report(make_preference_run(tmp_path / "one"))
    assert_inert(html, page)
    for title in ("Accuracy", "Margin", "Chosen reward", "Rejected reward", "Reference point"):
        assert re.search(rf"{title}: training [^;]+; validation ", html), title
    said = page.rows()
    for first, *rest in (
        ("accuracy", "2.0%", "60.0%", "↑58.0%", "60.0%", "40"),
        ("accuracy, explain", "25.0%", "25.0%", "–", "25.0%", "0"),
        ("margin", "0.025", "0.750", "↑0.725", "0.750", "40"),
    ):
        where = said.index(first)
        assert said[where + 1 : where + 6] == rest
    assert "准确率" in report(tmp_path / "one", "zh")[0]


def test_sources_have_figures_and_rows(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=0)
    own = {"source_tokens/books": 30, "source_share/books": 0.75, "source_loss/books": 1.5}
    (folder / "trainer_log.jsonl").write_text(
        "".join(line(step(number, **own)) for number in range(1, 41))
    )
    with open(folder / "events.jsonl", "a") as events:
        for at in (0, 40):
            evaluated = {
                "eval_loss": 2.0,
                "eval_source_loss/kept": 1.25,
                "eval_exact_match": 0.25 + at / 80,
            }
            events.write(line({"event": "eval", "time": time.time(), "step": at} | evaluated))
    html, page = report(folder)
    assert_inert(html, page)
    assert "Loss by source" in html and "Validation loss by source" in html and "books" in html
    said = page.rows()
    assert said[said.index("kept") + 1] == "1.2500"
    where = said.index("exact match")
    assert said[where : where + 6] == ["exact match", "25.0%", "75.0%", "↑50.0%", "75.0%", "40"]
    assert "Exact match of generated answers" in html


def test_a_run_of_several_starts(tmp_path: Path):
    html, page = report(resumed_run(tmp_path / "one"))
    assert_inert(html, page)
    said = page.rows()
    assert said[said.index("done") - 1] == "one"
    where = said.index("Evaluation, before and after")
    assert said[where + 7 : where + 13] == ["all", "2.0000", "1.0000", "-50.0%", "0.8000", "50"]
    assert said[where + 13 : where + 19] == [
        "explain",
        "4.0000",
        "1.0000",
        "-75.0%",
        "0.9000",
        "50",
    ]
    assert "9.0000" not in said, "an evaluation of the training that was thrown away"
    where = said.index("Starts")
    rows = said[where + 8 : where + 29]
    assert [row for row in rows if row in ("1", "2", "3")] == ["1", "2", "3"]
    assert any(row.startswith("stopped (3)") for row in rows) and any(
        row.startswith("done (0)") for row in rows
    )
    where = said.index("Checkpoints")
    assert "yes" in said[said.index("checkpoint-100", where) :][:5]
    assert "no, rotated" in said[said.index("checkpoint-20", where) :][:5] and "2.0 KiB" in said
    planned = said.index("tokens per step")
    assert said[planned + 1] == "495.0"
    measured = sum((1000 + n) * 0.5 for n in range(1, 101)) / 100
    assert said[planned + 2] == f"{measured:,.1f}"
    assert (
        "1 to 2, 1.5 on average" in said
        and "90.0%" in said
        and "1,467,776" in said
        and "2.13.0" in said
    )
    assert sum(attributes.get("class") == "resume" for _, attributes in page.elements) >= 2 * 5
    assert "step 60: SIGTERM asked for the stop" in said


def test_memory_stands_beside_what_was_planned(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=100, state="done", exit_code=0)
    model = Path(__file__).resolve().parents[3] / "data_samples" / "tiny-qwen3"
    config = {
        "model": str(model),
        "data": ["rows.jsonl"],
        "output_dir": str(folder),
        "global_batch_size": 10,
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    plan = {"tokens": 495.0, "rows_per_rank": [1, 1.5, 2], "heaviest_row_tokens": 64}
    end = {
        "event": "end",
        "state": "done",
        "peak_device_bytes": [None],
        "peak_host_bytes": [3 * 2**30],
    }
    (folder / "events.jsonl").write_text(line(start_event(plan=plan)) + line(end))
    said = report(folder)[1].rows()
    where = said.index("most memory of a process on the host")
    assert said[where + 1].endswith("MiB") and said[where + 2] == "3.0 GiB"


def test_tiles_add_up(tmp_path: Path):
    """Time and tokens, also where only every tenth step is logged."""
    folder = make_run(tmp_path / "one", steps=0)
    (folder / "trainer_log.jsonl").write_text(
        "".join(line(step(n, tokens_per_second=100.0)) for n in range(10, 101, 10))
    )
    said = report(folder)[1].rows()
    assert (
        said[said.index("Training time") + 1] == "0:50"
        and said[said.index("Tokens") + 1] == "5,000"
    )


def test_a_pretraining_run(tmp_path: Path):
    folder = make_run(tmp_path / "base", steps=0, state="done")
    (folder / "run_identity.json").write_text('{"kind": "pretrain", "total_steps": 100}')
    (folder / "run.yaml").write_text(
        yaml.safe_dump({"depth": 4, "arch": "nanochat", "fp8": False, "tokenizer": None})
    )
    records = [
        {"step": n, "loss": 5.0, "mfu": 0.31, "tokens_per_second": 9.0, "step_seconds": 1.0}
        for n in range(1, 101)
    ]
    (folder / "trainer_log.jsonl").write_text("".join(map(line, records)))
    with open(folder / "events.jsonl", "a") as events:
        events.write(
            line(
                {
                    "event": "sample",
                    "time": time.time(),
                    "step": 9,
                    "samples": [["<b>Once", "upon\na time"]],
                }
            )
        )
        events.write(
            line(
                {
                    "event": "eval",
                    "time": time.time(),
                    "step": 100,
                    "eval_loss": 1.0,
                    "eval_bpb": 1.25,
                }
            )
        )
    html, page = report(folder)
    assert_inert(html, page)
    assert (
        "nanochat of depth 4, from scratch" in page.text
        and "31.0%" in page.text
        and "bits per byte" in page.text
    )
    assert "<b>Once" in page.text and "upon a time" in page.text and "Curriculum" not in page.text


def test_a_run_that_has_just_begun_and_one_that_failed(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=0)
    (folder / "events.jsonl").write_text(line(start_event()))
    assert_inert(*report(folder))
    (folder / "events.jsonl").unlink()
    (folder / "status.json").write_text(
        '{"state": "failed", "exit_code": 1, "error": "no room <left>"}'
    )
    html, page = report(folder)
    assert_inert(html, page)
    assert "failed" in page.rows() and "no room <left>" in page.text
    (folder / "trainer_log.jsonl").write_text(
        line({"step": 1, "loss": None}) + line({"step": 2, "loss": 1.0})
    )
    assert_inert(*report(folder))


def test_a_long_run_stays_a_small_file(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=0)
    (folder / "trainer_log.jsonl").write_text("".join(line(step(n)) for n in range(1, 20_001)))
    html, page = report(folder)
    assert len(html) < 400_000
    assert_inert(html, page)


def test_nothing_out_of_the_ordinary_is_thinned_away(tmp_path: Path):
    """Of 30,000 steps one spike, one dip and a skipped step; what was thrown away with its training
    is left out.
    """
    folder = make_run(tmp_path / "one", steps=0)
    losses = {7_001: None, 12_345: 1.9, 23_456: 0.2}
    records = [step(n, loss=losses.get(n, 1.0 + 0.5 * math.sin(n))) for n in range(1, 30_001)]
    (folder / "trainer_log.jsonl").write_text("".join(map(line, records)))
    at = time.time()
    thrown_away = [{"event": "spike", "time": at, "step": 15_000, "loss": 9.0, "ids": [1]}]
    thrown_away += [
        {"event": "nonfinite", "time": at, "step": n, "ids": []} for n in (15_001, 15_002)
    ]
    events = [
        start_event(total_steps=30_000),
        *thrown_away,
        start_event(5_000, total_steps=30_000),
        {"event": "nonfinite", "time": at, "step": 7_001, "ids": [3]},
        {"event": "spike", "time": at, "step": 12_345, "loss": 1.9, "ids": [4]},
    ]
    (folder / "events.jsonl").write_text("".join(map(line, events)))
    html, page = report(folder)
    assert_inert(html, page)
    svg = html[
        html.index("Loss per trained token") : html.index(
            "</svg>", html.index("Loss per trained token")
        )
    ]
    (band,) = re.findall(r'class="band series-0" d="M([^"]*)Z"', svg)
    pairs = [[float(number) for number in pair.split(",")] for pair in band.split("L")]
    scale = (HEIGHT - TOP - BOTTOM) / ((1.9 - 0.2) * 1.12)
    assert max(y for _, y in pairs) - min(y for _, y in pairs) == pytest.approx(
        (1.9 - 0.2) * scale, abs=1.0
    )
    for number, y in ((12_345, min(y for _, y in pairs)), (23_456, max(y for _, y in pairs))):
        (x,) = {x for x, height in pairs if height == y}
        assert x == pytest.approx(LEFT + (number - 1) / 29_999 * (WIDTH - LEFT - RIGHT), abs=1.5)
    assert re.findall(r'class="(spike|nonfinite)"', svg) == ["nonfinite", "spike"]
    assert (
        "step 7001 was skipped" in svg
        and "step 12345: loss 1.9000 is a spike" in svg
        and "15000" not in svg
    )
    assert "spikes at the top (1), skipped steps at the bottom (1)" in page.text


def test_the_last_mean_is_of_as_many_steps_as_the_others():
    """Of 20,021 steps, 21 would be left over; a spike among them is not the end of the curve."""
    points = Points(np.arange(20_021), np.ones(20_021))
    points.y[-1] = 500.0
    smoothed = figures._smoothed(points)
    assert (
        len(smoothed) in (25, 26)
        and smoothed.y[-1] < 2
        and figures._smoothed(points[:7]) == points[:7]
    )
    assert len(figures._smoothed(points[:0])) == 0


def test_a_report_in_chinese_has_no_heading_in_english(tmp_path: Path):
    folder = resumed_run(tmp_path / "one")
    html, page = report(folder, "zh")
    assert_inert(html, page)
    assert (
        "训练前后的评估" in page.text
        and 'lang="zh-CN"' in html
        and 'lang="en"' in report(folder)[0]
    )
    headings = re.findall(r"<(?:h2|dt|figcaption|th scope=\"col\"[^>]*)>([^<]+)", html)
    assert len(headings) > 30 and all(
        re.search(r"[\u4e00-\u9fff]", heading) for heading in headings
    )


# ---------------------------------------------------------------- what it must not do


def test_no_text_of_a_run_becomes_markup(tmp_path: Path):
    """Whatever a run's files hold, in every place that reaches the page."""
    folder = resumed_run(tmp_path / "a<b>&'\"")
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config |= {
        "model": HOSTILE,
        "data": [HOSTILE],
        HOSTILE: HOSTILE,
        "nested": {HOSTILE: [{"x": HOSTILE}]},
    }
    config["curriculum"]["levels"] = [HOSTILE, "reasoning", "topology"]
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    (folder / "run_identity.json").write_text(json.dumps({"kind": HOSTILE, "total_steps": 100}))
    (folder / "status.json").write_text(
        json.dumps({"state": "failed", "exit_code": 1, "error": HOSTILE})
    )
    levels = {f"loss/{HOSTILE}": 1.0, f"share/{HOSTILE}": 0.5, f"tokens/{HOSTILE}": 10}
    (folder / "trainer_log.jsonl").write_text(
        "".join(line(step(n, **levels)) for n in range(1, 101))
    )
    at = time.time()
    more = [
        start_event(
            60,
            dtype=HOSTILE,
            device_type=HOSTILE,
            rows=HOSTILE,
            versions={HOSTILE: HOSTILE},
            compiled=HOSTILE,
        ),
        {"event": "checkpoint", "time": at, "step": 1, "name": HOSTILE, "size_bytes": HOSTILE},
        {"event": "oom", "time": at, "step": 1, "error": HOSTILE, "old": HOSTILE, "new": HOSTILE},
        {"event": "skipped_checkpoint", "time": at, "name": HOSTILE, "why": HOSTILE},
        {"event": "sample", "time": at, "step": 1, "samples": [[HOSTILE, HOSTILE]]},
        {"event": "eval", "time": at, "step": 100, "eval_loss": 1.0, f"eval_loss/{HOSTILE}": 1.0},
        {"event": HOSTILE, "time": at, HOSTILE: HOSTILE},
        {"event": "end", "time": at, "state": HOSTILE, "exit_code": HOSTILE, "step": HOSTILE},
    ]
    with open(folder / "events.jsonl", "a") as events:
        events.write("".join(map(line, more)))
    (folder / "logs").mkdir()
    (folder / "logs" / "20260101-000000-1-rank0.log").write_text(
        f"2026-01-01 00:00:00,000 [WARNING] {HOSTILE}\n"
    )
    for lang in ("en", "zh"):
        html, page = report(folder, lang)
        assert_inert(html, page)
        whole = " ".join(HOSTILE.split())
        assert page.text.count(whole) >= 15, "the text itself is there to be read"


def test_secrets_are_masked(tmp_path: Path):
    folder = make_run(
        tmp_path / "one", state="failed", error="login with hf_abcdefghijklmnop failed"
    )
    config = {
        "data": ["https://user:hunter2@host/data.jsonl"],
        "wandb_api_key": "0123456789",
        "hub": {"hf_token": "correcthorse", "password": "letmein"},
        "note": "sk-abcdefghijklmnopqrstuvwx",
        "sample_tokens": 48,
        "tokenizer": "a-tokenizer",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    html, page = report(folder)
    for secret in ("hunter2", "0123456789", "correcthorse", "letmein", "sk-abcdefg", "hf_abcdefg"):
        assert secret not in html, secret
    assert page.text.count("***") >= 6 and "a-tokenizer" in page.text and "48" in page.rows()


# ---------------------------------------------------------------- charts


def numbers_in(svg: str) -> list[float]:
    paths = re.findall(r' d="([^"]*)"', svg)
    return [float(number) for path in paths for number in re.findall(r"-?\d+\.?\d*", path)]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=600),
    st.lists(st.floats(0, 1e3), min_size=0, max_size=5),
    st.booleans(),
)
def test_curves_stay_in_their_frame(values: list[float], marked: list[float], smooth: bool):
    series = [
        Series("a", list(enumerate(values)), smooth=smooth),
        Series("b", list(enumerate(marked)), marks=True),
    ]
    svg = line_svg(series, label="x", resumes=[0, 10**9])
    assert all(0 <= number <= WIDTH for number in numbers_in(svg)) and "nan" not in svg
    assert f'viewBox="0 0 {WIDTH} {HEIGHT}"' in svg


def test_a_curve_is_where_its_values_are():
    svg = line_svg([Series("a", [(0, 0.0), (10, 5.0), (20, 10.0)])], label="x")
    (path,) = re.findall(r'class="line series-0" d="M([^"]*)"', svg)
    (x0, y0), (x1, y1), (x2, y2) = ([float(n) for n in pair.split(",")] for pair in path.split("L"))
    assert (
        x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
        and y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
        and y0 > y1 > y2
    )
    assert (
        line_svg([Series("a", [])], label="x") == "" and area_svg(DIFFICULTIES, [], label="x") == ""
    )


def test_areas_fill_the_frame():
    svg = area_svg(("a", "b"), [(1, (0.25, 0.75)), (9, (1.0, 0.0))], label="x")
    lower, upper = re.findall(r'class="area series-\d" d="M([^"]*)Z"', svg)
    bottom = [float(pair.split(",")[1]) for pair in lower.split("L")]
    top = [float(pair.split(",")[1]) for pair in upper.split("L")]
    assert bottom[:2] == pytest.approx([bottom[2] + (top[0] - bottom[2]) * 0.25, top[0]]), (
        "a: 25%, then 100%"
    )
    assert top[0] == top[1], "together always 100%"


@settings(max_examples=300, deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_are_round_and_in_range(low: float, width: float):
    high = low + width
    if not math.isclose(low, high, rel_tol=1e-9):
        ticks = nice_ticks(low, high)
        assert 1 <= len(ticks) <= 12
        assert all(low - width * 0.01 <= tick <= high + width * 0.01 for tick in ticks[1:])


def test_tick_words():
    words = {
        0: "0",
        0.00002: "2e-05",
        0.0002: "0.0002",
        1.5: "1.5",
        4000: "4,000",
        12000: "12k",
        3.2e6: "3.2M",
    }
    assert {value: tick_text(value) for value in words} == words


# ---------------------------------------------------------------- command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = resumed_run(tmp_path / "one")
    assert finetune(["report", str(folder), "--lang", "en"]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    first = (folder / "report.html").read_text(encoding="utf-8")
    assert_inert(first, Page(first))
    out = tmp_path / "elsewhere.html"
    assert finetune(["report", str(folder), "--output", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"run": str(folder), "report": str(out), "size_bytes": out.stat().st_size}


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    folder = make_run(tmp_path / "one")
    for arguments, text in (
        ([str(tmp_path / "nowhere")], "is not there"),
        ([str(tmp_path / "empty")], "nothing has been logged"),
        ([str(folder), "--output", str(tmp_path)], "cannot be written"),
        ([str(folder), "--output", str(tmp_path / "no" / "folder.html")], "cannot be written"),
        ([str(folder), "--lang", "fr"], "en, zh"),
    ):
        assert finetune(["report", *arguments]) == 2
        assert text in capsys.readouterr().err
    assert not (folder / "report.html").exists()
