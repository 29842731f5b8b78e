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

import pytest
import yaml
from fake_runs import DIFFICULTIES, line, make_run, start_event, step
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.__main__ import main as finetune
from finetune.commands.report import charts
from finetune.commands.report.charts import Series, area_svg, line_svg
from finetune.commands.report.command import build_report
from finetune.runs.reader import open_run
from finetune.runtime.language import speaking

TAGS = (
    "html head meta title style body main header footer section h1 h2 p span b small dl dt dd div"
    " figure figcaption table thead tbody tr th td details summary pre svg path circle text"
)
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>"\' onload=1 </style></svg> &amp;'


class Page(HTMLParser):
    """What a browser would make of the page: elements with attributes, and the texts."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str):
        if data.strip():
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def after(self, text: str, count: int, start: str = "") -> list[str]:
        """The texts that follow a text, such as the cells of its row; `start` comes before it."""
        at = self.texts.index(text, self.texts.index(start) if start else 0)
        return self.texts[at + 1 : at + 1 + count]


def report(folder: Path, lang: Any = "en") -> Page:
    """The page about a run, which is inert: only known elements, no script, no handler, nothing
    fetched, and a policy that forbids all of it anyway.
    """
    with speaking(lang):
        html = build_report(open_run(folder).poll())
    page = Page(html)
    assert {tag for tag, _ in page.elements} <= set(TAGS.split()) and page.open == []
    for tag, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on")}
        assert not attributes.keys() & {"src", "href", "style"}
        assert tag != "meta" or attributes.get("http-equiv") in (None, "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    assert not re.search(r"@import|url\(|expression", style)
    (policy,) = [a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"style-src 'sha256-{digest}'" in policy
    assert "script" not in policy and "unsafe" not in policy
    return page


def event(name: str, step: int, /, **facts: Any) -> dict[str, Any]:
    return {"event": name, "time": time.time() + step, "step": step, **facts}


def write(folder: Path, name: str, *records: dict[str, Any], mode: str = "w"):
    with open(folder / name, mode) as file:
        file.write("".join(map(line, records)))


# ---------------------------------------------------------------- what it says


def resumed_run(folder: Path) -> Path:
    """100 steps in three starts; the first was killed at 40 and resumed from 20, the second stopped
    at 60.
    """
    make_run(folder, steps=100, state="done", exit_code=0)
    plan = {"tokens": 495.0, "rows_per_rank": [1, 1.5, 2], "fill": 0.9, "imbalance": 1.01}

    def evaluated(step: int, loss: float, explain: float) -> dict[str, Any]:
        return event("eval", step, **{"eval_loss": loss, "eval_loss/explain": explain})

    events = [
        start_event(0, plan=plan),
        evaluated(0, 2.0, 4.0),
        evaluated(40, 9.0, 9.0),  # thrown away with its training
        start_event(20),
        event("resume", 20, checkpoint="checkpoint-20"),
        event("signal", 60, name="SIGTERM"),
        event("end", 60, state="stopped", exit_code=3),
        start_event(60, plan=plan, versions={"torch": "2.13.0"}, parameters={"total": 1467776}),
        evaluated(50, 0.8, 0.9),
        evaluated(100, 1.0, 1.0),
        *(event("checkpoint", n, name=f"checkpoint-{n}", size_bytes=2048) for n in (20, 60, 100)),
        event("end", 100, state="done", exit_code=0),
    ]
    write(folder, "events.jsonl", *events)
    (folder / "checkpoint-100").mkdir()
    return folder


def test_a_run_of_several_starts(tmp_path: Path):
    folder = resumed_run(tmp_path / "one")
    page = report(folder)
    assert page.texts[page.texts.index("done") - 1] == "one"
    assert page.after("Evaluation, before and after", 18)[6:] == [
        *("all", "2.0000", "1.0000", "-50.0%", "0.8000", "50"),
        *("explain", "4.0000", "1.0000", "-75.0%", "0.9000", "50"),
    ]
    assert "9.0000" not in page.texts, "an evaluation of the training that was thrown away"
    rows = page.after("Starts", 28)[7:]
    assert [row for row in rows if row in ("1", "2", "3")] == ["1", "2", "3"]
    for state in ("stopped (3)", "done (0)"):
        assert any(row.startswith(state) for row in rows)
    assert "yes" in page.after("checkpoint-100", 4, "Checkpoints")
    assert {"no, rotated", "2.0 KiB"} <= {*page.after("checkpoint-20", 4, "Checkpoints")}
    measured = sum((1000 + n) * 0.5 for n in range(1, 101)) / 100
    assert page.after("tokens per step", 2) == ["495.0", f"{measured:,.1f}"]
    for text in ("1 to 2, 1.5 on average", "90.0%", "1,467,776", "2.13.0"):
        assert text in page.texts
    assert sum(attributes.get("class") == "resume" for _, attributes in page.elements) >= 2 * 5
    assert "step 60: SIGTERM asked for the stop" in page.texts
    chinese = report(folder, "zh").html
    assert 'lang="zh-CN"' in chinese and 'lang="en"' in page.html
    headings = re.findall(r"<(?:h2|dt|figcaption|th scope=\"col\"[^>]*)>([^<]+)", chinese)
    assert len(headings) > 30
    assert all(re.search(r"[\u4e00-\u9fff]", heading) for heading in headings)


def test_sources_have_figures_and_rows(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=0)
    own = {"source_tokens/books": 30, "source_share/books": 0.75, "source_loss/books": 1.5}
    write(folder, "trainer_log.jsonl", *(step(number, **own) for number in range(1, 41)))
    for at in (0, 40):
        found = {"eval_source_loss/kept": 1.25, "eval_exact_match": 0.25 + at / 80}
        write(folder, "events.jsonl", event("eval", at, eval_loss=2.0, **found), mode="a")
    page = report(folder)
    for text in ("Loss by source", "Validation loss by source", "books"):
        assert text in page.html
    assert page.after("kept", 1) == ["1.2500"] and "Exact match of generated answers" in page.html
    assert page.after("exact match", 5) == ["25.0%", "75.0%", "↑50.0%", "75.0%", "40"]


def test_tiles_add_up_and_memory_stands_beside_what_was_planned(tmp_path: Path):
    """Time and tokens, also where only every tenth step is logged."""
    folder = make_run(tmp_path / "one", steps=0, state="done", exit_code=0)
    records = (step(n, tokens_per_second=100.0) for n in range(10, 101, 10))
    write(folder, "trainer_log.jsonl", *records)
    peaks = {"peak_device_bytes": [None], "peak_host_bytes": [3 * 2**30]}
    end = event("end", 40, state="done", planned_peak_bytes={"device": 0, "host": 2**30}, **peaks)
    write(folder, "events.jsonl", start_event(plan={"tokens": 495.0}), end)
    page = report(folder)
    assert page.after("Training time", 1) == ["0:50"] and page.after("Tokens", 1) == ["5,000"]
    row = page.after("most memory of a process on the host", 2)
    assert row == ["1.0 GiB", "3.0 GiB"]


def test_a_pretraining_run(tmp_path: Path):
    folder = make_run(tmp_path / "base", steps=0, state="done")
    (folder / "run_identity.json").write_text('{"kind": "pretrain", "total_steps": 100}')
    config = {"depth": 4, "arch": "nanochat", "fp8": False, "tokenizer": None}
    (folder / "run.yaml").write_text(json.dumps(config))
    record = {"loss": 5.0, "mfu": 0.31, "tokens_per_second": 9.0, "step_seconds": 1.0}
    write(folder, "trainer_log.jsonl", *({"step": n, **record} for n in range(1, 101)))
    sample = event("sample", 9, samples=[["<b>Once", "upon\na time"]])
    evaluation = event("eval", 100, eval_loss=1.0, eval_bpb=1.25)
    write(folder, "events.jsonl", sample, evaluation, mode="a")
    text = report(folder).text
    for part in ("nanochat of depth 4, from scratch", "31.0%", "bits per byte", "<b>Once"):
        assert part in text
    assert "upon a time" in text and "Curriculum" not in text


def test_a_run_that_has_just_begun_and_one_that_failed(tmp_path: Path):
    folder = make_run(tmp_path / "one", steps=0)
    write(folder, "events.jsonl", start_event())
    report(folder)
    (folder / "events.jsonl").unlink()
    status = {"state": "failed", "exit_code": 1, "error": "no room <left>"}
    (folder / "status.json").write_text(json.dumps(status))
    write(folder, "trainer_log.jsonl", {"step": 1, "loss": None}, {"step": 2, "loss": 1.0})
    page = report(folder)
    assert "failed" in page.texts and "no room <left>" in page.text


def test_nothing_out_of_the_ordinary_is_thinned_away(tmp_path: Path):
    """Of 30,000 steps one spike, one dip and a skipped step; what was thrown away with its training
    is left out.
    """
    folder = make_run(tmp_path / "one", steps=0)
    losses = {7_001: None, 12_345: 1.9, 23_456: 0.2}
    records = [step(n, loss=losses.get(n, 1.0 + 0.5 * math.sin(n))) for n in range(1, 30_001)]
    write(folder, "trainer_log.jsonl", *records)
    events = [
        start_event(total_steps=30_000),
        event("spike", 15_000, loss=9.0, ids=[1]),
        event("nonfinite", 15_001, ids=[]),
        start_event(5_000, total_steps=30_000),
        event("nonfinite", 7_001, ids=[3]),
        event("spike", 12_345, loss=1.9, ids=[4]),
    ]
    write(folder, "events.jsonl", *events)
    page = report(folder)
    assert len(page.html) < 600_000
    svg = page.html[page.html.index("Loss per trained token") :].partition("</svg>")[0]
    (band,) = re.findall(r'class="band series-0" d="M([^"]*)Z"', svg)
    x, y = zip(*(map(float, pair.split(",")) for pair in band.split("L")), strict=True)
    scale = (charts.HEIGHT - charts.TOP - charts.BOTTOM) / ((1.9 - 0.2) * 1.12)
    assert max(y) - min(y) == pytest.approx((1.9 - 0.2) * scale, abs=1.0)
    width = charts.WIDTH - charts.LEFT - charts.RIGHT
    for number, height in ((12_345, min(y)), (23_456, max(y))):
        at = charts.LEFT + (number - 1) / 29_999 * width
        assert x[y.index(height)] == pytest.approx(at, abs=1.5)
    assert re.findall(r'class="(spike|nonfinite)"', svg) == ["nonfinite", "spike"]
    assert "step 7001 was skipped" in svg and "step 12345: loss 1.9000 is a spike" in svg
    assert "spikes at the top (1), skipped steps at the bottom (1)" in page.text


# ---------------------------------------------------------------- what it must not do


def test_no_text_of_a_run_becomes_markup(tmp_path: Path):
    """Whatever a run's files hold, in every place that reaches the page."""
    folder = resumed_run(tmp_path / "a<b>&'\"")
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config |= {"model": HOSTILE, "data": [HOSTILE], HOSTILE: HOSTILE}
    config["nested"] = {HOSTILE: [{"x": HOSTILE}]}
    config["curriculum"]["levels"] = [HOSTILE, "reasoning", "topology"]
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    (folder / "run_identity.json").write_text(json.dumps({"kind": HOSTILE, "total_steps": 100}))
    status = {"state": "failed", "exit_code": 1, "error": HOSTILE}
    (folder / "status.json").write_text(json.dumps(status))
    levels = {f"loss/{HOSTILE}": 1.0, f"share/{HOSTILE}": 0.5, f"tokens/{HOSTILE}": 10}
    write(folder, "trainer_log.jsonl", *(step(n, **levels) for n in range(1, 101)))
    facts = dict.fromkeys(("dtype", "device_type", "rows", "compiled"), HOSTILE)
    more = [
        start_event(60, **facts, versions={HOSTILE: HOSTILE}),
        event("checkpoint", 1, name=HOSTILE, size_bytes=HOSTILE),
        event("oom", 1, error=HOSTILE, old=HOSTILE, new=HOSTILE),
        event("skipped_checkpoint", 1, name=HOSTILE, why=HOSTILE),
        event("sample", 1, samples=[[HOSTILE, HOSTILE]]),
        event("eval", 100, eval_loss=1.0, **{f"eval_loss/{HOSTILE}": 1.0}),
        event(HOSTILE, 100, **{HOSTILE: HOSTILE}),
        event("end", 100, state=HOSTILE, exit_code=HOSTILE) | {"step": HOSTILE},
    ]
    write(folder, "events.jsonl", *more, mode="a")
    (folder / "logs").mkdir()
    warning = f"2026-01-01 00:00:00,000 [WARNING] {HOSTILE}\n"
    (folder / "logs" / "20260101-000000-1-rank0.log").write_text(warning)
    for lang in ("en", "zh"):
        count = report(folder, lang).text.count(" ".join(HOSTILE.split()))
        assert count >= 15, "the text itself is there to be read"


