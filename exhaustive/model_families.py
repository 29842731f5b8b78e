"""Families of models that people bring: a tiny one of each, and a tokenizer of the shape of its
real one.

Shapes are facts of the published configurations and tokenizers: the kind of vocabulary (bytes as
letters, or pieces with the bytes behind them), the class that tokenizer_config.json names, special
tokens, the chat template's form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chat_models
import torch
from tiny_models import TINY, tiny_config
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tool_templates import TOOL_FAMILIES
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_BYTES = tuple(f"<0x{number:02X}>" for number in range(256))

# Llama 2: the system text stands inside the first question, and every exchange begins anew.
_LLAMA2 = (
    "{%- if messages[0].role == 'system' -%}{%- set turns = messages[1:] -%}{%- set system ="
    " '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}{%- else -%}{%- set turns ="
    " messages -%}{%- set system = '' -%}{%- endif -%}{%- for message in turns -%}{%- if"
    " message.role == 'user' -%}{{ bos_token + '[INST] ' + (system if loop.first else '') +"
    " message.content | trim + ' [/INST]' }}{%- else -%}{{ ' ' + message.content | trim + ' ' +"
    " eos_token }}{%- endif -%}{%- endfor -%}"
)
_PHI4 = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '<|im_sep|>' +"
    " message.content + '<|im_end|>' }}{%- endfor -%}{%- if add_generation_prompt -%}{{"
    " '<|im_start|>assistant<|im_sep|>' }}{%- endif -%}"
)
_GRANITE = (
    "{%- for message in messages -%}{{ '<|start_of_role|>' + message.role + '<|end_of_role|>' +"
    " message.content + '<|end_of_text|>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{"
    " '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif -%}"
)
# OLMo 2: the tokenizer's end is what it begins with, too.
_OLMO = (
    "{{ bos_token }}{%- for message in messages -%}{%- if message.role == 'assistant' -%}{{"
    " '<|assistant|>\\n' + message.content + eos_token }}{{ '' if loop.last else '\\n' }}{%- else"
    " -%}{{ '<|' + message.role + '|>\\n' + message.content + '\\n' }}{%- endif -%}{%- endfor"
    " -%}{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
)
_NANOCHAT = (
    "{{ bos_token }}{%- for message in messages -%}{%- if message.role == 'assistant' -%}{{"
    " '<|assistant_start|>' + message.content + '<|assistant_end|>' }}{%- else -%}{{"
    " '<|user_start|>' + message.content + '<|user_end|>' }}{%- endif -%}{%- endfor -%}{%- if"
    " add_generation_prompt -%}{{ '<|assistant_start|>' }}{%- endif -%}"
)
_JAMBA = (
    "{{ bos_token }}{%- for message in messages -%}"
    "{{ '<|bom|><|' + message.role + '|> ' + message.content + '<|eom|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|bom|><|assistant|>' }}{%- endif -%}"
)
_IM = ("<|im_start|>", "<|im_end|>")
_BOS_CHATML = "{{ bos_token }}" + chat_models.TEMPLATES["chatml"].lstrip()
# name: (template, special tokens)
_FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{
        name: (chat_models.TEMPLATES[name], chat_models.SPECIALS[name])
        for name in chat_models.TEMPLATES
    },
    **{f"tools {name}": form for name, form in TOOL_FAMILIES.items()},
    "llama2": (_LLAMA2, ()),
    "phi4": (_PHI4, ("<|im_start|>", "<|im_sep|>", "<|im_end|>")),
    "granite": (_GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")),
    "olmo": (_OLMO, ()),
    "nanochat": (
        _NANOCHAT,
        ("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    ),
    "jamba": (_JAMBA, ("<|bom|>", "<|eom|>", "<|system|>", "<|user|>", "<|assistant|>")),
    "chatml after bos": (_BOS_CHATML, _IM),
}


@dataclass(frozen=True)
class Family:
    """A row of docs/reference/models.md.

    Attributes:
        name: of the family, as people call it.
        model_type: of its config.json.
        form: its chat template and special tokens, a key of `_FORMS`.
        pieces: how its vocabulary is made: "byte-level" (GPT-2's letters for bytes), or
            "byte-fallback" (pieces with ▁ for a space, and bytes for what they lack) as "llama" (a
            space before the text) or "gemma" (none) has it.
        tokenizer_class: as tokenizer_config.json names it; transformers builds what it knows anew
            from the vocabulary.
        ends: bos, eos and padding token.
        changes: of the tiny configuration.
        whole: changes of the text settings inside a configuration with a vision part; None for a
            text model.
        hybrid: not all of its layers are attention over all earlier tokens.
    """

    name: str
    model_type: str
    form: str
    pieces: str = "byte-level"
    tokenizer_class: str = "PreTrainedTokenizerFast"
    ends: tuple[str | None, str, str | None] = ("<s>", "</s>", None)
    changes: dict[str, Any] = field(default_factory=dict)
    hybrid: bool = False


_QWEN: dict[str, Any] = {
    "tokenizer_class": "Qwen2Tokenizer",
    "ends": (None, "<|im_end|>", "<|endoftext|>"),
}
_LLAMA: dict[str, Any] = {"pieces": "llama", "tokenizer_class": "LlamaTokenizerFast"}
_GEMMA: dict[str, Any] = {
    "pieces": "gemma",
    "tokenizer_class": "GemmaTokenizer",
    "ends": ("<bos>", "<eos>", "<pad>"),
}
_DEEPSEEK: dict[str, Any] = {
    "form": "tools deepseek",
    "tokenizer_class": "LlamaTokenizerFast",
    "ends": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}
_GLM: dict[str, Any] = {"form": "tools glm4", "ends": (None, "<|endoftext|>", "<|endoftext|>")}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}

FAMILIES = (
    Family("Qwen2, Qwen2.5", "qwen2", "tools qwen", **_QWEN),
    Family("Qwen3", "qwen3", "tools qwen", **_QWEN),
    Family("Qwen3 MoE", "qwen3_moe", "tools qwen-coder", **_QWEN),
    Family("Llama 2", "llama", "llama2", **_LLAMA),
    Family(
        "Llama 3",
        "llama",
        "tools llama3",
        ends=("<|begin_of_text|>", "<|eot_id|>", None),
        changes={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "tie_word_embeddings": True,
        },
    ),
    Family("Mistral", "mistral", "tools mistral", **_LLAMA),
    Family("Mixtral", "mixtral", "mistral", **_LLAMA),
    Family("Gemma 2", "gemma2", "gemma", changes={"query_pre_attn_scalar": 8}, **_GEMMA),
    Family("Gemma 3", "gemma3_text", "gemma", changes={"query_pre_attn_scalar": 8}, **_GEMMA),
    Family("Gemma 3 with images", "gemma3", "gemma", **_GEMMA),
    Family(
        "Phi-3",
        "phi3",
        "phi3",
        ends=("<s>", "<|endoftext|>", "<|endoftext|>"),
        pieces="llama",
        tokenizer_class="LlamaTokenizerFast",
    ),  # fmt: skip
    Family(
        "Phi-4",
        "phi3",
        "phi4",
        tokenizer_class="GPT2TokenizerFast",
        ends=("<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
    ),  # fmt: skip
    Family("GLM-4 9B", "glm", **_GLM),
    Family("GLM-4 0414", "glm4", **_GLM),
    Family("GLM-4.5", "glm4_moe", **_GLM),
    Family("DeepSeek-V2", "deepseek_v2", **_DEEPSEEK),
    Family("DeepSeek-V3", "deepseek_v3", **_DEEPSEEK),
    Family("InternLM 3", "internlm3", "chatml after bos", **_LLAMA),
    Family("MiniCPM 3", "minicpm3", "chatml", **_LLAMA),
    Family(
        "gpt-oss",
        "gpt_oss",
        "tools gpt-oss",
        ends=("<|startoftext|>", "<|return|>", "<|endoftext|>"),
        changes={"layer_types": ["sliding_attention", "full_attention"]},
    ),
    Family(
        "Granite 3",
        "granite",
        "granite",
        tokenizer_class="GPT2Tokenizer",
        ends=("<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>"),
    ),  # fmt: skip
    Family(
        "Granite 3 MoE",
        "granitemoe",
        "granite",
        tokenizer_class="GPT2Tokenizer",
        ends=("<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>"),
    ),  # fmt: skip
    Family(
        "OLMo 2",
        "olmo2",
        "olmo",
        tokenizer_class="GPT2Tokenizer",
        ends=("<|endoftext|>", "<|endoftext|>", "<|pad|>"),
    ),  # fmt: skip
    Family("SmolLM 3", "smollm3", "tools hermes", ends=(None, "<|im_end|>", "<|im_end|>")),
    Family("NanoChat", "nanochat", "nanochat", ends=("<|bos|>", "<|assistant_end|>", None)),
    Family("Qwen3-Next", "qwen3_next", "tools qwen", changes=_LINEAR, hybrid=True, **_QWEN),
    Family("Qwen3.5", "qwen3_5", "tools qwen-coder", changes=_LINEAR, hybrid=True, **_QWEN),
    Family(
        "Jamba",
        "jamba",
        "jamba",
        changes={
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_dt_rank": 4,
        },
        hybrid=True,
        pieces="llama",
        tokenizer_class="LlamaTokenizerFast",
    ),  # fmt: skip
    Family("Falcon-H1", "falcon_h1", "chatml", changes={**_MAMBA, "mamba_d_ssm": 64}, hybrid=True),
    Family(
        "Granite 4 hybrid",
        "granitemoehybrid",
        "granite",
        changes={**_MAMBA, "layer_types": ["mamba", "attention"]},
        hybrid=True,
        ends=("<|end_of_text|>", "<|end_of_text|>", "<|pad|>"),
    ),  # fmt: skip
    Family(
        "LFM2",
        "lfm2",
        "chatml after bos",
        changes={"layer_types": ["conv", "full_attention"]},
        ends=("<|startoftext|>", "<|im_end|>", "<|pad|>"),
    ),  # fmt: skip
)
# What transformers has no code for: it comes with the model, and nothing here runs it.
REMOTE_CODE = (
    "InternLM 2 and 2.5",
    "MiniCPM 1, 2 and 4",
    "DeepSeek-V2 and Phi-3 as far as a folder names its own code",
)


# ---------------------------------------------------------------- tokenizers


def _sentences() -> list[str]:
    return [
        *chat_models._TEXTS,
        "router switch port frame packet BGP VLAN 路由 交换 端口 42 link node",
    ] * 3


def _pieces_backend(kind: str, first: list[str]) -> Tokenizer:
    """BPE over pieces with ▁ for a space, and all bytes for what has no piece: SentencePiece's
    form, as converted.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="always" if kind == "llama" else "never"
    )
    trained.train_from_iterator(
        _sentences(), trainers.BpeTrainer(vocab_size=200, show_progress=False)
    )
    found = json.loads(trained.to_str())["model"]
    vocabulary = {token: number for number, token in enumerate([*first, *_BYTES])}
    for token in sorted(found["vocab"], key=found["vocab"].get):
        vocabulary.setdefault(token, len(vocabulary))
    merges = [tuple(merge) for merge in found["merges"]]
    backend = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    ends = [decoders.Strip(" ", 1, 0)] if kind == "llama" else []
    if kind == "llama":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend


