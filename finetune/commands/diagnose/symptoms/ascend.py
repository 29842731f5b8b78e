"""Ascend NPUs: whether torch_npu, CANN, driver and chip are there and belong together."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom, cann, returned
from finetune.runtime.language import N_

SOURCE = "CANN/HCCL/torch_npu: documented codes, public threads"
PAIR_FIX = N_(
    "`python -m finetune doctor` shows which versions are installed here and which belong together. Compare `npu-smi "
    "info` (driver), $ASCEND_HOME_PATH (CANN) and `pip show torch torch_npu`; upgrade the driver first, then CANN with "
    "the kernels package of your chip, then torch_npu; source CANN's set_env.sh in the shell that starts the run."
)
_BUSY_FIX = N_(
    "`npu-smi info` names the processes on each chip. Stop your own stale ones (`python -m finetune clean` "
    "lists those that our runs recorded), wait 10 s, and start again; choose free chips with "
    "ASCEND_RT_VISIBLE_DEVICES; a chip assigned to two containers works in neither."
)
_MISMATCH = N_(
    "The NPU driver, firmware, CANN and its kernels do not belong together, or CANN is not fully set up."
)

SYMPTOMS = (
    Symptom(
        "npu_busy_or_owned",
        (
            cann("EJ0001", "EL0005") + r"|Maybe the last training process is running",
            returned("507033"),
            r"open device (?P<device>\d+) failed, runtime result = 507033",
            r"halDeviceOpen failed\. ?device_id=(?P<device>\d+)",
            r"device (?:is )?(?:occupied|being used) by (?:another|other) |Resource_Busy"
            r"|(?:NPU|device) resource is busy",
        ),
        N_(
            "The NPU[[ {device}]] could not be opened: a process of an earlier run, or another container, still holds "
            "it, or it is being reset."
        ),
        _BUSY_FIX,
        confidence=0.82,
        source=SOURCE,
    ),
    Symptom(
        "npu_busy_or_owned",
        (
            cann("EL0006", "EL0008", "EL0009", "EL001[0-3]", "EE1007"),
            returned(r"2070(?:05|07|08|09|1[0-4])"),
            r"Insufficient_(?:\w+_)?Resources",
        ),
        N_(
            "The NPU has no streams, events, notifies or queues left: too many processes or process groups use the "
            "chip."
        ),
        _BUSY_FIX,
        more_fix=N_(
            "If only this run uses the chip, let it open fewer process groups and streams."
        ),
        kind=Kind.VAGUE,
        confidence=0.7,
        source=SOURCE,
    ),
    Symptom(
        "npu_driver_cann_mismatch",
        (
            cann(
                "E30006",
                "E3000[347]",
                "E3900[1-9]",
                "E400(?:01|02|20|24)",
                "E20002",
                "E13024",
                "EF000[13]",
                "EE2002",
            )
            + r"|Failed to verify the OPP|CANN version mismatch",
            returned("507008")
            + "|"
            + returned(r"561(?:003|10[1-9]|11\d|[2-9]\d\d)")
            + "|"
            + returned("148049"),
            r"lib(?:tbe_adapter|atb|ascendcl|runtime|opapi|ascend_hal|c_sec|profapi|hccl)\w*\.so: undefined symbol",
            r"driver (?:package )?version .{0,40}(?:too low|not match|mismatch|incompatible)",
            r"build op model failed, result = 500001",
            r"(?:Package_Error|Environment_Error)_\w+|ASCEND_OPP_PATH.{0,40}(?:not|invalid|fail)",
        ),
        _MISMATCH,
        PAIR_FIX,
        confidence=0.82,
        source=SOURCE,
        explains=("npu_busy_or_owned", "npu_op_exception"),
    ),
    Symptom(  # also of a chip that another process holds
        "npu_driver_cann_mismatch",
        (returned("500001"),),
        _MISMATCH,
        PAIR_FIX,
        kind=Kind.VAGUE,
        confidence=0.75,
        source=SOURCE,
        explains=("npu_op_exception",),
    ),
    Symptom(
        "npu_driver_cann_mismatch",
        (
            cann("EI0008"),
            r"CANN versions are inconsistent|\[VersionConflict\]|local_version \[.*remote_version \[",
        ),
        N_("The nodes have different versions of CANN: HCCL connects only equal ones."),
        N_(
            "Compare `cat $ASCEND_HOME_PATH/*/ascend_toolkit_install.info` and `npu-smi info` on all nodes, and "
            "install "
            "the same CANN, driver and torch_npu everywhere (or one container image)."
        ),
        confidence=0.92,
        source=SOURCE,
        explains=("npu_busy_or_owned", "npu_op_exception", "hccl_config"),
    ),
    Symptom(
        "npu_driver_cann_mismatch",
        (
            r"(?P<operator>aclnn\w+)\b.{0,80} not (?:found )?in lib\w+\.so|undefined symbol: (?P<operator_>aclnn\w+)",
            r"No supported Ops kernel and engine are found for \[\w+\], optype \[(?P<operator>\w+)\]",
            r"binary_info_config\.json\b.{0,60}does not support opType \[(?P<operator>\w+)\]",
        ),
        N_("torch_npu calls an operator that the installed CANN does not have[[: {operator}]]."),
        PAIR_FIX,
        more_fix=N_(
            "CANN's kernels are a package of their own (Ascend-cann-kernels-CHIP): install that for this chip too."
        ),
        confidence=0.9,
        explains=("npu_op_exception",),
        source=SOURCE,
    ),
    Symptom(
        "npu_driver_cann_mismatch",
        (
            returned("507899"),
            cann("EL0003", "EL0014", "EL9999")
            + "|"
            + returned("207000")
            + "|"
            + returned("50000[034]"),
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
        more_fix=PAIR_FIX,
        kind=Kind.VAGUE,
        confidence=0.65,
        source=SOURCE,
    ),
    Symptom(
        "torch_npu_missing_or_mismatch",
        (
            r"lib(?:ascend_hal|drvdsmi|dcmi|drvhdc|drvmem|drvdevmm)\w*\.so\S*: cannot open shared object file",
        ),
        N_(
            "The NPU driver's libraries are not there: the driver is not installed, or not mounted into this container."
        ),
        N_(
            "`npu-smi info` must work in the same shell or container. Start the container with the driver and the "
            "chips (-v /usr/local/Ascend/driver:/usr/local/Ascend/driver -v /usr/local/dcmi:/usr/local/dcmi --device "
            "/dev/davinciN --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc), and have "
            "/usr/local/Ascend/driver/lib64/driver in LD_LIBRARY_PATH (CANN's set_env.sh does that)."
        ),
        confidence=0.94,
        source=SOURCE,
        explains=("missing_package", "package_mismatch", "device_not_visible"),
    ),
    Symptom(
        "torch_npu_missing_or_mismatch",
        (
            r"No module named 'torch_npu'|Failed to load the backend extension: torch_npu",
            r"lib(?:hccl|ascendcl|ge_\w+|graph|acl_\w+|msprofiler|profapi|atb|opapi|nnopbase|runtime"
            r"|c_sec|mmpa"
            r"|drv\w+)\w*\.so\S*: cannot open shared object file",
            r"Failed to import torch_npu|check that the cann package is installed|ASCEND_(?:HOME_PATH"
            r"|TOOLKIT_HOME) (?:is not|does not|not) \w+",
            r"libtorch_npu\.so: undefined symbol|torch_npu is installed but cannot be loaded",
            r"[Uu]nsupported soc(?: version)?\b|soc_?version .{0,30}(?:is )?not supported",
            r"torch_npu\b.{0,60}(?:does not match|not compatible|mismatch)",
            r"module 'torch' has no attribute 'npu'|module 'torch_npu' has no attribute",
            r"Torch not compiled with NPU|device type '?npu'? is not available",
            r"[Dd]evice string: ?'?(?P<device>npu)|device type at start of device string: (?P<device_>npu)",
            r"(?:[Uu]nknown|[Ii]nvalid|[Uu]nsupported) (?:c10d |distributed )?backend(?: type| name)?:? ?['\"]*"
            r"(?P<device>(?i:hccl))",
            r"backend (?:name )?'?(?P<device>hccl)'? (?:is )?not (?:found|supported|available|registered)"
            r"|Distributed package doesn't have (?P<device_>HCCL)",
            r"Could not run '\S+' with arguments from the '(?P<device>NPU|PrivateUse1)' backend",
        ),
        N_(
            "torch_npu is not installed, does not match this torch, or cannot find CANN's libraries."
        ),
        N_(
            "Source CANN's set_env.sh in this shell (it sets ASCEND_HOME_PATH and LD_LIBRARY_PATH), and install the "
            "torch_npu of the same version as torch (torch 2.10.0 with torch_npu 2.10.0). `python -m finetune doctor` "
            "shows the pairing. On a machine without NPUs: TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall torch_npu."
        ),
        confidence=0.93,
        source=SOURCE,
        explains=("missing_package", "package_mismatch"),
    ),
    Symptom(
        "torch_npu_missing_or_mismatch",
        (
            r"No module named '?(?P<module>(?:tbe|te|topi|hccl|acl|mspti|opc_tool|auto_tune)\b[\w.]*)",
        ),
        N_(
            "CANN's Python package[[ {module}]] was not found: CANN's environment is not set where the run was started."
        ),
        N_(
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` in the shell (or job script, container entry point) "
            "that starts the run: it puts CANN's packages into PYTHONPATH, and what sets that afterwards must keep "
            "them. They come with CANN, not from pip: packages of these names on PyPI are something else. If it is "
            "sourced, the toolkit is not fully installed, or is for another Python."
        ),
        confidence=0.94,
        source=SOURCE,
        explains=(
            "missing_package",
            "package_mismatch",
            "npu_driver_cann_mismatch",
            "npu_op_exception",
        ),
    ),
    Symptom(
        "npu_busy_or_owned",
        (
            r"[Ff]ail\w* .{0,60}resource\[(?:notify|stream|event|queue)\]|\b[Nn]o (?:notify|stream|event) resource",
        ),
        N_(
            "The NPU has no notifies, streams or events left: this run made more communicators (process groups) than "
            "the chip has room for."
        ),
        N_(
            "Make fewer groups: one per dimension of parallelism instead of one per combination, and reuse them; "
            "destroy those that are no longer used. `npu-smi info` shows whether other processes use the chip as well."
        ),
        confidence=0.91,
        source=SOURCE,
        explains=("device_oom",),
    ),
    Symptom(
        "torch_npu_missing_or_mismatch",
        (r"libatb\w*\.so\S*: cannot open shared object file",),
        N_(
            "The operators for transformers (ATB, of the package nnal) are not there, or their environment is not set."
        ),
        N_(
            "`source /usr/local/Ascend/nnal/atb/set_env.sh` after CANN's own set_env.sh in the shell that starts the "
            "run; if the folder is missing, install Ascend-cann-nnal of CANN's version."
        ),
        confidence=0.94,
        source=SOURCE,
        explains=("missing_package", "package_mismatch"),
    ),
)
