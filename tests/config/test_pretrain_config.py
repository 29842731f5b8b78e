"""The settings of pretraining: the guides' spellings, batches in tokens, what is derived and what
is refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from run_helpers import flag_table

from finetune.config.options import help_text
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve, resolve_object, to_yaml
from finetune.errors import FinetuneError

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).parents[1] / "frozen" / "pretrain_flags.txt"
NEEDED = ["--train-data-path", "t.bin", "--output-dir", "out"]


def made(*flags: str, world_size: int = 1):
    return resolve([*NEEDED, *flags], world_size=world_size, model_class=PretrainConfig)


def refused(*flags: str, world_size: int = 1) -> str:
    with pytest.raises(FinetuneError) as caught:
        made(*flags, world_size=world_size)
    return str(caught.value)


@pytest.mark.frozen
def test_flags_are_frozen() -> None:
    """To change a flag on purpose: PYTHONPATH=tests python -c "from run_helpers import flag_table; \
    from finetune.config.pretrain_config import PretrainConfig; \
    print(flag_table(PretrainConfig), end='')" > tests/frozen/pretrain_flags.txt
    """
    assert flag_table(PretrainConfig) == FROZEN.read_text()


# Every flag that the guides (000, 001, 004) show, with the setting it becomes.
GUIDE_FLAGS = {
    "--train_data_path a.bin": ("train_data_path", ("a.bin",)),
    "--valid_data_path b.bin": ("valid_data_path", ("b.bin",)),
    "--batch_size 8": ("device_batch_size", 8),
    "--device_batch_size=16": ("device_batch_size", 16),
    "--device-batch-size=32": ("device_batch_size", 32),
    "--total_batch_size=1048576": ("total_batch_size", 1048576),
    "--total_steps 10000": ("num_iterations", 10000),
    "--num_iterations=50": ("num_iterations", 50),
    "--eval_every=25": ("eval_steps", 25),
    "--save-every 7": ("save_steps", 7),
    "--sample-every 9": ("sample_every", 9),
    "--depth=12": ("depth", 12),
    "--max-seq-len=1024": ("max_seq_len", 1024),
    "--device-type=npu": ("device_type", "npu"),
    "--backend gloo": ("backend", "gloo"),
    "--dtype bfloat16": ("dtype", "bfloat16"),
    "--distributed": ("distributed", True),
    "--distributed --world_size 4": ("world_size", 4),
    "--resume_from out/checkpoint-5": ("resume", "out/checkpoint-5"),
    "--use_wandb": ("report_to", ("wandb",)),
    "--use_wandb --wandb_project my-transformer": ("wandb_project", "my-transformer"),
    "--use_wandb --wandb_run_name 4gpu-bf16": ("wandb_run_name", "4gpu-bf16"),
    "--run r1": ("wandb_run_name", "r1"),
    "--run=dummy --use_wandb": ("report_to", "auto"),
    "--fp8": ("fp8", True),
    "--document-aligned": ("windows", "document"),
    "--document_aligned false": ("windows", "stream"),
    "--windows best-fit": ("windows", "best-fit"),
    "--windows document --document-aligned": ("windows", "document"),
    "--grad_clip 0.5": ("max_grad_norm", 0.5),
    "--embedding_lr=0.005": ("embedding_lr", 0.005),
    "--local_rank 1": ("depth", 12),
    "--local-rank=3": ("depth", 12),
}


@pytest.mark.parametrize("flags", GUIDE_FLAGS)
def test_the_guides_flags(flags: str) -> None:
    name, value = GUIDE_FLAGS[flags]
    assert getattr(made(*flags.split()).config, name) == value


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--window-pattern=L", "window"),
        ("--model_tag=d12", "--output-dir"),
        ("--core-metric-every=5", "--eval-steps"),
    ],
)
def test_nanochats_other_flags_are_refused_with_a_reason(flag: str, named: str) -> None:
    assert named in refused(flag)


def test_aliases_name_fields_and_shadow_none() -> None:
    fields = PretrainConfig.model_fields.keys()
    assert set(PretrainConfig.aliases.values()) <= fields
    assert not set(PretrainConfig.aliases) & fields
    assert "also --batch-size" in " ".join(help_text(PretrainConfig).split())


def test_a_flag_for_windows_counts_above_the_older_word_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("document_aligned: true\n")
    assert made("--config", str(file)).config.windows == "document"
    config = made("--config", str(file), "--windows", "best-fit").config
    assert (config.windows, config.document_aligned) == ("best-fit", False)
    assert "windows is best-fit" in refused("--document-aligned", "--windows", "best-fit")
    again = resolve_object(config, 1, PretrainConfig).config
    assert again.windows == "best-fit"


def test_an_old_configuration_file_of_the_guide(tmp_path: Path) -> None:
    file = tmp_path / "conservative.py"
    file.write_text("depth = 12\nbatch_size = 8\ntotal_batch_size = 24576\nmax_seq_len = 1536\n")
    config = made("--config", str(file), world_size=2).config
    assert (config.depth, config.device_batch_size, config.gradient_accumulation_steps) == (
        12,
        8,
        1,
    )


# device batch, total, sequence, processes -> accumulation; None: refused. Guide 000 prints 4 for
# its first.
BATCHES = [
    (2, 32768, 1024, 4, 4),
    (4, 65536, 1024, 4, 4),
    (32, 524288, 2048, 4, 2),
    (8, 24576, 1536, 2, 1),
    (12, 49152, 2048, 2, 1),
    (14, 86016, 3072, 2, 1),
    (12, 36864, 1536, 2, 1),
    (16, 49152, 2048, 2, None),
    (3, 1000, 100, 1, None),
]


@pytest.mark.parametrize(("device", "total", "length", "world", "accumulation"), BATCHES)
def test_accumulation_is_derived_and_said(
    device: int, total: int, length: int, world: int, accumulation
) -> None:
    flags = [
        f"--device-batch-size={device}",
        f"--total-batch-size={total}",
        f"--max-seq-len={length}",
    ]
    if accumulation is None:
        assert "nearest that agree" in refused(*flags, world_size=world)
        return
    resolved = made(*flags, world_size=world)
    assert resolved.config.gradient_accumulation_steps == accumulation
    assert resolved.config.global_batch_size == total // length
    assert any(f"gradient accumulation steps: {accumulation}" in note for note in resolved.notes)


def test_the_guides_own_indivisible_example_names_what_divides() -> None:
    said = refused(
        "--device_batch_size=16", "--total_batch_size=49152", "--max_seq_len=2048", world_size=2
    )
    assert "total_batch_size 65536" in said and "device_batch_size 12" in said
    for total, device in ((65536, 16), (49152, 12)):
        made(
            f"--total-batch-size={total}",
            f"--device-batch-size={device}",
            "--max-seq-len=2048",
            world_size=2,
        )


def test_batch_size_and_accumulation_without_a_total_are_the_total() -> None:
    """Guide 001: total = batch_size x processes x accumulation."""
    resolved = made("--batch_size", "4", "--gradient_accumulation_steps", "4", world_size=4)
    assert resolved.config.total_batch_size == 4 * 4 * 4 * 2048
    assert any("total_batch_size 131,072" in note for note in resolved.notes)


def test_all_three_that_disagree_are_refused() -> None:
    flags = (
        "--batch_size=4",
        "--gradient_accumulation_steps=3",
        "--total-batch-size=8192",
        "--max-seq-len=1024",
    )
    assert "total_batch_size 12288" in refused(*flags)


def test_a_pt_file_is_refused_with_words() -> None:
    assert "pickle" in refused("--resume_from", "checkpoints/checkpoint_step_5000.pt")


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    assert "DeepSpeed" in refused("--deepspeed", str(ROOT / "ds_configs" / "zero2.json"))


def test_an_unknown_architecture_names_those_there_are() -> None:
    said = refused("--arch", "gpt5")
    assert all(arch in said for arch in ("nanochat", "qwen3", "llama", "lfm2", "lfm2_value"))


def test_the_run_file_means_the_same_run_on_another_machine() -> None:
    config = made(
        "--distributed", "--world-size=2", "--run=x", "--optimizer=adamw", world_size=2
    ).config
    values = yaml.safe_load(to_yaml(config))
    assert not {"gradient_accumulation_steps", "distributed", "world_size"} & values.keys()
    again = resolve_object(values, 1, PretrainConfig).config
    assert (again.matrix_lr, again.wandb_run_name) == (3e-3, "x")


def test_weights_of_files_that_were_replaced_go_with_them(tmp_path: Path) -> None:
    """They belong to the files of the run file, not to those of the command line."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "train_data_path: [a.bin, b.bin]\ndata_weights: [3, 1]\noutput_dir:"
        " out\nnum_iterations: 5\n"
    )
    arguments = ["--config", str(run_file), "--device-batch-size", "1", "--max-seq-len", "8"]
    kept = resolve(arguments, world_size=1, model_class=PretrainConfig)
    assert kept.config.data_weights == (3.0, 1.0)
    replaced = resolve(
        [*arguments, "--train-data-path", "c.bin", "d.bin"],
        world_size=1,
        model_class=PretrainConfig,
    )
    assert not replaced.config.data_weights
    assert "data_weights" in str(replaced.notes) and "because train_data_path is from" in str(
        replaced.notes
    )
