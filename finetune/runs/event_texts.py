"""What a run's events and states mean, for people, in the spoken language."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from finetune.plain_text import plain_text
from finetune.runs.view import Message, RunView, is_finite_number
from finetune.runtime.language import N_, _
from finetune.storage.durable_files import format_bytes

# Events that a person should see while the run is working.
WARNING_EVENTS = ("skipped_checkpoint", "spike", "nonfinite", "oom", "signal")
# The same in a rank's log: shown from there too, it would stand twice.
_IN_A_LOG = re.compile(
    r"step \d+(: loss .* is a spike| was skipped: loss or gradients| ran out of memory)|stopped by"
    r" \S+ at step"
)

EVENTS = {
    "start": N_("started at step {step} of {total_steps} on {world_size} x {device_type}, {dtype}"),
    "execution": N_("chosen for this machine: {reason}"),
    "resume": N_("resumed from {checkpoint}"),
    "skipped_checkpoint": N_("{name} was skipped: {why}"),
    "eval": N_("step {step}: validation loss {eval_loss}"),
    "early_stop": N_(
        "step {step}: no better evaluation in the last {evaluations}, the run ends; the best was at"
        " step {best_step}"
    ),
    "sample": N_("step {step}: samples written"),
    "checkpoint": N_("{name} saved, {size}"),
    "spike": N_("step {step}: loss {loss} is a spike; events.jsonl has the ids of its records"),
    "nonfinite": N_(
        "step {step} was skipped: NaN or inf in loss or gradients; a lower --learning-rate or"
        " bfloat16 helps"
    ),
    "oom": N_("step {step} ran out of memory: {old} -> {new}, same training"),
    "signal": N_("step {step}: {name} asked for the stop"),
    "end": N_("ended: {state}, exit code {exit_code}"),
}
_EVALUATION_WITH_ANSWERS = N_(
    "step {step}: validation loss {eval_loss}, exact match {eval_exact_match}"
)
# What runs on preferences log, and with `eval_` in front their evaluations: field, name, form.
PREFERENCE_NUMBERS = (
    ("accuracy", N_("accuracy"), "{:.1%}"),
    ("margin", N_("margin"), "{:.3f}"),
    ("chosen_reward", N_("chosen reward"), "{:.3f}"),
    ("rejected_reward", N_("rejected reward"), "{:.3f}"),
    ("reference_point", N_("reference point"), "{:.3f}"),
)
STATES = {
    "waiting": N_("before its first step"),
    "running": N_("running"),
    "done": N_("done"),
    "failed": N_("failed"),
    "stopped": N_("stopped"),
    "vanished": N_("gone"),
}
ADVICE = {
    "vanished": N_(
        "its process is gone without a word: start the same command again to resume from"
        " {checkpoint}"
    ),
    "stopped": N_("start the same command again to resume from {checkpoint}"),
}


def event_text(event: dict[str, Any]) -> str:
    """Return an event as a sentence. An unknown event, or one that lacks a field, shows its fields
    as they are.
    """
    facts = dict(event)
    if isinstance(facts.get("size_bytes"), int):
        facts["size"] = format_bytes(facts["size_bytes"])
    facts |= {name: f"{value:.4f}" for name, value in facts.items() if isinstance(value, float)}
    known = _EVALUATION_WITH_ANSWERS if "eval_exact_match" in event else EVENTS.get(event["event"])
    if known is not None:
        with contextlib.suppress(KeyError):
            return _(known).format_map(facts)
    rest = ", ".join(
        f"{name} {value}" for name, value in event.items() if name not in ("event", "time")
    )
    return f"{event['event']}: {rest}"


def preference_texts(view: RunView) -> list[tuple[str, str]]:
    """Names and values of `PREFERENCE_NUMBERS` in the last step and, behind it, the last
    evaluation.
    """
    found = []
    for field, name, form in PREFERENCE_NUMBERS:
        texts = []
        trained, evaluated = view.steps.last.get(field), view.evaluated(f"eval_{field}")
        if is_finite_number(trained):
            texts.append(form.format(trained))
        if evaluated:
            texts.append(_("eval {value}").format(value=form.format(evaluated[-1][1])))
        if texts:
            found.append((_(name), ", ".join(texts)))
    return found


def message_text(message: Message) -> str:
    """Return the text of a message, without control characters."""
    return plain_text(message.text if message.event is None else event_text(message.event))


def ranked_text(message: Message) -> str:
    """Return a message after the rank that wrote it, if that is not rank 0."""
    rank = f"rank {message.rank}: " if message.rank else ""
    return rank + message_text(message)


def is_event_in_log(text: str) -> bool:
    """Return whether a line of a rank's log repeats an event."""
    return _IN_A_LOG.match(text) is not None


def state_text(view: RunView) -> str:
    """Return the state of a run."""
    return _(STATES[view.state])


def advice(view: RunView) -> str:
    """Return how to continue a run that has not finished; empty if nothing is to be done."""
    checkpoint = view.checkpoint.get("name", _("the start"))
    return _(ADVICE[view.state]).format(checkpoint=checkpoint) if view.state in ADVICE else ""


def format_duration(seconds: float) -> str:
    """`75` -> `1:15`; `3700` -> `1:01:40`; `100000` -> `1d 3:46:40`."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    return f"{days}d {clock}" if days else clock
