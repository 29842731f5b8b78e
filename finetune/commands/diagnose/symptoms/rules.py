"""All rules of `diagnose`, and what a failure is called that no rule knows."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms import ascend, cuda, data, deepspeed, environment, memory, model, network
from finetune.commands.diagnose.symptoms.base import Symptom
from finetune.commands.diagnose.symptoms.unknown import ENDED_BADLY, SAID_BY_RUN, UNEXPLAINED

__all__ = ["CAUSES", "ENDED_BADLY", "RESTART_CURES", "SAID_BY_RUN", "SYMPTOMS", "UNEXPLAINED"]

_GROUPS = (memory, network, ascend, cuda, data, model, deepspeed, environment)
SYMPTOMS: tuple[Symptom, ...] = tuple(symptom for group in _GROUPS for symptom in group.SYMPTOMS)
CAUSES: tuple[str, ...] = tuple(dict.fromkeys(s.cause for s in (*SYMPTOMS, SAID_BY_RUN, UNEXPLAINED)))

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
