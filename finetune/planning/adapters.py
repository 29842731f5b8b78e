"""What an adapter trains beside the base, counted by the names that peft matches (0.21)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from finetune.config.adapter_config import EMBEDDINGS, HEADS
from finetune.config.run_config import RunConfig
from finetune.planning.shapes import ModelShape

# Of `--train-tokens auto`, which only the tokenizer and the weights tell: a template ends answers
# with one or two.
_AUTO_TOKENS = 2


def adapter_numbers(config: RunConfig, shape: ModelShape, adapted: frozenset[str]) -> int:
    """Numbers that are trained beside the base.

    Args:
        adapted: names of the linear layers that get an adapter.
    """
    numbers = copied_numbers(config.modules_to_save, shape) + token_numbers(config, shape)
    ranks = config.rank_pattern or {}
    for matrix in shape.named:
        head = matrix.name in HEADS
        if (
            not (matrix.linear or head)
            or matrix.name not in adapted
            or not _gets_lora(matrix.path, config)
        ):
            continue
        # As peft's get_pattern_key and check_target_module_exists.
        rank = next(
            (ranks[key] for key in ranks if re.match(rf"(.*\.)?({key})$", matrix.path)),
            config.lora_r,
        )
        numbers += rank * (matrix.inputs + matrix.outputs) + (
            matrix.outputs if config.use_dora else 0
        )
    return numbers


def _gets_lora(path: str, config: RunConfig) -> bool:
    if any(
        re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", path) for name in config.modules_to_save
    ):
        return False
    layer = re.search(r"\.(\d+)\.", path)
    layers = config.layers_to_transform
    return layers is None or (layer is not None and int(layer[1]) in layers)


def token_numbers(config: RunConfig, shape: ModelShape) -> int:
    """Numbers of the rows of embedding and head that `--train-tokens` trains; a tied head has the
    embedding's.
    """
    names = set(config.train_tokens)
    tokens = _AUTO_TOKENS if names == {"auto"} else len(names)
    widths = [matrix.inputs for matrix in shape.named if matrix.name in EMBEDDINGS | HEADS]
    return tokens * (max(widths, default=shape.hidden) if shape.tied else sum(widths))


def copied_numbers(names: Sequence[str], shape: ModelShape) -> int:
    """Numbers of the modules that are trained whole, as copies: those whose path ends with one of
    the names.
    """
    if not names:
        return 0

    def copied(path: str) -> bool:
        parts = path.split(".")
        return any(
            ".".join(parts[:count]).endswith(tuple(names)) for count in range(1, len(parts) + 1)
        )

    whole = [matrix for matrix in shape.named if copied(matrix.path)]
    ends = sum(matrix.name in EMBEDDINGS | HEADS for matrix in whole)
    twice = shape.embedding if shape.tied and ends == 2 else 0
    return (
        sum(matrix.numbers for matrix in whole)
        - twice
        + sum(n for path, n in shape.vectors if copied(path))
    )
