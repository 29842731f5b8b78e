"""Golden trajectories: what was trained on in every step, and to what loss, stays as it was.

python tests/training/test_golden.py     # writes golden.json anew; only if training is meant to change
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from run_helpers import lines, run_module

GOLDEN = Path(__file__).with_name("golden.json")
DTYPE, STEPS = "float32", 6
COMMON = f"--device-type cpu --dtype {DTYPE} --report-to none --log-samples --logging-steps 1"
SFT = (
    "--model data_samples/tiny-qwen3 --data data_samples/train.jsonl --global-batch-size 12"
    f" --max-steps {STEPS} --cache-dir {{folder}}/cache"
)
PRETRAIN = (
    "--train-data-path {folder}/tokens --depth 2 --max-seq-len 64 --device-batch-size 2"
    f" --total-batch-size 512 --num-iterations {STEPS} --warmup-steps 2 --sample-every 0"
)
LORA = "--learning-rate 2e-4 --micro-batch-size 4 --cutoff-len 256 --warmup-steps 2"
FULL = (
    "--finetuning full --learning-rate 2e-5 --use-curriculum false --packing false"
    " --micro-batch-size 3 --cutoff-len 128"
)
RUNS = {
    "lora, curriculum, packed": ("finetune.sft", f"{SFT} {LORA}"),
    "full, uniform, padded": ("finetune.sft", f"{SFT} {FULL}"),
    "pretraining of 0.1.0": (
        "finetune.pretrain",
        f"{PRETRAIN} --optimizer muon --lr-batch-exponent 0.5",
    ),
    "pretraining, normuon": ("finetune.pretrain", f"{PRETRAIN} --optimizer normuon"),
}
PREPARE = (
    "prepare --data data_samples/networks_facts.txt --vocab-size 512 --output-dir {folder}/tokens"
)
NUMBERS = {"losses": "loss", "grad_norms": "grad_norm", "learning_rates": "learning_rate"}


def tolerance(dtype: str, steps: int) -> float:
    """Relative difference that rounding alone may make in a run of so many steps.

    Another processor adds in another order: a sum of n numbers may differ by about sqrt(n) roundings.
    The longest sums here, over the targets of a step, have about a thousand numbers: a factor of 32.
    Each step starts from the weights of the one before, and adds as much again. A change of what is
    computed shows in the first digits.
    """
    return 32 * steps * torch.finfo(getattr(torch, dtype)).eps


def trajectory(name: str, folder: Path) -> dict[str, list]:
    """Ids, losses and gradient norms of each step of a run."""
    module, flags = RUNS[name]
    commands = [(module, f"{flags} {COMMON} --output-dir {{folder}}/run")]
    if module == "finetune.pretrain":
        commands.insert(0, ("finetune", PREPARE))
    for command, words in commands:
        code, output = run_module(command, words.format(folder=folder).split(), folder / "log", {})
        assert code == 0, output
    log = lines(folder / "run" / "trainer_log.jsonl")
    found = {name: [line[logged] for line in log] for name, logged in NUMBERS.items()}
    return {"ids": [line["ids"] for line in lines(folder / "run" / "samples.jsonl")], **found}


@pytest.mark.parametrize("name", RUNS)
def test_the_training_is_what_it_was(name: str, tmp_path: Path):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    rel, expected = golden["relative_tolerance"], golden["runs"][name]
    assert rel == tolerance(golden["dtype"], len(expected["ids"]))
    now = trajectory(name, tmp_path)
    assert now["ids"] == expected["ids"]
    for numbers in NUMBERS:
        assert now[numbers] == pytest.approx(expected[numbers], rel=rel), numbers


if __name__ == "__main__":
    made = {}
    for wanted in RUNS:
        with tempfile.TemporaryDirectory() as temporary:
            made[wanted] = trajectory(wanted, Path(temporary))
    facts = {"dtype": DTYPE, "relative_tolerance": tolerance(DTYPE, STEPS), "runs": made}
    path = Path(sys.argv[1] if len(sys.argv) > 1 else GOLDEN)
    path.write_text(json.dumps(facts) + "\n", encoding="utf-8")
