"""The curriculum: exact counts at every prefix, the choice of a schedule with its messages, and
`curriculum show`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launching import ROOT
from pydantic import ValidationError
from schedules import GUIDE, exact_targets, schedules

from finetune.batching import rounding
from finetune.batching.curriculum import (
    Schedule,
    Stage,
    build_schedule,
    choose_schedule,
    plan_counts,
    uniform_schedule,
)
from finetune.commands.curriculum import command
from finetune.config.fields import CurriculumConfig
from finetune.errors import ConfigError, DataError, FinetuneError

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


@settings(deadline=None, max_examples=150)
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


def test_corners_are_reached_by_these_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two examples above are worth nothing if the first choice happens to fit."""
    monkeypatch.setattr(rounding._Rounding, "_repair", None)
    for schedule, steps in ((TOO_MANY_UP, 103), (TOO_FEW_UP, 135)):
        with pytest.raises(TypeError, match="not callable"):
            plan_counts(schedule, steps, 1)


def test_the_guides_stages_are_exact() -> None:
    shares = [(80, 20, 0), (40, 40, 20), (25, 35, 40)]
    for steps, batch in product([10, 200, 1000], [1, 3, 8, 32, 128]):
        counts = plan_counts(GUIDE, steps, batch)
        for (start, end), percent in zip([(0.0, 0.3), (0.3, 0.7), (0.7, 1.0)], shares, strict=True):
            first, last = round(start * steps), round(end * steps)
            drawn = counts[first:last].sum(axis=0)
            exact = [(last - first) * batch * share / 100 for share in percent]
            if all(value.is_integer() for value in exact):
                assert drawn.tolist() == exact
            assert np.abs(drawn - exact).max() < 2  # the difference of two prefixes
    assert max(check_plan(GUIDE, 100, batch) for batch in (1, 2, 3, 4, 7, 8)) <= Fraction(2, 3)


def test_a_boundary_inside_a_step_counts_for_its_part() -> None:
    schedule = Schedule(("a", "b"), (Stage(0.25, (1, 0)), Stage(1.0, (0, 1))))
    assert plan_counts(schedule, 2, 8).tolist() == [[4, 4], [0, 8]]


def test_a_decimal_boundary_is_the_decimal() -> None:
    # 0.07 x 100 is 7.000000000000001 in binary: the eighth step must still be free of the first
    # level.
    schedule = Schedule(("a", "b"), (Stage(0.07, (1, 0)), Stage(1.0, (0, 1))))
    counts = plan_counts(schedule, 100, 4)
    assert counts[:7].tolist() == [[4, 0]] * 7
    assert counts[7:, 0].sum() == 0


def test_a_linear_ramp_starts_at_the_mix_before_and_ends_at_its_own() -> None:
    schedule = Schedule(("a", "b"), (Stage(0.5, (1, 0)), Stage(1.0, (0, 1), "linear")))
    counts = plan_counts(schedule, 8, 100)
    # Over the four steps of the ramp b's share goes from 0 to 1: 1/8, 3/8, 5/8, 7/8 on average.
    assert np.abs(counts[4:, 1] - [12.5, 37.5, 62.5, 87.5]).max() < 1
    assert counts[:4].tolist() == [[100, 0]] * 4
    assert counts[4:].sum(axis=0).tolist() == [200, 200]
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


def test_the_unit_of_weights_does_not_matter() -> None:
    stages = [Stage(s.until, tuple(w / 100 for w in s.mix)) for s in GUIDE.stages]
    fractions = Schedule(GUIDE.difficulties, tuple(stages))
    assert fractions.canonical() == GUIDE.canonical()
    assert np.array_equal(plan_counts(fractions, 77, 13), plan_counts(GUIDE, 77, 13))


def test_a_million_steps_take_seconds() -> None:
    start = time.process_time()
    counts = plan_counts(GUIDE, 1_000_000, 32)
    assert time.process_time() - start < 10  # 0.5 s on the machine this was written on
    assert counts.sum(axis=0).tolist() == [15_200_000, 10_400_000, 6_400_000]


def test_broken_curricula_make_no_schedule() -> None:
    """What a stage may hold; rules between stages: tests/config/test_run_config.py."""
    names, nan, inf = ("until", "mix", "ramp"), float("nan"), float("inf")
    for levels, stages, said in (
        ([], [(1.0, [])], "at least 1 item"),
        (["a"], [], "at least 1 item"),
        (["a"], [(1.5, [1]), (1.0, [1])], "less than or equal to 1"),
        (["a"], [(nan, [1]), (1.0, [1])], "finite number"),
        (["a", "b"], [(1.0, [1, -1])], "greater than or equal to 0"),
        (["a", "b"], [(1.0, [1, inf])], "finite number"),
        (["a"], [(1.0, [1], "cosine")], "'step' or 'linear'"),
    ):
        given = [dict(zip(names, stage, strict=False)) for stage in stages]
        with pytest.raises(ValidationError, match=said):
            CurriculumConfig.model_validate({"levels": levels, "stages": given})


# --- the schedule of a run ------------------------------------------------------------------------------------------


def config_like(**changes: object) -> SimpleNamespace:
    curriculum = SimpleNamespace(levels=GUIDE.difficulties, stages=GUIDE.stages)
    given = {"use_curriculum": True, "difficulty_field": "difficulty", "curriculum": curriculum}
    return SimpleNamespace(**given | changes, model_fields_set=changes.keys())


