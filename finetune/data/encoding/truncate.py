"""A sample that is too long: what is left out, so that the answer survives and nothing is invented.

In this order, each step only if the one before was not enough:
1. tokens after the last target go: nothing is predicted from them;
2. the middles of prompt contents (system, user, tool, untrained answers) go, the longest content
   first, down to `PROMPT_FLOOR_TOKENS` each; headers, separators and generation prompts stay;
3. the last turns of the conversation go, one by one, down to the first trained one;
4. that turn's prompt contents go below the floor, so that the answer stays whole;
5. the answer itself does not fit: its end goes, with the end-of-turn token, so that the model never
   learns to stop in the middle. Up to a quarter of the room is then kept for the prompt: an answer
   to nothing teaches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetune.data.encoding.encode import Encoded

PROMPT_FLOOR_TOKENS = 32  # of each prompt content, before whole turns are left out


@dataclass(frozen=True)
class Kept:
    """Which tokens of a sample stay."""

    tokens: np.ndarray  # int64, their indices in order
    trimmed_tokens: int = 0  # taken out of prompt contents
    dropped_turns: int = 0  # trained answers left out from the end
    cut_answer: bool = False  # whether the last answer that stays lost its end


def fit(
    encoded: Encoded, contents: Sequence[np.ndarray], answers: Sequence[np.ndarray], cutoff_len: int
) -> Kept:
    """Choose at most `cutoff_len` of the T tokens of one sample.

    Args:
        contents: for each prompt content the indices of its tokens, contiguous and in order.
        answers: for each trained turn the indices of its tokens, in order; none empty.

    Returns:
        the tokens that stay; no target among them if the first answer's header alone is too long.
    """
    if len(encoded.ids) <= cutoff_len:
        return Kept(np.arange(len(encoded.ids)))
    for turns in range(len(answers), 0, -1):
        end = int(answers[turns - 1][-1]) + 1
        inside, lengths = _before(end, contents)
        room = cutoff_len - (end - int(lengths.sum()))
        floor = int(np.minimum(lengths, PROMPT_FLOOR_TOKENS).sum())
        if room >= floor or (turns == 1 and room >= 0):
            gone = _middles(encoded, inside, lengths, room)
            return Kept(np.delete(np.arange(end), gone), len(gone), len(answers) - turns)
    return _cut(encoded, contents, answers, cutoff_len)


def _cut(
    encoded: Encoded, contents: Sequence[np.ndarray], answers: Sequence[np.ndarray], cutoff_len: int
) -> Kept:
    """Step 5: the first answer, cut at the end."""
    start = int(answers[0][0])
    inside, lengths = _before(start, contents)
    room = cutoff_len - (start - int(lengths.sum()))
    if room < 1:
        return Kept(np.arange(0), 0, len(answers))
    gone = _middles(encoded, inside, lengths, room // 4)
    prompt = np.delete(np.arange(start), gone)
    # The answer alone is longer than the room (else `fit` had returned), so its last token is never
    # reached.
    answer = np.arange(start, start + cutoff_len - len(prompt))
    return Kept(np.concatenate([prompt, answer]), len(gone), len(answers) - 1, True)


def _before(end: int, contents: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """The contents that lie before token `end`, and their lengths, int64."""
    inside = [content for content in contents if len(content) and content[-1] < end]
    return inside, np.array([len(content) for content in inside], dtype=np.int64)


def _middles(
    encoded: Encoded, contents: Sequence[np.ndarray], lengths: np.ndarray, room: int
) -> np.ndarray:
    """Indices of the tokens to take out of the contents' middles so that at most `room` tokens of
    contents stay.
    """
    shares = zip(contents, _share(lengths, room), strict=True)
    gone = [_middle(encoded, content, keep) for content, keep in shares if keep < len(content)]
    return np.concatenate(gone) if gone else np.arange(0)


def _share(lengths: np.ndarray, room: int) -> list[int]:
    """How many tokens each content keeps: all of the short ones, and the same number of each longer
    one.
    """
    if int(lengths.sum()) <= room:
        return lengths.tolist()
    kept = np.zeros(len(lengths), dtype=np.int64)
    left = room
    by_length = np.argsort(lengths, kind="stable")
    for done, content in enumerate(by_length):
        kept[content] = min(int(lengths[content]), left // (len(lengths) - done))
        left -= int(kept[content])
    return kept.tolist()


def _middle(encoded: Encoded, content: np.ndarray, keep: int) -> np.ndarray:
    """The tokens between the first half and the second half of what is kept; no character is torn
    apart.
    """
    head, tail = content[: (keep + 1) // 2], content[len(content) - keep // 2 :]
    first, last = len(head), len(content) - len(tail)
    while 0 < first < len(content) and _same_character(encoded, content[first - 1], content[first]):
        first -= 1
    while (
        first <= last < len(content)
        and last > 0
        and _same_character(encoded, content[last - 1], content[last])
    ):
        last += 1
    return content[first:last]


def _same_character(encoded: Encoded, left: int, right: int) -> bool:
    return bool(encoded.starts[right] < encoded.ends[left])
