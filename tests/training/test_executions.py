"""One run, executed in different ways, is one training: the same samples, losses, gradients and
adapter.

The launchers are real, in processes of their own; `python -m finetune.sft` and torchrun are started
by the commands of docs/concepts/promises.md (tests/project/test_pages.py), which are compared there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import run_helpers
import torch
import yaml
from launching import ROOT, run_cli, run_command
from safetensors.torch import load_file

# DeepSpeed's first start on a machine builds an extension, a minute of two cores
BUILD_SECONDS = 500
# 10 samples do not divide by 2 processes x micro-batch 2: plans are uneven
STEPS, GLOBAL_BATCH = 10, 10
ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        # A tiny model's tensors are all below DeepSpeed's threshold: without this none would be
        # partitioned.
        "stage3_param_persistence_threshold": 0,
    }
}


@dataclass(frozen=True)
class Run:
    """What one execution left in its folder."""

    folder: Path

    def lines(self, name: str) -> list[dict]:
        return [
            json.loads(line)
            for line in (self.folder / name).read_text(encoding="utf-8").splitlines()
        ]

    @property
    def samples(self) -> list[list[int]]:
        records = self.lines("samples.jsonl")
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        return [record["ids"] for record in records]

    def logged(self, name: str) -> list[float]:
        records = self.lines("trainer_log.jsonl")
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        return [record[name] for record in records]

    @property
    def start(self) -> dict:
        return next(record for record in self.lines("events.jsonl") if record["event"] == "start")

    @property
    def adapter(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def settings(tiny_model: Path, tiny_data: Path) -> dict:
    return {
        "model": str(tiny_model),
        "data": str(tiny_data),
        "max_steps": STEPS,
        "micro_batch_size": 2,
        "global_batch_size": GLOBAL_BATCH,
        "cutoff_len": 128,
        "learning_rate": 5e-3,
        "dtype": "float32",
        "device_type": "cpu",
        "log_samples": True,
        "report_to": "none",
        "save_steps": 0,
    }


# What the first run sets for DeepSpeed (RANK and so on) must not make a launcher's worker of the
# second.
SCRIPT = """
import json, os, sys
import finetune

if __name__ == "__main__":
    settings, output = json.load(open(sys.argv[1])), sys.argv[2]
    before = dict(os.environ)
    zero2 = {"zero_optimization": {"stage": 2}}
    first = finetune.run({**settings, "max_steps": 2, "deepspeed": zero2, "output_dir": output + "-first"})
    assert first.state == "done" and dict(os.environ) == before, os.environ.keys() ^ before.keys()
    result = finetune.run({**settings, "output_dir": output})
    assert dict(os.environ) == before, os.environ.keys() ^ before.keys()
    print("RESULT", result.state, result.steps, result.output_dir, round(result.metrics["loss"], 3))
"""


@pytest.fixture(scope="module")
def run(settings: dict, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Name of an execution -> its run, made when first asked for."""
    folder = tmp_path_factory.mktemp("executions")
    configs = {name: folder / f"{name}.json" for name in ("plain", "zero3")}
    configs["plain"].write_text(json.dumps(settings))
    cpu_1, cpu_2 = (ROOT / "accelerate_configs" / f"{name}.yaml" for name in ("cpu_1", "cpu_2"))
    configs["zero3"].write_text(json.dumps({**ZERO3, "finetune": settings}))
    script = folder / "script.py"
    script.write_text(SCRIPT)

    @cache
    def execute(name: str) -> Run:
        output = folder / name
        flags = [
            "--config",
            configs["zero3" if name == "accelerate" else "plain"],
            "--output-dir",
            output,
        ]
        # HF_HOME: a default configuration of accelerate on this machine must not take part.
        own = {"HF_HOME": str(folder / "hf_home")}
        if name == "python":
            run_helpers.train({**settings, "output_dir": str(output)})
        elif name.startswith("accelerate"):
            topology = cpu_2 if "2 processes" in name else cpu_1
            words = {
                "launcher": "accelerate",
                "launcher_args": ["--config_file", topology],
                "env": own,
            }
            run_cli(flags, **words, check=True, timeout=BUILD_SECONDS)
        else:
            result = run_command([sys.executable, str(script), str(configs["plain"]), str(output)])
            assert result.returncode == 0, result.stderr
            assert f"RESULT done {STEPS} {output}" in result.stdout
        return Run(output)

    return execute


