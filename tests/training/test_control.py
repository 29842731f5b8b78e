"""What ranks tell each other: plain values that arrive as they are, and nothing that runs."""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import run_helpers
import run_patches
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT
from run_helpers import Materials
from thread_ranks import Meeting, ThreadControl

from finetune.errors import FinetuneError
from finetune.runtime import parent_watchdog
from finetune.runtime.collectives import plain
from finetune.training import control
from finetune.training.control import Control


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("control"))


def test_a_pickle_of_a_stranger_who_joined_does_not_run(materials: Materials, tmp_path: Path):
    """He is rank 1, and sends what torch's own collective for objects would unpickle."""
    proof = tmp_path / "it ran"
    ranks = run_helpers.start(
        materials.settings(tmp_path / "run"),
        2,
        patch=run_patches.stranger,
        patch_arguments=(str(proof),),
    )
    assert ranks.wait() == [1, 0], ranks.output()
    assert not proof.exists(), "it ran"
    assert "rank 1 sent something that is not JSON" in ranks.output()


def test_what_ranks_exchange_arrives_as_it_was(tmp_path: Path):
    ranks = run_helpers.start(
        {"output_dir": str(tmp_path / "run")},
        2,
        patch=run_patches.exchange,
        patch_arguments=(str(tmp_path),),
    )
    assert ranks.wait() == [0, 0], ranks.output()
    first, second = ((tmp_path / f"{rank}.json").read_text() for rank in (0, 1))
    assert first == second
    gathered, shared, sums, token = json.loads(first)
    numbers = "[1e-320, NaN, -0.0, 0.30000000000000004, Infinity, 1152921504606846977]"
    assert json.dumps(gathered) == json.dumps(
        [[0, "short", "", None], [1, json.loads(numbers), "x" * 1000, None]]
    )
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
    # Called; a setting of transformers has the name.
    used = re.compile(
        r"(gather|scatter|broadcast|send|recv)_object\(|object_list\(|\bpickle\.|torch\.load\("
    )
    sources = sorted((ROOT / "finetune").rglob("*.py"))
    assert sources and [path for path in sources if used.search(path.read_text())] == []


# ----------------------------------------------------- work that takes longer than a collective may


def test_ranks_that_wait_for_one_another_ask_again_and_again(monkeypatch: pytest.MonkeyPatch):
    """No collective waits for a work: rank 1's takes as long as the others need to ask five
    times.
    """
    monkeypatch.setattr(control, "POLL_SECONDS", 0.001)
    meeting, late = Meeting(3), threading.Event()

    def rank(number: int) -> tuple[int, bool]:
        mine = ThreadControl(meeting)
        if number == 0:
            monkeypatch.setattr(mine, "any", counted(mine.any, late))

        def work() -> int:
            assert threading.current_thread().name == "together"
            assert number != 1 or late.wait(60)
            return number

        return mine.together(work).result(), late.is_set()

    assert meeting.run(rank) == [(0, True), (1, True), (2, True)]


def counted(plain: Callable[[bool], bool], late: threading.Event) -> Callable[[bool], bool]:
    asked = []

    def any_of(flag: bool) -> bool:
        asked.append(flag)
        if len(asked) == 10:
            late.set()
        return plain(flag)

    return any_of


def test_the_error_of_a_work_is_its_rank_s_alone(monkeypatch: pytest.MonkeyPatch):
    meeting = Meeting(2)

    def rank(number: int) -> str:
        done = ThreadControl(meeting).together(lambda: 1 // number)
        return repr(done.exception() or done.result())

    error = "ZeroDivisionError('integer division or modulo by zero')"
    assert meeting.run(rank) == [error, "1"]
    assert repr(Control(1).together(lambda: 1 // 0).exception()) == error


@pytest.mark.parametrize("moves", [True, False])
def test_a_rank_whose_disk_does_not_answer_ends_the_run_on_all(
    monkeypatch: pytest.MonkeyPatch, moves: bool
):
    """A rank that waits for it is not stuck; a work that moves bytes, however slowly, is waited
    for.
    """
    monkeypatch.setattr(control, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(
        parent_watchdog.progress, "seconds_unmoved", lambda since: 0.0 if moves else 3601.0
    )
    meeting, late = Meeting(2), threading.Event()

    def rank(number: int) -> str:
        mine = ThreadControl(meeting, timeout_seconds=3600)
        if number == 0:
            monkeypatch.setattr(mine, "any", counted(mine.any, late))
        try:
            return str(mine.together(lambda: number != 1 or late.wait(60)).result())
        except FinetuneError as error:
            return str(error)

    told = meeting.run(rank)
    late.set()
    if moves:
        assert told == ["True", "True"]
    else:
        assert told[0] == told[1] and "neither read nor written anything for 3600 s" in told[0]
