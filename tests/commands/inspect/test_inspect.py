"""`python -m finetune inspect`: what is shown, and that it can be trusted on a terminal and in a
pipe.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from chat_models import SPECIALS, TEMPLATES, family, make_tokenizer, render
from rich.console import Console

from finetune.commands.inspect.command import main, marked_text, show
from finetune.data.dataset import prepare_samples
from finetune.errors import ConfigError, DataError, FinetuneError


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    make_tokenizer(TEMPLATES["chatml"], SPECIALS["chatml"]).save_pretrained(tmp_path / "model")
    rows = [
        {"instruction": f"question {number}", "output": f"answer {number}", "difficulty": level}
        for number, level in enumerate(
            ["explain", "topology", "explain", "topology", "reasoning", "explain"]
        )
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    cache_dir = str(tmp_path / "cache")
    return [
        "--model",
        str(tmp_path / "model"),
        "--data",
        str(path),
        "--cutoff-len",
        "64",
        "--cache-dir",
        cache_dir,
    ]


def test_records_are_shown_with_their_location_and_what_is_trained(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert "records read" in shown and "difficulty topology" in shown
    assert (
        "record 0  difficulty explain" in shown
        and "record 1  difficulty topology" in shown
        and "record 2 " not in shown
    )
    assert f"{tmp_path / 'train.jsonl'}:2" in shown.replace("\n", "")
    assert (
        "<|im_start|>user\nquestion 1<|im_end|>\n<|im_start|>assistant\n[[answer 1<|im_end|>]]\n"
        in shown
    )
    assert "\x1b" not in shown, "no colours in a pipe"


def test_records_can_be_chosen(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--level", "topology"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("record ")] == [
        "1",
        "3",
    ]
    assert main([*arguments, "--row", "4"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("record ")] == ["4"]
    assert main([*arguments, "--rows", "0"]) == 0
    assert "question" not in capsys.readouterr().out


def test_wrong_choices_are_refused(arguments: list[str]) -> None:
    with pytest.raises(DataError, match="unknown difficulty 'topolgy'; did you mean 'topology'"):
        main([*arguments, "--level", "topolgy"])
    with pytest.raises(DataError, match="record 6 is not among the samples") as caught:
        main([*arguments, "--row", "6"])
    assert "records are 0 to 5" in caught.value.fix
    with pytest.raises(FinetuneError, match="unknown flag --cutof-len"):
        main([*arguments, "--cutof-len", "64"])
    for option in ("rows", "row"):
        with pytest.raises(ConfigError, match=f"{option} is 'many'"):
            main([*arguments, f"--{option}", "many"])


def test_colours_on_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(
        json.dumps({"instruction": "q", "output": "a \x1b[31m b\x07"}) + "\n", encoding="utf-8"
    )
    samples = prepare_samples(
        [path], family("chatml"), cutoff_len=128, cache_dir=tmp_path / "cache", num_proc=1
    )
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", highlight=False)
    show(samples, 0, family("chatml"), console)
    shown = stream.getvalue()
    assert "\x1b[1;32ma \\x1b[31m b\\x07<|im_end|>\x1b[0m" in shown, (
        "trained is green; the record's controls are words"
    )
    assert "[[" not in shown


def test_both_answers_of_a_pair_are_shown(tmp_path: Path) -> None:
    pairs, labels = tmp_path / "pairs.jsonl", tmp_path / "labels.jsonl"
    pairs.write_text(
        json.dumps({"prompt": "q", "chosen": "yes", "rejected": "not"}) + "\n", encoding="utf-8"
    )
    labels.write_text(
        json.dumps({"prompt": "q", "completion": "not", "label": False}) + "\n", encoding="utf-8"
    )
    shown = io.StringIO()
    console = Console(file=shown, highlight=False)
    forms: list[tuple[Path, Literal["pairs", "labels"]]] = [(pairs, "pairs"), (labels, "labels")]
    for path, preference in forms:
        options: dict[str, Any] = {
            "cutoff_len": 128,
            "cache_dir": tmp_path / "cache",
            "num_proc": 1,
        }
        samples = prepare_samples([path], family("gemma"), preference=preference, **options)
        show(samples, 0, family("gemma"), console)
    answer = "<s><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n[[{}<end_of_turn>]]\n\n"
    chosen, rejected, judged = re.findall(
        r"(?:chosen|rejected|label false)(?:  .*)?\n(?=<s>)", shown.getvalue()
    )
    for name, text in ((chosen, "yes"), (rejected, "not"), (judged, "not")):
        assert name + answer.format(text) in shown.getvalue()
        assert re.search(r"\d+ tokens, \d trained", name)


def test_a_loss_tells_that_the_records_are_preferences(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(
        json.dumps({"prompt": "q", "chosen": "yes", "rejected": "not"}) + "\n", encoding="utf-8"
    )
    assert main([*arguments, "--loss", "dpo"]) == 0
    assert re.search(r"chosen .*\[\[yes<.*rejected .*\[\[not<", capsys.readouterr().out, re.DOTALL)
    with pytest.raises(DataError, match="train.jsonl:1: a pair, not a label"):
        main([*arguments, "--loss", "kto"])
    with pytest.raises(ConfigError, match="the audit reads one answer a record"):
        main([*arguments, "--loss", "dpo", "--audit"])
    with pytest.raises(DataError, match="no 'completion' or 'response'"):
        main(arguments)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_marked_text_is_the_whole_text(name: str) -> None:
    from chat_models import talk

    (sample,) = render(talk("什么是路由器？", "转发 数据包。", "and?", "yes"), family(name), 4096)
    text = marked_text(family(name), sample.input_ids, sample.supervised, brackets=False).plain
    assert text == family(name).decode(sample.input_ids)
    bracketed = marked_text(family(name), sample.input_ids, sample.supervised, brackets=True).plain
    assert bracketed.count("[[") == bracketed.count("]]") == 2
    assert bracketed.replace("[[", "").replace("]]", "") == text


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom finetune.commands.inspect.command import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as ended:\n    assert ended.code == 0\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'datasets')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: python -m finetune inspect" in done.stdout


def test_what_a_start_would_refuse_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens that the model has no embedding for, behind the samples that show them."""
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 100}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="has only 100 embeddings") as refused:
        main(arguments)
    assert refused.value.where == f"{tmp_path / 'train.jsonl'}:1"
    assert "question 1" in capsys.readouterr().out


def test_placeholders_in_answers_are_counted(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a template engine, in answers that are trained; not braces of code, or questions."""
    answers = ["I am {{name}}.", "By {{ author }}", "print('{{}}'.format({{1: 2}}))", "{{a.b}}"]
    rows = [{"instruction": "Are you {{name}}?", "output": answer} for answer in answers]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*arguments, "--rows", "0"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "answers with {{name}} or the like 2 " in shown
