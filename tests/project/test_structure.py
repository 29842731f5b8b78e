"""How large a folder, file or function of the package may be. What is over is split where it reads better so."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from launching import ROOT

MODULES_IN_A_FOLDER = 25  # besides __init__.py, and without those of its sub-folders
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60  # from `def` on, with what is nested in it

MODULES = sorted((ROOT / "finetune").rglob("*.py"))


@pytest.mark.frozen
def test_folders_files_and_functions_are_within_their_limits():
    over = []
    for folder, number in Counter(path.parent for path in MODULES if path.name != "__init__.py").items():
        if number > MODULES_IN_A_FOLDER:
            over.append(f"{folder.relative_to(ROOT)} has {number} modules; at most {MODULES_IN_A_FOLDER}")
    for path in MODULES:
        name, text = path.relative_to(ROOT), path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > LINES_OF_A_FILE:
            over.append(f"{name} has {lines} lines; at most {LINES_OF_A_FILE}")
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        for node in (node for node in ast.walk(ast.parse(text)) if isinstance(node, functions)):
            if (lines := node.end_lineno - node.lineno + 1) > LINES_OF_A_FUNCTION:
                over.append(f"{name}:{node.lineno} {node.name} has {lines} lines; at most {LINES_OF_A_FUNCTION}")
    assert not over, "\n".join(over)
