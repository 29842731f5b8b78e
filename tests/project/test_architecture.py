"""The page about the architecture says what is there."""

from __future__ import annotations

import re
import sys

from launching import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import architecture_picture

PAGE = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_is_made_from_todays_imports():
    assert (
        architecture_picture.PICTURE.read_text(encoding="utf-8") == architecture_picture.picture()
    ), "run: python docs/architecture_picture.py"


def test_every_folder_is_in_picture_and_page():
    folders = {
        path.name
        for path in (ROOT / "finetune").iterdir()
        if path.is_dir() and path.name[0] not in "_."
    }
    assert folders - {"locale"} == set(architecture_picture.FOLDERS)
    tree = re.search(r"```\nfinetune/\n(.*?)```", PAGE, re.S)[1]
    assert folders == set(re.findall(r"^  (\w+)/ ", tree, re.M))
    commands = {path.parent.name for path in (ROOT / "finetune" / "commands").glob("*/command.py")}
    described = tree[tree.index("commands/") : tree.index("  runs/")]
    assert commands <= set(re.findall(r"\w+", described))


def test_files_that_the_page_names_are_there():
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE):
        assert (ROOT / "finetune" / name).is_file() or (ROOT / name).is_file(), name


def test_the_glossary_is_short():
    rows = re.findall(r"^\| ([^|]+) \|", PAGE[PAGE.index("## Glossary") :], re.M)
    assert len(rows) - 2 <= 25
