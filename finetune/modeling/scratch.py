"""Models from scratch: depth -> a transformers configuration, and weights that are a pure function
of (seed, name).

Shapes and initialization follow nanochat (karpathy/nanochat, gpt.py and base_train.py). The only
setting is the depth: the width is 64 x depth, with heads of 128. Embeddings are normal with 0.8,
the head is near zero, and projections are uniform. Outputs of attention and MLP start at zero, so
that every block starts as the identity. Llama, Qwen3 and LFM2 are initialized in the same way,
because the learning rates depend on it. Scales of queries and keys start at nanochat's factor of
1.2. LFM2's MLP does not have nanochat's 0.4 on its inputs. That factor helps nanochat's own model
at depth 4 and costs `lfm2_value` a little there (docs/evidence/pretraining_parts.md).

transformers' NanoChat has three traps, each with a test:

- Its default `pad_token_id=1` makes token 1 a `padding_idx` that never trains.
- Its own initialization is normal with 0.02.
- Its MLP is `fc1`, `fc2`, which LoRA target lists for Llama do not contain.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    LlamaConfig,
    NanoChatConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.activations import ReLUSquaredActivation

from finetune.modeling.lfm2_value import Lfm2ValueConfig, register

ASPECT = 64  # width per layer
HEAD_DIM = 128
VOCABULARY_MULTIPLE = 64  # of the head's width, for tensor cores
EMBEDDING_STD = 0.8
HEAD_STD = 0.001
MLP_INPUT_FACTOR = 0.4
ROPE_THETA = 100_000.0
QUERY_KEY_SCALE = 1.2
CONVOLUTION_TAPS = 4
# The last two are LFM2's: those of its convolution and attention, and of its MLP.
RESIDUAL_OUTPUTS = (
    "o_proj.weight",
    "fc2.weight",
    "down_proj.weight",
    "out_proj.weight",
    "w2.weight",
)
GATES = ("value_gate",)
MLP_INPUTS = ("fc1.weight", "gate_proj.weight", "up_proj.weight")
QUERY_KEY_NORMS = ("q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")


def width_and_heads(depth: int) -> tuple[int, int]:
    """Return the hidden size and the number of heads for a depth.

    The hidden size is 64 x depth, rounded up to whole heads of 128. Below depth 3 there are two
    smaller heads.
    """
    width = ASPECT * depth
    if width <= HEAD_DIM:
        return width, 2
    heads = math.ceil(width / HEAD_DIM)
    return heads * HEAD_DIM, heads


def scratch_config(
    arch: str,
    depth: int,
    *,
    vocab_size: int,
    max_seq_len: int,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> PretrainedConfig:
    """Return the transformers configuration of an architecture at a depth.

    Args:
        arch: nanochat, qwen3, llama, lfm2 (every second layer attends; the others have a short
            convolution), or lfm2_value (lfm2 with value embeddings in layers that attend).
        vocab_size: ids of the tokenizer; the model gets as many, rounded up to a multiple of 64.

    Raises:
        ValueError: another architecture.
    """
    width, heads = width_and_heads(depth)
    common: dict[str, Any] = {
        "vocab_size": math.ceil(vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": max_seq_len,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        # Never the tokenizer's pad token: its embedding would not train. Windows have no padding.
        "pad_token_id": None,
    }
    if arch == "nanochat":
        return NanoChatConfig(intermediate_size=4 * width, **common)
    # As many parameters as nanochat's two matrices of 4 x width, in a gated MLP's three.
    common["intermediate_size"] = math.ceil(8 * width / 3 / 64) * 64
    if arch == "qwen3":
        return Qwen3Config(head_dim=width // heads, **common)
    if arch == "llama":
        return LlamaConfig(head_dim=width // heads, **common)
    if arch in ("lfm2", "lfm2_value"):
        # The last layer attends, so that every depth has attention.
        kinds = ["full_attention" if (depth - layer) % 2 else "conv" for layer in range(depth)]
        own = {"norm_eps": common.pop("rms_norm_eps"), "block_auto_adjust_ff_dim": False}
        register()
        kind = Lfm2Config if arch == "lfm2" else Lfm2ValueConfig
        return kind(
            layer_types=kinds,
            conv_L_cache=CONVOLUTION_TAPS,
            **own,
            **common,
        )
    raise ValueError(
        f"unknown architecture {arch!r}: nanochat, qwen3, llama, lfm2 and lfm2_value are known"
    )


def make_model(config: PretrainedConfig, *, seed: int, attention: str = "sdpa") -> PreTrainedModel:
    """Make the model of a configuration in float32 on the CPU, with a start that is a pure function
    of (seed, parameter name).
    """
    with torch.random.fork_rng(devices=[]):  # the start that transformers draws is replaced
        model = make_unstarted_model(config, attention)
    initialize(model, seed)
    return model


def make_unstarted_model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Make the model in float32 on torch's default device, with transformers' own start."""
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if isinstance(module, ReLUSquaredActivation):
                setattr(parent, name, SquaredReLU())
    return model


class SquaredReLU(nn.Module):
    """relu(x)^2 in the dtype of x, bit-identical to transformers' without autocast.

    transformers squares with torch.square, a power, which CUDA's autocast computes in float32 and
    keeps in float32 for the backward pass. An H100 held 9 GiB more for 12 layers of hidden size 768
    and 65,536 tokens (not compiled).
    """

    def forward(self, x: Tensor) -> Tensor:
        positive = nn.functional.relu(x)
        return positive * positive


def make_empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """Make the model without weights (on torch's meta device), to inspect its parameters."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def initialize(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter again; the same values on every machine, in any order of parameters."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        generator = parameter_generator(seed, name)
        if parameter is embedding or parameter is head:
            # In float64: torch's float32 normals use vector instructions whose last bit depends on
            # the CPU.
            values = torch.empty(parameter.shape, dtype=torch.float64)
            std = EMBEDDING_STD if parameter is embedding else HEAD_STD
            parameter.copy_(values.normal_(0.0, std, generator=generator).float())
        elif parameter.ndim < 2:
            # Scales of norms; these architectures have no biases.
            parameter.fill_(QUERY_KEY_SCALE if name.endswith(QUERY_KEY_NORMS) else 1.0)
        elif name.endswith(RESIDUAL_OUTPUTS + GATES):
            parameter.zero_()
        else:
            # Uniform with standard deviation 1 / sqrt(inputs): the bound is sqrt(3) times that.
            bound = math.sqrt(3 / parameter[0].numel())
            if name.endswith(MLP_INPUTS):
                bound *= MLP_INPUT_FACTOR
            values = torch.empty(parameter.shape)
            parameter.copy_(values.uniform_(-bound, bound, generator=generator))


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator on the CPU, seeded by (seed, parameter name)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
