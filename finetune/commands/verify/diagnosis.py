"""Which fault explains what a deployment answered.

Each fault predicts: the ids that the model reads (as far as the engine shows them, they must be those), and how likely
a model finds each token of the answer. A greedy answer takes the likeliest token at every place; under the fault that
the deployment has, its answers are greedy, and log-probabilities that it gives are the predicted ones. Under any other
they are not. So what is compared is the answers as they came, without generating again for each fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from finetune.commands.verify.causes import BY_NAME, Cause, Hypothesis, hypotheses
from finetune.commands.verify.changes import AS_TRAINED, Change
from finetune.commands.verify.evidence import Finding, Replay, Said, Seen
from finetune.commands.verify.reference import TRAINED, Reference, Weights
from finetune.runtime.language import _

EXPLAINED = 0.85  # of the prompts, at least
LEAST_LOGPROB, LEAST_GAP = 0.005, 0.02  # what other kernels make of float32, with room
TIMES_NOISE = 3.0  # differences that are allowed, in those that the dtype itself makes
LEAST_REPEATED = 12  # characters of a prompt that are no chance at the beginning of an answer
LEAST_UNJUDGED = 3  # tokens at the end of a text that was cut: it may be cut within a token
MOST_COST = 10.0  # of one prompt
CLEARLY = 0.5  # of the cost of no fault at all: what a fault that is named may cost at most
_PRECISION = {"float32": 24, "float16": 11, "bfloat16": 8}  # significant bits
FIRST_JUDGED, THEN_JUDGED = 5, 6  # prompts that all faults are judged by, and faults that all prompts judge
MOST_PAIRS = 3  # faults of the prompt that are tried together with each of the weights


SeenOf = Callable[[Replay], Seen | None]


@dataclass(frozen=True)
class Tolerance:
    """Differences that a right deployment may have, in natural logarithms."""

    logprob: float  # mean over an answer
    gap: float  # of any token


@dataclass(frozen=True)
class Fit:
    """How well one hypothesis explains the replays: for each whether it does, and how far it is off."""

    hypothesis: Hypothesis
    good: tuple[bool, ...]
    costs: tuple[float, ...]

    @property
    def share(self) -> float:
        return sum(self.good) / len(self.good)

    @property
    def rank(self) -> tuple[int, float]:
        return -sum(self.good), sum(self.costs)


class Diagnosis:
    """Judges hypotheses by what was seen; `tolerance` is for the dtype that the deployment is to have."""

    def __init__(self, reference: Reference, replays: Sequence[Replay], max_new_tokens: int, dtype: str) -> None:
        self.reference, self.replays, self.most, self.dtype = reference, list(replays), max_new_tokens, dtype
        self.stop_ids = reference.stop_ids
        self.hides_adapter = False  # what `run` finds of a right deployment
        self.tolerance = self._tolerance(dtype)

    def _tolerance(self, dtype: str) -> Tolerance:
        """What the rounding to the dtype changes on the trained model's own answers, times `TIMES_NOISE`.

        Against float32: a reference in the deployed dtype would round alike, and show nothing of what another kernel
        makes of that dtype.
        """
        asked = [(replay.prompt.ids, self._without_end(replay.own_ids)) for replay in self.replays]
        is_exact = self.reference.dtype == "float32"
        rounded = [Weights(dtype=dtype, compute=dtype), *([] if is_exact else [TRAINED])]
        exact = TRAINED if is_exact else Weights(compute="float32")
        ours = self.reference.said(exact, asked, 1.0, self.stop_ids)
        means, largest = [0.0], 0.0
        for weights in rounded:
            for one, other in zip(ours, self.reference.said(weights, asked, 1.0, self.stop_ids), strict=True):
                apart = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
                if apart:
                    means.append(sum(apart) / len(apart))
                    largest = max(largest, *apart)
        return Tolerance(max(LEAST_LOGPROB, TIMES_NOISE * max(means)), max(LEAST_GAP, 2 * largest))

    # ------------------------------------------------------------ one hypothesis

    def fit(
        self,
        hypothesis: Hypothesis,
        seen: SeenOf = lambda replay: replay.seen,
        replays: Sequence[Replay] = (),
        as_fault: bool = False,
    ) -> Fit:
        """Judge it by the chat answers of all replays or some, or by others, which continue our own rendering.

        Args:
            as_fault: allow as much as of a fault.
        """
        asked, shown, change = [], [], hypothesis.change
        for replay in replays or self.replays:
            there = seen(replay)
            read = hypothesis.reads(replay.prompt)
            possible = there is not None and bool(read) and _could_be(there, read)
            shown.append(there if possible else None)
            asked.append((read, self.answer_ids(replay, there, change)) if possible and there else ((0,), ()))
        if any(shown):
            said = self.reference.said(change.weights, asked, change.penalty, self.stop_ids)
        else:
            said = [Said((), (), 0.0)] * len(asked)
        tolerance = self._of_faults() if hypothesis.causes or as_fault else self.tolerance
        judged = [
            (False, MOST_COST) if one is None else self._judge(replay, one, answer, its, tolerance)
            for replay, one, (_read, answer), its in zip(replays or self.replays, shown, asked, said, strict=True)
        ]
        if not hypothesis.causes:  # empty only where our own is, too
            judged = [
                (good and not (one and _is_empty(one.answer) and not _is_empty(replay.own_answer)), cost)
                for (good, cost), replay, one in zip(judged, replays or self.replays, shown, strict=True)
            ]
        return Fit(
            hypothesis, tuple(good for good, _cost in judged), tuple(min(cost, MOST_COST) for _good, cost in judged)
        )

    def _of_faults(self) -> Tolerance:
        """Of a fault more is allowed: its rounding is not known, and the best of all faults counts."""
        return Tolerance(max(0.05, 3 * self.tolerance.logprob), max(0.2, 3 * self.tolerance.gap))

    def _judge(
        self, replay: Replay, seen: Seen, answer: Sequence[int], said: Said, tolerance: Tolerance
    ) -> tuple[bool, float]:
        gap = max(said.gaps, default=0.0)
        cost = sum(said.gaps) / max(1, len(said.gaps))
        good = gap <= tolerance.gap and not set(answer) & set(self.stop_ids)
        if seen.finish == "stop":
            good, cost = good and said.end_gap <= tolerance.gap, cost + said.end_gap
        elif seen.finish == "length":
            # It ends there although it had room, or goes on although it wanted to end.
            judged, length = len(said.gaps), seen.answer_tokens
            # A text may have fewer tokens than it was made of.
            is_whole = judged >= self.most - LEAST_UNJUDGED or length is not None and _begins(seen, replay)
            is_whole = is_whole and judged > 0 and (length is None or length >= self.most - 1)
            good = good and is_whole and not (judged < self.most - 2 and said.end_gap == 0)
        else:  # a filter, a failure: no greedy answer ends so
            good = False
        apart = self.apart(seen, said)
        if apart is not None:
            good, cost = good and apart <= tolerance.logprob, cost + apart
        return good, cost

    def apart(self, seen: Seen, said: Said) -> float | None:
        """Mean difference of the log-probabilities; None where the deployment gives none for these tokens."""
        count = len(said.logprobs)
        if seen.logprobs is None or not count or not 0 <= len(seen.logprobs) - count <= 1:
            return None
        return sum(abs(a - b) for a, b in zip(seen.logprobs, said.logprobs, strict=False)) / count

    def answer_ids(self, replay: Replay, seen: Seen, change: Change = AS_TRAINED) -> tuple[int, ...]:
        """The tokens of an answer, its end not among them; of a text cut by its length without the last ones."""
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

    # ------------------------------------------------------------ all

    def run(self) -> tuple[list[Finding], Fit]:
        """The faults, the first that a prompt meets first; none where all is as trained. And how well that fits."""
        right = self.fit(Hypothesis())
        if all(right.good):
            self.hides_adapter = self._hides_adapter()
            return [], right
        known = hypotheses(self.reference, [replay.prompt for replay in self.replays])
        self.known = [one for one in known if self._is_below(one.change.weights.dtype)]
        named = self._seen_in_answers(right) or self._searched(right)
        return named, right

    def _is_below(self, dtype: str | None) -> bool:
        """Whether a dtype has fewer bits than the one that is to be there; None is none."""
        return dtype is None or _PRECISION[dtype] < _PRECISION[self.dtype]

    def _hides_adapter(self) -> bool:
        """Whether the base would have answered the same, so that nothing here shows that the adapter is applied."""
        if self.reference.source.adapter is None:
            return False
        base = Hypothesis((), Change(weights=Weights(adapter=False)))
        return all(self.fit(base).good)

    def _seen_in_answers(self, right: Fit) -> list[Finding]:
        """Faults of the decoding that need no model: what is wrong in all answers that are wrong is one of them."""
        wrong = [replay for replay, good in zip(self.replays, right.good, strict=True) if not good]
        for name, is_so in SEEN_IN_ANSWERS.items():
            asked = [replay for replay in wrong if replay.again is not None] if name == "not_greedy" else wrong
            so = [is_so(replay, self) for replay in asked]
            read = all(_could_be(replay.seen, replay.prompt.ids) for replay in wrong)
            if read and so and sum(so) >= (EXPLAINED if name != "not_greedy" else 0.5) * len(so):
                return [self._finding(BY_NAME[name], "", right, len(self.replays))]
        return []

    def _searched(self, right: Fit) -> list[Finding]:
        of_prompt = [one for one in self.known if one.change.reads is not None]
        behind = [one for one in self.known if one.change.reads is None]
        best_behind = self._by_raw(behind)
        if best_behind is not None:  # what is behind the prompt is known: also that it is right
            ranked = self._ranked([best_behind, *(one.joined(best_behind) for one in of_prompt)], right)
        else:
            ranked = self._ranked([*of_prompt, *behind], right)
        if ranked[0].share < EXPLAINED and best_behind is None:
            likely = [fit.hypothesis for fit in ranked if fit.hypothesis.change.reads is not None][:MOST_PAIRS]
            pairs = [one.joined(other) for other in behind for one in likely]
            ranked = sorted([*ranked, *self._ranked(pairs, right)], key=_rank)
        best = ranked[0]
        if best.share < EXPLAINED or not _clearly_better(best, right):
            return [self._unknown(ranked, right)]
        return [self._finding(cause, detail, right, sum(best.good)) for cause, detail in best.hypothesis.causes]

    def _ranked(self, tried: Iterable[Hypothesis], right: Fit, seen: SeenOf = lambda replay: replay.seen) -> list[Fit]:
        """The likely ones, best first: judged by some of the prompts that are wrong, and the best of them by all."""
        wrong = [replay for replay, good in zip(self.replays, right.good, strict=True) if not good][:FIRST_JUDGED]
        first = sorted((self.fit(one, seen, wrong) for one in tried), key=_rank)[:THEN_JUDGED]
        return sorted((self.fit(fit.hypothesis, seen) for fit in first), key=_rank)

    def _by_raw(self, behind: Sequence[Hypothesis]) -> Hypothesis | None:
        """What explains the continuations of our own renderings, where there are any; None where nothing does."""

        def raw(replay: Replay) -> Seen | None:
            return replay.raw

        if not behind or not all(replay.raw for replay in self.replays):
            return None
        right = self.fit(Hypothesis(), raw)
        if right.share >= EXPLAINED:
            return right.hypothesis
        best = self._ranked(behind, right, raw)[0]
        return best.hypothesis if best.share >= EXPLAINED else None

    # ------------------------------------------------------------ what is said of it

    def _finding(self, cause: Cause, detail: str, right: Fit, explained: int) -> Finding:
        wrong = [number for number, good in enumerate(right.good) if not good]
        return Finding(
            name=cause.name,
            what=cause.what,
            mend=cause.mend,
            detail=detail,
            evidence=self._evidence(self.replays[wrong[0]], wrong[0] + 1),
            prompts=tuple(number + 1 for number in wrong),
            explained=explained,
        )

    def _unknown(self, ranked: Sequence[Fit], right: Fit) -> Finding:
        nearest = ranked[0]
        names = " + ".join(cause.name for cause, _ in nearest.hypothesis.causes)
        extra = {"nearest": names, "nearest_explains": sum(nearest.good)} if sum(nearest.good) > sum(right.good) else {}
        is_small = self.fit(Hypothesis(), as_fault=True).share >= EXPLAINED
        return replace(
            self._finding(BY_NAME["unknown"], _("small difference") if is_small else "", right, 0), extra=extra
        )

    def _evidence(self, replay: Replay, number: int) -> tuple[str, ...]:
        """The first difference of the first prompt that differs, one line for each kind that is seen."""
        seen, prompt, lines = replay.seen, replay.prompt, []
        if seen.prompt_ids is not None and seen.prompt_ids != prompt.ids:
            decode = self.reference.tokenizer.decode
            place = _first_difference(seen.prompt_ids, prompt.ids)
            there, ours = (decode(list(ids[place : place + 8])) for ids in (seen.prompt_ids, prompt.ids))
            lines.append(f"prompt {number}, token {place + 1}: {there!r} there, {ours!r} in training")
        elif seen.prompt_tokens is not None and seen.prompt_tokens != len(prompt.ids):
            lines.append(f"prompt {number}: {seen.prompt_tokens} tokens there, {len(prompt.ids)} in training")
        if seen.answer.strip() != replay.own_answer.strip():
            place = _first_difference(seen.answer, replay.own_answer)
            begin = max(0, place - 20)
            there, ours = (text[begin : place + 40] for text in (seen.answer, replay.own_answer))
            lines.append(f"answer {number}, character {place + 1}: {there!r} there, {ours!r} trained")
        if seen.finish != replay.own_finish:
            lines.append(f"answer {number} ends by {seen.finish!r}, as trained by {replay.own_finish!r}")
        (said,) = self.reference.said(TRAINED, [(prompt.ids, self.answer_ids(replay, seen))], 1.0, self.stop_ids)
        apart = self.apart(seen, said)
        if apart is not None and apart > self.tolerance.logprob:
            allowed = f"{self.tolerance.logprob:.3f} is allowed"
            lines.append(f"answer {number}: log-probabilities differ by {apart:.3f} on average, {allowed}")
        return tuple(lines)


def _without_repeated(prompt: str, answer: str) -> str:
    """The answer without the end of the prompt that transformers' server repeats where it does not know the form."""
    answer = answer.lstrip()
    ends = (prompt[start:] for start in range(len(prompt) - LEAST_REPEATED))
    return next((answer[len(end) :].lstrip() for end in ends if answer.startswith(end)), answer)


