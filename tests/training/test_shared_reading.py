"""What a save and a resume read grows with a rank's share, not with the checkpoint: nobody reads
what another has.
"""

from __future__ import annotations

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
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from finetune.storage.checkpoint_files import reading_shares
from finetune.storage.durable_files import hash_file
from finetune.training import state
from finetune.training.state import HostCopies, SavedTensors, TrainingState, write_tensors


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("shared"))


class Read:
    """The files that ranks hash, by rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.options: dict[str, Any] = {
            "patch": run_patches.note_hashes,
            "patch_arguments": (str(path),),
        }

    def taken(self) -> dict[int, Counter[str]]:
        found: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}
        for line in self.path.read_text().splitlines():
            rank, name = line.split(" ", 1)
            found[int(rank)][name] += 1
        self.path.unlink()
        return found


def files_of(run: Path, *checkpoints: str) -> Counter[str]:
    manifests = {
        name: json.loads((run / name / "manifest.json").read_text()) for name in checkpoints
    }
    return Counter(
        f"{name}/{file}" for name, manifest in manifests.items() for file in manifest["files"]
    )


def test_every_file_is_read_once_by_all_ranks_together(materials, tmp_path):
    run, damaged, read = tmp_path / "run", tmp_path / "damaged", Read(tmp_path / "read")
    changes = {"finetuning": "full", "save_steps": 2, "save_total_limit": 3, **LAYOUTS["zero3"]}
    run_helpers.train(materials.settings(run, **changes), 2, **read.options)
    saved = read.taken()
    # Each checkpoint was a staging folder of another name then. Tensors are hashed as they are
    # written.
    everything = files_of(run, "checkpoint-2", "checkpoint-4", "checkpoint-6")
    of_others = Counter(
        name
        for name in map(file_name, everything.elements())
        if "tokenizer" in name or "chat" in name
    )
    staged = [[name for name in saved[rank].elements() if ".staging-" in name] for rank in (0, 1)]
    assert Counter(map(file_name, staged[0])) == of_others and not staged[1]

    losses = run_helpers.losses(run)
    shutil.rmtree(run / "checkpoint-6")
    shutil.copytree(run, damaged)
    run_helpers.train(materials.settings(run, **changes), 2, **read.options)
    of = read.taken()
    resumed = [
        Counter({name: n for name, n in of[rank].items() if name.startswith("ch")})
        for rank in (0, 1)
    ]
    assert resumed[0] + resumed[1] == files_of(run, "checkpoint-4"), (
        "each once, and none of checkpoint-2"
    )
    for rank in (0, 1):
        of_tensors = {file_name(name) for name in resumed[rank] if name.endswith(".safetensors")}
        assert of_tensors == {
            f"{kind}-{rank:05d}.safetensors" for kind in ("weights", "moments")
        }, "what it loads"
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
    shares = reading_shares(files, readers)
    assert sorted(shares) == sorted(files) and set(shares.values()) <= set(range(readers))
    taken = Counter[int]()
    for name, reader in shares.items():
        taken[reader] += files[name]["size_bytes"]
    assert max(taken.values()) <= sum(sizes) / readers + max(sizes)


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 1 << 40))
def test_a_rank_verifies_what_it_will_load(readers, slices_each, size):
    writers = readers * slices_each
    files = {f"weights-{rank:05d}.safetensors": {"size_bytes": size} for rank in range(writers)}
    files |= {
        f"moments-{rank:05d}.safetensors": {"size_bytes": 2 * size} for rank in range(writers)
    }
    files |= {"state.json": {"size_bytes": 900}, "tokenizer.json": {"size_bytes": 11 << 20}}
    shares = reading_shares(files, readers)
    for rank in range(writers):
        assert {shares[f"{kind}-{rank:05d}.safetensors"] for kind in ("weights", "moments")} == {
            rank // slices_each
        }


# ---------------------------------------------------------------- tensors
FORMS = ("whole", "slices", "parts")


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12),
        st.lists(st.integers(0, 5), max_size=3),
        max_size=6,
    )
)
def test_tensors_are_written_byte_for_byte_as_safetensors_writes_them(tmp_path_factory, shapes):
    folder = tmp_path_factory.mktemp("written")
    tensors = {name: torch.randn(shape) for name, shape in shapes.items() if name != "__metadata__"}
    record = write_tensors(folder / "ours", tensors)
    save_file(tensors, folder / "theirs")
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    assert record == {
        "size_bytes": (folder / "ours").stat().st_size,
        "sha256": hash_file(folder / "ours"),
    }
    loaded = load_file(folder / "ours")
    assert loaded.keys() == tensors.keys() and all(
        torch.equal(loaded[name], tensors[name]) for name in tensors
    )


def test_a_tensor_that_is_not_contiguous_is_written_as_its_numbers_are_ordered(tmp_path):
    tensor = torch.randn(6, 4)
    write_tensors(tmp_path / "file", {"turned": tensor.T, "part": tensor[:, 1]})
    loaded = load_file(tmp_path / "file")
    assert torch.equal(loaded["turned"], tensor.T) and torch.equal(loaded["part"], tensor[:, 1])


def test_only_files_with_what_is_asked_for_are_opened(saved, monkeypatch):
    opened = []
    monkeypatch.setattr(
        state,
        "safe_open",
        lambda path, **_: opened.append(path.name) or safe_open(path, "pt"),
    )
    for form, expected in (
        ("slices", ["weights-00001.safetensors"]),
        ("parts", ["weights-00000.safetensors"]),
    ):
        again = SavedTensors(saved[form].folder, "weights")
        assert opened == []
        again.flat("matrix", 12, 24)  # the second of three slices of 12
        again.flat("matrix", 13, 20)
        assert opened == expected
        opened.clear()


class Trained:
    """A model after a step of Adam."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model(torch.randn(4, 7)).square().sum().backward()
        self.optimizer.step()

    def state(self, form: Any) -> TrainingState:
        return TrainingState(self.model, optimizer=self.optimizer, form=form)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters()
        }
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            found |= {
                f"{key}.{name}": state[key].clone() for key in ("exp_avg", "exp_avg_sq", "step")
            }
        return found


