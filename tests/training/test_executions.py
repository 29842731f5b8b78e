"""One run, executed in different ways, is one training: the same samples, losses, gradients and adapter.

The launchers are real; `python -m finetune.sft` and torchrun are started by the commands of
docs/concepts/promises.md (tests/project/test_pages.py), which are compared there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import run_helpers
import torch
import yaml
from launching import ROOT, run_cli, run_command
from run_helpers import events, losses, result_weights, sample_ids, values

BUILD_SECONDS = 500  # DeepSpeed's first start on a machine builds an extension
# 10 samples do not divide by 2 processes x micro-batch 2: plans are uneven
STEPS, GLOBAL_BATCH = 10, 10
ZERO3 = run_helpers.deepspeed_keys(3, offload=True)
# What the first run sets for DeepSpeed (RANK and so on) must not make a launcher's worker of the second.
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
def settings(tiny_model: Path, tiny_data: Path) -> dict:
    given = {
        "model": str(tiny_model),
        "data": str(tiny_data),
        "max_steps": STEPS,
        "cutoff_len": 128,
    }
    given |= {"micro_batch_size": 2, "global_batch_size": GLOBAL_BATCH, "learning_rate": 5e-3}
    given |= {"dtype": "float32", "device_type": "cpu", "log_samples": True, "save_steps": 0}
    return given | {"report_to": "none"}


@pytest.fixture(scope="module")
def run(settings: dict, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of an execution -> its run folder, made when first asked for."""
    folder = tmp_path_factory.mktemp("executions")
    plain, zero3, script = folder / "plain.json", folder / "zero3.json", folder / "script.py"
    plain.write_text(json.dumps(settings))
    zero3.write_text(json.dumps({**ZERO3, "finetune": settings}))
    script.write_text(SCRIPT)

    @cache
    def execute(name: str) -> Path:
        output = folder / name
        if name == "python":
            run_helpers.train({**settings, "output_dir": str(output)})
        elif name == "finetune.run":
            result = run_command([sys.executable, str(script), str(plain), str(output)])
            assert result.returncode == 0, result.stderr
            assert f"RESULT done {STEPS} {output}" in result.stdout
        else:
            processes, stage = EXECUTIONS[name]
            topology = ROOT / "accelerate_configs" / f"cpu_{processes}.yaml"
            # HF_HOME: a default configuration of accelerate on this machine must not take part.
            words = {"launcher": "accelerate", "env": {"HF_HOME": str(folder / "hf_home")}}
            words["launcher_args"] = ["--config_file", topology]
            flags = ["--config", zero3 if stage else plain, "--output-dir", output]
            run_cli(flags, **words, check=True, timeout=BUILD_SECONDS)
        return output

    return execute


EXECUTIONS = {  # name: processes, ZeRO stage
    "python": (1, 0),
    "accelerate, 2 processes": (2, 0),
    "accelerate": (1, 3),
    "finetune.run": (1, 0),
}


@pytest.mark.parametrize("name", EXECUTIONS)
def test_it_is_what_was_asked_for_and_the_same_training(name: str, run, settings):
    made, reference = run(name), run("python")
    start, status = events(made, "start")[0], run_helpers.status(made)
    assert (start["world_size"], start["zero_stage"]) == EXECUTIONS[name]
    assert (start["device_type"], start["dtype"]) == ("cpu", "float32")
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, STEPS)
    resolved = yaml.safe_load((made / "run.yaml").read_text())
    keys = (resolved.get("deepspeed") or {}).get("zero_optimization")
    assert keys == (ZERO3["zero_optimization"] if EXECUTIONS[name][1] else None)

    assert sample_ids(made) == sample_ids(reference)
    # 1e-4 is promised. The first step shows the same start, the last the same course.
    assert losses(made) == pytest.approx(losses(reference), rel=1e-5)
    assert values(made, "grad_norm") == pytest.approx(values(reference, "grad_norm"), rel=1e-4)
    assert min(values(reference, "grad_norm")) > 0
    before, expected, found = (
        _untrained_adapter(settings),
        result_weights(reference),
        result_weights(made),
    )
    assert before.keys() == expected.keys() == found.keys()
    for key, tensor in expected.items():
        update = (tensor - before[key]).norm()
        assert update > 0 and (found[key] - tensor).norm() / update < 1e-3, key


def test_samples_are_global_batches_of_the_data_and_it_learns(run):
    samples, found = sample_ids(run("python")), losses(run("python"))
    assert all(len(ids) == GLOBAL_BATCH and set(ids) <= set(range(60)) for ids in samples)
    # The guide's first stage is 80/20/0: rows of the third level (every third row) come later.
    third = [any(record % 3 == 2 for record in ids) for ids in samples]
    assert not any(third[: int(0.3 * STEPS)]) and any(third)
    assert sum(found[-3:]) < 0.9 * sum(found[:3])


def _untrained_adapter(settings: dict) -> dict[str, torch.Tensor]:
    """The adapter before the first step, by the names in the saved file."""
    from peft import get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    from finetune.config.run_config import RunConfig
    from finetune.modeling.adapter import add_adapter

    given = {
        **settings,
        "data": (settings["data"],),
        "report_to": ("none",),
        "output_dir": "unused",
    }
    config = RunConfig(**given)
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    return get_peft_model_state_dict(add_adapter(model, config, one_dtype=False))


@pytest.mark.parametrize("finetuning", ["lora", "full"])
def test_a_second_copy_of_the_weights_on_each_machine_changes_nothing(finetuning, tmp_path):
    """hpZ: `zero_hpz_partition_size`, the devices of a machine; here two processes share one copy."""
    materials = run_helpers.make_materials(tmp_path, layers=2)
    keys = run_helpers.deepspeed_keys(3)
    keys["zero_optimization"]["zero_hpz_partition_size"] = 2
    own = {"finetuning": finetuning, "max_steps": STEPS}
    for name, more in (("plain", {}), ("hpz", {"deepspeed": keys})):
        run_helpers.train(materials.settings(tmp_path / name, **own, **more), 2)
    assert losses(tmp_path / "hpz") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