def _clearly_better(fault: Fit, right: Fit) -> bool:
    """Whether a fault explains more prompts, and those that are wrong without it by clearly less cost.

    Where weights differ a little, all faults that change little fit about as well as none.
    """
    wrong = [number for number, good in enumerate(right.good) if not good]
    costs, without = (sum(fit.costs[number] for number in wrong) for fit in (fault, right))
    return fault.rank < right.rank and costs <= CLEARLY * without


def _rank(fit: Fit) -> tuple[int, float]:
    return fit.rank


def _could_be(seen: Seen, read: Sequence[int]) -> bool:
    """Whether these may be the ids that the engine has read, by what it shows of them."""
    if seen.prompt_ids is not None:
        return tuple(read) == seen.prompt_ids
    return seen.prompt_tokens is None or len(read) == seen.prompt_tokens


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _runs_on(replay: Replay, diagnosis: Diagnosis) -> bool:
    if set((replay.seen.answer_ids or ())[:-1]) & set(diagnosis.stop_ids):
        return True
    # transformers' server shows only what comes last, but all of a continuation.
    shown = [seen.answer.strip() for seen in (replay.seen, replay.raw) if seen is not None and seen.finish == "length"]
    own = replay.own_answer.strip()
    return replay.own_finish == "stop" and bool(own) and any(there.startswith(own) for there in shown)


def _stops_early(replay: Replay, _diagnosis: Diagnosis) -> bool:
    return replay.seen.finish == "stop" and _begins(replay.seen, replay)


def _is_cut(replay: Replay, diagnosis: Diagnosis) -> bool:
    length = replay.seen.answer_tokens
    if replay.seen.finish != "length":
        return False
    return length < diagnosis.most if length is not None else _begins(replay.seen, replay)


def _is_empty(answer: str) -> bool:
    return not answer.strip()


def _begins(seen: Seen, replay: Replay) -> bool:
    """Whether it is a part of our own answer, neither empty nor all of it."""
    there, own = seen.answer.strip(), replay.own_answer.strip()
    return 0 < len(there) < len(own) and own.startswith(there)


def _changes(replay: Replay, _diagnosis: Diagnosis) -> bool:
    return replay.again != replay.seen.answer


SEEN_IN_ANSWERS = {"end_ignored": _runs_on, "stops_early": _stops_early, "answers_cut": _is_cut, "not_greedy": _changes}
