"""lm_eval's tasks on local data against log-likelihoods and answers computed here, and lm_eval's
own loading.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import ROOT
from peft import LoraConfig, get_peft_model
from shell_blocks import blocks
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.__main__ import main as finetune
from finetune.commands.evaluate import tasks
from finetune.commands.evaluate.scores import paired_bootstrap

BUNDLED = ROOT / "data_samples" / "tasks"
FROZEN = ROOT / "tests" / "frozen" / "eval.txt"
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
WRITE = """
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{do_sample: false, max_gen_toks: 6, until: ["<|im_end|>"]}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


def questions(count: int = 30) -> list[dict]:
    """Questions from the bundled pairs; every third has three choices, the others two."""
    rows = [
        json.loads(line)
        for line in (ROOT / "data_samples" / "preference_valid.jsonl").open(encoding="utf-8")
    ]
    found = []
    for number, row in enumerate(rows[:count]):
        wrong = [row["rejected"].splitlines()[-1], rows[number + 1]["chosen"].splitlines()[-1]][
            : 1 + (number % 3 == 0)
        ]
        choices = [row["chosen"].splitlines()[-1], *wrong]
        label = number % len(choices)
        choices[0], choices[label] = choices[label], choices[0]
        question = row["instruction"] + "\n"
        found.append(
            {"question": question, "choices": choices, "label": label, "answer": row["answer"]}
        )
    return found


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, write_rows: Callable, tiny_model: Path
) -> Path:
    """Tasks of choices, of the same with examples, and of writing: the last ten answers are what
    the model says.
    """
    place = tmp_path_factory.mktemp("tasks")
    rows = questions()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for row in rows[20:]:
        row["answer"] = plain_answer(model, tokenizer, row["question"])
    data = write_rows(place / "data.jsonl", rows)
    (place / "choice.yaml").write_text(CHOICE.format(name="chosen", data=data))
    (place / "again.yaml").write_text(
        CHOICE.format(name="again", data=data) + "num_fewshot: 2\nfewshot_split: test\n"
    )
    (place / "write.yaml").write_text(WRITE.format(data=data))
    filters = [
        f"  - {{name: {name}, filter: [{{function: take_first}}]}}\n" for name in ("first", "again")
    ]
    filtered = "".join(["filter_list:\n", *filters])
    (place / "filtered.yaml").write_text(CHOICE.format(name="filtered", data=data) + filtered)
    (place / "group.yaml").write_text(
        "group: both\ntask: [chosen, again]\naggregate_metric_list: [{metric: acc}]\n"
    )
    return place


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """An adapter that changes what the tiny model says."""
    place = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    wrapped = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=4, task_type="CAUSAL_LM")
    )
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.peft_config["default"].base_model_name_or_path = str(tiny_model)
    wrapped.save_pretrained(place)
    return place


def plain_answer(model: torch.nn.Module, tokenizer, question: str) -> str:
    ids = tokenizer(question, return_tensors="pt")
    found = model.generate(**ids, do_sample=False, max_new_tokens=6, pad_token_id=0)[
        0, ids["input_ids"].shape[1] :
    ]
    return tokenizer.decode(found, skip_special_tokens=True)


def log_likelihood(model: torch.nn.Module, tokenizer, question: str, choice: str) -> float:
    """As lm_eval has it: the white space that ends a question is part of the choice, after the
    delimiter ' '.
    """
    stripped = question.rstrip()
    whole = tokenizer(stripped + question[len(stripped) :] + " " + choice)["input_ids"]
    start = len(tokenizer(stripped)["input_ids"])
    with torch.no_grad():
        logs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return sum(logs[place - 1, whole[place]].item() for place in range(start, len(whole)))


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    code = finetune(
        ["eval", *map(str, arguments), "--device-type", "cpu", "--dtype", "float32", "--json"]
    )
    out, err = capsys.readouterr()
    assert code == 0
    assert [line for line in err.splitlines() if "[INFO] evaluating" not in line] == [], err
    return json.loads(out)


