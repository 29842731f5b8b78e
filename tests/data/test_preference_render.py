"""Pairs as samples: one prompt for both documents, masks by hand, what the cutoff takes, and arrays
on disk.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import TEMPLATES, family, marked, talk, train_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT
from model_families import FAMILIES, Family
from model_families import make_tokenizer as make_family_tokenizer
from sample_rows import write_rows as write
from tokenizers import pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.dataset import PreferenceSamples, prepare_samples
from finetune.data.encoding.render import Rendered, Renderer
from finetune.data.formats import Conversation, Message
from finetune.data.preference.reader import Preference, PreferenceReader
from finetune.data.preference.render import PreferenceRenderer
from finetune.data.report import RecordProblem
from finetune.errors import DataError

TEXT = st.text(st.sampled_from("ab \n1.é什🙂"), min_size=1, max_size=8).filter(str.strip)


def pair(
    prompt: tuple[str, ...], chosen: str, rejected: str, system: str | None = None
) -> Preference:
    """Question, answer, question, ..., and two answers to the last."""
    sides = [talk(*prompt, answer, system=system).messages for answer in (chosen, rejected)]
    shared = len(sides[0]) - 1
    history = [Message(turn.role, turn.content, trained=False) for turn in sides[0][:shared]]
    return Preference(
        (*history, sides[0][-1]), prompt_turns=shared, rejected=(*history, sides[1][-1])
    )


def documents(sample: Rendered) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and targets of both."""
    cuts = [sample.first_length]
    return list(
        zip(np.split(sample.input_ids, cuts), np.split(sample.supervised, cuts), strict=True)
    )


def prompt_of(ids: np.ndarray, supervised: np.ndarray) -> list[int]:
    return ids[: int(np.argmax(supervised))].tolist()


def shown(name: str, preference: Preference, cutoff_len: int = 4096) -> list[str]:
    (sample,) = PreferenceRenderer(family(name), cutoff_len)(preference)
    return [marked(family(name), *document) for document in documents(sample)]


def test_masks_of_chatml() -> None:
    head = (
        "<|im_start|>system\nbe"
        " kind<|im_end|>\n<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\na0<|im_end|>\n"
    )
    head += "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert shown("chatml", pair(("q0", "a0", "q"), "yes", "no, never", system="be kind")) == [
        head + "«yes<|im_end|>»\n",
        head + "«no, never<|im_end|>»\n",
    ]


def test_masks_of_qwen3() -> None:
    """The empty think block is written by the template behind the generation prompt, as in
    fine-tuning.
    """
    head = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert shown("qwen3", pair(("q",), "yes", "<think>\nt\n</think>\n\nno")) == [
        head + "«<think>\n\n</think>\n\nyes<|im_end|>»\n",
        head + "«<think>\nt\n</think>\n\nno<|im_end|>»\n",
    ]
    renderer = PreferenceRenderer(family("qwen3"), 4096, train_thinking=False)
    (sample,) = renderer(pair(("q",), "yes", "<think>\nt\n</think>\n\nno"))
    assert [marked(family("qwen3"), *document) for document in documents(sample)] == [
        head + "<think>\n\n</think>\n\n«yes<|im_end|>»\n",
        head + "<think>\nt\n</think>\n\n«no<|im_end|>»\n",
    ]


def test_masks_of_several_turns_behind_the_prompt() -> None:
    """What follows the turns that both begin with is trained; a question among it is context."""
    long, short = talk("q", "a", "q1", "a1").messages, talk("q", "b").messages
    (found,) = [
        PreferenceRenderer(family("chatml"), 4096)(
            Preference(long, prompt_turns=1, rejected=short)
        )[0]
    ]
    first = marked(family("chatml"), *documents(found)[0])
    assert first.endswith(
        "«a<|im_end|>»\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n"
    )


