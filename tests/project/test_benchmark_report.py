"""benchmarks/sft.py: what was not the same work is never ranked; and its table of what was. Pages
made of results.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

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
    return {
        "tokens": TOKENS,
        "supervised": SUPERVISED,
        "computed": TOKENS,
        "conversations": sorted(conversations),
    }


PLAN = {
    "settings": {"vocabulary": 4096, "conversations": 4, "lora_r": 16, "batch": 2},
    "steps": [step("a", "b"), step("c", "d")],
    "longest": 30,
    "parameters": 1_000_000,
    "flops_per_token": 6_000_000,
}


def run(name: str, dtype: str = "float32", seconds: float = 1.0, number: int = 0) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": dtype,
        "round": number,
        "library": name.split("-")[0],
        "versions": {"torch": "2", "transformers": "5"},
        "threads": 2,
        "device": "cpu",
        "frozen_dtype": "float32",
        "attention": "sdpa",
        "recomputes": False,
        "unmeasured_steps": 1,
        "start_seconds": 10.0,
        "step_seconds": [5.0, seconds],
        "steps": copy.deepcopy(PLAN["steps"]),
        "losses": [9.0, 8.5],
        "gradient_norms": [0.7, 0.6],
        "trained_parameters": 1000,
        "peak_bytes": 10**9,
        "wall_seconds": 20.0,
    }


def result(*runs: dict[str, Any]) -> dict[str, Any]:
    machine = {
        "device": "CPU, 2 cores",
        "threads": 2,
        "flags": ["avx2"],
        "peak_flops": None,
        "load_before": 0.1,
    }
    return {"plan": PLAN, "machine": machine, "runs": list(runs)}


def test_equal_work_is_ranked_by_the_ratio_of_each_round(scripts: ModuleType) -> None:
    seconds = ((1.0, 2.0), (1.0, 4.0))
    runs = [run("bare")]
    for number, (ours, trl) in enumerate(seconds):
        runs += [run("ours", seconds=ours, number=number), run("trl", seconds=trl, number=number)]
    table = scripts.make_table("fp32", result(*runs))
    (line,) = (line for line in table.splitlines() if line.startswith("| trl |"))
    assert "| 3.00 (2.00, 4.00) |" in line  # of the median of (2, 4), the first step not counted
    assert line.endswith("| equal |")


def changed(**values: Any) -> dict[str, Any]:
    return run("trl") | values


OTHER_PLACES = [step("a", "b") | {"supervised": SUPERVISED - 1}, step("c", "d")]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (changed(steps=[step("a", "b"), step("c", "e")]), "1 of 4 conversations were others"),
        (changed(steps=[step("a", "b"), step("c", "c")]), "1 of 4 conversations were others"),
        (
            changed(steps=[step("a", "b", "c"), step("d")]),
            "2 steps of 1 to 3 conversations, not 2 steps of 2",
        ),
        (changed(steps=OTHER_PLACES), "59 supervised tokens, not 60"),
        (changed(trained_parameters=999), "trained parameters 999, not 1000"),
        (changed(threads=1), "threads 1, not 2"),
        (changed(device="cuda"), "device cuda, not cpu"),
        (changed(frozen_dtype="bfloat16"), "frozen dtype bfloat16, not float32"),
        (changed(losses=[9.01, 8.5]), "first loss 9.01000, not 9.00000"),
        (changed(losses=[float("nan"), 8.5]), "first loss nan"),
        (changed(losses=[9.0, 8.0]), "mean loss"),
        (changed(losses=[9.0]), "1 losses of 2 steps"),
        (changed(gradient_norms=[0.7, 0.0]), "a gradient norm that is not above 0"),
        (changed(gradient_norms=[]), "a gradient norm that is not above 0"),
        (
            {
                "name": "trl",
                "dtype": "float32",
                "round": 0,
                "library": "trl",
                "failed": "no memory",
            },
            "failed: no memory",
        ),
    ],
)
def test_unequal_work_is_shown_with_its_reason_and_not_ranked(
    scripts: ModuleType, other: dict[str, Any], reason: str
) -> None:
    table = scripts.make_table("fp32", result(run("bare"), run("ours"), other))
    line = table.splitlines()[-1]  # below those that are ranked, however fast it was
    assert line.startswith("| trl |")
    assert f"not ranked: {reason}" in line or reason in line.split("not ranked: ")[1]
    assert line.split(" | ")[4] == "-"  # no ratio


def test_the_order_of_conversations_may_differ_but_not_the_loss_of_the_same_batch(
    scripts: ModuleType,
) -> None:
    grouped = run("trl") | {"steps": [step("c", "d"), step("a", "b")], "losses": [8.99, 8.52]}
    assert not scripts.differences(grouped, PLAN, run("bare"), "float32")


def test_beside_a_reference_in_float32_bfloat16_holds_its_own(scripts: ModuleType) -> None:
    ours = run("ours", "bfloat16") | {"frozen_dtype": "bfloat16"}
    assert not scripts.differences(ours, PLAN, run("bare"), "bfloat16")
    wrong = run("ours", "bfloat16")
    assert (
        "frozen dtype float32, not bfloat16"
        in scripts.differences(wrong, PLAN, run("bare"), "bfloat16")[0]
    )


def test_nothing_is_compared_without_the_reference(scripts: ModuleType) -> None:
    with pytest.raises(ValueError, match="no run of bare"):
        scripts.make_table("fp32", result(run("ours"), run("trl")))


def test_the_page_has_the_parts_that_are_there_and_names_the_others(scripts: ModuleType) -> None:
    page = importlib.import_module("sft_document").make_document(
        {"fp32": result(run("bare"), run("ours"))}
    )
    assert "## float32" in page
    assert "Not measured yet: bf16, vocab." in page
    assert str(ROOT) not in page


def test_the_section_on_devices_is_made_from_the_results_that_are_kept(scripts: ModuleType) -> None:
    document = importlib.import_module("sft_document")
    page = document.DOCUMENT.read_text(encoding="utf-8")
    assert page.endswith(document.device_section(document.device_results())), (
        "python benchmarks/sft_document.py"
    )
    measured = result(run("bare", "bfloat16"), run("ours", "bfloat16"))
    measured["machine"] |= {"device": "NVIDIA H100 80GB HBM3", "peak_flops": 989e12}
    section = document.device_section({"sft_h100.json": measured})
    assert "### NVIDIA H100 80GB HBM3" in section and "| ours | bfloat16 | 1 | 40 |" in section
    assert "not run" not in section


def test_steps_that_still_compile_are_not_measured(scripts: ModuleType) -> None:
    timed = run("bare") | {
        "steps": [step("a")] * 4,
        "step_seconds": [9.0, 3.0, 1.0, 1.0],
        "unmeasured_steps": 2,
    }
    assert scripts.tokens_per_second(timed) == TOKENS
    # the last one, of fewer
    assert scripts.tokens_per_second(timed | {"unmeasured_steps": 9}) == TOKENS


def test_of_a_device_what_was_measured_before_its_time_ended_is_shown(scripts: ModuleType) -> None:
    runner = importlib.import_module("sft")
    assert not runner._with_other_parts({"device": result(run("ours"))}, None), (
        "nothing to compare with"
    )
    assert runner._with_other_parts({"device": result(run("ours"), run("bare"))}, None)


def test_a_peer_does_not_find_our_packages(
    scripts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = importlib.import_module("sft")
    monkeypatch.setenv("PYTHONPATH", "packages")
    assert runner._python_path("ours").split(":") == [str(ROOT), "packages"]
    assert runner._python_path("trl") == str(ROOT)


def test_a_device_with_a_known_peak_has_its_utilisation(scripts: ModuleType) -> None:
    measured = result(run("bare"), run("ours"))
    measured["machine"] |= {"peak_flops": 2.4e9}
    assert "| 10.0% |" in scripts.make_table("fp32", measured)  # 40 tokens a second x 6e6 / 2.4e9


class Event:
    """A device's event as torch documents it: read only after a wait."""

    made: ClassVar[list[Event]] = []
    waited = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.milliseconds = 250.0 * len(self.made)
        self.made.append(self)

    def record(self) -> None:
        Event.waited = False

    def elapsed_time(self, end: Event) -> float:
        assert Event.waited, "not computed yet"
        return end.milliseconds - self.milliseconds


