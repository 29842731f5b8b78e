"""How a step's samples are grouped, and how its microbatches become smaller."""

from __future__ import annotations

import numpy as np

from finetune.batching.steps import Execution, LossGroups


def test_each_sample_is_in_the_group_of_its_source_and_difficulty():
    groups = LossGroups(("easy", "hard"), ("first", "second"), (0, 3, 5))
    found = groups.of(np.array([0, 2, 3, 4]), np.array([0, -1, 1, 0]))
    assert found.tolist() == [0, 2, 4, 3] and len(groups) == 6
    values = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert groups.by_source(values) == {"first": 7.0, "second": 56.0}
    assert groups.by_difficulty(values) == {"easy": 9.0, "hard": 18.0}


def test_a_microbatch_becomes_smaller_down_to_the_longest_sample():
    packed = Execution(0, 1, token_budget=100, samples_per_microbatch=None)
    assert packed.smaller(30) == Execution(0, 1, token_budget=50, samples_per_microbatch=None)
    assert packed.smaller(80) == Execution(0, 1, token_budget=80, samples_per_microbatch=None)
    assert packed.smaller(100) is None
    padded = Execution(0, 1, token_budget=None, samples_per_microbatch=3)
    assert padded.smaller(100) == Execution(0, 1, token_budget=None, samples_per_microbatch=1)
    assert Execution(0, 1, token_budget=None, samples_per_microbatch=1).smaller(100) is None
