"""Data sets by name: from a cache that is made here as `datasets` makes it, without network."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pytest
from sample_rows import expand_paths

from finetune.config.paths import check_paths
from finetune.config.run_config import RunConfig
from finetune.data.reading.files import read_records
from finetune.errors import DataError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"prompt": f"q {number}", "completion": f"a {number}"} for number in range(5)]


def cached(cache: Path, config: str, splits: dict[str, list[dict[str, Any]]]) -> None:
    """As `load_dataset("owner/toy", config)` leaves it."""
    folder = cache / "owner___toy" / config / "0.0.0" / COMMIT
    folder.mkdir(parents=True)
    infos = datasets.SplitDict(dataset_name="toy")
    for name, rows in splits.items():
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(folder / f"toy-{name}.arrow", table.schema) as writer:
            writer.write_table(table)
        infos.add(datasets.SplitInfo(name, num_examples=len(rows), dataset_name="toy"))
    features = datasets.Features.from_arrow_schema(table.schema)
    info = datasets.DatasetInfo(
        features=features, splits=infos, config_name=config, dataset_name="toy"
    )
    info.write_to_directory(str(folder))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    cached(tmp_path / "cache", "default", {"train": ROWS, "test": ROWS[:2]})
    return tmp_path / "cache"


def records(given: str) -> list[Any]:
    return [record for path in expand_paths([given]) for _, record in read_records(path)]


def test_a_cached_data_set_is_read_by_name(cache: Path, monkeypatch):
    assert records("hub:owner/toy") == ROWS
    assert records(f"hub:owner/toy@{COMMIT}:test") == ROWS[:2]
    assert check_paths(RunConfig(model="gpt2", data="hub:owner/toy", output_dir="o")) == []
    tags = {"v1": COMMIT, "v2": COMMIT[::-1]}
    found = lambda self, name, revision: SimpleNamespace(sha=tags[revision])  # noqa: E731
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", found)
    assert records("hub:owner/toy@v1") == ROWS, "a tag is its commit"
    with pytest.raises(DataError, match="revision v2 is not cached, another one is"):
        expand_paths(["hub:owner/toy@v2"])
    cached(cache, "other", {"train": ROWS[3:]})
    assert records("hub:owner/toy/other") == ROWS[3:]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("hub:toy", "is no name of a data set"),
        ("hub:owner/toy:valid", "the data set cannot be loaded: Unknown split"),
        ("modelscope:./toy", "is no name of a data set"),
        ("hub:owner/toy@main", "the commit of revision main is not known"),
        (f"hub:owner/toy@{COMMIT[::-1]}", "cannot be loaded: revision .* is not cached"),
    ],
)
def test_what_is_not_there_is_said(cache: Path, given: str, said: str):
    with pytest.raises(DataError, match=said) as caught:
        expand_paths([given])
    assert given in caught.value.where


def test_a_local_folder_is_not_taken_for_a_data_set(cache: Path, tmp_path, monkeypatch):
    (tmp_path / "owner" / "toy").mkdir(parents=True)
    (tmp_path / "owner" / "toy" / "rows.jsonl").write_text('{"text": "local"}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="name of a local file or folder: owner/toy") as caught:
        expand_paths(["hub:owner/toy"])
    assert "./owner/toy" in caught.value.fix and records("./owner/toy") == [{"text": "local"}]


def test_modelscope_is_asked_as_its_page_says(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        without = lambda name: None if name == "modelscope" else find(name)  # noqa: E731
        patch.setattr(importlib.util, "find_spec", without)
        with pytest.raises(DataError, match="is not installed") as caught:
            expand_paths(["modelscope:owner/toy"])
    assert caught.value.fix == "pip install modelscope"
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    asked: list[Any] = []

    saved = SimpleNamespace(to_hf_dataset=lambda: datasets.load_from_disk(tmp_path / "saved"))
    load = lambda name, **options: asked.append((name, options)) or saved  # noqa: E731
    package = ModuleType("modelscope")
    package.__spec__ = importlib.util.spec_from_loader("modelscope", loader=None)
    monkeypatch.setitem(sys.modules, "modelscope", package)
    module = SimpleNamespace(MsDataset=SimpleNamespace(load=load))
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", module)
    assert records("modelscope:owner/toy/small@v2:test") == ROWS
    assert asked == [("owner/toy", {"subset_name": "small", "split": "test", "version": "v2"})]
