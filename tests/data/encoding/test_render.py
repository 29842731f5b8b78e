"""Masks against expectations written by hand: «...» is trained, the rest is not."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
from chat_models import SPECIALS, TEMPLATES, family, make_tokenizer, marked, render, talk
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.encoding.render import (
    Encoder,
    Renderer,
    _share,
    stop_token_ids,
    trained_tokens,
)
from finetune.data.encoding.spans import ChatTemplate, Turn, content_span, find_turns
from finetune.data.formats import Conversation, Message
from finetune.data.report import RecordProblem
from finetune.errors import DataError

ONE = talk("q1", "a1")
TWO = talk("q1", "a1", "q2", "a2")
SYSTEM = talk("q1", "a1", "q2", "a2", system="be kind")
EMPTY_SYSTEM = talk("q1", "a1", system="")
SPACED = talk("q1", "\n a1 \n")
THOUGHT = talk("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")

LLAMA_SYSTEM = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n{}<|eot_id|>"
)
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"

EXPECTED: list[tuple[str, Conversation, list[str]]] = [
    (
        "chatml",
        ONE,
        [
            "<|im_start|>system\nYou are a helpful"
            " assistant.<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n"
            "<|im_start|>assistant\n«a1<|im_end|>»\n"
        ],
    ),
    (
        "chatml",
        SYSTEM,
        [
            "<|im_start|>system\nbe kind<|im_end|>\n"
            "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n"
            "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n«a2<|im_end|>»\n"
        ],
    ),
    (
        "chatml",
        EMPTY_SYSTEM,
        [
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n"
        ],
    ),
    (
        "chatml",
        SPACED,
        [
            "<|im_start|>system\nYou are a helpful"
            " assistant.<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«\n a1"
            " \n<|im_end|>»\n"
        ],
    ),
    # The empty think block follows the generation prompt, so the model must write it: it is
    # trained.
    (
        "qwen3",
        ONE,
        [
            "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\na1<|im_end|>»\n"
        ],
    ),
    # In the first of two turns there is none.
    (
        "qwen3",
        SYSTEM,
        [
            "<|im_start|>system\nbe kind<|im_end|>\n"
            "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n"
            "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\na2<|im_end|>»\n"
        ],
    ),
    (
        "qwen3",
        EMPTY_SYSTEM,
        [
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n"
            "<|im_start|>assistant\n«<think>\n\n</think>\n\na1<|im_end|>»\n"
        ],
    ),
    # Reasoning is shown in the last turn only, so each answer is a sample that ends with it.
    (
        "qwen3",
        THOUGHT,
        [
            "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«<think>\nt1\n</think>\n\na1<|im_end|>»\n",
            (
                "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
                "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n«<think>\nt2\n</think>\n\na2<|im_end|>»\n"
            ),
        ],
    ),
    ("llama3", ONE, [LLAMA_SYSTEM.format("") + LLAMA_USER.format("q1") + "«a1<|eot_id|>»"]),
    (
        "llama3",
        SYSTEM,
        [
            LLAMA_SYSTEM.format("be kind")
            + LLAMA_USER.format("q1")
            + "«a1<|eot_id|>»"
            + LLAMA_USER.format("q2")
            + "«a2<|eot_id|>»"
        ],
    ),
    (
        "llama3",
        EMPTY_SYSTEM,
        [LLAMA_SYSTEM.format("") + LLAMA_USER.format("q1") + "«a1<|eot_id|>»"],
    ),
    ("llama3", SPACED, [LLAMA_SYSTEM.format("") + LLAMA_USER.format("q1") + "«a1<|eot_id|>»"]),
    ("mistral", ONE, ["<s>[INST] q1[/INST]« a1</s>»"]),
    ("mistral", TWO, ["<s>[INST] q1[/INST]« a1</s>»[INST] q2[/INST]« a2</s>»"]),
    # The system text moves to the last question: the first answer is a sample of its own, after the
    # prompt that serving writes.
    (
        "mistral",
        SYSTEM,
        [
            "<s>[INST] be kind\n\nq1[/INST]« a1</s>»",
            "<s>[INST] q1[/INST] a1</s>[INST] be kind\n\nq2[/INST]« a2</s>»",
        ],
    ),
    ("mistral", EMPTY_SYSTEM, ["<s>[INST] \n\nq1[/INST]« a1</s>»"]),
    (
        "gemma",
        ONE,
        ["<s><start_of_turn>user\nq1<end_of_turn>\n<start_of_turn>model\n«a1<end_of_turn>»\n"],
    ),
    (
        "gemma",
        TWO,
        [
            "<s><start_of_turn>user\nq1<end_of_turn>\n<start_of_turn>model\n«a1<end_of_turn>»\n"
            "<start_of_turn>user\nq2<end_of_turn>\n<start_of_turn>model\n«a2<end_of_turn>»\n"
        ],
    ),
    ("deepseek", ONE, ["<s><｜User｜>q1<｜Assistant｜>«a1<｜end▁of▁sentence｜>»"]),
    (
        "deepseek",
        SYSTEM,
        [
            "<s>be kind<｜User｜>q1<｜Assistant｜>«a1<｜end▁of▁sentence｜>»"
            "<｜User｜>q2<｜Assistant｜>«a2<｜end▁of▁sentence｜>»"
        ],
    ),
    ("deepseek", EMPTY_SYSTEM, ["<s><｜User｜>q1<｜Assistant｜>«a1<｜end▁of▁sentence｜>»"]),
    # Phi-3's special tokens swallow the newline after them; after the last turn it also writes the
    # end of the sequence.
    ("phi3", ONE, ["<|user|>q1<|end|><|assistant|>«a1<|end|></s>»"]),
    (
        "phi3",
        SYSTEM,
        [
            "<|system|>be kind<|end|><|user|>q1<|end|><|assistant|>«a1<|end|>»"
            "<|user|>q2<|end|><|assistant|>«a2<|end|></s>»"
        ],
    ),
    ("phi3", EMPTY_SYSTEM, ["<|system|><|end|><|user|>q1<|end|><|assistant|>«a1<|end|></s>»"]),
    ("glm4", TWO, ["[gMASK]<sop><|user|>\nq1<|assistant|>\n«a1»<|user|>\nq2<|assistant|>\n«a2»"]),
]


@pytest.mark.parametrize(("name", "conversation", "expected"), EXPECTED)
def test_masks_are_as_written_by_hand(
    name: str, conversation: Conversation, expected: list[str]
) -> None:
    tokenizer = family(name)
    samples = Renderer(tokenizer, 4096)(conversation)
    assert [
        marked(tokenizer, sample.input_ids, sample.supervised) for sample in samples
    ] == expected
    for sample in samples:
        assert sample.input_ids.dtype == np.int32 and sample.supervised.dtype == np.bool_
        assert not sample.supervised[0]
        assert (sample.trimmed_tokens, sample.dropped_turns, sample.cut_answer) == (0, 0, False)
        assert sample.ends == (name != "glm4")
        assert sample.follows_prompt


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_that_inference_sees(name: str) -> None:
    """The prompt's tokens equal the prompt tokenized alone, the whole equals transformers' own
    tokens.
    """
    tokenizer = family(name)
    question = "什么是路由器？ What is a router?"
    (sample,) = render(talk(question, "数据包转发。"), tokenizer, 4096)
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "数据包转发。"},
    ]
    if name != "llama3":  # its date is pinned
        assert sample.input_ids.tolist() == tokenizer.apply_chat_template(turns)["input_ids"]
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
        assert sample.input_ids[: len(prompt)].tolist() == prompt
        assert np.flatnonzero(sample.supervised)[0] == len(prompt)


def test_a_date_in_a_template_does_not_change_with_the_day() -> None:
    (sample,) = render(ONE, family("llama3"), 4096)
    assert "Today Date: 26 Jul 2024\n" in family("llama3").decode(sample.input_ids)


def test_padding_with_the_end_token_leaves_it_trained() -> None:
    tokenizer = make_tokenizer(TEMPLATES["mistral"], SPECIALS["mistral"])
    tokenizer.pad_token = tokenizer.eos_token
    (sample,) = render(ONE, tokenizer, 4096)
    assert sample.input_ids[-1] == tokenizer.pad_token_id and sample.supervised[-1]


def test_gemma_refuses_a_system_text_and_we_do_not_invent_a_place_for_it() -> None:
    with pytest.raises(
        RecordProblem, match="refused by the chat template: System role not supported"
    ):
        render(SYSTEM, family("gemma"), 4096)


def test_reasoning_that_the_template_leaves_out_is_a_problem() -> None:
    with pytest.raises(RecordProblem, match="leaves out part of the answer in turn 2"):
        render(THOUGHT, family("deepseek"), 4096)


def test_reasoning_beside_the_content() -> None:
    thought = Conversation((Message("user", "q"), Message("assistant", "a", reasoning="t")))
    (sample,) = render(thought, family("qwen3"), 4096)
    assert "«<think>\nt\n</think>\n\na<|im_end|>»" in marked(
        family("qwen3"), sample.input_ids, sample.supervised
    )
    with pytest.raises(RecordProblem, match="reasoning left out by the chat template"):
        render(thought, family("chatml"), 4096)  # it would be lost in silence


def test_a_generation_prompt_that_opens_the_answers_own_think_block() -> None:
    """Qwen3.5: the prompt ends with <think>, which the row's answer begins with."""
    template = TEMPLATES["qwen3"].replace(
        "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}"
    )
    assert template != TEMPLATES["qwen3"]
    tokenizer = make_tokenizer(template, SPECIALS["qwen3"])
    shown = [
        marked(tokenizer, s.input_ids, s.supervised) for s in Renderer(tokenizer, 4096)(THOUGHT)
    ]
    assert [text[text.index("«") :] for text in shown] == [
        "«t1\n</think>\n\na1<|im_end|>»\n",
        "«t2\n</think>\n\na2<|im_end|>»\n",
    ]
    assert all("<|im_start|>assistant\n<think>\n«" in text for text in shown)


