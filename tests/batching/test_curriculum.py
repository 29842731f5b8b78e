"""The curriculum: exact counts at every prefix, the choice of a schedule, `curriculum show`."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launching import ROOT
from sample_rows import write_rows
from schedules import GUIDE, exact_targets, schedules

from finetune.batching.curriculum import (
    Schedule,
    Stage,
    build_schedule,
    choose_schedule,
    plan_counts,
    uniform_schedule,
)
from finetune.commands.curriculum import command
from finetune.errors import DataError, FinetuneError

# Largest fractions first runs into a corner with these: too many levels must stay up, and too few
# can go up.
TOO_MANY_UP = Schedule(
    tuple("abcdef"),
    (
        Stage(0.075, (0, 3, 4, 6, 0, 0)),
        Stage(0.25, (1, 0, 9, 0, 0, 8)),
        Stage(1, (0, 0, 0, 3, 0, 0)),
    ),
)
TOO_FEW_UP = Schedule(
    tuple("abcdefg"), (Stage(0.5, (1, 1, 1, 0, 0, 1, 1)), Stage(1.0, (1, 1, 3, 0, 0, 0, 0)))
)


def check_plan(schedule: Schedule, total_steps: int, global_batch_size: int) -> Fraction:
    """Assert all that a plan promises; returns the largest error, in samples."""
    counts = plan_counts(schedule, total_steps, global_batch_size)
    assert counts.dtype == np.int64 and counts.shape == (total_steps, len(schedule.difficulties))
    assert (counts >= 0).all() and (counts.sum(axis=1) == global_batch_size).all()
    targets = np.array(exact_targets(schedule, total_steps, global_batch_size), dtype=object)
    grows = np.diff(targets, axis=0, prepend=Fraction(0)) > 0
    assert not counts[~grows].any(), "a level with weight 0"
    worst = np.abs(np.cumsum(counts, axis=0).astype(object) - targets).max()
    assert worst < 1
    return worst


@settings(deadline=None, max_examples=100)
@given(
    st.one_of(schedules(), schedules(most_levels=12)),
    st.integers(1, 60),
    st.sampled_from([1, 1, 1, 2, 3, 5, 8, 32, 100]),
)
@example(TOO_MANY_UP, 103, 1)
@example(TOO_FEW_UP, 135, 1)
def test_every_prefix_is_within_a_sample_and_zero_weights_are_absent(
    schedule: Schedule, steps: int, batch: int
) -> None:
    check_plan(schedule, steps, batch)


def test_boundaries_are_decimals_inside_steps_too() -> None:
    schedule = Schedule(("a", "b"), (Stage(0.25, (1, 0)), Stage(1.0, (0, 1))))
    assert plan_counts(schedule, 2, 8).tolist() == [[4, 4], [0, 8]]
    # 0.07 x 100 is 7.000000000000001 in binary.
    schedule = Schedule(("a", "b"), (Stage(0.07, (1, 0)), Stage(1.0, (0, 1))))
    assert plan_counts(schedule, 100, 4).tolist() == [[4, 0]] * 7 + [[0, 4]] * 93
    percent = [Stage(s.until, tuple(w / 100 for w in s.mix)) for s in GUIDE.stages]
    assert Schedule(GUIDE.difficulties, tuple(percent)).canonical() == GUIDE.canonical()


def test_the_guides_stages_are_exact() -> None:
    counts = plan_counts(GUIDE, 1000, 10)
    stages = [counts[:300].sum(axis=0), counts[300:700].sum(axis=0), counts[700:].sum(axis=0)]
    assert np.array(stages).tolist() == [[2400, 600, 0], [1600, 1600, 800], [750, 1050, 1200]]
    assert max(check_plan(GUIDE, 100, batch) for batch in (1, 2, 3, 4, 7, 8)) <= Fraction(2, 3)


def test_a_linear_ramp_starts_at_the_mix_before_and_ends_at_its_own() -> None:
    schedule = Schedule(("a", "b"), (Stage(0.5, (1, 0)), Stage(1.0, (0, 1), "linear")))
    counts = plan_counts(schedule, 8, 100)
    # Over the four steps of the ramp b's share goes from 0 to 1: 1/8, 3/8, 5/8, 7/8 on average.
    assert np.abs(counts[4:, 1] - [12.5, 37.5, 62.5, 87.5]).max() < 1
    assert schedule.weights(0.5).tolist() == [1.0, 0.0]
    assert schedule.weights(0.75).tolist() == [0.5, 0.5]
    assert schedule.weights(1.0).tolist() == [0.0, 1.0]


def test_weights_and_stages_change_at_boundaries() -> None:
    assert GUIDE.weights(0.0).tolist() == GUIDE.weights(0.29999).tolist() == [0.8, 0.2, 0.0]
    assert GUIDE.weights(0.3).tolist() == [0.4, 0.4, 0.2]
    assert GUIDE.weights(1.0).tolist() == [0.25, 0.35, 0.4]
    # a step belongs to the stage of its middle
    assert np.bincount(GUIDE.stage_of_steps(1000)).tolist() == [300, 400, 300]
    assert GUIDE.stage_of_steps(3).tolist() == [0, 1, 2]
    assert GUIDE.stage_of_steps(1).tolist() == [1]


# --- the schedule of a run ------------------------------------------------------------------------------------------


def config_like(**changes: object) -> SimpleNamespace:
    curriculum = SimpleNamespace(levels=GUIDE.difficulties, stages=GUIDE.stages)
    given = {"use_curriculum": True, "difficulty_field": "difficulty", "curriculum": curriculum}
    return SimpleNamespace(**given | changes, model_fields_set=changes.keys())


def test_no_level_anywhere_is_uniform(caplog: pytest.LogCaptureFixture) -> None:
    """One warning if a setting asks for a curriculum, which is the default too."""
    caplog.set_level(logging.INFO, logger="finetune")
    for asked in ({"difficulty_field": "niveau"}, {}):
        schedule, ids = build_schedule(config_like(**asked), np.full(50, -1, dtype=np.int16))
        assert schedule == uniform_schedule() and ids.tolist() == [0] * 50
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    assert "'niveau' field not found" in caplog.text and "uniform sampling" in caplog.text


def test_what_a_schedule_refuses() -> None:
    difficulties = np.zeros(2000, dtype=np.int16)
    with pytest.raises(FinetuneError) as caught:  # all are named
        choose_schedule(config_like(), difficulties)
    assert "'reasoning'" in str(caught.value) and "'topology'" in str(caught.value)
    assert "'explain'" not in str(caught.value)
    difficulties[[5, 7]] = -1
    with pytest.raises(DataError) as caught:
        choose_schedule(config_like(), difficulties)
    assert "2 of 2,000" in caught.value.what and "records 5, 7 " in caught.value.where
    with pytest.raises(DataError, match="records 50, 70 "):
        choose_schedule(config_like(), difficulties, record_ids=10 * np.arange(2000))
    with pytest.raises(DataError, match="no samples"):
        choose_schedule(config_like(), np.array([], dtype=np.int16))


def test_short_levels_are_warned_about_if_they_have_weight() -> None:
    (warning,) = choose_schedule(config_like(), np.repeat([0, 1, 2], [999, 1000, 7]))[2]
    assert "fewer than 1,000" in warning and "reasoning" not in warning
    assert "'explain' has 999" in warning and "'topology' has 7" in warning
    schedule = SimpleNamespace(levels=("a", "b", "c"), stages=(Stage(1.0, (1, 0, 0)),))
    difficulties = np.array([0] * 1000 + [1] * 3)
    assert choose_schedule(config_like(curriculum=schedule), difficulties)[2] == []


# --- curriculum show ------------------------------------------------------------------------------------------------


def test_report_of_the_guides_schedule() -> None:
    report = command.report_curriculum(GUIDE, np.array([100, 200, 5000]), 32, 100)
    assert report.samples == (1520, 1040, 640)
    assert report.passes == (15.2, 5.2, 0.128)
    assert [(s.first_step, s.last_step) for s in report.stages] == [(1, 30), (31, 70), (71, 100)]
    assert [s.samples for s in report.stages] == [(768, 192, 0), (512, 512, 256), (240, 336, 384)]
    assert "'explain' is repeated 15.2 times" in report.warnings[0]

    schedule = Schedule(("a", "b"), (Stage(1.0, (1, 0)),))
    report = command.report_curriculum(schedule, np.array([100, 50]), 10, 5)
    assert report.passes == (0.5, 0.0)
    never = "difficulty 'b' has weight 0 in every stage: its 50 records are not trained on"
    assert report.warnings == (never,)


def rows_of(*difficulties: str | None) -> list[dict[str, str]]:
    return [
        {"instruction": "q", "output": "a"} | ({"difficulty": x} if x else {}) for x in difficulties
    ]


def show(*data: Path, more: str = "") -> list[str]:
    words = ["--model", "some/model", "--data", *map(str, data), "--output-dir", "unused"]
    return ["show", *words, *more.split()]


def test_show_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    levels = ["explain"] * 60 + ["reasoning"] * 30 + ["topology"] * 10
    data = write_rows(tmp_path / "rows.jsonl", rows_of(*levels))
    assert command.main(show(data, more="--max-steps 7")) == 0
    text = capsys.readouterr().out
    assert "7 steps" in text and "topology" in text and "100%" in text
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"], "nothing else is written"
    assert command.main(show(write_rows(tmp_path / "none.jsonl", rows_of(None)))) == 0
    assert "'difficulty' field not found" in capsys.readouterr().out
    second = write_rows(tmp_path / "second.jsonl", rows_of(*["explain"] * 20))
    words = show(data, second, more="--max-steps 10 --global-batch-size 10 --data-weights 3 1")
    assert command.main([*words, "--use-curriculum", "false"]) == 0
    text = capsys.readouterr().out
    assert "source second: 20; weight 25.0%, share 25.0%; 25 drawn; passes all 1.25" in text
    assert command.main(words) == 0
    text = capsys.readouterr().out
    assert "warning: the weights of the sources hold within each difficulty" in text


def test_show_on_the_bundled_data_needs_no_torch() -> None:
    code = (
        "import sys; from finetune.batching import permutation, microbatch_schedule;"
        " from finetune.commands.curriculum.command import main; code = main(sys.argv[1:]);"
        " sys.exit(code or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    words = show(ROOT / "data_samples/train.jsonl", more="--num-epochs 1 --json")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert report["rows"].keys() == report["samples"].keys() == set(GUIDE.difficulties)
    assert sum(report["samples"].values()) == report["total_steps"] * report["global_batch_size"]


def test_show_refuses_what_training_refuses(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows_of("explain", "explian"))
    with pytest.raises(DataError, match="rows.jsonl:2"):
        command.main(show(data))
    with pytest.raises(FinetuneError, match="no sample of it"):
        command.main(show(data, more="--on-bad-row drop"))
    data = write_rows(tmp_path / "mixed.jsonl", rows_of("explain", "explian", None))
    with pytest.raises(DataError, match="records 2 "):  # counted before anything is dropped
        command.main(show(data, more="--on-bad-row drop"))
