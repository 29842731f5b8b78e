"""The pretraining runs of the equivalence grid: architectures and optimizers on a few thousand
tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

# As many tokens a step as make a gradient of full rank: where there is none, Muon makes steps of
# rounding. Two layers: of one alone, LFM2 has no convolution.
DEPTH, VOCABULARY, WINDOW_TOKENS, WINDOWS_PER_STEP = 2, 512, 64, 8
# What is trained and by which optimizer -> the settings that say so.
PRETRAINING = {
    "nanochat by normuon": {"arch": "nanochat", "optimizer": "normuon"},
    "nanochat by muon": {"arch": "nanochat", "optimizer": "muon"},
    "nanochat by adamw": {"arch": "nanochat", "optimizer": "adamw"},
    "qwen3 by normuon": {"arch": "qwen3", "optimizer": "normuon"},
    "lfm2 by normuon": {"arch": "lfm2", "optimizer": "normuon"},
    "lfm2_value by normuon": {"arch": "lfm2_value", "optimizer": "normuon"},
}


def tokens_file(folder: Path) -> Path:
    """Tokens of which some are more frequent, so that there is something to learn."""
    path = folder / "tokens.bin"
    if not path.exists():
        drawn = np.random.default_rng(0).beta(1, 2, 40_000) * VOCABULARY
        drawn.astype(np.uint16).tofile(path)
    return path


def pretraining_settings(
    kind: str, output_dir: Path, folder: Path, *, windows: int, steps: int
) -> dict[str, Any]:
    """Settings of a small float32 run that holds `windows` windows at a time."""
    return {
        **PRETRAINING[kind],
        "train_data_path": str(tokens_file(folder)),
        "output_dir": str(output_dir),
        "vocab_size": VOCABULARY,
        "depth": DEPTH,
        "max_seq_len": WINDOW_TOKENS,
        "device_batch_size": windows,
        "total_batch_size": WINDOWS_PER_STEP * WINDOW_TOKENS,
        "num_iterations": steps,
        "warmup_steps": 2,
        # Lower rates than by default: torch's Muon rounds to bfloat16, and the further goes what
        # follows from that.
        "lr_batch_exponent": 0.5,
        "dtype": "float32",
        "device_type": "cpu",
        "save_steps": steps,
        "sample_every": 0,
        "log_samples": True,
        "report_to": "none",
    }


def pretraining_start(kind: str) -> dict[str, Any]:
    """The weights before the first step, by name."""
    from finetune.config.pretrain_config import PretrainConfig
    from finetune.modeling.scratch import make_model, scratch_config

    seed = PretrainConfig.model_fields["seed"].default
    shape = scratch_config(
        PRETRAINING[kind]["arch"], DEPTH, vocab_size=VOCABULARY, max_seq_len=WINDOW_TOKENS
    )
    return {
        name: weight.detach().clone()
        for name, weight in make_model(shape, seed=seed).named_parameters()
    }
