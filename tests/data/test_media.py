"""Records with pictures, video or sound, and think blocks that are not trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_models import family, make_tokenizer, marked, talk

from finetune.data.dataset import prepare_samples
from finetune.data.encoding.render import Renderer, without_reasoning
from finetune.data.encoding.spans import Rendering, Turn
from finetune.data.formats import Conversation, Message, has_media, without_media
from finetune.data.report import RecordProblem
from finetune.data.samples import Samples
from finetune.errors import DataError

QUESTION, ANSWER = {"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}
PLAIN = {"messages": [QUESTION, ANSWER]}
WITH_MEDIA: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "<image>\nq1"}, ANSWER], "images": ["a.png"]},
    {"messages": [{"role": "user", "content": "q1"}, ANSWER], "audios": ["a.wav"], "videos": []},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}},
                                               {"type": "text", "text": "q1"}]}, ANSWER]},
    {"messages": [{"role": "user", "content": "q1", "image": "a.png"}, ANSWER]},
    {"conversations": [{"from": "human", "value": "<video>q1"}, {"from": "gpt", "value": "a1"}], "video": "a.mp4"},
    {"instruction": "<image>q1", "output": "a1", "image": "a.png"},
    {"instruction": "<image>q1", "output": "a1", "image": {"bytes": None, "path": "a.png"}, "audios": [None]},
    {"instruction": "q1", "output": "a1", "image": [[0, 0], [0, 0]]},
    {"prompt": [{"role": "user", "content": [{"type": "input_audio"}, {"type": "text", "text": "q1"}]}],
     "completion": [ANSWER]},
]  # fmt: skip
NO_MEDIA: list[dict[str, Any]] = [
    PLAIN,
    {**PLAIN, "images": [], "audios": "[]", "video": None},
    {
        **PLAIN,
        "image": {"bytes": None, "path": None},
        "images": [None],
        "audios": [{"bytes": b"", "path": ""}],
    },
    {**PLAIN, "meta": [{"type": ["string", "null"]}, {"type": {"image": 1}}]},
    {"messages": [{"role": "user", "content": "What is <image> in HTML?"}, ANSWER]},
    {
        **PLAIN,
        "tools": [{"name": "draw", "parameters": {"properties": {"image": {"type": "string"}}}}],
    },
]


def prepared(tmp_path: Path, records: list[dict[str, Any]], **options: Any) -> Samples:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return prepare_samples(
        [path],
        family("chatml"),
        cutoff_len=256,
        cache_dir=tmp_path / "cache",
        num_proc=1,
        **options,
    )


@pytest.mark.parametrize("record", WITH_MEDIA)
def test_media_are_found_and_leave_the_text(tmp_path: Path, record: dict[str, Any]) -> None:
    assert has_media(record)
    assert not has_media(without_media(record))
    with pytest.raises(
        DataError, match=r"rows.jsonl:1.*--on-media drop-row leaves such records out"
    ):
        prepared(tmp_path, [record])
    samples, plain = (
        prepared(tmp_path, [record], on_media="drop-media"),
        prepared(tmp_path, [PLAIN]),
    )
    assert (
        samples[0][0].tolist() == plain[0][0].tolist()
        and samples[0][1].tolist() == plain[0][1].tolist()
    )
    assert samples.report.without_media == 1 and samples.report.left_out_media == 0


@pytest.mark.parametrize("record", NO_MEDIA)
def test_what_is_no_media(record: dict[str, Any]) -> None:
    assert not has_media(record)


def test_types_that_are_no_text_are_left_alone() -> None:
    record = {**PLAIN, "image": "a.png", "schema": [{"type": ["string", "null"]}, {"type": {}}]}
    assert without_media(record) == {**PLAIN, "schema": record["schema"]}


def test_records_with_media_are_left_out_and_counted(tmp_path: Path) -> None:
    records = WITH_MEDIA[:4]
    samples = prepared(tmp_path, [*records, PLAIN], on_media="drop-row")
    assert len(samples) == 1 and samples.record_ids.tolist() == [4]
    assert ("left out: images, video or sound", "4") in samples.report.lines()
    with pytest.raises(DataError, match=r"no record is left .*4 with images"):
        prepared(tmp_path, records, on_media="drop-row")


def test_a_question_that_was_only_a_picture_is_still_wrong(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "<image>"}, ANSWER], "images": ["a.png"]}
    with pytest.raises(DataError, match="empty question"):
        prepared(tmp_path, [record], on_media="drop-media")


def shown(template: str, conversation: Conversation, train_thinking: bool) -> list[str]:
    tokenizer = family(template)
    renderer = Renderer(tokenizer, 4096, train_thinking=train_thinking)
    return [
        marked(tokenizer, sample.input_ids, sample.supervised) for sample in renderer(conversation)
    ]


BESIDE = Conversation((Message("user", "q"), Message("assistant", "a", reasoning="t")))
INSIDE = talk("q1", "<think>\nt1\n</think>\n\na1")


@pytest.mark.parametrize(
    ("conversation", "trained", "context"),
    [
        (BESIDE, "«<think>\nt\n</think>\n\na<|im_end|>»", "<think>\nt\n</think>\n\n«a<|im_end|>»"),
        (
            INSIDE,
            "«<think>\nt1\n</think>\n\na1<|im_end|>»",
            "<think>\nt1\n</think>\n\n«a1<|im_end|>»",
        ),
        # The empty block of an answer without thinking would teach not to think.
        (
            talk("q1", "a1"),
            "«<think>\n\n</think>\n\na1<|im_end|>»",
            "<think>\n\n</think>\n\n«a1<|im_end|>»",
        ),
    ],
)
def test_think_blocks_as_context(conversation: Conversation, trained: str, context: str) -> None:
    (with_thinking,), (without,) = (shown("qwen3", conversation, train) for train in (True, False))
    assert with_thinking.rstrip().endswith(trained) and without.rstrip().endswith(context)
    assert with_thinking.translate({171: None, 187: None}) == without.translate(
        {171: None, 187: None}
    )


def test_a_block_in_the_middle_of_an_answer_stays_trained() -> None:
    said = talk("q1", "First <think> is a tag, </think> ends it.")
    assert shown("chatml", said, False) == shown("chatml", said, True)


def test_reasoning_in_another_form() -> None:
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
    messages = (Message("user", "q"), Message("assistant", content, reasoning=reasoning))
    rendering = Rendering(
        prompt + written, messages, (Turn(len(prompt), len(prompt + written), True),)
    )
    (turn,) = without_reasoning(rendering).turns
    return rendering.text[turn.start : turn.end]


@pytest.mark.parametrize(
    ("prompt", "written", "content", "reasoning", "left"),
    [
        ("A:", "<think>the </think> tag\n</think>\n\na<e>", "a", "the </think> tag", "a<e>"),
        ("A:<think>\n", "the </think> tag\n</think>\n\na<e>", "a", "the </think> tag", "a<e>"),
        (
            "A:<think>\n",
            "t\n</think>\n\nsay </think>.<e>",
            "say </think>.",
            "t",
            "say </think>.<e>",
        ),
        (
            "A:<think>\n",
            "\n</think>\n\nsay </think>.<e>",
            "say </think>.",
            None,
            "say </think>.<e>",
        ),
        ("A:<think>\n", "t\n</think>\n\na<e>", "<think>t</think>a", None, "a<e>"),
        ("A:<think>\n", "t\n</think>\n\na<e>", "t\n</think>\n\na", None, "a<e>"),
    ],
)
def test_a_tag_that_is_quoted_ends_no_block(
    prompt: str, written: str, content: str, reasoning: str | None, left: str
) -> None:
    assert turn_behind(prompt, written, content, reasoning) == left


@pytest.mark.parametrize(
    ("prompt", "written", "content", "reasoning"),
    [
        ("A:", "[THINK]T ONE[/THINK]ta<e>", "ta", "t one"),
        ("A:<think>\n", "T </think> two\n</think>\n\na<e>", "a", "t </think> two"),
        ("A:<think>\n", "</think>Say </THINK>.<e>", "say </think>.", None),
    ],
)
def test_thinking_that_is_not_told_is_refused(
    prompt: str, written: str, content: str, reasoning: str | None
) -> None:
    with pytest.raises(RecordProblem, match="thinking not told from the answer"):
        turn_behind(prompt, written, content, reasoning)