def test_filters_each_have_their_documents(
    folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    """lm_eval logs a document once for each filter."""
    found = evaluate(
        capsys, "--model", tiny_model, "--tasks", "filtered,chosen", "--tasks-path", folder
    )["models"][0]
    lines = [line for line in found["tasks"] if line["metric"] == "acc"]
    assert {line["filter"] for line in lines} == {"first", "again", "none"}
    assert {line["documents"] for line in lines} == {30}
    assert len({(line["value"], line["centered"]) for line in lines}) == 1


def by_metric(model: dict) -> dict[tuple[str, str], dict]:
    return {(line["task"], line["metric"]): line for line in model["tasks"]}


@pytest.mark.frozen
def test_choices_by_their_log_likelihoods(
    folder: Path,
    tiny_model: Path,
    adapter: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    result = evaluate(
        capsys,
        "--adapter",
        adapter,
        "--base",
        "--tasks",
        "chosen",
        "--tasks-path",
        folder,
        "--output",
        tmp_path / "out",
    )
    rows, tokenizer = questions(), AutoTokenizer.from_pretrained(tiny_model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    from peft import PeftModel

    right = []
    for model, plain in zip(
        result["models"],
        (lambda: base, lambda: PeftModel.from_pretrained(base, adapter)),
        strict=True,
    ):
        loaded = plain().eval()
        logs = [
            [log_likelihood(loaded, tokenizer, row["question"], c) for c in row["choices"]]
            for row in rows
        ]
        labels = [row["label"] for row in rows]
        acc = np.array(
            [int(np.argmax(one) == label) for one, label in zip(logs, labels, strict=True)]
        )
        means = [
            np.array(one) / [len(c) for c in row["choices"]]
            for one, row in zip(logs, rows, strict=True)
        ]
        norm = [int(np.argmax(one) == label) for one, label in zip(means, labels, strict=True)]
        chance = np.mean([1 / len(row["choices"]) for row in rows])
        found = by_metric(model)
        assert found["chosen", "acc"]["value"] == pytest.approx(acc.mean())
        assert found["chosen", "acc_norm"]["value"] == pytest.approx(np.mean(norm))
        assert found["chosen", "acc"]["centered"] == pytest.approx(
            (acc.mean() - chance) / (1 - chance)
        )
        assert found["chosen", "acc"]["stderr"] == pytest.approx(
            acc.std(ddof=1) / np.sqrt(len(acc))
        )
        assert found["chosen", "acc"]["documents"] == 30
        right.append(acc)
    assert 0 < right[0].sum() < 30 and (right[0] != right[1]).any()
    (difference,) = (one for one in result["differences"] if one["measure"] == "acc")
    assert difference["difference"] == pytest.approx(right[1].mean() - right[0].mean())
    assert (difference["low"], difference["high"], difference["p"]) == paired_bootstrap(
        right[0].astype(float), right[1].astype(float), np.ones(30)
    )
    assert difference["differing"] == (right[0] != right[1]).sum() and difference["records"] == 30
    frozen = dict(
        line.split(": ")
        for line in FROZEN.read_text().splitlines()
        if ": " in line and line[0] != "#"
    )
    shapes = {"asked_tasks": result["tasks"], "difference": difference}
    shapes["metric"] = {name: 0 for name in found["chosen", "acc"] if name != "centered"}
    for name, shape in shapes.items():
        assert set(shape) == set(frozen[name].split()), name
    assert str(folder) not in json.dumps(result)
    assert "| acc | chosen | 30 |" in (tmp_path / "out" / "table.md").read_text()


def test_written_answers_are_transformers_own(
    folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    result = evaluate(
        capsys,
        "--model",
        tiny_model,
        "--tasks",
        "written",
        "--tasks-path",
        folder,
        "--batch-size",
        7,
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rows = [json.loads(line) for line in (folder / "data.jsonl").open(encoding="utf-8")]
    said = [plain_answer(model, tokenizer, row["question"]) == row["answer"] for row in rows]
    (found,) = result["models"][0]["tasks"]
    assert found["value"] == np.mean(said) and 10 / 30 <= found["value"] < 1
    assert "centered" not in found and result["tasks"]["names"] == ["written"]


def test_as_lm_eval_by_itself(folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    """With few-shot examples, the chat template and a limit: what it makes of the folder; and the
    mean of two tasks.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    result = evaluate(
        capsys, "--model", tiny_model, "--tasks", "again,chosen", "--tasks-path", folder, "--limit", 20,
        "--num-fewshot", 1, "--apply-chat-template",
    )  # fmt: skip
    asked = {"names": ["again", "chosen"], "num_fewshot": 1, "limit": 20, "chat_template": True}
    assert result["tasks"] == {"lm_eval": lm_eval.__version__, **asked}
    theirs = lm_eval.simple_evaluate(
        "hf",
        {"pretrained": str(tiny_model), "dtype": "float32", "device": "cpu"},
        tasks=["again", "chosen"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        num_fewshot=1,
        limit=20,
        apply_chat_template=True,
        batch_size=1,
    )
    capsys.readouterr()
    found = by_metric(result["models"][0])
    for name in ("again", "chosen"):
        for metric in ("acc", "acc_norm"):
            assert found[name, metric]["value"] == theirs["results"][name][f"{metric},none"]
            assert found[name, metric]["stderr"] == pytest.approx(
                theirs["results"][name][f"{metric}_stderr,none"]
            )
    plain = evaluate(
        capsys, "--model", tiny_model, "--tasks", "chosen", "--tasks-path", folder, "--limit", 20
    )
    assert plain["tasks"]["chat_template"] is False


def test_a_group_and_the_mean_of_centered_accuracies(folder: Path, tiny_model: Path, capsys):
    """The group's value is lm_eval's own; the mean is of its tasks."""
    words = [
        "--model",
        str(tiny_model),
        "--tasks",
        "both",
        "--tasks-path",
        str(folder),
        "--device-type",
        "cpu",
    ]
    assert finetune(["eval", *words]) == 0
    out, err = capsys.readouterr()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()]
    found = {(line[0], line[1]): (line[2], float(line[3].split()[0])) for line in lines[2:]}
    tasks = [found["acc", name][1] for name in ("chosen", "again")]
    assert found["acc", "both"] == ("-", pytest.approx(sum(tasks) / 2, abs=1e-4))
    centered = [found["centered acc", name][1] for name in ("chosen", "again")]
    assert found["centered acc", "mean of 2 tasks"][1] == pytest.approx(sum(centered) / 2, abs=1e-4)
    assert ("centered acc", "both") not in found and "WARNING" not in err


def test_the_bundled_tasks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(ROOT)
    words = (
        "--tasks",
        "networks_choice,networks_value,networks_answer",
        "--tasks-path",
        "data_samples/tasks",
    )
    result = evaluate(
        capsys, "--model", "data_samples/tiny-qwen3", *words, "--limit", 4, "--apply-chat-template"
    )
    found = by_metric(result["models"][0])
    assert {name for name, _ in found} == {"networks_choice", "networks_value", "networks_answer"}
    assert (
        found["networks_choice", "acc"]["value"] == 1
        and found["networks_answer", "exact_match"]["filter"] == "answer"
    )


def test_weights_are_not_tied_anew():
    """lm_eval would tie them; of an adapter's layers only the loading knows what is right."""
    layer = torch.nn.Linear(2, 2)
    with tasks._weights_left_alone(layer):
        layer.tie_weights()
    assert not hasattr(layer, "tie_weights")


def test_cut_prompts_are_said(folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    words = [
        "--tasks",
        "chosen",
        "--tasks-path",
        str(folder),
        "--context-tokens",
        "40",
        "--device-type",
        "cpu",
    ]
    assert finetune(["eval", "--model", str(tiny_model), *words]) == 0
    err = capsys.readouterr().err
    assert "lm_eval cut the beginning of" in err and questions()[0]["question"].strip() not in err


# ---------------------------------------------------------------- refused


@pytest.fixture
def refused(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    def no_weights(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("finetune.commands.evaluate.evaluation.load_weights", no_weights)

    def run(*words: object) -> str:
        assert (
            finetune(["eval", "--model", str(tiny_model), "--device-type", "cpu", *map(str, words)])
            == 2
        )
        out, err = capsys.readouterr()
        assert not out and "fix:" in err and "Traceback" not in err
        return err

    return run


def test_what_is_not_there_is_refused_before_any_weights(
    folder: Path, tmp_path: Path, refused: Callable[..., str]
):
    assert "lm_eval has no task choosen" in (
        said := refused("--tasks", "choosen", "--tasks-path", folder)
    )
    assert re.search(r"did you mean .*chosen", said)
    assert "no such folder" in refused("--tasks", "chosen", "--tasks-path", tmp_path / "none")
    assert "no task of it is named" in refused(
        "--text", folder / "data.jsonl", "--tasks-path", folder
    )
    (tmp_path / "broken.yaml").write_text(
        CHOICE.format(name="broken", data=tmp_path / "none.jsonl")
    )
    assert "lm_eval cannot make the task: FileNotFoundError" in refused(
        "--tasks", "broken", "--tasks-path", tmp_path
    )


def test_data_that_would_be_downloaded(refused: Callable[..., str]):
    """HF_HUB_OFFLINE is set for all tests; a built-in task, of the thousands that lm_eval looks
    through.
    """
    said = refused("--tasks", "arc_easy")
    assert "Couldn't reach 'allenai/ai2_arc'" in said and "HF_HUB_OFFLINE not set" in said


def test_a_metric_of_the_hub_is_a_program(
    folder: Path, tmp_path: Path, refused: Callable[..., str]
):
    text = WRITE.format(data=folder / "data.jsonl").replace(
        "exact_match,", "some_metric, hf_evaluate: true,"
    )
    (tmp_path / "foreign.yaml").write_text(text)
    assert "the metric some_metric is a program on the hub" in refused(
        "--tasks", "written", "--tasks-path", tmp_path
    )


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = refused("--tasks", "arc_easy")
    assert "lm_eval cannot be imported" in said and "fix:   pip install lm_eval" in said


def test_a_task_that_fails_says_so(
    folder: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = WRITE.format(data=folder / "data.jsonl").replace("max_gen_toks: 6", "max_gen_toks: 600")
    (tmp_path / "long.yaml").write_text(text)
    words = [
        "--model",
        str(tiny_model),
        "--tasks",
        "written",
        "--tasks-path",
        str(tmp_path),
        "--device-type",
        "cpu",
    ]
    assert finetune(["eval", *words]) == 1
    out, err = capsys.readouterr()
    assert not out and "lm_eval failed: AssertionError" in err and "Traceback" not in err


# ---------------------------------------------------------------- the page about it

COMMANDS = [
    line
    for block in blocks(ROOT / "docs" / "guides" / "evaluation.md", "bash")
    for line in block.replace("\\\n", "").splitlines()
    if "runs/demo-TIME" in line or "data_samples/tiny-qwen3" in line
]


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.partition(" eval ")[2][:70])
def test_the_commands_of_the_page(
    line: str, demo: Path, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
):
    monkeypatch.chdir(ROOT)
    words = line.replace("runs/demo-TIME", str(demo)).split()
    assert words[:4] == ["python", "-m", "finetune", "eval"]
    if "--data" in words:
        words += ["--generate", "1", "--max-samples", "6", "--cache-dir", str(tmp_path)]
    if "--tasks" in words:
        words += ["--limit", "2"]
    assert finetune([*words[3:], "--max-new-tokens", "2", "--device-type", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(("| measure | of |", "| difficulty |"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on the bundled model, as the demo's is."""
    place = tmp_path_factory.mktemp("demo") / "run"
    base = ROOT / "data_samples" / "tiny-qwen3"
    wrapped = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, task_type="CAUSAL_LM")
    )
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(place)
    return place