def test_a_labelled_answer_is_the_sample_that_fine_tuning_makes() -> None:
    messages = talk("q0", "a0", "q", "a").messages
    history = tuple(Message(turn.role, turn.content, trained=False) for turn in messages[:3])
    plain = Renderer(family("llama3"), 4096)(Conversation((*history, messages[3])))[0]
    for label in (True, False):
        preference = Preference((*history, messages[3]), prompt_turns=3, label=label)
        (sample,) = PreferenceRenderer(family("llama3"), 4096)(preference)
        assert sample.input_ids.tolist() == plain.input_ids.tolist() and sample.label == label
        assert sample.supervised.tolist() == plain.supervised.tolist() and sample.first_length == 0


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    history=st.lists(TEXT, max_size=4),
    question=TEXT,
    answers=st.tuples(TEXT, TEXT),
    shorter=st.integers(0, 60),
)
def test_whatever_is_said_both_documents_begin_with_the_same_tokens(
    name: str, history: list[str], question: str, answers: tuple[str, str], shorter: int
) -> None:
    prompt = (*history[: len(history) // 2 * 2], question)
    preference = pair(prompt, *answers)
    try:
        (sample,) = PreferenceRenderer(family(name), 4096)(preference)
    except RecordProblem as problem:  # the template takes off the white space in which they differ
        assert problem.kind == "equal answers" and answers[0].strip() == answers[1].strip()
        return
    chosen, rejected = documents(sample)
    assert prompt_of(*chosen) == prompt_of(*rejected)
    for document, answer in ((chosen, preference.messages), (rejected, preference.rejected)):
        alone = Renderer(family(name), 4096)(Conversation(answer))[0]
        decoded = [
            family(name).decode(ids[mask])
            for ids, mask in (document, (alone.input_ids, alone.supervised))
        ]
        assert decoded[0] == decoded[1]
        assert family(name).decode(document[0]) == family(name).decode(alone.input_ids)
    # And cut, down to what is hardly more than the template's own tokens.
    limit = max(20, max(len(chosen[0]), len(rejected[0])) - shorter)
    try:
        cut = PreferenceRenderer(family(name), limit)(preference)
    except DataError:
        return
    for one in cut:
        pieces = documents(one)
        assert all(len(ids) <= limit for ids, _ in pieces)
        if one.first_length and all(mask.any() for _, mask in pieces):
            assert prompt_of(*pieces[0]) == prompt_of(*pieces[1])
            assert (
                one.first_targets == pieces[0][1].sum()
                and pieces[0][0].tolist() != pieces[1][0].tolist()
            )


@pytest.mark.parametrize("model_family", FAMILIES, ids=lambda found: found.name)
def test_every_family_of_models_gives_one_prompt(model_family: Family, tmp_path: Path) -> None:
    renderer = PreferenceRenderer(make_family_tokenizer(model_family, tmp_path), 4096)
    for answers in (("a router", "1 hub"), ("什么", "A  b\n\nc"), ("I", "It")):
        (sample,) = renderer(pair(("What is it?",), *answers))
        chosen, rejected = documents(sample)
        assert prompt_of(*chosen) == prompt_of(*rejected) and chosen[1].any() and rejected[1].any()


def test_white_space_that_is_split_by_what_follows_is_cut_off_from_it() -> None:
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


# Truncation ---------------------------------------------------------------------------------------------------------

LONG = " ".join(map(str, range(200)))


def test_the_longer_document_decides_what_both_prompts_lose() -> None:
    renderer = PreferenceRenderer(family("chatml"), 160)
    (sample,) = renderer(pair((LONG,), "yes", "no " * 30))
    chosen, rejected = documents(sample)
    assert prompt_of(*chosen) == prompt_of(*rejected)
    assert len(rejected[0]) == 160 > len(chosen[0])
    assert marked(family("chatml"), *chosen).endswith("<|im_start|>assistant\n«yes<|im_end|>»\n")
    assert sample.trimmed_tokens > 0 and not sample.cut_answer
    assert marked(family("chatml"), *rejected).endswith("«" + "no " * 30 + "<|im_end|>»")
    # A short document alone would have kept more.
    (alone,) = Renderer(family("chatml"), 160)(talk(LONG, "yes"))
    assert len(alone.input_ids) > len(chosen[0])


def test_an_answer_that_does_not_fit_is_cut_and_the_other_stays() -> None:
    (sample,) = PreferenceRenderer(family("chatml"), 100)(pair((LONG,), "yes", "no " * 300))
    chosen, rejected = documents(sample)
    assert sample.cut_answer and len(rejected[0]) == 100 and rejected[1][-1]
    assert (
        prompt_of(*chosen) == prompt_of(*rejected) and chosen[1].sum() == sample.first_targets > 1
    )


def test_answers_that_differ_only_behind_the_cutoff_are_no_sample() -> None:
    renderer = PreferenceRenderer(family("chatml"), 100)
    assert renderer(pair(("q",), "no " * 300 + "a", "no " * 300 + "b")) == []
    with pytest.raises(RecordProblem, match="equal answers"):
        PreferenceRenderer(family("gemma"), 100)(pair(("q",), "a", "a "))  # whose template trims


def test_prompts_that_depend_on_the_answers_are_refused() -> None:
    """Mistral's system text stands before the last question, wherever that is."""
    sides = [talk("q", *turns, system="s").messages for turns in (("a", "q1", "a1"), ("b",))]
    with pytest.raises(RecordProblem, match="several samples of one side"):
        PreferenceRenderer(family("mistral"), 99)(
            Preference(sides[0], prompt_turns=2, rejected=sides[1])
        )


# On disk ------------------------------------------------------------------------------------------------------------


def rows_of(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{number} what is it?",
            "chosen": "a router " * (number % 5 + 1),
            "rejected": f"{number} hubs",
        }
        for number in range(count)
    ]


def prepare(path: Path, **options: Any) -> PreferenceSamples:
    options = {
        "cutoff_len": 64,
        "cache_dir": path.parent / "cache",
        "num_proc": 1,
        "preference": "pairs",
    } | options
    found = prepare_samples([path], family("chatml"), **options)
    assert isinstance(found, PreferenceSamples)
    return found


def test_samples_on_disk_are_pairs(tmp_path: Path) -> None:
    rows = rows_of(30)
    samples = prepare(write(tmp_path / "a.jsonl", rows))
    renderer = PreferenceRenderer(family("chatml"), 64)
    for index, (_, _, found) in enumerate(PreferenceReader().conversations(enumerate(rows))):
        assert isinstance(found, Preference)
        (expected,) = renderer(found)
        ids, supervised = samples[index]
        assert (
            ids.tolist() == expected.input_ids.tolist()
            and supervised.tolist() == expected.supervised.tolist()
        )
        first = int(samples.first_lengths[index])
        assert first == expected.first_length and 0 < first < samples.lengths[index] == len(ids)
        assert (
            samples.first_supervised[index]
            == supervised[:first].sum()
            < samples.supervised_counts[index]
        )
    assert (
        samples.first_lengths.dtype == samples.first_supervised.dtype == np.int32
        and samples.labels.dtype == np.int8
    )
    assert set(samples.labels.tolist()) == {-1} and samples.report.pairs == 30
    assert ("pairs", "30") in samples.report.lines()
    copy = pickle.loads(pickle.dumps(samples))
    assert (
        isinstance(copy, PreferenceSamples)
        and copy.first_lengths.tolist() == samples.first_lengths.tolist()
    )


def test_samples_on_disk_have_labels(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "completion": "a", "label": n % 3 == 0} for n in range(9)]
    samples = prepare(write(tmp_path / "a.jsonl", rows), preference="labels")
    assert samples.labels.tolist() == [1, 0, 0] * 3 and not samples.first_lengths.any()
    assert ("labels", "3 true, 6 false") in samples.report.lines()
    other = prepare(
        write(tmp_path / "b.jsonl", [{**row, "label": True} for row in rows]), preference="labels"
    )
    assert other.fingerprint != samples.fingerprint  # labels are part of the content


