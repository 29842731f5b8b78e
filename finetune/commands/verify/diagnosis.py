"""Which fault explains what a deployment answered: all that are known are judged, the likely ones
by all prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from finetune.commands.verify.causes import BY_NAME, Hypothesis, hypotheses
from finetune.commands.verify.changes import Change
from finetune.commands.verify.evidence import Finding, Replay, Seen
from finetune.commands.verify.judging import Fit, Judge, SeenOf, begins, could_be
from finetune.commands.verify.reference import TRAINED, Weights
from finetune.commands.verify.replaying import progress
from finetune.commands.verify.wire import mend_of
from finetune.runtime.language import _

EXPLAINED = 0.85  # of the prompts, at least
CLEARLY = 0.5  # of the cost of no fault at all: what a fault that is named may cost at most
_PRECISION = {"float32": 24, "float16": 11, "bfloat16": 8}  # significant bits
# prompts that all faults are judged by, and faults that all prompts judge
FIRST_JUDGED, THEN_JUDGED = 5, 6
MOST_PAIRS = 3  # faults of the prompt that are tried together with each of the weights


def refusals(refused: Sequence[Replay]) -> list[Finding]:
    """The findings for conversations that the deployment does not answer, one for each remedy."""
    cause, by_mend = BY_NAME["refused"], dict[str, list[Replay]]()
    for replay in refused:
        status = replay.seen.status
        by_mend.setdefault(cause.mend if status is None else mend_of(status), []).append(replay)
    return [
        Finding(
            "refused",
            cause.what,
            mend,
            same[0].seen.words,
            prompts=tuple(replay.number for replay in same),
        )
        for mend, same in by_mend.items()
    ]


class Diagnosis:
    """Of a deployment that is to have this dtype."""

    def __init__(self, judge: Judge, dtype: str) -> None:
        self.judge = judge
        self.dtype = dtype
        self.replays = judge.replays
        self.hides_adapter = False  # what `run` finds of a right deployment

    def run(self) -> tuple[list[Finding], Fit]:
        """The faults, the first that a prompt meets first; none where all is as trained. And how
        well that fits.
        """
        self.right = self.judge.fit(Hypothesis())
        self.wrong = [
            replay for replay, good in zip(self.replays, self.right.good, strict=True) if not good
        ]
        parsed = [replay for replay in self.replays if replay.parsed]
        named = [self._finding("reasoning_parser", "", parsed, len(parsed))] if parsed else []
        if not self.wrong:
            self.hides_adapter = self._hides_adapter()
            return named, self.right
        return [*named, *(self._seen_in_answers() or self._searched())], self.right

    def _hides_adapter(self) -> bool:
        """Whether the base would have answered the same, so that nothing here shows that the
        adapter is applied.
        """
        if self.judge.reference.source.adapter is None:
            return False
        return all(self.judge.fit(Hypothesis((), Change(weights=Weights(adapter=False)))).good)

    def _seen_in_answers(self) -> list[Finding]:
        """Faults of the decoding that need no model: what is wrong in all answers that are wrong is
        one of them.
        """
        if not all(could_be(replay.seen, replay.prompt.ids) for replay in self.wrong):
            return []
        for name, is_so in SEEN_IN_ANSWERS.items():
            twice = name == "not_greedy"
            so = [
                is_so(replay, self.judge)
                for replay in self.wrong
                if not twice or replay.again is not None
            ]
            if so and sum(so) >= (0.5 if twice else EXPLAINED) * len(so):
                return [self._finding(name, "", self.wrong, len(self.replays))]
        return []

    # ------------------------------------------------------------ all faults

    def _searched(self) -> list[Finding]:
        known = hypotheses(self.judge.reference, [replay.prompt for replay in self.replays])
        of_prompt = [one for one in known if one.change.reads is not None]
        behind = [
            one
            for one in known
            if one.change.reads is None and self._is_below(one.change.weights.dtype)
        ]
        loads = list(dict.fromkeys(one.change.weights.stored for one in behind))
        behind.sort(key=lambda one: loads.index(one.change.weights.stored))
        best_behind = self._by_raw(behind)
        if best_behind is not None:  # what is behind the prompt is known: also that it is right
            fits = self._ranked([best_behind, *(one.joined(best_behind) for one in of_prompt)])
        else:
            fits = self._ranked(of_prompt)
            likely = [fit.hypothesis for fit in fits[:MOST_PAIRS] if fits[0].share < EXPLAINED]
            fits += self._by_weights(behind, likely, self.wrong)
            fits = [
                fit for fit in fits if len(fit.hypothesis.causes) == 1 and fit.share >= EXPLAINED
            ] or fits
        best = min(fits, key=_rank, default=self.right)
        if best.share < EXPLAINED or not _clearly_better(best, self.right):
            return [self._unknown(best)]
        explained = sum(best.good)
        return [
            self._finding(cause.name, detail, self.wrong, explained)
            for cause, detail in best.hypothesis.causes
        ]

    def _is_below(self, dtype: str | None) -> bool:
        """Whether a dtype has fewer bits than the one that is to be there; None is none."""
        return dtype is None or _PRECISION[dtype] < _PRECISION[self.dtype]

    def _ranked(self, tried: Sequence[Hypothesis]) -> list[Fit]:
        """The likely ones, best first: judged by some of the prompts that are wrong, and the best
        of them by all.
        """
        first = []
        with progress("fault", len(tried)) as advance:
            for one in tried:
                first.append(self.judge.fit(one, replays=self.wrong[:FIRST_JUDGED]))
                advance("")
        likely = sorted(first, key=_rank)[:THEN_JUDGED]
        return sorted((self.judge.fit(fit.hypothesis) for fit in likely), key=_rank)

    def _by_weights(
        self,
        behind: Sequence[Hypothesis],
        partners: Sequence[Hypothesis],
        wrong: Sequence[Replay],
        seen: SeenOf = lambda replay: replay.seen,
    ) -> list[Fit]:
        """Those behind the prompt, alone and with each partner, in one pass: each model is loaded
        once.
        """
        found = []
        with progress("fault", len(behind)) as advance:
            for one in behind:
                for hypothesis in (one, *(partner.joined(one) for partner in partners)):
                    if self.judge.explains_half(hypothesis, seen, wrong[:FIRST_JUDGED]):
                        found.append(self.judge.fit(hypothesis, seen))
                advance(one.causes[0][0].name)
        return found

    def _by_raw(self, behind: Sequence[Hypothesis]) -> Hypothesis | None:
        """What explains the continuations of our own renderings, where there are any; None where
        nothing does.
        """

        def raw(replay: Replay) -> Seen | None:
            return replay.raw

        if not all(replay.raw for replay in self.replays):
            return None
        right = self.judge.fit(Hypothesis(), raw)
        if right.share >= EXPLAINED:
            return right.hypothesis
        wrong = [replay for replay, good in zip(self.replays, right.good, strict=True) if not good]
        best = min(self._by_weights(behind, (), wrong, raw), key=_rank, default=right)
        return best.hypothesis if best.share >= EXPLAINED else None

    # ------------------------------------------------------------ what is said of it

    def _finding(
        self, name: str, detail: str, replays: Sequence[Replay], explained: int
    ) -> Finding:
        cause, numbers = BY_NAME[name], tuple(replay.number for replay in replays)
        return Finding(
            name, cause.what, cause.mend, detail, self._evidence(replays[0]), numbers, explained
        )

    def _unknown(self, nearest: Fit) -> Finding:
        names = " + ".join(cause.name for cause, _ in nearest.hypothesis.causes)
        is_near = sum(nearest.good) > sum(self.right.good)
        extra = {"nearest": names, "nearest_explains": sum(nearest.good)} if is_near else {}
        is_small = self.judge.fit(Hypothesis(), as_fault=True).share >= EXPLAINED
        found = self._finding("unknown", _("small difference") if is_small else "", self.wrong, 0)
        return replace(found, extra=extra)

    def _evidence(self, replay: Replay) -> tuple[str, ...]:
        """The first difference of the first prompt that differs, one line for each kind that is
        seen.
        """
        judge, seen, prompt, number, lines = (
            self.judge,
            replay.seen,
            replay.prompt,
            replay.number,
            [],
        )
        if seen.prompt_ids is not None and seen.prompt_ids != prompt.ids:
            decode = judge.reference.tokenizer.decode
            place = _first_difference(seen.prompt_ids, prompt.ids)
            there, ours = (
                decode(list(ids[place : place + 8])) for ids in (seen.prompt_ids, prompt.ids)
            )
            lines.append(
                f"prompt {number}, token {place + 1}: {there!r} there, {ours!r} in training"
            )
        elif seen.prompt_tokens is not None and seen.prompt_tokens != len(prompt.ids):
            lines.append(
                f"prompt {number}: {seen.prompt_tokens} tokens there, {len(prompt.ids)} in training"
            )
        if replay.parsed:
            lines.append(
                f"answer {number}: content without {seen.answer.strip()[:40]!r}, which was trained"
            )
        if seen.answer.strip() != replay.own_answer.strip():
            place = _first_difference(seen.answer, replay.own_answer)
            begin = max(0, place - 20)
            there, ours = (text[begin : place + 40] for text in (seen.answer, replay.own_answer))
            lines.append(
                f"answer {number}, character {place + 1}: {there!r} there, {ours!r} trained"
            )
        if seen.finish != replay.own_finish:
            lines.append(
                f"answer {number} ends by {seen.finish!r}, as trained by {replay.own_finish!r}"
            )
        said = judge.reference.said(TRAINED, prompt.ids, judge.answer_ids(replay, seen))
        apart = judge.apart(seen, said)
        if apart is not None and apart > judge.tolerance.logprob:
            allowed = f"{judge.tolerance.logprob:.3f} is allowed"
            lines.append(
                f"answer {number}: log-probabilities differ by {apart:.3f} on average, {allowed}"
            )
        return tuple(lines)


def _clearly_better(fault: Fit, right: Fit) -> bool:
    """Whether a fault explains more prompts, and those that are wrong without it by clearly less
    cost.

    Where weights differ a little, all faults that change little fit about as well as none.
    """
    wrong = [number for number, good in enumerate(right.good) if not good]
    costs, without = (sum(fit.costs[number] for number in wrong) for fit in (fault, right))
    return fault.rank < right.rank and costs <= CLEARLY * without


def _rank(fit: Fit) -> tuple[int, float]:
    return fit.rank


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _runs_on(replay: Replay, judge: Judge) -> bool:
    if set((replay.seen.answer_ids or ())[:-1]) & set(judge.stop_ids):
        return True
    # transformers' server shows only what comes last, but all of a continuation.
    shown = [
        seen.answer.strip()
        for seen in (replay.seen, replay.raw)
        if seen is not None and seen.finish == "length"
    ]
    own = replay.own_answer.strip()
    return (
        replay.own_finish == "stop" and bool(own) and any(there.startswith(own) for there in shown)
    )


def _stops_early(replay: Replay, _judge: Judge) -> bool:
    return replay.seen.finish == "stop" and begins(replay.seen, replay)


def _is_cut(replay: Replay, judge: Judge) -> bool:
    length = replay.seen.answer_tokens
    if replay.seen.finish != "length":
        return False
    return length < judge.most if length is not None else begins(replay.seen, replay)


def _changes(replay: Replay, _judge: Judge) -> bool:
    return replay.again != replay.seen.answer


SEEN_IN_ANSWERS = {
    "end_ignored": _runs_on,
    "stops_early": _stops_early,
    "answers_cut": _is_cut,
    "not_greedy": _changes,
}
