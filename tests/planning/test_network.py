"""What a step sends between processes: traced with a group that is fake, run by two processes,
planned.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_helpers
import run_patches

from finetune.planning.inputs import workload_of
from finetune.planning.shapes import shape_of_model
from finetune.planning.traffic import network_traffic
from finetune.planning.workload import Cluster

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "roofline"
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


@pytest.mark.parametrize(("kind", "processes"), [("lora", 2), ("full", 16), ("pretraining", 16)])
def test_what_replicas_send_is_planned_and_only_the_last_microbatch_sends(kind, processes):
    from roofline import planned
    from roofline_runs import MODELS, Case, trace

    case = Case(**KINDS[kind], processes=processes, rows=3, steps=3)
    made = trace(case, 2)
    for part in (made.first, made.second):
        assert part.collectives.plain() == {"numbers": {}, "bytes": {}}
    sent = made.last.collectives.sent + made.rest.collectives.sent
    if not case.pretraining:
        case = replace(case, config={**MODELS[case.model], "num_hidden_layers": 2})
    assert sent == pytest.approx(network_traffic(planned(case, 3)).bytes, rel=0.15)
    if kind == "lora":
        assert made.last.collectives.numbers["allreduce"] == 1


@pytest.mark.parametrize(
    ("settings", "processes"),
    [({}, 16), (FULL, 2)],
    ids=["lora", "full"],
)
def test_what_zero3_gathers_and_reduces_is_planned(settings, processes):
    """By DeepSpeed's engine: 2 P + P_t in each microbatch, less what it keeps, more what frozen
    blocks are gathered.
    """
    from roofline_runs import Case, empty_model
    from roofline_zero3 import zero3_config, zero3_trace

    case = Case("Qwen/Qwen3-0.6B", 512, processes=processes, settings=settings)
    made = zero3_trace(case, 2)
    assert made.first.collectives.plain() == made.last.collectives.plain()
    sent = sum(part.collectives.sent for part in (made.first, made.last, made.rest))
    shape = shape_of_model(empty_model(case, 2))
    work = workload_of(zero3_config(case, {}), shape, Cluster(1, processes, "cuda"))
    assert sent == pytest.approx(network_traffic(replace(work, microbatches=2)).bytes, rel=0.15)


def without_difficulties(data: Path, to: Path) -> Path:
    """The same records: a step sends no losses of difficulties."""
    records = run_helpers.lines(data)
    for record in records:
        record.pop("difficulty", None)
    to.write_text("".join(json.dumps(record) + "\n" for record in records))
    return to


PRETRAINING = {"vocab_size": 64, "device_batch_size": 2, "dtype": "float32"}


HERE = {"processes": 2, "steps": 3, "device_type": "cpu"}


def fine_tuning(tmp_path: Path, own: dict[str, Any], **more: Any) -> tuple[Any, dict[str, Any]]:
    """The same small run, to be traced and to be run by two processes."""
    from roofline_runs import Case

    materials = run_helpers.make_materials(tmp_path / "made", layers=2)
    data = without_difficulties(materials.data, tmp_path / "data.jsonl")
    changes = {"data": str(data), "max_steps": 4, "packing": False, **own, **more}
    shape = json.loads((materials.model / "config.json").read_text())
    own = {"lora_r": 4, "dtype": "float32", **own}
    case = Case("tiny", 96, config=shape, settings=own, rows=2, **HERE)
    return case, materials.settings(tmp_path / "run", **changes)


def pretraining(tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    from roofline_runs import Case

    tokens = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16).tofile(tokens)
    settings = PRETRAINING | {"train_data_path": str(tokens), "output_dir": str(tmp_path / "run")}
    settings |= {"max_seq_len": 32, "depth": 2, "total_batch_size": 384, "num_iterations": 4}
    settings |= {"report_to": "none", "device_type": "cpu", "sample_every": 0}
    return Case("nanochat-d2", 32, settings=PRETRAINING, rows=3, **HERE), settings


def sent_by_two(
    settings: dict[str, Any], record: Path, module: str = "finetune.sft"
) -> list[dict[str, Any]]:
    """What rank 0 sends in each microbatch and the rest of the third step."""
    told = {
        "patch": run_patches.note_collectives,
        "patch_arguments": (str(BENCHMARKS), str(record)),
    }
    run_helpers.train(settings, 2, module=module, **told)
    return [json.loads(line) for line in record.read_text().splitlines()][2]


def parts_of(made: Any) -> list[dict[str, Any]]:
    return [part.collectives.plain() for part in (made.first, made.last, made.rest)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_fake_group_sees_what_two_processes_send(tmp_path, kind):
    """Each microbatch and the rest of a step, by kind: numbers and bytes."""
    from roofline_runs import trace

    own = KINDS[kind].get("settings", {})
    case, settings = pretraining(tmp_path) if kind == "pretraining" else fine_tuning(tmp_path, own)
    module = "finetune.pretrain" if kind == "pretraining" else "finetune.sft"
    *microbatches, rest = sent_by_two(settings, tmp_path / "collectives", module)
    assert len(microbatches) == case.rows and rest["numbers"]["allgather"] >= 1
    assert parts_of(trace(case, 2)) == [microbatches[0], microbatches[-1], rest]
