"""Bad input is refused with what, where and fix: exit code 2, no traceback, nothing written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import run_patches
from conftest import make_records
from launching import run_cli

from finetune.errors import ExitCode
from finetune.sft import main


@dataclass
class Place:
    """A folder of a user's own: what a case puts there is there before the command starts."""

    folder: Path
    model: Path
    data: Path
    cached: Path

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def write(self, name: str, content: str | list[Any]) -> Path:
        """A file; of a list, records become JSON."""
        if isinstance(content, list):
            rows = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in content]
            content = "".join(rows)
        path = self.folder / name
        path.write_text(content, encoding="utf-8")
        return path

    def rows(self, changes: Mapping[int, Any]) -> Path:
        """Twelve good records, but for these; None takes a record out."""
        rows = [changes.get(number, row) for number, row in enumerate(make_records(12))]
        return self.write("bad.jsonl", [row for row in rows if row is not None])

    def copy_model(self, **values: Any) -> Path:
        """The model with other values in its config.json."""
        model = shutil.copytree(self.model, self.folder / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | values))
        return model

    def flags(self, **changes: Any) -> list[str]:
        """A run that is fine, with these changes; None takes a flag out."""
        materials = run_helpers.Materials(self.cached, self.model, self.data, self.data)
        output = changes.pop("output_dir", self.output)
        words: list[str] = []
        for name, value in materials.settings(output, **{"max_steps": 2} | changes).items():
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return words

    def listing(self) -> dict[str, bytes]:
        """Everything in the folder, with the content of files."""
        paths = sorted(self.folder.rglob("*"))
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, tiny_data: Path, cached: Path) -> Place:
    (tmp_path / "user").mkdir()
    return Place(tmp_path / "user", tiny_model, tiny_data, cached)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cached")


