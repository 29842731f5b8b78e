"""The supervisor of a launch: starts an agent for each attempt, passes signals on, and decides on
restarts.

It loads no torch. What the processes print goes into the log without it; while a run works the
supervisor only waits, so that nothing it does can disturb it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from types import FrameType
from typing import Any

from finetune.commands.launch.attempt_result import AttemptResult, signal_name
from finetune.commands.launch.launch_spec import LaunchSpec
from finetune.commands.launch.log import FOLLOW_SECONDS, LaunchLog
from finetune.commands.launch.rendezvous import LaunchNode
from finetune.commands.launch.restart_policy import RestartDecision, decide_restart
from finetune.errors import ExitCode
from finetune.runtime.collectives import name_ranks
from finetune.runtime.language import _
from finetune.runtime.ports import HeldPort, candidates
from finetune.storage.launch_record import LaunchRecord

# A batch system signals every process of a job, and a shell passes its own on: signals this close
# are one request.
SAME_REQUEST_SECONDS = 3.0
POLL_SECONDS = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs one launch on this node: `Supervisor(spec, held, log, record).run()`.

    Args:
        held: the port, on node 0.
    """

    def __init__(
        self, spec: LaunchSpec, held: HeldPort | None, log: LaunchLog, record: LaunchRecord
    ) -> None:
        self.spec = spec
        self.held = held
        self.log = log
        self.record = record
        self._agent: subprocess.Popen[str] | None = None
        self._stop_signal = 0
        self._stop_at = 0.0
        self._launch_id = secrets.token_hex(8) if held is not None else ""
        self._ports = (held.number,) if held is not None else candidates(spec.nodes.port)

    def run(self) -> int:
        """Attempts until the run is done, stopped, or beyond what another attempt cures; the exit
        code.
        """
        previous = {number: signal.signal(number, self._on_signal) for number in self._signals()}
        try:
            return self._attempts()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.record.end()

    def _signals(self) -> list[signal.Signals]:
        """Those that are not ignored already: nohup has a run outlive its terminal."""
        return [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    def _attempts(self) -> int:
        from finetune.commands.diagnose.command import RESTART_CURES

        number, used, allowed = 0, 0, self.spec.max_restarts
        while True:
            begin_bytes, steps = self.log.size_bytes, self._logged_bytes()
            result, number = self._attempt(number)
            causes = self._explain(result, begin_bytes)
            decision = decide_restart(
                result,
                causes,
                RESTART_CURES,
                progressed=self._logged_bytes() != steps,
                attempts_left=allowed - used,
            )
            restart = self._agree(decision)
            code = result.exit_code
            if not restart or self._stop_signal:
                if code not in (ExitCode.DONE, ExitCode.STOPPED):
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

    def _attempt(self, before: int) -> tuple[AttemptResult, int]:
        """Start an agent and wait until it reports how its workers ended; also the number of the
        attempt.
        """
        spec, held, number = self.spec, self.held, before + 1
        node = LaunchNode(
            nodes=spec.nodes.count,
            rank=spec.nodes.rank,
            address=spec.nodes.address,
            ports=self._ports,
            processes=spec.processes,
            digest=spec.digest,
            command=spec.command,
            timeout_seconds=spec.config.timeout_seconds,
            launch_id=self._launch_id,
            attempt=number if held is not None else before,
            listener=held.listener.fileno() if held is not None else -1,
            listens_at=held.reached_at if held is not None else "",
            secret=spec.secret,
        )
        read, write = os.pipe()
        self._agent = subprocess.Popen(
            [sys.executable, "-u", "-m", "finetune.commands.launch.elastic_agent", str(write)],
            stdin=subprocess.PIPE,
            stdout=self.log.descriptor,
            stderr=self.log.descriptor,
            pass_fds=(write, *((node.listener,) if held is not None else ())),
            env=dict(spec.environment),
            start_new_session=True,  # Ctrl-C is for the supervisor, which passes it on once
            text=True,
        )
        os.close(write)
        self.record.add(self._agent.pid, "agent", attempt=number)
        self._reports = _reports(read)
        self._request(
            supervisor_pid=os.getpid(),
            arguments=spec.worker_arguments(number),
            shutdown_seconds=spec.shutdown_seconds,
            node=asdict(node),
        )
        if self._stop_signal:
            self._agent.send_signal(self._stop_signal)
        return self._until_ended(number)

    def _until_ended(self, number: int) -> tuple[AttemptResult, int]:
        for report in self._reports:
            event = report.pop("event")
            if event == "waiting" and report["nodes"] > 1:
                waiting = _("waiting for {others} other node(s), up to {seconds} s")
                seconds = self.spec.config.timeout_seconds
                self.log.info(waiting.format(others=report["nodes"] - 1, seconds=seconds))
            elif event == "late":
                late = _("still waiting for {missing} of {count} nodes: {nodes}")
                nodes, count = report["nodes"], self.spec.nodes.count
                self.log.info(late.format(missing=len(nodes), count=count, nodes=name_ranks(nodes)))
            elif event == "joined":
                self._launch_id = report["launch_id"]
                if self.spec.nodes.count > 1:
                    joined = _("all nodes are here: {hosts}; rendezvous at port {port}")
                    self.log.info(
                        joined.format(hosts=", ".join(report["hosts"]), port=report["port"])
                    )
            elif event == "workers":
                number = report["attempt"]
                self.record.add_all(
                    [tuple(worker) for worker in report["workers"]], "worker", number
                )
            elif event == "ended":
                for name in ("exit_codes", "lost_nodes", "others"):
                    report[name] = {
                        int(rank): value for rank, value in report.get(name, {}).items()
                    }
                return AttemptResult(**report), number
        # The agent ended without a report: killed, or it failed itself.
        code = self._agent.wait()
        self._wait_for_workers()
        problem, facts = (
            ("agent_killed", {"signal": signal_name(-code)})
            if code < 0
            else ("agent_ended", {"code": code})
        )
        return AttemptResult(problem=problem, facts=facts, stop_signal=self._stop_signal), number

    def _wait_for_workers(self) -> None:
        """Their parent's end has told them to stop (runtime/parent_watchdog.py): they save, and end
        before we do.
        """
        seconds = self.spec.shutdown_seconds
        deadline = time.monotonic() + seconds
        if workers := self.record.running("worker"):
            lost = _(
                "the process that starts the workers is gone; {count} of them save and stop: up to"
                " {seconds} s"
            )
            self.log.warning(lost.format(count=len(workers), seconds=seconds))
        while self.record.running("worker") and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.record.kill()

    def _request(self, **facts: Any) -> None:
        try:
            self._agent.stdin.write(json.dumps(facts) + "\n")
            self._agent.stdin.flush()
        except BrokenPipeError:
            return  # it has ended; the reports tell how

    def _agree(self, decision: RestartDecision) -> bool:
        """Let the agent tell the other nodes, and learn theirs; then it is gone."""
        restart = decision.restart
        self._request(restart=restart)
        for report in self._reports:
            if report["event"] == "decision":
                if restart and not report["restart"]:
                    refused = _("no restart: node {node} does not want one; its log says why")
                    self.log.warning(refused.format(node=report["node"]))
                restart = report["restart"]
        with contextlib.suppress(BrokenPipeError):  # it ended before it had read everything
            self._agent.stdin.close()
        self._agent.wait()
        return restart

    def _explain(self, result: AttemptResult, begin_bytes: int) -> list[str]:
        """Log how it ended; where it failed, diagnose this attempt's part of the log. The causes,
        best first.
        """
        from finetune.commands.diagnose.command import (
            FindingByPlace,
            diagnose_logs,
            render_findings,
        )

        if result.exit_code in (ExitCode.DONE, ExitCode.STOPPED) or result.stop_signal:
            return []
        port = self.spec.nodes.port
        ports = self._ports if port is None else candidates(port)  # those that the other nodes try
        for line in result.lines(self.spec.nodes, ports, self.spec.config.timeout_seconds):
            self.log.error(line)
        if result.exit_code == ExitCode.REFUSED or result.problem not in ("", "agent_ended"):
            return []  # the run, or the line above, has told the cause
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
            self.log.error(
                _("diagnosis, the most likely cause first:") + "\n" + render_findings(findings)
            )
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
            if self._agent is not None and self._agent.poll() is None:
                self._agent.send_signal(
                    signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
                )
        elif time.monotonic() - self._stop_at >= SAME_REQUEST_SECONDS:
            self.log.warning(_("a second signal: leaving at once"))
            self.record.kill()
            self.record.end()
            time.sleep(2 * FOLLOW_SECONDS)  # for the console
            os._exit(128 + number)


def _reports(descriptor: int) -> Iterator[dict[str, Any]]:
    """What the agent reports, until it has ended. Never waits long in one call: a signal that comes
    just before the call would be handled only after it.
    """
    held = b""
    try:
        while True:
            if not select.select([descriptor], [], [], POLL_SECONDS)[0]:
                continue
            if not (block := os.read(descriptor, 1 << 16)):
                return
            *lines, held = (held + block).split(b"\n")
            yield from map(json.loads, lines)
    finally:
        os.close(descriptor)
