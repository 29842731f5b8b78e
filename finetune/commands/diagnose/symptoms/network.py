"""Processes that have to find and hear one another: ports, rendezvous, collectives, peers that
die.
"""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

TIMEOUT_FIX = N_(
    "Look for the first error on any rank: pass the logs of all ranks and nodes to one `diagnose`. If there is none, a "
    "rank was merely slow (data, evaluation, saving) or the ranks made different calls: raise --timeout-seconds[[ (now "
    "{timeout_seconds})]], prepare data before training, and make sure that all nodes have the same files and "
    "settings. Where the ranks name different operations or sizes, one took another path: no collective inside `if`, "
    "and equally many batches on every rank."
)

_NAME = N_(
    "The name of the machine that the processes meet at[[ ({master_addr})]] has no address here: it is "
    "misspelt, or the name service does not know it (yet)."
)
_NAME_FIX = N_(
    "`getent hosts[[ {master_addr}]]` on every node must show the same address. Correct MASTER_ADDR or give "
    "the address itself; in Kubernetes check the headless service and that the pod of rank 0 runs; otherwise "
    "add the name to DNS or /etc/hosts."
)

# Requests to the hub that were tried again: where a process ended and nothing tells why, they are
# the best guess.
RETRIED = Symptom(
    "hub_offline",
    (
        r"thrown while requesting (?:HEAD|GET) (?P<hub>https?://[^\s/]+)",
        r"Retrying \(Retry\(total=0\b.*host='(?P<hub>[^']+)'",
    ),
    N_(
        "Requests to the model hub[[ ({hub})]] failed and were tried again, and nothing else tells why the run ended."
    ),
    N_(
        "See whether the hub answers from this machine (`curl -I https://huggingface.co`), or download the model and "
        "the data where there is a network and give their folders (--model DIR, HF_HUB_OFFLINE=1)."
    ),
    kind=Kind.CASCADE,
    confidence=0.4,
    in_warnings=True,
    needs=("unknown",),
    source="huggingface_hub, urllib3",
)

# What a time-out of a collective is where the log shows that data were still being made ready.
WAITED_FOR_DATA = Symptom(
    "collective_timeout",
    (),
    N_(
        "The ranks that waited gave up[[ after {timeout_ms} ms]] while the data were still being prepared[[ on rank "
        "{preparing_rank}]][[ ({progress})]]."
    ),
    N_(
        "Prepare the data before training, in a process of its own, so that all ranks only read the result "
        "(`python -m finetune prepare`, or a first run on one process with the same cache), or with more processes "
        "(num_proc). Or let the ranks wait longer: --timeout-seconds here[[ (now {timeout_seconds})]], ddp_timeout in "
        "transformers, timeout= in init_process_group."
    ),
    kind=Kind.TIMEOUT,
    confidence=0.87,
    source="torch ProcessGroupNCCL, datasets",
    restart_cures=True,
)

# And where ranks said that they have unequal numbers of batches.
UNEQUAL_BATCHES = Symptom(
    "collective_timeout",
    (),
    N_(
        "The ranks have unequal numbers of batches ({batches}): the one with the fewest went on to the end of its "
        "epoch, the others waited for it in the next step[[ for {timeout_ms} ms]] and gave up."
    ),
    N_(
        "Let all ranks make the same number of steps: DistributedSampler (with drop_last=True), data split evenly "
        "(split_dataset_by_node needs as many examples on each rank), max_steps, or model.join() around the loop "
        "(torch.distributed.algorithms.join)."
    ),
    kind=Kind.TIMEOUT,
    confidence=0.88,
    source="torch ProcessGroupNCCL",
)

