"""What a rank writes, hashes and reads of a 32B model's checkpoint is its share; rotation reads
nothing.
"""

from __future__ import annotations

import importlib
import sys
from math import prod

import pytest
from launching import ROOT

sys.path.append(str(ROOT / "exhaustive" / "scale"))  # where its script finds what is beside it
scale = importlib.import_module("checkpoints")

RANKS = 4
SMALL = 200_000  # headers, state.json, the manifest
SIZE = 12 * sum(map(prod, scale.DENSE.shapes().values()))


@pytest.mark.parametrize("form", ["slices", "parts"])
def test_a_save_is_shared_hashed_as_it_is_written_and_rotation_reads_nothing(tmp_path, form):
    layout = scale.Layout(scale.DENSE, RANKS, form, tmp_path)
    saves = layout.save([1, 2, 3], keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    for counted in saves:
        assert scale.in_all(counted, "hashed") == pytest.approx(SIZE, rel=1e-4)
        # the largest tensor is 2.4% of all
        assert scale.most(counted, "written") < 1.07 * SIZE / RANKS
        assert scale.in_all(counted, "read") < SMALL
        # While ranks could wait for one another, threads work: the rest is what rank 0 adds.
        assert scale.most(counted, "main") < SMALL
    assert layout.meeting.calls["gather"] == 3 * (1 + 1 + 1)  # token, records, name


@pytest.mark.parametrize("ranks", [RANKS, 2])
def test_a_resume_reads_each_file_once_and_a_rank_what_it_loads(tmp_path, ranks):
    writers = scale.Layout(scale.DENSE, RANKS, "slices", tmp_path)
    writers.save([1], keep=2)
    layout = scale.Layout(scale.DENSE, ranks, "slices", tmp_path)
    counted, share = layout.resume(1), SIZE / ranks
    assert scale.in_all(counted, "hashed") == pytest.approx(SIZE, rel=1e-4), "each file once"
    # Weights twice: for the model, then for the float32 masters.
    assert scale.most(counted, "loaded") == pytest.approx(share * 16 / 12, rel=1e-3)
    assert scale.most(counted, "main") < SMALL and scale.most(counted, "read") < 1.001 * share
    # what it has verified
    assert all(counter["again"] == counter["loaded"] for counter in counted.values())
    if ranks == RANKS:
        assert {counter["loaded_files"] for counter in counted.values()} == {3}, "its own alone"
    assert layout.meeting.calls["gather"] == 1
