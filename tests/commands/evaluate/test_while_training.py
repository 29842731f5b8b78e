"""Answers generated while a run evaluates: transformers' own, without a trace."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import run_helpers
import torch
from chat_models import family
from run_helpers import Materials, events
from tiny_models import as_trained, tiny_config
from tool_templates import tool_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune
from finetune.commands.evaluate.prompts import EvalPrompt
from finetune.commands.evaluate.while_training import AskedPrompts
from finetune.config.resolution import resolve
from finetune.data.encoding.render import Renderer
from finetune.data.formats import detect_format, to_conversation
from finetune.errors import FinetuneError
from finetune.inference.decoding import BatchDecoding, answering
from finetune.modeling.loss import let_choose_logits
from finetune.training.results import evaluated_data, read_best

pytestmark = pytest.mark.filterwarnings("ignore")
LEVELS = ("explain", "reasoning", "topology")
RUN = "--model m --data d --output-dir o"


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "deepseek_v3", "bloom", "qwen3_next"])
def test_other_kinds_of_attention_answer_as_generate_does(kind: str):
    """Learned positions, softcap and windows, latents, a bias by distance, a carried state."""
    config = tiny_config(kind)
    model = as_trained(config)
    let_choose_logits(model)
    trained_with, end = model.config._attn_implementation, config.vocab_size - 1
    choose = random.Random(1)
    prompts = [choose.choices(range(3, config.vocab_size), k=length) for length in (3, 9, 14)]
    with answering(model, model):
        found = BatchDecoding(model, prompts, [8] * 3, [end]).run(model, pad_id=0)
    assert model.config._attn_implementation == trained_with and not model.training
    model.set_attn_implementation("eager")
    settings = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": end, "pad_token_id": 0}
    for prompt, answer in zip(prompts, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :]
        assert answer == expected.tolist()


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3", "tools"])
def test_a_prompt_is_what_training_has_before_the_last_answer(name: str):
    roles = ("system", "user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]
    record, tokenizer = {"messages": turns}, family("chatml" if name == "tools" else name)
    if name == "tools":
        tokenizer = tool_tokenizer("qwen")
        call = {"name": "ping", "arguments": {"host": "r1"}}
        turns[2]["tool_calls"] = [{"id": "a", "type": "function", "function": call}]
        turns[3] = {"role": "tool", "tool_call_id": "a", "content": "1 ms"}
        tool = {"name": "ping", "description": "d", "parameters": {"type": "object"}}
        record["tools"] = [{"type": "function", "function": tool}]
    conversation = to_conversation(record, "messages")
    prompt = EvalPrompt(0, None, conversation.messages[:-1], conversation.tools, "x", True)
    (one,) = AskedPrompts([prompt], tokenizer, cutoff_len=1 << 20, max_new_tokens=512).asked
    sample = Renderer(tokenizer, 1 << 20)(conversation)[-1]
    supervised = np.flatnonzero(sample.supervised)
    # of the last run of targets
    begin = supervised[np.flatnonzero(np.diff(supervised, prepend=-2) > 1)[-1]]
    assert one.ids == sample.input_ids[:begin].tolist()


def test_prompts_without_room_count_as_wrong_and_ranks_share_the_others():
    records = [{"prompt": "x" * length, "response": "Answer: 1"} for length in (1, 300, 2, 9)]
    turns = [to_conversation(record, detect_format(record)) for record in records]
    prompts = [EvalPrompt(n, None, one.messages[:-1], (), "1", True) for n, one in enumerate(turns)]
    asked = AskedPrompts(prompts, family("chatml"), cutoff_len=64, max_new_tokens=512)
    assert (asked.total, asked.too_long, len(asked.asked)) == (4, 1, 3)
    assert all(len(one.ids) + one.max_new_tokens == 64 for one in asked.asked)
    for ranks, tokens, sizes in ((1, 150, [2, 1]), (2, 64, [2, 1]), (2, 150, [3]), (1, 1, [1] * 3)):
        assert [len(turn) for turn in asked._turns(ranks, tokens)] == sizes
    metrics = asked._metrics([[None, True, True], [None, False, False], [None, True, True]])
    assert metrics == {"exact_match": 0.5, "answers": 4, "answers_cut": 1, "prompts_too_long": 1}
    short = AskedPrompts(prompts, family("chatml"), cutoff_len=64, max_new_tokens=5)
    assert [one.max_new_tokens for one in short.asked] == [5] * 3


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    """Twelve questions with short answers that a run learns by heart."""
    made = run_helpers.make_materials(tmp_path_factory.mktemp("asked"), records=1)
    rows = []
    for number in range(12):
        output = f"{'because ' * (number % 3)}\nAnswer: {number % 5}"
        row = {"instruction": " ".join(["ABCDEFGHIJKL"[number]] * 4), "output": output}
        rows.append({**row, "answer": number % 5, "difficulty": LEVELS[number % 3]})
    write(made.data, rows)
    del rows[0]["answer"]
    write(made.valid, rows)
    return made


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    own = {"valid_data": str(materials.valid), "eval_generate": 8, "eval_steps": 10}
    own |= {"max_steps": 40, "global_batch_size": 12, "finetuning": "full"}
    own |= {"learning_rate": 2e-2, "lr_scheduler": "constant", "use_curriculum": True}
    stages = [{"until": 1.0, "mix": [1, 1, 1]}]
    own["curriculum"] = {"levels": list(LEVELS), "stages": stages}
    return materials.settings(output_dir, **(own | changes))


FOLLOWED = {"keep_best": True, "best_metric": "exact_match"}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    found = events(folder, "eval")
    return [{n: v for n, v in one.items() if n not in ("time", "event")} for one in found]


@pytest.fixture(scope="module")
def asked(materials: Materials) -> Path:
    run_helpers.train(settings(materials, materials.folder / "asked", **FOLLOWED))
    return materials.folder / "asked"


def test_the_run_says_what_transformers_answers_and_keeps_the_best(materials, asked, plain_answer):
    """By plain transformers, prompt by prompt, judged by the last line alone."""
    lines = {line["step"]: line for line in evaluations(asked)}
    assert list(lines) == [0, 10, 20, 30, 40]
    shares = {step: line["eval_exact_match"] for step, line in lines.items() if step}
    assert lines[0]["eval_exact_match"] < 0.25 < max(shares.values()) > min(shares.values())
    status = run_helpers.status(asked)
    best = max(shares, key=lambda step: (shares[step], -lines[step]["eval_loss"]))
    assert status["metric"] == "eval_exact_match" and status["best"] == shares[best]
    assert status["best_step"] == status["output_step"] == best

    model = AutoModelForCausalLM.from_pretrained(asked, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(asked)
    rows, right = run_helpers.lines(materials.valid), []
    # Eight of those with an answer, which row 0 has not: an even choice of each level's.
    for level, chosen in {"explain": (3, 6, 9), "reasoning": (1, 4, 7), "topology": (2, 8)}.items():
        answers = []
        for row in map(rows.__getitem__, chosen):
            turns = [{"role": "user", "content": row["instruction"]}]
            text = plain_answer(model, tokenizer, turns, max_length=96)
            last = re.search(r"Answer: (\S+)\Z", text.strip())
            answers.append(last is not None and last[1] == str(row["answer"]))
        found = lines[best][f"eval_exact_match/{level}"]
        assert found == pytest.approx(sum(answers) / len(answers))
        right += answers
    assert (shares[best], lines[best]["eval_answers"]) == (pytest.approx(sum(right) / 8), 8)


def test_answers_to_other_settings_are_not_compared(caplog: pytest.LogCaptureFixture):
    """But those at their default are, with checkpoints from before there were settings."""
    words = f"{RUN} --valid-data v --eval-steps 2 --keep-best --eval-generate 5 "

    def compared(more: str) -> str | None:
        config = resolve((words + more).split(), world_size=1).config
        return evaluated_data(config, SimpleNamespace(fingerprint="f"))

    exact = "--best-metric exact_match"
    assert (compared("--answer-field x"), compared(exact)) == ("f", "f:5")
    other = compared(f"{exact} --answer-field x --max-new-tokens 9")
    assert other == "f:5:answer_field=x:max_new_tokens=9"
    best = {"metric": "eval_exact_match", "value": 0.5, "step": 2, "data": "f:5"}
    assert read_best("eval_exact_match", {"best": best}, "f:5").value == 0.5
    assert read_best("eval_exact_match", {"best": best}, other).value is None
    assert "what is asked of it, is another than before" in caplog.text


def test_it_leaves_no_trace(materials: Materials, tmp_path: Path):
    """To the bit those of the run that generates nothing, with dropout and recomputation."""
    rows = run_helpers.lines(materials.valid)
    truths = write(tmp_path / "v.jsonl", [{**row, "truth": row.pop("answer", 0)} for row in rows])
    model = AutoModelForCausalLM.from_pretrained(materials.model)
    model.config.attention_dropout = 0.3
    model.save_pretrained(tmp_path / "dropping")
    AutoTokenizer.from_pretrained(materials.model).save_pretrained(tmp_path / "dropping")
    changes = {"model": str(tmp_path / "dropping"), "finetuning": "lora", "lora_dropout": 0.3}
    changes |= {"max_steps": 4, "eval_steps": 2, "gradient_checkpointing": True}
    changes |= {"valid_data": str(truths)}
    asking = {"eval_generate": 3, "answer_field": "truth", "max_new_tokens": 1}
    found = []
    for name, more in (("with", asking), ("without", {"eval_generate": None})):
        folder = tmp_path / name
        run_helpers.train(settings(materials, folder, **changes, **more))
        log = run_helpers.lines(folder / "trainer_log.jsonl")
        losses = [(line["loss"], line["grad_norm"]) for line in log]
        found.append((run_helpers.result_weights(folder), losses, evaluations(folder)))
    (weights, losses, first), (other_weights, other_losses, second) = found
    assert weights.keys() == other_weights.keys() and losses == other_losses and len(losses) == 4
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert [{name: line[name] for name in second[0]} for line in first] == second
    assert {(line["eval_answers"], line["eval_answers_cut"]) for line in first} == {(3, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "zero3"])
def test_ranks_answer_together(materials: Materials, tmp_path: Path, layout: str):
    """On two ranks that gather weights, or not: as one process answers."""
    changes = {**FOLLOWED, **run_helpers.LAYOUTS[layout]}
    run_helpers.train(settings(materials, tmp_path / "run", **changes, eval_generate=7), 2)
    run_helpers.train(settings(materials, tmp_path / "one", eval_generate=7))
    found, alone = evaluations(tmp_path / "run"), evaluations(tmp_path / "one")
    for one, other in zip(found, alone, strict=True):
        names = [name for name in other if "exact" in name or "answers" in name]
        assert [one[name] for name in names] == [other[name] for name in names]
    assert max(line["eval_exact_match"] for line in found) > 0.25


def test_settings_that_cannot_be_are_refused_or_noted():
    for flags, said in {
        "--eval-generate 5": "eval_generate is 5, and there is no validation data",
        "--eval-generate 0 --valid-data v": "greater than or equal to 1|at least 1",
        "--valid-data v --eval-steps 2 --keep-best --best-metric exact_match": (
            "best_metric is exact_match, and evaluations answer nothing"
        ),
        "--valid-data v --best-metric exact_match/nobody": "which no evaluation has",
        "--valid-data v --eval-generate 5 --max-new-tokens 0": "at least 1",
    }.items():
        with pytest.raises(FinetuneError, match=said):
            resolve(f"{RUN} {flags}".split(), world_size=1)
    notes = resolve(f"{RUN} --max-new-tokens 9".split(), world_size=1).notes
    (note,) = [note for note in notes if "max_new_tokens" in note]
    assert "eval_generate is not set" in note and "answer_field" not in note


def test_data_that_cannot_be_compared_is_refused(materials: Materials, tmp_path: Path):
    for left_out, metric, words in (
        ("answer", "loss", "no validation record has 'answer'"),
        ("difficulty", "exact_match/topology", "no validation record of difficulty 'topology'"),
    ):
        rows = run_helpers.lines(materials.valid)
        kept = [{n: v for n, v in row.items() if n != left_out} for row in rows]
        changes = {"valid_data": str(write(tmp_path / "valid.jsonl", kept)), "keep_best": True}
        with pytest.raises(FinetuneError, match=words):
            finetune.run(settings(materials, tmp_path / "run", **changes, best_metric=metric))
        assert not (tmp_path / "run").exists()
