"""The curriculum: exact counts at every prefix, the choice of a schedule with its messages, and
`curriculum show`.
"""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console
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
from finetune.config.fields import CurriculumConfig
from finetune.errors import ConfigError, DataError, FinetuneError

# Largest fractions first runs into a corner with these: too many levels must stay up, and too few
# can go up.
TOO_MANY_UP = Schedule(
    tuple("abcdef"),
    (
        Stage(0.075, (0, 3, 4, 6, 0, 0)),
        Stage(0.25, (1, 0, 9, 0, 0, 8)),
        Stage(1.0, (0, 0, 0, 3, 0, 0)),
    ),
)
TOO_FEW_UP = Schedule(
    tuple("abcdefg"), (Stage(0.5, (1, 1, 1, 0, 0, 1, 1)), Stage(1.0, (1, 1, 3, 0, 0, 0, 0)))
)


def check_plan(schedule: Schedule, total_steps: int, global_batch_size: int) -> Fraction:
    """Assert all that a plan promises against exact targets; returns the largest error, in
    samples.
    """
    counts = plan_counts(schedule, total_steps, global_batch_size)
    assert counts.dtype == np.int64 and counts.shape == (total_steps, len(schedule.difficulties))
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == global_batch_size).all()
    worst, before = Fraction(0), [Fraction(0)] * len(schedule.difficulties)
    targets = exact_targets(schedule, total_steps, global_batch_size)
    for step, (drawn, target) in enumerate(
        zip(np.cumsum(counts, axis=0).tolist(), targets, strict=True)
    ):
        worst = max(worst, *(abs(a - b) for a, b in zip(drawn, target, strict=True)))
        for difficulty, (old, new) in enumerate(zip(before, target, strict=True)):
            assert new > old or counts[step, difficulty] == 0, (
                f"level {difficulty} has weight 0 in step {step}"
            )
        before = target
    assert worst < 1
    return worst


@settings(deadline=None, max_examples=150)
@given(schedules(), st.integers(1, 60), st.sampled_from([1, 1, 2, 3, 5, 8, 32, 100]))
@example(TOO_MANY_UP, 103, 1)
@example(TOO_FEW_UP, 135, 1)
def test_every_prefix_is_within_a_sample_and_zero_weights_are_absent(
    schedule: Schedule, steps: int, batch: int
) -> None:
    check_plan(schedule, steps, batch)


@settings(deadline=None, max_examples=40)
@given(schedules(most_levels=12), st.integers(1, 60))
def test_many_levels_and_one_sample_a_step(schedule: Schedule, steps: int) -> None:
    check_plan(schedule, steps, 1)


