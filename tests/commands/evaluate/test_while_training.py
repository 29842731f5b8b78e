"""Answers generated while a run evaluates: transformers' own, counted whole, and without a trace in
the training.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import run_helpers
import run_patches
import torch
from chat_models import family
from run_helpers import Materials, events
from tiny_models import as_trained, tiny_config
from tool_templates import tool_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.commands.evaluate.prompts import EvalPrompt, spread, spread_evenly
from finetune.commands.evaluate.while_training import AskedPrompts
from finetune.config.resolution import resolve
from finetune.data.encoding.render import Renderer
from finetune.data.formats import detect_format, to_conversation
from finetune.errors import FinetuneError
from finetune.inference.decoding import BatchDecoding, answering
from finetune.modeling.attention import ISOLATED, choose_attention
from finetune.modeling.loss import let_choose_logits
from finetune.training.results import evaluated_data

pytestmark = pytest.mark.filterwarnings("ignore")

# ---------------------------------------------------------------- the answers


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    """Twelve questions with short answers that a run learns by heart; those of the validation have
    an `answer`.
    """
    made = run_helpers.make_materials(tmp_path_factory.mktemp("asked"), records=1)
    rows = []
    for number in range(12):
        row = {
            "instruction": " ".join(["ABCDEFGHIJKL"[number]] * 4),
            "output": f"{'because ' * (number % 3)}\nAnswer: {number % 5}",
        }
        row |= {
            "answer": number % 5,
            "difficulty": ("explain", "reasoning", "topology")[number % 3],
        }
        rows.append(row)
    made.data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    del rows[0]["answer"]
    made.valid.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    own = {
        "valid_data": str(materials.valid),
        "eval_generate": 8,
        "eval_steps": 10,
        "max_steps": 40,
        "global_batch_size": 12,
        "finetuning": "full",
        "learning_rate": 2e-2,
        "lr_scheduler": "constant",
        "use_curriculum": True,
        "curriculum": {
            "levels": ["explain", "reasoning", "topology"],
            "stages": [{"until": 1.0, "mix": [1, 1, 1]}],
        },
    }
    return materials.settings(output_dir, **(own | changes))


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [
        {n: v for n, v in event.items() if n not in ("time", "event")}
        for event in events(folder, "eval")
    ]


@pytest.fixture(scope="module")
def asked(materials: Materials) -> Path:
    output_dir = materials.folder / "asked"
    run_helpers.train(settings(materials, output_dir, keep_best=True, best_metric="exact_match"))
    return output_dir


def test_the_tokens_are_those_of_generate_on_each_prompt_alone(materials: Materials):
    """Under the attention of training, for prompts and rooms of several lengths; and all is put
    back.
    """
    model = AutoModelForCausalLM.from_pretrained(materials.model, dtype=torch.float32)
    choose_attention(model.config)
    tokenizer = AutoTokenizer.from_pretrained(materials.model)
    choose = random.Random(1)
    prompts = [choose.choices(range(20, len(tokenizer)), k=length) for length in (1, 5, 23, 40)]
    rooms, ends = (
        [30, 7, 12, 0],
        [tokenizer.eos_token_id, *choose.choices(range(20, len(tokenizer)), k=40)],
    )
    model.eval()
    expected = [
        model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=max(room, 1),
            eos_token_id=ends,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()[:room]
        for prompt, room in zip(prompts, rooms, strict=True)
    ]
    model.set_attn_implementation(ISOLATED)
    model.train()
    before, state = json.dumps(model.config.to_dict(), default=str), torch.get_rng_state()
    asked: list[bool] = []

    def going(unfinished: bool) -> bool:  # another rank goes on for long
        asked.append(unfinished)
        return unfinished or len(asked) < 40

    with answering(model, model):
        assert not model.training
        found = BatchDecoding(model, prompts, rooms, ends, going).run(model, pad_id=0)
    assert found == expected and len({len(answer) for answer in found}) > 2
    assert len(asked) == 40 and not asked[-1]
    assert model.training and model.config._attn_implementation == ISOLATED
    assert json.dumps(model.config.to_dict(), default=str) == before and torch.equal(
        torch.get_rng_state(), state
    )
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "deepseek_v3", "bloom", "qwen3_next"])
def test_other_kinds_of_attention_answer_as_generate_does(kind: str):
    """Learned positions, a softcap with windows, latents, a bias by distance, a state that is
    carried along.
    """
    config = tiny_config(kind)
    model = as_trained(config)
    let_choose_logits(model)
    trained_with = model.config._attn_implementation
    choose = random.Random(1)
    prompts = [choose.choices(range(3, config.vocab_size), k=length) for length in (3, 9, 14)]
    with answering(model, model):
        found = BatchDecoding(model, prompts, [8] * 3, [config.vocab_size - 1]).run(model, pad_id=0)
    assert model.config._attn_implementation == trained_with and not model.training
    model.set_attn_implementation("eager")
    for prompt, answer in zip(prompts, found, strict=True):
        given = {
            "do_sample": False,
            "max_new_tokens": 8,
            "eos_token_id": config.vocab_size - 1,
            "pad_token_id": 0,
        }
        assert model.generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist() == answer


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
def test_a_prompt_is_what_training_has_before_the_last_answer(name: str):
    turns = [
        {"role": "system", "content": "Be short."},
        *(
            {"role": role, "content": f"{role} {number}"}
            for number in range(2)
            for role in ("user", "assistant")
        ),
    ]
    check_prompt(to_conversation({"messages": turns}, "messages"), family(name))


def test_tools_and_their_results_are_in_the_prompt():
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "ping", "arguments": {"host": "r1"}},
    }
    turns = [
        {"role": "user", "content": "is r1 up"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1 ms"},
        {"role": "assistant", "content": "Answer: yes"},
    ]
    tool = {
        "type": "function",
        "function": {"name": "ping", "description": "d", "parameters": {"type": "object"}},
    }
    check_prompt(
        to_conversation({"messages": turns, "tools": [tool]}, "messages"), tool_tokenizer("qwen")
    )


def check_prompt(conversation: Any, tokenizer: Any) -> None:
    prompt = EvalPrompt(0, None, conversation.messages[:-1], conversation.tools, "x", True)
    (one,) = AskedPrompts([prompt], tokenizer, cutoff_len=1 << 20, max_new_tokens=512).asked
    sample = Renderer(tokenizer, 1 << 20)(conversation)[-1]
    supervised = np.flatnonzero(sample.supervised)
    # of the last run of targets
    begin = supervised[np.flatnonzero(np.diff(supervised, prepend=-2) > 1)[-1]]
    assert one.ids == sample.input_ids[:begin].tolist()


def test_the_choice_is_even_and_fixed():
    levels = np.array([0] * 30 + [1] * 3 + [2] * 8)
    chosen = spread_evenly(levels, 12)
    assert (
        sorted(levels[chosen].tolist())
        == sorted(levels[spread(levels, 12)].tolist())
        == [0] * 5 + [1] * 3 + [2] * 4
    )
    assert chosen.tolist() == [0, 6, 12, 18, 24, 30, 31, 32, 33, 35, 37, 39]
    assert (
        spread_evenly(levels, 41).tolist() == spread_evenly(levels, 99).tolist() == list(range(41))
    )


def test_prompts_without_room_count_as_wrong_and_ranks_share_the_others():
    tokenizer = family("chatml")
    records = [{"prompt": "x" * length, "response": "Answer: 1"} for length in (1, 300, 2, 9)]
    turns = [to_conversation(record, detect_format(record)) for record in records]
    prompts = [EvalPrompt(n, None, one.messages[:-1], (), "1", True) for n, one in enumerate(turns)]
    asked = AskedPrompts(prompts, tokenizer, cutoff_len=64, max_new_tokens=512)
    assert (asked.total, asked.too_long, len(asked.asked)) == (4, 1, 3)
    assert all(len(one.ids) + one.max_new_tokens == 64 for one in asked.asked)
    assert list(map(len, asked._turns(1, 150))) == [2, 1] and list(
        map(len, asked._turns(2, 64))
    ) == [2, 1]
    assert list(map(len, asked._turns(2, 150))) == [3] and list(map(len, asked._turns(1, 1))) == [
        1,
        1,
        1,
    ]
    metrics = asked._metrics([[None, True, True], [None, False, False], [None, True, True]])
    assert metrics == {"exact_match": 0.5, "answers": 4, "answers_cut": 1, "prompts_too_long": 1}
    short = AskedPrompts(prompts, tokenizer, cutoff_len=64, max_new_tokens=5)
    assert [one.max_new_tokens for one in short.asked] == [5] * 3


# ---------------------------------------------------------------- in a run


def test_the_run_says_what_transformers_answers(materials: Materials, asked: Path):
    """Of the output, by plain transformers, prompt by prompt, judged by the last line of the text
    alone.
    """
    best = run_helpers.status(asked)["best_step"]
    (found,) = [line for line in evaluations(asked) if line["step"] == best]
    model = AutoModelForCausalLM.from_pretrained(asked, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(asked)
    rows = [json.loads(line) for line in materials.valid.read_text().splitlines()]
    right: dict[str, list[bool]] = {}
    # Eight of those with an answer, which row 0 has not: an even choice of each level's.
    for level, chosen in {"explain": (3, 6, 9), "reasoning": (1, 4, 7), "topology": (2, 8)}.items():
        for row in map(rows.__getitem__, chosen):
            messages = [{"role": "user", "content": row["instruction"]}]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
            with torch.no_grad():
                out = model.generate(
                    **ids, do_sample=False, max_new_tokens=96 - ids["input_ids"].shape[1], eos_token_id=ends,
                    pad_token_id=0,
                )  # fmt: skip
            text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            last = re.search(r"Answer: (\S+)\Z", text.strip())
            right.setdefault(level, []).append(last is not None and last[1] == str(row["answer"]))
    for level, answers in right.items():
        assert found[f"eval_exact_match/{level}"] == pytest.approx(sum(answers) / len(answers))
    assert (
        found["eval_exact_match"] == pytest.approx(sum(map(sum, right.values())) / 8)
        and found["eval_answers"] == 8
    )


def test_the_best_has_the_most_right_answers(asked: Path):
    lines = evaluations(asked)
    assert [line["step"] for line in lines] == [0, 10, 20, 30, 40]
    shares = {line["step"]: line["eval_exact_match"] for line in lines if line["step"]}
    assert (
        lines[0]["eval_exact_match"] < 0.25 < max(shares.values()) and len(set(shares.values())) > 1
    )
    status = run_helpers.status(asked)
    assert status["metric"] == "eval_exact_match" and status["best"] == max(shares.values())
    losses = {line["step"]: line["eval_loss"] for line in lines}
    assert (
        status["best_step"]
        == max(shares, key=lambda step: (shares[step], -losses[step]))
        == status["output_step"]
    )


def test_the_field_and_the_room_are_those_of_the_settings(materials: Materials, tmp_path: Path):
    """And a run goes on with others, but does not compare what it measured by them."""
    rows = [json.loads(line) for line in materials.valid.read_text().splitlines()]
    for row in rows:
        row["truth"] = row.pop("answer", 0)
    other = tmp_path / "valid.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    changes = {
        "valid_data": str(other),
        "max_steps": 4,
        "eval_steps": 2,
        "keep_best": True,
        "save_steps": 2,
    }
    changes |= {"best_metric": "exact_match", "answer_field": "truth"}
    stop = {
        "patch": run_patches.signal_self,
        "patch_arguments": (0, 3, signal.SIGTERM),
        "expect": 3,
    }
    run_helpers.train(settings(materials, tmp_path / "run", **changes, max_new_tokens=1), **stop)
    assert [
        (line["eval_answers"], line["eval_answers_cut"]) for line in evaluations(tmp_path / "run")
    ] == [(8, 8)] * 2
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    said = run_helpers.train(
        settings(materials, tmp_path / "same", **changes, max_new_tokens=1)
    ).output()
    assert "is looked for anew" not in said
    said = run_helpers.train(
        settings(materials, tmp_path / "run", **changes, max_new_tokens=40)
    ).output()
    assert "what is asked of it, is another than before: the best is looked for anew" in said


def test_checkpoints_from_before_there_were_settings_of_answers_go_on():
    words = [
        "--model",
        "m",
        "--data",
        "d",
        "--output-dir",
        "o",
        "--valid-data",
        "v",
        "--eval-steps",
        "2",
        "--keep-best",
    ]
    words += ["--eval-generate", "5"]

    def compared(*more: str) -> str | None:
        return evaluated_data(
            resolve([*words, *more], world_size=1).config, SimpleNamespace(fingerprint="f")
        )

    exact = ["--best-metric", "exact_match"]
    assert (compared("--answer-field", "x"), compared(*exact)) == ("f", "f:5")
    assert (
        compared(*exact, "--answer-field", "x", "--max-new-tokens", "9")
        == "f:5:answer_field=x:max_new_tokens=9"
    )


@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_it_leaves_no_trace(materials: Materials, tmp_path: Path, finetuning: str):
    """Weights and every loss are those of the run that asks nothing, to the bit: with dropout and
    recomputation.
    """
    changes = {
        "finetuning": finetuning,
        "max_steps": 6,
        "eval_steps": 2,
        "gradient_checkpointing": True,
    }
    changes |= (
        {"lora_dropout": 0.3} if finetuning == "lora" else {"model": str(dropping(materials))}
    )
    for name, count in (("with", 3), ("without", None)):
        run_helpers.train(settings(materials, tmp_path / name, **changes, eval_generate=count))
    weights = [run_helpers.result_weights(tmp_path / name) for name in ("with", "without")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    logs = [
        run_helpers.lines(tmp_path / name / "trainer_log.jsonl") for name in ("with", "without")
    ]
    losses = [[(line["loss"], line["grad_norm"]) for line in log] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    first, second = evaluations(tmp_path / "with"), evaluations(tmp_path / "without")
    kept = [{name: value for name, value in line.items() if name in second[0]} for line in first]
    assert kept == second and "eval_exact_match" in first[0]


def dropping(materials: Materials) -> Path:
    """The model with dropout in its attention."""
    folder = materials.folder / "dropping"
    model = AutoModelForCausalLM.from_pretrained(materials.model)
    model.config.attention_dropout = 0.3
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(materials.model).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_resumed_run_has_the_same_evaluations(materials: Materials, asked: Path, tmp_path: Path):
    changes = {
        "keep_best": True,
        "best_metric": "exact_match",
        "save_steps": 15,
        "async_save": False,
    }
    options = {"patch": run_patches.signal_self, "patch_arguments": (0, 28, signal.SIGKILL)}
    ranks = run_helpers.start(settings(materials, tmp_path / "run", **changes), **options)
    assert ranks.wait() == [-signal.SIGKILL], ranks.output()
    run_helpers.train(settings(materials, tmp_path / "run", **changes))
    by_step = {line["step"]: line for line in evaluations(tmp_path / "run")}
    assert [by_step[step] for step in sorted(by_step)] == evaluations(asked)
    first, second = (run_helpers.result_weights(folder) for folder in (asked, tmp_path / "run"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "zero3"])
def test_ranks_answer_together(materials: Materials, asked: Path, tmp_path: Path, layout: str):
    """Answers of several lengths on two ranks that gather weights, or not: as one process
    answers.
    """
    changes = {"keep_best": True, "best_metric": "exact_match", **run_helpers.LAYOUTS[layout]}
    run_helpers.train(settings(materials, tmp_path / "run", **changes, eval_generate=7), 2)
    run_helpers.train(settings(materials, tmp_path / "one", eval_generate=7))
    found, alone = evaluations(tmp_path / "run"), evaluations(tmp_path / "one")
    names = [name for name in alone[0] if "exact" in name or "answers" in name]
    assert [[line[name] for name in names] for line in found] == [
        [line[name] for name in names] for line in alone
    ]
    assert max(line["eval_exact_match"] for line in found) > 0.25


# ---------------------------------------------------------------- refused before anything heavy


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--eval-generate", "5"], "eval_generate is 5, and there is no validation data"),
        (["--eval-generate", "0", "--valid-data", "v"], "greater than or equal to 1|at least 1"),
        (
            [
                "--valid-data",
                "v",
                "--eval-steps",
                "2",
                "--keep-best",
                "--best-metric",
                "exact_match",
            ],
            "best_metric is exact_match, and evaluations answer nothing",
        ),
        (["--valid-data", "v", "--best-metric", "exact_match/nobody"], "which no evaluation has"),
        (["--valid-data", "v", "--eval-generate", "5", "--max-new-tokens", "0"], "at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(flags: list[str], words: str):
    with pytest.raises(FinetuneError, match=words):
        resolve(["--model", "m", "--data", "d", "--output-dir", "o", *flags], world_size=1)


def test_settings_of_answers_that_nobody_asks_for_are_noted():
    words = ["--model", "m", "--data", "d", "--output-dir", "o", "--max-new-tokens", "9"]
    (note,) = [note for note in resolve(words, world_size=1).notes if "max_new_tokens" in note]
    assert "eval_generate is not set" in note and "answer_field" not in note


@pytest.mark.parametrize(
    ("kept", "metric", "words"),
    [
        (("instruction", "output", "difficulty"), "loss", "no validation record has 'answer'"),
        (
            ("instruction", "output", "answer"),
            "exact_match/topology",
            "no validation record of difficulty 'topology'",
        ),
    ],
)
def test_data_that_cannot_be_compared_is_refused(
    materials: Materials, tmp_path: Path, kept: tuple[str, ...], metric: str, words: str
):
    import finetune

    rows = [json.loads(line) for line in materials.valid.read_text().splitlines()]
    path = tmp_path / "valid.jsonl"
    path.write_text(
        "".join(json.dumps({n: row[n] for n in kept if n in row}) + "\n" for row in rows),
        encoding="utf-8",
    )
    changes = {"valid_data": str(path), "best_metric": metric, "keep_best": True}
    with pytest.raises(FinetuneError, match=words):
        finetune.run(settings(materials, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
