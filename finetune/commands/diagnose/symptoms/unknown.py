"""Failures that no rule knows, and those that the run explains itself."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import Text

_EXPLANATION: Text = {
    "en": "The run failed[[ on rank {rank}]], and no rule knows this message: {line}",
    "zh": "运行失败[[(rank {rank})]],没有规则认识这条信息:{line}",
}
_FIX: Text = {
    "en": "Read the traceback above the first evidence line: its last frame in your own files is where to look. Give "
    "the logs of all ranks and nodes to one `diagnose`: another rank may say more.",
    "zh": "查看第一条证据行上方的 traceback,最后一个属于自己代码的栈帧就是出错位置。请把所有 rank、"
    "节点的日志交给同一次 `diagnose`:别的 rank 可能有更多信息。",
}
UNEXPLAINED = Symptom("unknown", (), _EXPLANATION, _FIX, Kind.UNEXPLAINED, 0.3)
ENDED_BADLY = Symptom("unknown", (), _EXPLANATION, _FIX, Kind.AFTERMATH, 0.2)
# An error of this package that no other rule knows: it says itself what is wrong, where, and what to do.
SAID_BY_RUN = Symptom(
    "explained_by_run",
    (),
    {
        "en": "The run refused or stopped and said why: {said}[[ ({said_where})]]",
        "zh": "运行拒绝执行或中止,并已说明原因:{said}[[({said_where})]]",
    },
    {"en": "{said_fix}", "zh": "{said_fix}"},
    Kind.ROOT,
    0.85,
    source="this package",
)
