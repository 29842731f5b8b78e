"""How an attempt ended on this node: the exit code that follows, and what people are told."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.commands.launch.records import SECRET_NAME
from finetune.errors import ExitCode
from finetune.runtime.collectives import name_ranks
from finetune.runtime.language import N_, _
from finetune.runtime.nodes import Nodes

# `AttemptResult.problem` -> what is said of it.
_PROBLEMS = {
    "nodes_missing": N_(
        "node(s) {nodes} of {count} did not come within {seconds} s. fix: start the launch on them"
        " as well, with the same flags and their own NODE_RANK; see that they reach {address} ports"
        " {ports}"
    ),
    "nothing_found": N_(
        "no launch of this run answered at {address} ports {ports} within {seconds} s{seen}. fix:"
        " start node 0 with the same flags (MASTER_PORT and NNODES included), and see that its"
        " firewall lets these ports through"
    ),
    "no_ranks": N_("node 0 was found, but gave out no ranks within {seconds} s. fix: see its log"),
    "connection_lost": N_(
        "the connection to node 0 was lost during the rendezvous: {error}. fix: see its log, and"
        " the network"
    ),
    "other_secret": N_(
        "the launch of this run on {host} (port {port}) does not have this node's secret. fix: set"
        " {name} to the same text on all nodes, or on none"
    ),
    "same_rank": N_(
        "NODE_RANK={rank} was given to two machines: {hosts}. fix: give each node its own, from 0"
    ),
    "agent_ended": N_(
        "the process that starts the workers ended by itself ({code}); the log says why"
    ),
    "agent_killed": N_(
        "the process that starts this node's workers was ended by {signal}: by somebody, or by the"
        " system when memory ran out (dmesg says so). The workers were told to stop, and have saved"
        " if they could. fix: start the same command again on all nodes; it resumes from the last"
        " checkpoint"
    ),
    "stopped": N_("stopped before there were workers"),
}


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended on this node."""

    # By global rank, the worker that ended first at the front; negative for a signal.
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    problem: str = ""  # why there were no workers, else empty
    facts: Mapping[str, Any] = field(default_factory=dict)  # the details of the problem
    stop_signal: int = 0  # the signal by which the user asked for it, 0 for none
    # Nodes whose heartbeat is lost, with the seconds since the last one.
    lost_nodes: Mapping[int, int] = field(default_factory=dict)
    # By node, how its workers ended, as far as it could tell.
    others: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """What the launch ends with: the run's own code, 128 + the signal's number for a run that
        had not begun.
        """
        codes = [*self.exit_codes.values(), *(other["exit_code"] for other in self.others.values())]
        # One that was told to end because another failed may say that it stopped, but that is not
        # why.
        stopped = ExitCode.STOPPED in (codes if self.stop_signal else codes[:1])
        for decided in ([ExitCode.STOPPED] if stopped else []) + [
            ExitCode.REFUSED,
            ExitCode.OUT_OF_MEMORY,
        ]:
            if decided in codes:
                return int(decided)
        if self.stop_signal:
            return 128 + self.stop_signal
        return int(
            ExitCode.FAILED
            if self.problem or not codes or any(self.exit_codes.values())
            else ExitCode.DONE
        )

    @property
    def killed(self) -> dict[int, int]:
        """Signals that ended workers, by rank, but for SIGTERM, by which the rest is told to
        end.
        """
        return {
            rank: -code
            for rank, code in self.exit_codes.items()
            if code < 0 and -code != signal.SIGTERM
        }

    def lines(self, nodes: Nodes, ports: Sequence[int], timeout_seconds: int) -> list[str]:
        """What happened on this node and, as far as is known, on the others: a line each."""
        if self.problem:
            return [self._problem_line(nodes, ports, timeout_seconds)]
        lines = []
        failed = {rank: code for rank, code in self.exit_codes.items() if code}
        for number, (rank, code) in enumerate(failed.items()):
            first = _(" (first)") if number == 0 and len(failed) > 1 else ""
            lines.append(_worker_line(rank, code) + first)
        lost = _(
            "node {node}: no heartbeat for {seconds} s: the connection between the nodes is lost,"
            " or that node is down. fix: see that it runs and that the nodes reach each other (ping"
            " {address}), then start the same command again on all of them; it resumes from the"
            " last checkpoint"
        )
        if silent := sorted(self.lost_nodes):
            seconds = max(self.lost_nodes.values())
            lines.append(
                lost.format(node=name_ranks(silent), seconds=seconds, address=nodes.address)
            )
        other = _("on node {node} the workers ended with exit code {code}; its log says why")
        for code in sorted(
            {how["exit_code"] for how in self.others.values()} - {ExitCode.DONE, ExitCode.STOPPED}
        ):
            having = sorted(node for node, how in self.others.items() if how["exit_code"] == code)
            lines.append(other.format(node=name_ranks(having), code=code))
        return lines

    def _problem_line(self, nodes: Nodes, ports: Sequence[int], timeout_seconds: int) -> str:
        facts = dict(self.facts)
        seen = ", ".join(f"{port}: {what}" for port, what in facts.pop("seen", {}).items())
        unsigned = name_ranks(facts.pop("refused", []))
        refused = _(
            ". Claims of node(s) {nodes} were refused: they are not signed with this launch's"
            " {name}"
        )
        values = {
            "name": SECRET_NAME,
            "count": nodes.count,
            "seconds": timeout_seconds,
            "address": nodes.address,
            "ports": f"{ports[0]}-{ports[-1]}",
            "seen": _("; other programs answer there: {what}").format(what=seen) if seen else "",
        }
        joined = {"nodes": name_ranks, "hosts": ", ".join}
        facts = {name: joined[name](v) if name in joined else v for name, v in facts.items()}
        said = _(_PROBLEMS[self.problem]).format(**values | facts)
        return said + (refused.format(nodes=unsigned, name=SECRET_NAME) if unsigned else "")


def _worker_line(rank: int, code: int) -> str:
    if code >= 0:
        return _("rank {rank} ended with exit code {code}").format(rank=rank, code=code)
    return _("rank {rank} was ended by {signal}").format(rank=rank, signal=signal_name(-code))


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number for one without a name."""
    known = number in signal.Signals.__members__.values()
    return signal.Signals(number).name if known else str(number)