@pytest.fixture
def call(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call `main` here; returns the exit code and what was printed."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    before = dict(os.environ)

    def run(flags: list[str]) -> tuple[int, str]:
        monkeypatch.chdir(place.folder)
        code = main(flags)
        printed = capsys.readouterr()
        return int(code), printed.out + printed.err

    yield run
    os.environ.clear()
    os.environ.update(before)


def assert_refused(code: int, printed: str, *texts: str) -> None:
    assert code == ExitCode.REFUSED, printed
    assert "Traceback" not in printed and "[ERROR]" in printed and "fix:" in printed
    for text in texts:
        assert text in printed, f"{text!r} is not in:\n{printed}"
    assert "where:" in printed or ".jsonl:" in printed  # bad rows stand in the list as file:line


def test_wrong_settings_are_refused_before_torch_is_imported(place: Place):
    config = place.write("run.yaml", "max_step: 4\nlogging_steps: 0\n")
    missing = place.flags(data=["trian.jsonl", place.data], model=place.folder / "no/model")
    before = place.listing()
    for flags, texts in (
        (
            ["--config", str(config), *place.flags(dtype="bf16")],
            "max_steps?|logging_steps is 0|3. ",
        ),
        (missing, "trian.jsonl does not exist|no/model does not exist|2. |--data|--model"),
    ):
        options = {"launcher": "python", "launcher_args": ["-X", "importtime"]}
        result = run_cli(flags, cwd=place.folder, **options)
        lines = result.stderr.splitlines()
        loaded = {line.rpartition("|")[2].strip() for line in lines if "import time:" in line}
        assert not loaded & {"torch", "transformers", "deepspeed", "datasets"}
        said = [line for line in lines if not line.startswith("import time:")]
        assert_refused(result.returncode, "\n".join(said), *texts.split("|"))
        assert place.listing() == before


# ---------------------------------------------------------------- found in data, tokenizer or model


NO_ANSWER = {"instruction": "q", "difficulty": "explain"}


def without(name: str) -> Callable[[Place], dict[str, Any]]:
    """Without a file of the model."""

    def change(place: Place) -> dict[str, Any]:
        model = place.copy_model()
        (model / name).unlink()
        return {"model": model}

    return change


def without_a_shard(place: Place) -> dict[str, Any]:
    model, names = place.copy_model(), [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    (model / "model.safetensors").rename(model / names[0])
    index = {"metadata": {}, "weight_map": dict(zip("ab", names, strict=True))}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return {"model": model}


def without_samples(place: Place) -> dict[str, Any]:
    data = [place.data, place.write("empty.jsonl", [NO_ANSWER])]
    return {"data": data, "data_weights": [1, "natural"], "on_bad_row": "drop"}


def thesis(place: Place) -> dict[str, Any]:
    place.output.mkdir()
    (place.output / "thesis.tex").write_text("years of work")
    return {}


def empty_checkpoint(place: Place) -> dict[str, Any]:
    (place.folder / "checkpoint-7").mkdir()
    return {"resume": place.folder / "checkpoint-7"}


# What a case changes about a run that is fine, and what the refusal says.
CASES: dict[str, tuple[Callable[[Place], dict[str, Any]], str]] = {
    "broken rows": (
        lambda p: {"data": p.rows({4: '{"instruction": "half\n', 7: NO_ANSWER})},
        "2 of 12 records|bad.jsonl:5: broken JSON|bad.jsonl:8: no answer|--on-bad-row drop",
    ),
    "difficulty without rows": (
        lambda p: {"data": p.rows(dict.fromkeys(range(2, 12, 3)))},
        "difficulty 'topology' has weight|no sample of it|weight 0",
    ),
    "a source without samples": (without_samples, "no sample of this source is left to be mixed"),
    "short cutoff": (lambda p: {"cutoff_len": 8}, "cutoff_len 8 is too short|the chat template"),
    "no configuration": (without("config.json"), "configuration cannot be read|user/model"),
    "no weights": (without("model.safetensors"), "safetensors|user/model"),
    "no second shard": (without_a_shard, "1 of 2 shards, first model-00002-of-00002.safetensors"),
    "few embeddings": (
        lambda p: {"model": p.copy_model(vocab_size=300)},
        "only 300 embeddings|ids",
    ),
    "architecture": (
        lambda p: {"model": p.copy_model(model_type="qwen33")},
        "cannot be read|qwen33",
    ),
    "module": (lambda p: {"lora_target_modules": "v_prj"}, "v_prj|matches no linear module|v_proj"),
    "no such device": (lambda p: {"device_type": "mps"}, "'mps' is not available|--device-type"),
    "float16 on a CPU": (lambda p: {"dtype": "float16"}, "float16|--dtype|bfloat16"),
    "another's folder": (thesis, "not empty and not a run|user/out|--output-dir"),
    "no checkpoint": (empty_checkpoint, "checkpoint is not valid|checkpoint-7"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_is_written(case: str, place: Place, call):
    change, texts = CASES[case]
    flags = place.flags(**change(place))
    before = place.listing()
    assert_refused(*call(flags), *texts.split("|"))
    assert place.listing() == before


def test_ranks_are_refused_together_and_one_speaks_or_alone_and_say_why(place: Place):
    """One that was refused alone ended without a word, and the others waited for it."""
    change, texts = CASES["broken rows"]
    flags = place.flags(**change(place))
    before = place.listing()
    settings = {"output_dir": str(place.folder.parent / "ranks")}
    wanted = {"patch": run_patches.long_quiet, "patch_arguments": (600.0,)}
    ranks = run_helpers.start(settings, 2, arguments=flags, **wanted)
    ranks.processes[0].join(run_helpers.DEFAULT_TIMEOUT_SECONDS)
    ranks.processes[1].terminate()  # as an elastic launcher does when one has exited
    assert ranks.wait()[0] == 2
    printed = ranks.output()
    assert printed.count("[ERROR]") == printed.count(texts.split("|")[1]) == 1, printed
    assert "Traceback" not in printed and place.listing() == before

    one_rank = (1, "ACCELERATE_USE_DEEPSPEED", "true")
    wanted = {"patch": run_patches.environment_of_one_rank, "patch_arguments": one_rank}
    ranks = run_helpers.start(settings, 2, arguments=place.flags(), **wanted)
    ranks.processes[1].join(run_helpers.DEFAULT_TIMEOUT_SECONDS)
    ranks.kill()
    assert ranks.processes[1].exitcode == 2
    assert "[ERROR] rank 1: the launcher asked for DeepSpeed" in ranks.output()


# ---------------------------------------------------------------- a folder that holds a run


def test_a_folder_with_a_run_takes_that_run_alone(place: Place, tmp_path: Path, call):
    """The micro-batch and packing are not the run."""
    run_helpers.train({"output_dir": str(place.output)}, arguments=place.flags())
    shutil.rmtree(tmp_path / "user/out.side")
    other = place.write("other.jsonl", make_records(60, seed=9))
    before = place.listing()
    for changes in ({}, {"micro_batch_size": 4, "packing": "false"}):
        code, printed = call(place.flags(**changes))
        assert code == 0 and "finished" in printed and str(place.output) in printed
        assert "[ERROR]" not in printed and place.listing() == before
    for changes, texts in (
        ({"learning_rate": 1e-3}, "learning_rate: 0.01 in the folder, 0.001 now"),
        ({"max_steps": 3}, "total_steps: 2 in the folder, 3 now"),
        ({"lora_r": 8, "seed": 1}, "lora_r: 4 in the folder, 8 now|seed: 42 in the folder, 1 now"),
        ({"data": other}, "data:"),
        ({"curriculum_seed": 7}, "schedule:"),
        ({"resume": "never"}, "holds a run already|--resume is never"),
        (
            {"resume": place.output / "checkpoint-2", "output_dir": "new", "lora_r": 8},
            "lora_r: 4 in the folder, 8 now|checkpoint-2",
        ),
    ):
        code, printed = call(place.flags(**changes))
        assert_refused(code, printed, *texts.split("|"), str(place.output), "--output-dir")
        assert "not the run in the folder" in printed or "resume" in changes
        assert place.listing() == before
    (place.output / "run_identity.json").write_text('{"kind": ')
    before = place.listing()
    assert_refused(*call(place.flags()), "run_identity.json", "broken")
    assert place.listing() == before
