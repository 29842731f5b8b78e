"""The shipped data files: reproducible, disjoint, balanced, and broken only where they should
be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
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


@pytest.mark.parametrize("hash_seed", ["0", "7"])
def test_the_script_makes_the_committed_files(tmp_path: Path, hash_seed: str) -> None:
    script = str(FOLDER / "generators" / "make_data.py")
    words = [sys.executable, "-S", script, "--out", str(tmp_path)]  # -S: no installed packages
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
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


def test_valid_explain_rows_can_be_learned_from_train() -> None:
    """Every held-out answer is also one of train, asked in another form; lists are put together of
    such.
    """
    known = {row["output"] for row in TRAIN if row["difficulty"] == "explain"}
    for row in VALID:
        if row["difficulty"] == "explain" and row["output"] not in known:
            assert {line.partition(" ")[2] for line in row["output"].splitlines()} <= known


def test_conversations_are_well_formed_and_appear_nowhere_else() -> None:
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    sharegpt = json.loads((FOLDER / "sharegpt.json").read_text(encoding="utf-8"))
    talks = [[(roles[t["from"]], t["value"]) for t in row["conversations"]] for row in sharegpt]
    messages = read_records("messages.jsonl")
    talks += [[(turn["role"], turn["content"]) for turn in row["messages"]] for row in messages]
    assert len(talks) == 40
    assert {row["difficulty"] for row in [*sharegpt, *messages]} == set(LEVELS)
    elsewhere = {prompt(row) for row in TRAIN + VALID}
    for turns in talks:
        spoken = [role for role, _ in turns if role != "system"]
        assert "system" not in [role for role, _ in turns[1:]]
        assert spoken == ["user", "assistant"] * (len(spoken) // 2) != []
        assert all(text.strip() for role, text in turns if role != "system")
        assert not elsewhere & {text for role, text in turns if role == "user"}
    assert sum(len(turns) > 3 for turns in talks) > 20
    systems = [text for turns in talks for role, text in turns if role == "system"]
    assert "" in systems and any(map(chinese, systems)) and len(systems) < len(talks)


def defects(line: str) -> set[str]:
    """What is wrong with one line, found without looking at its `defect` field."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return {"not JSON"}
    if not isinstance(row, dict):
        return {"not an object"}
    wrong = set()
    for field in ("instruction", "output", "difficulty"):
        value = row.get(field, ...)
        if value is ...:
            wrong.add(f"no {field}")
        elif not isinstance(value, str):
            wrong.add(f"{field} is {type(value).__name__}")
        elif not value.strip():
            wrong.add(f"{'blank' if value else 'empty'} {field}")
    if not isinstance(row.get("input", ""), str):
        wrong.add("input is int")
    if isinstance(row.get("difficulty"), str) and row["difficulty"] not in LEVELS:
        wrong.add("unknown difficulty")
    return wrong


def test_broken_file_has_each_defect_alone() -> None:
    found = [defects(line) for line in (FOLDER / "broken.jsonl").read_text("utf-8").splitlines()]
    assert all(len(wrong) <= 1 for wrong in found) and found[0] == found[-1] == set()
    once = (
        "no output,empty output,blank output,output is NoneType,output is int,no instruction,"
        "empty instruction,instruction is list,input is int,no difficulty,difficulty is NoneType,"
        "difficulty is int,unknown difficulty"
    )
    counts = dict.fromkeys(once.split(","), 1) | {"not JSON": 2, "not an object": 2}
    assert Counter(wrong for line in found for wrong in line) == counts
