"""Out of memory at a chosen step and rank: the run ends with the ids and losses of the run that had
memory enough.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_helpers
import run_patches
from run_helpers import LAYOUTS, Materials

from finetune.batching.microbatch_schedule import schedule_microbatches
from finetune.storage import durable_files
from finetune.training.session import read_out_of_memory, write_out_of_memory

STEPS = 5
CUTOFF = 96


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("oom"))


@pytest.fixture(scope="module")
def reference(materials: Materials):
    """Output folder of the run without trouble, by (finetuning, packing)."""
    made: dict[tuple[str, bool], Path] = {}

    def get(finetuning: str, packing: bool = True) -> Path:
        key = (finetuning, packing)
        if key not in made:
            made[key] = materials.folder / f"reference-{finetuning}-{packing}"
            run_helpers.train(
                settings(materials, made[key], finetuning=finetuning, packing=packing), 2
            )
        return made[key]

    return get


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    return materials.settings(output_dir, **{"max_steps": STEPS, "cutoff_len": CUTOFF, **changes})


def assert_same_training(output_dir: Path, reference: Path) -> None:
    assert run_helpers.sample_ids(output_dir) == run_helpers.sample_ids(reference)
    assert len(run_helpers.losses(output_dir)) == STEPS
    difference = run_helpers.largest_relative_difference(
        run_helpers.losses(reference), run_helpers.losses(output_dir)
    )
    assert difference < 1e-5


def record_lengths(materials: Materials) -> np.ndarray:
    """Tokens of each record, by the run's own tokenized data; every record is one sample here."""
    offsets = [np.load(path) for path in (materials.folder / "cache").glob("*/offsets.npy")]
    assert len(offsets) == 1
    return np.diff(offsets[0])


@pytest.mark.parametrize(
    ("processes", "on_rank", "packing", "where", "finetuning"),
    [
        (2, 1, True, "forward", "lora"),
        pytest.param(2, 0, True, "backward", "lora", marks=pytest.mark.slow),
        (2, 1, False, "backward", "lora"),
        (1, 0, True, "backward", "full"),
    ],
)
def test_a_retry_in_process_changes_nothing(
    materials, reference, tmp_path, processes, on_rank, packing, where, finetuning
):
    """LoRA over DDP, and one process whatever it trains: the step is tried again with smaller
    microbatches.
    """
    output_dir = tmp_path / "run"
    run_helpers.train(
        settings(materials, output_dir, packing=packing, finetuning=finetuning),
        processes,
        patch=run_patches.limit_microbatch_tokens,
        patch_arguments=(on_rank, 100, 3, where),
    )
    assert_same_training(output_dir, reference(finetuning, packing))
    (event,) = run_helpers.events(output_dir, "oom")
    assert event["step"] == 3
    if packing:
        assert (event["old"], event["new"]) == (
            "microbatches of at most 192 tokens",
            "microbatches of at most 96 tokens",
        )
    else:
        assert (event["old"], event["new"]) == (
            "padded microbatches of 2 samples",
            "padded microbatches of 1 samples",
        )
    assert run_helpers.status(output_dir)["state"] == "done"


def test_the_largest_microbatch_shows_in_the_first_step(materials, reference, tmp_path):
    """Only a later step has a microbatch that does not fit; it is rehearsed in the first, as is
    what replaces it.
    """
    lengths, steps = record_lengths(materials), run_helpers.sample_ids(reference("lora"))
    largest = [
        schedule_microbatches(lengths[ids], 2, token_budget=4 * CUTOFF).largest_microbatch_tokens
        for ids in steps
    ]
    limit = max(largest) - 1
    assert largest[0] < limit
    output_dir = tmp_path / "run"
    run_helpers.train(
        settings(materials, output_dir, micro_batch_size=4),
        2,
        patch=run_patches.limit_microbatch_tokens,
        patch_arguments=(1, limit),
    )
    (event,) = run_helpers.events(output_dir, "oom")
    assert event["step"] == 1
    assert (event["old"], event["new"]) == (
        "microbatches of at most 384 tokens",
        "microbatches of at most 192 tokens",
    )
    assert_same_training(output_dir, reference("lora"))


