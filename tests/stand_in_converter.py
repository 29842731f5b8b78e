"""Writes the GGUF of a Qwen3 or of SmolLM2 (a Llama) with the gguf package's own writer, called as
llama.cpp's convert_hf_to_gguf.py is.

That one is not on PyPI, and refuses tokenizers that it has no name for, as the bundled model's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("f32", "f16", "bf16")}
# Model type -> llama.cpp's architecture, and its name for how the tokenizer splits a text.
MODELS = {
    "qwen3": (gguf.MODEL_ARCH.QWEN3, "qwen2"),
    "llama": (gguf.MODEL_ARCH.LLAMA, "smollm"),
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours, where transformers rotates the halves of a head."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def write(folder: Path, target: Path, outtype: str) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_type = config["model_type"]
    assert model_type in MODELS, f"the stand-in converts {', '.join(MODELS)} only"
    architecture, pre = MODELS[model_type]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if model_type == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_vocab_size(config["vocab_size"])
    known = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in known["added_tokens"]}
    size = config["vocab_size"]
    padding = [f"[PAD{n}]" for n in range(len(tokenizer), size)]
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) + padding
    kinds = [gguf.TokenType.CONTROL if n in special else gguf.TokenType.NORMAL for n in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    merges = known["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names_of = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if model_type == "llama" and ".q_proj." in name:
            tensor = interleaved(tensor, config["num_attention_heads"])
        if model_type == "llama" and ".k_proj." in name:
            tensor = interleaved(tensor, config["num_key_value_heads"])
        kind = TYPES["f32"] if tensor.ndim == 1 else TYPES[outtype]
        data = gguf.quants.quantize(tensor.to(torch.float32).numpy(), kind)
        writer.add_tensor(names_of.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--outfile", type=Path)
    parser.add_argument("--outtype", choices=TYPES)
    given = parser.parse_args()
    write(given.folder, given.outfile, given.outtype)