# name: processes, ZeRO stage
EXECUTIONS = {
    "python": (1, 0),
    "accelerate, 2 processes": (2, 0),
    "accelerate": (1, 3),
    "finetune.run": (1, 0),
}
OTHERS = [name for name in EXECUTIONS if name != "python"]


@pytest.mark.parametrize("name", EXECUTIONS)
def test_what_was_asked_for_is_what_ran(name: str, run):
    processes, stage = EXECUTIONS[name]
    made = run(name)
    assert (made.start["world_size"], made.start["zero_stage"]) == (processes, stage)
    assert (made.start["device_type"], made.start["dtype"]) == ("cpu", "float32")
    status = json.loads((made.folder / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, STEPS)
    resolved = yaml.safe_load((made.folder / "run.yaml").read_text())
    if stage:
        assert resolved["deepspeed"]["zero_optimization"] == ZERO3["zero_optimization"]
    else:
        assert not resolved.get("deepspeed")


def test_samples_are_global_batches_of_the_data(run):
    samples = run("python").samples
    assert all(len(ids) == GLOBAL_BATCH and set(ids) <= set(range(60)) for ids in samples)
    # The guide's first stage is 80/20/0: rows of the third level (every third row) come later.
    assert not any(record % 3 == 2 for ids in samples[: int(0.3 * STEPS)] for record in ids)
    assert any(record % 3 == 2 for ids in samples for record in ids)


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_samples_in_every_step(name: str, run):
    assert run(name).samples == run("python").samples


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_losses(name: str, run):
    """Within 1e-5 relative; the promise is 1e-4. The first step shows the same start, the last the
    same course.
    """
    assert run(name).logged("loss") == pytest.approx(run("python").logged("loss"), rel=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_gradient_norms_above_zero(name: str, run):
    reference = run("python").logged("grad_norm")
    assert all(norm > 0 for norm in reference)
    assert run(name).logged("grad_norm") == pytest.approx(reference, rel=1e-4)


def test_it_learns(run):
    losses = run("python").logged("loss")
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_adapter(name: str, run, settings):
    """Per tensor norm(difference) / norm(update): elementwise ratios say nothing for weights near
    zero.
    """
    start, trained, other = _untrained_adapter(settings), run("python").adapter, run(name).adapter
    assert trained.keys() == start.keys() == other.keys()
    for tensor_name, tensor in trained.items():
        update = (tensor - start[tensor_name]).norm()
        assert update > 0, f"{tensor_name} was not trained"
        assert (other[tensor_name] - tensor).norm() / update < 1e-3, tensor_name


def _untrained_adapter(settings: dict) -> dict[str, torch.Tensor]:
    """The adapter before the first step, by the names in the saved file."""
    from peft import get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    from finetune.config.run_config import RunConfig
    from finetune.modeling.adapter import add_adapter

    config = RunConfig(
        **{**settings, "data": (settings["data"],), "report_to": ("none",), "output_dir": "unused"}
    )
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    return get_peft_model_state_dict(add_adapter(model, config, one_dtype=False))


@pytest.mark.parametrize("finetuning", ["lora", "full"])
def test_a_second_copy_of_the_weights_on_each_machine_changes_nothing(finetuning, tmp_path):
    """hpZ: `zero_hpz_partition_size`, the devices of a machine; here two processes that share one
    copy.
    """
    materials = run_helpers.make_materials(tmp_path, layers=2)
    keys = run_helpers.deepspeed_keys(3)
    keys["zero_optimization"]["zero_hpz_partition_size"] = 2
    settings = {"finetuning": finetuning, "max_steps": STEPS}
    for name, more in (("plain", {}), ("hpz", {"deepspeed": keys})):
        run_helpers.train(materials.settings(tmp_path / name, **settings, **more), 2)
    plain, hpz = (run_helpers.losses(tmp_path / name) for name in ("plain", "hpz"))
    assert len(plain) == STEPS and run_helpers.largest_relative_difference(plain, hpz) < 1e-5
