"""NPUs as devices: which there are, whether they are healthy, who may use them."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.ascend import SOURCE
from finetune.commands.diagnose.symptoms.base import Kind, Symptom, cann, returned
from finetune.runtime.language import N_

# Of something that was seen, not of what would be done about it or how often nothing was.
_TOLD = r"^(?!.*\b(?:[Ii]f|[Nn]o|[Nn]ot|[Ww]hen|[Ff]ound 0|[Dd]etected 0) )(?:.*\W)?"

SYMPTOMS = (
    Symptom(
        "device_not_visible",
        (
            cann("EL0002") + "|" + returned("107001") + "|" + returned("200002"),
            r"[Ii]nvalid[_ ]device[_ ]?[Ii][Dd]\b|device id\W{1,3}\d+ (?:is )?(?:invalid|out of range)",
            r"(?i:set (?:ASCEND_RT_VISIBLE_DEVICES\S*|visible devices?) (?:error|failed))|input visible devices"
            r"|driver error:no valid device|device id error\]",
        ),
        N_("A process asked for an NPU number that does not exist for it[[ (rank {rank})]]."),
        N_(
            "Compare the number of processes per machine with `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES: chips are "
            "counted from 0 among the visible ones. Lower --nproc, or make more chips visible (and mount their "
            "/dev/davinciN into the container)."
        ),
        confidence=0.86,
        source=SOURCE,
    ),
    Symptom(
        "device_not_visible",
        (
            returned("207004"),
            r"\bThe device is unavailable",
            cann("EL0001") + r"|\bDevice_Absent|drvGetDevNum failed|cannot access '?/dev/davinci",
        ),
        N_(
            "No NPU can be used here[[ (rank {rank})]]: none is visible to the process, or its driver does not answer."
        ),
        N_(
            "`npu-smi info` in the same shell or container must list the chips as OK; ASCEND_RT_VISIBLE_DEVICES takes "
            "numbers that exist there, in ascending order, and their /dev/davinciN must be in the container."
        ),
        kind=Kind.VAGUE,
        confidence=0.75,
        source=SOURCE,
    ),
    Symptom(
        "illegal_memory_or_ecc",
        (
            cann("E39009", "E30005", "EL0015"),
            returned(r"507(?:010|05[1345]|901)"),
            r"(?:NPU|device)(?: device)? \d+ is in (?:an )?abnormal state",
            r"(?i:\bhbm (?:ecc error exception|multi[- ]bit ecc(?:\]|,| error(?! ?count))))|HBM .*multi-bit ECC"
            r"|\bUCE ERROR\b"
            r"|SUSPECT (?:DEVICE )?MEM ERROR",
            r"(?:NPU|npu|davinci|devdrv)\W?\d* .{0,20}heart ?beat (?:is )?lost|lost heart ?beat",
            r"ts lost heartbeat|device (?:heartbeat|lost heart)|hdc disconnect",
            r"(?:device|chip|npu)\W?\d* (?:is )?(?:lost|offline|dropped|not healthy)|Health\s*:\s*(?:Alarm|Critical)",
        ),
        N_(
            "An NPU is faulty or gone[[ (rank {rank})]]: it lost its heartbeat, fell off the bus, or its memory has "
            "errors "
            "that cannot be corrected."
        ),
        N_(
            "`npu-smi info` and `npu-smi info -t ecc -i N` show its state and `dmesg -T | grep -i -E "
            "'davinci|npu|pcie'` "
            "when it went. Leave the chip out of ASCEND_RT_VISIBLE_DEVICES, have the machine's administrator reset or "
            "replace it, and start the same command again: the run resumes from its last checkpoint."
        ),
        kind=Kind.MACHINE,
        confidence=0.86,
        in_warnings=True,
        source=SOURCE,
        restart_cures=False,
    ),
    Symptom(
        "illegal_memory_or_ecc",
        (
            cann("EI0012") + "|" + returned("507013"),
            r"sdma error|SDMA (?:memory copy )?.{0,20}(?:exception|error)",
        ),
        N_(
            "Copying between NPUs failed (SDMA)[[ on rank {rank}]]: the memory at one end was freed or never there, "
            "the "
            "process at the other end had gone, or the link between them is faulty."
        ),
        N_(
            "See whether another rank failed before (pass all logs). Synchronise before destroying a process group; "
            "check "
            "links and memory with `npu-smi info -t ecc -i N` and `hccn_tool -i N -link -g`."
        ),
        kind=Kind.VAGUE,
        confidence=0.75,
        source=SOURCE,
        explains=("npu_driver_cann_mismatch",),
    ),
    Symptom(
        "permission_denied",
        (
            cann("EL0007", "EC0011", "EG2001") + "|" + returned("207006"),
            r"No_Permission|Permission_Error\w*",
        ),
        N_("This user may not use the NPU."),
        N_(
            "`ls -l /dev/davinci*` and `id`: the user must be in the devices' group (usually HwHiAiUser: `usermod -aG "
            "HwHiAiUser NAME`, then log in again); in containers pass the devices and this group."
        ),
        confidence=0.86,
        source=SOURCE,
    ),
    Symptom(
        "nan_loss",
        (returned(r"2070(?:03|1[67])"), r"ACL_ERROR_RT_\w*OVER_FLOW|aicore over ?flow"),
        N_("The NPU reports an arithmetic overflow: numbers became too large for their type."),
        N_(
            "Use bfloat16 instead of float16 (or a lower loss scale), lower --learning-rate[[ (now "
            "{learning_rate})]], clip "
            "gradients (--max-grad-norm 1), and look at the records of the first bad step."
        ),
        kind=Kind.VAGUE,
        confidence=0.7,
        source=SOURCE,
    ),
    Symptom(
        "illegal_memory_or_ecc",
        (
            r"silent check abnormal|Feature detection detects abnormal",
            _TOLD + r"[Ss]ilent data corruptions? (?:\(SDC\) )?(?:(?:was|were|is|has been) )?"
            r"(?:detected|found|occurred)(?!\W{1,3}0\b|, no\b)",
            _TOLD + r"(?:[Dd]etected|[Ff]ound|[Ss]uspect(?:ed)?)\b.{0,30}\b"
            r"[Ss]ilent data corruption\b(?! (?:check|test|detect))",
            r"stress test\b.{0,40}(?<!/)(?<!or )\bFAIL(?<!\b0 FAIL)(?!\w*\W{1,3}0\b)"
            r"|matmul compare mismatch(?!\W{1,3}0\b)",
        ),
        N_(
            "A device computes wrong results without reporting an error (silent data corruption)[[ (rank {rank})]]."
        ),
        N_(
            "Take that device out of service and have it tested (npu-smi's or dcgm's stress test for minutes). Start "
            "the same command again without it, from a checkpoint that was written before the first wrong step."
        ),
        confidence=0.9,
        source="torch_npu, npu-smi",
        kind=Kind.MACHINE,
    ),
)
