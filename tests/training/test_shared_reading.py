"""What a save and a resume read grows with a rank's share, not with the checkpoint: nobody reads what another has."""

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
from hypothesis import HealthCheck, given, settings
from run_helpers import LAYOUTS
from safetensors.torch import load_file, save_file

from finetune.errors import FinetuneError
from finetune.storage.checkpoint_files import reading_shares
from finetune.storage.durable_files import hash_file
from finetune.training import state
from finetune.training.state import (
    HostCopies,
    SavedTensors,
    TrainingState,
    with_saved,
    write_tensors,
)


def test_every_file_is_read_once_by_all_ranks_together(tmp_path):
    run, read = tmp_path / "run", tmp_path / "read"
    materials = run_helpers.make_materials(tmp_path / "materials")
    changes = {"finetuning": "full", "save_steps": 2, "save_total_limit": 3, **LAYOUTS["zero3"]}
    noted = {"patch": run_patches.note_hashes, "patch_arguments": (str(read),)}

    def taken() -> list[Counter[str]]:
        """The files that ranks hashed, by rank."""
        lines = [line.split(" ", 1) for line in read.read_text().splitlines()]
        read.unlink()
        return [Counter(name for rank, name in lines if rank == number) for number in "01"]

    run_helpers.train(materials.settings(run, **changes), 2, **noted)
    # Each checkpoint was a staging folder of another name then. Tensors are hashed as they are written.
    staged = [[name for name in files.elements() if ".staging-" in name] for files in taken()]
    assert len(staged[0]) >= 3 and not staged[1]
    assert all("tokenizer" in name or "chat" in name for name in staged[0])

    losses = run_helpers.losses(run)
    shutil.rmtree(run / "checkpoint-6")
    # What rank 1 alone reads is damaged: both go back.
    broken = run / "checkpoint-4" / "moments-00001.safetensors"
    data = bytearray(broken.read_bytes())
    data[-9] ^= 1
    broken.write_bytes(data)
    manifest = json.loads((run / "checkpoint-2" / "manifest.json").read_text())
    ranks = run_helpers.train(materials.settings(run, **changes), 2, **noted)
    assert "checkpoint-4 is skipped: content changed" in ranks.output()
    assert run_helpers.events(run, "resume")[-1]["step"] == 2
    resumed = [Counter(n for n in files.elements() if n.startswith("ch")) for files in taken()]
    every = Counter(f"checkpoint-{step}/{name}" for step in (4, 2) for name in manifest["files"])
    assert resumed[0] + resumed[1] == every, "each once"
    for rank, files in enumerate(resumed):
        tensors = {name.rpartition("/")[2] for name in files if name.endswith(".safetensors")}
        loaded = {f"{kind}-0000{rank}.safetensors" for kind in ("weights", "moments")}
        assert tensors == loaded, "what it loads"
    assert run_helpers.losses(run) == losses


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=60), st.integers(1, 20))
def test_shares_are_a_partition_and_no_larger_than_they_must_be(sizes, readers):
    files = {f"{number}.safetensors": {"size_bytes": size} for number, size in enumerate(sizes)}
    shares = reading_shares(files, readers)
    assert sorted(shares) == sorted(files) and set(shares.values()) <= set(range(readers))
    taken = Counter[int]()
    for name, reader in shares.items():
        taken[reader] += files[name]["size_bytes"]
    assert max(taken.values()) <= sum(sizes) / readers + max(sizes)


FORMS = ("whole", "slices", "parts")
NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)


@settings(deadline=None)
@given(st.dictionaries(NAMES, st.lists(st.integers(0, 5), max_size=3), max_size=6))
def test_tensors_are_written_byte_for_byte_as_safetensors_writes_them(tmp_path_factory, shapes):
    folder = tmp_path_factory.mktemp("written")
    ours, theirs = folder / "ours", folder / "theirs"
    tensors = {name: torch.randn(shape) for name, shape in shapes.items() if name != "__metadata__"}
    record = write_tensors(ours, tensors)
    save_file(tensors, theirs)
    assert ours.read_bytes() == theirs.read_bytes()
    assert record == {"size_bytes": ours.stat().st_size, "sha256": hash_file(ours)}
    matrix = torch.randn(6, 4)
    write_tensors(folder / "turned", {"turned": matrix.T, "part": matrix[:, 1]})  # not contiguous
    loaded = load_file(folder / "turned")
    assert torch.equal(loaded["turned"], matrix.T) and torch.equal(loaded["part"], matrix[:, 1])


