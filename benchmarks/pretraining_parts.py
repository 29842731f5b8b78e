"""What each part of nanochat's model and optimizer is worth, one at a time, at equal rates; and
ours beside them.

    git clone https://github.com/karpathy/nanochat && git -C nanochat checkout 92d63d4 python
    benchmarks/pretraining_parts.py --nanochat nanochat --work-dir runs/parts --depths 2 4 --seeds 1
    2 3 python benchmarks/pretraining_parts_page.py    # docs/evidence/pretraining_parts.md from the results

A bare loop, not compiled, one thread: nanochat's own model from its checkout with parts left out,
or a model of transformers with the same start; NorMuon or Muon as here (finetune/training/muon.py).
All read the same windows in the same order, with nanochat's rates, scaled alike. Each run is a line
of benchmarks/results/pretraining_parts.jsonl; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "NANOCHAT_DTYPE": "float32"}

import numpy as np
import torch
from dpo import records
from nanochat import _library
from pretraining_parts_page import RESULTS, VARIANTS
from torch.nn.functional import cross_entropy, rms_norm

from finetune.runtime.host import keep_freed_memory
from finetune.training.muon import (
    POLAR_EXPRESS,
    POLAR_MARGIN,
    SECOND_MOMENT,
    BatchedMuon,
    NorMuon,
    _iterated,
)
from finetune.training.optimizers import JointOptimizer

ROOT = Path(__file__).resolve().parent.parent
SEQUENCE, VOCABULARY, TRAIN_WINDOWS, MICROBATCH = 512, 4096, 8192, 8
KEY = ("variant", "depth", "seed", "tokens", "rate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanochat", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.0], help="factors on all learning rates"
    )
    parser.add_argument("--tokens", type=int, default=2**19)
    parser.add_argument("--total-batch-size", type=int, default=4096, help="tokens")
    options = parser.parse_args()
    # the benchmark of that name, which stands in the way of the package
    sys.modules.pop("nanochat")
    sys.path.insert(0, str(options.nanochat.resolve()))
    torch.set_num_threads(1)
    keep_freed_memory("cpu")  # an eighth of the time; the results are the same to the last bit
    corpus = prepare(options.work_dir, max(TRAIN_WINDOWS, options.tokens // SEQUENCE))
    done = (
        [tuple(run[name] for name in KEY) for run in records(RESULTS)] if RESULTS.exists() else []
    )
    for seed, depth, rate, variant in product(
        options.seeds, options.depths, options.rates, options.variants
    ):
        if (variant, depth, seed, options.tokens, rate) not in done:
            run = train(frozenset(variant.split(",")) - {""}, depth, seed, rate, corpus, options)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps(
                        {"variant": variant, "depth": depth, "seed": seed, "rate": rate, **run}
                    )
                    + "\n"
                )


def prepare(work: Path, windows: int) -> SimpleNamespace:
    """The standard library of the running Python in at most so many windows `(n, 513)`, and bytes
    per token.
    """
    from finetune.config.pretrain_config import PretrainConfig
    from finetune.training.pretraining.prepare import prepare_pretraining

    tokens = work / "tokens"
    if not tokens.exists():
        command = [
            sys.executable,
            "-m",
            "finetune",
            "prepare",
            "--data",
            *_library(),
            "--output-dir",
            str(tokens),
        ]
        flags = [
            "--vocab-size",
            str(VOCABULARY),
            "--valid-fraction",
            "0.05",
            "--on-bad-row",
            "drop",
        ]
        subprocess.run([*command, *flags], check=True, cwd=ROOT)
    paths = {
        "train_data_path": str(tokens),
        "valid_data_path": str(tokens),
        "output_dir": str(work / "none"),
    }
    sizes = {
        "max_seq_len": SEQUENCE,
        "device_batch_size": 8,
        "total_batch_size": 8 * SEQUENCE,
        "eval_tokens": 2**16,
    }
    data = prepare_pretraining(PretrainConfig(**paths, **sizes, depth=4, num_iterations=128))
    taken = np.random.default_rng(0).permutation(len(data.train))[:windows]
    return SimpleNamespace(
        train=np.stack([data.train[int(i)][0] for i in taken]).astype(np.int64),
        valid=np.stack([data.valid[i][0] for i in range(len(data.valid))]).astype(np.int64),
        sizes=torch.from_numpy(np.asarray(data.bytes_per_token).astype(np.int64)),
    )


def train(
    off: frozenset[str], depth: int, seed: int, rate: float, corpus: Any, options: Any
) -> dict[str, Any]:
    """One run to its end: bits per byte of the validation windows, and what it took."""
    from finetune.config.pretrain_config import PretrainConfig
    from finetune.config.schedules import ScheduleSettings, learning_rate_schedule
    from finetune.training.optimizers import make_optimizer, scaled_rates, set_matrix_schedule

    steps, windows = (
        options.tokens // options.total_batch_size,
        options.total_batch_size // SEQUENCE,
    )
    config = PretrainConfig(
        train_data_path="x",
        output_dir="x",
        total_batch_size=options.total_batch_size,
        optimizer="muon" if "muon" in off else "normuon",
        lr_scale=rate,
        lr_batch_exponent=0.5,  # nanochat's; ours is lower by what came out of these runs
    )
    width = 64 * depth
    worth = config.target_param_data_ratio * (12 * depth * width**2 + VOCABULARY * width)
    rates = scaled_rates(config, width=width, worth_tokens=worth, run_tokens=options.tokens)
    if any("arch=" in word for word in off):
        model = transformers_model(off, depth, seed)
        optimizer: Any = make_optimizer(model.inner, config, rates, fused=True)
        if "+backout" in off:
            group = {
                "params": [model.backout],
                "lr": 0.2 * rates.matrix / config.matrix_lr,
                "kind": "vector",
            }
            scalar = torch.optim.AdamW(
                [group], betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True
            )
            optimizer = JointOptimizer([*optimizer.parts, scalar])
    else:
        model = own_model(off, depth, seed)
        optimizer = own_optimizer(model, off, rates, rates.matrix / config.matrix_lr)
    peaks = [(group, group["lr"]) for group in optimizer.param_groups]
    settings = ScheduleSettings(
        steps, min(40, steps // 4), warmdown_ratio=0.65, final_fraction=0.05
    )
    factor = learning_rate_schedule("cosine" if "schedule" in off else "warmdown", settings)
    order = np.random.default_rng(seed).permutation(len(corpus.train))
    began = time.perf_counter()
    for step in range(steps):
        for group, peak in peaks:
            group["lr"] = peak * factor(step)
        set_matrix_schedule(
            optimizer, step, total_steps=steps, warmdown_ratio=0.65, decay=rates.decay
        )
        ids = order[np.arange(step * windows, (step + 1) * windows) % len(order)]
        for part in np.array_split(ids, max(1, windows // MICROBATCH)):
            block = torch.from_numpy(corpus.train[part])
            loss = model(block[:, :-1], block[:, 1:]) * (len(part) / windows)
            loss.backward()
        if (
            step == 0
            and not float(
                sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
            )
            > 0
        ):
            raise SystemExit(f"{sorted(off)}: the gradient is nothing")
        optimizer.step()
        model.zero_grad(set_to_none=True)
    bits = bits_per_byte(model, corpus)
    if not math.isfinite(bits):
        raise SystemExit(f"{sorted(off)}: no number came out")
    facts = {"tokens": options.tokens, "batch": options.total_batch_size, "bpb": bits}
    count = sum(parameter.numel() for parameter in model.parameters())
    return {**facts, "seconds": round(time.perf_counter() - began), "parameters": count}


@torch.no_grad()
def bits_per_byte(model: Any, corpus: Any) -> float:
    model.eval()
    nats, size = 0.0, 0
    for start in range(0, len(corpus.valid), MICROBATCH):
        block = torch.from_numpy(corpus.valid[start : start + MICROBATCH])
        sizes = corpus.sizes[block[:, 1:]]
        losses = (
            model(block[:, :-1], block[:, 1:], loss_reduction="none").view(sizes.shape).double()
        )
        nats, size = nats + float(losses[sizes > 0].sum()), size + int(sizes.sum())
    return nats / math.log(2) / size


# ---------------------------------------------------------------------- models


def own_model(off: frozenset[str], depth: int, seed: int) -> Any:
    """nanochat's, without what is named."""
    from nanochat import gpt

    class Parts(gpt.GPT):
        def forward(self, ids, targets, loss_reduction="mean"):
            rotary = self.cos[:, : ids.shape[1]], self.sin[:, : ids.shape[1]]
            x = gpt.norm(self.transformer.wte(ids))
            if "smear" not in off:
                gate = self.smear_lambda * torch.sigmoid(self.smear_gate(x[:, 1:, :24]))
                x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1)
            first, middle = x, x
            for number, block in enumerate(self.transformer.h):
                x = x if "resid" in off else self.resid_lambdas[number] * x
                x = x if "x0" in off else x + self.x0_lambdas[number] * first
                has = str(number) in self.value_embeds and "ve" not in off
                values = self.value_embeds[str(number)](ids) if has else None
                x = block(x, values, rotary, self.window_sizes[number], None)
                middle = x if number == self.config.n_layer // 2 else middle
            x = x if "backout" in off else x - self.backout_lambda * middle
            logits = self.lm_head(gpt.norm(x)).float()
            logits = logits if "softcap" in off else 15 * torch.tanh(logits / 15)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=loss_reduction)
            return (
                loss + 1e-4 * logits.logsumexp(-1).square().mean()
                if "+zloss" in off and self.training
                else loss
            )

    class Ungated(torch.nn.Module):
        def forward(self, x):  # 3 x sigmoid(0): a constant factor
            return x.new_zeros((*x.shape[:-1], heads))

    heads = max(1, depth // 2)
    attention = sys.modules["nanochat.flash_attention"].flash_attn.flash_attn_func
    scale = 1.44 if "qk" in off else 1.0
    gpt.flash_attn = SimpleNamespace(
        flash_attn_func=lambda q, k, v, **more: attention(q / scale, k, v, **more)
    )
    # That of queries and keys is of four dimensions, the others of three.
    gpt.norm = lambda x: x if "norm" in off and x.ndim == 4 else rms_norm(x, (x.shape[-1],))
    shape = {"n_layer": depth, "n_head": heads, "n_kv_head": heads, "n_embd": 64 * depth}
    pattern = "SSSL" if "+windows" in off else "L"
    torch.manual_seed(seed)
    model = Parts(
        gpt.GPTConfig(sequence_len=SEQUENCE, vocab_size=VOCABULARY, window_pattern=pattern, **shape)
    )
    model.init_weights()
    for block in model.transformer.h:
        if "init" in off:
            block.mlp.c_fc.weight.data.div_(0.4)
        if {"gate", "ve"} & off and block.attn.ve_gate is not None:
            block.attn.ve_gate = Ungated()
    return model


def transformers_model(off: frozenset[str], depth: int, seed: int) -> Causal:
    """A model of transformers with our start, and what of nanochat's is named."""
    from finetune.modeling.scratch import make_model, scratch_config

    name = next(word[5:] for word in off if word.startswith("arch="))
    inner = make_model(
        scratch_config(name, depth, vocab_size=VOCABULARY, max_seq_len=SEQUENCE), seed=seed
    )
    if "+init" in off:
        for layer in inner.model.layers:
            for inputs in (layer.feed_forward.w1, layer.feed_forward.w3):
                inputs.weight.data.mul_(0.4)
    return Causal(inner, backout="+backout" in off)


class Causal(torch.nn.Module):
    """A model of transformers, called as nanochat's is.

    Args:
        backout: the last norm reads x - lambda x what came out of the middle layer; LFM2 only.
    """

    def __init__(self, inner: Any, *, backout: bool = False) -> None:
        super().__init__()
        self.inner = inner
        if backout:
            self.backout, self._middle = torch.nn.Parameter(torch.full((1,), 0.2)), None
            layers = inner.model.layers
            layers[len(layers) // 2].register_forward_hook(self._keep)
            inner.model.embedding_norm.register_forward_pre_hook(
                lambda norm, x: x[0] - self.backout * self._middle
            )

    def _keep(self, layer: Any, inputs: Any, output: torch.Tensor) -> None:
        self._middle = output

    def forward(
        self, ids: torch.Tensor, targets: torch.Tensor, loss_reduction: str = "mean"
    ) -> torch.Tensor:
        logits = self.inner(input_ids=ids, use_cache=False).logits.float()
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=loss_reduction)


# ---------------------------------------------------------------------- optimizers


def own_optimizer(model: Any, off: frozenset[str], rates: Any, scale: float) -> JointOptimizer:
    """NorMuon without what is named (or Muon), and AdamW, of nanochat's groups with its rates times
    `scale`.
    """
    names = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "scalar_lr": 0.5, "matrix_lr": 0.02}
    groups = model.setup_optimizer(
        weight_decay=0.0, **{name: value * scale for name, value in names.items()}
    ).param_groups
    muon = [
        {"params": g["params"], "lr": g["lr"], "kind": "matrix"}
        for g in groups
        if g["kind"] == "muon"
    ]
    wanted = ("kind", "params", "lr", "betas", "eps", "weight_decay")
    adamw = [{name: group[name] for name in wanted} for group in groups if group["kind"] == "adamw"]
    head = next(group for group in adamw if group["params"][0] is model.lm_head.weight)
    if "tied" in off:  # the head's rate, and GPT-2's start
        adamw = [group for group in adamw if group["params"][0] is not model.transformer.wte.weight]
        model.transformer.wte.weight = torch.nn.init.normal_(model.lm_head.weight, std=0.02)
    if "rates" in off:
        adamw = [{**group, "lr": head["lr"], "betas": head["betas"]} for group in adamw]
    kind: Any = BatchedMuon if "muon" in off else partial(PartOfNorMuon, off)
    return JointOptimizer(
        [kind(muon, weight_decay=rates.decay), torch.optim.AdamW(adamw, fused=True)]
    )


