"""A few kills of exhaustive/crash.py; all of them are `make crash`."""

from __future__ import annotations

import pytest
from crash import KINDS, KINDS_BEHIND, Crashes


@pytest.mark.slow
@pytest.mark.parametrize(("finetuning", "layout"), KINDS[1:3])
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, finetuning, layout):
    kill = Crashes(tmp_path, seed=3).kill(1, finetuning, layout)
    assert not kill.why and kill.steps_done, kill


def test_a_run_killed_while_it_writes_in_the_background_goes_on_to_the_same_weights(tmp_path):
    kill = Crashes(tmp_path, seed=4).kill_behind(1, *KINDS_BEHIND[0])
    assert not kill.why and kill.steps_done > kill.resumed_from, kill
