"""What the launch says, in both languages."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from finetune.runtime.language import Language, Text
from finetune.runtime.ports import candidates

if TYPE_CHECKING:
    from finetune.commands.launch.restart_policy import Ended
    from finetune.commands.launch.supervise import Launch

STARTED: Text = {
    "en": "{time}: node {rank} of {nodes}, {processes} process(es) on it, log in {log}",
    "zh": "{time}：第 {rank} 个节点（共 {nodes} 个），本机 {processes} 个进程，日志在 {log}",
}
VARIABLE: Text = {"en": "environment: {name}={value}: {why}", "zh": "环境变量：{name}={value}：{why}"}
PORT_TAKEN: Text = {
    "en": "port {taken} is taken; {number} is used instead{others}",
    "zh": "端口 {taken} 已被占用，改用 {number}{others}",
}
OTHERS_FIND_IT: Text = {"en": " (the other nodes find it by themselves)", "zh": "（其他节点会自动找到它）"}
STALE: Text = {
    "en": "{names} set by another launcher or an old script: ignored. fix: unset {bare}",
    "zh": "{names} 是其他启动器或旧脚本留下的，已忽略。解决：unset {bare}",
}
NOT_HERE: Text = {
    "en": "MASTER_ADDR {address} is not an address of this machine, and this is node 0. Unless it leads here by "
    "another way, the other nodes will not find this one. fix: set it to an address that `ip address` shows here",
    "zh": "MASTER_ADDR {address} 不是本机地址，而本机是 0 号节点；除非它另有途径通到本机，其他节点将找不到本机。"
    "解决：设为本机 `ip address` 显示的地址",
}
COMPILE: Text = {
    "en": "TORCH_COMPILE={value} is taken as --compile {flag}",
    "zh": "TORCH_COMPILE={value} 视为 --compile {flag}",
}
WAITING: Text = {
    "en": "waiting for {others} other node(s), up to {seconds} s",
    "zh": "等待另外 {others} 个节点，最多 {seconds} 秒",
}
MET: Text = {
    "en": "all nodes are here: {hosts}; they meet at port {port}",
    "zh": "所有节点已就绪：{hosts}；会合端口 {port}",
}
STOPPING: Text = {
    "en": "{signal}: the run saves a checkpoint and stops; the same again, 3 s later or more, leaves at once",
    "zh": "{signal}：保存检查点后停止；3 秒后再来一次则立即退出",
}
LEAVING: Text = {"en": "a second signal: leaving at once", "zh": "第二个信号：立即退出"}
RESTART: Text = {"en": "restart {number} of {allowed}: {why}", "zh": "第 {number} 次重启（最多 {allowed} 次）：{why}"}
OTHER_GAVE_UP: Text = {
    "en": "no restart: node {node} does not want one; its log says why",
    "zh": "不再重启：节点 {node} 判断重启无用，原因见它的日志",
}
GAVE_UP: Text = {
    "en": "the run failed (exit code {code}) and is not started again: {why}. All that was said is in {log}",
    "zh": "运行失败（退出码 {code}），不再重启：{why}。全部输出见 {log}",
}
FOLDED: Text = {
    "en": "{lines} lines of tracebacks and of the machinery are left out here; they are in {log}",
    "zh": "此处略去 {lines} 行调用栈和底层输出，见 {log}",
}
DIAGNOSIS: Text = {"en": "diagnosis, the most likely cause first:", "zh": "诊断（最可能的原因在前）："}

_RANK_CODE: Text = {"en": "rank {rank} ended with exit code {code}", "zh": "rank {rank} 以退出码 {code} 结束"}
_RANK_SIGNAL: Text = {"en": "rank {rank} was ended by {signal}", "zh": "rank {rank} 被 {signal} 终止"}
_FIRST: Text = {"en": " (first)", "zh": "（最先）"}
_SILENT: Text = {
    "en": "node {node} has not been heard of for {seconds} s: the connection between the nodes is lost, or that node "
    "is down. fix: see that it runs and that the nodes reach each other (ping {address}), then start the same command "
    "again on all of them; it goes on from the last checkpoint",
    "zh": "节点 {node} 已失联 {seconds} 秒：节点间网络中断，或该节点已停机。解决：确认该节点在运行，且各节点互通"
    "（ping {address}）；然后在所有节点上重新执行同一命令，将从最近的检查点继续",
}
_OTHER: Text = {
    "en": "on node {node} the workers ended with exit code {code}; its log says why",
    "zh": "节点 {node} 上的进程以退出码 {code} 结束，原因见它的日志",
}
_PROBLEMS: dict[str, Text] = {
    "nodes_missing": {
        "en": "node(s) {nodes} of {count} did not come within {seconds} s. fix: start the launch on them as well, with "
        "the same flags and their own NODE_RANK; see that they reach {address} ports {ports}",
        "zh": "节点 {nodes}（共 {count} 个）在 {seconds} 秒内没有到达。解决：在这些节点上用相同参数和各自的 "
        "NODE_RANK 启动，并确认它们能访问 {address} 的端口 {ports}",
    },
    "nothing_found": {
        "en": "no launch of this run answered at {address} ports {ports} within {seconds} s{seen}. fix: start node 0 "
        "with the same flags (MASTER_PORT and NNODES included), and see that its firewall lets these ports through",
        "zh": "{seconds} 秒内 {address} 的端口 {ports} 上没有本次运行的应答{seen}。解决：用相同参数（包括 MASTER_PORT "
        "和 NNODES）启动 0 号节点，并确认防火墙放行这些端口",
    },
    "not_complete": {
        "en": "node 0 was found, but gave out no ranks within {seconds} s. fix: see its log",
        "zh": "已找到 0 号节点，但 {seconds} 秒内没有分配 rank。解决：查看它的日志",
    },
    "lost_while_meeting": {
        "en": "the connection to node 0 was lost while the nodes met: {error}. fix: see its log, and the network",
        "zh": "会合时与 0 号节点的连接中断：{error}。解决：查看它的日志和网络",
    },
    "same_rank": {
        "en": "NODE_RANK={rank} was given to two machines: {hosts}. fix: give each node its own, from 0",
        "zh": "两台机器使用了同一个 NODE_RANK={rank}：{hosts}。解决：从 0 起给每个节点不同的编号",
    },
    "agent_ended": {
        "en": "the process that starts the workers ended by itself ({code}); the log says why",
        "zh": "启动工作进程的进程自行结束（{code}），原因见日志",
    },
    "stopped": {"en": "stopped before there were workers", "zh": "在启动工作进程之前停止"},
}
_SEEN: Text = {"en": "; other programs answer there: {what}", "zh": "；那里有其他程序应答：{what}"}


def how_it_ended(ended: Ended, launch: Launch, language: Language) -> list[str]:
    """What happened on this node and, as far as is known, on the others: a line each."""
    if ended.problem:
        return [_problem(ended, launch, language)]
    lines = []
    failed = {rank: code for rank, code in ended.exit_codes.items() if code}
    for number, (rank, code) in enumerate(failed.items()):
        text = _RANK_CODE if code >= 0 else _RANK_SIGNAL
        name = signal.Signals(-code).name if -code in signal.Signals.__members__.values() else str(-code)
        first = _FIRST[language] if number == 0 and len(failed) > 1 else ""
        lines.append(text[language].format(rank=rank, code=code, signal=name) + first)
    for node, seconds in ended.silent.items():
        lines.append(_SILENT[language].format(node=node, seconds=seconds, address=launch.nodes.address))
    for node, how in ended.others.items():
        if how["exit_code"] not in (0, 3):
            lines.append(_OTHER[language].format(node=node, code=how["exit_code"]))
    return lines


def _problem(ended: Ended, launch: Launch, language: Language) -> str:
    nodes = launch.nodes
    ports = candidates(nodes.port) if nodes.port is not None else (launch.held.number,)
    values: dict[str, Any] = {
        "count": nodes.count,
        "seconds": launch.timeout_seconds,
        "address": nodes.address,
        "ports": f"{ports[0]}-{ports[-1]}",
    }
    facts = dict(ended.facts)
    seen = ", ".join(f"{port}: {what}" for port, what in facts.pop("seen", {}).items())
    values["seen"] = _SEEN[language].format(what=seen) if seen else ""
    values |= {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in facts.items()}
    return _PROBLEMS[ended.problem][language].format(**values)
