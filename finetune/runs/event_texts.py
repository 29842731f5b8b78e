"""What events mean, in words, in both languages."""

from __future__ import annotations

import re
from typing import Any

from finetune.runtime.language import Language, Text

# Events that a person should see while the run goes on.
WARNING_EVENTS = ("skipped_checkpoint", "spike", "nonfinite", "oom", "signal")
# The same said in a rank's log: there it would come twice.
_SAID_TWICE = re.compile(
    r"step \d+(: loss .* is a spike| was skipped: loss or gradients| ran out of memory)|stopped by \S+ at step"
)

_TEXTS: dict[str, Text] = {
    "start": {
        "en": "started at step {step} of {total_steps} on {world_size} x {device_type}, {dtype}",
        "zh": "从第 {step} 步开始(共 {total_steps} 步),{world_size} x {device_type},{dtype}",
    },
    "resume": {"en": "goes on from {checkpoint}", "zh": "从 {checkpoint} 继续"},
    "skipped_checkpoint": {"en": "{name} was passed over: {why}", "zh": "跳过 {name}:{why}"},
    "eval": {"en": "step {step}: validation loss {eval_loss}", "zh": "第 {step} 步:验证损失 {eval_loss}"},
    "sample": {"en": "step {step}: samples written", "zh": "第 {step} 步:已生成样例"},
    "checkpoint": {"en": "{name} saved, {size}", "zh": "已保存 {name},{size}"},
    "spike": {
        "en": "step {step}: loss {loss} is a spike; events.jsonl has the rows",
        "zh": "第 {step} 步:损失 {loss} 突增;对应的数据行见 events.jsonl",
    },
    "nonfinite": {
        "en": "step {step} was skipped: NaN or inf in loss or gradients; a lower --learning-rate or bfloat16 helps",
        "zh": "第 {step} 步被跳过:损失或梯度出现 NaN/inf;可降低 --learning-rate 或使用 bfloat16",
    },
    "oom": {
        "en": "step {step} ran out of memory: {old} -> {new}, same training",
        "zh": "第 {step} 步内存不足:{old} -> {new},训练结果不变",
    },
    "signal": {"en": "step {step}: {name} asked for the stop", "zh": "第 {step} 步:收到 {name},准备停止"},
    "end": {"en": "ended: {state}, exit code {exit_code}", "zh": "结束:{state},退出码 {exit_code}"},
}


def event_text(event: dict[str, Any], language: Language) -> str:
    """An event as a sentence. One that is not known, or that lacks a field, shows its fields as they are."""
    from finetune.storage.durable_files import format_bytes

    facts = dict(event)
    if isinstance(facts.get("size_bytes"), int):
        facts["size"] = format_bytes(facts["size_bytes"])
    facts |= {name: f"{value:.4f}" for name, value in facts.items() if isinstance(value, float)}
    try:
        return _TEXTS[event["event"]][language].format_map(facts)
    except KeyError:
        rest = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "time"))
        return f"{event['event']}: {rest}"


def is_said_by_event(text: str) -> bool:
    """Whether a line of a rank's log tells what an event tells as well."""
    return _SAID_TWICE.match(text) is not None
