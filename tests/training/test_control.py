"""What ranks exchange: plain values that arrive as they are, and nothing that runs."""

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
from thread_ranks import Meeting, ThreadControl

from finetune.errors import FinetuneError
from finetune.runtime import parent_watchdog
from finetune.runtime.collectives import plain
from finetune.training import control
from finetune.training.control import Control


def test_a_pickle_of_a_stranger_who_joined_does_not_run(tmp_path: Path):
    """He is rank 1, and sends what torch's own collective for objects would unpickle."""
    materials, proof = run_helpers.make_materials(tmp_path / "materials"), tmp_path / "it ran"
    patch = {"patch": run_patches.stranger, "patch_arguments": (str(proof),)}
    ranks = run_helpers.start(materials.settings(tmp_path / "run"), 2, **patch)
    assert ranks.wait() == [1, 0], ranks.output()
    assert not proof.exists(), "it ran"
    assert "rank 1 sent something that is not JSON" in ranks.output()


def exchange(rank: int, folder: str) -> None:
    """Instead of a run: what ranks give each other, and whether they know the same, written down."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    two = Control(2)
    differing = ""
    two.check_equal({"a": 1})
    try:
        two.check_equal({"a": 1, "b": rank})
    except FinetuneError as error:
        differing = error.what
    (Path(folder) / f"{rank}.txt").write_text(differing)
    dist.destroy_process_group()
    run_patches.exchange(rank, folder)


def test_what_ranks_exchange_arrives_as_it_was(tmp_path: Path):
    patch = {"patch": exchange, "patch_arguments": (str(tmp_path),)}
    ranks = run_helpers.start({"output_dir": str(tmp_path / "run")}, 2, **patch)
    assert ranks.wait() == [0, 0], ranks.output()
    first, second = ((tmp_path / f"{rank}.json").read_text() for rank in (0, 1))
    assert first == second
    gathered, shared, sums, token = json.loads(first)
    numbers = "[1e-320, NaN, -0.0, 0.30000000000000004, Infinity, 1152921504606846977]"
    expected = [[0, "short", "", None], [1, json.loads(numbers), "x" * 1000, None]]
    assert json.dumps(gathered) == json.dumps(expected)
    assert (shared, sums) == ({"mine": 0}, [0.1 + 0.2, 1]) and len(token) == 12
    for rank in (0, 1):
        differing = (tmp_path / f"{rank}.txt").read_text()
        assert differing == "ranks do not have the same run: b is 0 on rank 0, 1 on rank 1"


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


def counted(plain: Callable[[bool], bool], late: threading.Event) -> Callable[[bool], bool]:
    """Set `late` when it was asked for the tenth time."""
    asked = []

    def any_of(flag: bool) -> bool:
        asked.append(flag)
        if len(asked) == 10:
            late.set()
        return plain(flag)

    return any_of


@pytest.mark.parametrize("moves", [True, False])
def test_a_rank_whose_disk_does_not_answer_ends_the_run_on_all(monkeypatch, moves: bool):
    """No collective waits for a work: ranks ask again and again, as long as bytes move, however slowly."""
    monkeypatch.setattr(control, "POLL_SECONDS", 0.001)
    unmoved = 0.0 if moves else 3601.0
    monkeypatch.setattr(parent_watchdog.progress, "seconds_unmoved", lambda since: unmoved)
    meeting, late = Meeting(3), threading.Event()

    def rank(number: int) -> str:
        mine = ThreadControl(meeting, timeout_seconds=3600)
        if number == 0:
            monkeypatch.setattr(mine, "any", counted(mine.any, late))

        def work() -> tuple[str, bool]:
            return threading.current_thread().name, number != 1 or late.wait(60)

        try:
            return str(mine.together(work).result())
        except FinetuneError as error:
            return str(error)

    found = meeting.run(rank)
    late.set()
    if moves:
        assert found == ["('together', True)"] * 3
    else:
        assert len(set(found)) == 1 and "neither read nor written anything for 3600 s" in found[0]


def test_the_error_of_a_work_is_its_ranks_alone():
    meeting = Meeting(2)

    def rank(number: int) -> str:
        done = ThreadControl(meeting).together(lambda: 1 // number)
        return repr(done.exception() or done.result())

    error = "ZeroDivisionError('integer division or modulo by zero')"
    assert meeting.run(rank) == [error, "1"]
    assert repr(Control(1).together(lambda: 1 // 0).exception()) == error
