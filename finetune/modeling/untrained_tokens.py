"""Chat tokens that a base model was never trained on: the head's vectors of such tokens stay alike.

A base model pretrained on plain text has ids for chat tokens, but every id that its data lacks gets
the same gradient: their vectors move together. LoRA on the layers below leaves the head as it is,
and the tuned model ends its answers with any of them.
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
MAX_COMPARED = 256
_HEADS = (
    "lm_head.weight",
    "embed_out.weight",
    "model.embed_tokens.weight",
    "transformer.wte.weight",
)


def untrained_tokens(
    model: str, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]
) -> list[str] | None:
    """Return the tokens of `ids` whose vector in the model's head nearly equals that of another
    special token.

    Only those vectors are read. Returns None if they cannot be read: the weights of a model on the
    hub are not in the cache yet, or the head has an unusual name.
    """
    folder = folder_of(model)
    path = None if folder is None else _file_of_head(folder)
    if path is None:
        return None
    with safe_open(path, framework="pt") as file:
        name = next(name for name in _HEADS if name in file.keys())  # noqa: SIM118 - not a dict
        head = file.get_slice(name)
        size = head.get_shape()[0]
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        special.update(range(len(tokenizer), size))
        compared = sorted(number for number in special if number < size)[:MAX_COMPARED]
        if not compared:
            return []
        vectors = torch.cat([head[number : number + 1] for number in compared]).float()
        norms = vectors.norm(dim=1)
        found = []
        for token in ids:
            vector = head[token : token + 1].float()
            larger = torch.maximum(norms, vector.norm())
            bounds = ALIKE * larger.clamp_min(torch.finfo(torch.float32).tiny)
            alike = (vectors - vector).norm(dim=1) <= bounds
            if (alike & (torch.tensor(compared) != token)).any():
                found.append(str(tokenizer.convert_ids_to_tokens(token)))
    return found


def trained_token_ids(
    model: str, tokenizer: PreTrainedTokenizerBase, requested: Sequence[str], ends: Sequence[int]
) -> list[int]:
    """Return the sorted token ids for `--train-tokens`; `auto` selects the never trained ones among
    `ends`.

    Raises:
        ConfigError: the tokenizer does not have a token; or auto, and the model's head cannot be
            read.
    """
    tokens: Sequence[str] | None = requested
    if tuple(requested) == ("auto",):
        tokens = untrained_tokens(model, tokenizer, ends)
    if tokens is None:
        names = " ".join(map(str, tokenizer.convert_ids_to_tokens(list(ends))))
        raise ConfigError(
            f"train_tokens is auto, and the head of {model} cannot be read: its weights are not on"
            " this machine yet, or have other names than usual",
            where="--train-tokens",
            fix=f"name the tokens, e.g. {names}, or download the model first (hf download NAME)",
        )
    vocabulary = tokenizer.get_vocab()
    unknown = [token for token in tokens if token not in vocabulary]
    if unknown:
        examples = " ".join(map(str, tokenizer.all_special_tokens[:3]))
        raise ConfigError(
            f"the tokenizer has no token {', '.join(map(repr, unknown))}",
            where="--train-tokens",
            fix=f"give tokens as the tokenizer writes them, e.g. {examples}, or auto",
        )
    return sorted({vocabulary[token] for token in tokens})


def _file_of_head(folder: Path) -> Path | None:
    """Return the safetensors file with the head's weights, or with the embedding tied to it."""
    path = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = [name for name in _HEADS if name in files]
        if not names:
            return None
        path = folder / files[names[0]]
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        return path if set(_HEADS) & set(file.keys()) else None
