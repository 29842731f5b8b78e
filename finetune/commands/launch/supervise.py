"""The supervisor of a launch: a loop of attempts around torch elastic's agent, which passes signals
on and decides on restarts.

What the processes print goes into the log without it; while a run works it only waits, so that
nothing it does can disturb the run.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import NamedTuple

from finetune.commands.launch.launch_spec import LaunchSpec
from finetune.commands.launch.log import FOLLOW_SECONDS, LaunchLog
from finetune.commands.launch.rendezvous import ConnectionLost, Rendezvous, RendezvousError
from finetune.errors import ExitCode
from finetune.runtime.collectives import name_ranks
from finetune.runtime.host import allow_open_files
from finetune.runtime.language import _
from finetune.runtime.nodes import Nodes
from finetune.runtime.ports import HeldPort
from finetune.storage.launch_record import LaunchRecord

# A batch system signals every process of a job, and a shell passes its own on: signals this close
# are one request.
SAME_REQUEST_SECONDS = 3.0
# After another node's workers failed: time for ours to end by themselves, with their own exit code
# and message.
PEER_GRACE_SECONDS = 15.0
# How long a node waits for what the others report, once its own workers have ended: torch elastic
# gives a node's other workers 30 s after one has failed.
REPORT_SECONDS = 60.0
# For the others to read from node 0's store, before node 0 ends.
READ_SECONDS = 2.5
LOOK_SECONDS = 1.0  # between two looks at whether another node's workers failed
ENDS = (ExitCode.DONE, ExitCode.STOPPED)  # that are no failures
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended on this node."""

    # By global rank, the worker that ended first at the front; negative for a signal.
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    problem: str = ""  # why there were no workers, for people; else empty
    can_pass: bool = False  # whether the problem can
    stop_signal: int = 0  # by which the user stopped the run, 0 for none
    lost_nodes: Sequence[int] = ()  # those that did not report how they ended
    # By other node, the exit code of its workers, as far as it could tell.
    others: Mapping[int, int] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """What the launch ends with: the run's own code, 128 + the signal's number for a run that
        had not begun.
        """
        codes = [*self.exit_codes.values(), *self.others.values()]
        # A worker that is told to end because another failed may report that it was stopped.
        told = any(code not in ENDS for code in self.others.values())
        if ExitCode.STOPPED in (codes if self.stop_signal else [] if told else codes[:1]):
            return int(ExitCode.STOPPED)
        for code in (ExitCode.REFUSED, ExitCode.OUT_OF_MEMORY):
            if code in codes:
                return int(code)
        if self.stop_signal:
            return 128 + self.stop_signal
        failed = self.problem or not codes or any(self.exit_codes.values())
        return int(ExitCode.FAILED if failed else ExitCode.DONE)

    def lines(self, nodes: Nodes) -> list[str]:
        """Describe what happened on this node and, as far as is known, on the others: a line
        each.
        """
        if self.problem:
            return [self.problem]
        lines = []
        failed = {rank: code for rank, code in self.exit_codes.items() if code}
        for rank, code in failed.items():
            line = _("rank {rank} ended with exit code {code}")
            if code < 0:
                line = _("rank {rank} was ended by {signal}")
            first = _(" (first)") if not lines and len(failed) > 1 else ""
            lines.append(line.format(rank=rank, code=code, signal=_signal_name(-code)) + first)
        if self.lost_nodes:
            lost = _(
                "node {node} did not report how it ended: the connection between the nodes is lost,"
                " or that node is down. fix: see that it runs and that the nodes reach each other"
                " (ping {address}), then start the same command again on all of them; it resumes"
                " from the last checkpoint"
            )
            lines.append(lost.format(node=name_ranks(self.lost_nodes), address=nodes.address))
        for code in sorted(set(self.others.values()) - {ExitCode.DONE, ExitCode.STOPPED}):
            other = _("on node {node} the workers ended with exit code {code}; its log says why")
            having = sorted(node for node, ended in self.others.items() if ended == code)
            lines.append(other.format(node=name_ranks(having), code=code))
        return lines


def _signal_name(number: int) -> str:
    """Return SIGKILL for 9; the number if it has no name."""
    known = number in signal.Signals.__members__.values()
    return signal.Signals(number).name if known else str(number)


class RestartDecision(NamedTuple):
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
    """Decide for this node; a launch of several nodes tries again if all of them want to.

    Args:
        causes: what the diagnosis found in the log of this attempt, most likely first.
        curable: causes that starting again can cure.
        progressed: whether the run took steps in this attempt.
    """
    restart, why = _decide(result, causes, curable, progressed)
    if restart and attempts_left <= 0:
        return RestartDecision(False, _("no restarts are left (--max-restarts)"))
    return RestartDecision(restart, why)


