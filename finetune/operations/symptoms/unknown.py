"""A failure that no rule knows: said as such, with the lines that show it."""

from __future__ import annotations

from finetune.operations.symptoms.base import Kind, Symptom

_EXPLANATION = {
    "en": "The run failed[[ on rank {rank}]], and no rule knows this message: {line}",
    "zh": "运行失败[[(rank {rank})]],没有规则认识这条信息:{line}",
}
_FIX = {
    "en": "Read the traceback above the first evidence line: its last frame in your own files is where to look. Look at "
    "the logs of the other ranks too, all given to one `diagnose`.",
    "zh": "查看第一条证据行上方的 traceback,最后一个属于自己代码的栈帧就是出错位置。也请把其他 rank 的日志一起交给 `diagnose`。",
}
UNEXPLAINED = Symptom("unknown", (), _EXPLANATION, _FIX, Kind.UNEXPLAINED, 0.3)
ENDED_BADLY = Symptom("unknown", (), _EXPLANATION, _FIX, Kind.AFTERMATH, 0.2)
# The package's own errors say what, where and fix themselves.
SAID_BY_RUN = Symptom(
    "explained_by_run",
    (),
    {
        "en": "The run refused or stopped and said why: {said}[[ ({said_where})]]",
        "zh": "运行拒绝执行或已停止,并说明了原因:{said}[[({said_where})]]",
    },
    {"en": "{said_fix}", "zh": "{said_fix}"},
    confidence=0.8,
)
