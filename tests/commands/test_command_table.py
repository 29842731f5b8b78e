"""`python -m finetune WORD`: wrong words are answered; every help fits 80 columns."""

from __future__ import annotations

from contextlib import suppress

import pytest

from finetune.__main__ import COMMANDS, main


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


@pytest.mark.parametrize(
    "command", [[], *([name] for name in COMMANDS)], ids=lambda command: "".join(command) or "all"
)
def test_the_help_fits_a_terminal_of_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        main([*command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5 and [line for line in lines if len(line) >= 80] == []
