"""lm_eval's tasks on local data against log-likelihoods and answers computed here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lm_eval.tasks
import numpy as np
import pytest
import torch
from launching import ROOT
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.commands.evaluate.scores import paired_bootstrap


def task(name: str, data: Path, metrics: str, **more: object) -> str:
    """One of lm_eval's files; JSON is YAML."""
    mean = {"aggregation": "mean", "higher_is_better": True}
    own = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metric_list": [{"metric": metric, **mean} for metric in metrics.split()],
    }
    return json.dumps(own | more)


def choice(name: str, data: Path, **more: object) -> str:
    places = {"doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"}
    return task(name, data, "acc acc_norm", output_type="multiple_choice", **places, **more)


def write(name: str, data: Path, tokens: int = 6) -> str:
    settings = {"do_sample": False, "max_gen_toks": tokens, "until": ["<|im_end|>"]}
    kind = {"output_type": "generate_until", "doc_to_target": "{{answer}}"}
    return task(name, data, "exact_match", generation_kwargs=settings, **kind)


def questions() -> list[dict]:
    """30 questions from the bundled pairs; every third has three choices, the others two."""
    path = ROOT / "data_samples" / "preference_valid.jsonl"
    rows = [json.loads(line) for line in path.open(encoding="utf-8")]
    found = []
    for number, row in enumerate(rows[:30]):
        texts = (row["chosen"], row["rejected"], rows[number + 1]["chosen"])
        choices = [text.splitlines()[-1] for text in texts][: 2 + (number % 3 == 0)]
        label = number % len(choices)
        choices[0], choices[label] = choices[label], choices[0]
        found.append({"question": row["instruction"] + "\n", "choices": choices, "label": label})
        found[-1]["answer"] = row["answer"]
    return found


