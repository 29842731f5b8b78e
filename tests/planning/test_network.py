"""What a step sends between processes: traced with a group that is fake, run by two processes, planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_helpers
import run_patches

from finetune.planning.traffic import network_traffic

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FULL = {"finetuning": "full"}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"model": "Qwen/Qwen3-0.6B", "tokens": 512},
    "full": {"model": "Qwen/Qwen3-0.6B", "tokens": 512, "settings": FULL},
    "pretraining": {"model": "nanochat-d2", "tokens": 512},
}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The folder of the programs, which is no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("processes", [2, 8, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_what_replicas_send_is_planned_and_only_the_last_microbatch_sends(kind, processes):
    from dataclasses import replace

    from roofline import planned
    from roofline_runs import Case, trace

    layers = 2
    case = Case(**KINDS[kind], processes=processes, rows=3, steps=3)
    made = trace(case, layers)
    assert made.first.collectives.plain() == made.second.collectives.plain() == {"numbers": {}, "bytes": {}}
    sent = made.last.collectives.sent + made.rest.collectives.sent

    if not case.pretraining:
        shape = {**roofline_config(case.model), "num_hidden_layers": layers}
        case = replace(case, config=shape)
    assert sent == pytest.approx(network_traffic(planned(case, 3)).bytes, rel=0.01)
    if kind == "lora":
        assert made.last.collectives.numbers["allreduce"] == 1


def roofline_config(model: str) -> dict[str, Any]:
    from roofline_runs import MODELS

    return MODELS[model]


def without_difficulties(data: Path, to: Path) -> Path:
    """The same records: a step sends no losses of difficulties."""
    with to.open("w", encoding="utf-8") as file:
        for record in run_helpers.lines(data):
            file.write(json.dumps({name: value for name, value in record.items() if name != "difficulty"}) + "\n")
    return to


def tokens_file(to: Path) -> Path:
    np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16).tofile(to)
    return to


PRETRAINING = {"vocab_size": 64, "device_batch_size": 2, "dtype": "float32"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_fake_group_sees_what_two_processes_send(tmp_path, kind):
    """Each microbatch and the rest of a step, by kind: numbers and bytes."""
    from roofline_runs import Case, trace

    if kind == "pretraining":
        settings = PRETRAINING | {"train_data_path": str(tokens_file(tmp_path / "tokens.bin")), "max_seq_len": 32}
        settings |= {"output_dir": str(tmp_path / "run"), "depth": 2, "total_batch_size": 384, "num_iterations": 4}
        settings |= {"report_to": "none", "device_type": "cpu", "sample_every": 0}
        module = "finetune.pretrain"
        case = Case("nanochat-d2", 32, settings=PRETRAINING, processes=2, rows=3, steps=3, device_type="cpu")
    else:
        materials = run_helpers.make_materials(tmp_path / "made", layers=2)
        data = without_difficulties(materials.data, tmp_path / "data.jsonl")
        changes = {"data": str(data), "max_steps": 4, "packing": False, **KINDS[kind].get("settings", {})}
        settings = materials.settings(tmp_path / "run", **changes)
        module = "finetune.sft"
        shape = json.loads((materials.model / "config.json").read_text())
        own = {"lora_r": 4, "dtype": "float32", **KINDS[kind].get("settings", {})}
        case = Case("tiny", 96, config=shape, settings=own, processes=2, rows=2, steps=3, device_type="cpu")
    record = tmp_path / "collectives"
    run_helpers.train(
        settings,
        2,
        patch=run_patches.note_collectives,
        patch_arguments=(str(BENCHMARKS), str(record)),
        module=module,
    )
    *microbatches, rest = [json.loads(line) for line in record.read_text().splitlines()][2]
    assert len(microbatches) == case.rows

    made = trace(case, 2)
    assert [made.first.collectives.plain(), made.last.collectives.plain()] == [microbatches[0], microbatches[-1]]
    assert made.rest.collectives.plain() == rest
    assert rest["numbers"]["allgather"] >= 1