def test_a_template_with_a_think_block_of_its_own_must_not_double_it() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template, SPECIALS["qwen3"])
    assert render(ONE, tokenizer, 4096)
    with pytest.raises(RecordProblem, match="two think blocks"):
        render(THOUGHT, tokenizer, 4096)


def test_a_prompt_that_answers_do_not_follow_is_noted() -> None:
    """DeepSeek-R1: the generation prompt opens a think block; rows without reasoning have none."""
    template = TEMPLATES["deepseek"].replace(
        "{{ '<｜Assistant｜>' }}", "{{ '<｜Assistant｜><think>\\n' }}"
    )
    tokenizer = make_tokenizer(template, SPECIALS["deepseek"])
    (sample,) = render(TWO, tokenizer, 4096)
    assert not sample.follows_prompt
    assert (
        marked(tokenizer, sample.input_ids, sample.supervised)
        == "<s><｜User｜>q1<｜Assistant｜>«a1<｜end▁of▁sentence｜>»<｜User｜>q2<｜Assistant｜>«a2<｜end▁of▁sentence｜>»"
    )


def test_an_answer_of_weight_zero_is_context() -> None:
    turns = list(TWO.messages)
    turns[1] = Message("assistant", "a1", trained=False)
    (sample,) = render(Conversation(tuple(turns)), family("gemma"), 4096)
    assert (
        marked(family("gemma"), sample.input_ids, sample.supervised)
        == "<s><start_of_turn>user\nq1<end_of_turn>\n<start_of_turn>model\na1<end_of_turn>\n"
        "<start_of_turn>user\nq2<end_of_turn>\n<start_of_turn>model\n«a2<end_of_turn>»\n"
    )


