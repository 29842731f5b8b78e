"""Masks against expectations written by hand: «...» is trained, the rest is not."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from chat_models import SPECIALS, TEMPLATES, family, make_tokenizer, marked, render, talk
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from finetune.data.encoding.render import (
    PROMPT_FLOOR_TOKENS,
    Encoder,
    Renderer,
    stop_token_ids,
    trained_tokens,
)
from finetune.data.encoding.spans import ChatTemplate, Turn, content_span
from finetune.data.formats import Conversation, Message
from finetune.data.report import RecordProblem
from finetune.errors import DataError

ONE = talk("q1", "a1")
TWO = talk("q1", "a1", "q2", "a2")
SYSTEM = talk("q1", "a1", "q2", "a2", system="be kind")
THOUGHT = talk("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")
BESIDE = Conversation((Message("user", "q"), Message("assistant", "a", reasoning="t1")))

IM = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}\n"
NO_THOUGHT, T1, T2 = (f"<think>\n{text}\n</think>\n\n" for text in ("", "t1", "t2"))
LLAMA = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nq1<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«a1<|eot_id|>»"
)
GEMMA = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n{}\n"
BOTH = IM.format("q1", "«a1<|im_end|>»"), IM.format("q2", "«a2<|im_end|>»")

EXPECTED: list[tuple[str, Conversation, list[str]]] = [
    # The empty think block follows the generation prompt, so the model must write it: it is
    # trained. In the first of two turns there is none.
    ("qwen3", TWO, [BOTH[0] + IM.format("q2", f"«{NO_THOUGHT}a2<|im_end|>»")]),
    # Reasoning is shown in the last turn only, so each answer is a sample that ends with it.
    (
        "qwen3",
        THOUGHT,
        [
            IM.format("q1", f"«{T1}a1<|im_end|>»"),
            IM.format("q1", "a1<|im_end|>") + IM.format("q2", f"«{T2}a2<|im_end|>»"),
        ],
    ),
    ("qwen3", BESIDE, [IM.format("q", f"«{T1}a<|im_end|>»")]),
    ("llama3", talk("q1", "\n a1 \n"), [LLAMA]),
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
    # Phi-3's special tokens swallow the newline after them; after the last turn it also writes the
    # end of the sequence.
    (
        "phi3",
        TWO,
        ["<|user|>q1<|end|><|assistant|>«a1<|end|>»<|user|>q2<|end|><|assistant|>«a2<|end|></s>»"],
    ),
    ("glm4", TWO, ["[gMASK]<sop><|user|>\nq1<|assistant|>\n«a1»<|user|>\nq2<|assistant|>\n«a2»"]),
]


def shown(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[str]:
    samples = render(conversation, tokenizer, 4096)
    return [marked(tokenizer, sample.input_ids, sample.supervised) for sample in samples]


@pytest.mark.parametrize(("name", "conversation", "expected"), EXPECTED)
def test_masks_are_as_written_by_hand(name: str, conversation: Conversation, expected: list[str]):
    tokenizer = family(name)
    assert shown(tokenizer, conversation) == expected
    for sample in pickle.loads(pickle.dumps(Renderer(tokenizer, 4096)))(conversation):
        assert (sample.trimmed_tokens, sample.dropped_turns, sample.cut_answer) == (0, 0, False)
        assert sample.ends == (name != "glm4") and sample.follows_prompt


def test_tokens_are_those_that_inference_sees():
    """The prompt's tokens are those of the prompt alone, and the whole is transformers' own."""
    question, answer = "什么是路由器？ What is a router?", "数据包转发。"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for name in TEMPLATES.keys() - {"llama3"}:  # its date is pinned
        (sample,) = render(talk(question, answer), family(name), 4096)
        assert sample.input_ids.tolist() == family(name).apply_chat_template(turns)["input_ids"]
        prompt = family(name).apply_chat_template(turns[:1], add_generation_prompt=True)
        length = len(prompt["input_ids"])
        assert sample.input_ids[:length].tolist() == prompt["input_ids"]
        assert np.flatnonzero(sample.supervised)[0] == length
    spaced = talk("  What is a router ? ", " A router  forwards. ", "and   a switch?", "  转发。")
    plain, trimmed = (
        shown(make_tokenizer(TEMPLATES["mistral"], SPECIALS["mistral"], trim_offsets=trim), spaced)
        for trim in (False, True)
    )
    assert plain == trimmed, "offsets that are trimmed make no difference"


IM_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_what_a_template_cannot_write_is_a_problem_of_the_record():
    bare = "{% for m in messages if m.role == 'assistant' %}{{ m.content + eos_token }}{% endfor %}"
    doubling = make_tokenizer(IM_TEMPLATE, SPECIALS["qwen3"])
    assert render(ONE, doubling, 4096)
    for tokenizer, conversation, said in (
        (family("gemma"), SYSTEM, "refused by the chat template: System role not supported"),
        (family("deepseek"), THOUGHT, "leaves out part of the answer in turn 2"),
        (family("chatml"), BESIDE, "reasoning left out by the chat template"),
        (doubling, THOUGHT, "two think blocks"),
        (make_tokenizer(bare), ONE, "everything would be trained"),
    ):
        with pytest.raises(RecordProblem, match=said) as caught:
            render(conversation, tokenizer, 4096)
        assert "t1" not in str(caught.value), "messages go to logs; what people wrote does not"
    with pytest.raises(DataError, match="cannot write a question and its answer"):
        Renderer(make_tokenizer("{% for m in messages %}"), 4096)


def test_context_is_not_trained():
    """An answer of weight zero, the result of a tool, and position 0, which nothing predicts."""
    turns = [TWO.messages[0], Message("assistant", "a1", trained=False), *TWO.messages[2:]]
    expected = (
        "<s>" + GEMMA.format("q1", "a1<end_of_turn>") + GEMMA.format("q2", "«a2<end_of_turn>»")
    )
    assert shown(family("gemma"), Conversation(tuple(turns))) == [expected]
    turns = [*TWO.messages[:2], Message("tool", "r1"), Message("assistant", "a2")]
    (text,) = shown(family("chatml"), Conversation(tuple(turns)))
    result = "<|im_start|>tool\nr1<|im_end|>\n<|im_start|>assistant\n"
    assert text.endswith(f"«a1<|im_end|>»\n{result}«a2<|im_end|>»\n")
    late = "{% for m in messages[1:] %}{{ m.content + eos_token }}{% endfor %}"
    assert shown(make_tokenizer(late), TWO) == ["a«1</s>»q2</s>«a2</s>»"]


def test_contents_are_found_only_where_certain():
    loop = "{{% for m in messages %}}{{{{ {} }}}}{{% endfor %}}"
    for source, found in (
        # Marks survive `upper`: only the comparison with the plain rendering can tell.
        (loop.format("m.role + ': ' + m.content | upper + '\n'"), (6, 8)),
        (loop.format("m.content + m.content"), None),
        (loop.format("m.content | capitalize + '.'"), None),
    ):
        template = ChatTemplate(make_tokenizer(source))
        text = template.render(ONE.messages)
        assert content_span(template, text, ONE.messages, 0) == found


# Where tokens straddle a boundary -------------------------------------------------------------------------------------


def merging_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """Characters with these merges, and no splitting into words first."""
    pieces = sorted(set("".join(itertools.chain(*merges))) | set("abqx:. \n"))
    vocabulary = [*pieces, *("".join(pair) for pair in merges)]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=list(merges)))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


def test_a_token_across_the_beginning_is_cut_so_that_the_prompt_is_as_at_inference():
    tokenizer = merging_tokenizer(("\n", "\n"), ("a", "b"))
    end = "(':\n' if m.role == 'user' else eos_token)"
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content + {end} }}}}{{% endfor %}}"
    assert tokenizer.tokenize("q:\n\nab") == ["q", ":", "\n\n", "ab"]
    (sample,) = render(talk("q", "\nab"), tokenizer, 4096)
    tokens = tokenizer.convert_ids_to_tokens(sample.input_ids.tolist())
    assert tokens == ["q", ":", "\n", "\n", "ab", "</s>"]
    assert sample.supervised.tolist() == [False, False, False, True, True, True]


def test_tokens_across_both_boundaries():
    tokenizer = merging_tokenizer((":", "a"), ("b", "."), ("b", "\n"))

    def trained(text: str, start: int, end: int) -> list[str]:
        turns = (Turn(start, end, ends=False),)
        encoded = Encoder(tokenizer).encode(text, turns)
        spans = trained_tokens(text, encoded, turns)[0]
        tokens = [tokenizer.decode([int(token)]) for token in encoded.ids]
        return ["*" * (number in spans) + token for number, token in enumerate(tokens)]

    assert tokenizer.tokenize("q:ab.x") == ["q", ":a", "b.", "x"]
    assert trained("q:ab.x", 2, 4) == ["q", ":", "*a", "*b", ".", "x"]  # cut at both ends
    assert trained("q:ab\nx", 2, 4) == ["q", ":", "*a", "*b\n", "x"]  # white space hangs over
    assert trained("q:ab", 2, 4) == ["q", ":", "*a", "*b"]


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30).filter(
    lambda text: text.strip() and not any(special in text for special in ("think>", "<s>", "</s>"))
)
FRAMES = {"chatml": "{}<|im_end|>", "mistral": " {}</s>", "deepseek": "{}<｜end▁of▁sentence｜>"}


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(FRAMES)), pairs=st.lists(st.tuples(TEXT, TEXT), min_size=1))
def test_whatever_is_said_the_trained_tokens_spell_the_answers(name: str, pairs: list[Any]):
    (sample,) = render(talk(*itertools.chain(*pairs)), family(name), 1 << 20)
    edges = np.flatnonzero(np.diff(sample.supervised, prepend=False, append=False))
    spans = zip(edges[::2], edges[1::2], strict=True)
    found = [family(name).decode(sample.input_ids[start:stop]) for start, stop in spans]
    assert found == [FRAMES[name].format(answer) for _, answer in pairs]


# Truncation -----------------------------------------------------------------------------------------------------------

SENTENCES = (
    "什么是路由器？它在网络之间转发数据包吗？ What is a router, and which networks does it join? "
)
QUESTION = (SENTENCES * 2).strip()
ANSWER = "A router forwards packets. 路由器在网络之间转发数据包。答案是 42。"


@pytest.mark.parametrize(
    ("name", "system"), [("llama3", None), ("mistral", "be kind"), ("glm4", None)]
)
def test_truncation_at_every_cutoff(name: str, system: str | None):
    tokenizer = family(name)
    conversation = talk(QUESTION, ANSWER, system=system)
    (full,) = render(conversation, tokenizer, 4096)
    answer = full.input_ids[full.supervised].tolist()
    prompt = full.input_ids[: np.flatnonzero(full.supervised)[0]]
    before, after = tokenizer.decode(prompt).split(QUESTION)
    framing = len(prompt) - len(tokenizer(QUESTION, add_special_tokens=False)["input_ids"])
    system_tokens = len(tokenizer(system or "", add_special_tokens=False)["input_ids"])
    lengths: list[int] = []
    for cutoff in range(1, len(full.input_ids) + 2):
        try:
            (sample,) = Renderer(tokenizer, cutoff)(conversation)
        except DataError as error:  # refused only below every cutoff that works
            assert "too short" in str(error) and not lengths
            continue
        assert len(sample.input_ids) <= cutoff and not sample.supervised[:1].any()
        trained = sample.input_ids[sample.supervised].tolist()
        assert trained == answer[: len(trained)], "what is trained is a beginning of the answer"
        if not trained:
            assert cutoff <= framing + system_tokens
            continue
        lengths.append(len(trained))
        first = np.flatnonzero(sample.supervised)[0]
        text = tokenizer.decode(sample.input_ids[:first])
        assert text.endswith(after), "the generation prompt is whole"
        assert sample.cut_answer == (len(trained) < len(answer))
        if cutoff >= framing + len(answer):
            assert trained == answer, "an answer that fits is whole"
        question = text.removesuffix(after)
        if sample.cut_answer:
            assert len(sample.input_ids) == cutoff
            assert "\ufffd" not in question, "no character is torn"
            if system is None:  # an answer that is cut keeps some of its question: a quarter
                assert (cutoff - framing) // 8 <= first - framing <= (cutoff - framing) // 4
        if system is None and first < len(prompt):
            assert sample.trimmed_tokens == len(prompt) - first
            kept = question.removeprefix(before)
            ends = [QUESTION[len(QUESTION) - len(kept) + n :] for n in range(len(kept) + 1)]
            parts = [QUESTION[:n] + end for n, end in enumerate(ends)]
            assert kept in parts, "the middle is missing, not an end"
    steps = itertools.pairwise(lengths)
    assert all(after >= before - 3 for before, after in steps), "but for whole characters"
    assert lengths[-1] == len(answer)


def test_long_conversations_lose_prompts_first_then_last_turns():
    tokenizer = family("chatml")
    contents = [QUESTION, "a1 because", "q2 " + QUESTION, "a2 because", "q3", "a3 because"]
    conversation = talk(*contents, system=QUESTION)
    (full,) = render(conversation, tokenizer, 4096)
    answers = full.input_ids[full.supervised].tolist()
    long_prompts = 3 * len(tokenizer(QUESTION, add_special_tokens=False)["input_ids"])
    seen = []
    for cutoff in range(60, len(full.input_ids) + 1, 3):
        (sample,) = Renderer(tokenizer, cutoff)(conversation)
        trained = sample.input_ids[sample.supervised].tolist()
        assert len(sample.input_ids) <= cutoff and trained == answers[: len(trained)]
        whole = 3 - sample.dropped_turns - sample.cut_answer
        text = tokenizer.decode(sample.input_ids)
        shown = [f"a{number} because" in text for number in (1, 2, 3)]
        assert shown == [number <= whole for number in (1, 2, 3)]
        if sample.dropped_turns < 2:
            assert not sample.cut_answer, "answers are cut only when one turn is left"
        if whole == 3:
            assert long_prompts - sample.trimmed_tokens >= 3 * (PROMPT_FLOOR_TOKENS - 3)
        seen.append(len(trained))
    assert seen == sorted(seen) and seen[-1] == len(answers) and {len(answers)} < set(seen)


def test_where_generation_stops():
    for name, stops in (("chatml", ["</s>", "<|im_end|>"]), ("glm4", ["</s>"])):
        ids = stop_token_ids(family(name))
        assert sorted(family(name).convert_ids_to_tokens(ids)) == stops