def write_as_0_1_0(folder: Path, trained: Trained) -> None:
    """All parameters on several processes, as versions wrote them in which rank 0 alone did."""
    tensors = trained.tensors()
    shapes = {name: list(parameter.shape) for name, parameter in trained.model.named_parameters()}
    save_file({name: tensors[name] for name in shapes}, folder / "weights.safetensors")
    moments = {name: tensor for name, tensor in tensors.items() if name.startswith("exp_avg")}
    save_file(moments, folder / "moments.safetensors")
    (folder / "state.json").write_text(
        json.dumps({"slices": 0, "optimizer_step": 1, "shapes": shapes}, indent=1)
    )


@pytest.mark.parametrize(
    "ranks", [0, 1, 2, 4, 9], ids=lambda ranks: f"{ranks} ranks" if ranks else "older version"
)
def test_what_ranks_have_shared_is_the_whole_state(tmp_path, ranks):
    before, after = Trained(1), Trained(2)
    if ranks:
        state = before.state("parts")
        for rank in range(ranks):
            records = state.save(tmp_path, rank=rank, world_size=ranks)
            written = sum(
                record["size_bytes"] for name, record in records.items() if name != "state.json"
            )
            assert state.snapshot_bytes(rank, ranks) <= written or rank >= 6, (
                "of six tensors each rank has its own"
            )
            snapshot = state.snapshot(HostCopies(), rank=rank, world_size=ranks)
            assert set(snapshot.files) == records.keys() - {"state.json"}
    else:
        write_as_0_1_0(tmp_path, before)
    names = {path.name for path in tmp_path.iterdir()}
    assert ("weights.safetensors" in names) == (ranks < 2) and len(names) == 1 + 2 * min(
        max(ranks, 1), 6
    )
    after.state("whole").load_weights(tmp_path)
    after.state("whole").load_moments(tmp_path)
    found, expected = after.tensors(), before.tensors()
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


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
    for form, ranks in (("whole", 0), ("slices", 3), ("parts", 3)):
        folder = tmp_path_factory.mktemp(form)
        # the third has nothing to write
        writers = {name: number % 2 for number, name in enumerate(shapes)}
        facts = {
            "slices": ranks if form == "slices" else 0,
            **({"writers": writers} if form == "parts" else {}),
        }
        (folder / "state.json").write_text(
            json.dumps(facts | {"optimizer_step": 1, "shapes": shapes})
        )
        for rank in range(max(ranks, 1)):
            if form == "parts":
                part = {
                    n: t for n, t in tensors.items() if writers[n.removeprefix("exp_avg.")] == rank
                }
            else:
                part = {
                    n: t if form == "whole" else sliced(t, rank, ranks) for n, t in tensors.items()
                }
            suffix = f"-{rank:05d}" if ranks else ""
            if part:
                save_file(
                    {n: t.contiguous() for n, t in part.items()},
                    folder / f"weights{suffix}.safetensors",
                )
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
    for form in FORMS:
        assert torch.equal(saved[form].flat(name, start, stop), expected), form
        assert torch.equal(saved[form].get(name), saved["tensors"][name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_what_a_rank_reads_is_its_share(saved, form, ranks, monkeypatch):
    """And at most two lines of the first axis more, where its slice begins or ends inside one."""
    count = [0]
    plain = state._flat_of
    monkeypatch.setattr(state, "_flat_of", lambda part, *rest: plain(Counting(part, count), *rest))
    for name, tensor in saved["tensors"].items():
        line = math.prod(tensor.shape[1:])
        size = -(-tensor.numel() // ranks)
        for rank in range(ranks):
            count[0] = 0
            saved[form].flat(name, rank * size, (rank + 1) * size)
            assert count[0] <= size + 2 * (0 if form == "slices" else line)
