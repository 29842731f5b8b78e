"""The monitor's words in both languages."""

from __future__ import annotations

from finetune.operations.language import Language

WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "sft": "fine-tuning",
        "pretrain": "pretraining",
        "waiting": "has not taken a step yet",
        "running": "running",
        "done": "done",
        "failed": "failed",
        "stopped": "stopped, and can go on",
        "vanished": "its process is gone; start it again to go on",
        "silent": "nothing written for {time}",
        "step": "step",
        "eta": "ETA",
        "stage": "stage",
        "loss": "loss",
        "validation": "validation",
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
        "end": "the run has ended: {state}",
    },
    "zh": {
        "sft": "微调",
        "pretrain": "预训练",
        "waiting": "尚未完成第一步",
        "running": "运行中",
        "done": "已完成",
        "failed": "失败",
        "stopped": "已停止,可继续",
        "vanished": "进程已不在;重新启动即可继续",
        "silent": "已有 {time} 没有写入",
        "step": "步",
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
        "end": "训练已结束:{state}",
    },
}


def format_duration(seconds: float) -> str:
    """`75` -> `1:15`; `3700` -> `1:01:40`; `100000` -> `1d 3:46:40`."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    return f"{days}d {clock}" if days else clock
