"""HCCL: how NPUs find and hear one another. Codes EI and EJ, the lines of plogs, and its return
codes.
"""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.ascend import SOURCE
from finetune.commands.diagnose.symptoms.base import Kind, Symptom, cann
from finetune.runtime.language import N_

_CONFIG_FIX = N_(
    "Unset HCCL_* variables and RANK_TABLE_FILE that came from copied scripts (`env | grep -E "
    "'HCCL|RANK_TABLE'`), especially HCCL_IF_IP=127.0.0.1 with several nodes; set only HCCL_SOCKET_IFNAME, and "
    "only where a machine has several interfaces, to the same value everywhere. `python -m finetune doctor` "
    "checks them against each other."
)


def hccl_returned(code: str) -> str:
    """A pattern of HCCL's return codes: `HCCL function error: ..., error code is 9`,
    `errNo[0x0000000005010009]`.
    """
    return rf"(?:HCCL function error: |OPS function error: [Hh]ccl).*error code is \(?(?:{code})\)?(?!\d)"


def _tls_differs(*patterns: str) -> Symptom:
    """A symptom of lines that show the switch of one NPU: they tell something where two differ."""
    return Symptom(
        "hccl_config",
        patterns,
        N_(
            "TLS is switched on at some NPUs and off at others (the logs together show both): they refuse each other's "
            "connections."
        ),
        N_(
            "Read it on every node with `hccn_tool -i N -tls -g` for each NPU N, and make it the same everywhere "
            "(`hccn_tool -i N -tls -s enable 0`); then start again."
        ),
        confidence=0.9,
        in_warnings=True,
        differs="switch",
        source=SOURCE,
        explains=("hccl_connect_timeout",),
    )


