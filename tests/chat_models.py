"""Tokenizers made here, and chat templates of real families after their published formats."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.encoding.render import Rendered, Renderer
from finetune.data.formats import Conversation, Message

_TEXTS = (
    "What is a router? A router forwards packets between networks. "
    "Which port does BGP use? BGP uses TCP port 179.",
    "什么是路由器？路由器在网络之间转发数据包。交换机在链路层转发帧。",
    "the answer is 42.\n\nuser assistant system\nbecause\n\n### Response:\n ### Instruction:\n",
)

CHATML = """
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# Qwen3: reasoning stays in turns after the last question only; the last turn gets an empty think
# block if it has none.
QWEN3 = """
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role != 'assistant' -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- else -%}
{%- set content = message.content -%}
{%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' -%}
{%- if not reasoning and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or reasoning) -%}
{{ '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else -%}{{ '<|im_start|>assistant\n' + content }}{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# Llama 3.1: the date stands in a system turn that is always there; contents are trimmed.
LLAMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] | trim -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + strftime_now('%d %b %Y') + '\n\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""

# Mistral 7B v0.3: no generation prompt; the system text stands before the *last* question.
MISTRAL = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set turns = messages -%}{%- endif -%}
{%- for message in turns -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{%- set last = (turns | selectattr('role', 'equalto', 'user') | list)[-1] -%}
{{- '[INST] ' + (system + '\n\n' if system is defined and message == last else '') + message['content'] + '[/INST]' }}
{%- else -%}{{- ' ' + message['content'] + eos_token }}{%- endif -%}
{%- endfor -%}
"""

# Gemma 2: no system role.
GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
{{- message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' }}{%- endif -%}
"""

# DeepSeek-V3: what stands before </think> is always left out.
DEEPSEEK = """
{{- bos_token }}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ message['content'] }}
{%- elif message['role'] == 'user' -%}{{ '<｜User｜>' + message['content'] }}
{%- else -%}{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}
"""

# Phi-3: the end-of-sequence token stands after the last turn, where no generation prompt does.
PHI3 = """
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- else -%}{{ eos_token }}{%- endif -%}
"""

# GLM-4: an answer ends where the next question's token begins, and the last one with nothing.
GLM4 = """
{{- '[gMASK]<sop>' }}
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\n' + message['content'] }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}
"""

SPECIALS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "glm4": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
}
_SOURCES = (CHATML, QWEN3, LLAMA3, MISTRAL, GEMMA, DEEPSEEK, PHI3, GLM4)
TEMPLATES = dict(zip(SPECIALS, _SOURCES, strict=True))


def train_backend(*, trim_offsets: bool = False) -> Tokenizer:
    """A byte-level BPE as of GPT-2 and Qwen; Llama 3's trims spaces off its offsets."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_TEXTS * 2, trainer)
    return backend


def make_tokenizer(
    template: str | None, specials: tuple[str, ...] = (), *, trim_offsets=False, rstrip=False
) -> PreTrainedTokenizerFast:
    """A tokenizer; with `rstrip` its special tokens swallow the white space after them."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_backend(trim_offsets=trim_offsets), bos_token="<s>", eos_token="</s>"
    )
    tokens = [
        AddedToken(token, special=True, normalized=False, rstrip=rstrip) for token in specials
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    return tokenizer


@cache
def family(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model family."""
    return make_tokenizer(
        TEMPLATES[name], SPECIALS[name], trim_offsets=name == "llama3", rstrip=name == "phi3"
    )


def talk(*contents: str, system: str | None = None) -> Conversation:
    """Question, answer, question, answer, ..., after a system text."""
    roles = ("user", "assistant")
    turns = [Message(roles[number % 2], content) for number, content in enumerate(contents)]
    return Conversation(tuple(([] if system is None else [Message("system", system)]) + turns))


def marked(tokenizer: Any, input_ids: np.ndarray, supervised: np.ndarray) -> str:
    """The text of tokens, with « and » around what is trained."""
    text, bounds = "", np.flatnonzero(np.diff(supervised.astype(int), prepend=0, append=0))
    edges = [0, *bounds.tolist(), len(input_ids)]
    for number, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        part = tokenizer.decode(input_ids[start:stop].tolist())
        text += f"«{part}»" if number % 2 else part
    return text


def render(conversation: Conversation, tokenizer: Any, cutoff_len: int) -> list[Rendered]:
    return Renderer(tokenizer, cutoff_len)(conversation)
