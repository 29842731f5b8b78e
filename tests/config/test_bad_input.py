"""Bad input is refused with what, where and fix: exit code 2, no traceback, nothing written.

Wrong settings are refused before torch is imported: by the real command here, and each kind of them
in the other files of this folder. What is found in data, tokenizer, model and output folder is
refused by `main` in this process, and by two ranks together, of which one says it.
"""

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

from finetune.errors import ExitCode, FinetuneError


@dataclass
class Place:
    """A folder of a user's own: what a case puts there is there before the command starts."""

    folder: Path
    model: Path
    data: Path
    cache: Path

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

    def rows(self, changes: Mapping[int, Any], count: int = 12) -> Path:
        """Good records, but for these; None takes a record out."""
        rows = [changes.get(number, row) for number, row in enumerate(make_records(count))]
        return self.write("bad.jsonl", [row for row in rows if row is not None])

    def copy_model(self, **values: Any) -> Path:
        """The model with other values in its config.json."""
        model = shutil.copytree(self.model, self.folder / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | values))
        return model

    def flags(self, **changes: Any) -> list[str]:
        """A run that is fine, with these changes; None takes a flag out."""
        given = {
            "model": self.model,
            "data": self.data,
            "output_dir": self.output,
            "cache_dir": self.cache,
            "device_type": "cpu",
            "dtype": "float32",
            "max_steps": 2,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "cutoff_len": 128,
            "report_to": "none",
        } | changes
        words: list[str] = []
        for name, value in given.items():
            if value is not None:
                values = value if isinstance(value, list) else [value]
                words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return words

    def listing(self) -> dict[str, bytes]:
        """Everything in the folder, with the content of files."""
        paths = sorted(self.folder.rglob("*"))
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, tiny_data: Path, cache: Path) -> Place:
    (tmp_path / "user").mkdir()
    return Place(tmp_path / "user", tiny_model, tiny_data, cache)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def call(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call `main` here; returns the exit code and what was printed."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    before = dict(os.environ)

    def run(flags: list[str]) -> tuple[int, str]:
        from finetune.sft import main

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
    config = place.write("run.yaml", "max_step: 4\nlora_r: 0\n")
    missing = place.flags(data=["trian.jsonl", place.data], model=place.folder / "no/model")
    before = place.listing()
    for flags, texts in (
        (["--config", str(config), *place.flags(dtype="bf16")], "max_steps?|lora_r is 0|3. "),
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


def row(**changes: str | None) -> dict[str, str]:
    """A record; None takes a field out."""
    made = {"instruction": "q", "output": "a", "difficulty": "explain"} | changes
    return {name: value for name, value in made.items() if value is not None}


NO_ANSWER = row(output=None)


def without(name: str) -> Callable[[Place], dict[str, Any]]:
    """Without some of the model's files."""

    def change(place: Place) -> dict[str, Any]:
        model = place.copy_model()
        for path in model.glob(name):
            path.unlink()
        return {"model": model}

    return change


def without_a_shard(place: Place) -> dict[str, Any]:
    model, names = place.copy_model(), [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    (model / "model.safetensors").rename(model / names[0])
    index = {"metadata": {}, "weight_map": dict(zip("ab", names, strict=True))}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return {"model": model}


def broken_tokenizer(place: Place) -> dict[str, Any]:
    model = place.copy_model()
    (model / "tokenizer.json").write_text("{")
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
    "more than ten bad rows": (
        lambda p: {"data": p.rows(dict.fromkeys(range(12, 37), NO_ANSWER), 37)},
        "25 of 37 records|bad.jsonl:13: |bad.jsonl:22: |and 15 more",
    ),
    "unknown difficulty": (
        lambda p: {"data": p.rows({3: row(difficulty="reasonning")})},
        "bad.jsonl:4: |reasonning|reasoning",
    ),
    "difficulty without rows": (
        lambda p: {"data": p.rows(dict.fromkeys(range(2, 12, 3)))},
        "difficulty 'topology' has weight|no sample of it|weight 0",
    ),
    "some rows without difficulty": (
        lambda p: {"data": p.rows({2: row(difficulty=None), 9: row(difficulty=None)})},
        "2 of 12 records|no difficulty|bad.jsonl:3: |bad.jsonl:10: |'difficulty'",
    ),
    "no rows": (lambda p: {"data": p.write("empty.jsonl", "\n\n")}, "no record|empty.jsonl"),
    "only bad rows": (
        lambda p: {"data": p.write("bad.jsonl", [NO_ANSWER, "nothing\n"]), "on_bad_row": "drop"},
        "no record is left|1 no answer|1 broken JSON",
    ),
    "a source without samples": (without_samples, "no sample of this source is left to be mixed"),
    "bad validation data": (
        lambda p: {"valid_data": p.write("valid.jsonl", [NO_ANSWER])},
        "valid.jsonl:1: |no answer",
    ),
    "unknown template": (lambda p: {"template": "chatlm"}, "chatlm|chatml"),
    "broken template": (lambda p: {"template": p.write("x.jinja", "{% for m")}, "x.jinja|template"),
    "short cutoff": (lambda p: {"cutoff_len": 8}, "cutoff_len 8 is too short|the chat template"),
    "no template": (
        without("chat_template.jinja"),
        "no chat template|--template|alpaca|user/model",
    ),
    "no tokenizer": (without("tokenizer*"), "the model folder has no tokenizer|user/model"),
    "no configuration": (without("config.json"), "configuration cannot be read|user/model"),
    "no weights": (without("model.safetensors"), "safetensors|user/model"),
    "broken tokenizer": (broken_tokenizer, "tokenizer cannot be loaded|user/model"),
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
    """One that was refused alone ended without a word, and the others waited for it until their
    time was over.
    """
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


def test_bad_rows_can_be_dropped_and_are_counted(place: Place, call):
    data = place.rows({4: "{\n", 7: NO_ANSWER}, 30)
    code, printed = call(place.flags(data=data, on_bad_row="drop", max_steps=1, log_samples="true"))
    assert code == 0 and "broken JSON" in printed and "no answer" in printed, printed
    assert not {4, 7} & set(sum(run_helpers.sample_ids(place.output), []))


def test_finetune_run_raises_with_what_where_and_fix(place: Place, monkeypatch):
    import finetune

    monkeypatch.setattr(os, "environ", os.environ.copy())
    settings = {"model": str(place.model), "data": "nowhere", "output_dir": str(place.output)}
    with pytest.raises(FinetuneError) as caught:
        finetune.run(settings)
    assert "nowhere" in caught.value.what and caught.value.fix and caught.value.where
    with pytest.raises(FinetuneError, match="did you mean"):
        finetune.run(settings | {"modle": "m"})
    assert not place.output.exists()


# ---------------------------------------------------------------- a folder that holds a run


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path, cache: Path
) -> Path:
    """The folder of a finished run of two steps."""
    place = Place(tmp_path_factory.mktemp("finished"), tiny_model, tiny_data, cache)
    run_helpers.train({"output_dir": str(place.output)}, arguments=place.flags())
    return place.output


@pytest.fixture
def with_run(place: Place, finished: Path) -> Place:
    shutil.copytree(finished, place.output)
    return place


def test_a_finished_run_says_so_whatever_executes_it(with_run: Place, call):
    """The micro-batch and packing are not the run."""
    before = with_run.listing()
    for changes in ({}, {"micro_batch_size": 4, "packing": "false"}):
        code, printed = call(with_run.flags(**changes))
        assert code == 0 and "finished" in printed and str(with_run.output) in printed
        assert "[ERROR]" not in printed and with_run.listing() == before


def test_another_run_in_the_folder_is_refused(with_run: Place, call):
    other = with_run.write("other.jsonl", make_records(60, seed=9))
    before = with_run.listing()
    for changes, texts in (
        ({"learning_rate": 1e-3}, "learning_rate: 0.0088 in the folder, 0.001 now"),
        ({"max_steps": 3}, "total_steps: 2 in the folder, 3 now"),
        ({"lora_r": 4, "seed": 1}, "lora_r: 16 in the folder, 4 now|seed: 42 in the folder, 1 now"),
        ({"data": other}, "data:"),
        ({"curriculum_seed": 7}, "schedule:"),
        ({"resume": "never"}, "holds a run already|--resume is never"),
        (
            {"resume": with_run.output / "checkpoint-2", "output_dir": "new", "lora_r": 4},
            "lora_r: 16 in the folder, 4 now|checkpoint-2",
        ),
    ):
        code, printed = call(with_run.flags(**changes))
        assert_refused(code, printed, *texts.split("|"), str(with_run.output), "--output-dir")
        assert "not the run in the folder" in printed or "resume" in changes
        assert with_run.listing() == before
    (with_run.output / "run_identity.json").write_text('{"kind": ')
    before = with_run.listing()
    assert_refused(*call(with_run.flags()), "run_identity.json", "broken")
    assert with_run.listing() == before
