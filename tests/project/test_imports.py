"""Imports point one way, and looking at help or a configuration loads no torch."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from functools import cache
from pathlib import Path

import pytest
from launching import ROOT, run_cli, run_command, said

from finetune.__main__ import COMMANDS

PACKAGE = ROOT / "finetune"

# From the ground up: a folder, or a module beside them, imports only what stands before it.
LAYERS = (
    *(
        "version",
        "plain_text",
        "errors",
        "runtime",
        "config",
        "storage",
        "batching",
        "data",
        "modeling",
        "planning",
        "training",
    ),
    *("inference", "runs", "commands", "sft", "pretrain", "dpo", "__init__", "__main__"),
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
HEAVY = (
    "torch",
    "transformers",
    "deepspeed",
    "accelerate",
    "peft",
    "datasets",
    "pandas",
    "pyarrow",
    "tokenizers",
)


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
    return (
        f"{'.'.join(rest)}.__init__" if ".".join([*rest, "__init__"]) in modules() else "__init__"
    )


def layer(module: str) -> int:
    unit = module.split(".")[0]
    assert unit in LAYERS, f"finetune/{unit} has no place in LAYERS (tests/project/test_imports.py)"
    return LAYERS.index(unit)


@pytest.mark.frozen
@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module: str):
    """Those inside functions and for type checkers too."""
    unit = module.split(".")[0]
    for imported in imports_of(module):
        other = imported.split(".")[0]
        if imported == "__init__":
            continue  # `from finetune import ...`: the package itself is light
        assert other == unit or layer(imported) < layer(module), (
            f"finetune/{module} imports {imported}: upwards"
        )
        assert (unit, other) not in APART, (
            f"finetune/{module} imports finetune/{imported}: these stand apart"
        )


@pytest.mark.frozen
def test_commands_import_one_another_only_by_the_table():
    found = set()
    for module in modules():
        for imported in imports_of(module):
            if module.startswith("commands.") and imported.startswith("commands."):
                command, other = module.split(".")[1], imported.removeprefix("commands.")
                if command != other.split(".")[0]:
                    found.add((command, other))
    assert found == COMMAND_IMPORTS


@pytest.mark.frozen
def test_no_cycle_among_imports():
    """Those inside functions and for type checkers too: a type that two modules need stands below
    both.
    """
    graph = {m: {i for i in imports_of(m) if i != m} for m in modules()}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for imported in graph.get(module, ()):
                walk(imported, (*path, module))
            done.add(module)

    for module in graph:
        walk(module, ())


@pytest.mark.parametrize("module", [m for m in modules() if m != "__main__"])
def test_every_module_can_be_imported(module: str):
    importlib.import_module(f"finetune.{module}".removesuffix(".__init__"))


def test_folders_import_nothing():
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE:
            assert not ast.parse(path.read_text(encoding="utf-8")).body[1:], (
                f"{path}: an __init__.py here is empty"
            )


# ---------------------------------------------------------------- what is loaded


def loaded_by(args: list[str], module: str) -> set[str]:
    """Top-level packages that a command imports, from the interpreter's own report."""
    result = run_cli(args, module=module, launcher="python", launcher_args=["-X", "importtime"])
    assert result.returncode == 0, said(result)
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    assert len(lines) > 20, "the interpreter reported no imports"
    return {line.rpartition("|")[2].strip().split(".")[0] for line in lines}


@pytest.mark.parametrize(
    ("module", "args"),
    [
        ("finetune", ["--help"]),
        ("finetune", []),
        ("finetune", ["--version"]),
        ("finetune.sft", ["--help"]),
        ("finetune.sft", ["--config", "ds_configs/zero3.json", "--print-config"]),
        *(("finetune", [name, "--help"]) for name in COMMANDS),
    ],
)
def test_help_and_print_config_load_no_torch(module: str, args: list[str]):
    assert not loaded_by(args, module) & set(HEAVY)


def test_import_finetune_is_light():
    """Importing the package loads nothing but itself; RunConfig and run come without torch."""
    code = (
        "import sys, json; before = set(sys.modules); import finetune\n"
        "light = sorted(set(sys.modules) - before)\n"
        "finetune.RunConfig, finetune.run, finetune.FinetuneError, finetune.RunResult\n"
        "print(json.dumps([light, sorted(sys.modules)]))"
    )
    result = run_command([sys.executable, "-c", code])
    light, later = json.loads(result.stdout)
    assert {name.split(".")[0] for name in light} - {"finetune"} <= sys.stdlib_module_names
    assert sorted(name for name in light if name.startswith("finetune")) == [
        "finetune",
        "finetune.version",
    ]
    assert not {name.split(".")[0] for name in later} & set(HEAVY)


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import finetune

    with pytest.raises(AttributeError, match="has no attribute 'train'"):
        finetune.train  # noqa: B018
    assert set(finetune.__all__) <= {*vars(finetune), *finetune._HOMES}


def test_an_unknown_command_names_the_nearest():
    result = run_cli(["checkpoint"], module="finetune")
    assert result.returncode == 2
    assert "did you mean checkpoints?" in result.stderr and "Traceback" not in said(result)
