"""The options of commands: positional ones, lists, everything wrong told at once, the help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from pydantic import Field

from finetune.config.fields import PathOption, Paths, Text, setting
from finetune.config.options import (
    Options,
    SpokenOptions,
    options_help,
    read_known_options,
    read_options,
)
from finetune.errors import ConfigError, FinetuneError, Problems


class Example(SpokenOptions):
    usage: ClassVar[str] = "python -m finetune example FOLDER [FILE ...] [--depth N]"
    summary: ClassVar[str] = "Shows what options are."
    epilog: ClassVar[str] = "Exit code 0: shown."
    positional: ClassVar[tuple[str, ...]] = ("folder", "files")
    aliases: ClassVar[dict[str, str]] = {"layers": "depth"}

    folder: PathOption = setting(group="options", unit="folder", description="Where to look.")
    files: Paths = setting((), group="options", unit="file...", description="Files to look at.")
    skip: Paths = setting((), group="options", description="Names to skip.")
    depth: Annotated[int, Field(ge=1)] = setting(
        3, group="options", unit="layers", description="How deep to look."
    )
    quiet: bool = setting(False, group="options", description="Say nothing.")
    color: bool = setting(True, group="options", description="Use colors.")
    note: Text | None = setting(None, group="options", description="A note.")

    def problems(self) -> list[tuple[str, str]]:
        both = self.quiet and self.note
        return [("quiet contradicts note", "leave one of the two out")] if both else []


def refused(words: str) -> list[str]:
    with pytest.raises(FinetuneError) as caught:
        read_options(Example, words.split())
    found = caught.value.problems if isinstance(caught.value, Problems) else [caught.value]
    for problem in found:
        assert isinstance(problem, ConfigError) and problem.what and problem.where and problem.fix
    assert caught.value.exit_code == 2
    return [str(problem) for problem in found]


def test_what_options_are():
    for words, expected in (
        ("here a --depth 2 b c", {"folder": Path("here"), "files": ("a", "b", "c"), "depth": 2}),
        ("here --skip a b --skip c --depth=1 --depth=2", {"skip": ("a", "b", "c"), "depth": 2}),
        ("here --Layers 7", {"depth": 7}),
        ("here --quiet false", {"quiet": False}),
        ("--depth 2 -- --quiet", {"folder": Path("--quiet"), "quiet": False}),
    ):
        options = read_options(Example, words.split())
        assert {name: getattr(options, name) for name in expected} == expected


def test_arguments_of_a_run_are_kept_in_their_order():
    class Mixed(Options):
        usage: ClassVar[str] = "mixed"
        summary: ClassVar[str] = ""
        depth: int = setting(3, group="options", description="How deep to look.")

    words = "sft --data a b --depth 2 --packing=false loose --seed 1"
    options, rest = read_known_options(Mixed, words.split())
    assert options.depth == 2
    assert rest == words.replace("--depth 2 ", "").split()
    with pytest.raises(FinetuneError, match="unknown flag --data"):
        read_options(Mixed, ["--data", "a"])


def test_everything_wrong_is_told_together():
    found = refused("--deph 2 --quiet=maybe --lang fr --skip")
    assert len(found) == 5
    for words in ("mean --depth?", "write true or", "give en, zh", "--skip has no", "give FOLDER"):
        assert any(words in problem for problem in found), words
    assert "null" not in str(found), "an option is left out, not set to null"
    assert "quiet contradicts note" in refused("here --quiet --note x")[0]
    assert "unknown flag --folder" in refused("here --folder there")[0]


def test_the_help_exits_with_0(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = options_help(Example)
    for words in (["-h"], ["here", "--help", "--nonsense"]):
        with pytest.raises(SystemExit) as end:
            read_options(Example, words)
        assert end.value.code == 0 and capsys.readouterr().out == text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    expected = [
        "FOLDER Where to look. [required]",
        "FILE... Files to look at. [default none]",
        "--depth LAYERS How deep to look. [default 3; also --layers]",
        "--color [true|false] Use colors. [default true]",
    ]
    assert [line for line in expected if line not in lines] == []
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, options_help(Example).splitlines())) < 70
