"""The shipped configurations: what ds_configs/ say, and accelerate_configs/ really launched."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from launching import PATIENCE_SECONDS, ROOT, environment
from launching import command as command_words
from run_helpers import events

from finetune.config.resolution import resolve
from finetune.runtime.ports import free_port

PRESET = "qwen32b_lora_zero3.json"
DEEPSPEED_FILES = sorted(path.name for path in (ROOT / "ds_configs").glob("*zero*.json"))


# ---------------------------------------------------------------- ds_configs/


@pytest.mark.parametrize("name", DEEPSPEED_FILES)
def test_every_deepspeed_file_resolves_as_a_complete_run(name: str) -> None:
    resolved = resolve(["--config", str(ROOT / "ds_configs" / name)], world_size=2)
    config = resolved.config
    assert config.deepspeed["zero_optimization"]["stage"] == (2 if name == "zero2.json" else 3)
    assert (ROOT / config.data[0]).is_file() and (ROOT / config.valid_data[0]).is_file()
    assert config.output_dir == f"runs/{name.removesuffix('_zero3.json').removesuffix('.json')}"


@pytest.mark.parametrize("name", [name for name in DEEPSPEED_FILES if name != PRESET])
def test_a_block_says_only_what_the_run_is_about(name: str) -> None:
    """All else equals the package's defaults, so that the files teach no numbers by accident."""
    block = json.loads((ROOT / "ds_configs" / name).read_text())["finetune"]
    allowed = {
        "model",
        "data",
        "valid_data",
        "output_dir",
        "max_steps",
        "micro_batch_size",
        "global_batch_size",
    }
    assert set(block) == allowed
    assert (ROOT / block["model"] / "config.json").is_file()


def test_offloading_is_what_the_names_say() -> None:
    zero = {
        name: json.loads((ROOT / "ds_configs" / name).read_text())["zero_optimization"]
        for name in DEEPSPEED_FILES
    }
    for name in ("zero3.json", PRESET):
        assert (
            zero[name]["offload_optimizer"]["device"]
            == zero[name]["offload_param"]["device"]
            == "cpu"
        )
    for name in ("zero2.json", "zero3_no_offload.json"):
        assert not any("offload" in key for key in zero[name])


def test_the_preset_has_the_guides_numbers() -> None:
    """Written here from the guide for Qwen 32B on 2 nodes of 8 NPUs, not from the file."""
    config = resolve(["--config", str(ROOT / "ds_configs" / PRESET)], world_size=16).config
    guide = {
        "finetuning": "lora",
        "lora_r": 64,
        "lora_alpha": 128,
        "lora_dropout": 0.05,
        "lora_target_modules": (
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ),
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "global_batch_size": 1 * 8 * 16,
        "learning_rate": 2e-5,
        "num_epochs": 3.0,
        "max_steps": None,
        "cutoff_len": 2048,
        "warmup_steps": 100,
        "weight_decay": 0.01,
        "dataloader_num_workers": 4,
        "use_curriculum": True,
        "curriculum_seed": 42,
        "difficulty_field": "difficulty",
        "timeout_seconds": 1800,
    }
    assert {name: getattr(config, name) for name in guide} == guide
    assert config.curriculum.levels == ("explain", "reasoning", "topology")
    stages = [(stage.until, stage.mix, stage.ramp) for stage in config.curriculum.stages]
    assert stages == [
        (0.3, (80, 20, 0), "step"),
        (0.7, (40, 40, 20), "step"),
        (1.0, (25, 35, 40), "step"),
    ]
    zero = config.deepspeed["zero_optimization"]
    for offloaded in ("offload_optimizer", "offload_param"):
        assert zero[offloaded] == {"device": "cpu"}, "pinned where it can be (deepspeed_dict)"


# ---------------------------------------------------------------- accelerate_configs/


def topology(name: str) -> dict:
    return yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())


@pytest.fixture
def flags(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> list[object]:
    """Flags of a small run in tmp_path/run."""
    where = ["--output-dir", tmp_path / "run", "--cache-dir", tmp_path / "cache"]
    small = ["--cutoff-len", 128, "--max-steps", 2, "--report-to", "none", "--device-type", "cpu"]
    return ["--model", tiny_model, "--data", tiny_data, *where, *small]


def test_one_device_and_one_node_are_the_same_with_other_numbers() -> None:
    """So the launches of cpu_1 and cpu_2 (tests/training/test_executions.py) are theirs too."""
    assert topology("one_device") == topology("cpu_1")
    assert topology("one_node_8") | {"num_processes": 2} == topology("cpu_2")
    assert topology("one_node_8")["num_processes"] == 8


def test_deepspeed_topology_is_launched_by_a_page() -> None:
    line = "accelerate launch --config_file accelerate_configs/cpu_2_zero3.yaml -m finetune.sft"
    assert line in (ROOT / "docs" / "guides" / "launching.md").read_text(encoding="utf-8")
    assert topology("cpu_2_zero3")["num_processes"] == 2


def test_two_nodes_of_eight(flags: list[object], tmp_path: Path) -> None:
    """Two launchers on this machine, as on two nodes, with one process each."""
    assert (topology("two_nodes_8")["num_machines"], topology("two_nodes_8")["num_processes"]) == (
        2,
        16,
    )
    port = free_port()
    launchers = []
    for node in (1, 0):
        launcher_args = [
            "--config_file",
            "accelerate_configs/two_nodes_8.yaml",
            "--num_processes",
            2,
        ]
        launcher_args += [
            "--machine_rank",
            node,
            "--main_process_ip",
            "127.0.0.1",
            "--main_process_port",
            port,
        ]
        words = command_words(flags, launcher="accelerate", launcher_args=launcher_args)
        with (tmp_path / f"node{node}.log").open("wb") as log:
            launchers.append(
                subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=log, stderr=log)
            )
    codes = [launcher.wait(PATIENCE_SECONDS) for launcher in launchers]
    assert codes == [0, 0], "\n".join((tmp_path / f"node{node}.log").read_text() for node in (0, 1))
    (start,) = events(tmp_path / "run", "start")
    assert start["world_size"] == 2


def test_topologies_say_nothing_about_training() -> None:
    names = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
    assert names == ["cpu_1", "cpu_2", "cpu_2_zero3", "one_device", "one_node_8", "two_nodes_8"]
    for name in names:
        assert not {"mixed_precision", "fsdp_config", "dynamo_config"} & set(topology(name))
        assert not topology(name).get("deepspeed_config"), (
            "ZeRO comes from --config ds_configs/*.json"
        )
        assert topology(name)["use_cpu"] is False, (
            "with use_cpu accelerate drops DeepSpeed and starts one process"
        )
