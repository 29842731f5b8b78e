"""Bits per byte against one forward per window in float64, a pretraining run's own evaluation, and
lm_eval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import run_helpers
import torch
from conftest import WORDS, make_records
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from finetune.__main__ import main as finetune
from finetune.commands.evaluate.text_bits import TextWindows
from finetune.commands.prepare import command as prepare

FROZEN = ROOT / "tests" / "frozen" / "eval.txt"


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    code = finetune(
        ["eval", *map(str, arguments), "--device-type", "cpu", "--dtype", "float32", "--json"]
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def naive_nats(model: torch.nn.Module, ids: Sequence[int], window: int, stride: int) -> float:
    """In float64, one forward for each window: what precedes a target is as long as a window
    allows.
    """
    nats, scored = 0.0, 1
    while scored < len(ids):
        end = min(len(ids), scored + (window if scored == 1 else stride))
        start = max(0, end - 1 - window)
        with torch.no_grad():
            logits = model(torch.tensor([ids[start : end - 1]])).logits[0]
        for place in range(scored, end):
            nats -= logits[place - 1 - start].log_softmax(-1)[ids[place]].item()
        scored = end
    return nats


@given(st.lists(st.integers(2, 40), min_size=1, max_size=5), st.integers(1, 12), st.integers(1, 12))
def test_every_token_is_a_target_once(lengths: list[int], window: int, stride: int):
    windows = TextWindows(
        [np.arange(n, dtype=np.int32) for n in lengths], window, min(stride, window)
    )
    counts = [np.zeros(n, dtype=int) for n in lengths]
    for number in range(len(windows)):
        ids, targets = windows[number]
        assert len(ids) == windows.lengths[number] + 1 <= window + 1
        assert targets.sum() == windows.supervised_counts[number] and not targets[0]
        assert ids[0] == 0 or len(ids) == window + 1  # no shorter than it may be
        counts[windows.record_ids[number]][ids[targets]] += 1
    assert all(count.tolist() == [0] + [1] * (len(count) - 1) for count in counts)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, write_rows: Callable) -> tuple[Path, Path]:
    """Records, one of them white space; and a long document in two languages with what looks like
    special tokens.
    """
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"text": row["output"]} for row in make_records(12)]
    records = write_rows(folder / "records.jsonl", [*rows, {"text": " \n"}])
    long = folder / "long.txt"
    long.write_text(
        "\n".join(
            f"{number} {row['output']} <|im_end|>" for number, row in enumerate(make_records(9))
        )
    )
    return records, long


@pytest.mark.frozen
@pytest.mark.parametrize(("window", "stride"), [(500, 500), (64, 64), (64, 24)])
def test_by_definition(
    window: int, stride: int, tiny_model: Path, texts: tuple[Path, Path], capsys
):
    result = evaluate(
        capsys, "--model", tiny_model, "--text", *texts, "--max-seq-len", window, "--stride", stride
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    begin = (
        tokenizer.bos_token_id
        if tokenizer.bos_token_id is not None
        else tokenizer.get_vocab()["<|endoftext|>"]
    )
    plain = [json.loads(line)["text"] for line in texts[0].open()][:-1]
    nats = total_bytes = 0.0
    for name, documents in (("records.jsonl", plain), ("long.txt", [texts[1].read_text()])):
        ids = [
            tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            for text in documents
        ]
        mine = sum(naive_nats(model, [begin, *one], window, stride) for one in ids)
        size = sum(len(text.encode()) for text in documents)
        found = result["models"][0]["text"]["files"][name]
        assert found["nats"] == pytest.approx(mine, rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(mine / math.log(2) / size, rel=1e-5)
        assert found == {
            **found,
            "documents": len(documents),
            "bytes": size,
            "tokens": sum(map(len, ids)),
        }
        nats, total_bytes = nats + mine, total_bytes + size
    assert result["models"][0]["text"]["overall"]["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / total_bytes, rel=1e-5
    )
    assert result["text"] == {
        "files": ["records.jsonl", "long.txt"], "documents": 13, "max_seq_len": window, "stride": stride,
    }  # fmt: skip
    frozen = dict(
        line.split(": ")
        for line in FROZEN.read_text().splitlines()
        if ": " in line and line[0] != "#"
    )
    shapes = {"asked_text": result["text"], "text": result["models"][0]["text"], "bits": found}
    assert {name: set(shape) for name, shape in shapes.items()} == {
        name: set(frozen[name].split()) for name in shapes
    }
    assert result["data"] is None and str(texts[0].parent) not in json.dumps(result)


def test_as_the_pretraining_run_itself(tmp_path: Path, write_rows: Callable, capsys):
    """Where its windows lie within documents, as those of one document that is whole windows do."""
    length = 24
    train = write_rows(
        tmp_path / "train.jsonl", [{"text": row["output"]} for row in make_records(80)]
    )
    flags = ["--num-workers", "1", "--valid-fraction", "0"]
    prepared = [
        "--data",
        str(train),
        "--output-dir",
        str(tmp_path / "train"),
        "--vocab-size",
        "300",
        *flags,
    ]
    assert prepare.main(prepared) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "train" / "tokenizer")
    valid = write_rows(tmp_path / "valid.jsonl", [{"text": of_length(tokenizer, 5 * length)}])
    own = ["--tokenizer", str(tmp_path / "train" / "tokenizer"), *flags]
    assert prepare.main(["--data", str(valid), "--output-dir", str(tmp_path / "valid"), *own]) == 0
    (shard,) = (tmp_path / "valid").glob("*.bin")
    run = tmp_path / "run"
    run_helpers.train(
        {
            "train_data_path": str(tmp_path / "train"), "valid_data_path": str(shard), "output_dir": str(run),
            "depth": 1, "max_seq_len": length, "device_batch_size": 2,
            "total_batch_size": 4 * length, "num_iterations": 8, "eval_steps": 8, "lr_scaling": False,
            "embedding_lr": 0.05, "dtype": "float32", "device_type": "cpu", "report_to": "none",
        },
        module="finetune.pretrain",
    )  # fmt: skip
    capsys.readouterr()
    result = evaluate(capsys, "--model", run, "--text", valid)
    first, *_, last = run_helpers.events(run, "eval")
    assert result["models"][0]["text"]["overall"]["bits_per_byte"] == pytest.approx(
        last["eval_bpb"], rel=1e-6
    )
    assert last["eval_bpb"] < first["eval_bpb"] and result["text"]["max_seq_len"] == length


def of_length(tokenizer, tokens: int) -> str:
    """A text of so many tokens."""
    words = np.random.default_rng(0).choice(WORDS, 40 * tokens)
    for count in range(1, len(words)):
        text = " ".join(words[:count])
        for more in ("", ".", "..", " ?!"):
            if len(tokenizer(text + more, add_special_tokens=False)["input_ids"]) == tokens:
                return text + more
    raise AssertionError("no such text")


def test_windows_of_lm_eval(
    tiny_model: Path, texts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
):
    """Its rolling log-likelihood has the same windows, where the first token is the same."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    result = evaluate(capsys, "--model", tiny_model, "--text", texts[0], "--max-seq-len", 40)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    begin = (
        tokenizer.bos_token_id
        if tokenizer.bos_token_id is not None
        else tokenizer.get_vocab()["<|endoftext|>"]
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    theirs = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        max_length=40,
        prefix_token_id=begin,
    )
    plain = [json.loads(line)["text"] for line in texts[0].open()][:-1]
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in plain]
    logs = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert result["models"][0]["text"]["overall"]["nats"] == pytest.approx(-sum(logs), rel=1e-5)


