"""Whether another attempt can help: decided from how the workers ended and what the log says of the
cause.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from finetune.commands.launch.attempt_result import AttemptResult
from finetune.errors import ExitCode
from finetune.runtime.language import _

# Ways for a rendezvous to fail that time can cure; `nodes_missing` and the like have waited the
# whole time already.
_PASSING_PROBLEMS = frozenset({"connection_lost"})


@dataclass(frozen=True)
class RestartDecision:
    """Whether to try again, and why (not)."""

    restart: bool
    why: str


def decide_restart(
    result: AttemptResult,
    causes: Sequence[str],
    curable: Collection[str],
    *,
    progressed: bool,
    attempts_left: int,
) -> RestartDecision:
    """The decision of this node; a launch of several nodes tries again if all of them want to.

    Args:
        causes: what the diagnosis found in the log of this attempt, best first.
        curable: causes that starting again can cure.
        progressed: the run took steps in this attempt.
    """
    code = result.exit_code
    if code == ExitCode.DONE:
        return RestartDecision(False, _("it is done"))
    if result.stop_signal or code == ExitCode.STOPPED:
        return RestartDecision(False, _("it was stopped"))
    if code == ExitCode.REFUSED:
        return RestartDecision(False, _("it was refused, and would be again"))
    decision = _decide_failed(result, causes, curable, progressed)
    if decision.restart and attempts_left <= 0:
        return RestartDecision(False, _("no restarts are left (--max-restarts)"))
    return decision


def _decide_failed(
    result: AttemptResult, causes: Sequence[str], curable: Collection[str], progressed: bool
) -> RestartDecision:
    if result.exit_code == ExitCode.OUT_OF_MEMORY:
        return RestartDecision(True, _("out of memory: it resumes with smaller microbatches"))
    if result.problem in ("agent_ended", "agent_killed"):  # and with it the word of the other nodes
        return RestartDecision(False, _("the process that starts the workers was lost"))
    if result.problem:
        return RestartDecision(
            result.problem in _PASSING_PROBLEMS, _("the rendezvous of the nodes failed")
        )
    if result.lost_nodes:
        return RestartDecision(True, _("another node's heartbeat is lost, and it may come back"))
    # A run that says itself that memory does not suffice (exit code 1) has no smaller microbatches
    # left.
    known = next((cause for cause in causes if cause != "unknown"), None)
    if known is not None:
        if known in curable and known != "device_oom":
            return RestartDecision(True, _("{cause} can pass").format(cause=known))
        return RestartDecision(False, _("starting again does not cure {cause}").format(cause=known))
    if result.others:  # the node where it began knows more, and is asked as well
        return RestartDecision(True, _("another node failed"))
    if result.killed:
        rank, number = next(iter(result.killed.items()))
        return RestartDecision(
            True, _("rank {rank} was ended by signal {number}").format(rank=rank, number=number)
        )
    if progressed:
        return RestartDecision(True, _("it had trained before, so the cause may pass"))
    return RestartDecision(False, _("it failed before its first step, and would again"))
