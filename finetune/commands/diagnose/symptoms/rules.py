"""All rules of `diagnose`, and those for failures that no rule knows or that the run explains
itself.
"""

from __future__ import annotations

from collections import defaultdict

from finetune.commands.diagnose.symptoms import (
    ascend,
    cann,
    checkpoints,
    cuda,
    data,
    deepspeed,
    environment,
    hccl,
    hccl_links,
    launching,
    memory,
    model,
    nccl,
    network,
    npu_devices,
    packages,
    places,
    processes,
    programs,
    servers,
    trainers,
)
from finetune.commands.diagnose.symptoms.base import SHORTEST_WORD, Kind, Symptom, fixed_words
from finetune.runtime.language import N_

_GROUPS = (
    memory,
    network,
    processes,
    ascend,
    hccl,
    hccl_links,
    cann,
    npu_devices,
    nccl,
    cuda,
    data,
    model,
    checkpoints,
    deepspeed,
    environment,
    packages,
    programs,
    trainers,
    servers,
    launching,
)
SYMPTOMS: tuple[Symptom, ...] = tuple(symptom for group in _GROUPS for symptom in group.SYMPTOMS)

_EXPLANATION = N_("The run failed[[ on rank {rank}]], and no rule knows this message: {line}")
_FIX = N_(
    "Read the traceback above the first evidence line: look at its last frame in your own files. Pass the logs of all "
    "ranks and nodes to one `diagnose`: another rank may tell more."
)
UNEXPLAINED = Symptom("unknown", (), _EXPLANATION, _FIX, kind=Kind.UNEXPLAINED, confidence=0.3)
ENDED_BADLY = Symptom("unknown", (), _EXPLANATION, _FIX, kind=Kind.CASCADE, confidence=0.2)
# A log whose last line is the beginning of one that it wrote often.
BROKEN_OFF = Symptom(
    "unknown",
    (),
    N_(
        "The log breaks off in the middle of a line, and nothing in it says why: the process still runs, or it was "
        "ended together with what wrote its log (SIGKILL, the machine or its disk gone)."
    ),
    N_(
        "See whether it still runs (`ps`, `squeue`, `kubectl get pod`). If not: `dmesg -T | tail`, the scheduler's "
        "record (`sacct -j JOB`, `kubectl describe pod`), `df -h` where the log lies, and the logs of the other ranks "
        "and nodes."
    ),
    kind=Kind.CASCADE,
    confidence=0.2,
)
# An error of this package that no other rule knows: it says itself what is wrong, where, and what
# to do.
EXPLAINED_BY_RUN = Symptom(
    "explained_by_run",
    (),
    N_("The run refused to start or stopped, and reported why: {error}[[ ({error_where})]]"),
    "{error_fix}",
    confidence=0.85,
    source="this package",
)

_ALL = (*SYMPTOMS, trainers.BAD_RECORD, *places.PLACES, EXPLAINED_BY_RUN, UNEXPLAINED)
CAUSES: tuple[str, ...] = tuple(dict.fromkeys(symptom.cause for symptom in _ALL))
RESTART_CURES = frozenset(symptom.cause for symptom in _ALL if symptom.restart_cures)

# Words of all rules by their first characters, each with the numbers of its rules: few lines hold
# any.
_START = SHORTEST_WORD
_WORDS: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
_MATCHED = (*SYMPTOMS, processes.INTERRUPTED)
for _number, _symptom in enumerate(_MATCHED):
    for _word in {word for pattern in _symptom.patterns for word in fixed_words(pattern)}:
        _WORDS[_word[:_START]][_word].append(_number)


def possible(lowered: str) -> list[Symptom]:
    """The rules of which a word is in a line (in lower case), in the order of `SYMPTOMS`."""
    starts = _WORDS.keys() & {lowered[at : at + _START] for at in range(len(lowered) - _START + 1)}
    numbers = {
        n
        for start in starts
        for word, found in _WORDS[start].items()
        if word in lowered
        for n in found
    }
    return [_MATCHED[number] for number in sorted(numbers)]
