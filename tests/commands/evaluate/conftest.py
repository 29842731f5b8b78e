"""`eval` as tests call it, and the names that it has promised."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from launching import ROOT

from finetune.__main__ import main as finetune


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Runs `eval` on the CPU: what it prints, and its messages."""

    def run(*words: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        ours = ["--device-type", "cpu", "--cache-dir", os.environ["HF_DATASETS_CACHE"]]
        found = finetune(["eval", *map(str, words), *ours])
        out, err = capsys.readouterr()
        assert found == code and "Traceback" not in err, err
        return out, err

    return run


@pytest.fixture
def evaluate(command: Callable[..., tuple[str, str]]) -> Callable[..., dict]:
    return lambda *words: json.loads(command(*words, "--dtype", "float32", "--json")[0])


@pytest.fixture
def refused(command: Callable[..., tuple[str, str]]) -> Callable[..., str]:
    def run(*words: object) -> str:
        out, err = command(*words, code=2)
        assert not out and "fix:" in err
        return err

    return run


@pytest.fixture(scope="session")
def plain_answer() -> Callable[..., str]:
    """What plain transformers says to a conversation; limits as of `generate`."""

    def answer(model: Any, tokenizer: Any, turns: list[dict[str, str]], **limits: int) -> str:
        inputs = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
        limits |= {"eos_token_id": ends, "pad_token_id": 0}
        ids = model.generate(**inputs, do_sample=False, **limits)
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


@pytest.fixture(scope="session")
def frozen() -> dict[str, set[str]]:
    """The names of each object of the JSON."""
    lines = (ROOT / "tests" / "frozen" / "eval.txt").read_text().splitlines()
    pairs = [line.split(": ") for line in lines if ": " in line and line[0] != "#"]
    return {name: set(words.split()) for name, words in pairs}
