"""An Ollama Modelfile with the template of a known family, if the model's chat template writes the
same prompts as the family's.

Ollama's templates are Go's text/template over .Messages. Chat templates that rewrite earlier turns
(think blocks) or belong to no family in `GO_TEMPLATES` get no Modelfile.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence

from finetune.data.encoding.spans import ChatTemplate
from finetune.data.encoding.templates import TEMPLATES
from finetune.data.formats import Message
from finetune.data.report import RecordProblem

TEXTS = (
    "What does a router do?",
    "请用一句话解释单点故障。",
    "Answer: 7 ms, 99.5%",
    "def f(x):\n    return {'a': [x, 1e-3]}",
    "10.0.0.0/8 — “quotes” ₂ 🙂",
    "{% if x %}{{ .Content }}{% endif %}",
    'a\n\n\nb """ 0 \\n \\t $HOME `ls`',
)
MAX_QUESTIONS = 4  # in a compared conversation

# Name in `TEMPLATES` -> the same in Go's language; <BOS> and <EOS> are the tokenizer's. Mistral and
# Gemma have the system text in the first question.
GO_TEMPLATES = {
    "chatml": (
        "{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "tool" }}<|im_start|>tool\n{{ .Content }}<|im_end|>\n'
        "{{ end }}{{ end }}<|im_start|>assistant\n"
    ),
    "qwen": (
        '{{ if ne (index .Messages 0).Role "system" }}<|im_start|>system\nYou are Qwen,'
        " created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n{{ end }}{{"
        " range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "tool" }}<|im_start|>tool\n{{ .Content }}<|im_end|>\n'
        "{{ end }}{{ end }}<|im_start|>assistant\n"
    ),
    "llama3": (
        "<BOS>{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}<|start_header_id|>user<|end_header_id|>\n\n{{ .Content'
        " }}<|eot_id|>"
        '{{ else if eq .Role "assistant"'
        " }}<|start_header_id|>assistant<|end_header_id|>\n\n{{ .Content }}<|eot_id|>"
        '{{ else if eq .Role "system" }}<|start_header_id|>system<|end_header_id|>\n\n{{'
        " .Content }}<|eot_id|>"
        "{{ end }}{{ end }}<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "mistral": (
        "<BOS>{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}[INST] {{ if and (eq $i 1) (eq (index $.Messages'
        ' 0).Role "system") }}'
        "{{ (index $.Messages 0).Content }}\n\n{{ end }}{{ .Content }}[/INST]"
        '{{ else if eq .Role "assistant" }} {{ .Content }}<EOS>'
        "{{ end }}{{ end }}"
    ),
    "gemma": (
        "<BOS>{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}<start_of_turn>user\n{{ if and (eq $i 1) (eq (index'
        ' $.Messages 0).Role "system") }}'
        "{{ (index $.Messages 0).Content }}\n\n{{ end }}{{ .Content }}<end_of_turn>\n"
        '{{ else if eq .Role "assistant" }}<start_of_turn>model\n{{ .Content }}<end_of_turn>\n'
        "{{ end }}{{ end }}<start_of_turn>model\n"
    ),
    "deepseek": (
        "<BOS>{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}<｜User｜>{{ .Content }}'
        '{{ else if eq .Role "assistant" }}<｜Assistant｜>{{ .Content }}<EOS>'
        '{{ else if eq .Role "system" }}{{ .Content }}'
        "{{ end }}{{ end }}<｜Assistant｜>"
    ),
    "phi3": (
        "{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}<|user|>\n{{ .Content }}<|end|>\n'
        '{{ else if eq .Role "assistant" }}<|assistant|>\n{{ .Content }}<|end|>\n'
        '{{ else if eq .Role "system" }}<|system|>\n{{ .Content }}<|end|>\n'
        "{{ end }}{{ end }}<|assistant|>\n"
    ),
    "glm4": (
        "[gMASK]<sop>{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}<|user|>\n{{ .Content }}'
        '{{ else if eq .Role "assistant" }}<|assistant|>\n{{ .Content }}'
        '{{ else if eq .Role "system" }}<|system|>\n{{ .Content }}'
        "{{ end }}{{ end }}<|assistant|>\n"
    ),
    "alpaca": (
        "<BOS>{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}### Instruction:\n{{ .Content }}\n\n'
        '{{ else if eq .Role "assistant" }}### Response:\n{{ .Content }}<EOS>\n\n'
        '{{ else if eq .Role "system" }}{{ .Content }}\n\n'
        "{{ end }}{{ end }}### Response:\n"
    ),
    "vicuna": (
        "<BOS>{{ range $i, $_ := .Messages }}"
        '{{ if eq .Role "user" }}USER: {{ .Content }} '
        '{{ else if eq .Role "assistant" }}ASSISTANT: {{ .Content }}<EOS>'
        '{{ else if eq .Role "system" }}{{ .Content }} '
        "{{ end }}{{ end }}ASSISTANT:"
    ),
}


