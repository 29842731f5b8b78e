"""Settings as people write them: numbers of YAML 1.2, aliases and tags, `~` and variables in paths,
texts that nothing can hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.config.files import read_file
from finetune.config.preference_config import PreferenceConfig
from finetune.config.resolution import PATH_SETTINGS, resolve, resolve_object
from finetune.errors import ConfigError, FinetuneError


def read(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return read_file(path)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("-7", -7),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("2e-5", 2e-5),
        ("1.5", 1.5),
        (".5", 0.5),
        ("+1.", 1.0),
        ("1:30.5", "1:30.5"),
        ("5%", "5%"),
        ("-", None),
        ("no", False),
    ],
)
def test_numbers_are_those_of_yaml_1_2(tmp_path: Path, written: str, value: Any) -> None:
    found = read(tmp_path, f"x: {written}\n" if written != "-" else "x:\n")["x"]
    assert found == value and type(found) is type(value)


def test_aliases_may_be_used_and_not_multiplied(tmp_path: Path) -> None:
    assert read(tmp_path, "a: &a [1, 2]\nb: [*a, *a]\n")["b"] == [[1, 2], [1, 2]]
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    with pytest.raises(ConfigError, match="aliases stand for more than 100,000 values"):
        read(tmp_path, "\n".join(lines))
    with pytest.raises(ConfigError, match="contain itself"):
        read(tmp_path, "a: &a [*a]\n")


@pytest.mark.parametrize(
    "tagged", ["!!bool x", "!!int ''", "!!timestamp x", "!!float x", "!!python/name:os.system"]
)
def test_a_value_that_does_not_fit_its_tag_is_refused(tmp_path: Path, tagged: str) -> None:
    with pytest.raises(ConfigError):
        read(tmp_path, f"x: {tagged}\n")


@pytest.mark.parametrize("loss", [{"a": 1}, ["dpo"], 3, None])
def test_a_loss_that_is_no_name_is_refused(loss: Any) -> None:
    with pytest.raises(FinetuneError, match="loss"):
        resolve_object(
            {"model": "m", "data": "d", "output_dir": "o", "loss": loss},
            world_size=1,
            model_class=PreferenceConfig,
        )


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize("given", ["~/out", "$HOME/out", "${HOME}/out"])
def test_home_is_expanded_in_every_path_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = str(tmp_path / "out")
    values = {name: given for name in PATH_SETTINGS if name in PreferenceConfig.model_fields}
    values["data"] = [given, {"path": given, "difficulty": "explain"}]  # type: ignore[assignment]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    from_file = resolve(["--config", str(file)], world_size=1, model_class=PreferenceConfig).config
    flags = ["--model", given, "--data", given, f"--output-dir={given}", f"--cache-dir={given}"]
    from_flags = resolve(flags, world_size=1, model_class=PreferenceConfig).config
    for config in (from_file, from_flags):
        assert config.model == config.output_dir == config.cache_dir == expected
        assert {source.path for source in config.sources} == {expected}
    assert from_file.template == from_file.resume == expected
    assert {source.path for source in from_file.valid_sources} == {expected}


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(ConfigError, match="output_dir names the variable NOT_SET_HERE"):
        resolve(["--model", "m", "--data", "d", "--output-dir", "${NOT_SET_HERE}/x"], world_size=1)
    given = ["--model", "m", "--data", "a$b.jsonl", "--output-dir", "o"]
    config = resolve(given, world_size=1).config
    assert config.data == ("a$b.jsonl",)


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"])
@pytest.mark.parametrize("name", ["model", "data", "output_dir", "deepspeed", "optimizer"])
def test_texts_that_nothing_can_hold_are_refused(text: str, name: str) -> None:
    with pytest.raises(FinetuneError):
        resolve_object({"model": "m", "data": "d", "output_dir": "o", name: text}, world_size=1)


def test_bytes_that_this_python_does_not_decode_are_named() -> None:
    """PYTHONUTF8=0 with LC_ALL=C gives the bytes of a Chinese path as halves of surrogate pairs."""
    model = "/模型".encode().decode("ascii", "surrogateescape")
    with pytest.raises(FinetuneError, match="not UTF-8") as refused:
        resolve(["--model", model, "--data", "d", "--output-dir", "o"], world_size=1)
    assert "PYTHONUTF8=1" in str(refused.value)
