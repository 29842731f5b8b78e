"""In a process of its own: a nanochat checkout's base_train, reading our tokens and writing down
what it does.

Started by benchmarks/nanochat.py with the path of a JSON file. nanochat's code runs as it is, from
its checkout. Put in its way are: the tokenizer (ours), the loaders where windows are given (ours),
and counters around its optimizer's step and its evaluation. With "plain", its model computes
without its newer extras: see `_without_extras`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer


def main(settings: dict[str, Any]) -> None:
    """Run base_train and write the report."""
    # In place of this file's folder, whose nanochat.py is not the package of that name.
    sys.path[0] = settings["checkout"]
    for name in ("wandb", "requests"):  # imported by nanochat, used only to report and to download
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
    sys.modules["nanochat.tokenizer"] = _tokenizer_module(
        Path(settings["tokenizer"]), settings["bytes_per_token"]
    )
    _give_windows(settings["train_windows"], settings["valid_windows"])
    counters = Counters(settings["eval_every"])
    counters.install()
    if settings["plain"]:
        _without_extras()
    sys.argv = ["base_train", *settings["flags"]]
    runpy.run_module("scripts.base_train", run_name="__main__")
    Path(settings["report"]).write_text(json.dumps(counters.report), encoding="utf-8")


class OurTokenizer:
    """What base_train and its loaders ask of a tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.backend.post_processor = None
        self.backend.encode_special_tokens = True

    def get_vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def get_bos_token_id(self) -> int:
        return self.backend.token_to_id("<|endoftext|>")

    def encode(self, texts: list[str], prepend: int, num_threads: int) -> list[list[int]]:
        return [[prepend, *encoding.ids] for encoding in self.backend.encode_batch_fast(texts)]


def _tokenizer_module(folder: Path, bytes_per_token: str) -> ModuleType:
    module = ModuleType("nanochat.tokenizer")
    module.get_tokenizer = lambda: OurTokenizer(folder)
    module.get_token_bytes = lambda device="cpu": torch.from_numpy(np.load(bytes_per_token)).to(
        device
    )
    return module


def _give_windows(train: str | None, valid: str) -> None:
    """Replace the loaders: validation always reads `valid`; training reads `train` in its order, or
    its own files.
    """
    loaders = importlib.import_module("nanochat.dataloader")

    def read(path: str, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        windows, place = np.load(path, mmap_mode="r"), 0
        while True:
            # One batch more than is trained on is asked for: it begins again.
            block = windows[np.arange(place, place + count) % len(windows)].astype(np.int64)
            yield torch.from_numpy(block[:, :-1].copy()), torch.from_numpy(block[:, 1:].copy())
            place += count

    def read_valid(
        tokenizer: Any, count: int, *_: Any, **__: Any
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return read(valid, count)

    def read_train(
        tokenizer: Any, count: int, *_: Any, **__: Any
    ) -> Iterator[tuple[Any, Any, dict[str, int]]]:
        return ((x, y, {"pq_idx": 0, "rg_idx": 0, "epoch": 1}) for x, y in read(train, count))

    loaders.tokenizing_distributed_data_loader_bos_bestfit = read_valid
    if train is not None:
        loaders.tokenizing_distributed_data_loader_with_state_bos_bestfit = read_train


class Counters:
    """Notes at each evaluation, and the gradient norm of the first step and of every step that one
    follows.
    """

    def __init__(self, every: int) -> None:
        self.every, self.steps = every, 0
        self.report: dict[str, Any] = {"parameters": 0, "gradient_norms": {}, "evaluations": []}

    def install(self) -> None:
        optimizers, evaluation = (
            importlib.import_module(f"nanochat.{name}") for name in ("optim", "loss_eval")
        )
        step, evaluate = optimizers.MuonAdamW.step, evaluation.evaluate_bpb

        def counted_step(optimizer: torch.optim.Optimizer) -> None:
            self.steps += 1
            if self.steps == 1 or self.steps % self.every == 0:
                trained = [p for group in optimizer.param_groups for p in group["params"]]
                self.report["parameters"] = sum(p.numel() for p in trained)
                squares = [float(p.grad.double().square().sum()) for p in trained]
                self.report["gradient_norms"][self.steps] = math.sqrt(sum(squares))
            step(optimizer)

        def counted_evaluation(
            model: Any, batches: Any, steps: int, token_bytes: torch.Tensor
        ) -> float:
            seen = {"tokens": 0, "bytes": 0}

            def count() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
                for x, y in batches:
                    seen["tokens"] += y.numel()
                    seen["bytes"] += int(token_bytes[y].sum())
                    yield x, y

            began = time.perf_counter()
            bpb = evaluate(model, count(), steps, token_bytes)
            facts = {"step": self.steps, "bpb": bpb, "seconds": time.perf_counter() - began, **seen}
            self.report["evaluations"].append(facts)
            return bpb

        optimizers.MuonAdamW.step = counted_step
        evaluation.evaluate_bpb = counted_evaluation


def _without_extras() -> None:
    """The model without value embeddings, residual and embedding scalars, smear and backout: not
    computed, not trained.

    What stays: the shape, start, QK norm with its factor, softcap, and the optimizer with all that
    it has.
    """
    gpt = importlib.import_module("nanochat.gpt")
    functional = torch.nn.functional

    class PlainGPT(gpt.GPT):
        def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
            length = idx.shape[1]
            rotary = (self.cos[:, :length], self.sin[:, :length])
            hidden = gpt.norm(self.transformer.wte(idx).to(self.cos.dtype))
            for layer, window in zip(self.transformer.h, self.window_sizes, strict=True):
                hidden = layer(hidden, None, rotary, window, None)
            logits = self.lm_head(gpt.norm(hidden))[..., : self.config.vocab_size].float()
            logits = 15 * torch.tanh(logits / 15)
            return functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction=loss_reduction
            )

        def setup_optimizer(self, **rates):
            optimizer = super().setup_optimizer(**rates)
            unused = {
                id(p)
                for name, p in self.named_parameters()
                if name.split(".")[0] not in ("transformer", "lm_head")
            }
            optimizer.param_groups = [
                group
                for group in optimizer.param_groups
                if group["params"] and not any(id(p) in unused for p in group["params"])
            ]
            return optimizer

    gpt.has_ve = lambda *_: False
    gpt.GPT = PlainGPT


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
