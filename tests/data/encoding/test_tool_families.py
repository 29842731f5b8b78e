"""What is trained of calls, by family: masks by hand, and the same bytes as when served."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from chat_models import SPECIALS, make_tokenizer, marked, render
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_templates import ONE_CALL_A_TURN, TOOL_FAMILIES, tool_tokenizer

from finetune.data.encoding.render import Renderer
from finetune.data.encoding.spans import ChatTemplate, find_turns
from finetune.data.encoding.templates import TEMPLATES
from finetune.data.formats import Conversation, detect_format, to_conversation
from finetune.data.report import RecordProblem
from finetune.inference.generation import Generator

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}
TOOL = json.dumps(WEATHER)
CALLED = {"name": "weather", "arguments": '{"city": "Bern"}'}
CALL = {"id": "c12345678", "type": "function", "function": CALLED}
RECORD: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c12345678", "content": "sun"},
        {"role": "assistant", "content": "sunny"},
    ],
    "tools": [WEATHER],
}
_IM_HEAD = f"<|im_start|>system\nFunctions:\n<tools>\n{TOOL}\n</tools><|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
_IM_TAIL = "<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\n«sunny<|im_end|>»\n"
EXPECTED = {
    "qwen": _IM_HEAD
    + '<|im_start|>assistant\n«<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>»\n'
    + _IM_TAIL,
    "gpt-oss": (
        "<|start|>developer<|message|># Tools\n\nnamespace functions {\ntype weather = (_: "
        '{"city": "string"}) => any;\n}<|end|><|start|>user<|message|>q<|end|><|start|>assistant'
        '« to=functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>»'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sun"<|end|>'
        "<|start|>assistant«<|channel|>final<|message|>sunny<|return|>»"
    ),
}


def conversation(record: dict[str, Any]) -> Conversation:
    return to_conversation(record, detect_format(record))


def test_calls_and_answers_are_trained_and_results_are_not():
    for name in EXPECTED:
        tokenizer = tool_tokenizer(name)
        (sample,) = render(conversation(RECORD), tokenizer, 4096)
        assert marked(tokenizer, sample.input_ids, sample.supervised) == EXPECTED[name]
        assert sample.ends and sample.follows_prompt


def test_a_template_that_writes_no_tools_refuses_the_record():
    tokenizer = make_tokenizer(TEMPLATES["chatml"], SPECIALS["chatml"])
    without_results = {**RECORD, "messages": RECORD["messages"][:2]}
    with pytest.raises(RecordProblem, match="tools left out by the chat template"):
        render(conversation(without_results), tokenizer, 4096)
    with pytest.raises(RecordProblem, match="calls left out by the chat template: .*turn 2"):
        render(conversation({**without_results, "tools": None}), tokenizer, 4096)


# ---------------------------------------------------------------- training and serving

words = st.text(st.sampled_from('ab 9_"\\\n{}<>é路'), min_size=1, max_size=8).filter(
    lambda text: text.strip()
)
values = st.one_of(words, st.integers(-9, 9), st.booleans(), st.none(), st.lists(words, max_size=2))
arguments = st.dictionaries(st.sampled_from(("city", "days", "unit")), values, max_size=3)
names = st.sampled_from(("weather", "clock"))
functions = st.builds(lambda name, given: {"name": name, "arguments": given}, names, arguments)


@st.composite
def records(draw: st.DrawFn, calls_a_turn: int) -> dict[str, Any]:
    """Questions, each answered after some turns of calls with their results."""
    turns: list[dict[str, Any]] = []
    ids = (f"c{number:08d}" for number in itertools.count())
    for _ in range(draw(st.integers(1, 2))):
        turns.append({"role": "user", "content": draw(words)})
        for _ in range(draw(st.integers(0, 2))):
            called = draw(st.lists(functions, min_size=1, max_size=calls_a_turn))
            calls = [{"id": next(ids), "type": "function", "function": one} for one in called]
            turns.append({"role": "assistant", "content": None, "tool_calls": calls})
            for call in calls:
                turns.append({"role": "tool", "tool_call_id": call["id"], "content": draw(words)})
        turns.append({"role": "assistant", "content": draw(words)})
    clock = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    return {"messages": turns, "tools": [WEATHER, clock]}


class Served:
    """The generator's way from messages to a prompt, without a model."""

    render = Generator.render
    call_form = object()

    def __init__(self, name: str) -> None:
        self._template = ChatTemplate(tool_tokenizer(name))


@pytest.mark.parametrize("name", TOOL_FAMILIES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_what_is_trained_before_an_answer_is_what_serving_renders_for_its_history(
    name: str, data: st.DataObject
):
    record = data.draw(records(1 if name in ONE_CALL_A_TURN else 2))
    found = conversation(record)
    served, renderer = Served(name), Renderer(tool_tokenizer(name), 1 << 20)
    renderings = find_turns(renderer.template.with_tools(found.tools), found.messages)
    answers = [
        place for place, turn in enumerate(record["messages"]) if turn["role"] == "assistant"
    ]
    turns = [(rendering.text, turn) for rendering in renderings for turn in rendering.turns]
    assert len(turns) == len(answers)
    for place, (text, turn) in zip(answers, turns, strict=True):
        if turn.follows_prompt:
            assert text[: turn.start] == served.render(
                as_a_client(record["messages"][:place]), record["tools"]
            )
    assert turns[-1][1].follows_prompt


def as_a_client(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a client sends a history: arguments as a string, nothing but a string as content."""
    sent = json.loads(json.dumps(turns))
    for turn in sent:
        turn["content"] = turn["content"] or ""
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent
