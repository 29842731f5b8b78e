"""Records with pictures, video or sound, and think blocks that are not trained."""

from __future__ import annotations

from typing import Any

import pytest
from chat_models import family, make_tokenizer, marked, talk
from sample_rows import write_rows as write

from finetune.data.encoding.render import Renderer, without_reasoning
from finetune.data.encoding.spans import Rendering, Turn
from finetune.data.formats import Conversation, Message, has_media, without_media
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.errors import DataError

QUESTION, ANSWER = {"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}
PLAIN = {"messages": [QUESTION, ANSWER]}


def asked(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, ANSWER], **more}


TEXT = {"type": "text", "text": "q1"}
SHAREGPT = [{"from": "human", "value": "<video>q1"}, {"from": "gpt", "value": "a1"}]
PROMPT = [{"role": "user", "content": [{"type": "input_audio"}, TEXT]}]
WITH_MEDIA: list[dict[str, Any]] = [
    asked("<image>\nq1", images=["a.png"]),
    asked([{"type": "image_url", "image_url": {"url": "data:"}}, TEXT]),
    {"messages": [{**QUESTION, "image": "a.png"}, ANSWER]},
    {"conversations": SHAREGPT, "video": "a.mp4"},
    {"instruction": "<image>q1", "output": "a1", "image": {"bytes": None, "path": "a.png"}},
    {"prompt": PROMPT, "completion": [ANSWER]},
]
NO_MEDIA: list[dict[str, Any]] = [
    {**PLAIN, "images": [], "audios": "[]", "video": None},
    {**PLAIN, "meta": [{"type": ["string", "null"]}, {"type": {"image": 1}}]},
    asked("What is <image> in HTML?"),
    {**PLAIN, "tools": [{"name": "f", "parameters": {"image": {"type": "string"}}}]},
]


@pytest.mark.parametrize("record", WITH_MEDIA)
def test_media_are_found_and_leave_the_text(record):
    assert has_media(record) and not has_media(without_media(record))
    ((_, _, refused),) = RecordReader().conversations([(1, record)])
    assert "--on-media drop-row leaves such records out" in str(refused)
    ((_, _, found),) = RecordReader(on_media="drop-media").conversations([(1, record)])
    assert isinstance(found, Conversation) and found.had_media
    assert [turn.content for turn in found.messages] == ["q1", "a1"]


def test_what_is_no_media():
    for record in NO_MEDIA:
        assert not has_media(record), record
    record = {**PLAIN, "image": "a.png", "schema": [{"type": ["string", "null"]}, 7]}
    assert without_media(record) == {**PLAIN, "schema": record["schema"]}


def test_records_with_media_are_left_out_or_read_and_counted(tmp_path, prepare):
    path = write(tmp_path / "a.jsonl", [*WITH_MEDIA[:3], PLAIN])
    samples = prepare(path, on_media="drop-row")
    assert samples.record_ids.tolist() == [3] and samples.report.left_out_media == 3
    assert ("left out: images, video or sound", "3") in samples.report.lines()
    read = prepare(path, on_media="drop-media")
    assert (len(read), read.report.without_media, read.report.left_out_media) == (4, 3, 0)
    path = write(tmp_path / "b.jsonl", [*WITH_MEDIA[:3], asked("<image>", images=["a.png"])])
    with pytest.raises(DataError, match="b.jsonl:4: empty question"):
        prepare(path, on_media="drop-media")


def shown(template: str, conversation: Conversation, train_thinking: bool) -> list[str]:
    tokenizer = family(template)
    renderer = Renderer(tokenizer, 4096, train_thinking=train_thinking)
    return [
        marked(tokenizer, sample.input_ids, sample.supervised) for sample in renderer(conversation)
    ]


BESIDE = Conversation((Message("user", "q"), Message("assistant", "a", reasoning="t")))
INSIDE = talk("q1", "<think>\nt1\n</think>\n\na1")


def test_think_blocks_as_context():
    """Also the empty block of an answer without thinking, which would teach not to think."""
    said = talk("q1", "First <think> is a tag, </think> ends it.")
    assert shown("chatml", said, False) == shown("chatml", said, True), "in the middle it stays"
    for conversation, block, answer in (
        (BESIDE, "<think>\nt\n</think>\n\n", "a<|im_end|>"),
        (INSIDE, "<think>\nt1\n</think>\n\n", "a1<|im_end|>"),
        (talk("q1", "a1"), "<think>\n\n</think>\n\n", "a1<|im_end|>"),
    ):
        (trained,), (context,) = (shown("qwen3", conversation, train) for train in (True, False))
        assert trained.rstrip().endswith(f"«{block}{answer}»")
        assert context == trained.replace(f"«{block}", f"{block}«")


def test_reasoning_in_another_form():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}[THINK]{{"
        " m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if"
        " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(template, ("<|im_start|>", "<|im_end|>"))
    renderer = Renderer(tokenizer, 4096, train_thinking=False)
    (sample,) = renderer(BESIDE)
    assert "[THINK]t[/THINK]«a<|im_end|>»" in marked(tokenizer, sample.input_ids, sample.supervised)
    nothing_said = Conversation((Message("user", "q"), Message("assistant", " ", reasoning="t")))
    with pytest.raises(RecordProblem, match="thinking not told from the answer"):
        renderer(nothing_said)


def turn_behind(prompt: str, written: str, content: str, reasoning: str | None = None) -> str:
    messages = (Message("user", "q"), Message("assistant", content, reasoning=reasoning or ""))
    turn = Turn(len(prompt), len(prompt + written), True)
    rendering = Rendering(prompt + written, messages, (turn,))
    (turn,) = without_reasoning(rendering).turns
    return rendering.text[turn.start : turn.end]


def test_a_tag_that_is_quoted_ends_no_block():
    tag, said = "the </think> tag", "say </think>."
    for prompt, written, content, reasoning, left in (
        ("A:", f"<think>{tag}\n</think>\n\na<e>", "a", tag, "a<e>"),
        ("A:<think>\n", f"t\n</think>\n\n{said}<e>", said, "t", f"{said}<e>"),
        ("A:<think>\n", "t\n</think>\n\na<e>", "<think>t</think>a", None, "a<e>"),
    ):
        assert turn_behind(prompt, written, content, reasoning) == left, written
    for prompt, written, content, reasoning in (
        ("A:", "[THINK]T ONE[/THINK]ta<e>", "ta", "t one"),
        ("A:<think>\n", "T </think> two\n</think>\n\na<e>", "a", "t </think> two"),
        ("A:<think>\n", "</think>Say </THINK>.<e>", said, None),
    ):
        with pytest.raises(RecordProblem, match="thinking not told from the answer"):
            turn_behind(prompt, written, content, reasoning)
