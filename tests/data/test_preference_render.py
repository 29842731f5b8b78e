"""Pairs as samples: one prompt for both documents, masks, what the cutoff takes, and arrays."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chat_models import TEMPLATES, family, marked, talk, train_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_rows import write_rows as write
from tokenizers import pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.encoding.render import Rendered, Renderer
from finetune.data.formats import Conversation, Message
from finetune.data.preference.reader import Preference, PreferenceReader
from finetune.data.preference.render import PreferenceRenderer
from finetune.data.report import RecordProblem
from finetune.data.samples import PreferenceSamples
from finetune.errors import DataError

TEXT = st.text(st.sampled_from("ab \n1.é什🙂"), min_size=1, max_size=8).filter(str.strip)
LONG = " ".join(map(str, range(200)))


def pair(
    prompt: tuple[str, ...], chosen: str, rejected: str, system: str | None = None
) -> Preference:
    """Question, answer, question, ..., and two answers to the last."""
    sides = [talk(*prompt, answer, system=system).messages for answer in (chosen, rejected)]
    shared = len(sides[0]) - 1
    history = [Message(turn.role, turn.content, trained=False) for turn in sides[0][:shared]]
    answers = [(*history, side[-1]) for side in sides]
    return Preference(answers[0], prompt_turns=shared, rejected=answers[1])


def documents(sample: Rendered) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and targets of both."""
    cuts = [sample.first_length]
    parts = np.split(sample.input_ids, cuts), np.split(sample.supervised, cuts)
    return list(zip(*parts, strict=True))


def prompt_of(ids: np.ndarray, supervised: np.ndarray) -> list[int]:
    return ids[: int(np.argmax(supervised))].tolist()


def shown(name: str, preference: Preference, **options: Any) -> list[str]:
    (sample,) = PreferenceRenderer(family(name), 4096, **options)(preference)
    return [marked(family(name), *document) for document in documents(sample)]


def test_masks():
    head = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nq0<|im_end|>\n"
    head += "<|im_start|>assistant\na0<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
    head += "<|im_start|>assistant\n"
    preference = pair(("q0", "a0", "q"), "yes", "no, never", system="be kind")
    answers = ["«yes<|im_end|>»\n", "«no, never<|im_end|>»\n"]
    assert shown("chatml", preference) == [head + answer for answer in answers]
    head = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    preference = pair(("q",), "yes", "<think>\nt\n</think>\n\nno")
    blocks = ["<think>\n\n</think>\n\n", "<think>\nt\n</think>\n\n"]
    assert shown("qwen3", preference, train_thinking=False) == [
        f"{head}{block}«{answer}<|im_end|>»\n"
        for block, answer in zip(blocks, ("yes", "no"), strict=True)
    ]
    # What follows the turns that both begin with is trained; a question among it is context.
    long, short = talk("q", "a", "q1", "a1").messages, talk("q", "b").messages
    (found, _) = shown("chatml", Preference(long, prompt_turns=1, rejected=short))
    between = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
    assert found.endswith(f"«a<|im_end|>»\n{between}«a1<|im_end|>»\n")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    before=st.sampled_from([(), ("q0", "a0")]),
    texts=st.tuples(TEXT, TEXT, TEXT),
    shorter=st.integers(0, 60),
)
def test_whatever_is_said_both_documents_begin_with_the_same_tokens(
    name: str, before: tuple[str, ...], texts: tuple[str, str, str], shorter: int
):
    question, *answers = texts
    preference = pair((*before, question), *answers)
    tokenizer = family(name)
    try:
        (sample,) = PreferenceRenderer(tokenizer, 4096)(preference)
    except RecordProblem as problem:  # the template takes off the white space in which they differ
        assert problem.kind == "equal answers" and answers[0].strip() == answers[1].strip()
        return
    chosen, rejected = documents(sample)
    assert prompt_of(*chosen) == prompt_of(*rejected)
    for (ids, mask), side in ((chosen, preference.messages), (rejected, preference.rejected)):
        alone = Renderer(tokenizer, 4096)(Conversation(side))[0]
        assert tokenizer.decode(ids) == tokenizer.decode(alone.input_ids)
        trained = alone.input_ids[alone.supervised]
        assert tokenizer.decode(ids[mask]) == tokenizer.decode(trained)
    # And cut, down to what is hardly more than the template's own tokens.
    limit = max(20, max(len(chosen[0]), len(rejected[0])) - shorter)
    with contextlib.suppress(DataError):  # too short for the template
        for one in PreferenceRenderer(tokenizer, limit)(preference):
            first, second = documents(one)
            assert max(len(first[0]), len(second[0])) <= limit
            if first[1].any() and second[1].any():
                assert prompt_of(*first) == prompt_of(*second)
                assert one.first_targets == first[1].sum()


