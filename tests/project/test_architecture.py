"""The page about the architecture says what is there."""

from __future__ import annotations

import re
import sys

from launching import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import architecture_picture


def test_picture_and_page_say_what_is_there():
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    picture = architecture_picture.PICTURE.read_text(encoding="utf-8")
    assert picture == architecture_picture.picture(), "run: python docs/architecture_picture.py"
    paths = [path for path in (ROOT / "finetune").iterdir() if path.name[0] not in "_."]
    folders = {path.name for path in paths if path.is_dir()}
    assert folders - {"locale"} == set(architecture_picture.FOLDERS)
    tree = re.search(r"```\nfinetune/\n(.*?)```", page, re.S)[1]
    assert folders == set(re.findall(r"^  (\w+)/ ", tree, re.M))
    commands = {path.parent.name for path in (ROOT / "finetune" / "commands").glob("*/command.py")}
    described = tree[tree.index("commands/") : tree.index("  runs/")]
    assert commands <= set(re.findall(r"\w+", described))
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page):
        assert (ROOT / "finetune" / name).is_file() or (ROOT / name).is_file(), name