def test_a_device_times_its_steps_and_the_host_waits_after_the_first_and_the_last(
    scripts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, waits = importlib.import_module("sft_process"), []

    def wait() -> None:
        Event.waited = True
        waits.append(len(Event.made))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    monkeypatch.setattr(process, "_peak_bytes", lambda device: 5)
    monkeypatch.setattr(process, "_made_of", lambda model: {})
    recorder = process.Recorder()
    recorder.device = "cuda"
    for _ in range(3):
        recorder.on_step_begin(None, None, None)
        recorder.on_step_end(None, None, None)
    recorder.on_train_end(None, None, None)
    assert recorder.step_seconds == [0.25, 0.25, 0.25]
    assert waits == [2, 4]  # events recorded by then: a beginning and an end, and all


IGNORED = -100
FIRST, SECOND = ([5, 6, 7], [1, 2]), ([8, 9], [1])


def calls() -> dict[str, dict[str, torch.Tensor]]:
    """The same two conversations as each contender gives them to its model."""
    ids, positions = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 1, 2, 0, 1]])
    labels = torch.tensor([[IGNORED, 6, 7, IGNORED, 9]])
    numbers = torch.tensor([1, 1, 1, 2, 2, 0])
    seen = (
        (numbers[:, None] == numbers) & torch.ones(6, 6, dtype=torch.bool).tril() & (numbers != 0)
    )
    blocks = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    padded = torch.tensor([[5, 6, 7], [8, 9, 0]])
    keep = torch.tensor([[True, True, False, True, False]])
    return {
        "packed, labels": {"input_ids": ids, "position_ids": positions, "labels": labels},
        "packed, kept logits": {
            "input_ids": ids,
            "position_ids": positions,
            "logits_to_keep": keep,
        },
        "packed, places": {
            "input_ids": ids,
            "position_ids": positions,
            "logits_to_keep": torch.tensor([0, 1, 3]),
        },
        "packed, blocks": {
            "input_ids": torch.nn.functional.pad(ids, (0, 1)),
            "attention_mask": blocks,
            "labels": torch.nn.functional.pad(labels, (0, 1), value=IGNORED),
        },
        "padded, mask": {
            "input_ids": padded,
            "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
            "labels": torch.tensor([[IGNORED, 6, 7], [IGNORED, 9, IGNORED]]),
        },
        "padded, positions": {
            "input_ids": padded,
            "position_ids": torch.tensor([[0, 1, 2], [0, 1, 0]]),
            "logits_to_keep": torch.tensor([[True, True, False], [True, False, False]]),
        },
    }


