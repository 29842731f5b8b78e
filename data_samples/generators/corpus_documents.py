"""Pages of a network handbook for the base model's corpus: glossary, index and worked examples, as
documents.

A base model has read about its field before it is asked anything. The pages hold the table of
facts, as sentences and as entries of an index, and problems solved like those of train.jsonl, on
other numbers and networks; no page is a question with its answer as a turn, no fact is asked for,
and no shipped question is in a page.
"""

from __future__ import annotations

from drawing import Draw
from networks_explain import Fact, read_facts
from networks_topology import KINDS, topology_row
from reasoning_texts import TEXTS, reasoning_row

REQUESTS = {
    "en": ("Write a page of the network handbook.", "Next page.", "Continue the handbook."),
    "zh": ("写一页网络手册。", "下一页。", "继续写手册。"),
}
FACTS_SHARE = 0.4
INDEX_SHARE = 0.7  # of the pages of facts
# The heading that an entry of the index stands under, by the kind of its fact.
HEADINGS = {
    "en": {
        "protocol": "Protocols",
        "thing": "Terms",
        "port": "Ports",
        "command": "Commands",
        "layer": "OSI layers",
        "address": "Special addresses",
        "difference": "Differences",
        "size": "Lengths",
    },
    "zh": {
        "protocol": "协议",
        "thing": "术语",
        "port": "端口",
        "command": "命令",
        "layer": "OSI 层次",
        "address": "特殊地址",
        "difference": "区别",
        "size": "长度",
    },
}
ENTRIES = {
    "en": ("{h} - {t}: {a}", "{t} ({h}): {a}", "{h}, entry {t}. {a}"),
    "zh": ("{h}：{t}。{a}", "{t}（{h}）：{a}", "{h}词条 {t}：{a}"),
}


class Handbook:
    """Draws pages. Args: shipped: questions (instruction and input) that no page may hold."""

    def __init__(self, shipped: set[str]) -> None:
        self.shipped = shipped
        self.facts = read_facts()

    def __call__(self, draw: Draw, language: str) -> tuple[str, str]:
        """A request and its page."""
        if draw.chance(FACTS_SHARE):
            pieces = self._facts(draw, language)
        else:
            pieces = [self._example(draw, language) for _ in range(draw.integer(1, 2))]
            pieces.insert(0, {"en": "Worked examples", "zh": "例题"}[language])
        return draw.pick(REQUESTS[language]), "\n".join(pieces)

    def _facts(self, draw: Draw, language: str) -> list[str]:
        """Facts as the sentences of a glossary, or each under its heading and term."""
        facts: list[Fact] = [fact for fact in self.facts if fact.language == language]
        chosen = [draw.pick(facts) for _ in range(draw.integer(3, 5))]
        if draw.chance(INDEX_SHARE):
            form = draw.pick(ENTRIES[language])
            entries = [
                form.format(h=HEADINGS[language][f.kind], t=f.term, a=f.answer) for f in chosen
            ]
            return [{"en": "Index", "zh": "索引"}[language], *entries]
        return [{"en": "Glossary", "zh": "词汇"}[language], *(fact.answer for fact in chosen)]

    def _example(self, draw: Draw, language: str) -> str:
        while True:
            if draw.chance(0.55):
                row = reasoning_row(draw.pick(list(TEXTS)), language, draw)
            else:
                row = topology_row(draw.pick(list(KINDS)), language, draw)
            question = "\n".join(part for part in (row["instruction"], row["input"]) if part)
            if question not in self.shipped:
                return f"{question}\n{row['output']}"
