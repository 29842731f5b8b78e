"""`make demo`: the main job on this machine, for real, then what it gave.

LoRA fine-tuning under DeepSpeed ZeRO-3 with optimizer and parameters offloaded to the CPU, two
processes, the staged curriculum on, bundled data and model. Then `finetune eval` asks base and
adapter all held-out questions: an answer of each difficulty in both languages, loss and right
answers by difficulty, beside what guessing would give.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CONFIG, TRAIN, VALID = (
    "ds_configs/zero3.json",
    "data_samples/train.jsonl",
    "data_samples/valid.jsonl",
)
TRAINING = ("--max-steps", "100", "--eval-steps", "0")
ANSWERS = ("--generate", "all", "--max-new-tokens", "120", "--batch-size", "75")
LEVELS = ("explain", "reasoning", "topology")
RECALLED_SHARE = 0.75  # of the reference's key terms
# Words that say nothing about a thing.
COMMON_WORDS = (
    "a an the is are of to in and or it its that this for from on with by as at be one so not no do"
    " does what which how has have each other all up than into over only uses used use"
)
Row = dict[str, Any]


def run(command: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Run one of this package's commands; ends this process with its exit code if it fails."""
    print(
        "$",
        " ".join(
            [
                "accelerate launch" if word == "accelerate.commands.launch" else word
                for word in command[2:]
            ]
        ),
    )
    sys.stdout.flush()
    # The two processes of the training share the machine's cores; the first start also builds
    # DeepSpeed's extensions.
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})}
    code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    if code != 0:
        sys.exit(code)


def train(output_dir: Path) -> None:
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate_configs/cpu_2_zero3.yaml",
    ]
    own = ["--config", CONFIG, "--device-type", "cpu", *TRAINING, "--output-dir", str(output_dir)]
    # Both are what would be chosen; without them torch and DeepSpeed print warnings first.
    run([*launch, "-m", "finetune.sft", *own], {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})


def evaluate(output_dir: Path) -> None:
    asked = [
        "--model",
        str(output_dir),
        "--base",
        "--data",
        VALID,
        "--device-type",
        "cpu",
        *ANSWERS,
    ]
    run(
        [
            sys.executable,
            "-m",
            "finetune",
            "eval",
            *asked,
            "--output",
            str(output_dir / "evaluation"),
        ]
    )


def read_evaluation(output_dir: Path) -> tuple[list[dict[str, Any]], list[list[Row]]]:
    """Figures of base and adapter, and what each of them answered to every held-out record, in the
    records' order.
    """
    folder = output_dir / "evaluation"
    models = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["models"]
    given = read_rows(folder / "generations.jsonl")
    by_row = [
        sorted((g for g in given if g["model"] == model["name"]), key=lambda g: g["row"])
        for model in models
    ]
    return models, by_row


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------------- what counts as right


def key_terms(text: str) -> set[str]:
    """What a text is about: its words and numbers but the common ones; of Chinese each two
    characters that follow.
    """
    words = re.findall(r"[a-z0-9](?:[a-z0-9./:-]*[a-z0-9])?", text.lower())
    chinese = re.findall(r"[\u4e00-\u9fff]{2,}", text)
    return set(words) - set(COMMON_WORDS.split()) | {
        run[place : place + 2] for run in chinese for place in range(len(run) - 1)
    }


def recalls(answer: str, record: Row) -> bool:
    """Whether an answer has the key terms of the record's, those of the question not counted."""
    wanted = key_terms(record["output"]) - key_terms(record["instruction"])
    return len(wanted & key_terms(answer)) >= RECALLED_SHARE * len(wanted)


def is_chinese(record: Row) -> bool:
    return bool(re.search(r"[\u4e00-\u9fff]", record["instruction"]))


def question_form(record: Row) -> str:
    """A question without its numbers and the nodes of its network."""
    text = record["instruction"]
    names = set(re.findall(r"[^\s,，:：]+", record["input"].replace("-", " ")))
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, "")
    return re.sub(r"[\d.]+", "0", text)


def guessed_right(records: list[Row], training: list[Row]) -> int:
    """How many are right if each gets the most frequent answer that training has to questions of
    its form.
    """
    answers: dict[str, Counter[str]] = {}
    for row in training:
        if "answer" in row:
            answers.setdefault(question_form(row), Counter())[row["answer"]] += 1
    guesses = (answers.get(question_form(record)) for record in records)
    return sum(
        g is not None and g.most_common(1)[0][0] == r["answer"]
        for g, r in zip(guesses, records, strict=True)
    )


# ---------------------------------------------------------------------- what is shown


def right_answers(level: str, records: list[Row], given: list[Row]) -> int:
    pairs = [(g, r) for g, r in zip(given, records, strict=True) if r["difficulty"] == level]
    return sum(
        recalls(g["text"], r) if level == "explain" else bool(g["correct"]) for g, r in pairs
    )


def figures_table(
    models: list[dict[str, Any]], given: list[list[Row]], records: list[Row], training: list[Row]
) -> Table:
    title = (
        "held-out records: loss, and right answers (explain: the facts recalled in a new wording)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("difficulty")
    for name in ("loss: base", "with adapter", "right: base", "with adapter", "by guessing"):
        table.add_column(name, justify="right")
    for level in LEVELS:
        of_level = [record for record in records if record["difficulty"] == level]
        losses = [f"{model['levels'][level]['loss']:.3f}" for model in models]
        right = [right_answers(level, records, one) for one in given]
        guess = (
            f"{guessed_right(of_level, training) / len(of_level):.0%}"
            if "answer" in of_level[0]
            else "-"
        )
        table.add_row(level, *losses, *(f"{count / len(of_level):.0%}" for count in right), guess)
    return table


def answers_table(given: list[list[Row]], records: list[Row]) -> Table:
    """The first question of each difficulty in both languages."""
    table = Table(title="answers", show_lines=True, title_justify="left")
    for name in ("difficulty", "question", "base model", "with the adapter", "reference"):
        table.add_column(name, overflow="fold")
    for level in LEVELS:
        for chinese in (False, True):
            number = next(
                n
                for n, r in enumerate(records)
                if r["difficulty"] == level and is_chinese(r) == chinese
            )
            record, (base, tuned) = records[number], (one[number]["text"] for one in given)
            table.add_row(
                level,
                "\n".join(filter(None, (record["instruction"], record["input"]))),
                base,
                tuned,
                record["output"],
            )
    return table


def main() -> None:
    began = time.monotonic()
    output_dir = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    os.chdir(ROOT)
    train(output_dir)
    evaluate(output_dir)
    models, given = read_evaluation(output_dir)
    records, training = read_rows(Path(VALID)), read_rows(Path(TRAIN))
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(answers_table(given, records))
    console.print(figures_table(models, given, records, training))
    print(
        "by guessing: always the most frequent answer of the training records to that form of"
        " question"
    )
    print(f"talk to it: python -m finetune chat --model {output_dir}")
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
