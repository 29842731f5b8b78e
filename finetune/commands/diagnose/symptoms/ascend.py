"""Ascend NPUs: CANN, HCCL and torch_npu. Codes and their meaning: CANN's documentation and public threads."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import Text

_SOURCE = "CANN/HCCL/torch_npu: documented codes, public threads"
_PAIR_FIX: Text = {
    "en": "`python -m finetune doctor` says which versions stand here and which belong together. Compare `npu-smi "
    "info` (driver), $ASCEND_HOME_PATH (CANN) and `pip show torch torch_npu`; upgrade the driver first, then CANN "
    "with the kernels package of your chip, then torch_npu; source CANN's set_env.sh in the shell that starts the "
    "run.",
    "zh": "`python -m finetune doctor` 会列出本机版本与配套关系。对照 `npu-smi info`(驱动)、$ASCEND_HOME_PATH(CANN)与 "
    "`pip show torch torch_npu`;先升级驱动,再升级 CANN 与对应芯片的 kernels 包,最后 torch_npu;在启动训练的 shell 中 "
    "source CANN 的 set_env.sh。",
}

SYMPTOMS = (
    Symptom(
        "hccl_connect_timeout",
        (
            r"\(?EI0006\)?:",
            r"\(?EI0015\)?:(?:.*unconnected ranks?: ?\"?\[(?P<missing>[\d, ]+)\]?)?",
            r"\(?EI0009\)?:.*Transport init",
            r"Getting socket times out",
            r"wait socket establish timeout, role\[\d+\] rank\[(?P<peer>\d+)\] timeout\[(?P<seconds>\d+)\]",
        ),
        {
            "en": "HCCL could not connect all NPUs in time[[: ranks {missing} did not come]][[: rank {peer} did not "
            "answer in {seconds} s]]. Another rank failed or came late, or the links between the NPUs do not work.",
            "zh": "HCCL 未能在时限内连通所有 NPU[[:rank {missing} 未到达]][[:rank {peer} 在 {seconds} 秒内没有应答]]。"
            "可能是其他 rank 出错或来得太晚,或 NPU 之间的链路不通。",
        },
        {
            "en": "Look at the other ranks' logs for an error before this one (give all to one `diagnose`). If there "
            "is none: raise HCCL_CONNECT_TIMEOUT (120 s by default; --timeout-seconds sets it here[[, now "
            "{timeout_seconds}]]), check the links with `hccn_tool -i 0 -link -g`, `-net_health -g`, `-tls -g` (TLS "
            "the same on all), and see that HCCL_SOCKET_IFNAME names the interface that the nodes share.",
            "zh": "查看其他 rank 的日志中更早的错误(全部交给一次 `diagnose`)。若没有:增大 HCCL_CONNECT_TIMEOUT(默认 "
            "120 秒;本软件由 --timeout-seconds 设置[[,当前 {timeout_seconds}]]);用 `hccn_tool -i 0 -link -g`、"
            "`-net_health -g`、`-tls -g` 检查链路(各卡 TLS 设置须一致),并确认 HCCL_SOCKET_IFNAME 是各节点共用的网卡。",
        },
        kind=Kind.WAITED,
        confidence=0.88,
        source=_SOURCE,
    ),
    Symptom(
        "hccl_config",
        (
            r"\(?EI00(?:01|03|04|05|14|16)\)?:(?:.*?[Ee]nvironment variable:? ?\[?(?P<variable>\w+))?",
            r"(?:HCCL_IF_IP|HCCL_SOCKET_IFNAME|HCCL_WHITELIST_FILE|HCCL_CONNECT_TIMEOUT|HCCL_EXEC_TIMEOUT|"
            r"HCCL_BUFFSIZE|RANK_TABLE_FILE)\b.{0,40} is invalid",
            r"errNo\[0x0*50000001\]",
            r"get host ip .*fail|[Ff]ailed to (?:find|get) (?:the )?host ?nic|HCCL_IF_IP.*not (?:found|match)",
        ),
        {
            "en": "HCCL's settings are wrong or differ between ranks[[: {variable}]]: an environment variable, the "
            "rank table, or the arguments of a collective.",
            "zh": "HCCL 配置错误或各 rank 不一致[[:{variable}]]:环境变量、rank table 或集合通信参数。",
        },
        {
            "en": "Unset HCCL_* variables and RANK_TABLE_FILE that came from copied scripts (`env | grep -E "
            "'HCCL|RANK_TABLE'`), above all HCCL_IF_IP=127.0.0.1 on several nodes; set only HCCL_SOCKET_IFNAME where "
            "a machine has several interfaces, the same everywhere. `python -m finetune doctor` checks them against "
            "each other.",
            "zh": "清除从脚本里抄来的 HCCL_* 变量与 RANK_TABLE_FILE(`env | grep -E 'HCCL|RANK_TABLE'`),尤其多机时的 "
            "HCCL_IF_IP=127.0.0.1;只有多网卡机器才需要设置 HCCL_SOCKET_IFNAME,且各节点一致。`python -m finetune "
            "doctor` 会检查它们是否矛盾。",
        },
        confidence=0.88,
        source=_SOURCE,
    ),
    Symptom(
        "hccl_port_bind",
        (
            r"\(?EI00(?:19|20)\)?:",
            r"\(?EJ0003\)?:",
            r"listen on ip\[(?P<ip>[^\]]+)\] and specific port\[(?P<hccl_port>\d+)\] fail",
            r"nic listen start failed, port\[(?P<hccl_port>\d+)\]",
            r"Failed to bind the IP port",
        ),
        {
            "en": "A port of HCCL's own[[ ({hccl_port})]][[ on {ip}]] is taken (60000 to 60015 on the host, 16666 on "
            "the device; not MASTER_PORT): another job uses the same machine or the same NPUs.",
            "zh": "HCCL 自己的端口[[({hccl_port})]][[({ip})]]被占用(主机侧 60000-60015,设备侧 16666,不是 MASTER_PORT):"
            "同一机器或同一 NPU 上有别的作业。",
        },
        {
            "en": "Give each job on the machine ports of its own: HCCL_IF_BASE_PORT=61000 (and "
            "HCCL_NPU_SOCKET_PORT_RANGE=auto where two jobs share an NPU, CANN 8.1 on), or wait for the other job; "
            "keep the range out of net.ipv4.ip_local_port_range (`sysctl "
            "net.ipv4.ip_local_reserved_ports=60000-60015`).",
            "zh": "给同一机器上的每个作业不同端口:HCCL_IF_BASE_PORT=61000(两个作业共用 NPU 时加 "
            "HCCL_NPU_SOCKET_PORT_RANGE=auto,CANN 8.1 起),或等另一个作业结束;并把该段端口从临时端口中保留(`sysctl "
            "net.ipv4.ip_local_reserved_ports=60000-60015`)。",
        },
        confidence=0.94,
        source=_SOURCE,
        explains=("npu_op_exception", "port_in_use"),
    ),
    Symptom(
        "hccl_link_down",
        (r"\(?EJ0002\)?:", r"The network port is down", r"\(?EI0013\)?:", r"HCCS LINK ERROR"),
        {
            "en": "A network port or link of an NPU is down[[ (rank {rank})]].",
            "zh": "NPU 的网口或链路断开[[(rank {rank})]]。",
        },
        {
            "en": "Check `hccn_tool -i N -link -g`, `-ip -g` and `-optical -g` for every NPU N, and the switch; take "
            "the machine out until all say UP.",
            "zh": "对每个 NPU N 检查 `hccn_tool -i N -link -g`、`-ip -g`、`-optical -g` 以及交换机;全部 UP "
            "之前不要使用该机器。",
        },
        confidence=0.85,
        source=_SOURCE,
    ),
    Symptom(
        "npu_busy_or_owned",
        (
            r"\(?EJ0001\)?:",
            r"Maybe the last training process is running",
            r"error code(?: is|:) ?5070(?:33|08)\b",
            r"open device (?P<device>\d+) failed, runtime result = 507033",
            r"halDeviceOpen failed\. ?device_id=(?P<device>\d+)",
            r"device (?:is )?(?:occupied|being used) by (?:another|other) ",
        ),
        {
            "en": "The NPU[[ {device}]] could not be opened: a process of an earlier run, or another container, still "
            "has it.",
            "zh": "无法打开 NPU[[ {device}]]:上一次运行的残留进程或其他容器仍占用它。",
        },
        {
            "en": "`npu-smi info` names the processes on each chip. End your own left-over ones (`python -m finetune "
            "clean` lists what our runs recorded), wait 10 s, and start again; choose free chips with "
            "ASCEND_RT_VISIBLE_DEVICES; a chip given to two containers works in neither.",
            "zh": "`npu-smi info` 会列出每个芯片上的进程。结束自己残留的进程(`python -m finetune clean` "
            "会列出本软件记录的进程),等 10 秒再启动;用 ASCEND_RT_VISIBLE_DEVICES 选择空闲芯片;"
            "同一芯片不能同时给两个容器。",
        },
        confidence=0.82,
        source=_SOURCE,
    ),
    Symptom(
        "npu_driver_cann_mismatch",
        (
            r"\(?E30006\)?:|Failed to verify the OPP",
            r"error code(?: is|:) ?500001\b",
            r"error code(?: is|:) ?561\d\d\d\b",
            r"CANN version mismatch",
            r"lib(?:tbe_adapter|atb|ascendcl|runtime|opapi|ascend_hal)\w*\.so: undefined symbol",
            r"driver (?:package )?version .{0,40}(?:too low|not match|mismatch|incompatible)",
            r"build op model failed, result = 500001",
        ),
        {
            "en": "The NPU driver, firmware, CANN and its kernels do not belong together, or CANN is not set up "
            "completely.",
            "zh": "NPU 驱动、固件、CANN 及其 kernels 包版本不配套,或 CANN 环境没有完整设置。",
        },
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
        {
            "en": "The NPU driver gave an internal error[[ ({code})]]: driver and CANN do not fit, the container "
            "cannot reach the driver, or the chip is unhealthy.",
            "zh": "NPU 驱动内部错误[[({code})]]:驱动与 CANN 不配套、容器访问不到驱动,或芯片不健康。",
        },
        {
            "en": "See that `npu-smi info` works in the same shell or container and says OK for every chip; mount "
            "/usr/local/Ascend/driver, /usr/local/dcmi and /dev/davinci* into containers. " + _PAIR_FIX["en"],
            "zh": "先确认同一 shell 或容器中 `npu-smi info` 可用且各芯片为 OK;容器需挂载 /usr/local/Ascend/driver、"
            "/usr/local/dcmi 与 /dev/davinci*。" + _PAIR_FIX["zh"],
        },
        confidence=0.65,
        source=_SOURCE,
    ),
    Symptom(
        "torch_npu_missing_or_mismatch",
        (
            r"No module named 'torch_npu'",
            r"Failed to load the backend extension: torch_npu",
            r"lib(?:hccl|ascendcl|ge_runner|graph|acl_op_compiler)\w*\.so\S*: cannot open shared object file",
            r"libtorch_npu\.so: undefined symbol",
            r"torch_npu is installed but cannot be loaded",
            r"torch_npu\b.{0,60}(?:does not match|not compatible|mismatch)",
            r"module 'torch' has no attribute 'npu'",
            r"Torch not compiled with NPU|device type '?npu'? is not available",
        ),
        {
            "en": "torch_npu is not installed, does not fit this torch, or does not find CANN's libraries.",
            "zh": "torch_npu 未安装、与当前 torch 不配套,或找不到 CANN 的库。",
        },
        {
            "en": "Source CANN's set_env.sh in this shell (it sets ASCEND_HOME_PATH and LD_LIBRARY_PATH), and install "
            "the torch_npu of the same version as torch (torch 2.6.0 with torch_npu 2.6.0). `python -m finetune "
            "doctor` shows the pairing. On a machine without NPUs: TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall "
            "torch_npu.",
            "zh": "在当前 shell 中 source CANN 的 set_env.sh(设置 ASCEND_HOME_PATH 与 LD_LIBRARY_PATH),并安装与 torch "
            "同版本的 torch_npu(torch 2.6.0 配 torch_npu 2.6.0)。`python -m finetune doctor` 会显示配套关系。没有 "
            "NPU 的机器:TORCH_DEVICE_BACKEND_AUTOLOAD=0,或卸载 torch_npu。",
        },
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
            r"The (?:aicore|vector core|aicpu) execution is abnormal",
            r"call acln+\w+ failed",
            r"errorStr: ?(?P<reason>[A-Z][^.\[]{5,120})",
            r"\bERR0[0-4]007\b",
        ),
        {
            "en": "An operator failed on the NPU[[ (5070{code})]][[ on rank {rank}]][[: {reason}]]. The Python line "
            "in the traceback is later than the operator: NPU operators run asynchronously.",
            "zh": "NPU 算子执行失败[[(5070{code})]][[(rank {rank})]][[:{reason}]]。NPU 算子是异步执行的,traceback "
            "中的 Python 行晚于真正出错的算子。",
        },
        {
            "en": "Run once with ASCEND_LAUNCH_BLOCKING=1 to get the operator's own traceback. Look for ids out of "
            "range (a tokenizer with more tokens than the model has embeddings), shapes that the kernel does not "
            "know, and an old kernels package; then try --dtype float32, and update CANN.",
            "zh": "用 ASCEND_LAUNCH_BLOCKING=1 运行一次以得到算子自己的 traceback。检查 token id 越界(分词器比模型 "
            "embedding 多)、算子不支持的形状、过旧的 kernels 包;再试 --dtype float32,并升级 CANN。",
        },
        confidence=0.8,
        in_warnings=True,
        source=_SOURCE,
    ),
)