SYMPTOMS = (
    RETRIED,
    Symptom(
        "port_in_use",
        (
            r"(?:port: (?P<port>\d+).*)?EADDRINUSE",
            r"\[Errno 98\]",
            r"(?:\]:(?P<port>\d+) .?)?errno: 98\b",
            r"[Aa]ddress already in use",
            r"[Pp]ort (?P<port>\d+) is already (?:in use|used|taken|occupied)(?!.*\b(?:trying|using|instead))",
            r"(?:on port `(?P<port>\d+)`, but )?another process is utilizing (?:it|at least one)",
        ),
        N_(
            "The rendezvous port[[ {port}]] is taken on this machine, often by an earlier run that has not ended."
        ),
        N_(
            "Use another port: MASTER_PORT[[={next_port}]] or `torchrun --master_port[[ {next_port}]]`, or leave it to "
            "`python -m finetune launch`, which finds a free one. To see who holds it: `ss -ltnp[[ 'sport = "
            ":{port}']]`."
        ),
        confidence=0.95,
        source="torch c10d, accelerate, Python",
        explains=("libuv_store", "rendezvous_timeout"),
        restart_cures=True,
    ),
    Symptom(
        "rendezvous_timeout",
        (
            # Of a name with an address of IPv4 only, IPv6 has other codes.
            r"The IPv4 network addresses of \((?P<master_addr>[^\s,()]+), (?P<master_port>\d+)\) cannot be retrieved",
            r"The IPv6 network addresses of \((?P<master_addr>[^\s,()]+), (?P<master_port>\d+)\) cannot be retrieved "
            r"\(gai ?error: -[23]\b",
        ),
        _NAME,
        _NAME_FIX,
        kind=Kind.TIMEOUT,
        confidence=0.92,
        in_warnings=True,
        needs=("rendezvous_timeout",),
        source="torch c10d",
        restart_cures=True,
    ),
    Symptom(
        "rendezvous_timeout",
        (
            r"connect to \[?(?P<master_addr>[\w.:-]+?)\]?(?::|, )(?P<master_port>\d+)\)? .{0,40}"
            r"(?:No route to host|Network is unreachable)",
            r"errno: (?:113|101)\b|packets transmitted, 0 (?:packets )?received",
        ),
        N_(
            "The rendezvous host cannot be reached[[ ({master_addr}, port {master_port})]]: no route "
            "to it, or a firewall refuses (No route to host)."
        ),
        N_(
            "From this node `ping[[ {master_addr}]]` and `nc -vz[[ {master_addr}]][[ {master_port}]]`: correct "
            "MASTER_ADDR to an address of node 0 in a network that all nodes share (`hostname -I` there), and open the "
            "port in the firewall (iptables, firewalld, security groups, network policies) between them."
        ),
        kind=Kind.TIMEOUT,
        confidence=0.86,
        in_warnings=True,
        needs=("rendezvous_timeout",),
        source="torch c10d",
        restart_cures=True,
    ),
    Symptom(
        "rendezvous_timeout",
        (
            r"(?:Error|Exception): .*\((?P<master_addr>[^\s,()]+), (?P<master_port>\d+)\) cannot be retrieved",
            r"(?:Error|Exception): .*gai ?error: -\d+",
        ),
        _NAME,
        _NAME_FIX,
        kind=Kind.TIMEOUT,
        confidence=0.93,
        source="torch c10d",
        restart_cures=True,
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
            r"clients joined|\bRendezvousTimeoutError\b|\bRendezvousConnectionError\b",
            r"Timed out initializing process group in store based barrier on rank:? (?P<rank>\d+)",
            r"wait timeout after \d+ms, keys: /(?:default_pg(?!/\d+//(?:cpu|cuda|npu)\b)|worker|none|torchelastic)",
            r"pair\.cc:\d+\] timed out connecting|connectFullMesh failed"
            r"|The connection to the C10d store has failed|RendezvousClosedError",
            r"rendezvous .{0,60}(?:timed out|failed|closed)|[Rr]endezvous\w*Error\b|DistStoreError"
            r"|DistNetworkError: .*(?:time|connect)",
            r"(?:connect|connection) to \(?\[?(?P<master_addr>[\w.:-]+?)\]?(?:, "
            r"|:)(?P<master_port>\d+)\)? (?:timed out|failed|refused)",
        ),
        N_(
            "Not all processes joined the rendezvous[[ at {master_addr}]][[, port {master_port}]][[: {joined} of "
            "{world_size} did]]. A node was not started, was started too late or with different settings, or the "
            "address cannot be reached from here."
        ),
        N_(
            "Start all nodes within the timeout[[ ({timeout_seconds} s)]] with the same MASTER_ADDR[[ "
            "({master_addr})]], MASTER_PORT[[ ({master_port})]] and number of nodes, and NODE_RANK 0, 1, ... once "
            "each. From every other node run `nc -vz[[ {master_addr}]][[ {master_port}]]`: it reveals a firewall, a "
            "wrong interface, or a name that resolves to 127.0.0.1."
        ),
        kind=Kind.TIMEOUT,
        confidence=0.85,
        source="torch c10d and elastic",
        restart_cures=True,
    ),
    Symptom(
        "rendezvous_timeout",
        (
            r"(?:timed out|failed to connect).{0,90}\((?P<master_addr>localhost|127\.0\.0\.1), (?P<master_port>\d+)\)",
        ),
        N_(
            "Nobody listens at[[ {master_addr}]][[, port {master_port}]]: with several nodes the address must be that "
            "of node 0, and this name means each node itself."
        ),
        N_(
            "Set MASTER_ADDR on every node to node 0's own address (`hostname -I` there), not to localhost. On one "
            "machine only: rank 0 did not start or ended: look at its log."
        ),
        confidence=0.9,
        source="torch c10d",
        kind=Kind.TIMEOUT,
        restart_cures=True,
    ),
    Symptom(
        "collective_timeout",
        (
            r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+), "
            r"OpType=(?P<operation>\w+)(?:.*?Timeout\(ms\)=(?P<timeout_ms>\d+))?",
            r"Timed out waiting (?P<timeout_ms>\d+)ms for (?:send|recv) operation to complete",
            r"Application timeout caused pair closure",
            r"[Rr]anks? (?P<missing>[\d, ]+) (?:failed to pass|did not reach|timed out in) monitoredBarrier",
            r"monitoredBarrier\b",
            r"retr(?:ie|ei)ving ncclUniqueId from .*Socket Timeout",
            r"Watchdog caught collective operation timeout",
            r"watchdog thread terminated with exception.*(?:timeout|timed out)|Timeout at (?:NCCL|collective)",
            r"Heartbeat monitor timed out|[Bb]arrier .{0,40}timed out|timed out after waiting for \d+ms"
            r"|waitWork.*timed? ?out|watchdog got stuck for \d+ seconds",
            r"Terminating the process after attempting to dump debug info, due to (?:ProcessGroup\w+ watchdog hang"
            r"|collective)",
            r"wait timeout after \d+ms, keys: /(?:\w*//)*(?:cpu|cuda|\w*subgroup|worker/rank)"
            r"|keys: /\S*//(?:cpu|cuda|npu)//|[Rr]anks? \S+ (?:not|never|did not) (?:reached?|join|arrive)",
        ),
        N_(
            "A collective operation[[ ({operation})]] timed out[[ after {timeout_ms} ms]][[ on rank {rank}]][[: ranks "
            "{missing} did not arrive]]. [[The ranks wait in different operations ({calls}): one took another path "
            "through the program. ]]This is what the other ranks see when one has died, hangs or is slow."
        ),
        TIMEOUT_FIX,
        kind=Kind.TIMEOUT,
        confidence=0.85,
        in_warnings=True,
        source="torch ProcessGroupNCCL, gloo",
        restart_cures=True,
    ),
    Symptom(
        "collective_timeout",
        (
            r"Some (?:NCCL|HCCL|XCCL) operations have failed or timed out|(?:NCCL"
            r"|HCCL) communicator was aborted on rank",
            r"Received a dump signal|preparing to dump debug info",
        ),
        N_(
            "Collective operations failed or timed out[[ on rank {rank}]]: which of both, other lines tell."
        ),
        TIMEOUT_FIX,
        kind=Kind.CASCADE,
        confidence=0.5,
        source="torch ProcessGroupNCCL",
        restart_cures=True,
    ),
    Symptom(
        "libuv_store",
        (
            r"use_libuv was requested but PyTorch was buil[td] without libuv support",
            r"buil[td] without libuv|libuv backend.*(?:not|un)\w* ?(?:supported|available)",
            r"UV_\w+.*TCPStore|TCPStore.*\bUV_E\w+|TCPStoreLibUv\w*\b.*(?:Error|failed)",
        ),
        N_("The rendezvous store (TCPStore) requested libuv, which this build of torch lacks."),
        N_(
            "Set USE_LIBUV=0 before the launcher starts; `python -m finetune launch` does so where torch was built "
            "without libuv."
        ),
        confidence=0.95,
        source="torch TCPStore",
    ),
)
