"""The process between the supervisor and the workers: joins the other nodes, starts this node's
workers, reports how they ended. One process per attempt, so that nothing of a failed attempt is
left in it.

Workers are torch elastic's (`torch.distributed.elastic.multiprocessing.start_processes`), with the
environment that torchrun gives. Its own rendezvous and restarts are not used: they restart whatever
the failure was, and a static rendezvous cannot go to the next port. Talks to the supervisor in JSON
lines: requests on standard input, reports on the descriptor named on the command line. Standard
output and error are the log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from finetune.commands.launch.attempt_result import AttemptResult
from finetune.commands.launch.heartbeat import Heartbeat
from finetune.commands.launch.rendezvous import (
    LaunchNode,
    Rendezvous,
    RendezvousError,
    RendezvousResult,
)
from finetune.runtime.host import allow_open_files
from finetune.runtime.launch_environment import LaunchWorld
from finetune.runtime.parent_watchdog import die_with_launcher, progress

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

POLL_SECONDS = 0.2
# After another node's workers ended: time for ours to end by themselves, with their own exit code
# and message.
PEER_GRACE_SECONDS = 15.0
# From SIGTERM to SIGKILL for workers that cannot continue; one that waits in a collective does not
# notice the first.
CLOSE_SECONDS = 10
# How long nodes wait for each other's decision; one without a heartbeat for so long is not waited
# for.
DECISION_SECONDS = 60.0
HEARTBEAT_LOST_SECONDS = 15.0


@dataclass(frozen=True)
class AgentRequest:
    """What the supervisor wants started."""

    supervisor_pid: int
    arguments: list[str]  # a worker's command line after the interpreter
    shutdown_seconds: float  # from the signal to stop to SIGKILL
    node: LaunchNode


class Stopped(Exception):
    """A signal came before there were workers."""


class Agent:
    """One attempt on this node."""

    def __init__(self, request: AgentRequest, reports: TextIO) -> None:
        self.request = request
        self.node = request.node
        self._reports = reports
        self.stop_signal = 0
        self._stop_at = 0.0
        self._workers: PContext | None = None
        self._may_leave = True  # by an exception: no worker would be left behind
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def run(self) -> None:
        rendezvous = Rendezvous(self.node)
        rendezvous.on_late = lambda nodes: self._report("late", nodes=nodes)
        try:
            self._report("waiting", nodes=self.node.nodes)
            agreed = rendezvous.join()
            self._report("joined", port=agreed.port, launch_id=agreed.launch_id, hosts=agreed.hosts)
            heartbeat = Heartbeat(rendezvous, agreed)
            with tempfile.TemporaryDirectory(prefix="finetune-launch-") as folder:
                self._start(agreed, folder)
                exit_codes = self._follow(heartbeat, agreed)
        except RendezvousError as error:
            self._report("ended", problem=error.kind, facts=error.facts, exit_codes={})
            return
        except Stopped:
            self._report("ended", problem="stopped", exit_codes={}, stop_signal=self.stop_signal)
            return
        self._end(heartbeat, exit_codes)

    # ------------------------------------------------------------ workers

    def _start(self, agreed: RendezvousResult, folder: str) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

        self._may_leave = False
        # A handler of torch elastic's would end all workers without a checkpoint; ours stay.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        count = self.node.processes
        self._workers = start_processes(
            name="worker",
            entrypoint=sys.executable,
            args={local: tuple(self.request.arguments) for local in range(count)},
            envs={local: self._environment(agreed, local) for local in range(count)},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        pids = self._workers.pids()
        self._report(
            "workers",
            attempt=agreed.attempt,
            workers=[[pids[n], agreed.first_rank + n] for n in range(count)],
        )
        if self.stop_signal:
            self._tell_workers()

    def _environment(self, agreed: RendezvousResult, local_rank: int) -> dict[str, str]:
        node, rank = self.node, agreed.first_rank + local_rank
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(node.rank),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "worker",
            "WORLD_SIZE": str(agreed.world_size),
            "LOCAL_WORLD_SIZE": str(node.processes),
            "GROUP_WORLD_SIZE": str(node.nodes),
            "ROLE_WORLD_SIZE": str(agreed.world_size),
            "MASTER_ADDR": node.store_address,
            "MASTER_PORT": str(agreed.port),
            "TORCHELASTIC_RESTART_COUNT": str(agreed.attempt - 1),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": node.digest,
            # The store of this attempt exists already: workers only connect to it.
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
        }

    def _follow(self, heartbeat: Heartbeat, agreed: RendezvousResult) -> dict[int, int]:
        """Exit codes by global rank, the one that ended first at the front; negative for a
        signal.
        """
        peer_ended_at = 0.0
        while (result := self._workers.wait(0)) is None:
            now = time.monotonic()
            # where our supervisor is gone, workers that save need us: they are told of our end too
            progress.mark()
            if any(how["exit_code"] not in (0, 3) for how in heartbeat.ended.values()):
                peer_ended_at = peer_ended_at or now
            alone = peer_ended_at and now - peer_ended_at > PEER_GRACE_SECONDS
            too_slow = self._stop_at and now - self._stop_at > self.request.shutdown_seconds
            # Its own collectives end a worker at --timeout-seconds, with a message; those of some
            # libraries never do.
            lost = heartbeat.lost(
                self.node.timeout_seconds + PEER_GRACE_SECONDS, known=heartbeat.ended
            )
            if alone or too_slow or lost:
                self._workers.close(signal.SIGTERM, CLOSE_SECONDS)
            time.sleep(POLL_SECONDS)
        failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
        codes = {agreed.first_rank + local: failure.exitcode for local, failure in failures}
        return codes | {
            agreed.first_rank + n: 0
            for n in range(self.node.processes)
            if agreed.first_rank + n not in codes
        }

    # ------------------------------------------------------------ signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal:
            return
        self.stop_signal = number
        self._stop_at = time.monotonic()
        if self._may_leave:
            raise Stopped
        if self._workers is not None:
            self._tell_workers()

    def _tell_workers(self) -> None:
        """To the workers alone: their loaders' processes, in the same group, would end and take the
        save with them.
        """
        for pid in self._workers.pids().values():
            try:
                os.kill(pid, self.stop_signal)
            except ProcessLookupError:
                continue

    # ------------------------------------------------------------ the end

    def _end(self, heartbeat: Heartbeat, exit_codes: dict[int, int]) -> None:
        lost_nodes = heartbeat.lost(HEARTBEAT_LOST_SECONDS, known=heartbeat.ended)
        code = AttemptResult(exit_codes, stop_signal=self.stop_signal).exit_code
        heartbeat.publish("ended", {"exit_code": code, "rank": next(iter(exit_codes))})
        if code not in (0, 3) and heartbeat.others:
            # when all ended, the first to fail is known
            self._wait_for(heartbeat.ended, heartbeat, PEER_GRACE_SECONDS)
        self._report(
            "ended",
            exit_codes=exit_codes,
            stop_signal=self.stop_signal,
            lost_nodes=lost_nodes,
            others=heartbeat.ended,
        )
        decision = self._next_request()
        if not heartbeat.others:
            return
        heartbeat.publish("decision", decision)
        if self.node.rank == 0 or decision["restart"]:
            self._wait_for(heartbeat.decisions, heartbeat, DECISION_SECONDS)
        against = next(
            (rank for rank, other in heartbeat.decisions.items() if not other["restart"]), None
        )
        self._report("decision", restart=decision["restart"] and against is None, node=against)
        time.sleep(2.5)  # so that the others see it: they look every second

    def _wait_for(self, known: dict[int, Any], heartbeat: Heartbeat, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if set(known) | set(heartbeat.lost(HEARTBEAT_LOST_SECONDS, known)) >= set(
                heartbeat.others
            ):
                return
            time.sleep(POLL_SECONDS)

    def _report(self, event: str, **facts: Any) -> None:
        try:
            self._reports.write(json.dumps({"event": event, **facts}) + "\n")
            self._reports.flush()
        # the supervisor was killed; the workers are told to stop by the kernel
        except BrokenPipeError:
            return

    def _next_request(self) -> dict[str, Any]:
        line = sys.stdin.readline()
        return json.loads(line) if line else {"restart": False}


def main() -> int:
    die_with_launcher(LaunchWorld(0, 0, 1, 1, launched=True))
    # every worker of every node is connected to the store, which node 0's agent holds
    allow_open_files()
    received = json.loads(sys.stdin.readline())
    request = AgentRequest(**received | {"node": LaunchNode(**received["node"])})
    if os.getppid() != request.supervisor_pid:
        return 1  # it was killed before we could ask to be told
    with os.fdopen(int(sys.argv[1]), "w") as reports:
        Agent(request, reports).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads may hang in calls over a connection that is lost


if __name__ == "__main__":
    sys.exit(main())
