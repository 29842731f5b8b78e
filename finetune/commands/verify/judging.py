"""How well a fault explains what a deployment answered.

Each fault predicts: the ids that the model reads (as far as the engine shows them, they must be
those), and how likely a model finds each token of the answer. A greedy answer takes the likeliest
token at every place; under the fault that the deployment has, its answers are greedy, and
log-probabilities that it gives are the predicted ones. Under any other they are not. So what is
compared is the answers as they came, without generating again for each fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.commands.verify.causes import Hypothesis
from finetune.commands.verify.changes import AS_TRAINED, Change
from finetune.commands.verify.evidence import Replay, Said, Seen
from finetune.commands.verify.reference import TRAINED, Reference, Weights

LEAST_LOGPROB, LEAST_GAP = 0.005, 0.02  # what other kernels make of float32, with room
TIMES_NOISE = 3.0  # differences that are allowed, in those that the dtype itself makes
LEAST_REPEATED = 12  # characters of a prompt that are no chance at the beginning of an answer
LEAST_UNJUDGED = 3  # tokens at the end of a text that was cut: it may be cut within a token
MOST_COST = 10.0  # of one prompt

SeenOf = Callable[[Replay], Seen | None]


@dataclass(frozen=True)
class Tolerance:
    """Differences that a right deployment may have, in natural logarithms."""

    logprob: float  # mean over an answer
    gap: float  # of any token


@dataclass(frozen=True)
class Fit:
    """How well one hypothesis explains the replays: for each whether it does, and how far it is
    off.
    """

    hypothesis: Hypothesis
    good: tuple[bool, ...]
    costs: tuple[float, ...]

    @property
    def share(self) -> float:
        return sum(self.good) / len(self.good)

    @property
    def rank(self) -> tuple[int, float]:
        return -sum(self.good), sum(self.costs)


class Judge:
    """Judges hypotheses by what was seen; `tolerance` is for the dtype that the deployment is to
    have.
    """

    def __init__(
        self, reference: Reference, replays: Sequence[Replay], max_new_tokens: int, dtype: str
    ) -> None:
        self.reference = reference
        self.replays = list(replays)
        self.most = max_new_tokens
        self.stop_ids = reference.stop_ids
        self.tolerance = self._tolerance(dtype)

    def _tolerance(self, dtype: str) -> Tolerance:
        """What the rounding to the dtype changes on the trained model's own answers, times
        `TIMES_NOISE`.

        Against float32: a reference in the deployed dtype would round alike, and show nothing of
        what another kernel makes of that dtype.
        """
        is_exact = self.reference.dtype == "float32"
        rounded = [Weights(dtype=dtype, compute=dtype), *([] if is_exact else [TRAINED])]
        exact = self._own(TRAINED if is_exact else Weights(compute="float32"))
        means, largest = [0.0], 0.0
        for weights in rounded:
            for one, other in zip(exact, self._own(weights), strict=True):
                apart = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
                if apart:
                    means.append(sum(apart) / len(apart))
                    largest = max(largest, *apart)
        return Tolerance(max(LEAST_LOGPROB, TIMES_NOISE * max(means)), max(LEAST_GAP, 2 * largest))

    def _own(self, weights: Weights) -> list[Said]:
        """What a model says of the trained one's own answers."""
        return [
            self.reference.said(weights, replay.prompt.ids, self._without_end(replay.own_ids))
            for replay in self.replays
        ]

    def fit(
        self,
        hypothesis: Hypothesis,
        seen: SeenOf = lambda replay: replay.seen,
        replays: Sequence[Replay] = (),
        as_fault: bool = False,
    ) -> Fit:
        """Judge it by the chat answers of all replays or some, or by others, which continue our own
        rendering.

        Args:
            as_fault: allow as much as of a fault.
        """
        judged = [
            self._judged(hypothesis, replay, seen(replay), as_fault)
            for replay in replays or self.replays
        ]
        return Fit(
            hypothesis, tuple(good for good, _cost in judged), tuple(cost for _good, cost in judged)
        )

    def explains_half(
        self, hypothesis: Hypothesis, seen: SeenOf, replays: Sequence[Replay]
    ) -> bool:
        """Whether it explains half of the replays; no more of them are judged than that takes."""
        good = bad = 0
        for replay in replays:
            good, bad = (
                (good + 1, bad)
                if self._judged(hypothesis, replay, seen(replay))[0]
                else (good, bad + 1)
            )
            if 2 * max(good, bad) > len(replays):
                break
        return good >= bad

    def _of_faults(self) -> Tolerance:
        """Of a fault more is allowed: its rounding is not known, and the best of all faults
        counts.
        """
        return Tolerance(max(0.05, 3 * self.tolerance.logprob), max(0.2, 3 * self.tolerance.gap))

    def _judged(
        self, hypothesis: Hypothesis, replay: Replay, seen: Seen | None, as_fault: bool = False
    ) -> tuple[bool, float]:
        """Whether it explains an answer, and how far it is off."""
        read, change = hypothesis.reads(replay.prompt), hypothesis.change
        # A filter, a failure: no greedy answer ends so.
        if (
            seen is None
            or seen.finish not in ("stop", "length")
            or not read
            or not could_be(seen, read)
        ):
            return False, MOST_COST
        answer = self.answer_ids(replay, seen, change)
        said = self.reference.said(change.weights, read, answer, change.penalty)
        tolerance = self._of_faults() if hypothesis.causes or as_fault else self.tolerance
        good, cost = self._judge(replay, seen, answer, said, tolerance)
        if not hypothesis.causes and is_empty(seen.answer) and not is_empty(replay.own_answer):
            good = False
        return good, min(cost, MOST_COST)

    def _judge(
        self, replay: Replay, seen: Seen, answer: Sequence[int], said: Said, tolerance: Tolerance
    ) -> tuple[bool, float]:
        gap = max(said.gaps, default=0.0)
        cost = sum(said.gaps) / max(1, len(said.gaps))
        good = gap <= tolerance.gap and not set(answer) & set(self.stop_ids)
        if seen.finish == "stop":
            good, cost = good and said.end_gap <= tolerance.gap, cost + said.end_gap
        else:
            # It ends there although it had room, or goes on although it wanted to end.
            judged, length = len(said.gaps), seen.answer_tokens
            # A text may have fewer tokens than it was made of.
            is_whole = (
                judged >= self.most - LEAST_UNJUDGED or length is not None and begins(seen, replay)
            )
            is_whole = is_whole and judged > 0 and (length is None or length >= self.most - 1)
            good = good and is_whole and not (judged < self.most - 2 and said.end_gap == 0)
        apart = self.apart(seen, said)
        if apart is not None:
            good, cost = good and apart <= tolerance.logprob, cost + apart
        return good, cost

    def apart(self, seen: Seen, said: Said) -> float | None:
        """Mean difference of the log-probabilities; None where the deployment gives none for these
        tokens.
        """
        count = len(said.logprobs)
        if seen.logprobs is None or not count or not 0 <= len(seen.logprobs) - count <= 1:
            return None
        return sum(abs(a - b) for a, b in zip(seen.logprobs, said.logprobs, strict=False)) / count

    def answer_ids(
        self, replay: Replay, seen: Seen, change: Change = AS_TRAINED
    ) -> tuple[int, ...]:
        """The tokens of an answer, its end not among them; of a text cut by its length without the
        last ones.
        """
        if seen.answer_ids is not None:
            return self._without_end(seen.answer_ids)
        if seen.answer.strip() == replay.own_answer.strip():
            return self._without_end(replay.own_ids)
        opens = change.opens(replay.prompt) if change.opens else ()
        text = self._shown(opens)
        if text and seen.answer.lstrip().startswith(text):
            ids = (*opens, *self.reference.ids(seen.answer.lstrip()[len(text) :].lstrip()))
        else:
            answer = seen.answer
            if change.reads:  # an answer to the right prompt has nothing of it
                answer = _without_repeated(self._shown(change.reads(replay.prompt)), answer)
            ids = self.reference.ids(answer)
        return ids[:-2] if seen.finish == "length" and len(ids) > 2 else ids

    def _shown(self, ids: Sequence[int]) -> str:
        return str(self.reference.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def _without_end(self, ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)


def _without_repeated(prompt: str, answer: str) -> str:
    """The answer without the end of the prompt that transformers' server repeats where it does not
    know the form.
    """
    answer = answer.lstrip()
    ends = (prompt[start:] for start in range(len(prompt) - LEAST_REPEATED))
    return next((answer[len(end) :].lstrip() for end in ends if answer.startswith(end)), answer)


def could_be(seen: Seen, read: Sequence[int]) -> bool:
    """Whether these may be the ids that the engine has read, by what it shows of them."""
    if seen.prompt_ids is not None:
        return tuple(read) == seen.prompt_ids
    return seen.prompt_tokens is None or len(read) == seen.prompt_tokens


def begins(seen: Seen, replay: Replay) -> bool:
    """Whether it is a part of our own answer, neither empty nor all of it."""
    there, own = seen.answer.strip(), replay.own_answer.strip()
    return 0 < len(there) < len(own) and own.startswith(there)


def is_empty(answer: str) -> bool:
    return not answer.strip()
