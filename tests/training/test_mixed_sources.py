"""Runs of two sources mixed by weight: shares, and losses by source."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import run_helpers as runs

import finetune
from finetune.errors import StateError

STEPS = 5
LEVELS = ["explain", "reasoning", "topology"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("mixed")
    materials = runs.make_materials(folder, records=40)
    first = {"path": str(materials.data), "weight": 3, "difficulty": "explain"}
    second = {"path": str(materials.valid), "weight": "natural"}
    curriculum = {"levels": LEVELS, "stages": [{"until": 1.0, "mix": [1, 1, 1]}]}
    own = {"data": [first, second], "valid_data": [str(materials.valid), str(materials.data)]}
    own |= {"max_steps": STEPS, "global_batch_size": 6, "save_steps": 2, "save_total_limit": 5}
    return materials.settings(folder / "whole", curriculum=curriculum, **own)


@pytest.fixture(scope="module")
def whole(settings: dict[str, object]) -> Path:
    assert "train is 6.2% of the samples, not 18.8%" in runs.train(settings).output()
    return Path(str(settings["output_dir"]))


def test_shares_are_exact_and_the_log_has_losses_by_source(whole: Path, settings) -> None:
    # Of the three difficulties the first source has explain alone, which the second has too: 3 to
    # 13 of a third.
    counts = accumulate(sum(number < 40 for number in ids) for ids in runs.sample_ids(whole))
    assert all(abs(count - step * 6 / 3 * 3 / 16) < 1 for step, count in enumerate(counts, 1))
    names = ("train", "valid")
    for line in runs.lines(whole / "trainer_log.jsonl"):
        tokens = [line[f"source_tokens/{name}"] for name in names]
        losses = [line.get(f"source_loss/{name}", 0.0) for name in names]
        total = sum(count * loss for count, loss in zip(tokens, losses, strict=True))
        assert total / sum(tokens) == pytest.approx(line["loss"], rel=1e-5)
        shares = sum(line[f"source_share/{name}"] for name in names)
        assert shares == pytest.approx(1, abs=1e-3)
        assert sum(line[f"tokens/{level}"] for level in LEVELS) == sum(tokens)
    for event in runs.events(whole, "eval"):
        low, high = sorted(event[f"eval_source_loss/{name}"] for name in names)
        assert low <= event["eval_loss"] <= high
    run_yaml = (whole / "run.yaml").read_text()
    assert "weight: natural" in run_yaml and "difficulty: explain" in run_yaml
    entries = [settings["data"][0] | {"weight": 2}, settings["data"][1]]
    with pytest.raises(StateError, match="schedule"):
        finetune.run(settings | {"data": entries})
