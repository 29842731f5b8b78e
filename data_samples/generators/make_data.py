"""Write the data files that ship with the package: the same bytes on every machine and Python
version.

python data_samples/generators/make_data.py               # into data_samples/
python data_samples/generators/make_data.py --out FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from drawing import LANGUAGES, Draw, Row
from networks_explain import explain_rows
from networks_topology import topology_rows
from reasoning_texts import reasoning_rows
from wrong_answers import preference_row

DATA = Path(__file__).resolve().parents[1]
VALID_ROWS = 50  # of each difficulty
# explain has as many as the table of facts gives, 600
TRAIN_ROWS = {"reasoning": 500, "topology": 400}
SPARE_ROWS = 40  # of reasoning and topology, for the conversations
CONVERSATIONS = 20  # in each of the two multi-turn files
PAIRS = {"preference_train": 300, "preference_valid": 50}  # of reasoning and topology each

SYSTEM_PROMPTS = (
    "You are an assistant for network engineers. Answer briefly.",
    "你是一名网络工程师助手，请简短回答。",
    "Answer in the language of the question.",
    "",
)
FILES = (
    "train.jsonl", "valid.jsonl", "sharegpt.json", "messages.jsonl", "broken.jsonl",
    "preference_train.jsonl", "preference_valid.jsonl",
)  # fmt: skip


def split_rows() -> dict[str, list[Row]]:
    """All records: train, valid, spare and those of pairs, each shuffled; no question is in two of
    them.
    """
    counts = {"valid": VALID_ROWS, "spare": SPARE_ROWS}
    levels = [
        explain_rows(VALID_ROWS),
        reasoning_rows({**counts, "train": TRAIN_ROWS["reasoning"], **PAIRS}),
        topology_rows({**counts, "train": TRAIN_ROWS["topology"], **PAIRS}),
    ]
    return {
        name: Draw("order", name).shuffled([row for level in levels for row in level.get(name, [])])
        for name in ("train", "valid", "spare", *PAIRS)
    }


def question(row: Row) -> str:
    """The user's turn of a row: the instruction, and the input below it where there is one."""
    return f"{row['instruction']}\n{row['input']}" if row["input"] else row["instruction"]


def is_chinese(row: Row) -> bool:
    """Whether a row is in Chinese."""
    return any("\u4e00" <= character <= "\u9fff" for character in row["instruction"])


def conversations(spare: list[Row]) -> list[list[Row]]:
    """2 x CONVERSATIONS talks of one to four records, of one difficulty and language, that no other
    file has.
    """
    groups: dict[tuple[str, bool], list[Row]] = {}
    for row in spare:
        groups.setdefault((row["difficulty"], is_chinese(row)), []).append(row)
    result = []
    for number in range(2 * CONVERSATIONS):
        group = groups[sorted(groups)[number % len(groups)]]
        turns = 1 + number // len(groups) % 4
        result.append(group[:turns])
        del group[:turns]
    return result


def sharegpt_rows(talks: list[list[Row]]) -> list[dict[str, Any]]:
    """ShareGPT records: `conversations` of from/value, sometimes with a `system` turn."""
    rows = []
    for number, talk in enumerate(talks):
        turns = (
            [{"from": "system", "value": SYSTEM_PROMPTS[is_chinese(talk[0])]}]
            if number % 3 == 0
            else []
        )
        for row in talk:
            turns += [
                {"from": "human", "value": question(row)},
                {"from": "gpt", "value": row["output"]},
            ]
        rows.append({"conversations": turns, "difficulty": talk[0]["difficulty"]})
    return rows


def messages_rows(talks: list[list[Row]]) -> list[dict[str, Any]]:
    """Records of `messages` with role/content, most of them with a system prompt, which may be
    empty.
    """
    rows = []
    for number, talk in enumerate(talks):
        prompt = (
            SYSTEM_PROMPTS[is_chinese(talk[0])] if number % 4 < 2 else SYSTEM_PROMPTS[number % 4]
        )
        turns = [] if number % 8 == 7 else [{"role": "system", "content": prompt}]
        for row in talk:
            turns += [
                {"role": "user", "content": question(row)},
                {"role": "assistant", "content": row["output"]},
            ]
        rows.append({"messages": turns, "difficulty": talk[0]["difficulty"]})
    return rows


def preference_rows(rows: list[Row]) -> list[Row]:
    """Each with its right output and a wrong one."""
    return [preference_row(row, LANGUAGES[is_chinese(row)]) for row in rows]


def broken_lines() -> list[str]:
    """One line for each way in which an alpaca record can be bad, between two good ones. `defect`
    names it.
    """
    good = {
        "instruction": "What is a router?",
        "input": "",
        "output": "A device.",
        "difficulty": "explain",
    }
    changes: list[tuple[str, dict[str, Any]]] = [
        ("none", {}),
        ("no output", {"output": ...}),
        ("empty output", {"output": ""}),
        ("blank output", {"output": " \n\t"}),
        ("output is null", {"output": None}),
        ("output is a number", {"output": 42}),
        ("no instruction", {"instruction": ...}),
        ("empty instruction", {"instruction": ""}),
        ("instruction is a list", {"instruction": ["What is a router?"]}),
        ("input is a number", {"input": 7}),
        ("no difficulty", {"difficulty": ...}),
        ("difficulty is null", {"difficulty": None}),
        ("difficulty is a number", {"difficulty": 1}),
        ("unknown difficulty", {"difficulty": "explian"}),
    ]
    rows = [{"defect": defect, **good, **change} for defect, change in changes]
    lines = [
        json_line({key: value for key, value in row.items() if value is not ...}) for row in rows
    ]
    lines.append(json_line({"defect": "line cut off", **good})[:-20])
    lines.append(json_line(["row is a list", good["instruction"], good["output"]]))
    lines.append(json_line("row is a string"))
    lines.append("row is no JSON at all")
    lines.append(json_line({"defect": "none", **good, "instruction": "What is a switch?"}))
    return lines


def json_line(value: object) -> str:
    """One JSON value on one line, characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def make_files() -> dict[str, str]:
    """The content of every file by its name."""
    rows = split_rows()
    talks = list(enumerate(conversations(rows["spare"])))
    # Groups of six talks (three difficulties, two languages) are halved the other way round in
    # turn.
    sharegpt, messages = (
        [talk for number, talk in talks if (number + number // 6) % 2 == half] for half in (0, 1)
    )
    lines = {
        "train.jsonl": [json_line(row) for row in rows["train"]],
        "valid.jsonl": [json_line(row) for row in rows["valid"]],
        "messages.jsonl": [json_line(row) for row in messages_rows(messages)],
        "broken.jsonl": broken_lines(),
        **{
            f"{name}.jsonl": [json_line(row) for row in preference_rows(rows[name])]
            for name in PAIRS
        },
    }
    files = {name: "".join(f"{line}\n" for line in text) for name, text in lines.items()}
    files["sharegpt.json"] = (
        json.dumps(sharegpt_rows(sharegpt), ensure_ascii=False, indent=1) + "\n"
    )
    return files


def main() -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(description="Write the data files that ship with the package.")
    parser.add_argument("--out", type=Path, default=DATA, help="folder to write to")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in make_files().items():
        (options.out / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{options.out / name}: {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
