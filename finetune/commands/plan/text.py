"""A plan as text, in both languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.planning.memory import PHASES, STEP, Place
from finetune.runtime.language import Language, Text

if TYPE_CHECKING:
    from finetune.planning.plan import Plan

GIB = 2**30
KINDS: dict[str, Text] = {
    "weights": {"en": "weights", "zh": "权重"},
    "gradients": {"en": "gradients", "zh": "梯度"},
    "optimizer": {"en": "optimizer", "zh": "优化器状态"},
    "live": {"en": "live set", "zh": "当前聚合的参数"},
    "activations": {"en": "activations", "zh": "激活"},
    "logits": {"en": "logits", "zh": "logits"},
    "buffers": {"en": "buffers", "zh": "缓冲区"},
    "loader": {"en": "loader, data", "zh": "数据加载"},
    "framework": {"en": "framework", "zh": "框架"},
    "load": {"en": "loading", "zh": "加载模型"},
    "save": {"en": "saving", "zh": "保存"},
}
PHASE_NAMES: dict[str, Text] = {
    "load": {"en": "loading", "zh": "加载"},
    "gather": {"en": "gathering weights", "zh": "收集权重"},
    "rows": {"en": "forward and backward", "zh": "前向与反向"},
    "reduce": {"en": "summing gradients", "zh": "归约梯度"},
    "update": {"en": "update", "zh": "更新"},
    "save": {"en": "checkpoint", "zh": "检查点"},
    "result": {"en": "writing the result", "zh": "写出结果"},
}
PLACES: dict[Place, Text] = {
    "device": {"en": "each device", "zh": "每个设备"},
    "host": {"en": "each process, host", "zh": "每个进程（主机）"},
}


def draw(plan: Plan, language: Language) -> str:
    """The whole plan."""
    lines = [*_head(plan, language), "", *_memory(plan, language), "", *_step(plan, language)]
    if plan.choices:
        lines += ["", *_choices(plan, language)]
    for text in plan.advice:
        lines += ["", f"{'建议' if language == 'zh' else 'advice'}: {text[language]}"]
    return "\n".join([*lines, "", _verdict(plan, language)])


def gib(number: int | None) -> str:
    """GiB with one or two digits behind the point."""
    return "?" if number is None else f"{number / GIB:,.2f} GiB"


def _head(plan: Plan, language: Language) -> list[str]:
    work, cluster = plan.memory.work, plan.cluster
    device = f"{cluster.device_name or cluster.device_type}"
    sizes = f"{work.shape.total / 1e9:,.2f} B"
    trained = f"{work.trained / 1e6:,.1f} M"
    dtype = f"{8 * work.computing.element_bytes}"
    rows = f"{work.microbatch_tokens:,}"
    if language == "zh":
        return [
            f"模型 {work.shape.model_type}：参数 {sizes}，训练 {trained}；{cluster.nodes} 台 x "
            f"{cluster.devices_per_node} 个 {device}；切分：{work.sharding.name}；{dtype} 位计算；"
            f"每行 {rows} 个 token，每步 {work.rows} 行；检查点重计算：{'开' if work.computing.checkpointing else '关'}"
        ]
    return [
        f"{work.shape.model_type}, {sizes} parameters, {trained} of them trained, on {cluster.nodes} x "
        f"{cluster.devices_per_node} {device}; sharding: {work.sharding.name}",
        f"{dtype}-bit compute, rows of {rows} tokens, {work.rows} rows a step and device, checkpointing "
        f"{'on' if work.computing.checkpointing else 'off'}",
    ]


def _memory(plan: Plan, language: Language) -> list[str]:
    lines = []
    for place, title in PLACES.items():
        terms = sorted((t for t in plan.memory.terms if t.place == place), key=lambda term: -term.bytes)
        if not terms:
            continue
        lines.append(f"{title[language]}:")
        for term in terms:
            named = ", ".join(PHASE_NAMES[phase][language] for phase in term.phases)
            phases = "" if set(STEP) <= set(term.phases) else f" [{named}]"
            lines.append(
                f"  {gib(term.bytes):>13}  {KINDS[term.kind][language]}: {term.formula}{phases}  ({term.source})"
            )
        worst = max(PHASES, key=lambda phase: plan.memory.in_phase(place, phase))
        most = "最多" if language == "zh" else "most"
        lines.append(f"  {gib(plan.memory.in_phase(place, worst)):>13}  {most}: {PHASE_NAMES[worst][language]}")
    lines.append(f"{'每台主机' if language == 'zh' else 'each host'}: {gib(plan.memory.node())}")
    if plan.guide_memory:
        name = "指南预期每设备" if language == "zh" else "the guide expects of each device"
        lines.append(f"{name}: {plan.guide_memory}")
    return lines


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:,.3g} s"


def _step(plan: Plan, language: Language) -> list[str]:
    time, traffic = plan.time, plan.traffic
    shortest, longest = time.shortest, time.longest
    speed = "?"
    if shortest and longest:
        speed = f"{plan.step_tokens / longest:,.0f} - {plan.step_tokens / shortest:,.0f} tok/s"
    head = "一步" if language == "zh" else "a step"
    words = ("计算", "网络", "主机往返") if language == "zh" else ("compute", "network", "host")
    lines = [
        f"{head}: {plan.step_tokens:,} tokens, {_seconds(shortest)} - {_seconds(longest)}, {speed}",
        f"  {words[0]}: {_seconds(time.compute)}; {plan.computed_flops_per_token / 1e9:,.2f} GFLOP/token "
        f"({plan.flops_per_token / 1e9:,.2f} progress)  (PaLM, appendix B; a frozen matrix counts 4 of 6)",
        f"  {words[1]}: {_seconds(time.network)}; {gib(traffic.network_bytes)}: {traffic.network_formula}"
        + (f"  ({traffic.network_source})" if traffic.network_source else ""),
        f"  {words[2]}: {_seconds(time.host)}; {gib(traffic.host_bytes)}: {traffic.host_formula}"
        + (f"  ({traffic.host_source})" if traffic.host_source else ""),
    ]
    if plan.largest_micro_batch is not None:
        tokens = plan.largest_micro_batch * plan.memory.work.longest
        said = "放得下的最大行" if language == "zh" else "largest rows that fit"
        lines.append(f"{said}: {tokens:,} tokens ({plan.largest_micro_batch} x {plan.memory.work.longest:,})")
    return lines


def _choices(plan: Plan, language: Language) -> list[str]:
    lines = ["切分方式对比：" if language == "zh" else "ways to shard it:"]
    names = (
        ("设备", "主机", "网络/步", "主机往返/步")
        if language == "zh"
        else ("device", "host", "network/step", "host/step")
    )
    mark: dict[bool | None, Text] = {
        True: {"en": "fits", "zh": "放得下"},
        False: {"en": "does not fit", "zh": "放不下"},
        None: {"en": "?", "zh": "?"},
    }
    for choice in plan.choices:
        cells = (choice.device_bytes, choice.node_bytes, choice.traffic.network_bytes, choice.traffic.host_bytes)
        numbers = "  ".join(f"{name} {gib(value):>11}" for name, value in zip(names, cells, strict=True))
        lines.append(f"  {choice.sharding.name:<40} {numbers}  {mark[choice.fits][language]}")
    return lines


def _verdict(plan: Plan, language: Language) -> str:
    there = f"{gib(plan.cluster.device_memory_bytes)} / {gib(plan.cluster.host_memory_bytes)}"
    need = f"{gib(plan.memory.device())} / {gib(plan.memory.node())}"
    words: dict[bool | None, Text] = {
        True: {"en": "it fits", "zh": "放得下"},
        False: {"en": "it does not fit", "zh": "放不下"},
        None: {"en": "not judged", "zh": "未判断"},
    }
    of = "设备 / 主机" if language == "zh" else "device / host"
    has, usable = ("共有", "按 92% 可用计") if language == "zh" else ("there is", "92% of it counted as usable")
    return f"{words[plan.fits][language]}: {of} {need}; {has} {there}, {usable}"
