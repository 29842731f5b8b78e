"""A plan as text."""

from __future__ import annotations

from typing import Any

from finetune.planning.plan import Plan
from finetune.planning.workload import GIB, PHASES, STEP, Location
from finetune.runtime.language import N_, _

KINDS = {
    "weights": N_("weights"),
    "gradients": N_("gradients"),
    "optimizer": N_("optimizer"),
    "live": N_("live set"),
    "activations": N_("activations"),
    "logits": N_("logits"),
    "buffers": N_("buffers"),
    "loader": N_("loader, data"),
    "framework": N_("framework"),
    "load": N_("loading"),
    "save": N_("saving"),
}
PHASE_NAMES = {
    "load": N_("loading weights"),
    "gather": N_("gathering weights"),
    "rows": N_("forward and backward"),
    "reduce": N_("summing gradients"),
    "update": N_("update"),
    "save": N_("checkpoint"),
    "result": N_("writing the result"),
}
LOCATION_NAMES: dict[Location, str] = {
    "device": N_("each device"),
    "host": N_("each process, host"),
}
FITS = {
    True: N_("fits"),
    False: N_("does not fit"),
    None: "?",
}
VERDICTS = {
    True: N_("it fits"),
    False: N_("it does not fit"),
    None: N_("not judged"),
}


def plan_text(plan: Plan) -> str:
    """Return the whole plan."""
    lines = [_head(plan), "", *_memory(plan), "", *_step(plan)]
    if plan.data is not None:
        lines.append(_data(plan.data))
    if plan.choices:
        lines += ["", *_choices(plan)]
    for text in plan.advice:
        lines += ["", _("advice: {text}").format(text=text)]
    return "\n".join([*lines, "", _verdict(plan)])


def gib(number: int | None) -> str:
    """GiB with two digits behind the point."""
    return "?" if number is None else f"{number / GIB:,.2f} GiB"


def _head(plan: Plan) -> str:
    work, cluster = plan.memory.work, plan.cluster
    shape, checkpointing = work.shape, work.computing.checkpointing
    sizes = f"{shape.total / 1e9:,.2f} B"
    if shape.idle:
        sizes += _(" ({active:,.2f} B of them for each token)").format(
            active=(shape.total - shape.idle) / 1e9
        )
    return _(
        "{model}, {sizes} parameters, {trained:,.1f} M of them trained, on {nodes} x {devices}"
        " {device}; sharding: {sharding}\n{bits}-bit compute, microbatches of {tokens:,} tokens,"
        " {count} of them a step and device, {checkpointing}"
    ).format(
        model=shape.model_type,
        sizes=sizes,
        trained=work.trained / 1e6,
        nodes=cluster.nodes,
        devices=cluster.devices_per_node,
        device=cluster.device_name or cluster.device_type,
        sharding=work.sharding.name,
        bits=8 * work.computing.element_bytes,
        tokens=work.microbatch_tokens,
        count=work.microbatches,
        checkpointing=_("checkpointing on") if checkpointing else _("checkpointing off"),
    )


def _memory(plan: Plan) -> list[str]:
    lines = []
    for location, title in LOCATION_NAMES.items():
        terms = [term for term in plan.memory.terms if term.location == location]
        if not terms:
            continue
        lines.append(f"{_(title)}:")
        for term in sorted(terms, key=lambda term: -term.bytes):
            named = ", ".join(_(PHASE_NAMES[phase]) for phase in term.phases)
            phases = "" if set(STEP) <= set(term.phases) else f" [{named}]"
            text = f"{_(KINDS[term.kind])}: {term.formula}{phases}  ({term.source})"
            lines.append(f"  {gib(term.bytes):>13}  {text}")
        worst = max(PHASES, key=lambda phase: plan.memory.in_phase(location, phase))
        most = _("most: {phase}").format(phase=_(PHASE_NAMES[worst]))
        lines.append(f"  {gib(plan.memory.in_phase(location, worst)):>13}  {most}")
    lines.append(_("each host: {size}").format(size=gib(plan.memory.node())))
    if plan.expected_memory:
        lines.append(
            _("expected of each device with this preset: {size}").format(size=plan.expected_memory)
        )
    return lines


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:,.3g} s"


def _step(plan: Plan) -> list[str]:
    time, largest = plan.time, plan.largest_micro_batch
    speed, computing = "?", _("compute")
    if time.shortest and time.longest:
        slow, fast = plan.step_tokens / time.longest, plan.step_tokens / time.shortest
        speed = f"{slow:,.0f} - {fast:,.0f} tok/s"
    lines = [
        _("a step: {tokens:,} tokens, {shortest} - {longest}, {speed}").format(
            tokens=plan.step_tokens,
            shortest=_seconds(time.shortest),
            longest=_seconds(time.longest),
            speed=speed,
        ),
        f"  {computing}: {_seconds(time.compute)};"
        f" {plan.computed_flops_per_token / 1e9:,.2f} GFLOP/token"
        f" ({plan.flops_per_token / 1e9:,.2f} progress)  (PaLM, appendix B; a frozen matrix counts"
        " 4 of 6)",
    ]
    if plan.cluster.device_type != "cpu" and plan.cluster.peak_flops is None:
        lines.append(
            _(
                "  the peak of {name} is not known: give --peak-tflops, or its name (910B3, H100)"
            ).format(name=plan.cluster.device_name or "the device")
        )
    for name, seconds, traffic in (
        (_("network"), time.network, plan.network),
        (_("to and from the host"), time.host, plan.host),
    ):
        source = f"  ({traffic.source})" if traffic.source else ""
        moved = f"{gib(traffic.bytes)}: {traffic.formula}{source}"
        lines.append(f"  {name}: {_seconds(seconds)}; {moved}")
    if largest is not None:
        each = plan.memory.work.sample_tokens
        text = _("largest microbatch that fits: {tokens:,} tokens ({count} x {each:,})")
        lines.append(text.format(tokens=largest * each, count=largest, each=each))
    return lines


def _data(data: dict[str, Any]) -> str:
    text = _(
        "training data: {tokens:,} tokens, {windows:,} windows ({window_kind}), {cut:.1%} of the"
        " tokens cut; a pass is {steps_per_pass:,.1f} steps"
    )
    return text.format(cut=data["cut_tokens"] / data["tokens"], **data)


def _choices(plan: Plan) -> list[str]:
    lines = [_("ways to shard it:")]
    names = (_("device"), _("host"), _("network/step"), _("host/step"))
    width = max([40, *(len(choice.sharding.name) for choice in plan.choices)])
    for choice in plan.choices:
        cells = (choice.device_bytes, choice.node_bytes, choice.network_bytes, choice.host_bytes)
        numbers = "  ".join(
            f"{name} {gib(value):>11}" for name, value in zip(names, cells, strict=True)
        )
        lines.append(f"  {choice.sharding.name:<{width}} {numbers}  {_(FITS[choice.fits])}")
    return lines


def _verdict(plan: Plan) -> str:
    memory, cluster = plan.memory, plan.cluster
    return _(
        "{verdict}: device / host {device} / {host}; there is {device_memory} / {host_memory}, "
        "92% of it counted as usable"
    ).format(
        verdict=_(VERDICTS[plan.fits]),
        device=gib(memory.device()),
        host=gib(memory.node()),
        device_memory=gib(cluster.device_memory_bytes),
        host_memory=gib(cluster.host_memory_bytes),
    )