def _decide(
    result: AttemptResult, causes: Sequence[str], curable: Collection[str], progressed: bool
) -> tuple[bool, str]:
    code = result.exit_code
    if code == ExitCode.DONE:
        return False, _("it is done")
    if result.stop_signal or code == ExitCode.STOPPED:
        return False, _("it was stopped")
    if code == ExitCode.REFUSED:
        return False, _("it was refused, and would be again")
    if code == ExitCode.OUT_OF_MEMORY:
        return True, _("out of memory: it resumes with smaller microbatches")
    if result.problem:
        return result.can_pass, _("the rendezvous of the nodes failed")
    if result.lost_nodes:  # they may come back
        return True, _("another node failed")
    # A run that reports itself that memory does not suffice (exit code 1) has no smaller
    # microbatches left.
    known = next((cause for cause in causes if cause != "unknown"), None)
    if known is not None:
        if known in curable and known != "device_oom":
            return True, _("{cause} can pass").format(cause=known)
        return False, _("starting again does not cure {cause}").format(cause=known)
    if result.others:  # the node where it began knows more, and is asked as well
        return True, _("another node failed")
    for rank, ended in result.exit_codes.items():
        if ended < 0 and -ended != signal.SIGTERM:  # by which the rest is told to end
            killed = _("rank {rank} was ended by signal {number}")
            return True, killed.format(rank=rank, number=-ended)
    if progressed:
        return True, _("it had trained before, so the cause may pass")
    return False, _("it failed before its first step, and would again")


class Stopped(Exception):
    """A signal came before there were workers."""


