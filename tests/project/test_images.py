"""The Dockerfiles: what they copy is there, and is all that the environment is made of.

They are not built here, which needs a network and their base images.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from launching import ROOT
from packaging.version import Version

from finetune.commands.doctor.versions import own_requirements

FILES = sorted((ROOT / "launchers").glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(name, argument) of each, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


def torch_of(path: Path) -> str:
    found = [value for name, value in instructions(path) if name == "ARG"]
    return dict(value.split("=", 1) for value in found)["TORCH"].strip('"')


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_environment_is_made_of_what_is_copied_before_it(path: Path, tmp_path: Path):
    found, made = instructions(path), False
    for name, argument in found:
        if name == "COPY" and not made:
            *sources, target = argument.split()
            for source in sources:
                into = tmp_path / target if len(sources) == 1 else tmp_path / target / source
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, into)
        if name == "RUN" and argument.startswith("make"):
            command = argument.partition("&&")[0].replace("${TORCH}", torch_of(path))
            words = [*shlex.split(command), "--dry-run"]
            steps = subprocess.check_output(words, cwd=tmp_path, text=True)
            made = True
    assert made and "requirements.lock" in steps and "--require-hashes" in steps
    assert f"pip install --quiet {torch_of(path)}" in steps
    # It ends as a user who owns what is written.
    assert [argument for name, argument in found if name == "USER"][-1:] == ["trainer"]
    assert any("chown -R trainer .venv" in argument for _, argument in found)


def test_there_is_one_for_each_kind_of_device_with_a_torch_that_the_package_takes():
    assert [path.name for path in FILES] == ["cuda.Dockerfile", "npu.Dockerfile"]
    floor = next(one for one in own_requirements() if one.name == "torch")
    locked = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.M)[0]
    for path in FILES:
        asked = torch_of(path).replace("-c constraints.txt torch", locked)
        versions = {word.partition("==")[0]: word.partition("==")[2] for word in asked.split()}
        assert Version(versions["torch"]) in floor.specifier
        # torch_npu is made for one torch
        assert len({Version(version).release[:2] for version in versions.values()}) == 1
