"""What `finetune` offers to Python: its names, its examples, and that its types can be checked by
others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import ROOT, run_command, said

import finetune

# With examples, in an order in which one may look at the run of an earlier one.
EXAMPLES = (
    "batching.curriculum_sampler batching.collate training.run runs.follow"
    " commands.diagnose.command commands.plan.command"
)


@pytest.mark.frozen
def test_every_name_is_there_for_readers_of_types_too() -> None:
    assert all(getattr(finetune, name) is not None for name in finetune.__all__)
    assert {*finetune._HOMES, "__version__"} == set(finetune.__all__) <= set(dir(finetune))
    source = (ROOT / "finetune" / "__init__.py").read_text(encoding="utf-8")
    for name, module in finetune._HOMES.items():
        attribute = finetune._NAMES_THERE.get(name, name)
        asked = f"{attribute} as {name}" if attribute != name else name
        assert f"    from {module} import {asked}\n" in source


@pytest.mark.slow
def test_the_examples_of_docstrings_are_true(tmp_path: Path) -> None:
    named = [f"finetune.{name}" for name in EXAMPLES.split()]
    for path in (ROOT / "finetune").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert ("\n    >>> " in path.read_text(encoding="utf-8")) == (module in named), module
    for name in ("data_samples", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    code = f"""
import doctest, importlib, sys
results = [doctest.testmod(importlib.import_module(name)) for name in {named!r}]
sys.exit(any(one.failed for one in results) or not all(one.attempted for one in results))
"""
    env = {"HF_HOME": str(tmp_path / "hf")}
    result = run_command([sys.executable, "-c", code], cwd=tmp_path, env=env)
    assert result.returncode == 0, said(result)


PROGRAM = """
import finetune

reveal_type(finetune.run({"model": "m", "data": "d", "output_dir": "o"}).steps)
reveal_type(finetune.plan("run.yaml").fits)
reveal_type(finetune.RunConfig)
"""


@pytest.mark.slow
def test_another_project_sees_types(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
    words += ["--follow-imports", "silent", "program.py"]
    # An editable installation is a hook, which mypy does not follow; that py.typed is installed is
    # for test_packaging.
    result = run_command(words, cwd=tmp_path, env={"MYPYPATH": str(ROOT), "PYTHONPATH": None})
    lines = [line for line in result.stdout.splitlines() if "Revealed" in line]
    revealed = [line.rpartition('"')[0].partition('"')[2] for line in lines]
    assert revealed[:2] == ["int", "bool | None"], said(result)
    assert "finetune.config.run_config.RunConfig" in revealed[2]
