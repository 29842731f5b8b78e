"""Calls read back from what a model writes, in the forms of several families."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tool_templates import TOOL_FAMILIES, tool_tokenizer

from finetune.data.encoding.spans import ChatTemplate
from finetune.data.formats import Message
from finetune.data.tools import Call, protocol_calls
from finetune.inference.answer import Answer, AnswerText, Generation
from finetune.inference.tool_calls import FORMS, CallReader, find_form, shown_tokens

KNOWN = {
    "qwen": "tagged JSON (Qwen, Hermes)",
    "hermes": "tagged JSON (Qwen, Hermes)",
    "qwen-coder": "tagged functions (Qwen3-Coder)",
    "llama3": "bare JSON (Llama 3)",
    "mistral": "list (Mistral)",
    "mistral-named": "named arguments (Mistral)",
}
CALLS = (
    Call("weather", {"city": "Bern", "days": 2, "near": ["Thun", "路"]}, "c00000001"),
    Call("clock", {}, "c00000002"),
)


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_the_form_of_a_template_is_found_by_reading_it_back(name: str):
    form = find_form(ChatTemplate(tool_tokenizer(name)))
    assert (form.name if form else None) == KNOWN.get(name)


def written(name: str, said: str, calls: tuple[Call, ...]) -> list[int]:
    """Tokens that the family's template has for an answer."""
    tokenizer = tool_tokenizer(name)
    clock = {"type": "function", "function": {"name": "clock"}}
    template = ChatTemplate(tokenizer).with_tools((clock,))
    question, answer = Message("user", "q"), Message("assistant", said, calls=calls)
    prompt = template.render([question], generation_prompt=True)
    text = template.render([question, answer])[len(prompt) :]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    while not tokenizer.decode([ids[-1]]).strip():  # a line's end behind the end of a turn
        ids.pop()
    return ids


def generate(name: str, ids: list[int], seed: int = 0) -> tuple[list[str], Answer]:
    """What a generation hands out of tokens that come a few at a time."""
    tokenizer, form = tool_tokenizer(name), find_form(ChatTemplate(tool_tokenizer(name)))
    pieces: list[str] = []
    ends: list[Answer | None] = []

    def on_piece(piece: str, answer: Answer | None, error: Any) -> None:
        assert error is None
        pieces.append(piece)
        ends.append(answer)

    text = AnswerText(tokenizer, (), shown_tokens(form, ChatTemplate(tokenizer)))
    engine, stops = SimpleNamespace(cancel=None), frozenset({ids[-1]})
    generation = Generation(engine, stops, 1, text, on_piece, CallReader(form))
    step = 1 + seed
    for at in range(0, len(ids), step):
        generation.receive(ids[at : at + step], at + step >= len(ids), None)
    return pieces, ends[-1]


@pytest.mark.parametrize("name", KNOWN)
def test_calls_are_read_back_whatever_the_pieces(name: str):
    calls = CALLS[:1] if name == "llama3" else CALLS
    for seed in range(3):
        pieces, answer = generate(name, written(name, "", calls), seed)
        found = [(call.name, call.arguments) for call in answer.calls]
        assert found == [(call.name, call.arguments) for call in calls]
        assert answer.finish_reason == "tool_calls" and answer.text == ""
        assert not "".join(pieces).strip()
        if name == "mistral":  # which writes ids
            assert [call.id for call in answer.calls] == [call.id for call in calls]
        assert all(call.id.isalnum() and len(call.id) == 9 for call in answer.calls)
    if name.startswith("qwen"):  # what is said before a call is text
        pieces, answer = generate(name, written(name, "I look < it up.", CALLS))
        assert answer.text == "I look < it up." and len(answer.calls) == 2
        assert "".join(pieces).rstrip() == answer.text
    said = 'Use {"a": 1} < 2 or [TOOL now.' if name != "llama3" else "So: {}"
    pieces, answer = generate(name, written(name, said, ()))
    assert (answer.text.strip(), answer.calls, answer.finish_reason) == (said, (), "stop")
    assert "".join(pieces) == answer.text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (FORMS[0], '<tool_call>\n{"name": "clock", "arguments": {}}'),  # cut
        (FORMS[0], '<tool_call>\n{"name": "clock", "arguments": []}\n</tool_call>'),
        (FORMS[0], '<tool_call>\n{"arguments": {}}\n</tool_call> and more'),
        (FORMS[1], "<tool_call>\n<function=clock>\n</tool_call>"),
        (FORMS[2], '[TOOL_CALLS] [{"name": 7}]'),
        (FORMS[3], "[TOOL_CALLS]clock{}"),
        (FORMS[4], '{"name": "clock", "parameters": {'),
        (FORMS[4], "{" * 100_000),
        (FORMS[0], '<tool_call>\n{"name": "clock", "arguments": {"a": NaN}}\n</tool_call>'),
        (FORMS[2], '[TOOL_CALLS] [{"name": "clock", "arguments": {"a": [1e999]}}]'),
        (FORMS[4], '{"name": "\\ud83d", "parameters": {}}'),
    ],
)
def test_what_is_no_call_in_the_end_is_text(form: Any, text: str):
    reader = CallReader(form)
    said = "".join(map(reader.add, [*text[:2000], text[2000:]])) + reader.finish()
    assert (said, reader.calls) == (text, [])


def test_half_an_emoji_in_arguments_stays_escaped():
    reader = CallReader(FORMS[0])
    text = '<tool_call>\n{"name": "clock", "arguments": {"a": "\\ud83d"}}\n</tool_call>'
    assert reader.add(text) + reader.finish() == ""
    (sent,) = protocol_calls(reader.calls)
    assert sent["function"] == {"name": "clock", "arguments": '{"a": "\\ud83d"}'}
