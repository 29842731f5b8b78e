"""Operators and the runtime of CANN: codes EE, EH, EL, EZ, E1 to E9, EB, and the returned numbers
107xxx to 561xxx.
"""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.ascend import PAIR_FIX, SOURCE
from finetune.commands.diagnose.symptoms.base import Kind, Symptom, cann, returned
from finetune.runtime.language import N_

_OPERATOR_FIX = N_(
    "Run once with ASCEND_LAUNCH_BLOCKING=1 to get the operator's own traceback. Look for ids out of range (a "
    "tokenizer with more tokens than the model has embeddings), shapes that the kernel does not support, and "
    "an old kernels package; then try --dtype float32, and update CANN."
)
_PLOG_FIX = N_(
    "The first line with [ERROR] in ~/ascend/log/debug/plog/plog-PID_*.log of this process names the call; later ones "
    "follow from it."
)
_INNER = N_(
    "CANN reports an internal error[[ on rank {rank}]] and not what kind: an operator, the driver or the network."
)
_INNER_FIX = N_(
    "Read the lines of its TraceBack, from the first on: they name the call that failed and its reason. If it has "
    "none: ASCEND_LAUNCH_BLOCKING=1 shows the Python line, and ASCEND_PROCESS_LOG_PATH where the device's logs go."
)

