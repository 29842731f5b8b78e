"""benchmarks/sft.py: what was not the same work is never ranked; and its table of what was. Pages
made of results.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from launching import ROOT

TOKENS, SUPERVISED = 40, 30
OF_RESULTS = ("defaults", "peers_settings", "pretraining_parts_page")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("sft_report")
    for name in set(sys.modules) - before:
        if name.startswith(("sft_", *OF_RESULTS)):
            del sys.modules[name]


def step(*conversations: str) -> dict[str, Any]:
    counts = {"tokens": TOKENS, "supervised": SUPERVISED, "computed": TOKENS}
    return {**counts, "conversations": sorted(conversations)}


PLAN: dict[str, Any] = {"longest": 30, "parameters": 1_000_000, "flops_per_token": 6_000_000}
PLAN["settings"] = {"vocabulary": 4096, "conversations": 4, "lora_r": 16, "batch": 2}
PLAN["steps"] = [step("a", "b"), step("c", "d")]
RUN = {"dtype": "float32", "versions": {"torch": "2", "transformers": "5"}, "threads": 2}
RUN |= {"device": "cpu", "frozen_dtype": "float32", "attention": "sdpa", "recomputes": False}
RUN |= {"unmeasured_steps": 1, "start_seconds": 10.0, "losses": [9.0, 8.5], "wall_seconds": 20.0}
RUN |= {"gradient_norms": [0.7, 0.6], "trained_parameters": 1000, "peak_bytes": 10**9}
MACHINE = {"device": "CPU, 2 cores", "threads": 2, "flags": ["avx2"]}
MACHINE |= {"peak_flops": None, "load_before": 0.1}


def run(name: str, seconds: float = 1.0, number: int = 0, **changes: Any) -> dict[str, Any]:
    library = name.partition("-")[0]
    made = {"name": name, "round": number, "library": library, "step_seconds": [5.0, seconds]}
    return {**RUN, **made, "steps": copy.deepcopy(PLAN["steps"]), **changes}


def result(*runs: dict[str, Any], **machine: Any) -> dict[str, Any]:
    return {"plan": PLAN, "machine": MACHINE | machine, "runs": list(runs)}


def test_equal_work_is_ranked_by_the_ratio_of_each_round(scripts: ModuleType) -> None:
    seconds = ((1.0, 2.0), (1.0, 4.0))
    runs = [run("bare")]
    for number, (ours, trl) in enumerate(seconds):
        runs += [run("ours", seconds=ours, number=number), run("trl", seconds=trl, number=number)]
    table = scripts.make_table("fp32", result(*runs))
    (line,) = (line for line in table.splitlines() if line.startswith("| trl |"))
    assert "| 3.00 (2.00, 4.00) |" in line  # of the median of (2, 4), the first step not counted
    assert line.endswith("| equal |")


FEWER = step("a", "b") | {"supervised": SUPERVISED - 1}
FAILED = {"name": "trl", "dtype": "float32", "round": 0, "library": "trl", "failed": "no memory"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": [step("a", "b"), step("c", "e")]}, "1 of 4 conversations were others"),
        ({"steps": [step("a", "b", "c"), step("d")]}, "1 to 3 conversations, not 2 steps of 2"),
        ({"steps": [FEWER, step("c", "d")]}, "59 supervised tokens, not 60"),
        ({"trained_parameters": 999}, "trained parameters 999, not 1000"),
        ({"frozen_dtype": "bfloat16"}, "frozen dtype bfloat16, not float32"),
        ({"losses": [float("nan"), 8.5]}, "first loss nan"),
        ({"losses": [9.0, 8.0]}, "mean loss"),
        ({"gradient_norms": [0.7, 0.0]}, "a gradient norm that is not above 0"),
        (None, "failed: no memory"),
    ],
)
def test_unequal_work_is_shown_with_its_reason_and_not_ranked(
    scripts: ModuleType, changes: dict[str, Any] | None, reason: str
) -> None:
    other = FAILED if changes is None else run("trl", **changes)
    table = scripts.make_table("fp32", result(run("bare"), run("ours"), other))
    line = table.splitlines()[-1]  # below those that are ranked, however fast it was
    assert line.startswith("| trl |") and reason in line.split("not ranked: ")[1]
    assert line.split(" | ")[4] == "-"  # no ratio


def test_what_may_differ_and_what_may_not(scripts: ModuleType) -> None:
    """The order of conversations, but not the loss of the same batch; beside a reference in
    float32, bfloat16 holds its own.
    """
    grouped = run("trl", steps=[step("c", "d"), step("a", "b")], losses=[8.99, 8.52])
    assert not scripts.differences(grouped, PLAN, run("bare"), "float32")
    ours = run("ours", dtype="bfloat16", frozen_dtype="bfloat16")
    assert not scripts.differences(ours, PLAN, run("bare"), "bfloat16")
    (wrong, *_) = scripts.differences(run("ours", dtype="bfloat16"), PLAN, run("bare"), "bfloat16")
    assert "frozen dtype float32, not bfloat16" in wrong
    with pytest.raises(ValueError, match="no run of bare"):
        scripts.make_table("fp32", result(run("ours"), run("trl")))


def test_the_page_has_the_parts_that_are_there_and_names_the_others(scripts: ModuleType) -> None:
    document = importlib.import_module("sft_document")
    page = document.make_document({"fp32": result(run("bare"), run("ours"))})
    assert "## float32" in page and "Not measured yet: bf16, vocab." in page
    assert str(ROOT) not in page
    page = document.DOCUMENT.read_text(encoding="utf-8")
    section = document.device_section(document.device_results())
    assert page.endswith(section), "python benchmarks/sft_document.py"


IGNORED = -100


def calls() -> dict[str, dict[str, torch.Tensor]]:
    """The same two conversations as the contenders give them to their models."""
    labels = torch.tensor([[IGNORED, 6, 7, IGNORED, 9]])
    numbers = torch.tensor([1, 1, 1, 2, 2, 0])
    seen = (numbers[:, None] == numbers) & torch.ones(6, 6, dtype=torch.bool).tril()
    blocks = torch.where(seen & (numbers != 0), 0.0, torch.finfo(torch.float32).min)[None, None]
    ids, one_more = torch.tensor([[5, 6, 7, 8, 9]]), torch.nn.functional.pad
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    padded = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]])}
    padded["attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]])
    longer = {"input_ids": one_more(ids, (0, 1)), "labels": one_more(labels, (0, 1), value=IGNORED)}
    return {
        "packed, labels": packed | {"labels": labels},
        "packed, kept logits": packed | {"logits_to_keep": torch.tensor([0, 1, 3])},
        "packed, blocks": longer | {"attention_mask": blocks},
        "padded": padded | {"labels": torch.tensor([[IGNORED, 6, 7], [IGNORED, 9, IGNORED]])},
    }


def test_conversations_are_found_in_whatever_form_they_enter_a_model(scripts: ModuleType) -> None:
    process = importlib.import_module("sft_process")
    for form, given in calls().items():
        recorder = process.Recorder()
        recorder.on_step_begin(None, None, None)
        recorder._note(torch.nn.Identity().train(), (), given)
        ((call,),) = recorder.calls
        assert process.documents(call) == [([5, 6, 7], [1, 2]), ([8, 9], [1])], form
    # Documents that see each other are one.
    leaking = calls()["packed, labels"] | {"position_ids": torch.arange(5)[None]}
    assert process.documents(leaking) == [([5, 6, 7, 8, 9], [1, 2, 4])]


@pytest.mark.parametrize("name", OF_RESULTS)
def test_a_page_of_results_is_that_of_the_results_that_are_kept(
    name: str, scripts: ModuleType
) -> None:
    made = importlib.import_module(name)
    assert made.DOCUMENT.read_text(encoding="utf-8") == made.page(made.results()), (
        f"python benchmarks/{name}.py page"
    )
