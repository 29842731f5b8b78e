"""The rules of `diagnose`, one per symptom, and what a failure is called that no rule knows."""

from __future__ import annotations

from finetune.operations.symptoms import memory, unknown
from finetune.operations.symptoms.base import Kind, Symptom
from finetune.operations.symptoms.unknown import ENDED_BADLY, UNEXPLAINED

__all__ = ["ENDED_BADLY", "RESTART_CURES", "SYMPTOMS", "UNEXPLAINED", "Kind", "Symptom"]

SYMPTOMS: tuple[Symptom, ...] = (*memory.SYMPTOMS,)

# Causes that starting the same command again can cure: what went away comes back, or our runs start smaller.
RESTART_CURES = frozenset(
    {
        "collective_timeout",
        "device_oom",
        "hccl_connect_timeout",
        "peer_died",
        "port_in_use",
        "preempted",
        "rendezvous_timeout",
    }
)
