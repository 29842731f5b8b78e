"""Failures as machines write them: alone, and among the lines of other ranks, bars, warnings and
what followed.

The logs are in `series/`: `written.txt` and `families.txt` after the published formats,
`orders.txt` of what follows from what, `threads.txt` after logs in issues, `wordings.txt` as
versions put it; `clean.txt` has no failure, one that nobody knows, or another program's log; each
line of `ordinary.txt` is near a rule and no failure. `whole.jsonl` has logs as they are, of all
ranks and nodes. A head says the cause (or causes, for either is right) and `noecho` where the
failure is itself what others see of one.
"""

from __future__ import annotations

import json

import pytest
from noisy_logs import SERIES, noisy, quiet, series

from finetune.commands.diagnose.command import diagnose_logs

FAILURES = [
    failure
    for name in ("written", "threads", "families", "orders", "wordings")
    for failure in series(name)
]
WHOLE = (SERIES / "whole.jsonl").read_text(encoding="utf-8").splitlines()
CLEAN = series("clean")


@pytest.mark.parametrize("number", range(len(FAILURES)))
def test_the_first_cause_is_the_root(number, causes):
    head, lines = FAILURES[number]
    expected = [[cause] for cause in head.split()[0].split("|")]
    assert causes(quiet(lines))[:1] in expected, f"quiet: {head}: {lines[0]}"
    text = noisy(lines, number, echoes="noecho" not in head)
    assert causes(text)[:1] in expected, f"noisy: {head}: {lines[0]}"


def test_nothing_is_invented(causes):
    for number, (head, lines) in enumerate(CLEAN):
        if head.startswith("foreign: "):
            assert causes("\n".join(lines) + "\n") == [], head
            continue
        for text in (quiet(lines), noisy(lines, number, echoes=False)):
            assert set(causes(text)) <= {"unknown"}, f"{head}: {text}"


def test_an_ordinary_line_is_no_failure(causes):
    for line in (SERIES / "ordinary.txt").read_text(encoding="utf-8").splitlines():
        assert causes(f"[INFO] rank 0: epoch 1\n{line}\n{{'loss': 2.1}}\n") == [], line


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_whole_logs(number, tmp_path):
    """The first cause of all logs of a run together; nothing where the run was well."""
    whole, paths = json.loads(WHOLE[number]), []
    for name, text in whole["log"].items():
        paths.append(tmp_path / name)
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        paths[-1].write_text(text, encoding="utf-8", newline="")
    found = [finding.cause for finding in diagnose_logs(paths)]
    assert found[:1] in ([[cause] for cause in whole["causes"]] or [[]]), found