def test_tool_results_are_not_trained() -> None:
    turns = (*TWO.messages[:2], Message("tool", "r1"), Message("assistant", "a2"))
    (sample,) = render(Conversation(turns), family("chatml"), 4096)
    shown = marked(family("chatml"), sample.input_ids, sample.supervised)
    assert shown.endswith(
        "«a1<|im_end|>»\n<|im_start|>tool\nr1<|im_end|>\n<|im_start|>assistant\n«a2<|im_end|>»\n"
    )


def test_a_template_without_prompt_is_refused() -> None:
    bare = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token }}{% endif"
        " %}{% endfor %}"
    )
    with pytest.raises(RecordProblem, match="everything would be trained"):
        render(ONE, make_tokenizer(bare), 4096)


@pytest.mark.parametrize(
    "template", ["{{ nothing.at.all }}", "{{ raise_exception('no') }}", "{% for m in messages %}"]
)
def test_a_broken_template_is_refused_before_any_row(template: str) -> None:
    with pytest.raises(DataError, match="the chat template cannot write a question and its answer"):
        Renderer(make_tokenizer(template), 4096)


def test_contents_are_found_only_where_certain() -> None:
    shouting = "{% for m in messages %}{{ m.role + ': ' + m.content | upper + '\n' }}{% endfor %}"
    twice = "{% for m in messages %}{{ m.content + m.content }}{% endfor %}"
    for source, found in ((shouting, None), (twice, None), (TEMPLATES["gemma"], (23, 25))):
        template = ChatTemplate(make_tokenizer(source))
        text = template.render(ONE.messages)
        # Private-use characters survive `upper`, so only the comparison with the plain rendering
        # can tell.
        assert content_span(template, text, ONE.messages, 0) == (
            found if source != shouting else (6, 8)
        )
    assert ChatTemplate(family("gemma")).render(ONE.messages)[23:25] == "q1"