class Trained:
    """A model after a step of Adam."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model(torch.randn(4, 7)).square().sum().backward()
        self.optimizer.step()

    def state(self, form: Any) -> TrainingState:
        return TrainingState(self.model, optimizer=self.optimizer, form=form)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, tensor in self.optimizer.state[parameter].items():
                found[f"{key}.{name}"] = tensor.clone()
        return found


def write_as_0_1_0(folder: Path, trained: Trained) -> None:
    """All parameters on several processes, as versions wrote them in which rank 0 alone did."""
    shapes = {name: list(parameter.shape) for name, parameter in trained.model.named_parameters()}
    for file, chosen in (("weights", shapes), ("moments", ("exp_avg",))):
        own = {n: t for n, t in trained.tensors().items() if n.startswith(tuple(chosen))}
        save_file(own, folder / f"{file}.safetensors")
    facts = {"slices": 0, "optimizer_step": 1, "shapes": shapes}
    (folder / "state.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("ranks", [0, 1, 4, 9])
def test_what_ranks_have_shared_is_the_whole_state(tmp_path, ranks):
    """0: as an older version wrote it."""
    before, after = Trained(1), Trained(2)
    if not ranks:
        write_as_0_1_0(tmp_path, before)
    for rank in range(ranks):
        shared = before.state("parts")
        records = shared.save(tmp_path, rank=rank, world_size=ranks)
        records.pop("state.json", None)
        written = sum(record["size_bytes"] for record in records.values())
        # of six tensors each rank has its own
        assert shared.snapshot_bytes(rank, ranks) <= written or rank >= 6
        snapshot = shared.snapshot(HostCopies(), rank=rank, world_size=ranks)
        assert snapshot.files.keys() == records.keys()
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 1 + 2 * min(max(ranks, 1), 6)
    after.state("whole").load_weights(tmp_path)
    after.state("whole").load_moments(tmp_path)
    found, expected = after.tensors(), before.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # The best checkpoint's weights take the place of others, in their dtype.
    output = {name: torch.zeros_like(p).bfloat16() for name, p in after.model.named_parameters()}
    output["buffer"] = torch.ones(1)
    for name, tensor in with_saved(tmp_path, output).items():
        assert torch.equal(tensor, expected.get(name, torch.ones(1)).to(output[name].dtype))


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path):
    Trained(1).state("whole").save(tmp_path, rank=0, world_size=1)
    other = torch.nn.Sequential(torch.nn.Linear(7, 4), *Trained(1).model[1:])
    words = r"0.bias is \(5,\) there and \(4,\) here \(2 differ\)"
    with pytest.raises(FinetuneError, match=words):
        TrainingState(other).load_weights(tmp_path)


def sliced(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    size = -(-tensor.numel() // ranks)
    padded = torch.nn.functional.pad(tensor.flatten(), (0, size * ranks - tensor.numel()))
    return padded[rank * size : (rank + 1) * size].clone()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same tensors whole, in slices of three ranks, and in parts of two."""
    shapes = {"matrix": [7, 5], "vector": [11], "experts": [3, 4, 2], "number": []}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["exp_avg.matrix"] = torch.randn(7, 5)
    writers = {name: number % 2 for number, name in enumerate(shapes)}
    found: dict[str, Any] = {"tensors": tensors}
    for form, ranks in (("whole", 1), ("slices", 3), ("parts", 2)):
        folder = tmp_path_factory.mktemp(form)
        facts: dict[str, Any] = {"optimizer_step": 1, "shapes": shapes, "slices": 0}
        facts |= {"slices": {"slices": 3}, "parts": {"writers": writers}}.get(form, {})
        (folder / "state.json").write_text(json.dumps(facts))
        for rank in range(ranks):
            if form == "slices":
                own = {name: sliced(tensor, rank, ranks) for name, tensor in tensors.items()}
            else:
                own = {n: t for n, t in tensors.items() if writers[n.rpartition(".")[2]] == rank}
            suffix = "" if form == "whole" else f"-0000{rank}"
            save_file(tensors if form == "whole" else own, folder / f"weights{suffix}.safetensors")
        found[form] = SavedTensors(folder, "weights")
    return found


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_of_a_tensor_is_found_in_either_form(saved, monkeypatch, data):
    """And little else is read: at most two lines of the first axis more, where a part begins or ends in one."""
    count, plain = [0], state._flat_of

    class Counting:
        """A slice of a file that notes how many numbers were read through it."""

        def __init__(self, part: Any) -> None:
            self.part, self.get_shape = part, part.get_shape

        def __getitem__(self, index: Any) -> torch.Tensor:
            found = self.part[index]
            count[0] += found.numel()
            return found

    monkeypatch.setattr(state, "_flat_of", lambda part, *rest: plain(Counting(part), *rest))
    name = data.draw(st.sampled_from(sorted(saved["tensors"])))
    whole = saved["tensors"][name].flatten()
    start = data.draw(st.integers(0, whole.numel() + 3))
    stop = data.draw(st.integers(start, whole.numel() + 9))
    expected = torch.zeros(stop - start)
    expected[: max(0, min(stop, whole.numel()) - start)] = whole[start:stop]
    line = math.prod(saved["tensors"][name].shape[1:])
    for form in FORMS:
        count[0] = 0
        assert torch.equal(saved[form].flat(name, start, stop), expected), form
        assert count[0] <= stop - start + (0 if form == "slices" else 2 * line)
        assert torch.equal(saved[form].get(name), saved["tensors"][name])
