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
def corpus(scripts: dict[str, ModuleType], tmp_path_factory) -> tuple[Path, Path]:
    """The first part and the valid file; the other parts differ by their draws."""
    (part,), valid = scripts["corpus"].write_corpus(tmp_path_factory.mktemp("corpus"), parts=1)
    return part, valid


def conversations(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer(scripts: dict[str, ModuleType], corpus: tuple[Path, Path]) -> Any:
    return trained(scripts["tokenizer"], corpus)


def trained(script: ModuleType, corpus: tuple[Path, Path]) -> Any:
    texts = script.read_texts([FOLDER / "train.jsonl", *corpus])
    return script.train_tokenizer(texts, vocab_size=4096)


def test_corpus_is_reproducible_balanced_and_apart_from_what_is_shipped(
    scripts: dict[str, ModuleType], corpus: tuple[Path, Path]
) -> None:
    names = ("train.jsonl", "valid.jsonl", "preference_train.jsonl", "preference_valid.jsonl")
    shipped = [row for name in names for row in read_records(name)]
    taken = {prompt(row) for row in shipped}
    taken |= {row["output"] for row in shipped if "output" in row and "answer" not in row}
    make, valid = scripts["corpus"], conversations(corpus[1])
    asked_there = make.asked_in([{"messages": messages} for messages in valid])
    again = (make.corpus_rows("0", 20000, asked_there), make.corpus_rows("valid", 200))
    requests = {request for forms in make.REQUESTS.values() for request in forms}
    asked: list[set[str]] = []
    for path, rows in zip(corpus, again, strict=True):
        found = conversations(path)
        assert [{"messages": messages} for messages in found] == rows
        assert not taken & {message["content"] for messages in found for message in messages}
        users = [[m["content"] for m in messages if m["role"] == "user"] for messages in found]
        assert {len(turns) for turns in users} == {1, 2, 3}
        # Sums and addresses are often the same in both languages.
        assert 0.3 < sum(chinese("".join(turns)) for turns in users) / len(rows) < 0.6
        asked.append({turn for turns in users for turn in turns} - requests)
    assert not asked[0] & asked[1]


def test_tokenizer_is_reproducible_and_lossless(
    scripts: dict[str, ModuleType], tokenizer: Any, corpus: tuple[Path, Path]
) -> None:
    again = trained(scripts["tokenizer"], corpus)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == 4096
    texts = [
        "10.20.30.40/27 的广播地址\n答案：1",
        "  two  spaces\ttab",
        "emoji 🛰 and é",
        "<|im_end",
    ]
    texts += [f"{prompt(row)}\n{row['output']}" for row in read_records("train.jsonl")]
    assert [tokenizer.decode(tokenizer(text)["input_ids"]) for text in texts] == texts
    for token in tokenizer.get_vocab():
        assert len(token) == 1 or not set(token) & set("0123456789"), token


def test_special_tokens_and_template(tokenizer: Any) -> None:
    assert tokenizer.pad_token == "<|endoftext|>" != tokenizer.eos_token == "<|im_end|>"
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered == "".join(
        f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns
    )
    ids = tokenizer.apply_chat_template(turns[1:2], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    assert ids.count(tokenizer.eos_token_id) == 1
    with pytest.raises(Exception, match="unknown role: robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "u"}])


def test_the_documents_are_the_conversations_in_the_template(
    scripts: dict[str, ModuleType], corpus: tuple[Path, Path], tokenizer: Any, tmp_path: Path
) -> None:
    path = scripts["base"].write_documents(corpus[1], tokenizer, tmp_path / "documents.jsonl")
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    form = "<|im_start|>{role}\n{content}<|im_end|>\n"
    found = conversations(corpus[1])
    assert texts == ["".join(form.format_map(turn) for turn in messages) for messages in found]


def test_the_bundled_model_is_what_its_script_makes(
    scripts: dict[str, ModuleType], tokenizer: Any, tmp_path: Path
) -> None:
    """Its shape is that of `pretrain --arch qwen3` at the recipe's depth, its tokenizer that of
    make_tokenizer.py.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, folder = scripts["base"], FOLDER / "tiny-qwen3"
    model = AutoModelForCausalLM.from_pretrained(folder)
    opened = AutoTokenizer.from_pretrained(folder)
    # By hand, per layer: q, k, v and o, the gated MLP, the norms before attention and MLP, the
    # norms of q and k.
    layer = 4 * 256 * 256 + 3 * 256 * 704 + 2 * 256 + 2 * 128
    depth = base.RUN_SETTINGS["depth"]
    assert model.num_parameters() == 2 * 4096 * 256 + depth * layer + 256
    assert model.config.model_type == base.RUN_SETTINGS["arch"]
    assert model.config.vocab_size == len(opened) == 4096
    assert opened.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    recipe = (folder / "RECIPE.md").read_text(encoding="utf-8")
    assert all(f"| {name} | {value} |" in recipe for name, value in base.RUN_SETTINGS.items())
    path = tmp_path / "RECIPE.md"
    base.write_recipe(path, 1312128, {"loss": 0.5, "eval_bpb": 0.75}, steps=2)
    text = path.read_text(encoding="utf-8")
    assert "| eval_bpb | 0.7500 |" in text and "| num_iterations | 2 |" in text
    assert str(tmp_path) not in text