def test_corners_are_reached_by_these_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two examples above are worth nothing if the first choice happens to fit."""
    from finetune.batching import rounding

    class Corner(Exception):
        pass

    def repair(self: object, row: int) -> None:
        raise Corner

    monkeypatch.setattr(rounding._Rounding, "_repair", repair)
    for schedule, steps in ((TOO_MANY_UP, 103), (TOO_FEW_UP, 135)):
        with pytest.raises(Corner):
            plan_counts(schedule, steps, 1)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 7, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("steps", [10, 200, 1000])
def test_the_guides_stages_are_exact(steps: int, batch: int) -> None:
    counts = plan_counts(GUIDE, steps, batch)
    shares = [(80, 20, 0), (40, 40, 20), (25, 35, 40)]
    for (start, end), percent in zip([(0.0, 0.3), (0.3, 0.7), (0.7, 1.0)], shares, strict=True):
        first, last = round(start * steps), round(end * steps)
        drawn = counts[first:last].sum(axis=0)
        exact = [(last - first) * batch * share / 100 for share in percent]
        if all(value.is_integer() for value in exact):
            assert drawn.tolist() == exact
        assert np.abs(drawn - exact).max() < 2  # the difference of two prefixes
    assert counts[: round(0.3 * steps), 2].sum() == 0
    if steps * batch % 40 == 0:
        assert (counts.sum(axis=0) * 40).tolist() == [
            19 * steps * batch,
            13 * steps * batch,
            8 * steps * batch,
        ]


def test_the_guides_largest_error_is_well_below_a_sample() -> None:
    assert max(check_plan(GUIDE, 100, batch) for batch in (1, 2, 3, 4, 7, 8, 16, 32)) <= Fraction(
        2, 3
    )


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


def test_weights_between_boundaries() -> None:
    assert GUIDE.weights(0.0).tolist() == [0.8, 0.2, 0.0]
    assert GUIDE.weights(0.29999).tolist() == [0.8, 0.2, 0.0]
    assert GUIDE.weights(0.3).tolist() == [0.4, 0.4, 0.2]
    assert GUIDE.weights(1.0).tolist() == [0.25, 0.35, 0.4]


def test_stage_of_a_step_is_that_of_its_middle() -> None:
    assert np.bincount(GUIDE.stage_of_steps(1000)).tolist() == [300, 400, 300]
    assert GUIDE.stage_of_steps(3).tolist() == [0, 1, 2]
    assert GUIDE.stage_of_steps(1).tolist() == [1]


def test_the_unit_of_weights_does_not_matter() -> None:
    fractions = Schedule(
        GUIDE.difficulties,
        tuple(Stage(s.until, tuple(w / 100 for w in s.mix)) for s in GUIDE.stages),
    )
    assert fractions.canonical() == GUIDE.canonical()
    assert np.array_equal(plan_counts(fractions, 77, 13), plan_counts(GUIDE, 77, 13))


def test_uniform_is_one_level() -> None:
    assert plan_counts(uniform_schedule(), 3, 5).tolist() == [[5], [5], [5]]


def test_a_million_steps_take_seconds() -> None:
    start = time.process_time()
    counts = plan_counts(GUIDE, 1_000_000, 32)
    assert time.process_time() - start < 10  # 0.5 s on the machine this was written on
    assert counts.sum(axis=0).tolist() == [15_200_000, 10_400_000, 6_400_000]


@pytest.mark.parametrize(
    ("levels", "stages", "said"),
    [
        ([], [(1.0, [])], "at least 1 item"),
        (["a", "a"], [(1.0, [1, 1])], "more than once"),
        (["a"], [], "at least 1 item"),
        (["a"], [(0.9, [1])], "not at 1.0"),
        (["a"], [(0.5, [1]), (0.5, [1]), (1.0, [1])], "does not increase"),
        (["a"], [(1.5, [1]), (1.0, [1])], "less than or equal to 1"),
        (["a"], [(float("nan"), [1]), (1.0, [1])], "finite number"),
        (["a", "b"], [(1.0, [1])], "1 weights for 2 difficulties"),
        (["a", "b"], [(1.0, [1, -1])], "greater than or equal to 0"),
        (["a", "b"], [(1.0, [0, 0])], "all zero"),
        (["a", "b"], [(1.0, [1, float("inf")])], "finite number"),
        (["a"], [(1.0, [1], "cosine")], "'step' or 'linear'"),
        (["a"], [(1.0, [1], "linear")], "no mix before it"),
    ],
)
def test_broken_curricula_make_no_schedule(levels: list, stages: list, said: str) -> None:
    names = ("until", "mix", "ramp")
    given = [dict(zip(names, stage, strict=False)) for stage in stages]
    with pytest.raises(ValidationError, match=said):
        CurriculumConfig.model_validate({"levels": levels, "stages": given})


# --- the schedule of a run ------------------------------------------------------------------------------------------


def config_like(**changes: object) -> SimpleNamespace:
    curriculum = SimpleNamespace(levels=GUIDE.difficulties, stages=GUIDE.stages)
    return SimpleNamespace(
        **{
            "use_curriculum": True,
            "difficulty_field": "difficulty",
            "curriculum": curriculum,
            "model_fields_set": changes.keys(),
            **changes,
        }
    )


def test_enough_rows_of_each_level_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    difficulties = np.repeat([2, 0, 1], 1000).astype(np.int16)
    schedule, ids = build_schedule(config_like(), difficulties)
    assert schedule == GUIDE
    assert ids.tolist() == difficulties.tolist()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("asked", "level", "said"),
    [
        ({"difficulty_field": "niveau"}, logging.WARNING, "'niveau' field not found"),
        ({"use_curriculum": True}, logging.WARNING, "'difficulty' field not found"),
        ({}, logging.INFO, "no sample has a 'difficulty': uniform sampling"),
    ],
    ids=["field", "curriculum", "nothing"],
)
def test_no_level_anywhere_is_uniform(
    caplog: pytest.LogCaptureFixture, asked: dict[str, object], level: int, said: str
) -> None:
    """One warning if a setting asks for a curriculum, which is the default too."""
    with caplog.at_level(logging.INFO, logger="finetune"):
        schedule, ids = build_schedule(config_like(**asked), np.full(50, -1, dtype=np.int16))
    assert schedule == uniform_schedule()
    assert ids.tolist() == [0] * 50
    assert [record.levelno for record in caplog.records] == [level]
    assert said in caplog.text


@pytest.mark.parametrize("difficulties", [[-1, -1], [0, 1], [0, -1]])
def test_without_curriculum_it_is_uniform_and_silent(
    caplog: pytest.LogCaptureFixture, difficulties: list[int]
) -> None:
    schedule, ids = build_schedule(config_like(use_curriculum=False), np.array(difficulties))
    assert schedule == uniform_schedule()
    assert ids.tolist() == [0, 0]
    assert caplog.records == []


def test_rows_without_level_among_rows_with_one_are_named() -> None:
    difficulties = np.zeros(2000, dtype=np.int16)
    difficulties[[5, 7]] = -1
    with pytest.raises(DataError) as caught:
        choose_schedule(config_like(), difficulties)
    assert "2 of 2,000" in caught.value.what and "records 5, 7 " in caught.value.where
    with pytest.raises(DataError, match="records 50, 70 "):
        choose_schedule(config_like(), difficulties, record_ids=10 * np.arange(2000))


def test_levels_with_weight_but_without_rows_are_all_named() -> None:
    with pytest.raises(FinetuneError) as caught:
        choose_schedule(config_like(), np.zeros(2000, dtype=np.int16))
    assert caught.value.exit_code == 2
    assert "'reasoning'" in str(caught.value) and "'topology'" in str(caught.value)
    assert "'explain'" not in str(caught.value)


def test_a_level_without_weight_may_be_empty_or_short() -> None:
    schedule = SimpleNamespace(levels=("a", "b", "c"), stages=(Stage(1.0, (1, 0, 0)),))
    difficulties = np.array([0] * 1000 + [1] * 3)
    assert choose_schedule(config_like(curriculum=schedule), difficulties)[2] == []


def test_short_levels_are_warned_about_with_their_numbers() -> None:
    warnings = choose_schedule(config_like(), np.repeat([0, 1, 2], [999, 1000, 7]))[2]
    assert len(warnings) == 1
    assert "fewer than 1,000" in warnings[0]
    assert (
        "'explain' has 999" in warnings[0]
        and "'topology' has 7" in warnings[0]
        and "reasoning" not in warnings[0]
    )


def test_no_samples_are_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        choose_schedule(config_like(), np.array([], dtype=np.int16))


# --- curriculum show ------------------------------------------------------------------------------------------------


def test_report_of_the_guides_schedule() -> None:
    report = command.report_curriculum(GUIDE, np.array([100, 200, 5000]), 32, 100)
    assert report.samples == (1520, 1040, 640)
    assert report.mix == pytest.approx((0.475, 0.325, 0.2))
    assert report.passes == (15.2, 5.2, 0.128)
    assert [(s.first_step, s.last_step) for s in report.stages] == [(1, 30), (31, 70), (71, 100)]
    assert [s.samples for s in report.stages] == [(768, 192, 0), (512, 512, 256), (240, 336, 384)]
    assert len(report.warnings) == 2
    assert "'explain' is repeated 15.2 times" in report.warnings[0]


def test_report_names_rows_that_are_never_used() -> None:
    schedule = Schedule(("a", "b"), (Stage(1.0, (1, 0)),))
    report = command.report_curriculum(schedule, np.array([100, 50]), 10, 5)
    assert report.passes == (0.5, 0.0)
    assert report.warnings == (
        "difficulty 'b' has weight 0 in every stage: its 50 records are not trained on",
    )


@pytest.mark.parametrize("steps", [1, 2, 59, 60, 61, 1000])
def test_chart_has_its_size_and_the_right_levels(steps: int) -> None:
    cells = command.chart_cells(command.report_curriculum(GUIDE, np.array([9, 9, 9]), 20, steps))
    assert [len(line) for line in cells] == [command.CHART_COLUMNS] * command.CHART_ROWS
    if steps >= 60:
        first, last = [line[0] for line in cells], [line[-1] for line in cells]
        assert first == [1] * 2 + [0] * 8  # 80/20/0 from the bottom
        assert 2 not in [line[10] for line in cells]
        assert [last.count(difficulty) for difficulty in (0, 1, 2)] in ([2, 4, 4], [3, 3, 4])


def test_drawing_is_plain_where_the_terminal_is() -> None:
    report = command.report_curriculum(GUIDE, np.array([9, 9, 9]), 20, 50, ["watch out"])
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    command.print_report(report, Console(file=stream, width=100))
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")
    assert "watch out" in text and "explain" in text and "#" in text


def write_rows(path: Path, difficulties: list[str | None]) -> Path:
    rows = [
        {"instruction": f"q{i}", "output": f"a{i}", **({"difficulty": x} if x else {})}
        for i, x in enumerate(difficulties)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def show(data: Path, *more: str) -> list[str]:
    return ["show", "--model", "some/model", "--data", str(data), "--output-dir", "unused", *more]


def test_show_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_rows(
        tmp_path / "rows.jsonl", ["explain"] * 60 + ["reasoning"] * 30 + ["topology"] * 10
    )
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


def test_show_lists_the_sources(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = write_rows(
        tmp_path / "first.jsonl", ["explain"] * 60 + ["reasoning"] * 30 + ["topology"] * 10
    )
    second = write_rows(tmp_path / "second.jsonl", ["explain"] * 20)
    arguments = show(
        first, "--max-steps", "10", "--global-batch-size", "10", "--use-curriculum", "false"
    )
    arguments.insert(arguments.index(str(first)) + 1, str(second))
    assert command.main([*arguments, "--data-weights", "3", "1", "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert [(source["name"], source["samples"], source["draws"]) for source in sources] == [
        ("first", 100, 75),
        ("second", 20, 25),
    ]
    assert sources[1]["passes"] == {"all": 1.25}
    assert command.main([*arguments, "--data-weights", "3", "1"]) == 0
    text = capsys.readouterr().out
    assert "source second: 20; weight 25.0%, share 25.0%; 25 drawn; passes all 1.25" in text
    assert command.main([*arguments[:-2], "--data-weights", "3", "1"]) == 0
    assert (
        "warning: the weights of the sources hold within each difficulty" in capsys.readouterr().out
    )


def test_show_on_the_bundled_data_needs_no_torch() -> None:
    root = Path(__file__).parents[2]
    code = (
        "import sys; from finetune.commands.curriculum.command import main; code ="
        " main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules or 'transformers' in"
        " sys.modules)"
    )
    arguments = [
        *show(Path("data_samples/train.jsonl"), "--max-steps", "40", "--global-batch-size", "20"),
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=root, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert report["samples"] == {"explain": 380, "reasoning": 260, "topology": 160}
    assert sum(report["rows"].values()) > 1000


def test_show_without_levels_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert command.main(show(write_rows(tmp_path / "rows.jsonl", [None] * 5))) == 0
    assert "'difficulty' field not found" in capsys.readouterr().out


def test_show_refuses_what_training_refuses(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ["explain", "explian"])
    with pytest.raises(DataError, match="rows.jsonl:2"):
        command.main(show(data))
    with pytest.raises(FinetuneError, match="no sample of it"):
        command.main(show(data, "--on-bad-row", "drop"))
    data = write_rows(tmp_path / "mixed.jsonl", ["explain", "explian", None])
    with pytest.raises(DataError, match="records 2 "):  # counted before anything is dropped
        command.main(show(data, "--on-bad-row", "drop"))


@pytest.mark.parametrize("arguments", [[], ["-h"], ["show", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out


def test_unknown_subcommand_is_refused() -> None:
    with pytest.raises(ConfigError, match="action is 'shwo'"):
        command.main(["shwo"])
