"""The shipped configurations: what ds_configs/ say, and accelerate_configs/ really launched."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import yaml
from launching import PATIENCE_SECONDS, ROOT, environment
from launching import command as command_words
from run_helpers import events

from finetune.config.resolution import resolve
from finetune.runtime.ports import free_port

PRESET = "qwen32b_lora_zero3.json"
DEEPSPEED_FILES = sorted(path.name for path in (ROOT / "ds_configs").glob("*zero*.json"))


# ---------------------------------------------------------------- ds_configs/


def test_every_deepspeed_file_resolves_as_a_complete_run() -> None:
    """A block says only what the run is about: all else equals the package's defaults."""
    allowed = "model data valid_data output_dir max_steps micro_batch_size global_batch_size"
    for name in DEEPSPEED_FILES:
        content = json.loads((ROOT / "ds_configs" / name).read_text())
        config = resolve(["--config", str(ROOT / "ds_configs" / name)], world_size=2).config
        zero = config.deepspeed["zero_optimization"]
        assert zero["stage"] == (2 if name == "zero2.json" else 3)
        assert (ROOT / config.data[0]).is_file() and (ROOT / config.valid_data[0]).is_file()
        if name != PRESET:
            assert set(content["finetune"]) == set(allowed.split()), name
            assert (ROOT / config.model / "config.json").is_file()
        offloaded = {key for key in content["zero_optimization"] if key.startswith("offload_")}
        assert len(offloaded) == (2 if name in ("zero3.json", PRESET) else 0)


def test_the_preset_has_the_guides_numbers() -> None:
    """Written here from the guide for Qwen 32B on 2 nodes of 8 NPUs, not from the file."""
    config = resolve(["--config", str(ROOT / "ds_configs" / PRESET)], world_size=16).config
    guide = {
        "finetuning": "lora",
        "lora_r": 64,
        "lora_alpha": 128,
        "lora_dropout": 0.05,
        "lora_target_modules": tuple(f"{name}_proj" for name in "q k v o gate up down".split()),
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
    stages = [(stage.until, stage.mix) for stage in config.curriculum.stages]
    assert stages == [(0.3, (80, 20, 0)), (0.7, (40, 40, 20)), (1.0, (25, 35, 40))]


# ---------------------------------------------------------------- accelerate_configs/


def topology(name: str) -> dict:
    return yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())


def test_topologies_say_nothing_about_training() -> None:
    names = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
    assert names == ["cpu_1", "cpu_2", "cpu_2_zero3", "one_device", "one_node_8", "two_nodes_8"]
    for name in names:
        assert not {"mixed_precision", "fsdp_config", "dynamo_config"} & set(topology(name))
        # ZeRO comes from --config ds_configs/*.json
        assert not topology(name).get("deepspeed_config")
        # with use_cpu accelerate drops DeepSpeed and starts one process
        assert topology(name)["use_cpu"] is False
    # So the launches of cpu_1 and cpu_2 (tests/training/test_executions.py) are theirs too.
    assert topology("one_device") == topology("cpu_1")
    assert topology("one_node_8") | {"num_processes": 2} == topology("cpu_2")


def test_two_nodes_of_eight(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Two launchers on this machine, as on two nodes, with one process each."""
    machines = topology("two_nodes_8")
    assert (machines["num_machines"], machines["num_processes"]) == (2, 16)
    flags = ["--output-dir", tmp_path / "run", "--cache-dir", tmp_path / "cache"]
    flags += ["--model", tiny_model, "--data", tiny_data, "--cutoff-len", 128, "--max-steps", 2]
    flags += ["--report-to", "none", "--device-type", "cpu"]
    shared = ["--config_file", "accelerate_configs/two_nodes_8.yaml", "--num_processes", 2]
    shared += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    launchers = []
    for node in (1, 0):
        own = [*shared, "--machine_rank", node]
        words = command_words(flags, launcher="accelerate", launcher_args=own)
        with (tmp_path / f"node{node}.log").open("wb") as log:
            started = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=log, stderr=log)
            launchers.append(started)
    codes = [launcher.wait(PATIENCE_SECONDS) for launcher in launchers]
    assert codes == [0, 0], "\n".join((tmp_path / f"node{node}.log").read_text() for node in (0, 1))
    (start,) = events(tmp_path / "run", "start")
    assert start["world_size"] == 2