def test_white_space_that_is_split_by_what_follows_is_cut_off_from_it():
    """GPT-2's rule splits two newlines before a word, and not before a space."""
    turn = "{{ ('Q: ' + m.content + '\n\n') if m.role == 'user' else m.content + '</s>' }}"
    backend = train_backend()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=letters, special_tokens=["<s>", "</s>"]
    )
    backend.train_from_iterator(["a\n\n", "b\n\n"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    preference = pair(("q",), "a", " b")
    prompts = []
    for side in (preference.messages, preference.rejected):
        alone = Renderer(tokenizer, 99)(Conversation(side))[0]
        prompts.append(prompt_of(alone.input_ids, alone.supervised))
    assert prompts[0] != prompts[1]  # as fine-tuning has them
    (sample,) = PreferenceRenderer(tokenizer, 99)(preference)
    chosen, rejected = documents(sample)
    assert prompt_of(*chosen) == prompt_of(*rejected) == prompts[1]


def test_the_longer_document_decides_what_both_prompts_lose():
    (sample,) = PreferenceRenderer(family("chatml"), 160)(pair((LONG,), "yes", "no " * 30))
    chosen, rejected = documents(sample)
    assert prompt_of(*chosen) == prompt_of(*rejected)
    assert len(rejected[0]) == 160 > len(chosen[0])
    assert marked(family("chatml"), *chosen).endswith("<|im_start|>assistant\n«yes<|im_end|>»\n")
    assert sample.trimmed_tokens > 0 and not sample.cut_answer
    assert marked(family("chatml"), *rejected).endswith("«" + "no " * 30 + "<|im_end|>»")
    # A short document alone would have kept more.
    (alone,) = Renderer(family("chatml"), 160)(talk(LONG, "yes"))
    assert len(alone.input_ids) > len(chosen[0])
    # An answer that does not fit is cut.
    (sample,) = PreferenceRenderer(family("chatml"), 100)(pair((LONG,), "yes", "no " * 300))
    assert sample.cut_answer and len(documents(sample)[1][0]) == 100


def test_answers_without_difference_and_prompts_that_differ():
    renderer = PreferenceRenderer(family("chatml"), 100)
    assert renderer(pair(("q",), "no " * 300 + "a", "no " * 300 + "b")) == []
    with pytest.raises(RecordProblem, match="equal answers"):
        PreferenceRenderer(family("gemma"), 100)(pair(("q",), "a", "a "))  # whose template trims
    for special in ("<|im_end|>", "plain"):
        found = [pair(("q",), *answers) for answers in (("a", special), (special, "a"))]
        assert {renderer.has_control_tokens(one) for one in found} == {special != "plain"}
    # Mistral's system text stands before the last question, wherever that is.
    sides = [talk("q", *turns, system="s").messages for turns in (("a", "q1", "a1"), ("b",))]
    preference = Preference(sides[0], prompt_turns=2, rejected=sides[1])
    with pytest.raises(RecordProblem, match="several samples of one side"):
        PreferenceRenderer(family("mistral"), 99)(preference)


# On disk --------------------------------------------------------------------------------------------------------------


def rows_of(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{n} what?", "chosen": "a router " * (n % 5 + 1), "rejected": f"{n} hubs"}
        for n in range(count)
    ]


@pytest.fixture
def pairs(prepare: Callable[..., Any]) -> Callable[..., PreferenceSamples]:
    return lambda *sources, **options: prepare(*sources, **{"preference": "pairs"} | options)


def test_samples_on_disk_are_pairs(tmp_path, pairs):
    rows = rows_of(30)
    path = write(tmp_path / "a.jsonl", rows)
    samples = pairs(path)
    renderer = PreferenceRenderer(family("chatml"), 64)
    for index, (_, _, found) in enumerate(PreferenceReader().conversations(enumerate(rows))):
        assert isinstance(found, Preference)
        (expected,) = renderer(found)
        ids, supervised = samples[index]
        assert ids.tolist() == expected.input_ids.tolist()
        assert supervised.tolist() == expected.supervised.tolist()
        first = int(samples.first_lengths[index])
        assert first == expected.first_length and 0 < first < samples.lengths[index] == len(ids)
        first_targets = supervised[:first].sum()
        assert samples.first_supervised[index] == first_targets < samples.supervised_counts[index]
    assert set(samples.labels.tolist()) == {-1} and ("pairs", "30") in samples.report.lines()
    assert isinstance(pickle.loads(pickle.dumps(samples)), PreferenceSamples)
    rows = [{"prompt": str(n), "completion": "a", "label": n % 3 == 0} for n in range(9)]
    samples = pairs(write(path, rows), preference="labels")
    assert samples.labels.tolist() == [1, 0, 0] * 3 and not samples.first_lengths.any()
    assert ("labels", "3 true, 6 false") in samples.report.lines()


def test_bad_pairs_are_refused_by_file_and_line_or_counted(tmp_path, pairs):
    """Equal only in the template is a bad record, and equal within the cutoff has no room."""
    equal, same = {"prompt": "q", "chosen": "a", "rejected": "a"}, "so " * 100
    late = {"prompt": "q", "chosen": same + "a", "rejected": same + "b"}
    path = write(tmp_path / "a.jsonl", [*rows_of(3), equal, late])
    with pytest.raises(DataError, match=rf"1 of 5 records (.|\n)*{path}:4: equal answers"):
        pairs(path)
    samples = pairs(path, on_bad_row="drop")
    assert samples.report.dropped == {"equal answers": 1, "answers equal within cutoff_len": 1}
    assert "1 of 5 pairs differ only behind the cutoff" in "".join(samples.report.warnings())
    assert len(samples) == samples.report.records_kept == 3
