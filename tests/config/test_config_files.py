"""Reading files: what is accepted, what is refused and where; `~` and variables in paths."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from finetune.config.files import read_file
from finetune.config.preference_config import PreferenceConfig
from finetune.config.resolution import PATH_SETTINGS, resolve, resolve_object
from finetune.errors import ConfigError, FinetuneError

NEEDED = {"model": "m", "data": "d", "output_dir": "o"}
FLAGS = [word for name in NEEDED for word in (f"--{name}", NEEDED[name])]


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_the_three_forms_say_the_same(tmp_path):
    expected = {
        "learning_rate": 2e-5,
        "data": ["a", "b"],
        "packing": False,
        "template": None,
        "curriculum": {"x": [1]},
    }
    files = {
        "a.json": '\ufeff{"learning_rate": 2e-5, "data": ["a", "b"], "packing": false,'
        ' "template": null, "curriculum": {"x": [1]}}',
        "b.yaml": "learning_rate: 2e-5\ndata: [a, b]\npacking: false\ntemplate: null\n"
        "curriculum: {x: [1]}\n",
        "d.py": '"""A run."""\nlearning_rate = 2e-5\ndata = ("a", "b")\npacking: bool = False\n'
        '# a comment\ntemplate = None\ncurriculum = {"x": (1,)}\n',
    }
    for name, text in files.items():
        assert read_file(write(tmp_path, name, text)) == expected, name


def test_values_are_those_of_yaml_1_2(tmp_path):
    """Aliases may be used, but not to multiply."""
    values = {
        "010": 10,
        "0o17": 15,
        "1:30": "1:30",
        ".5": 0.5,
        "+1.": 1.0,
        "2.E-5": 2e-5,
        "+2.0e-5": 2e-5,
        "'2e-5'": "2e-5",
        "": None,
        "模板": "模板",
    }
    for written, value in values.items():
        found = read_file(write(tmp_path, "a.yaml", f"x: {written}\n"))["x"]
        assert found == value and type(found) is type(value), written
    text = "a: &x {lr: 1, wd: 2}\nb:\n  <<: *x\n  lr: 3\nc: [*x, *x]\n"
    found = read_file(write(tmp_path, "a.yaml", text))
    assert found["b"] == {"lr": 3, "wd": 2} and found["c"] == [found["a"]] * 2


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


def test_refused_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text, line, words in (
        ("a.json", '{"a": 1,\n "a": 2}', "", "'a' is given twice"),
        ("a.json", '{"a": NaN}', "", "NaN is not a number"),
        ("a.json", '{"a": 1\n // why\n}', ":2", "JSON has no comments"),
        ("a.json", "[1]", "", "holds a list"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "", "not a number that can be read"),
        ("a.json", '{"a":' * 100_000, "", "nested too deeply"),
        ("a.json", '{"a": 1,}', ":1", "no comma follows the last"),
        ("a.yaml", "", "", "is empty"),
        ("a.yaml", "a: 1\nb: 2\na: 3\n", ":3", "'a' is given twice"),
        ("a.yaml", "a: \x00\n", "", "not valid YAML"),
        ("a.yaml", "a: 1\n  b: 2\n", ":2", "not valid YAML"),
        ("a.yaml", "a: !!python/object/apply:os.getcwd []\n", ":1", "not valid YAML"),
        ("a.yaml", "a: !!bool x\n", ":1", "'x' is no bool"),
        ("a.yaml", "a: &x {b: *x}\n", "", "contain itself"),
        ("a.yaml", BOMB, "", "aliases stand for more than 100,000 values"),
        ("a.yaml", "on: 1\n", ":1", "is not a text"),
        ("a.py", "a = 1\na = 2\n", ":2", "'a' is given twice"),
        ("a.py", "a = b'x'\n", ":1", "not a literal"),
        ("a.py", "a = \n", ":1", "not valid Python"),
        ("a.py", "a = {'b': 1, 'b': 2}\n", ":1", "'b' is given twice"),
        ("a.py", "a = 1\nimport os\n", ":2", "only assign values to names"),
        ("a.py", "a = 1\n\n\nb = a\n", ":4", "not a literal"),
        ("a.py", "a = __import__('pathlib').Path('touched').touch()\n", ":1", "not a literal"),
        ("a.py", "a = {[]: 2}\n", ":1", "not a literal"),
        ("a.toml", "a = 1", "", "must end in .json"),
        ("a.json", b'{"a": "\xff"}', "", "not UTF-8"),
    ):
        path = write(tmp_path, name, text)
        with pytest.raises(ConfigError) as caught:
            read_file(path)
        assert words in str(caught.value) and caught.value.fix
        assert caught.value.where == f"{path}{line}"
        assert not Path("touched").exists(), "files are never executed"


def test_files_that_cannot_be_read_and_files_of_other_tools(tmp_path):
    near = write(tmp_path, "zero3.json", "{}")
    for path, words in (
        (tmp_path / "zero_3.json", f"did you mean {near}?"),
        (tmp_path / "no" / "zero3.json", "does not exist either"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_file(path)
        assert words in str(caught.value) and str(path) in caught.value.where
    path = write(tmp_path, "run.yaml", "base_model: m\ndatasets:\n- path: a\n")  # Axolotl
    with pytest.raises(ConfigError, match="of another tool") as caught:
        resolve(["--config", str(path)], world_size=1)
    assert f"finetune convert {path} " in caught.value.fix


# ---------------------------------------------------------------- paths and texts


@pytest.mark.parametrize("given", ["~/out", "${HOME}/out"])
def test_home_is_expanded_in_every_path_setting(tmp_path, monkeypatch, given):
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = str(tmp_path / "out")
    values: dict = {name: given for name in PATH_SETTINGS if name in PreferenceConfig.model_fields}
    values["data"] = [given, {"path": given, "difficulty": "explain"}]
    file = write(tmp_path, "run.yaml", yaml.safe_dump(values))
    config = resolve(["--config", str(file)], world_size=1, model_class=PreferenceConfig).config
    named = {config.model, config.output_dir, config.cache_dir, config.template, config.resume}
    assert named | {each.path for each in (*config.sources, *config.valid_sources)} == {expected}
    flags = [*FLAGS, "--data", given, f"--output-dir={given}"]
    config = resolve(flags, world_size=1).config
    assert (config.output_dir, config.data) == (expected, (expected,))


def test_paths_that_cannot_be_expanded_or_held(monkeypatch):
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(ConfigError, match="output_dir names the variable NOT_SET_HERE"):
        resolve([*FLAGS, "--output-dir", "${NOT_SET_HERE}/x"], world_size=1)
    assert resolve([*FLAGS, "--data", "a$b.jsonl"], world_size=1).config.data == ("a$b.jsonl",)
    for change in ({"data": "a\0b"}, {"data": "a\ud800b"}, {"deepspeed": "a\0b"}):
        with pytest.raises(FinetuneError):
            resolve_object({**NEEDED, **change}, world_size=1)
    # PYTHONUTF8=0 with LC_ALL=C gives the bytes of a Chinese path as halves of surrogate pairs.
    model = "/模型".encode().decode("ascii", "surrogateescape")
    with pytest.raises(FinetuneError, match=r"not UTF-8(.|\n)*PYTHONUTF8=1"):
        resolve([*FLAGS, "--model", model], world_size=1)
