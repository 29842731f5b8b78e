"""One run, executed in different ways, is one training: the same samples, losses, gradients and adapter.

The launchers are real; `python -m finetune.sft` and torchrun are started by the commands of
docs/concepts/promises.md (tests/project/test_pages.py), which are compared there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import run_helpers
from launching import ROOT, run_cli, run_command
from run_helpers import events, losses, result_weights, sample_ids, values

BUILD_SECONDS = 500  # DeepSpeed's first start on a machine builds an extension
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
    assert (result.state, str(result.output_dir)) == ("done", output) and result.metrics["loss"] > 0
"""
# processes, ZeRO stage
EXECUTIONS = {"accelerate, 2 processes": (2, 0), "accelerate": (1, 3), "finetune.run": (1, 0)}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run that was made in the plainest way."""
    materials = run_helpers.make_materials(tmp_path_factory.mktemp("executions"), layers=2)
    # 10 samples do not divide by 2 processes x micro-batch 2: plans are uneven
    given = materials.settings(materials.folder / "python", max_steps=10, global_batch_size=10)
    run_helpers.train(given)
    return given


@pytest.mark.parametrize("name", EXECUTIONS)
def test_it_is_what_was_asked_for_and_the_same_training(name: str, settings: dict, tmp_path: Path):
    processes, stage = EXECUTIONS[name]
    made, config, script = tmp_path / "run", tmp_path / "run.json", tmp_path / "script.py"
    reference = Path(settings["output_dir"])
    config.write_text(json.dumps({**ZERO3, "finetune": settings} if stage else settings))
    if name == "finetune.run":
        script.write_text(SCRIPT)
        result = run_command([sys.executable, str(script), str(config), str(made)])
        assert result.returncode == 0, result.stderr
    else:
        topology = ROOT / "accelerate_configs" / f"cpu_{processes}.yaml"
        # HF_HOME: a default configuration of accelerate on this machine must not take part.
        words = {"launcher": "accelerate", "env": {"HF_HOME": str(tmp_path / "hf_home")}}
        words |= {"launcher_args": ["--config_file", topology], "timeout": BUILD_SECONDS}
        run_cli(["--config", config, "--output-dir", made], **words, check=True)
    (start,) = events(made, "start")
    assert (start["world_size"], start["zero_stage"]) == (processes, stage)
    assert run_helpers.status(made)["state"] == "done"
    assert sample_ids(made) == sample_ids(reference)
    # 1e-4 is promised. The first step shows the same start, the last the same course.
    assert losses(made) == pytest.approx(losses(reference), rel=1e-5)
    assert values(made, "grad_norm") == pytest.approx(values(reference, "grad_norm"), rel=1e-4)
    expected, found = result_weights(reference), result_weights(made)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert tensor.any() and (found[key] - tensor).norm() < 1e-3 * tensor.norm(), key


def test_a_second_copy_of_the_weights_on_each_machine_changes_nothing(settings, tmp_path):
    """hpZ: `zero_hpz_partition_size`, the devices of a machine; here two processes share one copy."""
    keys = run_helpers.deepspeed_keys(3)
    keys["zero_optimization"]["zero_hpz_partition_size"] = 2
    own = {"output_dir": str(tmp_path / "run"), "deepspeed": keys}
    run_helpers.train(settings | own, 2)
    assert losses(tmp_path / "run") == pytest.approx(losses(Path(settings["output_dir"])), rel=1e-5)
