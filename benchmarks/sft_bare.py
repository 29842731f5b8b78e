"""The limit in benchmarks/sft.py: a packed loop with nothing around it.

transformers' model, peft's adapter, torch's AdamW. A global batch is one row of its conversations
one after another, or as many rows as `row_tokens` makes of it; positions begin anew in each, from
which transformers builds the mask that keeps them apart. On a device such a mask, and the products
behind it, would be no limit: there it is torch's varlen attention, which takes their bounds. Logits
are made where there is a target and nowhere else. No accelerate, no logging of its own, no
checkpoints; rendering is done before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from sft_inputs import rendered
from torch.nn.functional import cross_entropy

VARLEN = "bare_varlen"
Conversation = tuple[list[int], list[int]]  # tokens, and the places of those that are trained
# arguments, state and control of a Trainer, which the recorder does not read
NO_STATE = (None, None, None)


def train_bare(work: dict[str, Any], folder: Path, recorder: Any) -> None:
    """Train one pass over the peers' file; `recorder` is told what a Trainer would tell it."""
    model = _model(work, folder)
    given = work["inputs"]
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=given["learning_rate"],
        weight_decay=0.0,
        fused=True,
    )
    conversations = json.loads((folder / "ordered" / "train.json").read_text(encoding="utf-8"))
    whole = list(rendered(folder / "model", [one["messages"] for one in conversations]))
    recorder.on_train_begin(*NO_STATE, model=model)
    for start in range(0, len(whole), given["batch"]):
        recorder.on_step_begin(*NO_STATE)
        loss = _backward(model, whole[start : start + given["batch"]], work)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recorder.on_log(*NO_STATE, logs={"loss": loss.item(), "grad_norm": norm.item()})
        recorder.on_step_end(*NO_STATE)
    recorder.on_train_end(*NO_STATE, model=model)


def _backward(
    model: torch.nn.Module, batch: list[Conversation], work: dict[str, Any]
) -> torch.Tensor:
    """Gradients of the mean loss of a global batch's targets; returns that loss, a scalar."""
    total = sum(len(places) for _, places in batch)
    half = work["dtype"] == "bfloat16"
    loss = torch.zeros((), device=work["device"])
    for row in _rows(batch, work["own"].get("row_tokens")):
        inputs, targets = _inputs(row, work["device"])
        with torch.autocast(work["device"], torch.bfloat16) if half else nullcontext():
            logits = model(**inputs, use_cache=False).logits
        part = cross_entropy(logits[0].float(), targets, reduction="sum") / total
        del logits
        part.backward()
        loss += part.detach()
    return loss


def _rows(batch: list[Conversation], most_tokens: int | None) -> Iterator[list[Conversation]]:
    """The conversations in their order, in rows of so many tokens or one conversation."""
    row: list[Conversation] = []
    for conversation in batch:
        if most_tokens and row and sum(len(ids) for ids, _ in [*row, conversation]) > most_tokens:
            yield row
            row = []
        row.append(conversation)
    yield row


def _model(work: dict[str, Any], folder: Path) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AttentionInterface, AutoModelForCausalLM

    rank = work["inputs"]["lora_r"]
    attention = None
    if work["device"] != "cpu":
        # Not in AttentionMaskInterface too: so transformers builds no mask.
        AttentionInterface.register(VARLEN, _varlen)
        attention = VARLEN
    base = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=getattr(torch, work["dtype"]), attn_implementation=attention
    )
    adapter = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base.to(work["device"]), adapter)
    if work["own"].get("gradient_checkpointing"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    return model.train()


def _inputs(row: list[Conversation], device: str) -> tuple[dict[str, Any], torch.Tensor]:
    """One row `(1, T)` of whole conversations, and the targets `(n,)` that its kept logits
    predict.
    """
    ids = [token for tokens, _ in row for token in tokens]
    lengths = [len(tokens) for tokens, _ in row]
    bounds = list(accumulate(lengths, initial=0))
    kept = [
        first + place - 1
        for first, (_, places) in zip(bounds, row, strict=False)
        for place in places
    ]
    keep, line = _there(kept, device), _there([ids], device)
    positions = _there([[place for length in lengths for place in range(length)]], device)
    inputs: dict[str, Any] = {"input_ids": line, "position_ids": positions, "logits_to_keep": keep}
    if device != "cpu":
        inputs["cu_seq_lens_q"] = _there(bounds, device, torch.int32)
        inputs["max_length_q"] = max(lengths)
    return inputs, line[0, keep + 1]


def _there(numbers: list[Any], device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    made = torch.tensor(numbers, dtype=dtype)
    # From memory that is not page-locked the host would wait until all before the copy is computed.
    return made if device == "cpu" else made.pin_memory().to(device, non_blocking=True)


def _varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within conversations: query `(1, H, T, D)`, key and value `(1, K, T, D)` ->
    `(1, T, H, D)`.
    """
    from torch.nn.attention.varlen import varlen_attn

    flat = [
        states[0].transpose(0, 1).to(torch.bfloat16).contiguous() for states in (query, key, value)
    ]
    # torch 2.11 has no such argument, and takes fewer heads of keys and values without it.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    bounds, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    output = varlen_attn(*flat, *bounds, *longest, scale=scaling, window_size=(-1, 0), **grouped)
    return output[None], None
