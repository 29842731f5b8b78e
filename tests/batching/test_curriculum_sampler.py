"""CurriculumSampler: a run's own order, for loops of others."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import DataLoader

from finetune import CurriculumSampler, RunConfig
from finetune.batching.curriculum import build_schedule
from finetune.batching.sampler import GlobalBatches
from finetune.errors import DataError

NAMES = ["explain"] * 60 + ["reasoning"] * 30 + ["topology"] * 25


def test_the_order_is_that_of_a_run() -> None:
    config = RunConfig(model="m", data="d", output_dir="o")
    levels = config.curriculum.levels
    schedule, ids = build_schedule(config, np.array([levels.index(name) for name in NAMES]))
    run = GlobalBatches(ids, schedule, 16, 20, 42)
    sampler = CurriculumSampler(NAMES, global_batch_size=16, total_steps=20, seed=42)
    order = np.concatenate([run.indices(step) for step in range(20)]).tolist()
    assert len(sampler) == 320 and list(sampler) == order
    loader = DataLoader(NAMES, batch_size=8, sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    assert [name for batch in loader for name in batch] == [NAMES[index] for index in order]


def test_a_difficulty_that_the_curriculum_does_not_know_is_named() -> None:
    with pytest.raises(DataError, match="'hard' is not one of the curriculum's") as raised:
        CurriculumSampler([*NAMES, "hard"], global_batch_size=8, total_steps=5)
    assert raised.value.where == "sample 115"
