"""What ranks tell each other: plain values that arrive as they are, and nothing that runs."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
import run_helpers
import run_patches
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT
from run_helpers import Materials

from finetune.runtime.collectives import plain


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("control"))


def test_a_pickle_of_a_stranger_who_joined_does_not_run(materials: Materials, tmp_path: Path):
    """He is rank 1, and sends what torch's own collective for objects would unpickle."""
    proof = tmp_path / "it ran"
    ranks = run_helpers.start(
        materials.settings(tmp_path / "run"), 2, patch=run_patches.stranger, patch_arguments=(str(proof),)
    )
    assert ranks.wait() == [1, 0], ranks.output()
    assert not proof.exists(), "it ran"
    assert "rank 1 sent something that is not JSON" in ranks.output()


def test_what_ranks_exchange_arrives_as_it_was(tmp_path: Path):
    ranks = run_helpers.start(
        {"output_dir": str(tmp_path / "run")}, 2, patch=run_patches.exchange, patch_arguments=(str(tmp_path),)
    )
    assert ranks.wait() == [0, 0], ranks.output()
    first, second = ((tmp_path / f"{rank}.json").read_text() for rank in (0, 1))
    assert first == second
    gathered, shared, sums, token = json.loads(first)
    numbers = "[1e-320, NaN, -0.0, 0.30000000000000004, Infinity, 1152921504606846977]"
    assert json.dumps(gathered) == json.dumps([[0, "short", "", None], [1, json.loads(numbers), "x" * 1000, None]])
    assert (shared, sums) == ({"mine": 0}, [0.1 + 0.2, 1]) and len(token) == 12


@given(st.floats())
def test_floats_survive_bit_for_bit(value: float):
    bits = struct.pack("d", plain([value])[0])
    assert bits == struct.pack("d", value) or value != value


def test_what_is_not_plain_is_refused_with_one_process_too():
    with pytest.raises(TypeError):
        plain({"path": Path("x")})
    assert plain((1, None, {"a": (2,)})) == [1, None, {"a": [2]}]


def test_no_collective_of_torch_that_unpickles_is_used():
    used = re.compile(r"(gather|scatter|broadcast|send|recv)_object|object_list\(|\bpickle\.|torch\.load\(")
    sources = sorted((ROOT / "finetune").rglob("*.py"))
    assert sources and [path for path in sources if used.search(path.read_text())] == []
