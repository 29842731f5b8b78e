"""Ascend NPUs: CANN, HCCL and torch_npu. Codes and their meaning: CANN's documentation and public threads."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

_SOURCE = "CANN/HCCL/torch_npu: documented codes, public threads"
_PAIR_FIX = N_(
    "`python -m finetune doctor` shows which versions are installed here and which belong together. Compare `npu-smi "
    "info` (driver), $ASCEND_HOME_PATH (CANN) and `pip show torch torch_npu`; upgrade the driver first, then CANN with "
    "the kernels package of your chip, then torch_npu; source CANN's set_env.sh in the shell that starts the run."
)

SYMPTOMS = (
    Symptom(
        "hccl_connect_timeout",
        (
            r"\(?EI0006\)?:",
            r"\(?EI0015\)?:(?:.*unconnected ranks?: ?\"?\[(?P<missing>[\d, ]+)\]?)?",
            r"\(?EI0009\)?:.*Transport init|Getting socket times out",
            r"wait socket establish timeout, role\[\d+\] rank\[(?P<peer>\d+)\] timeout\[(?P<seconds>\d+)\]",
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
        source=_SOURCE,
        restart_cures=True,
    ),
    Symptom(
        "hccl_config",
        (
            r"\(?EI00(?:01|03|04|05|14|16)\)?:(?:.*?[Ee]nvironment variable:? ?\[?(?P<variable>\w+))?",
            r"(?:HCCL_IF_IP|HCCL_SOCKET_IFNAME|HCCL_WHITELIST_FILE|HCCL_CONNECT_TIMEOUT|HCCL_EXEC_TIMEOUT|"
            r"HCCL_BUFFSIZE|RANK_TABLE_FILE)\b.{0,40} is invalid|errNo\[0x0*50000001\]",
            r"get host ip .*fail|[Ff]ailed to (?:find|get) (?:the )?host ?nic|HCCL_IF_IP.*not (?:found|match)",
        ),
        N_(
            "HCCL's settings are wrong or differ between ranks[[: {variable}]]: an environment variable, the rank "
            "table, or the arguments of a collective."
        ),
        N_(
            "Unset HCCL_* variables and RANK_TABLE_FILE that came from copied scripts (`env | grep -E "
            "'HCCL|RANK_TABLE'`), especially HCCL_IF_IP=127.0.0.1 with several nodes; set only HCCL_SOCKET_IFNAME, and "
            "only where a machine has several interfaces, to the same value everywhere. `python -m finetune doctor` "
            "checks them against each other."
        ),
        confidence=0.88,
        source=_SOURCE,
    ),
    Symptom(
        "hccl_port_bind",
        (
            r"\(?EI00(?:19|20)\)?:|\(?EJ0003\)?:",
            r"listen on ip\[(?P<ip>[^\]]+)\] and specific port\[(?P<hccl_port>\d+)\] fail",
            r"nic listen start failed, port\[(?P<hccl_port>\d+)\]",
            r"Failed to bind the IP port",
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
        source=_SOURCE,
        explains=("npu_op_exception", "port_in_use"),
    ),
    Symptom(
        "hccl_link_down",
        (r"\(?EJ0002\)?:", r"The network port is down", r"\(?EI0013\)?:", r"HCCS LINK ERROR"),
        N_("A network port or link of an NPU is down[[ (rank {rank})]]."),
        N_(
            "Check `hccn_tool -i N -link -g`, `-ip -g` and `-optical -g` for every NPU N, and the switch; take the "
            "machine out of service until all report UP."
        ),
        confidence=0.85,
        source=_SOURCE,
    ),
    Symptom(
        "npu_busy_or_owned",
        (
            r"\(?EJ0001\)?:|Maybe the last training process is running",
            r"error code(?: is|:) ?5070(?:33|08)\b",
            r"open device (?P<device>\d+) failed, runtime result = 507033",
            r"halDeviceOpen failed\. ?device_id=(?P<device>\d+)",
            r"device (?:is )?(?:occupied|being used) by (?:another|other) ",
        ),
        N_(
            "The NPU[[ {device}]] could not be opened: a process of an earlier run, or another container, still holds "
            "it."
        ),
        N_(
            "`npu-smi info` names the processes on each chip. Stop your own stale ones (`python -m finetune clean` "
            "lists those that our runs recorded), wait 10 s, and start again; choose free chips with "
            "ASCEND_RT_VISIBLE_DEVICES; a chip assigned to two containers works in neither."
        ),
        confidence=0.82,
        source=_SOURCE,
    ),
    Symptom(
        "npu_driver_cann_mismatch",
        (
            r"\(?E30006\)?:|Failed to verify the OPP|error code(?: is|:) ?500001\b",
            r"error code(?: is|:) ?561\d\d\d\b|CANN version mismatch",
            r"lib(?:tbe_adapter|atb|ascendcl|runtime|opapi|ascend_hal)\w*\.so: undefined symbol",
            r"driver (?:package )?version .{0,40}(?:too low|not match|mismatch|incompatible)",
            r"build op model failed, result = 500001",
        ),
        N_("The NPU driver, firmware, CANN and its kernels do not belong together, or CANN is not fully set up."),
        _PAIR_FIX,
        confidence=0.82,
        source=_SOURCE,
        explains=("npu_busy_or_owned", "npu_op_exception"),
    ),
    Symptom(
        "npu_driver_cann_mismatch",
        (
            r"error code(?: is|:) ?507899\b",
            r"dcmi (?:model|module) initiali[sz]ed? failed\. ret is (?P<code>-?\d+)",
            r"drvRetCode=\d+.*DeviceOpen|driver error:internal error",
        ),
        N_(
            "The NPU driver reported an internal error[[ ({code})]]: driver and CANN do not match, the container "
            "cannot reach the driver, or the chip is unhealthy."
        ),
        N_(
            "Make sure that `npu-smi info` works in the same shell or container and reports OK for every chip; mount "
            "/usr/local/Ascend/driver, /usr/local/dcmi and /dev/davinci* into containers."
        ),
        more_fix=_PAIR_FIX,
        confidence=0.65,
        source=_SOURCE,
    ),
    Symptom(
        "torch_npu_missing_or_mismatch",
        (
            r"No module named 'torch_npu'|Failed to load the backend extension: torch_npu",
            r"lib(?:hccl|ascendcl|ge_runner|graph|acl_op_compiler)\w*\.so\S*: cannot open shared object file",
            r"libtorch_npu\.so: undefined symbol|torch_npu is installed but cannot be loaded",
            r"torch_npu\b.{0,60}(?:does not match|not compatible|mismatch)",
            r"module 'torch' has no attribute 'npu'",
            r"Torch not compiled with NPU|device type '?npu'? is not available",
        ),
        N_("torch_npu is not installed, does not match this torch, or cannot find CANN's libraries."),
        N_(
            "Source CANN's set_env.sh in this shell (it sets ASCEND_HOME_PATH and LD_LIBRARY_PATH), and install the "
            "torch_npu of the same version as torch (torch 2.10.0 with torch_npu 2.10.0). `python -m finetune doctor` "
            "shows the pairing. On a machine without NPUs: TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall torch_npu."
        ),
        confidence=0.93,
        source=_SOURCE,
        explains=("missing_package",),
    ),
    Symptom(
        "npu_op_exception",
        (
            r"error code(?: is|:) ?5070(?P<code>1[0-9]|3[4-9])\b",
            r"error code(?: is|:) ?5070(?P<code>00|1[0-9]|3[4-9])\[Error\]",
            r"(?:aicore|aicpu|ai ?cpu|aivec|vector core|fftsplus aicore) (?:error )?exception",
            r"an exception of (?:fftsplus )?ai(?:core|vec|cpu) error",
            r"The (?:aicore|vector core|aicpu) execution is abnormal|call acln+\w+ failed",
            r"errorStr: ?(?P<reason>[A-Z][^.\[]{5,120})",
            r"\bERR0[0-4]007\b",
        ),
        N_(
            "An operator failed on the NPU[[ (5070{code})]][[ on rank {rank}]][[: {reason}]]. The Python line in the "
            "traceback comes after the operator: NPU operators run asynchronously."
        ),
        N_(
            "Run once with ASCEND_LAUNCH_BLOCKING=1 to get the operator's own traceback. Look for ids out of range (a "
            "tokenizer with more tokens than the model has embeddings), shapes that the kernel does not support, and "
            "an old kernels package; then try --dtype float32, and update CANN."
        ),
        confidence=0.8,
        in_warnings=True,
        source=_SOURCE,
    ),
)