class PartOfNorMuon(NorMuon):
    """NorMuon without what is named, for the table only."""

    def __init__(self, off: frozenset[str], *arguments: Any, **settings: Any) -> None:
        self.off = off
        super().__init__(*arguments, **settings)

    def _orthogonalised(self, matrices: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        if "polar" in self.off:  # and "equal": Newton-Schulz of the gradient as it is
            return BatchedMuon._orthogonalised(self, matrices, group)
        if "equal" not in self.off:
            return super()._orthogonalised(matrices, group)
        found = matrices.to(self.dtype)
        return _iterated(
            found / (found.norm(dim=(1, 2), keepdim=True) * POLAR_MARGIN + 1e-6), POLAR_EXPRESS
        )

    def _changed(
        self, weight: Any, direction: Any, members: Any, group: dict[str, Any], skip: Any
    ) -> torch.Tensor:
        if not self.off & {"neuron", "cautious", "renorm", "aspect"}:
            return super()._changed(weight, direction, members, group, skip)
        update = direction.to(weight.dtype)
        rows, columns = update.shape[1:]
        if "renorm" not in self.off:
            # some gradients are nothing at first
            norm = update.norm(dim=(1, 2), keepdim=True).clamp(min=1e-6)
            update = update * (math.sqrt(min(rows, columns)) / norm)
        if "neuron" not in self.off:
            squares = update.square().mean(dim=2 if rows >= columns else 1, keepdim=True)
            held = self._held(members, SECOND_MOMENT, squares.shape[1:])
            second = torch.stack(held).lerp(squares, 0.1)
            torch._foreach_copy_(held, list(second.unbind()))
            even = update * second.clamp(min=1e-10).rsqrt()
            norm = even.norm(dim=(1, 2), keepdim=True).clamp(min=1e-10)
            update = even * (update.norm(dim=(1, 2), keepdim=True) / norm)
        rate = group["lr"] * (1.0 if "aspect" in self.off else math.sqrt(max(1.0, rows / columns)))
        mask = 1.0 if "cautious" in self.off else (weight * update >= 0)
        return weight - weight * mask * (rate * group["weight_decay"]) - update * rate


if __name__ == "__main__":
    main()