def test_secrets_are_masked(tmp_path: Path):
    error = "login with hf_abcdefghijklmnop failed"
    folder = make_run(tmp_path / "one", state="failed", error=error)
    config = {"data": ["https://user:hunter2@host/data.jsonl"], "wandb_api_key": "0123456789"}
    config["hub"] = {"hf_token": "correcthorse", "password": "letmein"}
    config |= {"note": "sk-abcdefghijklmnopqrstuvwx", "sample_tokens": 48, "tokenizer": "a-tok"}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    page = report(folder)
    for secret in ("hunter2", "0123456789", "correcthorse", "letmein", "sk-abcdefg", "hf_abcdefg"):
        assert secret not in page.html, secret
    assert page.text.count("***") >= 6 and "a-tok" in page.text and "48" in page.texts


# ---------------------------------------------------------------- charts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=600), st.booleans())
def test_curves_stay_in_their_frame(values: list[float], smooth: bool):
    series = [Series("a", list(enumerate(values)), smooth=smooth)]
    series += [Series("b", list(enumerate(values[:5])), marks=True)]
    svg = line_svg(series, label="x", resumes=[0, 10**9])
    paths = " ".join(re.findall(r' d="([^"]*)"', svg))
    numbers = map(float, re.findall(r"-?\d+\.?\d*", paths))
    assert all(0 <= number <= charts.WIDTH for number in numbers) and "nan" not in svg