@pytest.fixture(scope="module")
def plain(tiny_model: Path):
    """The tiny model and its tokenizer as transformers load them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_rows: Callable, plain) -> Path:
    """Tasks; the last ten answers are what the model says."""
    place = tmp_path_factory.mktemp("tasks")
    rows = questions()
    for row in rows[20:]:
        row["answer"] = plain_answer(*plain, row["question"])
    data = write_rows(place / "data.jsonl", rows)
    filters = [{"name": n, "filter": [{"function": "take_first"}]} for n in ("first", "again")]
    for name, text in (
        ("chosen", choice("chosen", data)),
        ("again", choice("again", data, num_fewshot=2, fewshot_split="test")),
        ("filtered", choice("filtered", data, filter_list=filters)),
        ("written", write("written", data)),
        ("both", "group: both\ntask: [chosen, again]\naggregate_metric_list: [{metric: acc}]\n"),
    ):
        (place / f"{name}.yaml").write_text(text)
    return place


def plain_answer(model: torch.nn.Module, tokenizer, question: str) -> str:
    ids = tokenizer(question, return_tensors="pt")
    found = model.generate(**ids, do_sample=False, max_new_tokens=6, pad_token_id=0)
    return tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def log_likelihood(model: torch.nn.Module, tokenizer, question: str, choice: str) -> float:
    """The white space that ends a question is part of the choice, as in lm_eval."""
    whole = tokenizer(question + " " + choice)["input_ids"]
    start = len(tokenizer(question.rstrip())["input_ids"])
    with torch.no_grad():
        logs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return sum(logs[place - 1, whole[place]].item() for place in range(start, len(whole)))


def by_metric(model: dict) -> dict[tuple[str, str], dict]:
    return {(line["task"], line["metric"]): line for line in model["tasks"]}


@pytest.mark.frozen
def test_choices_by_their_log_likelihoods_and_answers_by_transformers(
    folder, make_adapter, plain, tmp_path, evaluate, frozen
):
    """And filters, a group, and the mean of centered accuracies."""
    adapter, out = make_adapter(), tmp_path / "out"
    asked = ("--tasks", "both,written,filtered", "--tasks-path", folder, "--batch-size", 7)
    result = evaluate("--adapter", adapter, "--base", *asked, "--output", out)
    base, adapted = map(by_metric, result["models"])
    model, tokenizer = plain
    rows = [json.loads(line) for line in (folder / "data.jsonl").open(encoding="utf-8")]
    said = [plain_answer(model, tokenizer, row["question"]) == row["answer"] for row in rows]
    assert base["written", "exact_match"]["value"] == np.mean(said)
    assert 10 / 30 <= np.mean(said) < 1 and "centered" not in base["written", "exact_match"]

    labels, right = np.array([row["label"] for row in rows]), []
    chance = np.mean([1 / len(row["choices"]) for row in rows])
    for found in (base, adapted):
        if found is adapted:
            model = PeftModel.from_pretrained(model, adapter).eval()
        best, best_mean = [], []
        for row in rows:
            logs = [log_likelihood(model, tokenizer, row["question"], c) for c in row["choices"]]
            best.append(np.argmax(logs))
            best_mean.append(np.argmax(np.array(logs) / list(map(len, row["choices"]))))
        acc, line = best == labels, found["chosen", "acc"]
        assert line["value"] == pytest.approx(acc.mean())
        assert line["stderr"] == pytest.approx(acc.std(ddof=1) / np.sqrt(30))
        assert line["centered"] == pytest.approx((acc.mean() - chance) / (1 - chance))
        norm = found["chosen", "acc_norm"]["value"]
        assert norm == pytest.approx((best_mean == labels).mean())
        right.append(acc.astype(float))
    assert 0 < right[0].sum() < 30 and (right[0] != right[1]).any()
    differences = {(one["measure"], one["of"]): one for one in result["differences"]}
    difference = differences["acc", "chosen"]
    assert difference["difference"] == pytest.approx(right[1].mean() - right[0].mean())
    interval = (difference["low"], difference["high"], difference["p"])
    assert interval == paired_bootstrap(right[0], right[1], np.ones(30))
    assert (difference["differing"], difference["records"]) == ((right[0] != right[1]).sum(), 30)

    # lm_eval logs a document once for each filter
    lines = [one for one in result["models"][0]["tasks"] if one["metric"] == "acc"]
    filtered = [one for one in lines if one["task"] in ("filtered", "chosen")]
    assert {one["filter"] for one in filtered} == {"first", "again", "none"}
    assert {(one["documents"], one["value"], one["centered"]) for one in filtered} == {
        (30, base["chosen", "acc"]["value"], base["chosen", "acc"]["centered"])
    }
    means = [base[name, "acc"]["value"] for name in ("chosen", "again")]
    assert base["both", "acc"]["value"] == pytest.approx(np.mean(means))
    assert base["both", "acc"]["documents"] is None
    table = [line.strip("| ").split(" | ") for line in (out / "table.md").read_text().splitlines()]
    cells = {(line[0], line[1]): line[2:] for line in table[2:]}
    assert cells["acc", "chosen"][0] == "30" and ("centered acc", "both") not in cells
    centered = [one["centered"] for one in lines if one["task"] != "both"]
    mean = cells["centered acc", "mean of 4 tasks"]
    assert float(mean[1]) == pytest.approx(np.mean(centered), abs=1e-4)
    shapes = {"asked_tasks": result["tasks"], "difference": difference}
    shapes["metric"] = base["both", "acc"]
    assert {name: set(shape) for name, shape in shapes.items()} == {n: frozen[n] for n in shapes}
    assert str(folder) not in json.dumps(result)


def test_as_lm_eval_by_itself(folder: Path, tiny_model: Path, evaluate, capsys):
    """With few-shot examples, the chat template and a limit."""
    flags = ("--limit", 20, "--num-fewshot", 1, "--apply-chat-template")
    flags += ("--tasks", "again,chosen", "--tasks-path", folder)
    result = evaluate("--model", tiny_model, *flags)
    asked = {"names": ["again", "chosen"], "num_fewshot": 1, "limit": 20, "chat_template": True}
    assert result["tasks"] == {"lm_eval": lm_eval.__version__, **asked}
    theirs = lm_eval.simple_evaluate(
        "hf",
        {"pretrained": str(tiny_model), "dtype": "float32", "device": "cpu"},
        tasks=["again", "chosen"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False),
        num_fewshot=1,
        limit=20,
        apply_chat_template=True,
        batch_size=1,
    )["results"]
    for (task, metric), line in by_metric(result["models"][0]).items():
        assert line["value"] == theirs[task][f"{metric},none"]
        assert line["stderr"] == pytest.approx(theirs[task][f"{metric}_stderr,none"])


def test_cut_prompts_and_failures_are_said(folder: Path, tiny_model: Path, tmp_path: Path, command):
    words = ("--model", tiny_model, "--tasks-path", folder, "--limit", 5)
    err = command(*words, "--tasks", "chosen", "--context-tokens", 40)[1]
    assert "lm_eval cut the beginning of" in err and questions()[0]["question"].strip() not in err
    (tmp_path / "long.yaml").write_text(write("long", folder / "data.jsonl", 600))
    words = ("--model", tiny_model, "--tasks-path", tmp_path, "--tasks", "long")
    out, err = command(*words, code=1)
    assert not out and "lm_eval failed: AssertionError" in err


@pytest.fixture
def refused_early(tiny_model: Path, refused, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Before any weights are read."""
    monkeypatch.setattr("finetune.commands.evaluate.evaluation.load_weights", None)
    return lambda *words: refused("--model", tiny_model, *words)


def test_what_is_not_there_is_refused(folder: Path, tmp_path: Path, refused_early, monkeypatch):
    # lm_eval's own tasks are thousands, which are read here for half a minute
    few = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", few)
    (tmp_path / "broken.yaml").write_text(choice("broken", tmp_path / "none.jsonl"))
    foreign = write("foreign", folder / "data.jsonl")
    foreign = foreign.replace('"exact_match",', '"some_metric", "hf_evaluate": true,')
    (tmp_path / "foreign.yaml").write_text(foreign)
    for words, said in (
        (("--tasks", "choosen", "--tasks-path", folder), "no task choosen.*did you mean .*chosen"),
        (("--tasks", "chosen", "--tasks-path", tmp_path / "none"), "no such folder"),
        (("--text", folder / "data.jsonl", "--tasks-path", folder), "no task of it is named"),
        (("--tasks", "broken", "--tasks-path", tmp_path), "cannot make the task: FileNotFound"),
        (("--tasks", "foreign", "--tasks-path", tmp_path), "some_metric is a program on the hub"),
    ):
        assert re.search(said, refused_early(*words)), words


@pytest.mark.slow
def test_data_that_would_be_downloaded(refused_early):
    """HF_HUB_OFFLINE is set for all tests."""
    said = refused_early("--tasks", "arc_easy")
    assert "Couldn't reach 'allenai/ai2_arc'" in said and "HF_HUB_OFFLINE not set" in said


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch, refused_early):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = refused_early("--tasks", "arc_easy")
    assert "lm_eval cannot be imported" in said and "fix:   pip install lm_eval" in said
