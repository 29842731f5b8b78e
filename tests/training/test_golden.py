"""Golden trajectories: what was trained on in every step, and to what loss, stays as it was.

python tests/training/test_golden.py     # writes golden.json anew; only if training is meant to change
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
from run_helpers import lines, run_module

GOLDEN = Path(__file__).with_name("golden.json")
# Another processor adds in another order; a change of what is computed shows in the first digits.
LOSS_TOLERANCE = 2e-5
COMMON = "--device-type cpu --dtype float32 --report-to none --log-samples --logging-steps 1"
SFT = (
    "--model data_samples/tiny-qwen3 --data data_samples/train.jsonl --global-batch-size 12"
    " --max-steps 6 --cache-dir {folder}/cache"
)
PRETRAIN = (
    "--train-data-path {folder}/tokens --depth 2 --max-seq-len 64 --device-batch-size 2"
    " --total-batch-size 512 --num-iterations 6 --warmup-steps 2 --sample-every 0"
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
    return {
        "ids": [line["ids"] for line in lines(folder / "run" / "samples.jsonl")],
        "losses": [line["loss"] for line in log],
        "grad_norms": [line["grad_norm"] for line in log],
        "learning_rates": [line["learning_rate"] for line in log],
    }


@pytest.mark.parametrize("name", RUNS)
def test_the_training_is_what_it_was(name: str, tmp_path: Path):
    golden, now = json.loads(GOLDEN.read_text(encoding="utf-8"))[name], trajectory(name, tmp_path)
    assert now["ids"] == golden["ids"]
    for numbers in ("losses", "grad_norms", "learning_rates"):
        assert now[numbers] == pytest.approx(golden[numbers], rel=LOSS_TOLERANCE), numbers


if __name__ == "__main__":
    made = {}
    for wanted in RUNS:
        with tempfile.TemporaryDirectory() as temporary:
            made[wanted] = trajectory(wanted, Path(temporary))
    text = json.dumps(made) + "\n"
    Path(sys.argv[1] if len(sys.argv) > 1 else GOLDEN).write_text(text, encoding="utf-8")