def write_modelfile(
    template: ChatTemplate,
    *,
    file_name: str,
    begins: bool,
    context_tokens: int | None,
    ends: Sequence[str],
) -> str | None:
    """Return the Modelfile of a GGUF file; None if the chat template is of no family with a Go
    template.

    Args:
        begins: whether the engine itself puts the first token (BOS) before a prompt.
        context_tokens: Ollama's num_ctx; None leaves it to Ollama.
        ends: texts of the tokens that end an answer.
    """
    bos, eos = template.tokenizer.bos_token or "", template.tokenizer.eos_token or ""
    if begins and not writes_first(template, bos):
        return None  # the engine would begin with a token that training has not seen there
    name = next((name for name in GO_TEMPLATES if _is_of_family(template, name)), None)
    if name is None:
        return None
    source = GO_TEMPLATES[name].replace("<BOS>", "" if begins else bos).replace("<EOS>", eos)
    # Ollama takes all between the quotes, knows no escapes, and drops what is not printable.
    for value in (source, *ends):
        if '"""' in value or not re.sub(r"[\t\n\r]", "", value).isprintable():
            return None
    lines = [
        f"# The template was compared with the model's chat template on {len(conversations())}"
        " conversations, of contents without white space around them, without tools and later"
        " system turns: those may differ.",
        f"FROM ./{file_name}",
        f'TEMPLATE """{source}"""',
        *(f'PARAMETER stop """{end}"""' for end in ends),
    ]
    if context_tokens is not None:
        lines.append(f"PARAMETER num_ctx {context_tokens}")
    return "\n".join([*lines, "PARAMETER repeat_penalty 1"]) + "\n"


def writes_first(template: ChatTemplate, first: str) -> bool:
    """Return whether the chat template begins a prompt with this token, as text."""
    prompt = _rendered(template, [Message("user", "a")])
    return prompt is not None and prompt.startswith(first)


def conversations() -> list[list[Message]]:
    """Return conversations of one to four questions, with and without a system turn first, from
    each of the texts on.
    """
    found = []
    counts = range(1, MAX_QUESTIONS + 1)
    for start, count, system in itertools.product(range(len(TEXTS)), counts, ([], ["system"])):
        contents = itertools.cycle(TEXTS[start:] + TEXTS[:start])
        roles = [*system, *["user", "assistant"] * count][:-1]
        found.append([Message(role, next(contents)) for role in roles])
    return found


def _rendered(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    """Return the prompt; None if the template refuses it."""
    try:
        return template.render(messages, generation_prompt=True)
    except RecordProblem:
        return None


def _is_of_family(template: ChatTemplate, name: str) -> bool:
    """Return whether the chat template and the family's write the same for all conversations; it
    may refuse those with a system turn.
    """
    family = copy.copy(template)
    family.source = TEMPLATES[name]
    for messages in conversations():
        expected = _rendered(template, messages)
        if expected is None and messages[0].role == "system":
            continue
        if expected is None or _rendered(family, messages) != expected:
            return False
    return True