SYMPTOMS = (
    Symptom(
        "npu_op_exception",
        (
            cann(
                r"EZ000\d",
                "EZ0501",
                "EZ1001",
                r"EZ300\d",
                "EZ9010",
                "EZ2001",
                "E10055",
                "E10501",
                "EH0006",
                r"EE100[56]",
            ),
            returned(r"16100[12]")
            + "|"
            + returned("561002")
            + "|"
            + returned("561001")
            + "|"
            + returned("100026"),
            r"(?:not implemented for|not support(?:ed)?(?: for)?|unsupported|expected) (?:dtype "
            r"|type )?(?P<dtype>DT_\w+)",
            r"(?P<dtype>DT_[A-Z]+\d+)\b.{0,60}(?:not (?:implemented|support)|should be in)",
            r"AclNN_Parameter_Error|Invalid_Input_\w+|Unsupported_Operator|param dtype not implemented",
            r"\bERR0[0-4]00[1237]\b",
        ),
        N_(
            "An operator does not take what it was given on this NPU: a data type[[ ({dtype})]], a shape or a format "
            "that "
            "its kernel does not support."
        ),
        N_(
            "The evidence names the operator and what it expects. Change that tensor's type before the operator "
            "(float64 "
            "and complex types are rarely supported: .float()), use --dtype bfloat16 or float16 throughout, make it "
            "contiguous, or run this operator on the CPU; a newer CANN and torch_npu support more. "
            "ASCEND_LAUNCH_BLOCKING=1 "
            "shows the Python line."
        ),
        confidence=0.84,
        source=SOURCE,
    ),
    Symptom(
        "npu_op_exception",
        (
            r"(?:\bEZ\d{4}|AclNN_Parameter_Error|\b16100[12])\b(?!.*DT_).{0,90}"
            r"(?i:\bshapes?\b|k-axis|\bdim(?:s|ensions?)?\b|\baxis\b|\bbroadcast)",
            r"\[FUNC:InferShape\w*|[Ii]nfer[Ss]hape\w* for node\b.{0,60}failed",
        ),
        N_(
            "An operator was given tensors whose shapes do not fit it or one another[[ on rank {rank}]]; the evidence "
            "says which."
        ),
        N_(
            "Compare the two shapes in the evidence with the Python line of the traceback (ASCEND_LAUNCH_BLOCKING=1 "
            "makes it the right one): a weight and the hidden size of the configuration, or a mask whose shape the "
            "kernel's mode does not take (npu_fusion_attention with sparse_mode 2 to 4 wants 2048 x 2048)."
        ),
        confidence=0.86,
        source=SOURCE,
    ),
    Symptom(
        "npu_op_exception",
        (
            returned(r"5070(?P<code>1[124-8]|3[4-6]|4[2-59]|50)"),
            r"(?:aicore|aicpu|ai ?cpu|aivec(?:tor)?|vector core|fftsplus \w+|trap) (?:error )?(?:exception|timeout)",
            r"an exception of (?:fftsplus )?ai(?:core|vec|cpu)\w* error|there is an ai\w+ error exception",
            r"The (?:aicore|vector core|aicpu) execution (?:is abnormal|times out)|call acln+\w+ failed",
            r"errorStr: ?(?P<reason>[A-Z][^.\[]{5,120})",
            r"^RuntimeError: (?P<reason>npu_\w+\b.*)",
            r"Aicore kernel execute failed|fault kernel_name=(?P<reason>\w+)|exception occurred during AICPU",
        ),
        N_(
            "An operator failed on the NPU[[ (5070{code})]][[ on rank {rank}]][[: {reason}]]. The Python line in the "
            "traceback comes after the operator: NPU operators run asynchronously."
        ),
        _OPERATOR_FIX,
        kind=Kind.VAGUE,
        confidence=0.8,
        in_warnings=True,
        source=SOURCE,
    ),
    Symptom(
        "npu_op_exception",
        (
            cann(
                r"EB0\d{3}",
                r"EB1\d{3}",
                r"EB3\d{3}",
                r"EB4\d{3}",
                r"EB9\d{3}",
                r"E2200\d",
                r"E2100\d",
                "E20001",
                "E20007",
            )
            + "|"
            + cann("E40021", "E40003", r"E14\d{3}", r"E16\d{3}", r"E10[0-4]\d\d")
            + r"|Compilation_Error\w*",
            r"(?:[Cc]ompile|[Bb]uild) (?:op|operator|graph)\w*\b.{0,40} fail|UB memory overflow",
        ),
        N_("CANN could not compile an operator or a graph for this NPU."),
        N_(
            "Install the kernels package of this chip in the same version as CANN, and set "
            "torch_npu.npu.set_compile_mode(jit_compile=False), so that ready kernels are used; leave out "
            "torch.compile."
        ),
        more_fix=PAIR_FIX,
        kind=Kind.VAGUE,
        confidence=0.7,
        source=SOURCE,
    ),
    Symptom(
        "npu_op_exception",
        (
            returned(r"107002"),
            r"context is (?:a )?(?:null|empty)|ctx is NULL|ACL_ERROR_RT_CONTEXT_NULL",
            cann("EE1010"),
        ),
        N_(
            "A thread or forked process used the NPU without having chosen it: it has no context there."
        ),
        N_(
            "Call torch.npu.set_device(local_rank) first in every thread and process that touches the NPU, also in "
            "callbacks and loaders; start data loader workers before the device is used, or with "
            "multiprocessing_context='spawn', and keep tensors on the CPU in them."
        ),
        kind=Kind.VAGUE,
        confidence=0.75,
        source=SOURCE,
    ),
    Symptom(
        "npu_op_exception",
        (
            returned(r"507\d\d\d")
            + "|"
            + returned("361001")
            + "|"
            + returned(r"1070(?!2[23]|35)\d\d")
            + "|"
            + returned(r"500\d\d\d"),
        ),
        N_(
            "A call into CANN failed[[ on rank {rank}]]; the number tells the part, not the reason."
        ),
        N_(
            "Look the number up in CANN's table of return codes (1xxxxx: wrong argument or order of calls, 2xxxxx: "
            "resources, "
            "5xxxxx: the device or the driver), and read the lines after it."
        ),
        more_fix=_PLOG_FIX,
        kind=Kind.VAGUE,
        confidence=0.56,
        source=SOURCE,
    ),
    Symptom(
        "npu_op_exception",
        (
            cann(r"EE1\d{3}", r"EE4\d{3}", r"EH0\d{3}", r"EL0\d{3}"),
            cann(r"EZ0\d{3}", r"EZ2\d{3}", r"EZ3\d{3}", r"EZ9(?!999)\d{3}"),
        ),
        N_(
            "CANN refused a call[[ on rank {rank}]]: an argument, a file or an operator that it does not take; the "
            "evidence says which."
        ),
        N_(
            "Read the evidence up to `Reason:` and look at the Python line in the traceback: check the device number, "
            "the path or the variable that it names, and look the code up in CANN's table of error codes."
        ),
        more_fix=_PLOG_FIX,
        kind=Kind.VAGUE,
        confidence=0.6,
        in_warnings=True,
        source=SOURCE,
    ),
    Symptom(
        "npu_op_exception",
        (
            returned(r"(?:100|107|145|148|161|200|207|300|361|500|545|561)\d\d\d"),
            cann(
                *(
                    rf"E{module}\d{{3}}(?=: |\)|  )"
                    for module in (10, 11, 12, 13, 20, 21, 30, 39, 40, 76, 80)
                )
            ),
            r"\bERR0[0-4](?:00[457]|100|300)\b",
        ),
        N_("A call into CANN failed[[ on rank {rank}]]; the code tells the part, not the reason."),
        N_("Look the code up in CANN's table of error codes, and read the lines after it."),
        more_fix=_PLOG_FIX,
        kind=Kind.CASCADE,
        confidence=0.55,
        in_warnings=True,
        source=SOURCE,
    ),
    Symptom(
        "unknown",
        (r"(?<!\w)E[1-9A-Z]9999(?!\w)", r"Inner_?Error|Inner Error!"),
        _INNER,
        _INNER_FIX,
        more_fix=_PLOG_FIX,
        kind=Kind.CASCADE,
        confidence=0.45,
        in_warnings=True,
        source=SOURCE,
    ),
    Symptom(
        "npu_op_exception",
        (
            r"(?:NPU|HCCL|OPS|GRAPH) function error|The Inner error is reported as above|ACL stream synchronize failed",
        ),
        _INNER,
        _INNER_FIX,
        more_fix=_PLOG_FIX,
        kind=Kind.CASCADE,
        confidence=0.5,
        in_warnings=True,
        source=SOURCE,
    ),
    Symptom(
        "npu_op_exception",
        (
            r"(?:E40021|E40024|[Ff]ailed to compile|[Cc]ompile).{0,300}(?:json file|kernel_meta"
            r"|cache)\b.{0,100}(?:is empty|empty \(|corrupt|broken|truncated)",
        ),
        N_(
            "CANN's compile cache holds a file that is empty or cut short: several processes wrote the same folder, or "
            "one was ended while writing."
        ),
        N_(
            "Remove the kernel_meta folder and the cache, and give each node (better each rank) a local one: "
            "ASCEND_CACHE_PATH and ASCEND_WORK_PATH on a local disk, not on a shared file system."
        ),
        confidence=0.9,
        source=SOURCE,
        explains=("dataset_bad_json", "npu_driver_cann_mismatch"),
    ),
)
