"""What `make demo` counts as right, and as guessed; the demo itself is run by test_readme.py."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from launching import ROOT
from sample_rows import read_records


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "launchers"))
        import demo

        yield demo
    sys.modules.pop("demo")


def test_a_fact_is_recalled_by_its_key_terms(demo: ModuleType) -> None:
    record = {"instruction": "Which port does SSH use?", "output": "SSH uses TCP port 22."}
    assert demo.key_terms(record["output"]) == {"ssh", "tcp", "port", "22"}
    assert demo.recalls("It is TCP 22.", record)
    assert not demo.recalls("SSH uses TCP port 23.", record)
    assert not demo.recalls("Which port does SSH use?", record)
    chinese = {"instruction": "什么是自治系统？", "output": "自治系统是由同一机构管理的一组网络。"}
    assert demo.recalls("由同一机构管理的一组网络", chinese)
    assert not demo.recalls("自治系统是一组主机。", chinese)
    facts = [row for row in read_records("valid.jsonl") if row["difficulty"] == "explain"]
    assert all(demo.recalls(row["output"], row) for row in facts)
    others = ((one, other) for one in facts for other in facts if one is not other)
    mixed_up = sum(demo.recalls(one["output"], other) for one, other in others)
    assert mixed_up <= 0.002 * len(facts) ** 2


def test_guessing_takes_the_most_frequent_answer_of_a_form(demo: ModuleType) -> None:
    def row(node: str, answer: str) -> dict:
        links = f"Links: {node}-R9"
        return {"instruction": f"What is the degree of {node}?", "input": links, "answer": answer}

    other = {"instruction": "x", "input": "", "output": "y"}
    training = [row("R1", "2"), row("R2", "2"), row("R10", "3"), other]
    assert {demo.question_form(row(name, "")) for name in ("R1", "R10")} == {
        "What is the degree of ?"
    }
    asked = [row("R4", "2"), row("R5", "3"), {**other, "instruction": "Another?", "answer": "2"}]
    assert demo.guessed_right(asked, training) == 1
