"""Sizes of public models by their name on the hub, so that a plan needs neither network nor file.

From each model's public config.json. A test compares the sums with the sizes that their names promise.
"""

from __future__ import annotations

from finetune.planning.shapes import ModelShape, shape_of_config

# name: layers, width, heads, key-value heads, width of the MLP, vocabulary, whether head and embedding are tied
_QWEN3 = {
    "Qwen/Qwen3-0.6B": (28, 1024, 16, 8, 3072, 151936, True),
    "Qwen/Qwen3-1.7B": (28, 2048, 16, 8, 6144, 151936, True),
    "Qwen/Qwen3-4B": (36, 2560, 32, 8, 9728, 151936, True),
    "Qwen/Qwen3-8B": (36, 4096, 32, 8, 12288, 151936, False),
    "Qwen/Qwen3-14B": (40, 5120, 40, 8, 17408, 151936, False),
    "Qwen/Qwen3-32B": (64, 5120, 64, 8, 25600, 151936, False),
}
_QWEN25 = {
    "Qwen/Qwen2.5-0.5B": (24, 896, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": (28, 1536, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B": (36, 2048, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B": (28, 3584, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-14B": (48, 5120, 40, 8, 13824, 152064, False),
    "Qwen/Qwen2.5-32B": (64, 5120, 40, 8, 27648, 152064, False),
    "Qwen/Qwen2.5-72B": (80, 8192, 64, 8, 29568, 152064, False),
}
KNOWN_MODELS = (*_QWEN3, *_QWEN25)


def known_shape(name: str) -> ModelShape | None:
    """The shape of a public model, `-Base` and `-Instruct` included; None for one that is not in the table."""
    plain = name.removesuffix("-Instruct").removesuffix("-Base")
    for model_type, head_dim, table in (("qwen3", 128, _QWEN3), ("qwen2", None, _QWEN25)):
        if plain in table:
            layers, hidden, heads, key_value_heads, intermediate, vocabulary, tied = table[plain]
            config = {
                "model_type": model_type,
                "num_hidden_layers": layers,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "num_key_value_heads": key_value_heads,
                "intermediate_size": intermediate,
                "vocab_size": vocabulary,
                "tie_word_embeddings": tied,
                "head_dim": head_dim or hidden // heads,
            }
            return shape_of_config(config, name)
    return None
