"""Copies of a merged folder in which one thing is wrong, and llama.cpp's server."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from launching import environment
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def changed(folder: Path, name: str, **values: Any) -> None:
    """Change settings of a JSON file of the folder."""
    path = folder / name
    settings = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(settings), encoding="utf-8")


def template(source: str) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8") and None
    )


def edited_template(old: str, new: str) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8")
        assert old in source
        path.write_text(source.replace(old, new), encoding="utf-8")

    return fault


def weights(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return fault


def weights_of(other: Path) -> Callable[[Path], None]:
    """Of another folder with the same names."""
    return lambda folder: (
        shutil.copyfile(other / "model.safetensors", folder / "model.safetensors") and None
    )


def strengthened(base: Path, factor: float) -> Callable[[Path], None]:
    """The adapter's change times a factor: 2 for one that was merged twice."""
    before = load_file(base / "model.safetensors")

    def change(after: Tensors) -> Tensors:
        changes = {name: after[name].float() - before[name].float() for name in after}
        return {
            n: before[n] + change.mul(factor).to(before[n].dtype) for n, change in changes.items()
        }

    return weights(change)


def rope(**parameters: Any) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        own = json.loads((folder / "config.json").read_text(encoding="utf-8"))["rope_parameters"]
        changed(folder, "config.json", rope_parameters=own | parameters)

    return fault


def in_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        weights(lambda tensors: {n: tensor.to(dtype) for n, tensor in tensors.items()})(folder)
        changed(folder, "config.json", dtype=str(dtype).removeprefix("torch."))

    return fault


def in_four_bits(tensors: Tensors) -> Tensors:
    """Each matrix rounded in blocks of 32, as llama.cpp's `quantize_row_q4_0_ref` does."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or "embed" in name:
            continue
        rows = tensor.float().reshape(-1, 32)
        for block in rows:
            peak = block[block.abs().argmax()]
            scale = peak / -8
            if scale != 0:
                levels = torch.clamp((block / scale + 8.5).to(torch.int32), 0, 15) - 8
                block.copy_(levels * scale.half().float())
        found[name] = rows.reshape(tensor.shape).to(tensor.dtype)
    return found


def control_tokens_as_text(folder: Path) -> None:
    """The tokenizer without its added tokens, as of a conversion that leaves them out."""
    path = folder / "tokenizer.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    added = known["added_tokens"]
    known["added_tokens"] = [token for token in added if token["content"] == "<|endoftext|>"]
    path.write_text(json.dumps(known), encoding="utf-8")
    changed(folder, "tokenizer_config.json", extra_special_tokens=[], eos_token="<|endoftext|>")


def deployment(merged: Path, folder: Path, fault: Callable[[Path], None]) -> Path:
    """A copy of a merged folder with a fault."""
    shutil.copytree(merged, folder)
    fault(folder)
    return folder


# One thread: several wait for one another by spinning, on a busy machine ten times as long.
_LLAMA = """
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_parallel = sys.argv[1], 0, 1024, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def llama_server(path: Path) -> Iterator[str]:
    """llama.cpp's server with a GGUF file; its address."""
    with subprocess.Popen(
        [sys.executable, "-c", _LLAMA, str(path)], env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as server:  # fmt: skip
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()
