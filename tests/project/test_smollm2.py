"""What `make smollm2` trains and asks; the demo itself needs ten minutes and a wheel of 93 MB."""

from __future__ import annotations

import re
from types import ModuleType


def test_held_out_facts_are_trained_in_other_words(smollm2: ModuleType) -> None:
    held_out = smollm2.selected(smollm2.english("valid.jsonl"), smollm2.HELD_OUT)
    ordered = smollm2.known_first(smollm2.english("train.jsonl"), held_out)
    trained = smollm2.selected(ordered, smollm2.TRAINED)
    for rows, counts in ((held_out, smollm2.HELD_OUT), (trained, smollm2.TRAINED)):
        found = [row["difficulty"] for row in rows]
        assert {level: found.count(level) for level in counts} == counts
    questions = [
        {(row["instruction"], row["input"]) for row in rows} for rows in (held_out, trained)
    ]
    assert not questions[0] & questions[1]
    asked = [row["output"] for row in held_out if row["difficulty"] == "explain"]
    # A record that asks for several facts numbers them.
    facts = {re.sub(r"^\d\. ", "", line) for text in asked for line in text.splitlines()}
    assert facts <= {row["output"] for row in trained}


def test_nothing_that_is_asked_is_trained(smollm2: ModuleType) -> None:
    trained = {*smollm2.IDENTITY_QUESTIONS, *smollm2.GENERAL_QUESTIONS}
    assert not trained & {*smollm2.HELD_OUT_IDENTITY, *smollm2.HELD_OUT_GENERAL}
