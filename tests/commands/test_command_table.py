"""`python -m finetune WORD`: wrong words are answered."""

from __future__ import annotations

import pytest

from finetune.__main__ import main


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train", "sft"),  # as LLaMA-Factory calls it
        ("rlhf", "dpo"),  # and ms-swift
        ("moniter", "monitor"),
    ],
)
def test_a_word_of_another_tool_or_a_slip_is_answered_with_the_command(typed, meant, capsys):
    assert main([typed, "--config", "x.yaml"]) == 2
    said = capsys.readouterr()
    assert f"unknown command '{typed}'; did you mean {meant}?" in said.err and said.out == ""
    assert main(["zzzzzz"]) == 2 and "did you mean" not in capsys.readouterr().err