def test_processes_and_splits_give_the_same_pairs(tmp_path: Path) -> None:
    from finetune.data.selection import Selection

    path = write(tmp_path / "a.jsonl", rows_of(60) + rows_of(10))
    alone = prepare(path)
    assert prepare(path, num_proc=2, cache_dir=tmp_path / "other").fingerprint == alone.fingerprint
    sides = [
        prepare(path, selection=Selection(side, 0.3, drop_duplicates=True)).record_ids.tolist()
        for side in ("train", "valid")
    ]
    assert sorted(sides[0] + sides[1]) == list(range(60))


def test_bad_pairs_are_refused_by_file_and_line_or_counted(tmp_path: Path) -> None:
    same = "so " * 100
    bad = [
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        {"prompt": "q", "chosen": "a"},
        {"prompt": "q", "completion": "a", "label": True},
        {"prompt": "q", "chosen": "a", "rejected": "a", "x": 1},
    ]
    path = write(tmp_path / "a.jsonl", rows_of(3) + bad)
    with pytest.raises(DataError, match="4 of 7 records cannot be trained on") as caught:
        prepare(path)
    text = str(caught.value)
    assert (
        f"{path}:4: equal answers" in text
        and f"{path}:5: missing side" in text
        and f"{path}:6: a label" in text
    )
    assert not list((tmp_path / "cache").glob("*/meta.json"))
    # Equal only in the template, and equal within the cutoff: the one is a bad record, the other
    # has no room.
    late = [{"prompt": "q", "chosen": same + "a", "rejected": same + "b"}]
    samples = prepare(write(tmp_path / "b.jsonl", rows_of(3) + bad[:1] + late), on_bad_row="drop")
    assert samples.report.dropped == {"equal answers": 1, "answers equal within cutoff_len": 1}
    assert any(
        "pairs differ only behind the cutoff" in warning for warning in samples.report.warnings()
    )
    assert len(samples) == samples.report.records_kept == 3


