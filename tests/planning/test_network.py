"""What a step sends: traced with a group that is fake, run by two processes, planned."""

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
MODELS = {"lora": "Qwen/Qwen3-0.6B", "pretraining": "nanochat-d2"}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The folder of the programs, which is no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize(("kind", "processes"), [("lora", 2), ("pretraining", 16)])
def test_what_replicas_send_is_planned_and_only_the_last_microbatch_sends(kind, processes):
    import roofline_runs
    from roofline import planned

    case = roofline_runs.Case(MODELS[kind], 512, processes=processes, rows=3, steps=3)
    made = roofline_runs.trace(case, 2)
    for part in (made.first, made.second):
        assert part.collectives.plain() == {"numbers": {}, "bytes": {}}
    sent = made.last.collectives.sent + made.rest.collectives.sent
    if not case.pretraining:
        shape = {**roofline_runs.MODELS[case.model], "num_hidden_layers": 2}
        case = replace(case, config=shape)
    assert sent == pytest.approx(network_traffic(planned(case, 3)).bytes, rel=0.15)


@pytest.mark.parametrize(("settings", "processes"), [({}, 16), (FULL, 2)], ids=["lora", "full"])
def test_what_zero3_gathers_and_reduces_is_planned(settings, processes):
    """By DeepSpeed's engine: 2 P + P_t in each microbatch, less what it keeps."""
    from roofline_runs import Case, empty_model
    from roofline_zero3 import zero3_config, zero3_trace

    case = Case("Qwen/Qwen3-0.6B", 512, processes=processes, settings=settings)
    made = zero3_trace(case, 2)
    assert made.first.collectives.plain() == made.last.collectives.plain()
    sent = sum(part.collectives.sent for part in (made.first, made.last, made.rest))
    shape = shape_of_model(empty_model(case, 2))
    work = workload_of(zero3_config(case, {}), shape, Cluster(1, processes, "cuda"))
    assert sent == pytest.approx(network_traffic(replace(work, microbatches=2)).bytes, rel=0.15)


# Collectives of the last microbatch and of the rest of a step.
NUMBERS = {
    "lora": [{"agreement": 1, "allreduce": 1}, {"agreement": 1, "allgather": 1}],
    "pretraining": [{"allreduce": 2}, {"agreement": 1, "allgather": 4}],
}
PRETRAINING = {"vocab_size": 64, "device_batch_size": 2, "dtype": "float32"}
HERE = {"processes": 2, "steps": 3, "device_type": "cpu"}


def fine_tuning(tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """The same small run, to be traced and to be run by two processes."""
    from roofline_runs import Case

    materials = run_helpers.make_materials(tmp_path / "made", layers=2)
    data = tmp_path / "data.jsonl"  # without difficulties, whose losses a step would send
    data.write_text(materials.data.read_text().replace('"difficulty"', '"other"'))
    changes = {"data": str(data), "max_steps": 4, "packing": False}
    shape = json.loads((materials.model / "config.json").read_text())
    own = {"lora_r": 4, "dtype": "float32"}
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


@pytest.mark.parametrize("kind", MODELS)
def test_the_fake_group_sees_what_two_processes_send(tmp_path, kind):
    """Each microbatch and the rest of the third step, by kind: numbers and bytes of rank 0."""
    from roofline_runs import trace

    case, settings = pretraining(tmp_path) if kind == "pretraining" else fine_tuning(tmp_path)
    module, record = "pretrain" if kind == "pretraining" else "sft", tmp_path / "collectives"
    noted = {"patch": run_patches.note_collectives, "patch_arguments": (str(BENCHMARKS), record)}
    run_helpers.train(settings, 2, module=f"finetune.{module}", **noted)
    *microbatches, rest = run_helpers.lines(record)[2]
    assert len(microbatches) == case.rows
    assert [part["numbers"] for part in (microbatches[-1], rest)] == NUMBERS[kind]
    made = trace(case, 2)
    traced = [part.collectives.plain() for part in (made.first, made.last, made.rest)]
    assert traced == [microbatches[0], microbatches[-1], rest]
