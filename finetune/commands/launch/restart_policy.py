"""Whether another attempt can help: decided from how the workers ended and what the log says of the cause."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.errors import ExitCode
from finetune.runtime.language import Text

# Ways in which nodes fail to meet that time can cure; `nodes_missing` and the like have waited the whole time already.
_MEET_AGAIN = frozenset({"lost_while_meeting"})


@dataclass(frozen=True)
class Ended:
    """How an attempt ended on this node.

    Attributes:
        exit_codes: by global rank, the worker that ended first at the front; negative for a signal.
        problem: why there were no workers, else empty.
        stop_signal: the signal by which the user asked for it, 0 for none.
        silent: nodes that are not heard of any more, with seconds.
        others: by node, how its workers ended, as far as it could say so.
    """

    exit_codes: Mapping[int, int] = field(default_factory=dict)
    problem: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    stop_signal: int = 0
    silent: Mapping[int, int] = field(default_factory=dict)
    others: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """What the launch ends with: the run's own code, 128 + the signal's number for a run that had not begun."""
        codes = [*self.exit_codes.values(), *(how["exit_code"] for how in self.others.values())]
        # One that was told to end because another failed may say that it stopped, but that is not why.
        stopped = ExitCode.STOPPED in (codes if self.stop_signal else codes[:1])
        for decided in ([ExitCode.STOPPED] if stopped else []) + [ExitCode.REFUSED, ExitCode.OUT_OF_MEMORY]:
            if decided in codes:
                return int(decided)
        if self.stop_signal:
            return 128 + self.stop_signal
        return int(ExitCode.FAILED if self.problem or not codes or any(self.exit_codes.values()) else ExitCode.DONE)

    @property
    def killed(self) -> dict[int, int]:
        """Workers that a signal of others ended, by rank: SIGTERM is how the rest is told to end."""
        return {rank: -code for rank, code in self.exit_codes.items() if code < 0 and -code != 15}


@dataclass(frozen=True)
class Verdict:
    """Whether to try again, and why (not)."""

    restart: bool
    why: Text


def decide(
    ended: Ended, causes: Sequence[str], curable: Collection[str], *, progressed: bool, attempts_left: int
) -> Verdict:
    """The verdict of this node; a launch of several nodes tries again if all of them want to.

    Args:
        causes: what the diagnosis found in the log of this attempt, best first.
        curable: causes that starting again can cure.
        progressed: the run took steps in this attempt.
    """
    code = ended.exit_code
    if code == ExitCode.DONE:
        return Verdict(False, {"en": "it is done", "zh": "已完成"})
    if ended.stop_signal or code == ExitCode.STOPPED:
        return Verdict(False, {"en": "it was stopped", "zh": "运行被停止"})
    if code == ExitCode.REFUSED:
        return Verdict(False, {"en": "it was refused, and would be again", "zh": "运行被拒绝，再次启动结果相同"})
    curing = _cure(ended, causes, curable, progressed)
    if curing.restart and attempts_left <= 0:
        return Verdict(False, {"en": "no restarts are left (--max-restarts)", "zh": "重启次数已用完（--max-restarts）"})
    return curing


def _cure(ended: Ended, causes: Sequence[str], curable: Collection[str], progressed: bool) -> Verdict:
    if ended.exit_code == ExitCode.OUT_OF_MEMORY:
        return Verdict(True, {"en": "out of memory: it goes on with smaller rows", "zh": "内存不足：改用更小的行继续"})
    if ended.problem:
        again = ended.problem in _MEET_AGAIN
        return Verdict(again, {"en": "the nodes did not meet", "zh": "各节点未能会合"})
    if ended.silent:
        return Verdict(
            True, {"en": "another node is not heard of, and may come back", "zh": "另一个节点失联，可能恢复"}
        )
    # A run that says itself that memory does not suffice (exit code 1) has no smaller rows left.
    known = [cause for cause in causes if cause != "unknown"]
    if known:
        if known[0] in curable and known[0] != "device_oom":
            return Verdict(True, {"en": f"{known[0]} can pass", "zh": f"{known[0]} 可能是暂时的"})
        return Verdict(False, {"en": f"starting again does not cure {known[0]}", "zh": f"重启不能解决 {known[0]}"})
    if ended.others:  # the node where it began knows more, and is asked as well
        return Verdict(True, {"en": "another node failed", "zh": "另一个节点失败"})
    if ended.killed:
        rank, number = next(iter(ended.killed.items()))
        return Verdict(
            True, {"en": f"rank {rank} was ended by signal {number}", "zh": f"rank {rank} 被信号 {number} 终止"}
        )
    if progressed:
        return Verdict(
            True, {"en": "it had trained before, so the cause may pass", "zh": "此前训练正常，原因可能是暂时的"}
        )
    return Verdict(
        False, {"en": "it failed before its first step, and would again", "zh": "在第一步之前失败，再次启动结果相同"}
    )
