"""A run's result: whole weights, brought into the run folder only when all of its files are right."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from finetune.storage import durable_files
from finetune.training.state import gathered


def whole_weights(model: torch.nn.Module, dtype: torch.dtype | None, *, keep: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name on the CPU, whole whatever holds them. Every rank calls.

    Args:
        dtype: of the parameters; None: as they are.
        keep: on the rank that wants them; the others get nothing.
    """
    weights = {}
    for name, parameter in model.named_parameters():
        with gathered(parameter):
            if keep:
                weights[name] = parameter.detach().to("cpu", dtype or parameter.dtype, copy=True)
    if keep:
        for name, buffer in model.state_dict(keep_vars=True).items():
            if not isinstance(buffer, torch.nn.Parameter):
                weights[name] = buffer.detach().cpu().clone()
    return weights


def put_output(output_dir: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside and check it, then move its files in, durably. On one rank."""
    staging = output_dir / ".staging-0-output"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    write(staging)
    for path in sorted(staging.iterdir()):
        durable_files.share_file(path)
        durable_files.sync_file(path)
        os.replace(path, output_dir / path.name)
    staging.rmdir()
    durable_files.sync_folder(output_dir)
