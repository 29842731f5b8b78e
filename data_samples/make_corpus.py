"""Write the corpus on which the bundled base model is trained. It is not shipped; the same script gives the same bytes.

    python data_samples/make_corpus.py --out runs/base_corpus

The records come from the same world as train.jsonl, in English and Chinese, as `messages` with one to three turns, some
with a system prompt: small tasks, and pages of a handbook (corpus_documents.py). No question of train.jsonl or
valid.jsonl is among them. A model trained on them speaks the chat template and has read about the field, and still has
to learn from train.jsonl to answer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from corpus_documents import Handbook
from corpus_tasks import TASKS, Turn
from drawing import LANGUAGES, Draw
from make_data import SYSTEM_PROMPTS, question, split_rows
from networks_explain import read_facts

TRAIN_NAME, VALID_NAME = "corpus.jsonl", "corpus_valid.jsonl"
TRAIN_ROWS, VALID_ROWS = 20000, 200
SYSTEM_SHARE, SECOND_TURN_SHARE = 0.15, 0.2
HANDBOOK_WEIGHT = 100  # the small tasks together have as much


def weighted_tasks(shipped: set[str]) -> list[Any]:
    """Each task as often as its weight."""
    return [task for weight, task in (*TASKS, (HANDBOOK_WEIGHT, Handbook(shipped))) for _ in range(weight)]


def draw_turns(draw: Draw, tasks: list[Any], language: str) -> list[Turn]:
    """One to three questions with their answers, in one language."""
    turns = [draw.pick(tasks)(draw, language)]
    while len(turns) < 3 and draw.chance(SECOND_TURN_SHARE):
        turns.append(draw.pick(tasks)(draw, language))
    return turns


def corpus_row(draw: Draw, turns: list[Turn]) -> dict[str, Any]:
    """The turns as messages, sometimes below a system prompt."""
    messages = [{"role": "system", "content": draw.pick(SYSTEM_PROMPTS)}] if draw.chance(SYSTEM_SHARE) else []
    for asked, answered in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {"messages": messages}


def corpus_rows(count: int, valid_count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train and valid records, which share no question with each other or with the shipped files."""
    draw = Draw("corpus")
    splits = split_rows()  # the questions of the pairs came later; the tests find none of them in the corpus
    shipped = {question(row) for name in ("train", "valid", "spare") for row in splits[name]}
    tasks = weighted_tasks(shipped)
    facts = {fact.answer for fact in read_facts()}
    asked_in_train: set[str] = set()
    train: list[dict[str, Any]] = []
    valid: list[dict[str, Any]] = []
    while len(train) < count or len(valid) < valid_count:
        turns = draw_turns(draw, tasks, LANGUAGES[(len(train) + len(valid)) % 2])
        asked = {question for question, _ in turns}
        if asked & shipped or any(answer in facts for _, answer in turns):
            continue
        if len(train) < count:
            asked_in_train |= asked
            train.append(corpus_row(draw, turns))
        elif not asked & asked_in_train:
            valid.append(corpus_row(draw, turns))
    return train, valid


def write_corpus(folder: Path, count: int = TRAIN_ROWS, valid_count: int = VALID_ROWS) -> tuple[Path, Path]:
    """Write both files into `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / TRAIN_NAME, folder / VALID_NAME
    for path, rows in zip(paths, corpus_rows(count, valid_count), strict=True):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8", newline="\n")
    return paths


def main() -> None:
    """Read the command line and write the corpus."""
    parser = argparse.ArgumentParser(description="Write the corpus of the bundled base model.")
    parser.add_argument("--out", type=Path, default=Path("runs/base_corpus"), help="folder to write to")
    parser.add_argument("--rows", type=int, default=TRAIN_ROWS)
    options = parser.parse_args()
    for path in write_corpus(options.out, options.rows):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
