"""The limit in benchmarks/sft.py: a packed loop with nothing around it.

transformers' model, peft's adapter, torch's AdamW. A global batch is one row of its conversations one after another;
positions begin anew in each, from which transformers builds the mask that keeps them apart. Logits are made where
there is a target and nowhere else. No accelerate, no logging of its own, no checkpoints; rendering is done before.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from sft_inputs import rendered
from torch.nn.functional import cross_entropy

NO_STATE = (None, None, None)  # arguments, state and control of a Trainer, which the recorder does not read


def train_bare(work: dict[str, Any], folder: Path, recorder: Any) -> None:
    """Train one pass over the peers' file; `recorder` is told what a Trainer would tell it."""
    model = _model(work, folder)
    given = work["inputs"]
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=given["learning_rate"], weight_decay=0.0
    )
    rows = json.loads((folder / "ordered" / "train.json").read_text(encoding="utf-8"))
    whole = list(rendered(folder / "model", [row["messages"] for row in rows]))
    half = work["dtype"] == "bfloat16"
    recorder.on_train_begin(*NO_STATE, model=model)
    for start in range(0, len(whole), given["batch"]):
        recorder.on_step_begin(*NO_STATE)
        inputs, targets = _row(whole[start : start + given["batch"]], work["device"])
        with torch.autocast(work["device"], torch.bfloat16) if half else nullcontext():
            logits = model(**inputs, use_cache=False).logits
        loss = cross_entropy(logits[0].float(), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recorder.on_log(*NO_STATE, logs={"loss": loss.item(), "grad_norm": norm.item()})
        recorder.on_step_end(*NO_STATE)
    recorder.on_train_end(*NO_STATE)


def _model(work: dict[str, Any], folder: Path) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    rank = work["inputs"]["lora_r"]
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, work["dtype"]))
    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base.to(work["device"]), adapter)
    if work["own"].get("gradient_checkpointing"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    return model.train()


def _row(batch: list[tuple[list[int], list[int]]], device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One row `(1, T)` of whole conversations, and the targets `(n,)` that its kept logits predict."""
    ids = [token for tokens, _ in batch for token in tokens]
    positions = [place for tokens, _ in batch for place in range(len(tokens))]
    kept, first = [], 0
    for tokens, places in batch:
        kept += [first + place - 1 for place in places]
        first += len(tokens)
    keep = torch.tensor(kept, device=device)
    row = torch.tensor([ids], device=device)
    inputs = {"input_ids": row, "position_ids": torch.tensor([positions], device=device), "logits_to_keep": keep}
    return inputs, row[0, keep + 1]