def test_as_many_positions_as_the_model_has(
    tiny_model: Path, texts: tuple[Path, Path], tmp_path: Path, capsys
):
    """Learned positions end where the window does."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.chat_template = None  # which predicting text does not need
    tokenizer.save_pretrained(tmp_path)
    result = evaluate(capsys, "--model", tmp_path, "--text", texts[0])
    assert result["text"]["max_seq_len"] == 32
    assert result["models"][0]["text"]["overall"]["bits_per_byte"] > 0


def test_the_table_has_a_line_a_text(
    tiny_model: Path, texts: tuple[Path, Path], tmp_path: Path, capsys
):
    flags = (
        "--model",
        tiny_model,
        "--text",
        *texts,
        "--max-seq-len",
        64,
        "--output",
        tmp_path / "out",
    )
    result = evaluate(capsys, *flags)
    assert result["differences"] == []
    table = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split(" | ")[:3] for line in table[2:]] == [
        ["| bits per byte", "records.jsonl", "12"],
        ["| bits per byte", "long.txt", "1"],
        ["| bits per byte", "all", "13"],
    ]
    assert not (tmp_path / "out" / "generations.jsonl").exists()


def test_what_is_no_text_is_refused(tiny_model: Path, write_rows: Callable, tmp_path: Path, capsys):
    def refused(*words: object) -> str:
        assert (
            finetune(["eval", "--model", str(tiny_model), "--device-type", "cpu", *map(str, words)])
            == 2
        )
        out, err = capsys.readouterr()
        assert not out and "fix:" in err
        return err

    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a router"}, {"texts": "a switch"}])
    assert "rows.jsonl:2" in refused("--text", rows)
    assert "--text-field texts" in refused("--text", rows)
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n")
    assert "there is no text" in refused("--text", blank)
    assert "no such file" in refused("--text", tmp_path / "none.txt")
    assert "made for 512" in refused("--text", rows, "--max-seq-len", 513)
    assert "more than a window of 8" in refused("--text", rows, "--max-seq-len", 8, "--stride", 9)
    flags = ["--text", str(rows), "--on-bad-row", "drop", "--device-type", "cpu"]
    assert finetune(["eval", "--model", str(tiny_model), *flags]) == 0
    out, err = capsys.readouterr()
    assert (
        "1 records or files without text are left out" in err
        and "| bits per byte | rows.jsonl | 1 |" in out
    )
