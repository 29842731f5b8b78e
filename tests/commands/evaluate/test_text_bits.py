"""Bits per byte against one forward per window in float64, and lm_eval."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conftest import make_records
from transformers import AutoModelForCausalLM, AutoTokenizer


def naive_nats(model: torch.nn.Module, ids: Sequence[int], window: int, stride: int) -> float:
    """In float64, one forward for each window."""
    nats, scored = 0.0, 1
    while scored < len(ids):
        end = min(len(ids), scored + (window if scored == 1 else stride))
        start = max(0, end - 1 - window)
        with torch.no_grad():
            logs = model(torch.tensor([ids[start : end - 1]])).logits[0].log_softmax(-1)
        nats -= sum(logs[place - 1 - start, ids[place]].item() for place in range(scored, end))
        scored = end
    return nats


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, write_rows: Callable) -> tuple[Path, Path]:
    """Records, one of them white space; and a long document with special tokens as text."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"text": row["output"]} for row in make_records(12)]
    records = write_rows(folder / "records.jsonl", [*rows, {"text": " \n"}])
    long = folder / "long.txt"
    lines = [f"{number} {row['output']} <|im_end|>" for number, row in enumerate(make_records(9))]
    long.write_text("\n".join(lines))
    return records, long


@pytest.mark.frozen
@pytest.mark.parametrize(("window", "stride"), [(500, 500), (64, 64), (64, 24)])
def test_by_definition(window, stride, tiny_model, texts, tmp_path, evaluate, frozen):
    flags = ("--max-seq-len", window, "--stride", stride, "--output", tmp_path / "out")
    result = evaluate("--model", tiny_model, "--text", *texts, *flags)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    begin = tokenizer.bos_token_id
    plain = [json.loads(line)["text"] for line in texts[0].open()][:-1]
    found, nats = result["models"][0]["text"], 0.0
    for name, documents in (("records.jsonl", plain), ("long.txt", [texts[1].read_text()])):
        ids = [
            tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            for text in documents
        ]
        mine = sum(naive_nats(model, [begin, *one], window, stride) for one in ids)
        size = sum(len(text.encode()) for text in documents)
        file = found["files"][name]
        counts = {"documents": len(documents), "bytes": size, "tokens": sum(map(len, ids))}
        assert file == file | counts
        assert file["nats"] == pytest.approx(mine, rel=1e-5)
        assert file["bits_per_byte"] == pytest.approx(mine / math.log(2) / size, rel=1e-5)
        nats += mine
    assert found["overall"]["nats"] == pytest.approx(nats, rel=1e-5)
    asked = {"documents": 13, "max_seq_len": window, "stride": stride}
    assert result["text"] == {"files": ["records.jsonl", "long.txt"], **asked}
    if window == stride:  # lm_eval's rolling log-likelihood has the same windows
        logs = rolling_log_likelihoods(model.float(), tokenizer, window, begin, plain)
        assert found["files"]["records.jsonl"]["nats"] == pytest.approx(-sum(logs), rel=1e-5)
    shapes = {"asked_text": result["text"], "text": found, "bits": found["overall"]}
    assert {name: set(shape) for name, shape in shapes.items()} == {n: frozen[n] for n in shapes}
    assert result["data"] is None and str(texts[0].parent) not in json.dumps(result)
    table = (tmp_path / "out" / "table.md").read_text().splitlines()
    bits = f"{found['overall']['bits_per_byte']:.4f}"
    assert table[-1].strip("| ").split(" | ") == ["bits per byte", "all", "13", bits]
    assert not (tmp_path / "out" / "generations.jsonl").exists()


def rolling_log_likelihoods(model, tokenizer, window: int, begin: int, texts: list[str]):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    settings = {"backend": "causal", "max_length": window, "prefix_token_id": begin}
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, **settings)
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    return theirs.loglikelihood_rolling(requests, disable_tqdm=True)


def test_what_is_no_text_is_refused(tiny_model, write_rows, tmp_path, refused, command):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a router"}, {"texts": "a switch"}])
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n")
    for flags, words in (
        ((rows,), "--text-field texts"),
        ((blank,), "there is no text"),
        ((tmp_path / "none.txt",), "no such file"),
        ((rows, "--max-seq-len", 513), "made for 512"),
        ((rows, "--max-seq-len", 8, "--stride", 9), "more than a window of 8"),
    ):
        assert words in refused("--model", tiny_model, "--text", *flags), flags
    out, err = command("--model", tiny_model, "--text", rows, "--on-bad-row", "drop")
    assert "1 records or files without text are left out" in err
    assert "| bits per byte | rows.jsonl | 1 |" in out
