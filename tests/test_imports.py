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

# From the ground up. A unit is a module of the package or a folder in it. It may import what stands on a lower floor,
# or further left on its own; on floors marked False not even that.
FLOORS: tuple[tuple[bool, str], ...] = (
    (True, "version errors language"),
    (
        True,
        "config_names config_rules config_pretrain_rules config_fields config config_pretrain batching device "
        "orphans runlog results storage",
    ),
    (
        True,
        "deepspeed_keys deepspeed_numbers config_sources config_layers config_flags config_errors config_paths "
        "config_text config_file data modeling",
    ),
    (False, "training operations chat"),  # what only looks at a run must not need what trains one
    (True, "command sft pretrain"),
    (True, "__init__ __main__"),
)
# Imports of `operations` and `chat` from `training` that the design allows: (module, name). None is needed so far.
ALLOWED: frozenset[tuple[str, str]] = frozenset()
# Upward imports for type checkers only: nothing happens at run time.
ALLOWED_FOR_TYPES = frozenset({("training.build_sft", "sft"), ("training.build_pretrain", "pretrain")})
HEAVY = ("torch", "transformers", "deepspeed", "accelerate", "peft", "datasets", "pandas", "pyarrow", "tokenizers")


def modules() -> list[str]:
    """All modules of the package, without its name: `config`, `data.files`, `__init__`."""
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))]
    return [".".join(path.parts) for path in paths]


def place(module: str) -> tuple[int, int, bool]:
    """(floor, position on it, whether looking left is allowed there)."""
    unit = module.split(".")[0]
    for floor, (left, names) in enumerate(FLOORS):
        if unit in names.split():
            return floor, names.split().index(unit), left
    raise AssertionError(f"finetune/{unit} stands on no floor: give it a place in FLOORS (tests/test_imports.py)")


@cache
def imports_of(module: str) -> tuple[tuple[str, bool, bool], ...]:
    """(module of ours, for types only, at the top level) for every import, those inside functions included."""
    path = PACKAGE / Path(*module.split(".")).with_suffix(".py")
    found: list[tuple[str, bool, bool]] = []

    def visit(node: ast.AST, types_only: bool, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            types_only = True
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; write it out"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found.extend((ours, types_only, top) for name in names if (ours := _ours(name)) is not None)
        top = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, types_only, top)

    visit(ast.parse(path.read_text(encoding="utf-8")), False, True)
    return tuple(found)


def _ours(name: str) -> str | None:
    """`finetune.data.files.read_rows` -> `data.files`; None for a module that is not ours."""
    head, *rest = name.split(".")
    if head != "finetune":
        return None
    for length in range(len(rest), 0, -1):
        if ".".join(rest[:length]) in modules():
            return ".".join(rest[:length])
    return f"{'.'.join(rest)}.__init__" if ".".join([*rest, "__init__"]) in modules() else "__init__"


@pytest.mark.parametrize("module", modules())
def test_imports_point_down_or_left(module: str):
    floor, position, _ = place(module)
    for imported, types_only, _ in imports_of(module):
        if imported.split(".")[0] == module.split(".")[0]:
            continue
        if imported == "__init__":
            imported = "version"  # `from finetune import device` resolves to device; the package itself is light
        there, their_position, left = place(imported)
        fine = there < floor or (there == floor and left and their_position < position)
        allowed = ALLOWED_FOR_TYPES if types_only else ALLOWED
        assert fine or (module, imported) in allowed, (
            f"finetune/{module} imports finetune/{imported}: against the floors"
        )


def test_the_tables_allow_nothing_that_is_not_there():
    found = {(m, i, types) for m in modules() for i, types, _ in imports_of(m)}
    assert {(m, i) for m, i in ALLOWED_FOR_TYPES if (m, i, True) not in found} == set()
    assert {(m, i) for m, i in ALLOWED if (m, i, False) not in found} == set()


def test_no_circle_among_imports_at_the_top_of_modules():
    """Within a folder too; an import inside a function runs later and may close a circle."""
    graph = {m: {i for i, types, top in imports_of(m) if top and not types and i != m} for m in modules()}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"circle: {' -> '.join([*path[path.index(module) :], module])}"
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
            assert not ast.parse(path.read_text(encoding="utf-8")).body[1:], f"{path}: an __init__.py here is empty"


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
    assert sorted(name for name in light if name.startswith("finetune")) == ["finetune", "finetune.version"]
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
