"""Trained turns without the thinking that begins them, for --train-thinking false.

Thinking is what stands between the generation prompt and the answer: a think block (of the
template, empty ones too, or of the record's own text), or `reasoning_content` in whatever form the
template gives it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from finetune.data.encoding.spans import Rendering, Turn
from finetune.data.formats import Message
from finetune.data.problems import RecordProblem

_OPEN, _CLOSE = "<think>", "</think>"


def behind_thinking(rendering: Rendering) -> Rendering:
    """The rendering with turns that begin behind their thinking.

    Raises:
        RecordProblem: the template gives reasoning in a form in which its end is not found.
    """
    answers = [
        message for message in rendering.messages if message.role == "assistant" and message.trained
    ]
    # A rendering for one answer of several has the turn of the last.
    turns = zip(rendering.turns, answers[-len(rendering.turns) :], strict=True)
    return replace(
        rendering, turns=tuple(_behind(rendering.text, turn, answer) for turn, answer in turns)
    )


def _behind(text: str, turn: Turn, answer: Message) -> Turn:
    written = text[turn.start : turn.end]
    reasoning, content = (answer.reasoning or "").strip(), answer.content.strip()
    by_prompt = text[: turn.start].rstrip().endswith(_OPEN)
    if _CLOSE in written and (by_prompt or written.lstrip().startswith(_OPEN)):
        rest = _behind_block(written, reasoning, content, by_prompt)
        return replace(turn, start=turn.end - len(rest))
    if not reasoning:
        return turn
    at = written.find(reasoning)
    found = written.find(content, at + len(reasoning))
    if at < 0 or found < 0 or not content:
        raise _untold()
    return replace(turn, start=turn.start + found)


def _behind_block(written: str, reasoning: str, content: str, by_prompt: bool) -> str:
    """What is written behind the think block with which an answer begins."""
    rests = [written[found.end() :].lstrip() for found in re.finditer(_CLOSE, written)]
    if reasoning and _CLOSE in reasoning + content:  # the first tag may be a quoted one
        _, found, behind = written.partition(reasoning)
        if not found or not behind.lstrip().startswith(_CLOSE):
            raise _untold()
        return behind.lstrip().removeprefix(_CLOSE).lstrip()
    if by_prompt and _CLOSE in content:
        # Either the template closes the block and then comes the content, or the content closes it.
        for begins in (content, content.partition(_CLOSE)[2].strip()):
            for rest in rests:
                if rest.startswith(begins):
                    return rest
        raise _untold()
    return rests[0]


def _untold() -> RecordProblem:
    return RecordProblem(
        "thinking not told from the answer",
        "the chat template writes 'reasoning_content' in a form of its own; leave out"
        " --train-thinking false",
    )
