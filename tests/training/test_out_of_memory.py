"""Out of memory at a chosen step and rank: the run ends with the ids and losses of the run that had enough."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import run_helpers
import run_patches
from run_helpers import LAYOUTS, Materials, events

from finetune.batching.microbatch_schedule import schedule_microbatches
from finetune.training.build import make_execution

STEPS, CUTOFF = 5, 96


@pytest.fixture(scope="module")
def reference(materials: Materials) -> Callable[[str], Path]:
    """Output folder of the run without trouble, by what is trained."""

    def get(finetuning: str) -> Path:
        folder = materials.folder / f"reference-{finetuning}"
        if not folder.exists():
            run_helpers.train(settings(materials, folder, finetuning=finetuning))
        return folder

    return get


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    return materials.settings(output_dir, **{"max_steps": STEPS, "cutoff_len": CUTOFF, **changes})


def limited(*arguments: Any) -> dict[str, Any]:
    return {"patch": run_patches.limit_microbatch_tokens, "patch_arguments": arguments}


def with_children(rank: int, *arguments: Any) -> None:
    """A rank here is a daemon, which may not start a data loader's processes."""
    multiprocessing.current_process()._config["daemon"] = False
    run_patches.limit_microbatch_tokens(rank, *arguments)


def assert_same_training(output_dir: Path, reference: Path) -> None:
    assert run_helpers.sample_ids(output_dir) == run_helpers.sample_ids(reference)
    ours, theirs = (run_helpers.losses(folder) for folder in (output_dir, reference))
    assert len(ours) == STEPS and ours == pytest.approx(theirs, rel=1e-5)
    assert run_helpers.status(output_dir)["state"] == "done"


def record_lengths(materials: Materials) -> np.ndarray:
    """Tokens of each record, by the run's own tokenized data; every record is one sample here."""
    (offsets,) = (np.load(path) for path in (materials.folder / "cache").glob("*/offsets.npy"))
    return np.diff(offsets)


def smaller(output_dir: Path) -> tuple[int, str, str]:
    (event,) = events(output_dir, "oom")
    return event["step"], event["old"], event["new"]


PACKED = tuple(f"microbatches of at most {tokens} tokens" for tokens in (192, 96))
PADDED = tuple(f"padded microbatches of {samples} samples" for samples in (2, 1))


@pytest.mark.parametrize(
    ("processes", "where", "changes"),
    [
        (2, "forward", {}),
        (2, "backward", {"packing": False}),
        # microbatches of the next steps are planned by then
        (1, "backward", {"finetuning": "full", "dataloader_num_workers": 1}),
    ],
    ids=["packed", "padded", "full"],
)
def test_a_retry_in_process_changes_nothing(
    materials, reference, tmp_path, processes, where, changes
):
    """LoRA over DDP, and one process whatever it trains: tried again with smaller microbatches."""
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, **changes)
    limit = limited(processes - 1, 100, 3, where) | {"patch": with_children}
    run_helpers.train(wanted, processes, **limit)
    assert_same_training(output_dir, reference(changes.get("finetuning", "lora")))
    assert smaller(output_dir) == (3, *(PADDED if "packing" in changes else PACKED))


def test_the_largest_microbatch_shows_in_the_first_step(materials, reference, tmp_path):
    """Only a later step has it; it is rehearsed in the first, as is what replaces it."""
    lengths, steps = record_lengths(materials), run_helpers.sample_ids(reference("lora"))
    plans = [schedule_microbatches(lengths[ids], 2, token_budget=4 * CUTOFF) for ids in steps]
    largest = [plan.largest_microbatch_tokens for plan in plans]
    assert largest[0] < max(largest) - 1
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, micro_batch_size=4)
    run_helpers.train(wanted, 2, **limited(1, max(largest) - 1))
    assert smaller(output_dir) == (1, "microbatches of at most 384 tokens", PACKED[0])
    assert_same_training(output_dir, reference("lora"))


@pytest.mark.parametrize(
    ("layout", "finetuning"),
    [("plain", "full"), pytest.param("zero3", "lora", marks=pytest.mark.slow)],
)
def test_a_sharded_run_is_relaunched_with_smaller_microbatches(
    materials, reference, tmp_path, layout, finetuning
):
    """DDP's buckets and ZeRO cannot try again: the rank writes oom.json and exits with 4."""
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, finetuning=finetuning, save_steps=2, **LAYOUTS[layout])
    first = run_helpers.start(wanted, 2, **limited(0, 100, 4))
    codes = first.wait()
    assert codes[0] == 4 and codes[1] != 0, first.output()
    assert "start the same command again" in first.output()
    note = json.loads((output_dir / "oom.json").read_text())
    assert (note["step"], note["token_budget"]) == (4, 96) and smaller(output_dir) == (4, *PACKED)
    assert run_helpers.status(output_dir)["exit_code"] == 4

    run_helpers.train(wanted, 2, **limited(0, 100, 4))
    assert [event["step"] for event in events(output_dir, "resume")] == [2]
    assert_same_training(output_dir, reference(finetuning))


def test_the_floor_names_the_sample(materials, tmp_path):
    """Not even a microbatch of one sample fits."""
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, micro_batch_size=1, packing=False, **LAYOUTS["zero2"])
    output = run_helpers.train(wanted, expect=1, launched=True, **limited(0, 50)).output()
    lengths = record_lengths(materials)
    assert f"record {lengths.argmax()} of the data alone has {lengths.max()} tokens" in output
    assert "--cutoff-len" in output and run_helpers.status(output_dir)["state"] == "failed"


def test_the_smaller_of_the_users_and_the_notes_microbatches_is_taken():
    world = SimpleNamespace(rank=0, world_size=1)
    note = {"step": 1, "token_budget": None, "samples_per_row": None}
    for noted, asked, taken in ((None, 4, 4), (4, 2, 2), (2, 4, 2)):
        found = note | {"token_budget": noted, "samples_per_row": noted}
        session = SimpleNamespace(world=world, out_of_memory_note=lambda found=found: found)
        for name in ("token_budget", "samples_per_microbatch"):
            assert getattr(make_execution(session, **{name: asked}), name) == taken
