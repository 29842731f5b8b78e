"""A few kills of exhaustive/crash.py; all of them are `make crash`."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash import KINDS, KINDS_BEHIND, Crashes


@pytest.mark.parametrize(("finetuning", "layout"), [KINDS[1], KINDS[2]], ids=lambda part: part)
def test_a_killed_run_goes_on_to_the_same_weights(
    tmp_path: Path, finetuning: str, layout: str
) -> None:
    crashes = Crashes(tmp_path, seed=3)
    kill = crashes.kill(1, finetuning, layout)
    assert not kill.why, kill
    assert kill.steps_done


def test_a_run_killed_while_it_writes_behind_the_training_goes_on_to_the_same_weights(
    tmp_path: Path,
) -> None:
    kill = Crashes(tmp_path, seed=4).kill_behind(1, *KINDS_BEHIND[0])
    assert not kill.why, kill
    assert kill.steps_done > kill.resumed_from
