"""Explain records: what a thing of networks is, from the facts in networks_facts.txt and several
question forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drawing import LANGUAGES, Draw, Row, spaced

LEVEL = "explain"
FACTS_FILE = Path(__file__).resolve().parents[1] / "networks_facts.txt"
SECOND_QUESTIONS = 192  # facts (counted per language) that train asks in two forms
LISTS = {"train": 20, "valid": 2, "spare": 8}  # rows that ask for several facts at once

FORMS: dict[str, dict[str, tuple[str, ...]]] = {
    "protocol": {
        "en": (
            "What is {t}?",
            "What is {t} used for?",
            "Explain {t} briefly.",
            "What does {t} do in a network?",
        ),
        "zh": ("什么是{t}？", "{t}有什么用？", "请简单解释{t}。", "{t}在网络中起什么作用？"),
    },
    "thing": {
        "en": (
            "What is {t}?",
            "Explain {t} in one sentence.",
            "What does the term {t} mean?",
            "Define {t}.",
        ),
        "zh": ("什么是{t}？", "请用一句话解释{t}。", "{t}是什么意思？", "请给出{t}的定义。"),
    },
    "port": {
        "en": (
            "Which port does {t} use?",
            "What is the default port of {t}?",
            "Name the port of {t}.",
        ),
        "zh": ("{t}使用哪个端口？", "{t}的默认端口是多少？", "请说出{t}的端口。"),
    },
    "command": {
        "en": ("What does the command `{t}` do?", "What is `{t}` for?", "When do I use `{t}`?"),
        "zh": ("命令 `{t}` 有什么作用？", "`{t}` 是做什么的？", "什么时候使用 `{t}`？"),
    },
    "layer": {
        "en": (
            "At which OSI layer is {t}?",
            "Which layer of the OSI model does {t} belong to?",
            "Name the layer of {t}.",
        ),
        "zh": ("{t}在 OSI 的第几层？", "{t}属于 OSI 模型的哪一层？", "请说出{t}所在的层。"),
    },
    "address": {
        "en": ("What is {t}?", "What is {t} used for?", "Explain the meaning of {t}."),
        "zh": ("{t}是什么？", "{t}有什么用？", "请解释{t}的含义。"),
    },
    "difference": {
        "en": ("What is the difference between {t}?", "Compare {t}.", "How do {t} differ?"),
        "zh": ("{t}有什么区别？", "请比较{t}。", "{t}有何不同？"),
    },
    "size": {
        "en": ("How long is {t}?", "How many bits does {t} have?", "State the length of {t}."),
        "zh": ("{t}有多长？", "{t}有多少位？", "请说出{t}的长度。"),
    },
}
LIST_FORMS = {
    "en": "Explain each in one or two sentences: {t}.",
    "zh": "请逐一解释：{t}。",
}
LIST_SEPARATOR = {"en": "; ", "zh": "；"}


@dataclass(frozen=True)
class Fact:
    """One line of the table in one language."""

    kind: str
    language: str
    term: str
    answer: str

    def rows(self, draw: Draw) -> list[Row]:
        """One row for each question form, in a random order."""
        forms = draw.shuffled(FORMS[self.kind][self.language])
        return [explain_row(fill(form, self.term, self.language), self.answer) for form in forms]


def fill(form: str, term: str, language: str) -> str:
    """Put the term into a question form."""
    text = form.format(t=term)
    return spaced(text) if language == "zh" else text


def explain_row(instruction: str, output: str) -> Row:
    """A record of this difficulty. It has no `answer`: a definition can be right in many words."""
    return {"instruction": instruction, "input": "", "output": output, "difficulty": LEVEL}


def read_facts() -> list[Fact]:
    """Read the table; every line gives one English and one Chinese fact."""
    facts = []
    for line in FACTS_FILE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            kind, term_en, term_zh, answer_en, answer_zh = line.split(" | ")
            facts += [Fact(kind, "en", term_en, answer_en), Fact(kind, "zh", term_zh, answer_zh)]
    return facts


def list_rows(facts: list[Fact], language: str, count: int) -> list[Row]:
    """Records that ask for two to six facts at once: the long ones of this difficulty."""
    draw = Draw("explain", "lists", language)
    terms = [
        fact for fact in facts if fact.language == language and fact.kind in ("protocol", "thing")
    ]
    rows = []
    for number in range(count):
        chosen = draw.shuffled(terms)[: 2 + number % 5]
        names = LIST_SEPARATOR[language].join(fact.term for fact in chosen)
        answers = "\n".join(f"{place}. {fact.answer}" for place, fact in enumerate(chosen, 1))
        rows.append(explain_row(LIST_FORMS[language].format(t=names), answers))
    return rows


def explain_rows(valid_count: int) -> dict[str, list[Row]]:
    """All records of this difficulty as {"train": ..., "valid": ..., "spare": ...}; half English,
    half Chinese.

    Train asks every fact once and some twice. Valid asks facts of the second kind in a third form:
    whoever has learned the answer from train can give it. `spare` holds the forms that neither
    uses, for the multi-turn files.
    """
    facts = read_facts()
    split: dict[str, list[Row]] = {"train": [], "valid": [], "spare": []}
    for language in LANGUAGES:
        draw = Draw("explain", language)
        chosen = draw.shuffled([fact for fact in facts if fact.language == language])
        singles = (valid_count - LISTS["valid"]) // 2
        for place, fact in enumerate(chosen):
            rows = fact.rows(draw)
            in_train = 2 if place < SECOND_QUESTIONS // 2 else 1
            in_valid = 1 if place < singles else 0
            split["train"] += rows[:in_train]
            split["valid"] += rows[in_train : in_train + in_valid]
            split["spare"] += rows[in_train + in_valid :]
        lists = list_rows(facts, language, sum(LISTS.values()) // 2)
        for name, count in LISTS.items():
            split[name] += lists[: count // 2]
            lists = lists[count // 2 :]
    return split
