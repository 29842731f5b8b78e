"""The Dockerfiles: what they copy is there, and is all that the environment is made of.

They are not built here, which needs a network and their base images.
"""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from launching import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

FILES = sorted((ROOT / "launchers").glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(name, argument) of each, continued lines joined."""
    text = re.sub(
        r"\\\n",
        " ",
        "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#")),
    )
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def arguments(path: Path) -> dict[str, str]:
    pairs = [value.split("=", 1) for name, value in instructions(path) if name == "ARG"]
    return {name: value.strip('"') for name, value in pairs}


def torch_of_the_lock() -> str:
    return next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )


def test_there_is_one_for_each_kind_of_device():
    assert [path.name for path in FILES] == ["cuda.Dockerfile", "npu.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_environment_is_made_of_what_is_copied_before_it(path: Path, tmp_path: Path):
    made = False
    for name, argument in instructions(path):
        if name == "COPY" and not made:
            *sources, target = argument.split()
            for source in sources:
                into = tmp_path / target if len(sources) == 1 else tmp_path / target / source
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, into)
        if name == "RUN" and argument.startswith("make"):
            command = argument.partition("&&")[0].replace("${TORCH}", arguments(path)["TORCH"])
            steps = subprocess.run(
                [*shlex.split(command), "--dry-run"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            made = True
    assert made and "requirements.lock" in steps and "--require-hashes" in steps
    assert f"pip install --quiet {arguments(path)['TORCH']}" in steps


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_torch_is_one_that_the_package_takes(path: Path):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    floor = next(
        Requirement(line)
        for line in setup["options"]["install_requires"].split()
        if line.startswith("torch>")
    )
    asked = arguments(path)["TORCH"].replace("-c constraints.txt torch", torch_of_the_lock())
    versions = {word.partition("==")[0]: Version(word.partition("==")[2]) for word in asked.split()}
    assert versions["torch"] in floor.specifier
    assert len({version.release[:2] for version in versions.values()}) == 1, (
        "torch_npu is made for one torch"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_ends_as_a_user_who_owns_what_is_written(path: Path):
    found = instructions(path)
    users = [argument for name, argument in found if name == "USER"]
    assert users[-1:] == ["trainer"]
    owning = [
        argument
        for name, argument in found
        if name == "RUN" and "chown -R trainer .venv" in argument
    ]
    assert owning and "runs logs" in owning[0]


def test_what_is_not_for_an_image_stays_out():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs", "logs"} <= set(ignored)