class Supervisor:
    """Runs one launch on this node: `Supervisor(spec, held, log, record).run()`.

    Args:
        held: the port, on node 0.
    """

    def __init__(
        self, spec: LaunchSpec, held: HeldPort | None, log: LaunchLog, record: LaunchRecord
    ) -> None:
        self.spec = spec
        self.log = log
        self.record = record
        self.rendezvous = Rendezvous(
            spec.nodes, held, spec.digest, spec.config.timeout_seconds, log.info
        )
        self._workers: list[int] = []  # process ids
        self._may_leave = False  # by an exception: no worker would be left behind
        self._stop_signal = 0
        self._stop_at = math.inf
        self._end_at = math.inf  # when workers that have not ended by themselves are ended
        self._look_at = 0.0

    def run(self) -> int:
        """Make attempts until the run is done, stopped, or beyond what another attempt cures.

        Returns:
            The exit code.
        """
        # every worker of every node is connected to the store, which node 0 holds
        allow_open_files()
        # those that are not ignored already: nohup has a run outlive its terminal
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            return self._attempts()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.record.end()

    def _attempts(self) -> int:
        from finetune.commands.diagnose.command import RESTART_CURES

        used, allowed = 0, self.spec.max_restarts
        while True:
            begin_bytes, steps = self.log.size_bytes, self._logged_bytes()
            result = self._attempt()
            causes = self._explain(result, begin_bytes)
            decision = decide_restart(
                result,
                causes,
                RESTART_CURES,
                progressed=self._logged_bytes() != steps,
                attempts_left=allowed - used,
            )
            code = result.exit_code
            if not self._agree(result, decision.restart and not self._stop_signal):
                if code not in ENDS:
                    failed = _(
                        "the run failed (exit code {code}) and is not started again: {why}. All"
                        " output is in {log}"
                    )
                    self.log.error(failed.format(code=code, why=decision.why, log=self.log.path))
                return code
            used += 1
            again = _("restart {number} of {allowed}: {why}")
            self.log.warning(again.format(number=used, allowed=allowed, why=decision.why))

    # ------------------------------------------------------------ one attempt

    def _attempt(self) -> AttemptResult:
        """Meet the other nodes, start this node's workers and wait until they have ended."""
        from finetune.commands.launch.agent import Agent

        self._end_at = math.inf
        self._look_at = 0.0 if self.spec.nodes.count > 1 else math.inf
        self._may_leave = True
        try:
            if self._stop_signal:
                raise Stopped
            self.rendezvous.begin_attempt()
            self._may_leave = False
            exit_codes = Agent(
                self.rendezvous,
                self.spec.worker_arguments(self.rendezvous.number),
                self.spec.processes,
                self._on_start,
                self._must_end_workers,
            ).exit_codes()
        except Stopped:
            problem = _("stopped before there were workers")
            return AttemptResult(problem=problem, stop_signal=self._stop_signal)
        except RendezvousError as error:
            can_pass = isinstance(error, ConnectionLost)
            return AttemptResult(
                problem=str(error), can_pass=can_pass, stop_signal=self._stop_signal
            )
        finally:
            self._may_leave = False
            self._workers = []
        return self._report(exit_codes)

    def _on_start(self, pids: Mapping[int, int]) -> None:
        self._workers = list(pids.values())
        started = [(pid, rank) for rank, pid in pids.items()]
        self.record.add_all(started, "worker", self.rendezvous.number)
        if self._stop_signal:
            self._tell_workers()

    def _must_end_workers(self) -> bool:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            try:
                failed = self.rendezvous.has_failure()
                grace = PEER_GRACE_SECONDS
            # Node 0's launch is gone, or the network is. Its workers may be saving, and ours with
            # them. Collectives end a worker at --timeout-seconds, with a message; those of some
            # libraries never do.
            except RendezvousError:
                failed = True
                grace = self.spec.config.timeout_seconds + PEER_GRACE_SECONDS
            if failed:
                self._look_at = math.inf
                self._end_at = now + grace
        return now > min(self._end_at, self._stop_at + self.spec.shutdown_seconds)

    def _report(self, exit_codes: Mapping[int, int]) -> AttemptResult:
        """Tell the other nodes how this node's workers ended; after a failure, learn how theirs
        did.
        """
        nodes = self.spec.nodes
        result = AttemptResult(exit_codes, stop_signal=self._stop_signal)
        failed = result.exit_code not in ENDS and not self._stop_signal
        try:
            if failed:
                self.rendezvous.report_failure()
            seconds = REPORT_SECONDS if failed else 0.0
            ended = self.rendezvous.exchange("ended", result.exit_code, seconds)
            lost = sorted(set(range(nodes.count)) - ended.keys())
        except RendezvousError:
            ended, lost = {}, [0]
        ended.pop(nodes.rank, None)
        return replace(result, others=ended, lost_nodes=lost if failed else ())

    def _agree(self, result: AttemptResult, restart: bool) -> bool:
        """Let the other nodes know this node's decision, and learn theirs: all must want another
        attempt.
        """
        if result.problem:  # there is nobody to ask
            return restart
        is_first = self.spec.nodes.rank == 0
        # node 0 holds the store, so it stays until the others have ended
        seconds = REPORT_SECONDS if restart or is_first else 0.0
        try:
            decisions = self.rendezvous.exchange("decision", restart, seconds)
        except RendezvousError:
            return restart
        against = [node for node, wants in decisions.items() if not wants]
        if restart and against:
            refused = _("no restart: node {node} does not want one; its log says why")
            self.log.warning(refused.format(node=against[0]))
        if is_first and against and any(decisions.values()):
            time.sleep(READ_SECONDS)
        return not against

    def _explain(self, result: AttemptResult, begin_bytes: int) -> list[str]:
        """Log how the attempt ended and, if it failed, the diagnosis of its part of the log.

        Returns:
            The causes, most likely first.
        """
        from finetune.commands.diagnose.command import (
            FindingByPlace,
            diagnose_logs,
            render_findings,
        )

        if result.exit_code in ENDS or result.stop_signal:
            return []
        for line in result.lines(self.spec.nodes):
            self.log.error(line)
        if result.exit_code == ExitCode.REFUSED or result.problem:
            return []  # the run, or the line above, has named the cause
        with self.log.since(begin_bytes) as part:
            findings = diagnose_logs([part])
        for finding in findings:
            finding.evidence = [
                line.replace(str(part), str(self.log.path)) for line in finding.evidence
            ]
        if folded := self.log.folded():
            omitted = _(
                "{lines} lines of tracebacks and of torch's own output are left out here; they are"
                " in {log}"
            )
            self.log.info(omitted.format(lines=folded, log=self.log.path))
        if findings:
            heading = _("diagnosis, the most likely cause first:")
            self.log.error(heading + "\n" + render_findings(findings))
        # Nobody knows whether starting again cures what only the place of an exception tells.
        return [
            "unknown" if isinstance(finding, FindingByPlace) else finding.cause
            for finding in findings
        ]

    def _logged_bytes(self) -> int:
        try:
            return (self.spec.output_dir / "trainer_log.jsonl").stat().st_size
        except OSError:
            return 0

    # ------------------------------------------------------------ signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._stop_signal:
            self._stop_signal = number
            self._stop_at = time.monotonic()
            stopping = _(
                "{signal}: the run saves a checkpoint and stops; the same again, 3 s later or more,"
                " leaves at once"
            )
            self.log.warning(stopping.format(signal=signal.Signals(number).name))
            if self._may_leave:
                raise Stopped
            self._tell_workers()
        elif time.monotonic() - self._stop_at >= SAME_REQUEST_SECONDS:
            self.log.warning(_("a second signal: leaving at once"))
            self.record.kill()
            self.record.end()
            time.sleep(2 * FOLLOW_SECONDS)  # for the console
            os._exit(128 + number)

    def _tell_workers(self) -> None:
        """Pass the signal to the workers alone: their loaders' processes, in the same group, would
        end and take the save with them.
        """
        number = signal.SIGINT if self._stop_signal == signal.SIGINT else signal.SIGTERM
        for pid in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
