"""Two nodes as network namespaces: a pulled cable, a run that resumes; with two processes each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_helpers
from launching import ROOT
from two_nodes import TwoNodes, why_not

STEPS = 8
TIMEOUT_SECONDS = 20
WAIT_SECONDS = 400.0
SLOW = {"PYTHONPATH": f"{ROOT / 'tests' / 'slow_steps'}:{ROOT}"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    if reason := why_not():
        pytest.skip(reason)
    with TwoNodes(tmp_path / "logs") as made:
        yield made


def test_a_pulled_cable_is_diagnosed_on_both_nodes_and_the_run_resumes(nodes, tmp_path):
    """Fine-tuning under ZeRO-3, a process on each."""
    materials = run_helpers.make_materials(tmp_path / "materials")
    run = tmp_path / "run"
    numbers = {"max_steps": STEPS, "save_steps": 2, "timeout_seconds": TIMEOUT_SECONDS}
    settings = materials.settings(run, **run_helpers.LAYOUTS["zero3"], **numbers)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    flags = ["--config", str(config)]
    first = nodes.launch(flags, tmp_path, **SLOW, MAX_RESTARTS="0", NPROC_PER_NODE="1")
    run_helpers.wait_for(lambda: (run / "checkpoint-4").exists(), WAIT_SECONDS)
    nodes.cable("down")
    codes = [launched.wait(WAIT_SECONDS) for launched in first]
    said = [launched.said() for launched in first]
    logs = sorted((tmp_path / "logs").glob("*.log"), key=lambda log: log.name.partition("-node")[2])
    assert codes == [1, 1], "\n".join(said)
    for node in (0, 1):
        assert "at port 29500" in said[node]
        assert f"node {1 - node} did not report how it ended: the connection between" in said[node]
        assert "Traceback" not in said[node] and "Traceback" in logs[node].read_text()
        assert "1. The ranks waited for one another" in said[node]
        assert "not started again: no restarts are left" in said[node]

    nodes.cable("up")
    second = nodes.launch(flags, tmp_path, NPROC_PER_NODE="1")
    codes = [launched.wait(WAIT_SECONDS) for launched in second]
    assert codes == [0, 0], "\n".join(launched.said() for launched in second)
    assert run_helpers.status(run)["state"] == "done"
    (resumed,) = run_helpers.events(run, "resume")
    assert resumed["step"] >= 4
    assert [event["world_size"] for event in run_helpers.events(run, "start")] == [2, 2]
    assert len(run_helpers.sample_ids(run)) == len(run_helpers.losses(run)) == STEPS
    for log in (tmp_path / "logs").glob("*.processes.json"):
        roles = [process["role"] for process in json.loads(log.read_text())["processes"]]
        assert roles[:2] == ["supervisor", "worker"]
