"""What is published: a wheel and an sdist, built without a network, installed apart from the
checkout; its metadata.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from launching import ROOT, environment

from finetune.version import DISTRIBUTION, __version__

PUBLISHED = ("finetune", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
DATA = (
    "py.typed locale/zh/LC_MESSAGES/finetune.mo commands/diagnose/line_kinds.toml"
    " commands/diagnose/entries/causes.toml commands/convert/tables/hugging_face.toml"
    " commands/convert/tables/llama_factory.toml config/deepspeed_names.json"
    " config/names_elsewhere.json commands/inspect/scripts.toml commands/report/chart.svg.jinja"
    " commands/report/page.css commands/report/page.html.jinja commands/serve/static/index.html"
).split()


def build(hook: str, source: Path, target: Path) -> None:
    code = f"from setuptools.build_meta import build_{hook} as build; build({str(target)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, made from the files that are published."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    compiled = shutil.ignore_patterns("__pycache__")
    for name in PUBLISHED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=compiled)
        else:
            shutil.copy(ROOT / name, source / name)
    for hook in ("sdist", "wheel"):
        build(hook, source, dist)
    return dist


def the_one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_data_and_its_metadata(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(the_one(built, "*.whl")) as wheel:
        names = set(wheel.namelist())
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(metadata_name).decode())
    assert {f"finetune/{name}" for name in DATA} <= names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "finetune").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}
    assert {name.split("/")[0] for name in names} == {"finetune", metadata_name.split("/")[0]}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert (metadata["Name"], metadata["Version"]) == (DISTRIBUTION, __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = metadata.get_all("Provides-Extra", [])
    assert {"deepspeed", "serve", "quantization", "npu"} <= set(extras)
    # The sdist makes the same wheel.
    with tarfile.open(the_one(built, "*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = the_one(tmp_path, "finetune_lm-*")
    build("wheel", source, source)
    with zipfile.ZipFile(the_one(source, "*.whl")) as again:
        assert set(again.namelist()) == names
    assert not (source / "tests").exists()


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    """The libraries are this environment's; the package is the wheel's, and no checkout is near."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    python, command = place / "bin" / "python", place / "bin" / "finetune"
    packages = next(place.glob("lib/python*/site-packages"))
    own = [sysconfig.get_paths()["purelib"]]
    own += [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("\n".join(dict.fromkeys(own)) + "\n")
    env = environment({"PYTHONPATH": None, "PIP_NO_INDEX": "1"})
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    wheel = the_one(built, "*.whl")
    subprocess.run([*pip, "--ignore-installed", wheel], env=env, check=True, cwd=tmp_path)

    def said(*words: str | Path, code: int = 0) -> str:
        result = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == code, result.stderr
        return result.stdout

    assert said(command, "--version").strip() == __version__
    where = Path(said(python, "-c", "import finetune; print(finetune.__file__)").strip())
    assert where.is_relative_to(place)
    (tmp_path / "run.log").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    # the Chinese catalogue is found
    assert "显存" in said(command, "diagnose", "--lang", "zh", "run.log", code=1)
    assert [name for name in DATA if not (where.parent / name).is_file()] == []


def test_what_strangers_look_for_is_there_and_agrees() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2].split()[0]
    assert newest == __version__
    scripts = entry_points(group="console_scripts")
    names = {entry.name for entry in scripts if entry.value == "finetune.__main__:main"}
    assert names == {"finetune"} and os.access(ROOT / ".ci" / "run", os.X_OK)
