"""Pages of a network handbook for the base model's corpus: definitions and worked examples, as documents.

A base model has read about its field before it is asked anything. The pages hold the definitions of the table of facts
and examples solved like those of train.jsonl, on other numbers and networks; no page is a question with its answer as a
turn, and no shipped question is in one.
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
DEFINITIONS_SHARE = 0.4


class Handbook:
    """Draws pages. Args: shipped: questions (instruction and input) that no page may hold."""

    def __init__(self, shipped: set[str]) -> None:
        self.shipped = shipped
        self.facts = read_facts()

    def __call__(self, draw: Draw, language: str) -> tuple[str, str]:
        """A request and its page."""
        if draw.chance(DEFINITIONS_SHARE):
            pieces = self._definitions(draw, language)
        else:
            pieces = [self._example(draw, language) for _ in range(draw.integer(1, 2))]
            pieces.insert(0, {"en": "Worked examples", "zh": "例题"}[language])
        return draw.pick(REQUESTS[language]), "\n".join(pieces)

    def _definitions(self, draw: Draw, language: str) -> list[str]:
        facts: list[Fact] = [fact for fact in self.facts if fact.language == language]
        heading = {"en": "Glossary", "zh": "术语"}[language]
        return [heading, *(draw.pick(facts).answer for _ in range(draw.integer(3, 5)))]

    def _example(self, draw: Draw, language: str) -> str:
        while True:
            if draw.chance(0.55):
                row = reasoning_row(draw.pick(list(TEXTS)), language, draw)
            else:
                row = topology_row(draw.pick(list(KINDS)), language, draw)
            question = "\n".join(part for part in (row["instruction"], row["input"]) if part)
            if question not in self.shipped:
                return f"{question}\n{row['output']}"