def test_a_curve_is_where_its_values_are():
    svg = line_svg([Series("a", [(0, 0.0), (10, 5.0), (20, 10.0)])], label="x")
    (path,) = re.findall(r'class="line series-0" d="M([^"]*)"', svg)
    (x0, y0), (x1, y1), (x2, y2) = ([float(n) for n in pair.split(",")] for pair in path.split("L"))
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1) and y0 > y1 > y2
    assert line_svg([Series("a", [])], label="x") == area_svg(DIFFICULTIES, [], label="x") == ""


# ---------------------------------------------------------------- command


def test_the_command(tmp_path: Path, capsys):
    folder, out = resumed_run(tmp_path / "one"), tmp_path / "elsewhere.html"
    assert finetune(["report", str(folder), "--lang", "en"]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert finetune(["report", str(folder), "--output", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"run": str(folder), "report": str(out), "size_bytes": out.stat().st_size}
    assert "done" in Page(out.read_text(encoding="utf-8")).texts


def test_what_is_refused(tmp_path: Path, capsys):
    (tmp_path / "empty").mkdir()
    folder = make_run(tmp_path / "one")
    for arguments, text in (
        ([str(tmp_path / "nowhere")], "is not there"),
        ([str(tmp_path / "empty")], "nothing has been logged"),
        ([str(folder), "--output", str(tmp_path)], "cannot be written"),
    ):
        assert finetune(["report", *arguments]) == 2
        assert text in capsys.readouterr().err
