"""Write the corpus on which the bundled base model is trained. It is not shipped; the same script
gives the same bytes.

    python data_samples/generators/make_corpus.py --out runs/base_corpus

The records come from the same world as train.jsonl, in English and Chinese, as `messages` with one
to three turns, some with a system prompt: small tasks, and pages of a handbook
(corpus_documents.py). No question of train.jsonl or valid.jsonl is among them. A model trained on
them speaks the chat template and has read about the field, and still has to learn from train.jsonl
to answer.
"""

from __future__ import annotations

import argparse
import json
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from corpus_documents import REQUESTS, Handbook
from corpus_tasks import TASKS, Turn
from drawing import LANGUAGES, Draw
from make_data import SYSTEM_PROMPTS, question, split_rows
from networks_explain import read_facts

PART_NAME, VALID_NAME = "corpus-{:03d}.jsonl", "corpus_valid.jsonl"
PARTS, PART_ROWS, VALID_ROWS = 70, 20000, 200
SYSTEM_SHARE, SECOND_TURN_SHARE = 0.15, 0.2
HANDBOOK_WEIGHT = 100  # the small tasks together have as much


def weighted_tasks(shipped: set[str]) -> list[Any]:
    """Each task as often as its weight."""
    return [
        task
        for weight, task in (*TASKS, (HANDBOOK_WEIGHT, Handbook(shipped)))
        for _ in range(weight)
    ]


def draw_turns(draw: Draw, tasks: list[Any], language: str) -> list[Turn]:
    """One to three questions with their answers, in one language."""
    turns = [draw.pick(tasks)(draw, language)]
    while len(turns) < 3 and draw.chance(SECOND_TURN_SHARE):
        turns.append(draw.pick(tasks)(draw, language))
    return turns


def corpus_row(draw: Draw, turns: list[Turn]) -> dict[str, Any]:
    """The turns as messages, sometimes below a system prompt."""
    messages = (
        [{"role": "system", "content": draw.pick(SYSTEM_PROMPTS)}]
        if draw.chance(SYSTEM_SHARE)
        else []
    )
    for asked, answered in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {"messages": messages}


def corpus_rows(name: str, count: int, taken: set[str] = frozenset()) -> list[dict[str, Any]]:
    """Records of the part `name`, with none of the shipped questions and none of `taken`."""
    draw = Draw("corpus", name)
    shipped = {question(row) for rows in split_rows().values() for row in rows}
    tasks = weighted_tasks(shipped)
    kept_out = shipped | taken
    facts = {fact.answer for fact in read_facts()}
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        turns = draw_turns(draw, tasks, LANGUAGES[len(rows) % 2])
        if not any(asked in kept_out or answer in facts for asked, answer in turns):
            rows.append(corpus_row(draw, turns))
    return rows


def asked_in(rows: list[dict[str, Any]]) -> set[str]:
    """The questions of some records that say more than that a page is wanted."""
    asked = {
        message["content"]
        for row in rows
        for message in row["messages"]
        if message["role"] == "user"
    }
    return asked - {request for requests in REQUESTS.values() for request in requests}


def write_part(job: tuple[Path, str, int, set[str]]) -> Path:
    """Write one file of the corpus: its path, its name as a part, its records, the questions that
    it must not hold.
    """
    path, name, count, taken = job
    text = "".join(
        json.dumps(row, ensure_ascii=False) + "\n" for row in corpus_rows(name, count, taken)
    )
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def write_corpus(
    folder: Path, parts: int = PARTS, part_rows: int = PART_ROWS
) -> tuple[list[Path], Path]:
    """Write the parts and the valid file into `folder`, which share no question; return their
    paths.

    The bytes do not depend on how many processes work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    valid = write_part((folder / VALID_NAME, "valid", VALID_ROWS, set()))
    taken = asked_in([json.loads(line) for line in valid.read_text(encoding="utf-8").splitlines()])
    jobs = [
        (folder / PART_NAME.format(number), str(number), part_rows, taken)
        for number in range(parts)
    ]
    if parts == 1:
        return [write_part(jobs[0])], valid
    with Pool() as pool:
        return pool.map(write_part, jobs, chunksize=1), valid


def main() -> None:
    """Read the command line and write the corpus."""
    parser = argparse.ArgumentParser(description="Write the corpus of the bundled base model.")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/base_corpus"), help="folder to write to"
    )
    parser.add_argument("--parts", type=int, default=PARTS, help=f"files of {PART_ROWS} records")
    options = parser.parse_args()
    parts, valid = write_corpus(options.out, options.parts)
    for path in (*parts, valid):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
