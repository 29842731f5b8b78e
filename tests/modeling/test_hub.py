"""Models by name: whose hub they come from, and the commit that a run keeps to."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import run_helpers
import torch
import yaml

from finetune.config.paths import split_revision
from finetune.config.run_config import RunConfig
from finetune.data.encoding.templates import read_tokenizer
from finetune.errors import ConfigError
from finetune.inference.loading import Source, find_source, load_weights
from finetune.modeling.adapter import add_adapter
from finetune.modeling.hub import from_modelscope, recorded_model, with_model_found
from finetune.modeling.model_config import load_model_config, weights_identity
from finetune.modeling.pretrained import load_model
from finetune.planning.inputs import shape_of_base_model
from finetune.storage.run_folder import CONFIG_NAME, write_identity
from finetune.training.trainer import adapter_writer

NAME = "owner/tiny"
FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hub")
    return {
        commit: run_helpers.make_model(folder / commit, seed=seed)
        for seed, commit in enumerate((FIRST, SECOND))
    }


@pytest.fixture
def cache(models, tmp_path, monkeypatch) -> Path:
    """A cache of Hugging Face's form with two commits: `main` is the first, `v2` the second."""
    home = tmp_path / "cache"
    repository = home / f"models--{NAME.replace('/', '--')}"
    for commit, model in models.items():
        shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(FIRST)
    (repository / "refs" / "v2").write_text(SECOND)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return repository


def config(output_dir: Path, model: str = NAME, **changes: Any) -> RunConfig:
    return RunConfig(model=model, data=("unused",), output_dir=str(output_dir), lora_r=2, **changes)


def test_a_run_keeps_its_commit_when_the_branch_moves(cache, tmp_path):
    assert split_revision("./folder@home/model") == ("./folder@home/model", None)
    run, wanted = tmp_path / "run", config(tmp_path / "run")
    run.mkdir()
    found = with_model_found(wanted)
    identity = weights_identity(found.model)
    assert identity == f"{NAME}@{FIRST}"
    write_identity(run, {"kind": "sft", "weights": identity})
    (run / CONFIG_NAME).write_text(yaml.safe_dump({"model": NAME}))
    (cache / "refs" / "main").write_text(SECOND)
    assert with_model_found(wanted).model == f"{NAME}@{FIRST}"
    assert with_model_found(config(tmp_path / "other")).model == f"{NAME}@{SECOND}"
    assert with_model_found(config(run, resume="never")).model == f"{NAME}@{SECOND}"
    elsewhere = config(tmp_path / "other", resume=str(run / "checkpoint-2"))
    assert with_model_found(elsewhere).model == recorded_model(run, NAME) == f"{NAME}@{FIRST}"
    # Asked for by another name it is another model, which the identity then refuses.
    assert with_model_found(config(run, f"{NAME}@main")).model == f"{NAME}@{SECOND}"


def test_weights_tokenizer_and_adapter_are_of_that_commit(cache, models, tmp_path):
    found = with_model_found(config(tmp_path / "run", f"{NAME}@v2"))
    given = {"model_dtype": torch.float32, "zero3": False}
    model = load_model(found, **given)
    expected = list(load_model(config(tmp_path, str(models[SECOND])), **given).parameters())
    assert all(map(torch.equal, model.parameters(), expected))
    assert len(read_tokenizer(found.model)) == len(read_tokenizer(str(models[SECOND])))
    adapted = add_adapter(model, found, one_dtype=False)
    adapter_writer(adapted, {n: p for n, p in adapted.named_parameters() if "lora" in n})(tmp_path)
    source = Source(find_source(str(tmp_path)).base, None)
    assert source.base == f"{NAME}@{SECOND}"
    again = load_weights(source, torch.device("cpu"), "float32", trust_remote_code=False)
    assert all(map(torch.equal, again.parameters(), expected))


@pytest.fixture
def modelscope(models, monkeypatch) -> list[tuple[str, str, bool]]:
    """A module that behaves as its documented `snapshot_download`; the calls that it got."""
    calls: list[tuple[str, str, bool]] = []

    def download(model_id: str, revision: str = "master", *, local_files_only: bool = False) -> str:
        calls.append((model_id, revision, local_files_only))
        return str({"master": models[FIRST], "v2": models[SECOND]}[revision])

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=download))
    return calls


def test_a_model_of_modelscope_is_a_folder(modelscope, models, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    first, second = str(models[FIRST]), str(models[SECOND])
    for asked, folder in ((NAME, first), (f"{NAME}@v2", second), (first, first)):
        assert with_model_found(config(tmp_path, asked, hub="modelscope")).model == folder
    assert modelscope == [(NAME, "master", True), (NAME, "v2", True)]
    with pytest.raises(ConfigError, match="ModelScope does not give owner/tiny@v9: 'v9'"):
        from_modelscope(f"{NAME}@v9", "modelscope")
    # where the setting is auto, the variable chooses
    assert from_modelscope(NAME) == NAME
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    assert from_modelscope(NAME) == find_source(NAME).base == first
    assert from_modelscope(NAME, "huggingface") == NAME
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match="not installed"):
        from_modelscope(NAME, "modelscope")


def test_a_plan_reads_the_sizes_of_the_revision(cache, tmp_path, monkeypatch):
    """Of a commit, a branch, what `main` is; without a record of that, of any."""
    monkeypatch.setenv("HF_HUB_CACHE", str(cache.parent))
    path = cache / "snapshots" / SECOND / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 96}))

    def width(name: str) -> int:
        return shape_of_base_model(config(tmp_path / "run", name)).intermediate

    widths = {"": 64, f"@{FIRST}": 64, f"@{SECOND}": 96, "@v2": 96, "@main": 64}
    assert {end: width(f"{NAME}{end}") for end in widths} == widths
    for unknown in (f"{NAME}@v3", str(tmp_path / "no/such/folder")):
        with pytest.raises(ConfigError, match="sizes of .* are not known here"):
            width(unknown)
    shutil.rmtree(cache / "refs")
    assert width(NAME) in (64, 96)


def test_a_name_that_is_nearly_a_folders_is_answered_with_it(tmp_path, monkeypatch, caplog):
    (tmp_path / "mymodel").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        load_model_config("mymodle")
    assert caught.value.where == "mymodle, which is no folder here; did you mean 'mymodel'?"
    # Said before the hub is asked, which takes a minute where there is none.
    said = "mymodle is no folder here; did you mean 'mymodel'? The hub is asked for it"
    assert said in caplog.text
