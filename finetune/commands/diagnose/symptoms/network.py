"""Processes that have to find and hear one another: ports, rendezvous, collectives, peers that die."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import Text

_TIMEOUT_FIX: Text = {
    "en": "Look for the first error on any rank: give the logs of all ranks and nodes to one `diagnose`. If none has "
    "one, a rank was only slow (data, evaluation, saving) or ranks did not make the same calls: raise "
    "--timeout-seconds[[ (now {timeout_seconds})]], prepare data before training, and see that all nodes have the "
    "same files and settings.",
    "zh": "找出任意 rank 上最早的错误:把所有 rank、所有节点的日志交给同一次 `diagnose`。若都没有错误,则是某个 rank "
    "太慢(数据、评估、保存)或各 rank 的调用不一致:增大 --timeout-seconds[[(当前 {timeout_seconds})]],"
    "训练前先准备好数据,并确认各节点文件与设置一致。",
}
_PEER_FIX: Text = {
    "en": "The reason is in the log of the process that died, or nowhere if it was killed: look there, and at `dmesg "
    "-T | grep -i -E 'oom|killed|xid'` on its machine. If it was an accident, start the same command again: the run "
    "goes on from its last checkpoint.",
    "zh": "原因在死亡进程自己的日志里;若是被杀死则没有日志:请查看该日志,以及那台机器上的 `dmesg -T | grep -i -E "
    "'oom|killed|xid'`。若属偶发,再次执行同一命令即可从最近的检查点继续。",
}

SYMPTOMS = (
    Symptom(
        "port_in_use",
        (
            r"(?:port: (?P<port>\d+).*)?EADDRINUSE",
            r"\[Errno 98\]",
            r"(?:\]:(?P<port>\d+) .?)?errno: 98\b",
            r"[Aa]ddress already in use",
            r"(?:on port `(?P<port>\d+)`, but )?another process is utilizing (?:it|at least one)",
        ),
        {
            "en": "The port[[ {port}]] for the meeting of the processes is taken on this machine, often by an earlier "
            "run that has not ended.",
            "zh": "进程会合所用的端口[[ {port}]]已被占用,常常是上一次没有结束的运行。",
        },
        {
            "en": "Take another port: MASTER_PORT[[={next_port}]] or `torchrun --master_port[[ {next_port}]]`, or "
            "leave it to `python -m finetune launch`, which finds a free one. Who holds it: `ss -ltnp[[ 'sport = :"
            "{port}']]`.",
            "zh": "换一个端口:MASTER_PORT[[={next_port}]] 或 `torchrun --master_port[[ {next_port}]]`;或交给 `python "
            "-m finetune launch` 自动寻找空闲端口。查看占用者:`ss -ltnp[[ 'sport = :{port}']]`。",
        },
        confidence=0.95,
        source="torch c10d, accelerate, Python",
        explains=("libuv_store", "rendezvous_timeout"),
    ),
    Symptom(
        "rendezvous_timeout",
        (
            r"The client socket has timed out after .{1,20} while trying to connect to \((?P<master_addr>[^,]+), "
            r"(?P<master_port>\d+)\)",
            r"The client socket has failed to connect to any network address of \((?P<master_addr>[^,]+), "
            r"(?P<master_port>\d+)\)",
            r"failed to connect/validate to host (?P<master_addr>[\w.:-]+):(?P<master_port>\d+) - timed out",
            r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<joined>\d+)/(?P<world_size>\d+) "
            r"clients joined",
            r"\bRendezvousTimeoutError\b|\bRendezvousConnectionError\b",
            r"Timed out initializing process group in store based barrier on rank:? (?P<rank>\d+)",
            r"wait timeout after \d+ms, keys: /(?:default_pg|worker|none|torchelastic)",
            r"Gloo connectFullMesh failed",
            r"The connection to the C10d store has failed",
            r"The (?:IPv[46] )?network addresses of \((?P<master_addr>[^,]+), (?P<master_port>\d+)\) cannot be "
            r"retrieved.*DistNetworkError|DistNetworkError: .*cannot be retrieved",
        ),
        {
            "en": "Not all processes met[[ at {master_addr}]][[, port {master_port}]][[: {joined} of {world_size} "
            "came]]. A node was not started, started too late or with other settings, or the address cannot be "
            "reached from here.",
            "zh": "各进程未能全部会合[[({master_addr})]][[(端口 {master_port})]][[:{world_size} 个中只到了 {joined} "
            "个]]。某个节点没有启动、启动太晚或设置不同,或从本机无法访问该地址。",
        },
        {
            "en": "Start all nodes within the timeout[[ ({timeout_seconds} s)]] with the same MASTER_ADDR[[ "
            "({master_addr})]], MASTER_PORT[[ ({master_port})]] and number of nodes, and NODE_RANK 0, 1, ... once "
            "each. From every other node try `nc -vz[[ {master_addr}]][[ {master_port}]]`: firewall, wrong interface "
            "and a name that resolves to 127.0.0.1 show there.",
            "zh": "在超时[[({timeout_seconds} 秒)]]内启动所有节点:MASTER_ADDR[[({master_addr})]]、"
            "MASTER_PORT[[({master_port})]]、节点数相同,NODE_RANK 分别为 0、1……各一次。在其他节点执行 `nc -vz[[ "
            "{master_addr}]][[ {master_port}]]`:防火墙、网卡错误、主机名解析到 127.0.0.1 都会在此暴露。",
        },
        kind=Kind.WAITED,
        confidence=0.85,
        source="torch c10d and elastic",
    ),
    Symptom(
        "collective_timeout",
        (
            r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+), "
            r"OpType=(?P<operation>\w+)(?:.*?Timeout\(ms\)=(?P<timeout_ms>\d+))?",
            r"Timed out waiting (?P<timeout_ms>\d+)ms for (?:send|recv) operation to complete",
            r"Application timeout caused pair closure",
            r"[Rr]anks? (?P<missing>[\d, ]+) failed to pass monitoredBarrier",
            r"retr(?:ie|ei)ving ncclUniqueId from .*Socket Timeout",
            r"Some NCCL operations have failed or timed out",
            r"\(?EI0002\)?:",
            r"The wait execution of the Notify register times out",
            r"hccl fftsplus task timeout occurred",
            r"error code(?: is|:) ?5070(?:46|48)\b",
            r"HCCL[Ww]atchdog.*timeout|Watchdog caught collective operation timeout: WorkHCCL",
            r"watchdog thread terminated with exception.*(?:timeout|timed out)",
        ),
        {
            "en": "A collective operation[[ ({operation})]] waited in vain[[ for {timeout_ms} ms]][[ on rank "
            "{rank}]][[: ranks {missing} did not come]]. That is what the other ranks see when one has died, hangs "
            "or is slow.",
            "zh": "集合通信操作[[({operation})]]等待超时[[,{timeout_ms} 毫秒]][[(rank {rank})]][[:rank {missing} "
            "没有到达]]。当某个 rank 已死亡、卡住或太慢时,其他 rank 看到的就是这个。",
        },
        _TIMEOUT_FIX,
        kind=Kind.WAITED,
        confidence=0.85,
        in_warnings=True,
        source="torch ProcessGroupNCCL, gloo; HCCL (EI0002, 507046, 507048)",
    ),
    Symptom(
        "peer_died",
        (
            r"exitcode +: -9 \(pid: (?P<pid>\d+)\)",
            r"Signal 9 \(SIGKILL\) received by PID (?P<pid>\d+)",
            r"failed \(exitcode: -9\) local_rank: (?P<local_rank>\d+) \(pid: (?P<pid>\d+)\)",
            r"exits with return code = -9",
            r"died with <Signals\.SIGKILL: 9>",
            r"terminated with signal SIGKILL",
            r"the run's process (?P<pid>\S+) is gone without a word",
        ),
        {
            "en": "A process[[ ({pid})]][[ of rank {rank}]] was killed from outside (SIGKILL): nearly always the "
            "kernel or a container that ran out of host memory, else a scheduler or a person. It could not say so "
            "itself.",
            "zh": "进程[[({pid})]][[(rank {rank})]]被外部杀死(SIGKILL):几乎总是内核或容器因主机内存不足所为,"
            "否则是调度器或人为操作。它自己无法留下信息。",
        },
        _PEER_FIX,
        kind=Kind.PEER_LOST,
        confidence=0.8,
        source="torch elastic, DeepSpeed launcher, this package",
    ),
    Symptom(
        "peer_died",
        (
            r"Connection closed by (?:remote )?peer(?: \[?(?P<peer>[\w.:]+)\]?(?::\d+)?)?",
            r"Connection reset by (?:remote )?peer",
            r"\bncclRemoteError\b",
            r"remote process exited or there was a network error",
            r"Heartbeat Lost Occurred",
            r"abnormal device\(s\)",
            r"HCCL heartbeat (?:lost|event)",
            r"NCCL WARN .*remote process exit",
        ),
        {
            "en": "The connection to another process broke[[ ({peer})]]: that process died or its machine or link "
            "went down.[[ Rank {rank} only noticed.]]",
            "zh": "与另一进程[[({peer})]]的连接断开:该进程已死亡,或其机器、链路故障。[[rank {rank} 只是发现者。]]",
        },
        _PEER_FIX,
        kind=Kind.PEER_LOST,
        confidence=0.75,
        source="gloo, NCCL, HCCL (EI0002 with heartbeat)",
    ),
    Symptom(
        "peer_died",
        (
            r"sendBytes failed on SocketImpl",
            r"maybe TCPStore server has shut down too early",
            r"recvValue failed on SocketImpl",
        ),
        {
            "en": "The store that the processes share went away: the process that held it (rank 0 or the launcher) "
            "ended.",
            "zh": "各进程共享的 store 消失了:持有它的进程(rank 0 或启动器)已结束。",
        },
        _PEER_FIX,
        kind=Kind.AFTERMATH,
        confidence=0.5,
        source="torch TCPStore",
    ),
    Symptom(
        "preempted",
        (
            r"CANCELLED AT .* DUE TO (?P<reason>PREEMPTION|TIME LIMIT|NODE FAILURE)",
            r"DUE TO (?P<reason>TIME LIMIT|PREEMPTION|NODE_FAILURE)",
            r"Process \d+ got signal: (?P<signal>15|10|12)\b",
            r"The node was low on resource|[Pp]od was evicted|spot instance interruption",
        ),
        {
            "en": "The run was stopped from outside[[ ({reason})]][[ (signal {signal})]]: preempted, out of time, or "
            "ended by a person.",
            "zh": "运行被外部停止[[({reason})]][[(信号 {signal})]]:被抢占、超过时限或被人终止。",
        },
        {
            "en": "Start the same command again: it goes on from the last checkpoint. For jobs with a time limit let "
            "the scheduler send SIGTERM some minutes before (Slurm: --signal=B:TERM@300), so that a checkpoint is "
            "saved.",
            "zh": "再次执行同一命令即可从最近检查点继续。有时限的作业请让调度器提前几分钟发 SIGTERM(Slurm:--signal=B:"
            "TERM@300),以便保存检查点。",
        },
        confidence=0.85,
        source="Slurm, torch elastic, Kubernetes",
    ),
    Symptom(
        "preempted",
        (r"stopped by (?P<signal>SIG\w+|a signal) at step (?P<step>\d+)",),
        {
            "en": "The run was stopped by {signal} at step {step} and saved a checkpoint.",
            "zh": "运行在第 {step} 步被 {signal} 停止,并已保存检查点。",
        },
        {
            "en": "Start the same command again: it goes on from step {step}.",
            "zh": "再次执行同一命令即可从第 {step} 步继续。",
        },
        kind=Kind.AFTERMATH,
        confidence=0.9,
        in_warnings=True,
        source="this package",
    ),
    Symptom(
        "libuv_store",
        (
            r"use_libuv was requested but PyTorch was buil[td] without libuv support",
            r"buil[td] without libuv",
            r"libuv backend.*(?:not|un)\w* ?(?:supported|available)",
            r"UV_\w+.*TCPStore|TCPStore.*\bUV_E\w+",
            r"TCPStoreLibUv\w*\b.*(?:Error|failed)",
        ),
        {
            "en": "The meeting point of the processes (TCPStore) asked for libuv, which this build of torch lacks.",
            "zh": "进程会合所用的 TCPStore 请求 libuv,而此 torch 构建不含 libuv。",
        },
        {
            "en": "Set USE_LIBUV=0 and, where torchrun still asks for it, TORCHELASTIC_USE_AGENT_STORE=0, before the "
            "launcher starts; `python -m finetune launch` sets both where they help.",
            "zh": "在启动器启动前设置 USE_LIBUV=0;若 torchrun 仍请求 libuv,再设置 TORCHELASTIC_USE_AGENT_STORE=0;"
            "`python -m finetune launch` 会在需要时自动设置。",
        },
        confidence=0.95,
        source="torch TCPStore",
    ),
)
