"""The supervisor of a launch: starts an agent for each attempt, passes signals on, and decides what comes after.

It loads no torch. What the processes say goes into the log by itself; the supervisor's own part in a run at work is to
wait, so that nothing it does can disturb it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from finetune.commands.launch import texts
from finetune.commands.launch.log import FOLLOW_SECONDS, LaunchLog
from finetune.commands.launch.rendezvous import Place
from finetune.commands.launch.restart_policy import Ended, Verdict, decide
from finetune.errors import ExitCode
from finetune.runtime.language import Language
from finetune.runtime.nodes import Nodes
from finetune.runtime.ports import HeldPort, candidates
from finetune.storage.launch_record import LaunchRecord

# A batch system signals every process of a job, and a shell passes its own on: signals this close are one request.
SAME_REQUEST_SECONDS = 3.0
POLL_SECONDS = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Launch:
    """What is launched on this node.

    Attributes:
        module: of a worker.
        flags: its words.
        resume: the run's setting; another attempt goes on from what the first has left.
        digest: the same on all nodes of the launch.
        held: the port, on node 0.
    """

    module: str
    flags: tuple[str, ...]
    resume: str
    digest: str
    nodes: Nodes
    processes: int
    held: HeldPort | None
    environment: Mapping[str, str]
    output_dir: Path
    timeout_seconds: int
    shutdown_seconds: float
    max_restarts: int
    language: Language

    def words(self, attempt: int) -> list[str]:
        """A worker's command line after the interpreter."""
        again = ["--resume", "auto"] if self._goes_on(attempt) else []
        return ["-u", "-m", self.module, *self.flags, *again]

    def _goes_on(self, attempt: int) -> bool:
        return attempt > 1 and self.resume != "auto" and (self.output_dir / "status.json").exists()

    @property
    def command(self) -> str:
        return f"{self.module} {' '.join(self.flags)}"


