"""`python -m finetune inspect`: what is shown, and that it can be trusted on a terminal and in a
pipe.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_models import SPECIALS, TEMPLATES, family, make_tokenizer
from rich.console import Console
from sample_rows import write_rows

from finetune.commands.inspect.command import main, show
from finetune.data.dataset import prepare_samples
from finetune.errors import DataError, FinetuneError

LEVELS = ("explain", "topology", "explain", "topology", "reasoning", "explain")
ROWS = [
    {"instruction": f"question {number}", "output": f"answer {number}", "difficulty": level}
    for number, level in enumerate(LEVELS)
]
PAIR = {"prompt": "q", "chosen": "yes", "rejected": "not"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(TEMPLATES["chatml"], SPECIALS["chatml"]).save_pretrained(folder)
    return folder


@pytest.fixture
def inspected(model: Path, tmp_path: Path, capsys) -> Any:
    """What is shown of a few rows."""

    def call(words: str = "", rows: list[dict[str, Any]] = ROWS, model: Path = model) -> str:
        path = write_rows(tmp_path / "train.jsonl", rows)
        given = f"--model {model} --data {path} --cutoff-len 64 --cache-dir {tmp_path / 'cache'}"
        assert main(f"{given} --on-bad-row drop {words}".split()) == 0
        return capsys.readouterr().out

    return call


def records_in(shown: str) -> list[int]:
    return [int(line.split()[1]) for line in shown.splitlines() if line.startswith("record ")]


def test_records_are_shown_with_their_location_and_what_is_trained(inspected: Any, tmp_path: Path):
    shown = inspected("--rows 2")
    assert records_in(shown) == [0, 1] and "record 1  difficulty topology" in shown
    assert f"{tmp_path / 'train.jsonl'}:2" in shown.replace("\n", "")
    sample = "user\nquestion 1<|im_end|>\n<|im_start|>assistant\n[[answer 1<|im_end|>]]\n"
    assert f"<|im_start|>{sample}" in shown
    assert "records read" in shown and "\x1b" not in shown, "no colours in a pipe"
    # placeholders of a template engine, in answers that are trained; not braces of code
    answers = ["I am {{name}}.", "By {{ author }}", "print('{{}}'.format({{1: 2}}))", "{{a.b}}"]
    rows = [{"instruction": "Are you {{name}}?", "output": answer} for answer in answers]
    shown = " ".join(inspected("--rows 0", rows).replace("│", " ").split())
    assert "answers with {{name}} or the like 2 " in shown


def test_records_can_be_chosen(inspected: Any):
    rows = [{"instruction": "q", "output": ""}, *ROWS[1:]]  # the first is dropped
    for words, chosen in (("--level topology", [1, 3]), ("--row 4", [4]), ("--rows 0", [])):
        shown = inspected(words, rows)
        assert records_in(shown) == chosen and ("question" in shown) == bool(chosen)
    for words, said in (
        ("--level topolgy", "unknown difficulty 'topolgy'; did you mean 'topology'"),
        ("--row 6", "(?s)record 6 is not among the samples.*records are 0 to 5"),
        ("--row 0", "record 0 is not among the samples"),
        ("--rows many", "rows is 'many'"),
    ):
        with pytest.raises(FinetuneError, match=said):
            inspected(words, rows)


def test_colours_on_a_terminal(tmp_path: Path):
    path = write_rows(tmp_path / "x.jsonl", [{"instruction": "q", "output": "a \x1b[31m b\x07"}])
    options: dict[str, Any] = {"cutoff_len": 128, "cache_dir": tmp_path, "num_proc": 1}
    samples = prepare_samples([path], family("chatml"), **options)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", highlight=False)
    show(samples, 0, family("chatml"), console)
    # trained is green; the record's controls are words
    assert "\x1b[1;32ma \\x1b[31m b\\x07<|im_end|>\x1b[0m" in stream.getvalue()
    assert "[[" not in stream.getvalue()


def test_a_loss_tells_that_the_records_are_preferences(inspected: Any):
    shown = inspected("--loss dpo", [PAIR])
    shown += inspected("--loss kto", [{"prompt": "q", "completion": "so", "label": False}])
    for name, text in (("chosen", "yes"), ("rejected", "not"), ("label false", "so")):
        document = shown.split(f"\n{name}  ")[1]
        assert re.match(r"\d+ tokens, \d+ trained\n<\|im_start\|>system", document)
        assert document.partition("q<|im_end|>\n<|im_start|>assistant\n")[2].startswith(
            f"[[{text}<|im_end|>]]\n"
        )
    for words, said in (
        ("--loss dpo --audit", "the audit reads one answer a record"),
        ("--loss kto --on-bad-row refuse", "train.jsonl:1: a pair, not a label"),
        ("--on-bad-row refuse", "no 'completion' or 'response'"),
    ):
        with pytest.raises(FinetuneError, match=said):
            inspected(words, [PAIR])


def test_what_a_start_would_refuse_is_refused(inspected: Any, model: Path, tmp_path: Path, capsys):
    """Tokens that the model has no embedding for, behind the samples that show them."""
    small = shutil.copytree(model, tmp_path / "small")
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 100}
    (small / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="has only 100 embeddings") as refused:
        inspected(model=small)
    assert refused.value.where == f"{tmp_path / 'train.jsonl'}:1"
    assert "question 1" in capsys.readouterr().out