def test_samples_of_fine_tuning_are_as_before(tmp_path: Path) -> None:
    """Neither arrays nor fingerprint of other samples know of preferences; the hash is that of the
    version before.
    """
    rows = [
        {"instruction": f"what is {number}?", "output": "a number " * (number % 4 + 1)}
        for number in range(20)
    ]
    path = write(tmp_path / "a.jsonl", rows)
    samples = prepare_samples(
        [path], family("chatml"), cutoff_len=64, cache_dir=tmp_path / "cache", num_proc=1
    )
    (meta,) = (tmp_path / "cache").glob("*/meta.json")
    assert sorted(file.stem.split("-")[0] for file in meta.parent.glob("*.*")) == [
        "files", "lengths", "levels", "lines", "meta", "offsets", "order", "row_ids",
        "supervised", "supervised_counts", "tokens",
    ]  # fmt: skip
    assert "preference" not in json.loads(meta.read_text())["parts"]["options"]
    assert samples.fingerprint == FINGERPRINT_BEFORE


FINGERPRINT_BEFORE = "e5bf4ecfe4038fa5459b35fd184b06216efd10850f3c8ae48ee1612111afc5bc"


def test_how_much_of_a_pair_is_there_twice(tmp_path: Path):
    """What docs/guides/preferences.md says of the bundled pairs: a quarter of the tokens are the second
    copy of a prompt.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data_samples" / "tiny-qwen3")
    data = [str(ROOT / "data_samples" / "preference_train.jsonl")]
    samples = prepare_samples(
        data, tokenizer, cutoff_len=2048, cache_dir=str(tmp_path), preference="pairs"
    )
    twice = 0
    for number, first in enumerate(samples.first_lengths.tolist()):
        ids, supervised = samples[number]
        prompt = int(supervised.argmax())
        assert ids[:prompt].tolist() == ids[first : first + prompt].tolist()
        twice += prompt
    assert round(100 * twice / int(samples.lengths.sum())) == 26
