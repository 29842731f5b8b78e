"""The monitor's words in both languages."""

from __future__ import annotations

from finetune.runs.view import RunView
from finetune.runtime.language import Language

WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "waiting": "before its first step",
        "running": "running",
        "done": "done",
        "failed": "failed",
        "stopped": "stopped",
        "vanished": "gone",
        "silent": "nothing written for {time}",
        "step": "step",
        "eta": "ETA",
        "stage": "stage",
        "loss": "loss",
        "validation": "eval",
        "tokens_per_second": "tok/s",
        "samples_per_second": "samples/s",
        "learning_rate": "learning rate",
        "grad_norm": "gradient norm",
        "step_seconds": "time per step",
        "loader_wait_seconds": "data wait",
        "mfu": "MFU",
        "eval_bpb": "bits per byte",
        "checkpoint": "checkpoint",
        "none": "none yet",
        "unknown": "unknown",
        "now": "last step",
        "machine": "this machine",
        "levels": "levels",
        "level": "level",
        "share": "share",
        "messages": "warnings",
        "no_warnings": "no warnings",
        "memory": "memory",
        "cores": "of {count} cores",
        "no_devices": "no accelerator here",
        "more_devices": "and {count} more devices",
        "keys": " q quit",
        "newest": "{run}: the run in {folder} that wrote last",
        "hint_vanished": "its process is gone without a word: start the same command again to go on from {checkpoint}",
        "hint_stopped": "start the same command again to go on from {checkpoint}",
        "the_start": "the start",
    },
    "zh": {
        "waiting": "尚未完成第一步",
        "running": "运行中",
        "done": "已完成",
        "failed": "失败",
        "stopped": "已停止",
        "vanished": "进程已不在",
        "silent": "已有 {time} 没有写入",
        "step": "步数",
        "eta": "剩余",
        "stage": "阶段",
        "loss": "损失",
        "validation": "验证",
        "tokens_per_second": "tok/s",
        "samples_per_second": "样本/秒",
        "learning_rate": "学习率",
        "grad_norm": "梯度范数",
        "step_seconds": "每步用时",
        "loader_wait_seconds": "等待数据",
        "mfu": "MFU",
        "eval_bpb": "每字节比特",
        "checkpoint": "检查点",
        "none": "暂无",
        "unknown": "未知",
        "now": "最近一步",
        "machine": "本机",
        "levels": "难度级别",
        "level": "级别",
        "share": "占比",
        "messages": "警告",
        "no_warnings": "没有警告",
        "memory": "内存",
        "cores": "共 {count} 核",
        "no_devices": "本机没有加速卡",
        "more_devices": "另有 {count} 个设备",
        "keys": " q 退出",
        "newest": "{run}:{folder} 中最近写入的训练",
        "hint_vanished": "进程已不在且没有留下结束记录:重新运行同一命令,将从 {checkpoint} 继续",
        "hint_stopped": "重新运行同一命令即可从 {checkpoint} 继续",
        "the_start": "开头",
    },
}


def format_duration(seconds: float) -> str:
    """`75` -> `1:15`; `3700` -> `1:01:40`; `100000` -> `1d 3:46:40`."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    return f"{days}d {clock}" if days else clock


def way_on(view: RunView, language: Language) -> str:
    """What to do about a run that has not come to its end; empty where nothing is to be done."""
    hint = WORDS[language].get(f"hint_{view.state}")
    saved = view.of("checkpoint")
    return hint.format(checkpoint=saved[-1].get("name") if saved else WORDS[language]["the_start"]) if hint else ""
