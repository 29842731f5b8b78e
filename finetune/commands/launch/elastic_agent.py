"""The process between the supervisor and the workers: meets the other nodes, starts this node's workers, says how they
ended. One process per attempt, so that nothing of a failed attempt is left in it.

Workers are torch elastic's (`torch.distributed.elastic.multiprocessing.start_processes`), with the environment that
torchrun gives. Its own rendezvous and restarts are not used: they restart whatever the failure was, and a static
rendezvous cannot go to the next port. Talks to the supervisor in JSON lines: orders on standard input, reports on the
descriptor named on the command line. Standard output and error are the log.
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

from finetune.commands.launch.heartbeat import Watch
from finetune.commands.launch.rendezvous import Meeting, MeetingError, Met, Place
from finetune.commands.launch.restart_policy import Ended
from finetune.runtime.device import LaunchWorld
from finetune.runtime.parent_watchdog import die_with_launcher

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

POLL_SECONDS = 0.2
# After another node's workers ended: time for ours to end by themselves, with their own exit code and words.
PEER_GRACE_SECONDS = 15.0
# From SIGTERM to SIGKILL for workers that cannot go on; one that waits in a collective does not hear the first.
CLOSE_SECONDS = 10
# How long nodes wait for each other's verdict; one that has not been heard for so long is not waited for.
VERDICT_SECONDS = 60.0
SILENT_SECONDS = 15.0


@dataclass(frozen=True)
class Orders:
    """What the supervisor wants started.

    Attributes:
        words: of a worker's command line.
        shutdown_seconds: from the signal to stop to SIGKILL.
    """

    supervisor_pid: int
    words: list[str]
    shutdown_seconds: float
    place: Place


class Stopped(Exception):
    """A signal came before there were workers."""


class Agent:
    """One attempt on this node."""

    def __init__(self, orders: Orders, reports: TextIO) -> None:
        self.orders, self.place, self._reports = orders, orders.place, reports
        self.stop_signal = 0
        self._stop_at = 0.0
        self._workers: PContext | None = None
        self._may_leave = True  # by an exception: no worker would be left behind
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def run(self) -> None:
        meeting = Meeting(self.place)
        try:
            self._report("waiting", nodes=self.place.nodes)
            met = meeting.meet()
            self._report("met", port=met.port, launch_id=met.launch_id, hosts=met.hosts)
            watch = Watch(meeting, met)
            with tempfile.TemporaryDirectory(prefix="finetune-launch-") as folder:
                self._start(met, folder)
                exit_codes = self._follow(watch, met)
        except MeetingError as error:
            self._report("ended", problem=error.kind, facts=error.facts, exit_codes={})
            return
        except Stopped:
            self._report("ended", problem="stopped", exit_codes={}, stop_signal=self.stop_signal)
            return
        self._end(watch, exit_codes)

    # ------------------------------------------------------------ workers

    def _start(self, met: Met, folder: str) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

        self._may_leave = False
        # A handler of torch elastic's would end all workers without a checkpoint; ours stay.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        count = self.place.processes
        self._workers = start_processes(
            name="worker",
            entrypoint=sys.executable,
            args={local: tuple(self.orders.words) for local in range(count)},
            envs={local: self._environment(met, local) for local in range(count)},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        pids = self._workers.pids()
        self._report("workers", attempt=met.attempt, workers=[[pids[n], met.first_rank + n] for n in range(count)])
        if self.stop_signal:
            self._tell_workers()

    def _environment(self, met: Met, local_rank: int) -> dict[str, str]:
        place, rank = self.place, met.first_rank + local_rank
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(place.rank),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "worker",
            "WORLD_SIZE": str(met.world_size),
            "LOCAL_WORLD_SIZE": str(place.processes),
            "GROUP_WORLD_SIZE": str(place.nodes),
            "ROLE_WORLD_SIZE": str(met.world_size),
            "MASTER_ADDR": place.store_address,
            "MASTER_PORT": str(met.port),
            "TORCHELASTIC_RESTART_COUNT": str(met.attempt - 1),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": place.digest,
            # The store of this attempt exists already: workers only connect to it.
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
        }

    def _follow(self, watch: Watch, met: Met) -> dict[int, int]:
        """Exit codes by global rank, the one that ended first at the front; negative for a signal."""
        peer_ended_at = 0.0
        while (result := self._workers.wait(0)) is None:
            now = time.monotonic()
            if any(how["exit_code"] not in (0, 3) for how in watch.ended.values()):
                peer_ended_at = peer_ended_at or now
            alone = peer_ended_at and now - peer_ended_at > PEER_GRACE_SECONDS
            too_slow = self._stop_at and now - self._stop_at > self.orders.shutdown_seconds
            # Its own collectives give a worker up at --timeout-seconds, in words; those of some libraries never do.
            lost = self._silent(watch, self.place.timeout_seconds + PEER_GRACE_SECONDS, watch.ended)
            if alone or too_slow or lost:
                self._workers.close(signal.SIGTERM, CLOSE_SECONDS)
            time.sleep(POLL_SECONDS)
        failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
        codes = {met.first_rank + local: failure.exitcode for local, failure in failures}
        return codes | {met.first_rank + n: 0 for n in range(self.place.processes) if met.first_rank + n not in codes}

    def _silent(self, watch: Watch, seconds: float, known: dict[int, Any]) -> list[int]:
        """Nodes that have not been heard of for so long, without those that said what we want to know."""
        return [rank for rank, quiet in watch.silent_seconds().items() if quiet > seconds and rank not in known]

    # ------------------------------------------------------------ signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal:
            return
        self.stop_signal, self._stop_at = number, time.monotonic()
        if self._may_leave:
            raise Stopped
        if self._workers is not None:
            self._tell_workers()

    def _tell_workers(self) -> None:
        """To the workers alone: their loaders' processes, in the same group, would end and take the save with them."""
        for pid in self._workers.pids().values():
            try:
                os.kill(pid, self.stop_signal)
            except ProcessLookupError:
                continue

    # ------------------------------------------------------------ the end

    def _end(self, watch: Watch, exit_codes: dict[int, int]) -> None:
        seconds = watch.silent_seconds()
        silent = {rank: round(seconds[rank]) for rank in self._silent(watch, SILENT_SECONDS, watch.ended)}
        code = Ended(exit_codes, stop_signal=self.stop_signal).exit_code
        watch.say("ended", {"exit_code": code, "rank": next(iter(exit_codes))})
        if code not in (0, 3) and watch.others:
            self._wait_for(watch.ended, watch, PEER_GRACE_SECONDS)  # who failed first is known when all have ended
        self._report(
            "ended",
            exit_codes=exit_codes,
            stop_signal=self.stop_signal,
            silent=silent,
            others=watch.ended,
        )
        verdict = self._next_order()
        if not watch.others:
            return
        watch.say("verdict", verdict)
        if self.place.rank == 0 or verdict["restart"]:
            self._wait_for(watch.verdicts, watch, VERDICT_SECONDS)
        against = next((rank for rank, other in watch.verdicts.items() if not other["restart"]), None)
        self._report("verdict", restart=verdict["restart"] and against is None, node=against)
        time.sleep(2.5)  # so that the others hear of it: they look every second

    def _wait_for(self, known: dict[int, Any], watch: Watch, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if set(known) | set(self._silent(watch, SILENT_SECONDS, known)) >= set(watch.others):
                return
            time.sleep(POLL_SECONDS)

    def _report(self, event: str, **facts: Any) -> None:
        try:
            self._reports.write(json.dumps({"event": event, **facts}) + "\n")
            self._reports.flush()
        except BrokenPipeError:  # the supervisor was killed; the workers are told to stop by the kernel
            return

    def _next_order(self) -> dict[str, Any]:
        line = sys.stdin.readline()
        return json.loads(line) if line else {"restart": False}


def main() -> int:
    die_with_launcher(LaunchWorld(0, 0, 1, 1, launched=True))
    given = json.loads(sys.stdin.readline())
    orders = Orders(**given | {"place": Place(**given["place"])})
    if os.getppid() != orders.supervisor_pid:
        return 1  # it was killed before we could ask to be told
    with os.fdopen(int(sys.argv[1]), "w") as reports:
        Agent(orders, reports).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads may hang in calls over a connection that is lost


if __name__ == "__main__":
    sys.exit(main())
