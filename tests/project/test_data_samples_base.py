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
    texts = scripts["tokenizer"].read_texts([FOLDER / "train.jsonl", *corpus])
    return scripts["tokenizer"].train_tokenizer(texts, vocab_size=4096)


def test_the_corpus_is_balanced_and_apart_from_what_is_shipped(
    scripts: dict[str, ModuleType], corpus: tuple[Path, Path]
) -> None:
    """That it is reproducible is seen in the bundled model's tokenizer, which is made of it."""
    names = ("train.jsonl", "valid.jsonl", "preference_train.jsonl", "preference_valid.jsonl")
    shipped = [row for name in names for row in read_records(name)]
    taken = {prompt(row) for row in shipped}
    taken |= {row["output"] for row in shipped if "output" in row and "answer" not in row}
    requests = {one for forms in scripts["corpus"].REQUESTS.values() for one in forms}
    asked: list[set[str]] = []
    for found in map(conversations, corpus):
        assert not taken & {message["content"] for messages in found for message in messages}
        users = [[m["content"] for m in messages if m["role"] == "user"] for messages in found]
        assert {len(turns) for turns in users} == {1, 2, 3}
        # Sums and addresses are often the same in both languages.
        assert 0.3 < sum(chinese("".join(turns)) for turns in users) / len(found) < 0.6
        asked.append({turn for turns in users for turn in turns} - requests)
    assert not asked[0] & asked[1]


def test_the_tokenizer_is_lossless_and_splits_digits(tokenizer: Any) -> None:
    texts = ["10.20.30.40/27 的广播地址\n答案：1", "  two  spaces\ttab", "🛰 and é", "<|im_end"]
    texts += [f"{prompt(row)}\n{row['output']}" for row in read_records("valid.jsonl")]
    assert [tokenizer.decode(tokenizer(text)["input_ids"]) for text in texts] == texts
    for token in tokenizer.get_vocab():
        assert len(token) == 1 or not set(token) & set("0123456789"), token


def test_the_bundled_model_is_what_its_script_makes(
    scripts: dict[str, ModuleType], tokenizer: Any
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
