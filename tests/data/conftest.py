"""What tests of data share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_models import family

from finetune.data.dataset import prepare_samples
from finetune.data.samples import Samples


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., Samples]:
    """`prepare_samples` of some files, cut to 64 tokens, in this process."""

    def call(*sources: Any, **options: Any) -> Samples:
        options = {"cutoff_len": 64, "cache_dir": tmp_path / "cache", "num_proc": 1} | options
        return prepare_samples(sources, options.pop("tokenizer", family("chatml")), **options)

    return call
