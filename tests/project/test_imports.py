"""Imports point one way, and looking at help or a configuration loads no torch."""

from __future__ import annotations

import ast
import json
import sys
from functools import cache
from pathlib import Path

import pytest
from launching import ROOT, run_command, said

from finetune.__main__ import COMMANDS

PACKAGE = ROOT / "finetune"
# From the ground up: a folder, or a module beside them, imports only what stands before it.
LAYERS = (
    "version plain_text errors runtime config storage batching data modeling planning"
    " training inference runs commands sft pretrain dpo __init__ __main__"
)
# What looks at a run, or talks to its result, must not need what trains one.
APART = (("inference", "training"), ("runs", "training"), ("commands", "training"))
# A command imports another one only here: (command, what it uses).
COMMAND_IMPORTS = frozenset(
    {
        ("launch", "diagnose.command"),  # says why a run failed
        ("launch", "doctor.check"),
        ("launch", "doctor.command"),  # refuses a run that cannot start
        ("report", "plan.check"),
    }
)
HEAVY = "torch transformers deepspeed accelerate peft datasets pandas pyarrow tokenizers"


@cache
def modules() -> tuple[str, ...]:
    """All modules of the package, without its name: `config`, `data.cache`, `__init__`."""
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))]
    return tuple(".".join(path.parts) for path in paths)


@cache
def imports_of(module: str) -> frozenset[str]:
    """The modules of ours that a module imports, wherever the import stands."""
    path = PACKAGE / Path(*module.split(".")).with_suffix(".py")
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; write it out"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return frozenset(ours for name in names if (ours := _ours(name)) is not None)


def _ours(name: str) -> str | None:
    """`finetune.data.cache.locked` -> `data.cache`; None for a module that is not ours."""
    head, *rest = name.split(".")
    if head != "finetune":
        return None
    for length in range(len(rest), 0, -1):
        if ".".join(rest[:length]) in modules():
            return ".".join(rest[:length])
    package = ".".join([*rest, "__init__"])
    return package if package in modules() else "__init__"


@pytest.mark.frozen
def test_imports_point_down():
    """Those inside functions and for type checkers too; and commands import one another only by
    the table.
    """
    found, layers = set(), LAYERS.split()
    for module in modules():
        unit, *rest = module.split(".")
        assert unit in layers, f"finetune/{unit} has no place in LAYERS"
        # `from finetune import ...`: the package itself is light
        for imported in imports_of(module) - {"__init__"}:
            other, _, inside = imported.partition(".")
            points_down = other == unit or layers.index(other) < layers.index(unit)
            assert points_down, f"finetune/{module} imports {imported}: upwards"
            assert (unit, other) not in APART, f"finetune/{module} imports {imported}"
            if unit == other == "commands" and rest[0] != inside.split(".")[0]:
                found.add((rest[0], inside))
    assert found == COMMAND_IMPORTS


@pytest.mark.frozen
def test_no_cycle_among_imports():
    """A type that two modules need stands below both."""
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for imported in imports_of(module) - {module} if module in modules() else ():
                walk(imported, (*path, module))
            done.add(module)

    for module in modules():
        walk(module, ())


def test_packages_are_empty():
    for path in PACKAGE.rglob("*/__init__.py"):
        code = ast.parse(path.read_text(encoding="utf-8")).body[1:]
        assert path.parent == PACKAGE or not code, f"{path}: an __init__.py here is empty"


# One process asks for everything in turn: what is loaded by then is told after each.
LOOKS = """
import json, sys
from finetune.__main__ import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit:
        pass
    loaded = {name.split(".")[0] for name in sys.modules} & set(sys.argv[2].split())
    print("loaded", json.dumps([words, sorted(loaded)]))
"""


def test_help_and_print_config_load_no_torch():
    asked = [["--help"], [], ["--version"], *([name, "--help"] for name in COMMANDS)]
    asked += [["sft", "--config", "ds_configs/zero3.json", "--print-config"]]
    result = run_command([sys.executable, "-c", LOOKS, json.dumps(asked), HEAVY])
    lines = [line.partition(" ") for line in result.stdout.splitlines()]
    told = [json.loads(rest) for word, _, rest in lines if word == "loaded"]
    assert told == [[words, []] for words in asked], said(result)


def test_import_finetune_is_light():
    """RunConfig and run come without torch; the package alone loads nothing but itself."""
    code = (
        "import sys, json, finetune\n"
        "own = [name for name in sys.modules if name.startswith('finetune')]\n"
        "finetune.RunConfig, finetune.run, finetune.FinetuneError, finetune.RunResult\n"
        "print(json.dumps([own, sorted(sys.modules)]))"
    )
    own, later = json.loads(run_command([sys.executable, "-c", code]).stdout)
    assert set(own) == {"finetune", "finetune.version"}
    assert not {name.split(".")[0] for name in later} & set(HEAVY.split())
