"""Chat tokens that a base model never saw: its head's vectors for all such tokens stay alike.

A base model pretrained on plain text has ids for chat tokens, but every unseen id gets the same
gradient: their vectors move together. LoRA on the layers below leaves the head as it is, and the
tuned model ends its answers with any of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from finetune.errors import ConfigError
from finetune.modeling.hub import folder_of

# norm of the difference of two vectors over the larger norm; between trained ones it is about 1
ALIKE = 0.05
MOST_COMPARED = 256
_HEADS = (
    "lm_head.weight",
    "embed_out.weight",
    "model.embed_tokens.weight",
    "transformer.wte.weight",
)


def untrained_tokens(
    model: str, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]
) -> list[str] | None:
    """The tokens of `ids` whose vector in the model's head equals, nearly, that of another special
    token.

    Reads only those vectors. None where they cannot be read: of a hub's model whose weights are not
    in the cache yet, or whose head has another name than usual.
    """
    folder = folder_of(model)
    path = None if folder is None else _file_of_head(folder)
    if path is None:
        return None
    with safe_open(path, framework="pt") as file:
        name = next(name for name in _HEADS if name in file.keys())  # noqa: SIM118 - not a dict
        head = file.get_slice(name)
        size = head.get_shape()[0]
        others = sorted(
            {
                *tokenizer.all_special_ids,
                *tokenizer.added_tokens_decoder,
                *range(len(tokenizer), size),
            }
        )
        compared = [number for number in others if number < size][:MOST_COMPARED]
        if not compared:
            return []
        vectors = torch.cat([head[number : number + 1] for number in compared]).float()
        found = []
        for token in ids:
            vector = head[token : token + 1].float()
            larger = torch.maximum(vectors.norm(dim=1), vector.norm()).clamp_min(
                torch.finfo(torch.float32).tiny
            )
            alike = (vectors - vector).norm(dim=1) <= ALIKE * larger
            if any(
                same and number != token
                for number, same in zip(compared, alike.tolist(), strict=True)
            ):
                found.append(str(tokenizer.convert_ids_to_tokens(token)))
    return found


def trained_token_ids(
    model: str, tokenizer: PreTrainedTokenizerBase, wanted: Sequence[str], ends: Sequence[int]
) -> list[int]:
    """The tokens of `--train-tokens` by their ids, sorted; of `auto` those of `ends` that were
    never trained.

    Raises:
        ConfigError: no token of the tokenizer; auto, and the model's head cannot be read.
    """
    tokens = (
        untrained_tokens(model, tokenizer, ends) if tuple(wanted) == ("auto",) else list(wanted)
    )
    if tokens is None:
        raise ConfigError(
            f"train_tokens is auto, and the head of {model} cannot be read: its weights are not on"
            " this machine yet, or have other names than usual",
            where="--train-tokens",
            fix="name the tokens, e.g. "
            + " ".join(str(tokenizer.convert_ids_to_tokens(end)) for end in ends)
            + ", or download the model first (hf download NAME)",
        )
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in tokens if token not in vocabulary]:
        raise ConfigError(
            f"the tokenizer has no token {', '.join(map(repr, unknown))}",
            where="--train-tokens",
            fix=(
                "give tokens as the tokenizer writes them, e.g. "
                f"{' '.join(map(str, tokenizer.all_special_tokens[:3]))}, or auto"
            ),
        )
    return sorted({vocabulary[token] for token in tokens})


def _file_of_head(folder: Path) -> Path | None:
    """The safetensors file with the head's weights, or with the embedding that is tied to it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        found = next((folder / files[name] for name in _HEADS if name in files), None)
        return found if found is not None and found.is_file() else None
    path = folder / "model.safetensors"
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        return path if set(_HEADS) & set(file.keys()) else None