SYMPTOMS = (
    Symptom(
        "hccl_connect_timeout",
        (
            cann("EI0006"),
            r"(?<!\w)EI0015(?!\w)(?:.*unconnected ranks?: ?\"?\[(?P<missing>[\d, ]+)\]?)?",
            cann("EI0009") + r"|Getting socket times out",
            r"wait socket establish timeout, role\[\d+\] rank\[(?P<peer>\d+)\] timeout\[(?P<seconds>\d+)",
            r"topo exchange (?:server|agent).{0,12} get socket timeout|\[InitChannelStage\]\[Timeout\]",
            r"[Ff]ailed to connect agent\[(?P<missing>[\d,]*\d)",
            r"LINK_ERROR_INFO|Transport init error|TopoDetect ERROR|fails to connect to dstRank",
            r"total connected num is \[|connect server\[[^\]]*\] failed|Alloc transports failed",
            hccl_returned("9|1[1-4]|19"),
            r"Communication_Error_(?!Timeout|P2P|Bind)\w+",
        ),
        N_(
            "HCCL could not connect all NPUs in time[[: ranks {missing} did not connect]][[: rank {peer} did not "
            "answer in {seconds} s]]. Another rank failed or was late, or the links between the NPUs do not work."
        ),
        N_(
            "Look at the other ranks' logs for an error before this one (pass all to one `diagnose`). If there is "
            "none: raise HCCL_CONNECT_TIMEOUT (120 s by default; --timeout-seconds sets it here[[, now "
            "{timeout_seconds}]]), check the links with `hccn_tool -i 0 -link -g`, `-net_health -g`, `-tls -g` (TLS "
            "the same on all), and make sure that HCCL_SOCKET_IFNAME names the interface shared by the nodes."
        ),
        kind=Kind.TIMEOUT,
        confidence=0.88,
        source=SOURCE,
        restart_cures=True,
    ),
    Symptom(
        "hccl_config",
        (
            r"(?<!\w)EI00(?:01|03|04|14|16|17)(?!\w)(?:.*?[Ee]nvironment variable:? ?\[?(?P<variable>\w+))?",
            r"(?:HCCL_IF_IP|HCCL_SOCKET_IFNAME|HCCL_WHITELIST_FILE|HCCL_CONNECT_TIMEOUT|HCCL_EXEC_TIMEOUT|"
            r"HCCL_BUFFSIZE|RANK_TABLE_FILE)\b.{0,40} is invalid|errNo\[0x0*50000001\]",
            r"get host ip .*fail|[Ff]ailed to (?:find|get) (?:the )?host ?nic|(?P<variable>HCCL_IF_IP).*not (?:found"
            r"|match)",
            r"Stage\]\[(?:Ranktable(?:Config|Check)|EnvConfig|InvalidArgument)\]|ranktable check failed",
            r"Env config \\?\"(?P<variable>HCCL_\w+)|Config_Error_(?!Inner)\w+|Invalid_Argument_Collective_\w+",
        ),
        N_(
            "HCCL's settings are wrong or differ between ranks[[: {variable}]]: an environment variable, the rank "
            "table, or the arguments of a collective."
        ),
        _CONFIG_FIX,
        confidence=0.88,
        source=SOURCE,
    ),
    Symptom(
        "hccl_config",
        (
            r"local IP is \[(?P<address>(?:169\.254|127|192\.168\.122|172\.17)\.[\d.]+|fe80:[^\]]*|::1)\] of interface"
            r" ?\[(?P<variable>[^\]]+)\]",
            r"local IP is \[(?P<address>[^\]]+)\] of interface ?\[(?P<variable>(?:docker|virbr|veth|br-|cni|cali"
            r"|flannel|tun|usb)[\w.-]*|lo)\]",
        ),
        N_(
            "HCCL uses an interface with an address that other nodes cannot reach[[ ({variable}: {address})]]: "
            "link-local, or of this machine only."
        ),
        N_(
            "Set HCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) on every node to the interface with the address that the "
            "other nodes know it by (`ip -br addr`), or give that one an address; then start again."
        ),
        confidence=0.92,
        in_warnings=True,
        source=SOURCE,
        explains=("hccl_connect_timeout",),
    ),
    Symptom(
        "hccl_config",
        (r"HCCL_SOCKET_IFNAME[^\w^]{1,3}(?P<variable>(?:docker|virbr|veth|br-)\w*)",),
        N_(
            "HCCL_SOCKET_IFNAME names an interface that ends at this machine[[ ({variable})]]: other nodes cannot "
            "reach it."
        ),
        N_(
            "Set HCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) to the interface with the address that the other nodes "
            "use (`ip -br addr` lists them), on every node, or unset it."
        ),
        confidence=0.9,
        in_warnings=True,
        source=SOURCE,
        needs=("hccl_connect_timeout", "rendezvous_timeout"),
        explains=("hccl_connect_timeout", "rendezvous_timeout"),
    ),
    Symptom(
        "hccl_config",
        (hccl_returned("[126]|10"),),
        N_(
            "HCCL refused what it was called with: a setting, an address or the arguments of a collective."
        ),
        _CONFIG_FIX,
        kind=Kind.VAGUE,
        confidence=0.6,
        source=SOURCE,
    ),
    Symptom(
        "hccl_config",
        (
            cann("EI0005"),
            r"CMD information .{2,30} check fail|\[ParameterConflict\]|inconsistent between ranks",
        ),
        N_(
            "The ranks called different collectives, or with different sizes or types: they did not take the same path "
            "through the program, or see different data, settings or versions."
        ),
        N_(
            "Compare the two values in the evidence (local and remote). Make sure that all ranks run the same script, "
            "versions and settings, that HCCL_BUFFSIZE is equal everywhere, and that no rank leaves a loop earlier "
            "(drop the last batch, pad, or split the data evenly); no collective inside `if rank == 0`."
        ),
        confidence=0.9,
        source=SOURCE,
    ),
    Symptom(
        "hccl_config",
        (
            r"tlsStatus are inconsistent|config \\?\"tls\\?\" is invalid",
            r"The possible cause is that the TLS switch is inconsistent|rankList for (?:en|dis)abled tls",
        ),
        N_(
            "TLS is switched on at some NPUs and off at others: they refuse each other's connections."
        ),
        N_(
            "Read it on every node with `for i in {{0..7}}; do hccn_tool -i $i -tls -g; done | grep switch` and make "
            "it the "
            "same everywhere, for example `hccn_tool -i N -tls -s enable 0` for each NPU N; then start again."
        ),
        confidence=0.95,
        source=SOURCE,
        explains=("hccl_connect_timeout",),
    ),
    _tls_differs(r"\|\s+(?P<switch>ENABLE|DISABLE)\s+\|"),
    _tls_differs(r"TLS SWITCH \((?P<switch>[01])\)", r"tls switch\[(?P<switch>[01])\]"),
    Symptom(
        "hccl_config",
        (
            cann("EJ0004") + r"|in the ranktable is inconsistent with the IP|ra rdev init failed",
            r"device ip family\[.*is not same with others|superDeviceId.{0,40}(?:repeat|duplicat|same)",
            r"device[_ ]?ip.{0,60}(?:conflict|duplicat|repeat|not in the same|different (?:subnet|network))",
            r"ip address \S+ of ranktable in rank \d+ is error|ip \S+ in (?:the )?rank ?table is not (?:equal"
            r"|the same)",
        ),
        N_(
            "The addresses of the NPUs do not fit: the rank table names another address than the device has, or nodes "
            "use different address families or networks."
        ),
        N_(
            "List the addresses with `for i in {{0..7}}; do hccn_tool -i $i -ip -g; done` on every node; correct the "
            "rank "
            "table (or unset RANK_TABLE_FILE: it is not needed here), give every device its own address, and all nodes "
            "the same family, netmask and a route to each other (`hccn_tool -i 0 -ping -g address OTHER_DEVICE_IP`)."
        ),
        confidence=0.92,
        source=SOURCE,
        explains=("hccl_connect_timeout",),
    ),
    Symptom(
        "hccl_port_bind",
        (
            cann("EI0019", "EI0020", "EJ0003") + r"|Communication_Error_Bind_IP_Port",
            r"Failed to enable listening for the (?:host|NPU) network adapter",
            r"listen on ip\[(?P<ip>[^\]]+)\] and specific port\[(?P<hccl_port>\d+)\] fail",
            r"nic listen start failed, port\[(?P<hccl_port>\d+)\]",
            r"Failed to bind the IP port|check the port status and whether the port is being used"
            r"|ports? range are bound already",
        ),
        N_(
            "One of HCCL's own ports[[ ({hccl_port})]][[ on {ip}]] is taken (60000 to 60015 on the host, 16666 on the "
            "device; not MASTER_PORT): another job uses the same machine or the same NPUs."
        ),
        N_(
            "Give each job on the machine its own ports: HCCL_IF_BASE_PORT=61000 (and HCCL_NPU_SOCKET_PORT_RANGE=auto "
            "where two jobs share an NPU, from CANN 8.1), or wait for the other job; keep the range out of "
            "net.ipv4.ip_local_port_range (`sysctl net.ipv4.ip_local_reserved_ports=60000-60015`)."
        ),
        confidence=0.94,
        source=SOURCE,
        explains=("npu_op_exception", "port_in_use", "hccl_config", "hccl_connect_timeout"),
    ),
    Symptom(
        "hccl_config",
        (r"(?P<variable>HCCL_BUFFSIZE) is too (?i:small)(?:.*?= ?(?P<needed>\d+) ?MB)?",),
        N_("HCCL's buffer is too small for this operator[[: it needs {needed} MB]]."),
        N_(
            "export HCCL_BUFFSIZE[[={needed}]] (MB, a multiple of 2 that is no less) with the same value on all nodes; "
            "it takes that much of each NPU's memory per communicator. Fewer tokens or experts at a time need less."
        ),
        confidence=0.93,
        source=SOURCE,
        explains=("npu_op_exception",),
    ),
)
