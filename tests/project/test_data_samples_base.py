"""The base model's corpus, tokenizer and starting point."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sample_rows import FOLDER, chinese, prompt, read_records


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The modules of data_samples/generators, which import one another as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / "generators"))
        import make_base_model
        import make_corpus
        import make_tokenizer

        yield {"base": make_base_model, "corpus": make_corpus, "tokenizer": make_tokenizer}


@pytest.fixture(scope="module")
def corpus(
    scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The first part and the valid file; the other parts differ by their draws."""
    (part,), valid = scripts["corpus"].write_corpus(tmp_path_factory.mktemp("corpus"), parts=1)
    return part, valid


@pytest.fixture(scope="module")
def tokenizer(scripts: dict[str, ModuleType], corpus: tuple[Path, Path]) -> Any:
    return scripts["tokenizer"].train_tokenizer(
        scripts["tokenizer"].read_texts([FOLDER / "train.jsonl", *corpus]), vocab_size=4096
    )


def test_corpus_holds_no_shipped_question_and_no_fact(corpus: tuple[Path, Path]) -> None:
    names = ("train.jsonl", "valid.jsonl", "preference_train.jsonl", "preference_valid.jsonl")
    shipped = [row for name in names for row in read_records(name)]
    explained = [row["output"] for row in shipped if "output" in row and "answer" not in row]
    questions, facts = {prompt(row) for row in shipped}, set(explained)
    for path in corpus:
        for line in path.read_text(encoding="utf-8").splitlines():
            for message in json.loads(line)["messages"]:
                assert message["content"] not in questions
                assert message["content"] not in facts


def test_corpus_is_reproducible_balanced_and_split(
    scripts: dict[str, ModuleType], corpus: tuple[Path, Path]
) -> None:
    taken = scripts["corpus"].asked_in(
        [json.loads(line) for line in corpus[1].read_text("utf-8").splitlines()]
    )
    again = (
        scripts["corpus"].corpus_rows("0", 20000, taken),
        scripts["corpus"].corpus_rows("valid", 200),
    )
    requests = {request for forms in scripts["corpus"].REQUESTS.values() for request in forms}
    asked: list[set[str]] = []
    for path, rows in zip(corpus, again, strict=True):
        assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == rows
        users = [[m["content"] for m in row["messages"] if m["role"] == "user"] for row in rows]
        assert {len(turns) for turns in users} == {1, 2, 3}
        # Sums and addresses are often the same in both languages.
        assert 0.3 < sum(chinese("".join(turns)) for turns in users) / len(rows) < 0.6
        asked.append({turn for turns in users for turn in turns} - requests)
    assert not asked[0] & asked[1]


def test_tokenizer_is_reproducible_and_lossless(
    scripts: dict[str, ModuleType], tokenizer: Any, corpus: Any
) -> None:
    again = scripts["tokenizer"].train_tokenizer(
        scripts["tokenizer"].read_texts([FOLDER / "train.jsonl", *corpus]), vocab_size=4096
    )
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == 4096
    for text in (
        "10.20.30.40/27 的广播地址\n答案：1",
        "  two  spaces\ttab",
        "emoji 🛰 and é",
        "<|im_end",
        *rows_as_text(),
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def rows_as_text() -> list[str]:
    return [f"{prompt(row)}\n{row['output']}" for row in read_records("train.jsonl")]


def test_tokenizer_splits_digits_and_keeps_special_tokens_apart(tokenizer: Any) -> None:
    assert tokenizer.pad_token == "<|endoftext|>" != tokenizer.eos_token == "<|im_end|>"
    for token in tokenizer.get_vocab():
        assert len(token) == 1 or not set(token) & set("0123456789"), token
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"},
        ],
        tokenize=False,
    )
    assert rendered == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "u"}], add_generation_prompt=True
    )["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert (
        ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
        and ids.count(tokenizer.eos_token_id) == 1
    )
    with pytest.raises(Exception, match="unknown role: robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "u"}])


def test_the_documents_are_the_conversations_in_the_template(
    scripts: dict[str, ModuleType], corpus: tuple[Path, Path], tokenizer: Any, tmp_path: Path
) -> None:
    path = scripts["base"].write_documents(corpus[1], tokenizer, tmp_path / "documents.jsonl")
    rows = [
        json.loads(line)["messages"] for line in corpus[1].read_text(encoding="utf-8").splitlines()
    ]
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert texts == [
        "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in messages
        )
        for messages in rows
    ]


def test_the_bundled_model_is_what_its_script_makes(
    scripts: dict[str, ModuleType], tokenizer: Any
) -> None:
    """Its shape is that of `pretrain --arch qwen3` at the recipe's depth, its tokenizer that of
    make_tokenizer.py.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = scripts["base"].RUN_SETTINGS
    folder = FOLDER / "tiny-qwen3"
    model, opened = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    # By hand, per layer: q, k, v and o, the gated MLP, the norms before attention and MLP, the
    # norms of q and k.
    layer = 4 * 256 * 256 + 3 * 256 * 704 + 2 * 256 + 2 * 128
    assert model.num_parameters() == 2 * 4096 * 256 + settings["depth"] * layer + 256
    assert (
        model.config.model_type == settings["arch"]
        and model.config.vocab_size == len(opened) == 4096
    )
    assert opened.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    recipe = (folder / "RECIPE.md").read_text(encoding="utf-8")
    assert all(f"| {name} | {value} |" in recipe for name, value in settings.items())


def test_recipe_names_settings_and_losses(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    scripts["base"].write_recipe(
        tmp_path / "RECIPE.md", 1312128, {"loss": 0.5, "eval_bpb": 0.75}, steps=2
    )
    text = (tmp_path / "RECIPE.md").read_text(encoding="utf-8")
    assert (
        "| eval_bpb | 0.7500 |" in text
        and "| num_iterations | 2 |" in text
        and str(tmp_path) not in text
    )
