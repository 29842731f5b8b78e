"""What `make smollm2` trains and asks; the demo itself needs ten minutes and a wheel of 93 MB."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest


def test_held_out_facts_are_trained_in_other_words(smollm2: ModuleType) -> None:
    held_out = smollm2.selected(smollm2.english("valid.jsonl"), smollm2.HELD_OUT)
    ordered = smollm2.known_first(smollm2.english("train.jsonl"), held_out)
    trained = smollm2.selected(ordered, smollm2.TRAINED)
    for rows, counts in ((held_out, smollm2.HELD_OUT), (trained, smollm2.TRAINED)):
        found = [row["difficulty"] for row in rows]
        assert {level: found.count(level) for level in counts} == counts
    asked, learned = (
        {(row["instruction"], row["input"]) for row in rows} for rows in (held_out, trained)
    )
    assert not asked & learned
    outputs = [row["output"] for row in held_out if row["difficulty"] == "explain"]
    # A record that asks for several facts numbers them.
    facts = {re.sub(r"^\d\. ", "", line) for text in outputs for line in text.splitlines()}
    assert facts <= {row["output"] for row in trained}
    questions = {*smollm2.IDENTITY_QUESTIONS, *smollm2.GENERAL_QUESTIONS}
    assert not questions & {*smollm2.HELD_OUT_IDENTITY, *smollm2.HELD_OUT_GENERAL}


def test_model_only_makes_the_model_once_and_trains_nothing(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    made, model = [], tmp_path / "build" / "smollm2"

    def make_model() -> None:
        made.append(model)
        model.mkdir(parents=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "--model-only"])
    monkeypatch.setattr(smollm2, "ROOT", tmp_path)
    monkeypatch.setattr(smollm2, "MODEL", model)
    monkeypatch.setattr(smollm2, "make_model", make_model)
    monkeypatch.setattr(smollm2, "make_data", lambda: pytest.fail("the data was made too"))
    for _ in range(2):
        smollm2.main()
        assert capsys.readouterr().out == "the model is in build/smollm2\n"
    assert made == [model]