class Supervisor:
    """Runs one launch on this node: `Supervisor(launch, log, record).run()`."""

    def __init__(self, launch: Launch, log: LaunchLog, record: LaunchRecord) -> None:
        self.launch, self.log, self.record = launch, log, record
        self._agent: subprocess.Popen[str] | None = None
        self._stop_signal, self._stop_at = 0, 0.0
        self._launch_id = secrets.token_hex(8) if launch.held is not None else ""

    def run(self) -> int:
        """Attempts until the run is done, stopped, or beyond what another attempt cures; the exit code."""
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
        number = 0
        restarts = self.launch.max_restarts
        while True:
            begin_bytes, steps = self.log.size_bytes, self._logged_bytes()
            ended, number = self._attempt(number)
            causes = self._explain(ended, begin_bytes)
            verdict = decide(
                ended,
                causes,
                _curable(),
                progressed=self._logged_bytes() != steps,
                attempts_left=restarts,
            )
            restart = self._agree(verdict)
            code = ended.exit_code
            if not restart or self._stop_signal:
                if code not in (ExitCode.DONE, ExitCode.STOPPED):
                    self._say("error", texts.GAVE_UP, why=self._in_words(verdict.why), code=code, log=self.log.path)
                return code
            restarts -= 1
            used, allowed = self.launch.max_restarts - restarts, self.launch.max_restarts
            self._say("warning", texts.RESTART, number=used, allowed=allowed, why=self._in_words(verdict.why))

    # ------------------------------------------------------------ one attempt

    def _attempt(self, before: int) -> tuple[Ended, int]:
        """Start an agent and wait until it says how its workers ended; also the number of the attempt."""
        launch, number = self.launch, before + 1
        nodes, held = launch.nodes, launch.held
        place = Place(
            nodes=nodes.count,
            rank=nodes.rank,
            address=nodes.address,
            ports=(held.number,) if held is not None else candidates(nodes.port),
            processes=launch.processes,
            digest=launch.digest,
            command=launch.command,
            timeout_seconds=launch.timeout_seconds,
            launch_id=self._launch_id,
            attempt=number if held is not None else before,
            listener=held.listener.fileno() if held is not None else -1,
        )
        orders = {
            "supervisor_pid": os.getpid(),
            "words": launch.words(number),
            "shutdown_seconds": launch.shutdown_seconds,
            "place": asdict(place),
        }
        read, write = os.pipe()
        self._agent = subprocess.Popen(
            [sys.executable, "-u", "-m", "finetune.commands.launch.elastic_agent", str(write)],
            stdin=subprocess.PIPE,
            stdout=self.log.descriptor,
            stderr=self.log.descriptor,
            pass_fds=(write, *((place.listener,) if held is not None else ())),
            env=dict(launch.environment),
            start_new_session=True,  # Ctrl-C is for the supervisor, which passes it on once
            text=True,
        )
        os.close(write)
        self.record.add(self._agent.pid, "agent", attempt=number)
        self._reports = _reports(read)
        self._order(orders)
        if self._stop_signal:
            self._agent.send_signal(self._stop_signal)
        return self._until_ended(number)

    def _until_ended(self, number: int) -> tuple[Ended, int]:
        for report in self._reports:
            event = report.pop("event")
            if event == "waiting" and report["nodes"] > 1:
                self._say("info", texts.WAITING, others=report["nodes"] - 1, seconds=self.launch.timeout_seconds)
            elif event == "met":
                self._launch_id = report["launch_id"]
                if self.launch.nodes.count > 1:
                    self._say("info", texts.MET, hosts=", ".join(report["hosts"]), port=report["port"])
            elif event == "workers":
                number = report["attempt"]
                self.record.add_all([tuple(worker) for worker in report["workers"]], "worker", number)
            elif event == "ended":
                for name in ("exit_codes", "silent", "others"):
                    report[name] = {int(rank): value for rank, value in report.get(name, {}).items()}
                return Ended(**report), number
        # The agent ended without a word: killed, or it failed itself.
        code = self._agent.wait()
        return Ended(problem="agent_ended", facts={"code": code}, stop_signal=self._stop_signal), number

    def _order(self, facts: dict[str, Any]) -> None:
        try:
            self._agent.stdin.write(json.dumps(facts) + "\n")
            self._agent.stdin.flush()
        except BrokenPipeError:
            return  # it has ended; the reports say how

    def _agree(self, verdict: Verdict) -> bool:
        """Let the agent tell the other nodes, and hear from them; then it is gone."""
        self._order({"restart": verdict.restart, "why": verdict.why})
        restart = verdict.restart
        for report in self._reports:
            if report["event"] == "verdict":
                if restart and not report["restart"]:
                    self._say("warning", texts.OTHER_GAVE_UP, node=report["node"])
                restart = report["restart"]
        self._agent.stdin.close()
        self._agent.wait()
        return restart

    # ------------------------------------------------------------ words

    def _explain(self, ended: Ended, begin_bytes: int) -> list[str]:
        """Say how it ended; where it failed, diagnose this attempt's part of the log. The causes, best first."""
        from finetune.commands.diagnose.command import diagnose_logs, render_findings

        if ended.exit_code in (ExitCode.DONE, ExitCode.STOPPED) or ended.stop_signal:
            return []
        language = self.launch.language
        for line in texts.how_it_ended(ended, self.launch, language):
            self.log.error(line)
        if ended.exit_code == ExitCode.REFUSED or ended.problem not in ("", "agent_ended"):
            return []  # said already, in its own words
        with self.log.since(begin_bytes) as part:
            findings = diagnose_logs([part], language)
            for finding in findings:
                finding.evidence = [line.replace(str(part), str(self.log.path)) for line in finding.evidence]
        if folded := self.log.folded():
            self._say("info", texts.FOLDED, lines=folded, log=self.log.path)
        if findings:
            self.log.error(self._in_words(texts.DIAGNOSIS) + "\n" + render_findings(findings, language))
        return [finding.cause for finding in findings]

    def _say(self, level: str, text: Mapping[str, str], **values: Any) -> None:
        getattr(self.log, level)(self._in_words(text).format(**values))

    def _in_words(self, text: Mapping[str, str]) -> str:
        return text[self.launch.language]

    def _logged_bytes(self) -> int:
        try:
            return (self.launch.output_dir / "trainer_log.jsonl").stat().st_size
        except OSError:
            return 0

    # ------------------------------------------------------------ signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._stop_signal:
            self._stop_signal, self._stop_at = number, time.monotonic()
            self._say("warning", texts.STOPPING, signal=signal.Signals(number).name)
            if self._agent is not None and self._agent.poll() is None:
                self._agent.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        elif time.monotonic() - self._stop_at >= SAME_REQUEST_SECONDS:
            self._say("warning", texts.LEAVING)
            self.record.kill()
            self.record.end()
            time.sleep(2 * FOLLOW_SECONDS)  # for the console
            os._exit(128 + number)


def _reports(descriptor: int) -> Iterator[dict[str, Any]]:
    """What the agent reports, until it has ended. Never waits long in one call: a signal that comes just before the
    call would be handled only after it."""
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


def _curable() -> Collection[str]:
    from finetune.commands.diagnose.command import RESTART_CURES

    return RESTART_CURES
