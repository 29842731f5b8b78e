"""What a save and a resume read grows with a rank's share, not with the checkpoint: nobody reads what another has."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import run_helpers
import run_patches
import torch
from hypothesis import given, settings
from run_helpers import LAYOUTS, Materials
from safetensors.torch import save_file

from finetune.storage.checkpoint_manifest import _share
from finetune.training import saved_tensors
from finetune.training.saved_tensors import SavedTensors


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("shared"))


class Read:
    """The files that ranks hash, by rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.options: dict[str, Any] = {"patch": run_patches.note_hashes, "patch_arguments": (str(path),)}

    def taken(self) -> dict[int, Counter[str]]:
        found: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}
        for line in self.path.read_text().splitlines():
            rank, name = line.split(" ", 1)
            found[int(rank)][name] += 1
        self.path.unlink()
        return found


def files_of(run: Path, *checkpoints: str) -> Counter[str]:
    manifests = {name: json.loads((run / name / "manifest.json").read_text()) for name in checkpoints}
    return Counter(f"{name}/{file}" for name, manifest in manifests.items() for file in manifest["files"])


def test_every_file_is_read_once_by_all_ranks_together(materials, tmp_path):
    run, damaged, read = tmp_path / "run", tmp_path / "damaged", Read(tmp_path / "read")
    changes = {"finetuning": "full", "save_steps": 2, "save_total_limit": 3, **LAYOUTS["zero3"]}
    run_helpers.train(materials.settings(run, **changes), 2, **read.options)
    saved = read.taken()
    # Each checkpoint was a staging folder of another name then.
    everything = files_of(run, "checkpoint-2", "checkpoint-4", "checkpoint-6")
    assert Counter(map(file_name, (saved[0] + saved[1]).elements())) == Counter(map(file_name, everything))
    assert set(map(file_name, saved[1])) == {"weights-00001.safetensors", "moments-00001.safetensors"}

    losses = run_helpers.losses(run)
    shutil.rmtree(run / "checkpoint-6")
    shutil.copytree(run, damaged)
    run_helpers.train(materials.settings(run, **changes), 2, **read.options)
    of = read.taken()
    resumed = [Counter({name: n for name, n in of[rank].items() if name.startswith("ch")}) for rank in (0, 1)]
    assert resumed[0] + resumed[1] == files_of(run, "checkpoint-4"), "each once, and none of checkpoint-2"
    sizes = [sum((run / name).stat().st_size for name in resumed[rank]) for rank in (0, 1)]
    assert max(sizes) < 0.7 * sum(sizes)
    assert run_helpers.losses(run) == losses

    # What rank 1 alone reads is damaged: both go back.
    broken = damaged / next(name for name in resumed[1] if "moments" in name)
    data = bytearray(broken.read_bytes())
    data[-9] ^= 1
    broken.write_bytes(data)
    ranks = run_helpers.train(materials.settings(damaged, **changes), 2)
    assert "checkpoint-4 is skipped: content changed" in ranks.output()
    assert run_helpers.events(damaged, "resume")[-1]["step"] == 2
    assert run_helpers.losses(damaged) == losses


def file_name(path: str) -> str:
    return path.rpartition("/")[2]


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=60), st.integers(1, 20))
def test_shares_are_a_partition_and_no_larger_than_they_must_be(sizes, readers):
    files = {f"{number}.safetensors": {"size_bytes": size} for number, size in enumerate(sizes)}
    shares = [_share(files, reader, readers) for reader in range(readers)]
    assert sorted(itertools.chain.from_iterable(shares)) == sorted(files)
    largest = max(sum(files[name]["size_bytes"] for name in share) for share in shares)
    assert largest <= sum(sizes) / readers + max(sizes)


# ---------------------------------------------------------------- tensors


class Counting:
    """A slice of a file that notes how many numbers were read through it."""

    def __init__(self, part: Any, count: list[int]) -> None:
        self.part, self.count = part, count

    def get_shape(self) -> list[int]:
        return self.part.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self.part[index]
        self.count[0] += found.numel()
        return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same tensors whole, and in slices of three ranks."""
    tensors = {
        "matrix": torch.randn(7, 5),
        "vector": torch.randn(11),
        "experts": torch.randn(3, 4, 2),
        "number": torch.randn(()),
        "exp_avg.matrix": torch.randn(7, 5),
    }
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if "." not in name}
    found: dict[str, Any] = {"tensors": tensors}
    for form, ranks in (("whole", 0), ("slices", 3)):
        folder = tmp_path_factory.mktemp(form)
        (folder / "state.json").write_text(json.dumps({"slices": ranks, "optimizer_step": 1, "shapes": shapes}))
        for rank in range(max(ranks, 1)):
            part = {name: tensor if not ranks else sliced(tensor, rank, ranks) for name, tensor in tensors.items()}
            suffix = f"-{rank:05d}" if ranks else ""
            save_file({n: t.contiguous() for n, t in part.items()}, folder / f"weights{suffix}.safetensors")
        found[form] = SavedTensors(folder, "weights")
    return found


def sliced(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    size = -(-tensor.numel() // ranks)
    padded = torch.nn.functional.pad(tensor.flatten(), (0, size * ranks - tensor.numel()))
    return padded[rank * size : (rank + 1) * size]


@settings(deadline=None)
@given(data=st.data())
def test_any_part_of_a_tensor_is_found_in_either_form(saved, data):
    name = data.draw(st.sampled_from(sorted(saved["tensors"])))
    whole = saved["tensors"][name].flatten()
    start = data.draw(st.integers(0, whole.numel() + 3))
    stop = data.draw(st.integers(start, whole.numel() + 9))
    expected = torch.zeros(stop - start)
    expected[: max(0, min(stop, whole.numel()) - start)] = whole[start:stop]
    for form in ("whole", "slices"):
        assert torch.equal(saved[form].flat(name, start, stop), expected), form
        assert torch.equal(saved[form].get(name), saved["tensors"][name])


@pytest.mark.parametrize("form", ["whole", "slices"])
@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_what_a_rank_reads_is_its_share(saved, form, ranks, monkeypatch):
    """And at most two lines of the first axis more, where its slice begins or ends inside one."""
    count = [0]
    plain = saved_tensors._flat_of
    monkeypatch.setattr(saved_tensors, "_flat_of", lambda part, *rest: plain(Counting(part, count), *rest))
    for name, tensor in saved["tensors"].items():
        line = math.prod(tensor.shape[1:])
        size = -(-tensor.numel() // ranks)
        for rank in range(ranks):
            count[0] = 0
            saved[form].flat(name, rank * size, (rank + 1) * size)
            assert count[0] <= size + 2 * (line if form == "whole" else 0)