@pytest.mark.parametrize(
    ("name", "layout", "finetuning"),
    [("ddp", "plain", "full"), ("zero2", "zero2", "lora"), ("zero3", "zero3_offload", "full")],
)
def test_a_sharded_run_is_relaunched_with_smaller_microbatches(
    materials, reference, tmp_path, name, layout, finetuning
):
    """DDP's buckets and ZeRO cannot try again: the rank writes oom.json and exits with 4; the next
    start resumes.
    """
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, finetuning=finetuning, save_steps=2, **LAYOUTS[layout])
    limited = {"patch": run_patches.limit_microbatch_tokens, "patch_arguments": (0, 100, 4)}
    first = run_helpers.start(wanted, 2, **limited)
    codes = first.wait()
    assert codes[0] == 4 and codes[1] != 0, first.output()
    assert "start the same command again" in first.output()
    note = json.loads((output_dir / "oom.json").read_text())
    assert note["step"] == 4 and note["token_budget"] == 96
    assert run_helpers.status(output_dir)["exit_code"] == 4
    assert [event["step"] for event in run_helpers.events(output_dir, "oom")] == [4]

    run_helpers.train(wanted, 2, **limited)
    assert [event["step"] for event in run_helpers.events(output_dir, "resume")] == [2]
    assert_same_training(output_dir, reference(finetuning))


def test_two_ranks_may_note_it_at_once(tmp_path, monkeypatch):
    """Rows are about as long on each: the second found the first's file gone, and ended with 1, not
    4.
    """
    plain = durable_files.move

    def move(source, target):
        monkeypatch.setattr(durable_files, "move", plain)
        write_out_of_memory(tmp_path, 1, step=7, token_budget=96)
        plain(source, target)

    monkeypatch.setattr(durable_files, "move", move)
    write_out_of_memory(tmp_path, 0, step=7, token_budget=96)
    assert read_out_of_memory(tmp_path) == {"step": 7, "token_budget": 96}
    assert [path.name for path in tmp_path.iterdir()] == ["oom.json"]


def test_without_a_checkpoint_the_relaunched_run_begins_anew(materials, reference, tmp_path):
    """The rehearsal fails in the first step of a ZeRO-3 run, so there is nothing to go on from."""
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, finetuning="lora", **LAYOUTS["zero3"])
    limited = {"patch": run_patches.limit_microbatch_tokens, "patch_arguments": (1, 100)}
    first = run_helpers.start(wanted, 2, **limited)
    assert first.wait()[1] == 4, first.output()
    assert json.loads((output_dir / "oom.json").read_text())["step"] == 1
    run_helpers.train(wanted, 2, **limited)
    assert_same_training(output_dir, reference("lora"))


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_the_floor_names_the_sample(materials, tmp_path, packing):
    """One process: not even a microbatch of one sample fits."""
    output_dir = tmp_path / "run"
    ranks = run_helpers.train(
        settings(materials, output_dir, packing=packing),
        1,
        expect=1,
        patch=run_patches.limit_microbatch_tokens,
        patch_arguments=(0, 50),
    )
    record, tokens = int(record_lengths(materials).argmax()), record_lengths(materials).max()
    assert tokens > 50
    assert f"record {record} of the data" in ranks.output() and f"{tokens} tokens" in ranks.output()
    assert "--cutoff-len" in ranks.output()
    assert run_helpers.status(output_dir)["state"] == "failed"


def test_the_floor_names_the_sample_when_sharded(materials, tmp_path):
    """ZeRO: each start takes smaller microbatches, until one of the longest sample does not fit
    either.
    """
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, micro_batch_size=1, packing=False, **LAYOUTS["zero2"])
    limited = {
        "patch": run_patches.limit_microbatch_tokens,
        "patch_arguments": (0, 50),
        "launched": True,
    }
    ranks = run_helpers.start(wanted | {"micro_batch_size": 2}, 1, **limited)
    assert ranks.wait() == [4]
    ranks = run_helpers.start(wanted | {"micro_batch_size": 2}, 1, **limited)
    assert ranks.wait() == [1]
    record, tokens = int(record_lengths(materials).argmax()), record_lengths(materials).max()
    assert f"record {record} of the data" in ranks.output() and f"{tokens} tokens" in ranks.output()


def test_the_users_own_smaller_microbatches_win_over_the_note(materials, tmp_path):
    output_dir = tmp_path / "run"
    wanted = settings(
        materials, output_dir, max_steps=2, save_steps=1, packing=False, micro_batch_size=2
    )
    run_helpers.train(wanted, 1)
    (output_dir / "oom.json").write_text(
        json.dumps({"step": 1, "token_budget": None, "samples_per_row": 4})
    )
    (output_dir / "checkpoint-2" / "state.json").unlink()  # so that there is something left to do
    run_helpers.train(wanted, 1)
    assert [event["rows"] for event in run_helpers.events(output_dir, "start")] == [
        "padded microbatches of 2 samples"
    ] * 2
