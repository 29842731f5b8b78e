"""torch elastic's agent for one attempt on this node.

Its own restarts are not used: they ignore the cause of a failure.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from finetune.commands.launch.rendezvous import CONNECT_SECONDS, ConnectionLost, Rendezvous

POLL_SECONDS = 0.2
# From SIGTERM to SIGKILL for workers that cannot continue; a worker that waits in a collective does
# not notice the first.
CLOSE_SECONDS = 10


class Agent(LocalElasticAgent):
    """Starts the workers and waits until they have ended: `Agent(...).exit_codes()`.

    Args:
        arguments: a worker's command line after the interpreter.
        on_start: called with the workers' process ids, by global rank.
        must_end: called several times a second; workers are ended when it returns True.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        arguments: Sequence[str],
        processes: int,
        on_start: Callable[[Mapping[int, int]], None],
        must_end: Callable[[], bool],
    ) -> None:
        # A handler of torch elastic would end all workers without a checkpoint; keep ours.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        handler = StaticTCPRendezvous(
            rendezvous.address,
            rendezvous.port,
            rendezvous.nodes.rank,
            rendezvous.nodes.count,
            run_id=rendezvous.attempt,
            timeout=int(CONNECT_SECONDS),
        )
        handler._store = rendezvous.store  # it would bind the port itself, which is held already
        spec = WorkerSpec(
            role="worker",
            local_world_size=processes,
            entrypoint=sys.executable,
            # elastic substitutes "${local_rank}" in them
            args=tuple(word.replace("$", "$$") for word in arguments),
            rdzv_handler=handler,
            max_restarts=rendezvous.number - 1,  # all of them used: TORCHELASTIC_RESTART_COUNT
            monitor_interval=POLL_SECONDS,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self._remaining_restarts = 0
        self._on_start = on_start
        self._must_end = must_end

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes by global rank, starting with the worker that ended first; negative
        for a signal.

        Raises:
            ConnectionLost: a node was lost while ranks were assigned.
        """
        try:
            result = self.run()
        except DistError as error:
            raise ConnectionLost(str(error).splitlines()[0]) from error
        failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
        codes = {rank: failure.exitcode for rank, failure in failures}
        # elastic gives up without a failure if a process hangs in the kernel, where it is asked to
        rest = 0 if failures or result.state is WorkerState.SUCCEEDED else 1
        for worker in self.get_worker_group().workers:
            codes.setdefault(worker.global_rank, rest)
        return codes

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        self._on_start(
            {worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers}
        )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> Any:
        if self._must_end():
            self._shutdown(signal.SIGTERM, CLOSE_SECONDS)
        return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Do not wait here: the supervisor waits for the other nodes, after failures too."""
