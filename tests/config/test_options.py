"""The options of commands: positional ones, lists, other words kept, everything wrong told at once,
and the help.
"""

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
from finetune.runtime.language import speaking, spoken


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
        return (
            [("quiet contradicts note", "leave one of the two out")]
            if self.quiet and self.note
            else []
        )


def refused(*arguments: str) -> list[FinetuneError]:
    with pytest.raises(FinetuneError) as caught:
        read_options(Example, arguments)
    found = caught.value.problems if isinstance(caught.value, Problems) else [caught.value]
    assert all(
        isinstance(problem, ConfigError) and problem.what and problem.where and problem.fix
        for problem in found
    )
    assert caught.value.exit_code == 2
    return found


def test_positional_options_stand_in_their_order_and_the_last_takes_several() -> None:
    options = read_options(Example, ["here", "a", "--depth", "2", "b", "c"])
    assert (options.folder, options.files, options.depth) == (Path("here"), ("a", "b", "c"), 2)
    assert options.quiet is False and options.as_json is False and options.lang is None


def test_lists_of_a_repeated_flag_are_joined_and_of_other_flags_the_last_counts() -> None:
    options = read_options(
        Example, ["here", "--skip", "a", "b", "--skip", "c", "--depth=1", "--depth=2"]
    )
    assert (options.skip, options.depth) == (("a", "b", "c"), 2)
    assert read_options(Example, ["here", "--skip=a", "--skip=b"]).skip == ("a", "b")


@pytest.mark.parametrize("typed", ["--layers", "--Layers", "--depth"])
def test_other_spellings_are_the_same_option(typed: str) -> None:
    assert read_options(Example, ["here", typed, "7"]).depth == 7


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--quiet"], True), (["--quiet", "false"], False), (["--quiet=true"], True), ([], False)],
)
def test_a_switch_stands_alone_or_takes_true_or_false(arguments: list[str], expected: bool) -> None:
    assert read_options(Example, ["here", *arguments]).quiet is expected


def test_arguments_of_a_run_are_kept_in_their_order() -> None:
    class Mixed(Options):
        usage: ClassVar[str] = "mixed"
        summary: ClassVar[str] = ""
        depth: int = setting(3, group="options", description="How deep to look.")

    arguments = [
        "sft",
        "--data",
        "a",
        "b",
        "--depth",
        "2",
        "--packing=false",
        "loose",
        "--seed",
        "1",
    ]
    options, rest = read_known_options(Mixed, arguments)
    assert options.depth == 2
    assert rest == ["sft", "--data", "a", "b", "--packing=false", "loose", "--seed", "1"]
    with pytest.raises(FinetuneError, match="unknown flag --data"):
        read_options(Mixed, ["--data", "a"])


def test_what_follows_two_dashes_stands_alone() -> None:
    assert read_options(Example, ["--depth", "2", "--", "--quiet"]).folder == Path("--quiet")


def test_everything_wrong_is_told_together() -> None:
    found = [
        str(problem)
        for problem in refused("--deph", "2", "--quiet=maybe", "--lang", "fr", "--skip")
    ]
    assert len(found) == 5
    for words in (
        "did you mean --depth?",
        "write true or false",
        "give en, zh",
        "--skip has no value",
        "give FOLDER",
    ):
        assert any(words in problem for problem in found), words
    assert not any("null" in problem for problem in found), "an option is left out, not set to null"


def test_a_misspelt_option_is_not_missing_too() -> None:
    assert len(refused("here", "--dpeth", "2")) == 1


def test_contradictions_of_options_are_told() -> None:
    assert [problem.what for problem in refused("here", "--quiet", "--note", "x")] == [
        "quiet contradicts note"
    ]


def test_a_positional_option_is_no_flag() -> None:
    assert "unknown flag --folder" in str(refused("here", "--folder", "there")[0])


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["here", "--help", "--nonsense"]])
def test_help_exits_with_0(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_options(Example, arguments)
    assert end.value.code == 0
    assert capsys.readouterr().out == options_help(Example)


def test_the_help_shows_units_and_defaults_and_plain_switches_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = options_help(Example)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "usage: python -m finetune example FOLDER [FILE ...] [--depth N]"
    assert "Shows what options are." in lines and lines[-1] == "Exit code 0: shown."
    assert (
        "FOLDER Where to look. [required]" in lines
        and "FILE... Files to look at. [default none]" in lines
    )
    assert "--depth LAYERS How deep to look. [default 3; also --layers]" in lines
    assert "--quiet Say nothing." in lines and "--json Write JSON instead of text." in lines
    assert "--color [true|false] Use colors. [default true]" in lines
    assert max(map(len, text.splitlines())) <= 120


def test_the_language_is_set_for_what_follows() -> None:
    with speaking("en"):
        read_options(Example, ["here", "--lang", "zh"])
        assert spoken() == "zh"
