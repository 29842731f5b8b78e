"""Doctor on two nodes for real: network namespaces with a cable that is pulled."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT
from two_nodes import ADDRESSES, TwoNodes, why_not


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    if reason := why_not():
        pytest.skip(reason)
    with TwoNodes(tmp_path / "logs") as made:
        yield made


def examine(nodes: TwoNodes, node: int, folder: Path, **env: str) -> tuple[int, dict[str, Any]]:
    """Exit code and checks by name of `doctor --quick` on a node."""
    variables = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": ADDRESSES[0]}
    variables |= {"PYTHONPATH": str(ROOT), **env}
    output = folder / "said.txt"
    words = f"{sys.executable} -m finetune doctor --quick --json --device-type cpu"
    code = nodes.start(node, words.split(), output, variables).wait(120)
    return code, {check["name"]: check for check in json.loads(output.read_text())["checks"]}


def test_nodes_that_meet_and_nodes_that_cannot(nodes: TwoNodes, tmp_path: Path):
    code, first = examine(nodes, 0, tmp_path)
    assert code == 0 and first["nodes"]["values"] == {"count": 2, "rank": 0}, first
    assert first["master_address"]["verdict"] == first["port"]["verdict"] == "ok"
    code, second = examine(nodes, 1, tmp_path)
    # the other has not started yet: it answers
    assert code == 0 and second["master_reachable"]["values"]["result"] == "refused", second
    with nodes.port_taken(29500):
        code, first = examine(nodes, 0, tmp_path)
        assert first["port"]["verdict"] == "fail" and code == 1
    # two first nodes: the address is the other one's
    code, wrong = examine(nodes, 1, tmp_path, NODE_RANK="0")
    assert code == 1 and wrong["master_address"]["verdict"] == "fail"
    nodes.cable("down")
    code, second = examine(nodes, 1, tmp_path)
    assert code == 1 and second["master_reachable"]["verdict"] == "fail"
    assert ADDRESSES[0] in second["master_reachable"]["what"]
