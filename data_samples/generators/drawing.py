"""Random draws that are the same in every Python version, and the form of a record."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")
Row = dict[str, str]
LANGUAGES = ("en", "zh")
ANSWER = {"en": "Answer: ", "zh": "答案："}


class Draw:
    """Draws from a named seed. Only `Random.random` is used, the one method whose sequence Python
    promises to keep.
    """

    def __init__(self, *names: object) -> None:
        self._random = random.Random("/".join(str(name) for name in names))

    def integer(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random.random() < probability

    def pick(self, items: Sequence[Item]) -> Item:
        """One of the items."""
        return items[self.integer(0, len(items) - 1)]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """The items in a random order."""
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = self.integer(0, last)
            result[last], result[other] = result[other], result[last]
        return result


def spaced(text: str) -> str:
    """Put a space between Chinese characters and Latin letters or digits, as technical Chinese is
    set.
    """
    return re.sub(
        r"(?<=[\u4e00-\u9fff])(?=[A-Za-z0-9:/])|(?<=[A-Za-z0-9%])(?=[\u4e00-\u9fff])", " ", text
    )


def solved_row(
    level: str, language: str, instruction: str, text: str, steps: str, answer: str
) -> Row:
    """A record whose output shows the steps and ends with the answer in a fixed form. `text` is the
    alpaca `input`.
    """
    return {
        "instruction": instruction,
        "input": text,
        "output": f"{steps}\n{ANSWER[language]}{answer}",
        "difficulty": level,
        "answer": answer,
    }
