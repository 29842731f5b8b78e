"""HCCL after it has connected: links that go down, waits that end, processes that are gone."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.ascend import SOURCE
from finetune.commands.diagnose.symptoms.base import Kind, Symptom, cann, returned
from finetune.commands.diagnose.symptoms.hccl import hccl_returned
from finetune.commands.diagnose.symptoms.network import TIMEOUT_FIX
from finetune.runtime.language import N_

_LINK_FIX = N_(
    "Check `hccn_tool -i N -link -g`, `-ip -g` and `-optical -g` for every NPU N, and the switch; take the "
    "machine out of service until all report UP."
)

SYMPTOMS = (
    Symptom(
        "hccl_link_down",
        (
            cann("EJ0002")
            + r"|[Nn]etwork port is down|HCCS LINK ERROR|Reason: .{0,40}(?:port|link) is down",
            r"(?:link|port) (?:status )?(?:is )?[Dd][Oo][Ww][Nn]\b.*(?:hccn|npu|device|eth\d|roce)"
            r"|net health status: (?!Success|Init)",
            r"(?:npu|NPU|dev|device|port).{0,60}link status\W{0,3}(?:change\W+UP\W+)?DOWN\b",
            returned("507056"),
        ),
        N_("A network port or link of an NPU is down[[ (rank {rank})]]."),
        _LINK_FIX,
        kind=Kind.MACHINE,
        confidence=0.89,  # surer than EI0009, which gives it as its reason
        source=SOURCE,
    ),
    Symptom(
        "hccl_link_down",
        (r"packets transmitted, 0 (?:packets )?received|^recv seq=\d+, ?time ?out",),
        N_(
            "NPU network traffic does not get through between the machines: a ping from one to another gets no answer."
        ),
        N_(
            "`hccn_tool -i N -ping -g address OTHER_DEVICE_IP` must answer between all NPUs. Check addresses, netmask "
            "and gateway (`-ip -g`, `-gateway -g`), the link (`-link -g`), and VLAN and routes on the switch; HCCL "
            "does not use the network of the hosts for its data."
        ),
        kind=Kind.MACHINE,
        confidence=0.91,
        in_warnings=True,
        reported_late=True,  # pinged by hand, after it had failed
        source=SOURCE,
        needs=("hccl_connect_timeout",),
        explains=("hccl_connect_timeout",),
    ),
    Symptom(
        "hccl_link_down",
        (
            cann("EI0010")
            + "|"
            + returned("507904")
            + "|"
            + hccl_returned("23")
            + "|Communication_Error_P2P",
            r"P2P communication failed|enable p2p .{0,20}(?:time ?out|fail)",
        ),
        N_("Two NPUs of one machine could not open a direct connection (P2P)[[ (rank {rank})]]."),
        _LINK_FIX,
        kind=Kind.VAGUE,
        confidence=0.75,
        source=SOURCE,
    ),
    Symptom(
        "hccl_link_down",
        (
            cann("EI0013", "EI0018"),
            r"[Ee]rror cqe(?: status| Occurred|\b.{0,20}abort)|(?:status\[|Error )ERROR CQE"
            r"|retransmission .{0,30}exceed|HCCL OP RETRY FAILED",
        ),
        N_(
            "An NPU's network packets were not answered although it sent them again and again[[ (rank {rank})]]: the "
            "link "
            "broke, or the process at the other end had ended before."
        ),
        N_(
            "First see whether the process at the other end failed earlier: pass its log and `dmesg` too. If it did "
            "not, "
            "the network did: look for link flaps with `hccn_tool -i N -link_stat -g` and `-optical -g` at both ends "
            "and "
            "on the switch (flow control, PFC); HCCL_RDMA_TIMEOUT and HCCL_RDMA_RETRY_CNT bridge short interruptions."
        ),
        kind=Kind.PEER_LOST,
        reported_late=True,
        confidence=0.87,
        source=SOURCE,
        explains=("peer_died",),
    ),
    Symptom(
        "collective_timeout",
        (
            cann("EI0002", "EE1002", "E30008"),
            r"The wait execution of the Notify register times out|hccl fftsplus task timeout occurred"
            r"|timeout occurs when the Notify register waits|Communication_Error_Timeout",
            returned(r"5070(?:4[678]|12)") + "|" + returned(r"1070(?:19|20)"),
            r"\[TaskExecStage\]\[Timeout\]|execution of the internal task times out"
            r"|[Ss]tream synchroniz\w+ time(?:d )?out",
            r"HCCL[Ww]atchdog.*timeout|Watchdog caught collective operation timeout: WorkHCCL|reason=\[(?:task"
            r"|stream sync|event sync) timeout",
            r"[Nn]otify wait (?:time ?out|error)|Stuck Occurred|status\[STUCK\]",
        ),
        N_(
            "A collective operation between NPUs timed out[[ on rank {rank}]]: another rank did not send what this one "
            "waited for. This is what the others see when one has died, hangs or is slow."
        ),
        TIMEOUT_FIX,
        more_fix=N_("HCCL's own limit is HCCL_EXEC_TIMEOUT (1836 s by default)."),
        kind=Kind.TIMEOUT,
        confidence=0.84,
        in_warnings=True,
        source=SOURCE,
        restart_cures=True,
    ),
    Symptom(
        "peer_died",
        (
            r"Heartbeat Lost Occurred|(?<![\d])[1-9]\d* abnormal device\(s\)"
            r"|HCCL heartbeat (?:lost|event)|status\[LOST\]",
            r"crimer rank \[(?P<peer>[^\]]+)\] status\[(?!STUCK|ERROR)",
            returned("507057") + "|" + hccl_returned("21"),
        ),
        N_(
            "HCCL lost the heartbeat of another process[[ ({peer})]]: that process ended or its machine or link went "
            "down."
            "[[ Rank {rank} only noticed it.]]"
        ),
        N_(
            "Read the log of the process that was lost (its address and NPU are in the evidence line) around that "
            "time, "
            "and `dmesg -T | grep -i -E 'oom|killed'` on its machine: out of host memory is the usual reason. If it "
            "was a "
            "one-off, start the same command again: the run resumes from its last checkpoint."
        ),
        kind=Kind.PEER_LOST,
        reported_late=True,
        confidence=0.86,
        in_warnings=True,
        source=SOURCE,
        restart_cures=True,
    ),
    Symptom(
        "peer_died",
        (r"SUSPECT REMOTE ERROR|\bFORCE STOP\b",),
        N_(
            "This process was stopped because a device or a process elsewhere had failed[[; rank {rank} only noticed "
            "it]]."
        ),
        N_(
            "The reason is in the logs of the other ranks and nodes, or of what manages the cluster: pass them all to "
            "one `diagnose`, and look for the earliest error."
        ),
        confidence=0.87,
        source=SOURCE,
        kind=Kind.PEER_LOST,
        reported_late=True,
        restart_cures=True,
    ),
)
