"""Runs of two sources mixed by weight: shares, losses by source, and the same list of batches after
a resume.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import run_helpers as runs

STEPS = 5


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("mixed")
    materials = runs.make_materials(folder, records=40)
    sources = [
        {"path": str(materials.data), "weight": 3},
        {"path": str(materials.valid), "weight": "natural"},
    ]
    return materials.settings(
        folder / "whole",
        data=[sources[0] | {"difficulty": "explain"}, sources[1]],
        valid_data=[str(materials.valid), str(materials.data)],
        max_steps=STEPS,
        global_batch_size=6,
        curriculum={
            "levels": ["explain", "reasoning", "topology"],
            "stages": [{"until": 1.0, "mix": [1, 1, 1]}],
        },
    )


@pytest.fixture(scope="module")
def whole(settings: dict[str, object]) -> Path:
    printed = runs.train(settings).output()
    assert (
        "train is 6.2% of the samples, not 18.8%" in printed
        and "weight 18.8%, share 6.2%" in printed
    )
    return Path(str(settings["output_dir"]))


def test_shares_are_exact_and_the_log_has_losses_by_source(
    whole: Path, settings: dict[str, object]
) -> None:
    # Of the three difficulties the first source has explain alone, which the second has too: 3 to
    # 13 of a third.
    counts = list(accumulate(sum(number < 40 for number in ids) for ids in runs.sample_ids(whole)))
    for step, count in enumerate(counts, 1):
        assert abs(count - step * 6 / 3 * 3 / 16) < 1
    for line in runs.lines(whole / "trainer_log.jsonl"):
        losses = [
            (line[f"source_tokens/{name}"], line.get(f"source_loss/{name}", 0.0))
            for name in ("train", "valid")
        ]
        tokens = sum(count for count, _ in losses)
        assert sum(count * loss for count, loss in losses) / tokens == pytest.approx(
            line["loss"], rel=1e-5
        )
        assert line["source_share/train"] + line["source_share/valid"] == pytest.approx(1, abs=1e-3)
        assert line["tokens/explain"] + line["tokens/reasoning"] + line["tokens/topology"] == tokens
    for event in runs.events(whole, "eval"):
        low, high = sorted(event[f"eval_source_loss/{name}"] for name in ("train", "valid"))
        assert low <= event["eval_loss"] <= high


def test_a_resumed_run_draws_the_same(
    whole: Path, settings: dict[str, object], tmp_path: Path
) -> None:
    """Begun with a checkpoint in the middle, from which a second run goes on; its run.yaml has the
    sources.
    """
    again = {
        **settings,
        "output_dir": str(tmp_path / "again"),
        "save_steps": 2,
        "save_total_limit": 5,
    }
    runs.train(again)
    for checkpoint in ("checkpoint-4", f"checkpoint-{STEPS}"):
        (tmp_path / "again" / checkpoint).rename(tmp_path / checkpoint)
    run_yaml = tmp_path / "again" / "run.yaml"
    runs.train(again | {"resume": str(tmp_path / "again" / "checkpoint-2")})
    assert runs.sample_ids(tmp_path / "again") == runs.sample_ids(whole)
    assert runs.losses(tmp_path / "again") == pytest.approx(runs.losses(whole), rel=1e-6)
    assert (
        "weight: natural" in run_yaml.read_text() and "difficulty: explain" in run_yaml.read_text()
    )


def test_other_weights_are_another_run(whole: Path, settings: dict[str, object]) -> None:
    entries = [dict(entry) for entry in settings["data"]]  # type: ignore[attr-defined]
    entries[0]["weight"] = 2
    ranks = runs.train(settings | {"data": entries}, expect=2)
    assert "schedule" in ranks.output()