@pytest.mark.parametrize("form", calls())
def test_conversations_are_found_in_whatever_form_they_enter_a_model(
    scripts: ModuleType, form: str
) -> None:
    process = importlib.import_module("sft_process")
    recorder = process.Recorder()
    recorder.on_step_begin(None, None, None)
    model = torch.nn.Identity().train()
    recorder._note(model, (), calls()[form])
    ((call,),) = recorder.calls
    assert process.documents(call) == [FIRST, SECOND]


def test_documents_that_see_each_other_are_one(scripts: ModuleType) -> None:
    process = importlib.import_module("sft_process")
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


def test_both_sides_are_put_beside_the_factor_on_nanochats_rates(scripts: ModuleType) -> None:
    report = importlib.import_module("nanochat_report")
    assert report.parts_of("ours-lfm2_value-bf16@1.5") == ("ours-lfm2_value", True, "1.5")
    assert report.parts_of("nanochat") == ("nanochat", False, "")
    bits = {
        ("nanochat", 1.0): 1.6,
        ("nanochat@3", 3.0): 1.4,
        ("ours", 8.39): 1.3,
        ("ours@3", 3.0): 1.5,
    }
    runs = [
        report.Measured(*key, 7, [1.0], 0.0, 0.0, {0: 3.0, 4: last}, 1.0)
        for key, last in bits.items()
    ]
    assert report._grid(runs, 4) == [
        "| nanochat's rates times | 1 | 3 | 8.39 |",
        "|---|---|---|---|",
        "| nanochat | 1.6000 | **1.4000** |  |",
        "| ours |  | 1.5000 | **1.3000** |",
    ]
