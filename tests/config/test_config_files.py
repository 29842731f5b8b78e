"""Reading files: what is accepted, what is refused and where it says the mistake is."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.config.files import read_file
from finetune.config.resolution import resolve
from finetune.errors import ConfigError


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    error = caught.value
    assert error.what and error.where.startswith(str(path)) and error.fix
    return error


def test_the_three_forms_say_the_same(tmp_path: Path) -> None:
    expected = {
        "learning_rate": 2e-5,
        "data": ["a", "b"],
        "packing": False,
        "template": None,
        "curriculum": {"x": [1]},
    }
    files = {
        "a.json": (
            '{"learning_rate": 2e-5, "data": ["a", "b"], "packing": false, "template": null, '
            '"curriculum": {"x": [1]}}'
        ),
        "b.yaml": (
            "learning_rate: 2e-5\ndata: [a, b]\npacking: false\ntemplate: null\ncurriculum: {x:"
            " [1]}\n"
        ),
        "c.YML": (
            "learning_rate: 0.00002\ndata:\n- a\n- b\npacking: no\ntemplate: ~\ncurriculum:\n  x:"
            " [1]\n"
        ),
        "d.py": (
            '"""A run."""\nlearning_rate = 2e-5\ndata = ("a", "b")\npacking: bool = False\n# a'
            ' comment\ntemplate = None\ncurriculum = {"x": (1,)}\n'
        ),
    }
    for name, text in files.items():
        assert read_file(write(tmp_path, name, text)) == expected, name


@pytest.mark.parametrize("number", ["2e-5", "2E-5", "2.e-5", "2.0e-5", "+2e-5", "0.2e-4", "200e-7"])
def test_yaml_numbers_with_an_exponent_are_numbers(tmp_path: Path, number: str) -> None:
    assert read_file(write(tmp_path, "a.yaml", f"x: {number}"))["x"] == pytest.approx(
        2e-5, rel=1e-12
    )


@pytest.mark.parametrize("text", ["e5", "v2e-5", "2e-5x", "'2e-5'", "2e"])
def test_yaml_texts_stay_texts(tmp_path: Path, text: str) -> None:
    assert read_file(write(tmp_path, "a.yaml", f"x: {text}"))["x"] == text.strip("'")


def test_yaml_anchors_and_merges(tmp_path: Path) -> None:
    text = "a: &x {lr: 1, wd: 2}\nb:\n  <<: *x\n  lr: 3\nc: *x\n"
    found = read_file(write(tmp_path, "a.yaml", text))
    assert found["b"] == {"lr": 3, "wd": 2} and found["c"] == found["a"]


def test_byte_order_mark_and_chinese(tmp_path: Path) -> None:
    assert read_file(write(tmp_path, "a.json", '\ufeff{"template": "模板"}')) == {
        "template": "模板"
    }


@pytest.mark.parametrize(
    ("name", "text", "line", "words"),
    [
        ("a.json", '{"a": 1,\n "a": 2}', "", "'a' is given twice"),
        ("a.json", '{"a": {"b": 1, "b": 1}}', "", "'b' is given twice"),
        ("a.json", '{"a": NaN}', "", "NaN is not a number"),
        ("a.json", '{"a": -Infinity}', "", "not a number"),
        ("a.json", '{"a": 1\n // why\n}', ":2", "JSON has no comments"),
        ("a.json", "{\n'a': 1}", ":2", "double quotes"),
        ("a.json", '{"a": 1,}', ":1", "no comma follows the last"),
        ("a.json", "", ":1", "fix the JSON"),
        ("a.json", "[1]", "", "holds a list"),
        ("a.json", "null", "", "is empty"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "", "not a number that can be read"),
        ("a.json", '{"a":' * 100_000, "", "nested too deeply"),
        ("a.yaml", "", "", "is empty"),
        ("a.yaml", "- 1", "", "holds a list"),
        ("a.yaml", "a: 1\nb: 2\na: 3\n", ":3", "'a' is given twice"),
        ("a.yaml", "a:\n  b: 1\n  b: 2\n", ":3", "'b' is given twice"),
        ("a.yaml", "a: 1\n  b: 2\n", ":2", "not valid YAML"),
        ("a.yaml", "a:\n\t- 1\n", ":2", "not valid YAML"),
        ("a.yaml", "a: 1\n---\nb: 2\n", ":2", "not valid YAML"),
        ("a.yaml", "a: !!python/object/apply:os.getcwd []\n", ":1", "not valid YAML"),
        ("a.yaml", "a: &x {b: *x}\n", "", "not valid YAML"),
        ("a.yaml", "on: 1\n", ":1", "is not a text"),
        ("a.yaml", "1: 1\n", ":1", "is not a text"),
        ("a.yaml", "a: \x00\n", "", "not valid YAML"),
        ("a.py", "a = 1\na = 2\n", ":2", "'a' is given twice"),
        ("a.py", "a = {'b': 1, 'b': 2}\n", ":1", "'b' is given twice"),
        ("a.py", "a = 1\nimport os\n", ":2", "only assign values to names"),
        ("a.py", "a = 1\n\n\nb = a\n", ":4", "not a literal"),
        ("a.py", "a = 2 * 1024\n", ":1", "not a literal"),
        ("a.py", "a = open('x')\n", ":1", "not a literal"),
        ("a.py", "a = {1, 2}\n", ":1", "not a literal"),
        ("a.py", "a = b'x'\n", ":1", "not a literal"),
        ("a.py", "a = {1: 2}\n", ":1", "not a literal"),
        ("a.py", "a = {[]: 2}\n", ":1", "not a literal"),
        ("a.py", "a = f'{1}'\n", ":1", "not a literal"),
        ("a.py", "a, b = 1, 2\n", ":1", "only assign"),
        ("a.py", "a = b = 1\n", ":1", "only assign"),
        ("a.py", "a.b = 1\n", ":1", "only assign"),
        ("a.py", "a += 1\n", ":1", "only assign"),
        ("a.py", "a: int\n", ":1", "only assign"),
        ("a.py", "if True:\n    a = 1\n", ":1", "only assign"),
        ("a.py", "print(1)\n", ":1", "only assign"),
        ("a.py", "a = \n", ":1", "not valid Python"),
        ("a.py", "a = 1\x00\n", "", "not valid Python"),
        ("a.toml", "a = 1", "", "must end in .json"),
        ("a", "{}", "", "must end in .json"),
        ("a.json", b'{"a": "\xff"}', "", "not UTF-8"),
    ],
)
def test_refused_files(tmp_path: Path, name: str, text: str | bytes, line: str, words: str) -> None:
    path = write(tmp_path, name, text)
    error = refused(path)
    assert words in str(error)
    assert error.where == f"{path}{line}"


@pytest.mark.parametrize(
    "text",
    [
        "model_name_or_path: m\nstage: sft\ndataset: a\n",  # LLaMA-Factory
        "base_model: m\ndatasets:\n- path: a\n",  # Axolotl
        "model_name_or_path: m\ndataset_name: a\n",  # TRL
    ],
)
def test_a_run_file_of_another_tool_is_answered_with_convert_alone(
    tmp_path: Path, text: str
) -> None:
    path = write(tmp_path, "run.yaml", text)
    with pytest.raises(ConfigError) as caught:
        resolve(["--config", str(path)], world_size=1)
    assert (
        "of another tool" in caught.value.what and f"finetune convert {path} " in caught.value.fix
    )


def test_python_files_are_never_executed(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    path = write(
        tmp_path, "a.py", f"a = 1\nb = __import__('pathlib').Path({str(touched)!r}).touch()\n"
    )
    assert refused(path).where == f"{path}:2"
    assert not touched.exists()


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "zero3.json", "{}")
    assert f"did you mean {tmp_path / 'zero3.json'}?" in refused(tmp_path / "zero_3.json").fix
    assert "does not exist either" in refused(tmp_path / "no" / "zero3.json").fix
    assert "cannot be read" in refused(tmp_path).what
