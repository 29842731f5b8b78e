"""The shipped data files: reproducible, disjoint and balanced; a sample of their answers is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import pytest
from sample_rows import FOLDER, chinese, prompt, read_records

PAIRS = [read_records(f"preference_{name}.jsonl") for name in ("train", "valid")]
FILES = ["train.jsonl", "valid.jsonl", "sharegpt.json", "messages.jsonl", "broken.jsonl"]
FILES += ["preference_train.jsonl", "preference_valid.jsonl"]
LEVELS = ("explain", "reasoning", "topology")
TRAIN, VALID = read_records("train.jsonl"), read_records("valid.jsonl")


def marked(row: dict[str, Any]) -> str:
    """An answer is in the language of its question."""
    return "答案：" if chinese(row["instruction"]) else "Answer: "


def test_the_script_makes_the_committed_files(tmp_path: Path) -> None:
    script = str(FOLDER / "generators" / "make_data.py")
    words = [sys.executable, "-S", script, "--out", str(tmp_path)]  # -S: no installed packages
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run(words, check=True, env=env, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_rows_are_complete_balanced_and_asked_once() -> None:
    counts = [Counter(row["difficulty"] for row in rows) for rows in (TRAIN, VALID)]
    assert counts[0] == {"explain": 600, "reasoning": 500, "topology": 400}
    assert counts[1] == dict.fromkeys(LEVELS, 50)
    for rows in (TRAIN, VALID):
        for level in LEVELS:
            of_level = [row for row in rows if row["difficulty"] == level]
            share = sum(chinese(row["instruction"]) for row in of_level) / len(of_level)
            assert share == pytest.approx(0.5, abs=0.05)
    for row in TRAIN + VALID:
        assert row["instruction"].strip() and row["output"].strip()
        assert ("answer" in row) == (row["difficulty"] != "explain")
        # Answers without words (addresses, links) belong to either language.
        assert "answer" not in row or row["output"].splitlines()[-1] == marked(row) + row["answer"]
        assert chinese(row["instruction"]) or not chinese(row["output"])
    lengths = sorted(len(prompt(row) + row["output"]) for row in TRAIN)
    assert lengths[-1] > 4 * lengths[len(lengths) // 2]
    for rows, count in zip(PAIRS, (300, 50), strict=True):
        assert Counter(row["topic"] for row in rows) == {"reasoning": count, "topology": count}
        for row in rows:
            assert row["chosen"].endswith("\n" + marked(row) + row["answer"])
            wrong = row["rejected"].rpartition("\n" + marked(row))[2]
            assert wrong and wrong != row["answer"] and row["chosen"] != row["rejected"]
    asked = Counter(prompt(row) for row in TRAIN + VALID + PAIRS[0] + PAIRS[1])
    assert max(asked.values()) == 1


def test_a_sample_of_answers_is_right() -> None:
    """Ask the standard library for subnets, and the text of a network for its shortest ways."""
    rows = [row for row in TRAIN + VALID if "answer" in row]
    counts = Counter[str]()
    for row in (row for row in rows if "broadcast" in row["instruction"]):
        (cidr,) = re.findall(r"[\d.]+/\d+", row["instruction"])
        assert row["answer"] == str(ip_interface(cidr).network.broadcast_address)
        counts["broadcast"] += 1
    for row in (row for row in rows if "hops" in row["instruction"]):
        links = [set(link) for link in re.findall(r"(\w+)-(\w+)", row["input"])]
        named = re.findall(r"\w+", row["instruction"])
        start, end = (name for name in named if any(name in link for link in links))
        reached, hops = {start}, 0
        while end not in reached:
            reached, hops = reached.union(*(link for link in links if link & reached)), hops + 1
        assert row["answer"] == str(hops)
        counts["hops"] += 1
    assert min(counts["broadcast"], counts["hops"]) >= 10
    answers = [row["answer"] for row in rows if row["answer"] in ("yes", "no", "能", "不能")]
    assert 0.35 < sum(one in ("yes", "能") for one in answers) / len(answers) < 0.65
