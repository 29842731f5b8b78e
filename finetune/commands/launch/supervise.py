"""The supervisor of a launch: a loop of attempts around torch elastic's agent, which passes signals
on and decides on restarts.

The processes print into the log themselves. While a run works the supervisor only waits, so that it
cannot disturb the run.
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

# A batch system signals every process of a job, and a shell passes its signal on: signals this
# close together are one request.
SAME_REQUEST_SECONDS = 3.0
# After another node's workers failed: time for ours to end on their own, with their own exit code
# and message.
PEER_GRACE_SECONDS = 15.0
# How long a node waits for what the others report, once its own workers have ended: torch elastic
# gives a node's other workers 30 s after one has failed.
REPORT_SECONDS = 60.0
# For the other nodes to read from node 0's store, before node 0 ends.
READ_SECONDS = 2.5
CHECK_SECONDS = 1.0  # between two checks whether another node's workers failed
ENDS = (ExitCode.DONE, ExitCode.STOPPED)  # not failures
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended on this node."""

    # By global rank, the worker that ended first at the front; negative for a signal.
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    problem: str = ""  # why there were no workers, for people; else empty
    can_pass: bool = False  # whether the problem may disappear
    stop_signal: int = 0  # with which the user stopped the run, 0 for none
    lost_nodes: Sequence[int] = ()  # nodes that did not report how they ended
    # By other node, the exit code of its workers, if it reported one.
    others: Mapping[int, int] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """Return the launch's exit code: the run's, or 128 + the signal's number if the run had not
        started.
        """
        codes = [*self.exit_codes.values(), *self.others.values()]
        # A worker that has to end because another failed may report that it was stopped.
        others_failed = any(code not in ENDS for code in self.others.values())
        if self.stop_signal:
            was_stopped = ExitCode.STOPPED in codes
        else:
            was_stopped = not others_failed and ExitCode.STOPPED in codes[:1]
        if was_stopped:
            return int(ExitCode.STOPPED)
        for code in (ExitCode.REFUSED, ExitCode.OUT_OF_MEMORY):
            if code in codes:
                return int(code)
        if self.stop_signal:
            return 128 + self.stop_signal
        failed = self.problem or not codes or any(self.exit_codes.values())
        return int(ExitCode.FAILED if failed else ExitCode.DONE)

    def lines(self, nodes: Nodes) -> list[str]:
        """Describe in lines what happened on this node and, as far as known, on the others."""
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


def decide_restart(
    result: AttemptResult,
    causes: Sequence[str],
    curable: Collection[str],
    *,
    progressed: bool,
    attempts_left: int,
) -> tuple[bool, str]:
    """Decide for this node whether to try again; a launch of several nodes does if all want to.

    Args:
        causes: what the diagnosis found in the log of this attempt, most likely first.
        curable: causes that a restart can fix.
        progressed: whether the run took steps in this attempt.
        attempts_left: how many restarts are allowed.

    Returns:
        The decision, and the reason.
    """
    restart, why = _decide(result, causes, curable, progressed)
    if restart and attempts_left <= 0:
        return False, _("no restarts are left (--max-restarts)")
    return restart, why


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
    # A run that itself reports too little memory (exit code 1) has no smaller microbatches left.
    known = next((cause for cause in causes if cause != "unknown"), None)
    if known is not None:
        if known in curable and known != "device_oom":
            return True, _("{cause} can pass").format(cause=known)
        return False, _("starting again does not cure {cause}").format(cause=known)
    if result.others:  # the node where the failure began knows more, and decides too
        return True, _("another node failed")
    for rank, ended in result.exit_codes.items():
        if ended < 0 and -ended != signal.SIGTERM:  # SIGTERM ends the others after a failure
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
        self._end_at = math.inf  # when workers that still run are ended
        self._check_at = 0.0

    def run(self) -> int:
        """Make attempts until the run is done, stopped, or cannot be fixed by another attempt.

        Returns:
            The exit code.
        """
        # every worker of every node is connected to the store, which node 0 holds
        allow_open_files()
        previous = {}
        for number in _SIGNALS:
            # not those that are ignored already: with nohup a run outlives its terminal
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, self._on_signal)
        try:
            return self._attempts()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.record.end()

    def _attempts(self) -> int:
        from finetune.commands.diagnose.command import knowledge

        used, allowed = 0, self.spec.max_restarts
        while True:
            begin_bytes = self.log.size_bytes
            step_bytes = self._logged_bytes()
            result = self._attempt()
            causes = self._explain(result, begin_bytes)
            restart, why = decide_restart(
                result,
                causes,
                knowledge().restart_cures,
                progressed=self._logged_bytes() != step_bytes,
                attempts_left=allowed - used,
            )
            code = result.exit_code
            if not self._agree(result, restart and not self._stop_signal):
                if code not in ENDS:
                    failed = _(
                        "the run failed (exit code {code}) and is not started again: {why}. All"
                        " output is in {log}"
                    )
                    self.log.error(failed.format(code=code, why=why, log=self.log.path))
                return code
            used += 1
            again = _("restart {number} of {allowed}: {why}")
            self.log.warning(again.format(number=used, allowed=allowed, why=why))

    # ------------------------------------------------------------ one attempt

    def _attempt(self) -> AttemptResult:
        """Synchronize with the other nodes, start this node's workers and wait until they end."""
        from finetune.commands.launch.agent import Agent

        self._end_at = math.inf
        self._check_at = 0.0 if self.spec.nodes.count > 1 else math.inf
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
            return AttemptResult(
                problem=str(error),
                can_pass=isinstance(error, ConnectionLost),
                stop_signal=self._stop_signal,
            )
        finally:
            self._may_leave = False
            self._workers = []
        return self._report(exit_codes)

    def _on_start(self, pids: Mapping[int, int]) -> None:
        self._workers = list(pids.values())
        self.record.add_workers(pids, self.rendezvous.number)
        if self._stop_signal:
            self._signal_workers()

    def _must_end_workers(self) -> bool:
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            try:
                failed = self.rendezvous.has_failure()
                grace = PEER_GRACE_SECONDS
            # Node 0's launch is gone, or the network is down. Its workers may be saving, together
            # with ours. Collectives end a worker at --timeout-seconds, with a message; those of
            # some libraries never do.
            except RendezvousError:
                failed = True
                grace = self.spec.config.timeout_seconds + PEER_GRACE_SECONDS
            if failed:
                self._check_at = math.inf
                self._end_at = now + grace
        return now > min(self._end_at, self._stop_at + self.spec.shutdown_seconds)

    def _report(self, exit_codes: Mapping[int, int]) -> AttemptResult:
        """Report to the other nodes how this node's workers ended; after a failure, wait for their
        reports.
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
        """Exchange decisions with the other nodes: all must want another attempt."""
        if result.problem:  # the nodes are not connected
            return restart
        is_first = self.spec.nodes.rank == 0
        # node 0 holds the store, so it waits until the others have ended
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
        # If only the location of an exception is known, a restart may or may not help.
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
            self._signal_workers()
        elif time.monotonic() - self._stop_at >= SAME_REQUEST_SECONDS:
            self.log.warning(_("a second signal: leaving at once"))
            self.record.kill()
            self.record.end()
            time.sleep(2 * FOLLOW_SECONDS)  # for the console
            os._exit(128 + number)

    def _signal_workers(self) -> None:
        """Pass the signal to the workers alone: their loaders' processes, in the same group, would
        end and make the save fail.
        """
        number = signal.SIGINT if self._stop_signal == signal.SIGINT else signal.SIGTERM
        for pid in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
