"""Trained turns without the thinking that begins them, for --train-thinking false.

Thinking is what stands between the generation prompt and the answer: a think block (of the template, empty ones too, or
of the record's own text), or `reasoning_content` in whatever form the template gives it.
"""

from __future__ import annotations

from dataclasses import replace

from finetune.data.formats import Message
from finetune.data.problems import RecordProblem
from finetune.data.spans import Rendering, Turn

_OPEN, _CLOSE = "<think>", "</think>"


def behind_thinking(rendering: Rendering) -> Rendering:
    """The rendering with turns that begin behind their thinking.

    Raises:
        RecordProblem: the template gives reasoning in a form in which its end is not found.
    """
    answers = [message for message in rendering.messages if message.role == "assistant" and message.trained]
    # A rendering for one answer of several has the turn of the last.
    turns = zip(rendering.turns, answers[-len(rendering.turns) :], strict=True)
    return replace(rendering, turns=tuple(_behind(rendering.text, turn, answer) for turn, answer in turns))


def _behind(text: str, turn: Turn, answer: Message) -> Turn:
    written = text[turn.start : turn.end]
    close = written.find(_CLOSE)
    if close >= 0 and (written.lstrip().startswith(_OPEN) or text[: turn.start].rstrip().endswith(_OPEN)):
        rest = written[close + len(_CLOSE) :].lstrip()
        return replace(turn, start=turn.end - len(rest))
    if not answer.reasoning:
        return turn
    reasoning, content = answer.reasoning.strip(), answer.content.strip()
    found = written.find(content, written.find(reasoning) + len(reasoning))
    if found < 0 or not content:
        raise RecordProblem(
            "thinking not told from the answer",
            "the chat template writes 'reasoning_content' in a form of its own; leave out --train-thinking false",
        )
    return replace(turn, start=turn.start + found)
