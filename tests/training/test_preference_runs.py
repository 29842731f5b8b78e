"""Runs on preferences: their logs, their reference, going on on another layout, and the commands around them."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import preference_rows
import pytest
import run_helpers
import run_patches
import torch
from launching import ROOT, run_cli, said
from run_helpers import LAYOUTS, Materials

import finetune
from finetune.config.run_config import RunConfig
from finetune.data.collate import collate
from finetune.errors import ConfigError
from finetune.modeling.lora import adapter_off, fuse_lora
from finetune.modeling.loss import microbatch_losses
from finetune.modeling.pretrained import add_adapter, load_model

STEPS = 9


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    made = run_helpers.make_materials(tmp_path_factory.mktemp("preferences"), records=6)
    preference_rows.make_pairs(made.folder / "pairs.jsonl", 40)
    preference_rows.make_pairs(made.folder / "valid_pairs.jsonl", 7, seed=1)
    preference_rows.make_pairs(made.folder / "labels.jsonl", 40, labels=True)
    return made


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    rate = 1e-3 if changes.get("finetuning") == "full" else 1e-2
    data = {"data": str(materials.folder / "pairs.jsonl"), "valid_data": str(materials.folder / "valid_pairs.jsonl")}
    return materials.settings(output_dir, **{**data, "max_steps": STEPS, "learning_rate": rate, **changes})


def train(wanted: dict[str, Any], processes: int = 1, **options: Any) -> run_helpers.Ranks:
    return run_helpers.train(wanted, processes, module="finetune.dpo", **options)


@pytest.fixture(scope="module")
def runs(materials: Materials):
    """Output folder of a run on one process that nobody stopped, by what is trained."""

    def get(finetuning: str) -> Path:
        folder = materials.folder / f"run-{finetuning}"
        if not folder.exists():
            train(settings(materials, folder, finetuning=finetuning))
        return folder

    return get


@pytest.mark.parametrize("finetuning", ["lora", "full"])
def test_a_run_begins_at_its_reference_and_learns(runs, finetuning: str):
    """Before the first update nothing differs from the reference: the loss is ln 2, the margin 0."""
    lines = run_helpers.lines(runs(finetuning) / "trainer_log.jsonl")
    assert lines[0]["loss"] == pytest.approx(0.6931472, abs=1e-6) and lines[0]["margin"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["loss"] < 0.6 and lines[-1]["margin"] > 0.2 and lines[-1]["accuracy"] > 0.9
    assert lines[-1]["margin"] == pytest.approx(lines[-1]["chosen_reward"] - lines[-1]["rejected_reward"])
    before, after = run_helpers.events(runs(finetuning), "eval")
    assert before["eval_loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert after["eval_accuracy"] > 0.8 and after["eval_accuracy/explain"] > 0.5


def test_the_logs_have_the_frozen_fields(runs):
    text = (ROOT / "tests" / "frozen" / "events.txt").read_text()
    found = re.findall(r"^(.*?): (.*)$", text, re.M)
    known = {name: {field.rstrip("?") for field in fields.split()} for name, fields in found}
    steps, evals = run_helpers.lines(runs("lora") / "trainer_log.jsonl"), run_helpers.events(runs("lora"), "eval")
    for name, records in (("trainer_log.jsonl", steps), ("eval", evals)):
        for record in records:
            found = {re.sub("/(explain|reasoning|topology)$", "/LEVEL", field) for field in record} - {"event", "time"}
            assert found <= known[name] and {"eval_margin/LEVEL", "margin/LEVEL"} & found


def test_a_reference_that_is_gone_is_said(materials: Materials, runs, tmp_path: Path):
    """A model that was trained whole cannot be asked again; another cache, so that nothing is found there either."""
    wanted = settings(materials, tmp_path / "run", finetuning="full", cache_dir=str(tmp_path / "cache"))
    train(wanted, patch=run_patches.signal_self, patch_arguments=(0, 2, signal.SIGTERM), expect=3)
    (tmp_path / "run" / "reference.safetensors").unlink()
    for entry in (tmp_path / "cache" / "reference").glob("*/reference.safetensors"):
        entry.unlink()
    ranks = run_helpers.start(wanted, module="finetune.dpo")
    assert ranks.wait() == [2]
    assert "reference.safetensors is missing" in ranks.output() and "put the file back" in ranks.output()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("finetuning", "executions"),
    [
        ("lora", [(2, {"packing": False, **LAYOUTS["zero3_offload"]}), (1, {"micro_batch_size": 4})]),
        ("full", [(1, {"micro_batch_size": 4, "packing": False}), (2, LAYOUTS["zero3"])]),
    ],
    ids=["lora", "full"],
)
def test_stopped_at_step_7_and_on_by_another_layout(materials, runs, tmp_path, finetuning, executions):
    output_dir = tmp_path / "run"
    for number, (processes, changes) in enumerate(executions):
        stop = {} if number else {"patch": run_patches.signal_self, "patch_arguments": (0, 7, signal.SIGTERM)}
        wanted = settings(materials, output_dir, finetuning=finetuning, cache_dir=str(tmp_path / "cache"), **changes)
        train(wanted, processes, expect=0 if number else 3, **stop)
    assert [event["step"] for event in run_helpers.events(output_dir, "resume")] == [7]
    reference = runs(finetuning)
    assert run_helpers.sample_ids(output_dir) == run_helpers.sample_ids(reference)
    difference = run_helpers.largest_relative_difference(run_helpers.losses(reference), run_helpers.losses(output_dir))
    assert difference < 1e-5


@pytest.mark.parametrize(
    "changes", [{"lora_dropout": 0.2}, {"use_dora": True}, {"modules_to_save": ("norm",)}], ids=str
)
def test_the_adapter_off_is_the_base(materials: Materials, changes: dict[str, Any]):
    """Whatever is trained of it; and that stays trained."""
    config = RunConfig(model=str(materials.model), data="d", output_dir="o", lora_r=4, **changes)
    base = load_model(config, model_dtype=torch.float64, zero3=False)
    ids = torch.arange(12).numpy()
    microbatch = collate([(ids, ids > 4, -1)], packing=False, pad_token_id=0)
    with torch.no_grad():
        wanted = microbatch_losses(base, microbatch, torch.device("cpu"))
    model = add_adapter(base, config, one_dtype=True)
    fuse_lora(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.train()
    with torch.no_grad(), adapter_off(model):
        found = microbatch_losses(model, microbatch, torch.device("cpu"))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    with torch.no_grad():
        assert (microbatch_losses(model, microbatch, torch.device("cpu")) - wanted).abs().max() > 1e-3
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "kto", "finetuning": "full"}, "train an adapter"),
        ({"loss": "kto", "global_batch_size": 1, "micro_batch_size": 1}, "set --global-batch-size to 2"),
        ({"loss": "kto", "sft_weight": 0.5}, "leave --sft-weight out"),
        ({"loss": "hinge"}, "dpo, ipo, orpo, simpo"),
        ({"kind": "ppo"}, "kind is 'ppo'"),
    ],
)
def test_what_does_not_go_together_is_refused(materials: Materials, tmp_path: Path, changes: dict, words: str):
    wanted = {**settings(materials, tmp_path / "run"), "kind": "dpo", **changes}
    with pytest.raises(ConfigError) as caught:
        finetune.run(wanted)
    assert words in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_commands_around_a_run(materials: Materials, runs, tmp_path: Path):
    folder = runs("lora")
    words = ["--model", materials.model, "--data", materials.folder / "pairs.jsonl", "--output-dir", tmp_path / "new"]
    doctor = run_cli(["doctor", "dpo", "--json", *words, "--device-type", "cpu", "--cutoff-len", 96], module="finetune")
    checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
    assert checks["data"]["verdict"] == "ok", said(doctor)
    machine = ["--nodes", 1, "--devices-per-node", 1, "--device-name", "H100", "--device-memory", "80GiB"]
    plan = run_cli(
        ["plan", "dpo", "--json", *words, *machine, "--micro-batch-size", 2, "--cutoff-len", 96], module="finetune"
    )
    assert json.loads(plan.stdout)["row_tokens"] == 2 * 2 * 96, said(plan)
    look = json.loads(run_cli(["monitor", folder, "--once", "--json"], module="finetune").stdout)
    assert look["kind"] == "dpo" and look["state"] == "done"
    assert run_cli(["report", folder, "--lang", "en"], module="finetune").returncode == 0
    assert "training on preferences" in (folder / "report.html").read_text()
    merged = run_cli(["merge", "--adapter", folder, "--output-dir", tmp_path / "merged"], module="finetune")
    assert merged.returncode == 0, said(merged)


@pytest.mark.slow
def test_labels_of_two_processes_are_those_of_one(materials: Materials, tmp_path: Path):
    """KTO's reference point is a mean over the global batch, whoever computes it."""
    data = {
        "data": str(materials.folder / "labels.jsonl"),
        "valid_data": None,
        "loss": "kto",
        "undesirable_weight": 0.1,
    }
    ways = [(1, {}), (2, {"packing": False, "micro_batch_size": 4})]
    for processes, changes in ways:
        train(settings(materials, tmp_path / str(processes), **data, **changes), processes)
    first, second = (run_helpers.lines(tmp_path / name / "trainer_log.jsonl") for name in "12")
    for one, other in zip(first, second, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["reference_point"] == pytest.approx(other["reference_point"], rel=1e-3, abs=1e-6)
    assert any(line["reference_point"] > 0 for line in first)
