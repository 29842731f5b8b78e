"""The settings of pretraining: the guides' spellings, batches in tokens, what is derived."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import Resolved, resolve, resolve_object, to_yaml
from finetune.errors import FinetuneError

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ["--train-data-path", "t.bin", "--output-dir", "out"]


def made(flags: str, world_size: int = 1) -> Resolved:
    arguments = [*NEEDED, *flags.split()]
    return resolve(arguments, world_size=world_size, model_class=PretrainConfig)


def refused(flags: str, world_size: int = 1) -> str:
    with pytest.raises(FinetuneError) as caught:
        made(flags, world_size)
    return str(caught.value)


# Flags that the guides (000, 001, 004) show, with the setting that each becomes.
GUIDE_FLAGS = {
    "--train_data_path a.bin": ("train_data_path", ("a.bin",)),
    "--batch_size 8": ("device_batch_size", 8),
    "--distributed --world_size 4": ("world_size", 4),
    "--resume_from out/checkpoint-5": ("resume", "out/checkpoint-5"),
    "--use_wandb": ("report_to", ("wandb",)),
    "--run=dummy --use_wandb": ("report_to", "auto"),
    "--run r1": ("wandb_run_name", "r1"),
    "--document-aligned": ("windows", "document"),
    "--document_aligned false": ("windows", "stream"),
    "--optimizer adamw": ("matrix_lr", 3e-3),
    "--model m --num_iterations 5": ("weight_decay", 0.1),
    "--model m --num_iterations 5 --finetuning=lora": ("learning_rate", 2e-4),
}


@pytest.mark.parametrize("flags", GUIDE_FLAGS)
def test_the_guides_flags(flags):
    name, value = GUIDE_FLAGS[flags]
    assert getattr(made(flags).config, name) == value


def test_what_is_refused():
    for flags, words in (
        ("--use_wandb --report-to trackio", "use_wandb is true, and report_to is"),
        ("--document-aligned --windows best-fit", "windows is best-fit"),
        ("--resume_from checkpoints/checkpoint_step_5000.pt", "pickle"),
        (f"--deepspeed {ROOT}/ds_configs/zero2.json", "DeepSpeed"),
        (
            "--batch_size=4 --gradient_accumulation_steps=3 --total-batch-size=8192"
            " --max-seq-len=1024",
            "total_batch_size 12288",
        ),
    ):
        assert words in refused(flags)


def test_a_flag_for_windows_counts_above_the_older_word_in_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("document_aligned: true\n")
    assert made(f"--config {file}").config.windows == "document"
    config = made(f"--config {file} --windows best-fit").config
    assert (config.windows, config.document_aligned) == ("best-fit", False)
    assert resolve_object(config, 1, PretrainConfig).config.windows == "best-fit"


# device batch, total, sequence, processes -> accumulation; None: refused. Guide 000 prints 4 for
# its first.
def test_accumulation_is_derived_and_said():
    for device, total, length, world, accumulation in (
        (2, 32768, 1024, 4, 4),
        (32, 524288, 2048, 4, 2),
        (16, 49152, 2048, 2, None),
        (3, 1000, 100, 1, None),
    ):
        flags = f"--device-batch-size={device} --total-batch-size={total} --max-seq-len={length}"
        if accumulation is None:
            said = refused(flags, world)
            assert "nearest that agree" in said
            assert device == 3 or "size 65536" in said and "device_batch_size 12" in said
            return
        resolved = made(flags, world)
        assert resolved.config.gradient_accumulation_steps == accumulation
        assert resolved.config.global_batch_size == total // length
        assert any(
            f"gradient accumulation steps: {accumulation}" in note for note in resolved.notes
        )


def test_batch_size_and_accumulation_without_a_total_are_the_total():
    """Guide 001: total = batch_size x processes x accumulation."""
    resolved = made("--batch_size 4 --gradient_accumulation_steps 4", world_size=4)
    assert resolved.config.total_batch_size == 4 * 4 * 4 * 2048
    assert any("total_batch_size 131,072" in note for note in resolved.notes)


def test_the_run_file_means_the_same_run_on_another_machine():
    flags = "--distributed --world-size=2 --run=x --optimizer=adamw"
    values = yaml.safe_load(to_yaml(made(flags, world_size=2).config))
    assert not {"gradient_accumulation_steps", "distributed", "world_size"} & values.keys()
    again = resolve_object(values, 1, PretrainConfig).config
    assert (again.matrix_lr, again.wandb_run_name) == (3e-3, "x")