def test_marks_that_change_what_a_template_writes_find_nothing() -> None:
    template = ChatTemplate(
        make_tokenizer("{% for m in messages %}{{ m.content | capitalize + '.' }}{% endfor %}")
    )
    text = template.render(ONE.messages)
    assert text == "Q1.A1." and content_span(template, text, ONE.messages, 0) is None


def test_position_0_is_never_a_target() -> None:
    late = (
        "{% for m in messages %}{% if not loop.first %}{{ m.content + eos_token }}{% endif %}{%"
        " endfor %}"
    )
    tokenizer = make_tokenizer(late)
    (sample,) = render(TWO, tokenizer, 4096)
    assert tokenizer.decode(sample.input_ids) == "a1</s>q2</s>a2</s>"
    assert marked(tokenizer, sample.input_ids, sample.supervised) == "a«1</s>»q2</s>«a2</s>»"


# Where tokens straddle a boundary ---------------------------------------------------------------------------------


def merging_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """Characters with these merges, and no splitting into words first."""
    pieces = sorted(
        {character for pair in merges for piece in pair for character in piece} | set("abqx:. \n")
    )
    vocabulary = {
        piece: number for number, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


def test_a_token_across_the_beginning_is_cut_so_that_the_prompt_is_as_at_inference() -> None:
    tokenizer = merging_tokenizer(("\n", "\n"), ("a", "b"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content + (':\n' if m.role == 'user' else eos_token) }}{%"
        " endfor %}"
    )
    whole = tokenizer("q:\n\nab", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(whole["input_ids"]) == ["q", ":", "\n\n", "ab"]
    (sample,) = render(talk("q", "\nab"), tokenizer, 4096)
    assert tokenizer.convert_ids_to_tokens(sample.input_ids.tolist()) == [
        "q",
        ":",
        "\n",
        "\n",
        "ab",
        "</s>",
    ]
    assert sample.supervised.tolist() == [False, False, False, True, True, True]


def test_tokens_across_both_boundaries() -> None:
    tokenizer = merging_tokenizer((":", "a"), ("b", "."), ("b", "\n"))
    encoder = Encoder(tokenizer)

    def trained(text: str, start: int, end: int) -> list[str]:
        turns = (Turn(start, end, ends=False),)
        encoded = encoder.encode(text, turns)
        spans = trained_tokens(text, encoded, turns)[0]
        return [
            ("*" if number in spans else "") + tokenizer.decode([int(token)])
            for number, token in enumerate(encoded.ids)
        ]

    assert [
        tokenizer.decode(i) for i in tokenizer("q:ab.x", add_special_tokens=False)["input_ids"]
    ] == [
        "q",
        ":a",
        "b.",
        "x",
    ]
    assert trained("q:ab.x", 2, 4) == ["q", ":", "*a", "*b", ".", "x"]  # cut at both ends
    # white space may hang over the end
    assert trained("q:ab\nx", 2, 4) == ["q", ":", "*a", "*b\n", "x"]
    assert trained("q:ab", 2, 4) == ["q", ":", "*a", "*b"]


def test_a_tokenizer_that_cannot_be_cut_keeps_the_straddling_token_in_the_prompt() -> None:
    backend = Tokenizer(models.BPE(unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(
        ["user:hello there"] * 4, trainers.BpeTrainer(vocab_size=60, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    text = "user:hello there"
    turns = (Turn(5, len(text), ends=False),)
    encoded = Encoder(tokenizer).encode(text, turns)
    # no space was put in
    assert encoded.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    spans = trained_tokens(text, encoded, turns)[0]
    assert all(encoded.starts[spans] >= 5)
    early = (Turn(5, len(text) - 1, ends=False),)
    assert encoded.ends[-1] - encoded.starts[-1] > 1, "the last token straddles the earlier end"
    assert trained_tokens(text, encoded, early)[0].tolist() == spans.tolist()[:-1]


def test_trimmed_offsets_make_no_difference() -> None:
    conversation = talk(
        "  What is a router ? ", " A router forwards  packets. ", "and   a switch?", "  转发 帧。"
    )
    samples = [
        render(
            conversation,
            make_tokenizer(TEMPLATES["mistral"], SPECIALS["mistral"], trim_offsets=trim),
            4096,
        )[0]
        for trim in (False, True)
    ]
    assert samples[0].input_ids.tolist() == samples[1].input_ids.tolist()
    assert samples[0].supervised.tolist() == samples[1].supervised.tolist()


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30).filter(
    lambda text: text.strip() and not any(special in text for special in ("think>", "<s>", "</s>"))
)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(TEMPLATES)), contents=st.lists(TEXT, min_size=2, max_size=6))
def test_whatever_is_said_the_trained_tokens_spell_the_answers(
    name: str, contents: list[str]
) -> None:
    contents = contents[: len(contents) // 2 * 2]
    tokenizer = family(name)
    answers = [text.strip() if name in ("llama3", "gemma") else text for text in contents[1::2]]
    ends = {
        "qwen3": "<|im_end|>",
        "chatml": "<|im_end|>",
        "llama3": "<|eot_id|>",
        "mistral": "</s>",
    }
    ends |= {
        "gemma": "<end_of_turn>",
        "deepseek": "<｜end▁of▁sentence｜>",
        "phi3": "<|end|>",
        "glm4": "",
    }
    written = [answer + ends[name] for answer in answers]
    if name == "glm4":
        written = [answer.rstrip() for answer in written]
    if name == "mistral":
        written = [" " + answer for answer in written]
    if name == "qwen3":
        written[-1] = "<think>\n\n</think>\n\n" + written[-1].lstrip("\n")
    if name == "phi3":
        written[-1] += "</s>"
    (sample,) = render(talk(*contents), tokenizer, 4096)
    spans = np.split(
        np.arange(len(sample.supervised)), np.flatnonzero(np.diff(sample.supervised)) + 1
    )
    shown = [
        tokenizer.decode(sample.input_ids[span]) for span in spans if sample.supervised[span[0]]
    ]
    if name == "phi3":  # its tokens swallow white space at the beginning of an answer, too
        assert [text.lstrip() for text in shown] == [text.lstrip() for text in written]
    else:
        assert shown == written


# Truncation ---------------------------------------------------------------------------------------------------------

QUESTION = (
    "什么是路由器？它在网络之间转发数据包吗？ What is a router, and which networks does it join? "
    * 2
).strip()
ANSWER = "A router forwards packets. 路由器在网络之间转发数据包。答案是 42。"


@pytest.mark.parametrize(
    "name", ["chatml", "qwen3", "llama3", "mistral", "gemma", "deepseek", "glm4"]
)
@pytest.mark.parametrize("system", [None, "be kind"])
def test_truncation_at_every_cutoff(name: str, system: str | None) -> None:
    if name == "gemma" and system is not None:
        return  # has no system turn (asserted above)
    tokenizer = family(name)
    conversation = talk(QUESTION, ANSWER, system=system)
    (full,) = render(conversation, tokenizer, 4096)
    answer = full.input_ids[full.supervised].tolist()
    prompt = full.input_ids[: np.flatnonzero(full.supervised)[0]]
    before, after = tokenizer.decode(prompt).split(QUESTION)
    if system is not None:
        before = before.split(system) if system in before else [before]
    framing = len(prompt) - len(tokenizer(QUESTION, add_special_tokens=False)["input_ids"])
    lengths = []
    for cutoff in range(1, len(full.input_ids) + 2):
        try:
            samples = Renderer(tokenizer, cutoff)(conversation)
        except DataError as error:
            assert "too short" in str(error) and not lengths, (
                "refused only below every cutoff that works"
            )
            continue
        (sample,) = samples
        assert len(sample.input_ids) <= cutoff
        trained = sample.input_ids[sample.supervised].tolist()
        assert trained == answer[: len(trained)], "what is trained is a beginning of the answer"
        assert not sample.supervised[:1].any()
        if not trained:
            assert cutoff <= framing + len(
                tokenizer(system or "", add_special_tokens=False)["input_ids"]
            )
            continue
        lengths.append(len(trained))
        first = np.flatnonzero(sample.supervised)[0]
        assert sample.supervised[first:].sum() == len(trained)
        text = tokenizer.decode(sample.input_ids[:first])
        assert text.endswith(after), "the generation prompt is whole"
        for part in before if isinstance(before, list) else [before]:
            assert part in text, "the headers are whole"
        assert sample.cut_answer == (len(trained) < len(answer))
        if cutoff >= framing + len(answer):
            assert trained == answer, "an answer that fits is whole"
        if sample.cut_answer:
            assert sample.input_ids[-1] == trained[-1] and len(sample.input_ids) == cutoff
            question = text.removesuffix(after)
            assert "\ufffd" not in question, "no character is torn"
            if system is None and framing + 24 <= cutoff:
                assert first > framing, "an answer that is cut keeps some of its question"
        if system is None and text != tokenizer.decode(prompt):
            assert sample.trimmed_tokens == len(prompt) - first
            kept = text.removesuffix(after).removeprefix(before)
            assert any(
                QUESTION.startswith(kept[:split]) and QUESTION.endswith(kept[split:])
                for split in range(len(kept) + 1)
            ), "the middle is missing, not an end"
    assert all(b >= a - 3 for a, b in zip(lengths, lengths[1:], strict=False)), (
        "but for whole characters in prompts"
    )
    assert lengths[-1] == len(answer)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3"])
def test_long_conversations_lose_prompts_first_then_last_turns(name: str) -> None:
    tokenizer = family(name)
    conversation = talk(
        QUESTION, "a1 because", "q2 " + QUESTION, "a2 because", "q3", "a3 because", system=QUESTION
    )
    (full,) = render(conversation, tokenizer, 4096)
    answers = full.input_ids[full.supervised].tolist()
    seen = []
    for cutoff in range(60, len(full.input_ids) + 1):
        (sample,) = Renderer(tokenizer, cutoff)(conversation)
        trained = sample.input_ids[sample.supervised].tolist()
        assert len(sample.input_ids) <= cutoff and trained == answers[: len(trained)]
        whole = 3 - sample.dropped_turns - sample.cut_answer
        text = tokenizer.decode(sample.input_ids)
        assert [f"a{number} because" in text for number in (1, 2, 3)] == [
            number <= whole for number in (1, 2, 3)
        ]
        if sample.dropped_turns < 2:
            assert not sample.cut_answer, "answers are cut only when one turn is left"
        seen.append(len(trained))
    assert seen == sorted(seen) and seen[-1] == len(answers) and {len(answers)} < set(seen)


def test_short_prompt_parts_are_spared_before_long_ones() -> None:
    tokenizer = family("chatml")
    conversation = talk(QUESTION, "a1", system="be kind to the user")
    (full,) = render(conversation, tokenizer, 4096)
    (sample,) = render(conversation, tokenizer, len(full.input_ids) - 60)
    assert "be kind to the user" in tokenizer.decode(sample.input_ids)
    # besides the newline after the last target; whole characters
    assert 59 <= sample.trimmed_tokens <= 63


@given(lengths=st.lists(st.integers(0, 50), max_size=6), room=st.integers(0, 200))
def test_room_is_shared_evenly(lengths: list[int], room: int) -> None:
    kept = _share(np.array(lengths, dtype=np.int64), room)
    assert sum(kept) == min(room, sum(lengths))
    assert all(0 <= keep <= length for keep, length in zip(kept, lengths, strict=True))
    most = max(kept, default=0)
    assert all(
        keep >= most - 1 for keep, length in zip(kept, lengths, strict=True) if keep < length
    )


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_the_smallest_cutoff_is_the_template_with_one_token_each(name: str) -> None:
    prompt = "".join(
        marked(family(name), s.input_ids, s.supervised).split("«")[0]
        for s in render(ONE, family(name), 999)
    )
    header_tokens = sum(
        len(family(name)(part, add_special_tokens=False)["input_ids"])
        for part in prompt.split("q1")
    )
    with pytest.raises(DataError, match=f"takes {header_tokens} tokens") as caught:
        Renderer(family(name), header_tokens + 1)
    assert f"at least {header_tokens + 2}" in caught.value.fix
    (sample,) = render(ONE, family(name), header_tokens + 2)
    assert sample.supervised.any()


def test_a_cutoff_below_the_template_is_refused_at_once() -> None:
    with pytest.raises(
        DataError, match=r"cutoff_len 8 is too short: the chat template alone takes \d+ tokens"
    ):
        Renderer(family("chatml"), 8)


def test_a_row_whose_frame_is_too_long_has_no_target() -> None:
    """Many turns before the first trained answer: their headers alone exceed the cutoff."""
    turns = [Message("user", "q"), Message("assistant", "a", trained=False)] * 12
    conversation = Conversation((*turns, Message("user", "q"), Message("assistant", "a")))
    (sample,) = render(conversation, family("gemma"), 40)
    assert not sample.supervised.any() and len(sample.input_ids) <= 40


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("chatml", ["</s>", "<|im_end|>"]),
        ("mistral", ["</s>"]),
        ("phi3", ["</s>", "<|end|>"]),
        ("glm4", ["</s>"]),
    ],
)
def test_where_generation_stops(name: str, stops: list[str]) -> None:
    tokenizer = family(name)
    assert sorted(tokenizer.convert_ids_to_tokens(stop_token_ids(tokenizer))) == stops


def test_renderers_travel_between_processes() -> None:
    renderer = pickle.loads(pickle.dumps(Renderer(family("qwen3"), 64)))
    (here,), (there,) = Renderer(family("qwen3"), 64)(TWO), renderer(TWO)
    assert here.input_ids.tolist() == there.input_ids.tolist()


def test_finding_turns_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "finetune"):
        find_turns(ChatTemplate(family("qwen3")), TWO.messages)
    assert not caplog.records
