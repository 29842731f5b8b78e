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

import pytest
from sample_rows import FOLDER, chinese, prompt, read_records

PREFERENCES = ("preference_train.jsonl", "preference_valid.jsonl")
FILES = (
    "train.jsonl",
    "valid.jsonl",
    "sharegpt.json",
    "messages.jsonl",
    "broken.jsonl",
    *PREFERENCES,
)
LEVELS = ("explain", "reasoning", "topology")


def talks() -> list[tuple[str, list[tuple[str, str]]]]:
    """Level and (role, text) turns of both multi-turn files."""
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    sharegpt = json.loads((FOLDER / "sharegpt.json").read_text(encoding="utf-8"))
    found = [
        (row["difficulty"], [(roles[turn["from"]], turn["value"]) for turn in row["conversations"]])
        for row in sharegpt
    ]
    for row in read_records("messages.jsonl"):
        found.append(
            (row["difficulty"], [(turn["role"], turn["content"]) for turn in row["messages"]])
        )
    return found


@pytest.mark.parametrize("hash_seed", ["0", "7"])
def test_the_script_makes_the_committed_files(tmp_path: Path, hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    # -S: no installed packages
    script = [
        sys.executable,
        "-S",
        str(FOLDER / "generators" / "make_data.py"),
        "--out",
        str(tmp_path),
    ]
    subprocess.run(script, check=True, env=environment, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_rows_per_level() -> None:
    assert Counter(row["difficulty"] for row in read_records("train.jsonl")) == {
        "explain": 600,
        "reasoning": 500,
        "topology": 400,
    }
    assert Counter(row["difficulty"] for row in read_records("valid.jsonl")) == dict.fromkeys(
        LEVELS, 50
    )


@pytest.mark.parametrize("name", ["train.jsonl", "valid.jsonl"])
def test_half_is_english_and_half_is_chinese(name: str) -> None:
    rows = read_records(name)
    for level in LEVELS:
        of_level = [row for row in rows if row["difficulty"] == level]
        share = sum(chinese(row["instruction"]) for row in of_level) / len(of_level)
        assert share == pytest.approx(0.5, abs=0.05)
    for row in rows:
        # An answer is in the language of its question; answers without words (addresses, links)
        # belong to either.
        marked = "答案：" if chinese(row["instruction"]) else "Answer: "
        assert "answer" not in row or row["output"].splitlines()[-1] == marked + row["answer"]
        assert chinese(row["instruction"]) or not chinese(row["output"])


def test_rows_are_complete_and_asked_once() -> None:
    train, valid = read_records("train.jsonl"), read_records("valid.jsonl")
    prompts = Counter(prompt(row) for row in train + valid)
    assert max(prompts.values()) == 1
    for row in train + valid:
        assert row["instruction"].strip() and row["output"].strip()
        assert ("answer" in row) == (row["difficulty"] != "explain")


def test_pairs_are_asked_nowhere_else_and_differ_in_their_answers() -> None:
    train, valid = (read_records(name) for name in PREFERENCES)
    assert Counter(row["topic"] for row in train) == {"reasoning": 300, "topology": 300}
    assert Counter(row["topic"] for row in valid) == {"reasoning": 50, "topology": 50}
    others = read_records("train.jsonl") + read_records("valid.jsonl")
    assert max(Counter(prompt(row) for row in train + valid + others).values()) == 1
    for row in train + valid:
        marked = "答案：" if chinese(row["instruction"]) else "Answer: "
        assert row["chosen"].endswith("\n" + marked + row["answer"])
        _, _, wrong = row["rejected"].rpartition("\n" + marked)
        assert wrong and wrong != row["answer"] and row["chosen"] != row["rejected"]


def test_valid_explain_rows_can_be_learned_from_train() -> None:
    """Every held-out answer is also one of train, asked in another form; lists are put together of
    such.
    """
    known = [row["output"] for row in read_records("train.jsonl") if row["difficulty"] == "explain"]
    for row in read_records("valid.jsonl"):
        if row["difficulty"] == "explain":
            for line in row["output"].splitlines():
                assert (
                    line.removeprefix(line.split(" ")[0] + " ") in known or row["output"] in known
                )


def test_lengths_vary() -> None:
    lengths = sorted(len(prompt(row) + row["output"]) for row in read_records("train.jsonl"))
    assert lengths[-1] > 4 * lengths[len(lengths) // 2]


def test_conversations_are_well_formed_and_appear_nowhere_else() -> None:
    elsewhere = {
        prompt(row) for name in ("train.jsonl", "valid.jsonl") for row in read_records(name)
    }
    found = talks()
    assert len(found) == 40
    assert {level for level, _ in found} == set(LEVELS)
    for _, turns in found:
        roles = [role for role, _ in turns]
        spoken = roles[1:] if roles[0] == "system" else roles
        assert spoken == ["user", "assistant"] * (len(spoken) // 2) != []
        assert all(text.strip() for role, text in turns if role != "system")
        assert not elsewhere & {text for role, text in turns if role == "user"}
    assert sum(len(turns) > 3 for _, turns in found) > 20
    prompts = [text for _, turns in found for role, text in turns if role == "system"]
    assert "" in prompts and any(chinese(text) for text in prompts) and len(prompts) < len(found)


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
    found = [
        defects(line) for line in (FOLDER / "broken.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert all(len(wrong) <= 1 for wrong in found)
    assert Counter(wrong for line in found for wrong in line) == {
        "not JSON": 2,
        "not an object": 2,
        "no output": 1,
        "empty output": 1,
        "blank output": 1,
        "output is NoneType": 1,
        "output is int": 1,
        "no instruction": 1,
        "empty instruction": 1,
        "instruction is list": 1,
        "input is int": 1,
        "no difficulty": 1,
        "difficulty is NoneType": 1,
        "difficulty is int": 1,
        "unknown difficulty": 1,
    }
    assert found[0] == found[-1] == set()