def test_enough_rows_of_each_level_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    difficulties = np.repeat([2, 0, 1], 1000).astype(np.int16)
    schedule, ids = build_schedule(config_like(), difficulties)
    assert schedule == GUIDE and ids.tolist() == difficulties.tolist()
    schedule, ids = build_schedule(config_like(use_curriculum=False), np.array([0, -1]))
    assert schedule == uniform_schedule() and ids.tolist() == [0, 0]
    assert caplog.records == []


@pytest.mark.parametrize(
    ("asked", "level", "said"),
    [
        ({"difficulty_field": "niveau"}, logging.WARNING, "'niveau' field not found"),
        ({}, logging.INFO, "no sample has a 'difficulty': uniform sampling"),
    ],
    ids=["asked", "default"],
)
def test_no_level_anywhere_is_uniform(
    caplog: pytest.LogCaptureFixture, asked: dict[str, object], level: int, said: str
) -> None:
    """One warning if a setting asks for a curriculum, which is the default too."""
    with caplog.at_level(logging.INFO, logger="finetune"):
        schedule, ids = build_schedule(config_like(**asked), np.full(50, -1, dtype=np.int16))
    assert schedule == uniform_schedule() and ids.tolist() == [0] * 50
    assert [record.levelno for record in caplog.records] == [level] and said in caplog.text


def test_what_a_schedule_refuses() -> None:
    difficulties = np.zeros(2000, dtype=np.int16)
    with pytest.raises(FinetuneError) as caught:  # all are named
        choose_schedule(config_like(), difficulties)
    assert caught.value.exit_code == 2 and "'explain'" not in str(caught.value)
    assert "'reasoning'" in str(caught.value) and "'topology'" in str(caught.value)
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
    assert len(report.warnings) == 2
    assert "'explain' is repeated 15.2 times" in report.warnings[0]

    schedule = Schedule(("a", "b"), (Stage(1.0, (1, 0)),))
    report = command.report_curriculum(schedule, np.array([100, 50]), 10, 5)
    assert report.passes == (0.5, 0.0)
    never = "difficulty 'b' has weight 0 in every stage: its 50 records are not trained on"
    assert report.warnings == (never,)


def test_the_chart_has_the_right_levels() -> None:
    for steps in (1, 59, 60, 1000):
        report = command.report_curriculum(GUIDE, np.array([9, 9, 9]), 20, steps)
        cells = command.chart_cells(report)
        assert [len(line) for line in cells] == [command.CHART_COLUMNS] * command.CHART_ROWS
    first, last = [line[0] for line in cells], [line[-1] for line in cells]
    assert first == [1] * 2 + [0] * 8  # 80/20/0 from the bottom
    assert [last.count(difficulty) for difficulty in (0, 1, 2)] in ([2, 4, 4], [3, 3, 4])


def write_rows(path: Path, difficulties: list[str | None]) -> Path:
    rows = [
        {"instruction": "q", "output": "a"} | ({"difficulty": x} if x else {}) for x in difficulties
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def show(data: Path, *more: str) -> list[str]:
    return ["show", "--model", "some/model", "--data", str(data), "--output-dir", "unused", *more]


LEVELS = ["explain"] * 60 + ["reasoning"] * 30 + ["topology"] * 10


def test_show_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", LEVELS)
    assert command.main(show(data, "--global-batch-size", "10", "--num-epochs", "2", "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["total_steps"] == 20
    assert report["rows"] == {"explain": 60, "reasoning": 30, "topology": 10}
    assert report["samples"] == {"explain": 95, "reasoning": 65, "topology": 40}
    assert report["stages"][0]["samples"] == {"explain": 48, "reasoning": 12, "topology": 0}
    assert any("'topology' has 10" in warning for warning in report["warnings"])
    assert command.main(show(data, "--max-steps", "7")) == 0
    text = capsys.readouterr().out
    assert "7 steps" in text and "topology" in text and "100%" in text
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"], "nothing else is written"
    assert command.main(show(write_rows(tmp_path / "none.jsonl", [None] * 5))) == 0
    assert "'difficulty' field not found" in capsys.readouterr().out


def test_show_lists_the_sources(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = write_rows(tmp_path / "first.jsonl", LEVELS)
    second = write_rows(tmp_path / "second.jsonl", ["explain"] * 20)
    words = ["--max-steps", "10", "--global-batch-size", "10", "--data-weights", "3", "1"]
    words = show(first, *words)
    words.insert(words.index(str(first)) + 1, str(second))
    assert command.main([*words, "--use-curriculum", "false", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["sources"]
    assert (first["samples"], first["draws"]) == (100, 75)
    assert (second["samples"], second["draws"], second["passes"]) == (20, 25, {"all": 1.25})
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
    data = Path("data_samples/train.jsonl")
    words = show(data, "--max-steps", "40", "--global-batch-size", "20", "--json")
    started = [sys.executable, "-c", code, *words]
    done = subprocess.run(started, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert report["samples"] == {"explain": 380, "reasoning": 260, "topology": 160}


def test_show_refuses_what_training_refuses(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ["explain", "explian"])
    with pytest.raises(DataError, match="rows.jsonl:2"):
        command.main(show(data))
    with pytest.raises(FinetuneError, match="no sample of it"):
        command.main(show(data, "--on-bad-row", "drop"))
    data = write_rows(tmp_path / "mixed.jsonl", ["explain", "explian", None])
    with pytest.raises(DataError, match="records 2 "):  # counted before anything is dropped
        command.main(show(data, "--on-bad-row", "drop"))


def test_help_and_an_unknown_subcommand(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="action is 'shwo'"):
        command.main(["shwo"])