def _bytes_backend() -> Tokenizer:
    """Byte-level BPE with a pattern of its own in front, as all of them since GPT-4's."""
    backend = chat_models.train_backend()
    pattern = (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def make_tokenizer(family: Family, folder: Path) -> PreTrainedTokenizerFast:
    """The family's tokenizer, saved to a folder as the real one lies there."""
    template, specials = _FORMS[family.form]
    ends = dict(zip(("bos_token", "eos_token", "pad_token"), family.ends, strict=True))
    named = [token for token in family.ends if token is not None]
    if family.pieces == "byte-level":
        backend = _bytes_backend()
    else:
        backend = _pieces_backend(family.pieces, ["<unk>", *dict.fromkeys(named)])
        ends["unk_token"] = "<unk>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{name: token for name, token in ends.items() if token is not None},
    )
    rstrip = family.form == "phi3"
    tokens = [
        AddedToken(token, special=True, normalized=False, rstrip=rstrip)
        for token in dict.fromkeys(specials)
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(
        json.dumps(settings | {"tokenizer_class": family.tokenizer_class}), encoding="utf-8"
    )
    return tokenizer


# ---------------------------------------------------------------- models


def make_config(family: Family, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Two layers, 32 wide, with more embeddings than the tokenizer has ids, as most have."""
    sizes: dict[str, Any] = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config_class = (
        CONFIG_MAPPING[family.model_type]
        if family.model_type not in ("gemma3", "qwen3_5")
        else None
    )
    if config_class is not None:
        default = config_class()
        known = {
            name: value
            for name, value in sizes.items()
            if hasattr(default, name) or "token_id" in name
        }
        return tiny_config(family.model_type, **known | family.changes)
    return _with_images(family, sizes)


def _with_images(family: Family, sizes: dict[str, Any]) -> PretrainedConfig:
    text = {
        name: TINY[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    }
    text |= {"num_key_value_heads": 2, **sizes, **family.changes}
    if family.model_type == "gemma3":
        from transformers import Gemma3Config

        vision = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
        }
        return Gemma3Config(
            text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}
        )
    from transformers import Qwen3_5Config

    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 32,
    }
    return Qwen3_5Config(text_config=text, vision_config=vision)


def make_family(family: Family, folder: Path) -> PretrainedConfig:
    """A model folder of the family: random weights, configuration, tokenizer."""
    import transformers

    tokenizer = make_tokenizer(family, folder)
    config = make_config(family, tokenizer)
    torch.manual_seed(0)
    whole = {
        "gemma3": "Gemma3ForConditionalGeneration",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
    }
    made = whole.get(family.model_type)
    model = (
        getattr(transformers, made)(config) if made else AutoModelForCausalLM.from_config(config)
    )
    model.save_pretrained(folder)
    return config
