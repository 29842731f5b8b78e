"""What real templates do to earlier answers."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import make_tokenizer, marked, render, talk
from transformers import PreTrainedTokenizerFast

from finetune.data.encoding.spans import ChatTemplate, find_turns
from finetune.data.formats import Conversation, Message
from finetune.data.tools import Call

IM = ("<|im_start|>", "<|im_end|>")
# As Qwen3: the last answer has an empty think block and loses its leading newlines. As Qwen3.5: the
# prompt also opens the block.
LAST_IN_BLOCK = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and loop.index0 > ns.last -%}
{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content.lstrip('\n') + '<|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
OPEN_PROMPT = LAST_IN_BLOCK.replace(
    "{{- '<|im_start|>assistant\n' -}}{%- endif -%}",
    "{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}",
)
NO_END = """
{%- for m in messages -%}{{- '<|' + m.role + '|>\n' + (m.content or '') -}}
{%- for call in m.tool_calls or [] -%}{{- call.function.name + call.function.arguments|tojson -}}{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}
"""
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
# before and after an answer
WHITE_SPACE = [
    ("", ""),
    *((space, end) for space in ("\n", "\n\n", " ", "\t\n") for end in ("", space)),
]
WHITE_SPACE += [("", space) for space in ("\n", "\n\n", " ")]


def shown(template: str, specials: tuple[str, ...], conversation: Conversation) -> list[str]:
    tokenizer = make_tokenizer(template, specials)
    return [
        marked(tokenizer, sample.input_ids, sample.supervised)
        for sample in render(conversation, tokenizer, 4096)
    ]


def test_an_earlier_answer_after_a_prompt_that_serving_never_writes_is_its_own_sample():
    block = "<think>\n«\n</think>\n\n"
    assert shown(OPEN_PROMPT, IM, talk("q1", "a1", "q2", "a2")) == [
        f"<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n{block}a1<|im_end|>»\n",
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        f"<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n{block}a2<|im_end|>»\n",
    ]


def test_a_turn_without_end_is_trained_up_to_the_token_at_which_the_model_stops():
    tokenizer = make_tokenizer(NO_END, ROLES)
    tokenizer.model_stop_tokens = ("<|user|>", "<|tool|>")
    call = Message("assistant", "", calls=(Call("f", {"x": 1}, "c1"),))
    conversation = Conversation(
        (Message("user", "q"), call, Message("tool", "r", call_id="c1"), Message("assistant", "a"))
    )
    (sample,) = render(conversation, tokenizer, 4096)
    assert sample.ends
    assert marked(tokenizer, sample.input_ids, sample.supervised) == (
        '<|user|>\nq<|assistant|>\n«f{"x": 1}<|tool|>»\nr<|assistant|>\n«a<|user|>»'
    )
    (last_call,) = render(Conversation(conversation.messages[:2]), tokenizer, 4096)
    assert marked(tokenizer, last_call.input_ids, last_call.supervised).endswith("<|tool|>»")
    tokenizer.model_stop_tokens = ()
    (sample,) = render(conversation, tokenizer, 4096)
    assert not sample.ends


def test_arguments_of_calls_are_objects_or_json_as_the_template_takes_them():
    template = """
{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}
{%- set name = call.function.name -%}{%- set arguments = call.function.arguments -%}FORM
{%- endfor -%}<|im_end|>\n{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}
"""
    call = Message("assistant", "", calls=(Call("f", {"city": "Zürich", "n": None}, "c1"),))
    for form in ("{{- name + arguments }}", "{{- name }}{{ arguments }}"):
        (text,) = shown(
            template.replace("FORM", form), IM, Conversation((Message("user", "q"), call))
        )
        assert 'f{"city": "Zürich", "n": null}<|im_end|>»' in text
    # A record that writes Python's form itself keeps them as objects.
    form = (
        "{%- for key, value in arguments.items() -%}{{ name }} {{ key }}={{ value }}{%- endfor -%}"
    )
    call = Message("assistant", "", calls=(Call("f", {"x": 1}, "c1"),))
    question = Message("user", "What does {'x': 1} mean?")
    (text,) = shown(template.replace("FORM", form), IM, Conversation((question, call)))
    assert text.endswith("f x=1<|im_end|>»")


def trl_templates() -> list[Path]:
    """The chat templates of the trl package: 40 of real models."""
    files = importlib.metadata.files("trl") or []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".jinja"]
    assert len(found) > 40
    return sorted(path for path in found if not path.stem.endswith("_training"))


def special_tokens(source: str) -> tuple[str, ...]:
    forms = r"<\|[\w]+\|>|<｜[^｜'\"]+｜>|<(?:start|end)_of_turn>|\[/?(?:INST|gMASK)\]|<sop>|<\|?turn\|?>|</s>|<end_of_utterance>"
    return tuple(dict.fromkeys(re.findall(forms, source)))


# which read contents as lists of parts only
PARTS_ONLY = {"idefics3", "smolvlm", "llava_next"}
# GLM-4.5 stops at the next turn's token, which its generation_config.json names
STOPS = {"glm4moe": ("<|user|>", "<|observation|>", "<|endoftext|>")}


@pytest.mark.parametrize("path", trl_templates(), ids=lambda path: path.stem)
def test_templates_of_real_models_train_every_turn_as_it_is_served(path: Path):
    source = path.read_text(encoding="utf-8")
    tokenizer = make_tokenizer(source, special_tokens(source))
    tokenizer.model_stop_tokens = STOPS.get(path.stem, ())
    template = ChatTemplate(tokenizer)
    for (leading, trailing), turns in itertools.product(WHITE_SPACE, (1, 3)):
        messages = []
        for number in range(turns):
            messages.append(Message("user", f"q{number}"))
            messages.append(Message("assistant", f"{leading}Answer {number}.{trailing}"))
        renderings = find_turns(template, messages)
        assert sum(len(rendering.turns) for rendering in renderings) == turns
        for rendering in renderings:
            answers = [n for n, m in enumerate(rendering.messages) if m.role == "assistant"]
            for turn, answer in zip(rendering.turns, answers[-len(rendering.turns) :], strict=True):
                before = rendering.messages[:answer]
                as_served = template.render(before, generation_prompt=True)
                assert (rendering.text[: turn.start] == as_served) == turn.follows_prompt
                trained = rendering.text[turn.start : turn.end]
                assert rendering.messages[answer].content.strip() in trained
                # gpt-oss ends earlier turns with <|end|>, at which it does not stop
                assert turn.ends or (path.stem == "gptoss" and answer != answers[-1])
    marked_path = path.with_name(f"{path.stem}_training.jinja")
    if marked_path.is_file():
        check_against_trl(tokenizer, marked_path, path.stem)


def check_against_trl(tokenizer: PreTrainedTokenizerFast, marked_path: Path, stem: str) -> None:
    """TRL's copies of the templates mark the same contents and ends, and what a prompt writes."""
    conversation = talk("q1", "a1", "q2", "a2", "q3", "a3")
    samples = render(conversation, tokenizer, 4096)
    shown = [marked(tokenizer, sample.input_ids, sample.supervised) for sample in samples]
    ours = trained_texts("".join(shown))
    turns: list[dict[str, Any]] = [
        {"role": turn.role, "content": turn.content} for turn in conversation.messages
    ]
    for turn in turns if stem in PARTS_ONLY else ():
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    source = marked_path.read_text("utf-8")
    trls = make_tokenizer(source, special_tokens(str(tokenizer.chat_template)))
    rendered = trls.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    mask = np.array(rendered["assistant_masks"], dtype=bool)
    theirs = trained_texts(marked(trls, np.array(rendered["input_ids"]), mask))
    if stem == "gptoss":  # it does not stop at the <|end|> of earlier turns
        theirs[:-1] = [text.removesuffix("<|end|>") for text in theirs[:-1]]
    assert len(ours) == len(theirs) == 3
    for own, other in zip(ours, theirs, strict=True):
        assert other.rstrip().endswith(own.strip())


def trained_texts(text: str) -> list[str]:
    """What is between the marks of `marked`."""
    return re.findall("«(.*?)»", text, re.DOTALL)
