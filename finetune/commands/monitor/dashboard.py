"""The monitor's picture of a run, for a terminal of any size: what is on it and where; with and
without Unicode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    RenderableType,
    RenderResult,
)
from rich.layout import Layout
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from finetune.config.kinds import KINDS
from finetune.plain_text import plain_text
from finetune.runs.event_texts import (
    advice,
    format_duration,
    message_text,
    preference_texts,
    state_text,
)
from finetune.runs.step_table import Points
from finetune.runs.text_chart import averaged, bar, sparkline, text_chart, value_range
from finetune.runs.view import Message, RunView, is_finite_number
from finetune.runtime.host import HostUse
from finetune.runtime.language import N_, _
from finetune.runtime.smi import SmiDevice, SmiReport

DIFFICULTY_COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red")
STATE_COLORS = {
    "waiting": "dim",
    "running": "green",
    "done": "green",
    "failed": "red",
    "stopped": "yellow",
    "vanished": "red",
}
SILENT_AFTER_SECONDS = 120.0  # longer than most steps, evaluations and saves
TALL, WIDE = 20, 76  # a terminal below these gets the short form
PRINTED_ROWS = 32
# Numbers of the last step, the most wanted first; the first two have curves.
STEP_NUMBERS = (
    ("loss", N_("loss"), "{:.4f}"),
    ("tokens_per_second", N_("tok/s"), "{:,.0f}"),
    ("mfu", N_("MFU"), "{:.1%}"),
    ("learning_rate", N_("learning rate"), "{:.3g}"),
    ("grad_norm", N_("gradient norm"), "{:.3f}"),
    ("samples_per_second", N_("samples/s"), "{:,.1f}"),
    ("step_seconds", N_("time per step"), "{:.3f} s"),
    ("loader_wait_seconds", N_("data wait"), "{:.3f} s"),
)


@dataclass(frozen=True)
class Machine:
    """What the monitor knows about the machine it runs on."""

    host: HostUse | None = None
    devices: Sequence[SmiReport] = ()

    @property
    def each_device(self) -> list[SmiDevice]:
        return [device for report in self.devices for device in report.devices]


@dataclass(frozen=True)
class Dashboard:
    """A rich renderable of a run."""

    view: RunView
    machine: Machine
    note: str = ""  # a line for the foot, such as the keys
    fill: bool = True  # whether to take the whole height of the terminal

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, console.size.height if self.fill else PRINTED_ROWS
        head: list[RenderableType] = [
            self._title(options.ascii_only),
            self._progress(),
            *self._stage(),
        ]
        short = height < TALL or width < WIDE
        layout = Layout()
        layout.split_column(
            Layout(Group(*head), size=len(head)),
            *(self._short(height, len(head)) if short else self._long(width, height)),
            Layout(one_line(Text(self.note, "dim")), size=1, visible=bool(self.note)),
        )
        yield from console.render(layout, options.update(height=height))

    def _long(self, width: int, height: int) -> list[Layout]:
        view = self.view
        middle: list[tuple[str, list[RenderableType], int]] = []
        if view.sources:
            middle.append((_("sources"), [self._losses("source_", view.sources)], 4))
        if view.difficulties:
            middle.append((_("difficulties"), [self._losses("", view.difficulties)], 4))
        middle.append((_("last step"), [self._last_step()], 3 if width >= 96 else 4))
        middle.append((_("this machine"), self._gauges(max(3, height // 4)), 4))
        # Curves get what the rest leaves; the rest gets less on a low terminal.
        rows = min(max(3, height // 4), max(_row_count(parts) for _title, parts, _share in middle))
        messages = self._messages(max(1, height // 7))
        curves, tables = Layout(minimum_size=5), Layout(size=rows + 2)
        curves.split_row(
            *(_panel(self._curve_title(number), self._curve(number)) for number in (0, 1))
        )
        tables.split_row(
            *(Layout(_panel(title, Group(*parts)), ratio=share) for title, parts, share in middle)
        )
        return [
            curves,
            tables,
            Layout(_panel(_("warnings"), Group(*messages)), size=len(messages) + 2),
        ]

    def _short(self, height: int, head_rows: int) -> list[Layout]:
        facts = [self._step_facts()[:5], self._machine_facts()]
        below = [one_line(Text("  ").join(fact(*each) for each in line)) for line in facts if line]
        below += self._messages(2 if height >= 12 else 1)
        rows = height - head_rows - len(below) - bool(self.note)
        return [Layout(self._curve(0), visible=rows >= 3), Layout(Group(*below), size=len(below))]

    # ------------------------------------------------------------------ head

    def _title(self, ascii_only: bool) -> Table:
        view = self.view
        source = plain_text(str(view.source))
        name = Text.assemble((" finetune ", "bold reverse"), "  ", (source, "bold"))
        if view.kind:
            title = _(KINDS[view.kind].title) if view.kind in KINDS else view.kind
            name.append(f"  {plain_text(title)}", "dim")
        dot = "* " if ascii_only else "● "
        state = Text.assemble((dot, STATE_COLORS[view.state]), state_text(view))
        if view.elapsed_seconds is not None:
            state.append(f"  {format_duration(view.elapsed_seconds)}", "dim")
        if view.silent_seconds > SILENT_AFTER_SECONDS:
            silent = _("nothing written for {time}")
            silent = silent.format(time=format_duration(view.silent_seconds))
            state.append(f"  {silent}", "yellow")
        return grid([(name, state)], stretching=0)

    def _progress(self) -> Table:
        view, total = self.view, self.view.total_steps
        done = view.step / total if total else 0.0
        right = Text(f"{done:>5.0%}")
        if view.eta_seconds and view.state == "running":
            eta = _("ETA {time}").format(time=format_duration(view.eta_seconds))
            right.append(f"  {eta}", "bold")
        step = f"{view.step:,} / {total:,}" if total else f"{view.step:,}"
        left = _("step {step}").format(step=step)
        return grid([(f" {left} ", Progress(done), right)], stretching=1)

    def _stage(self) -> list[Text]:
        name, stage = self.view.stage_name, self.view.stage
        if not name:
            return []
        text = Text(" " + _("stage {stage}").format(stage=name) + "  ")
        shares = stage.shares if stage else {}
        for number, (name, share) in enumerate(shares.items()):
            text.append(f"{plain_text(str(name))} ", _color(number)).append(f"{share:.0%}  ")
        return [one_line(text)]

    # ------------------------------------------------------------------ the last steps

    def _curve(self, number: int) -> Curve:
        form, color = (("{:.3f}", "cyan"), ("{:,.0f}", "green"))[number]
        return Curve(self.view.values(STEP_NUMBERS[number][0]), form, color)

    def _curve_title(self, number: int) -> Text:
        field_name, name, form = STEP_NUMBERS[number]
        points, evaluated = self.view.values(field_name), self.view.evaluated()
        value = f" {form.format(points[-1][1])}" if points else ""
        title = Text.assemble((_(name) + value, "bold"))
        if number == 0 and evaluated:
            step, loss = evaluated[-1]
            title.append(
                "  " + _("eval {loss} @ {step}").format(loss=f"{loss:.4f}", step=f"{step:,}"), "dim"
            )
        return title

    def _step_facts(self) -> list[tuple[str, str]]:
        """Name and value of the numbers of the last step."""
        view = self.view
        last = view.steps.last
        facts = [
            (_(name), form.format(last[field]))
            for field, name, form in STEP_NUMBERS
            if is_finite_number(last.get(field))
        ]
        facts[2:2] = preference_texts(view)
        if "mfu" in last and last["mfu"] is None:
            facts.append((_("MFU"), _("unknown")))
        if bits := view.evaluated("eval_bpb"):
            facts.append((_("bits per byte"), f"{bits[-1][1]:.4f}"))
        if match := view.evaluated("eval_exact_match"):
            facts.append((_("exact match"), f"{match[-1][1]:.1%}"))
        saved = f"@ {view.checkpoint.get('step')}" if view.checkpoint else _("none yet")
        return [*facts, (_("checkpoint"), saved)]

    def _last_step(self) -> Table:
        above = [_(name) for _field, name, _form in STEP_NUMBERS[:2]]
        facts = [(name, value) for name, value in self._step_facts() if name not in above]
        return grid([(Text(name, "dim"), value) for name, value in facts], stretching=0, right=[1])

    def _losses(self, prefix: str, names: Sequence[str]) -> Table:
        """Show share and loss by difficulty or, if `prefix` is that of their fields, by source."""
        head = ("", _("share"), _("loss"), "")
        rows: list[Sequence[RenderableType]] = [[Text(title, "dim") for title in head]]
        for number, name in enumerate(names):
            losses = self.view.values(f"{prefix}loss/{name}").y
            share = self.view.steps.last.get(f"{prefix}share/{name}")
            color = _color(number)
            rows.append(
                (
                    Text(plain_text(name), color),
                    f"{share:.0%}" if is_finite_number(share) else "–",
                    f"{losses[-1]:.4f}" if len(losses) else "–",
                    Sparkline(losses, color),
                )
            )
        return grid(rows, stretching=3, right=[1, 2])

    # ------------------------------------------------------------------ this machine

    def _gauges(self, most_rows: int) -> list[RenderableType]:
        host, devices = self.machine.host, self.machine.each_device
        rows: list[Sequence[RenderableType]] = []
        if host is not None:
            if host.cpu_share is not None:
                cores = _("of {count}").format(count=f"{host.cores:g}")
                cpu = Gauge(host.cpu_share, alarming=False)
                rows.append((Text("CPU", "dim"), cpu, f"{host.cpu_share:.0%} {cores}"))
            used, total = host.memory_used_bytes / 2**30, host.memory_total_bytes / 2**30
            memory = f"{used:.1f}/{total:.1f} GiB"
            rows.append((Text(_("memory"), "dim"), Gauge(_memory_share(host)), memory))
        room = max(1, most_rows - len(rows))
        shown = devices if len(devices) <= room else devices[: room - 1]
        for device in shown:
            share = (device.used_bytes or 0) / device.total_bytes if device.total_bytes else 0.0
            rows.append((Text(plain_text(device.label), "dim"), Gauge(share), _device_text(device)))
        parts: list[RenderableType] = [grid(rows, stretching=1)] if rows else []
        if len(devices) > len(shown):
            hidden = _("and {count} more devices").format(count=len(devices) - len(shown))
            parts.append(Text(hidden, "dim"))
        for report in self.machine.devices:
            if report.problem:
                parts.append(Text(plain_text(report.problem), "yellow"))
        if not devices:
            parts.append(Text(_("no accelerator here"), "dim"))
        return parts

    def _machine_facts(self) -> list[tuple[str, str]]:
        host, facts = self.machine.host, []
        if host is not None:
            if host.cpu_share is not None:
                facts.append(("CPU", f"{host.cpu_share:.0%}"))
            facts.append((_("memory"), f"{_memory_share(host):.0%}"))
        return facts + [(device.label, _device_text(device)) for device in self.machine.each_device]

    # ------------------------------------------------------------------ messages

    def _messages(self, count: int) -> list[Text]:
        """Return the last warnings, the error that ended the run, and what to do; at least one
        line.
        """
        lines = [_message_line(message) for message in self.view.messages]
        if error := self.view.status.get("error"):
            lines.append(_message_line(Message(None, "ERROR", 0, str(error))))
        if to_do := advice(self.view):
            lines.append(Text(to_do))
        return [one_line(line) for line in lines[-count:]] or [Text(_("no warnings"), "dim")]


def _message_line(message: Message) -> Text:
    line = Text()
    if message.time is not None:
        line.append(time.strftime("%H:%M:%S ", time.localtime(message.time)), "dim")
    line.append(f"{message.level} ", "red" if message.level == "ERROR" else "yellow")
    if message.rank:
        line.append(f"rank {message.rank} ", "dim")
    return line.append(message_text(message))


def _panel(title: str | Text, inner: RenderableType) -> Panel:
    return Panel(
        inner,
        title=title,
        title_align="left",
        border_style="dim",
        padding=(0, 1),
    )


def _row_count(parts: Sequence[RenderableType]) -> int:
    return sum(part.row_count if isinstance(part, Table) else 1 for part in parts)


def _color(number: int) -> str:
    return DIFFICULTY_COLORS[number % len(DIFFICULTY_COLORS)]


def _memory_share(host: HostUse) -> float:
    return host.memory_used_bytes / max(1, host.memory_total_bytes)


def _device_text(device: SmiDevice) -> str:
    parts = []
    if device.total_bytes is not None and device.used_bytes is not None:
        parts.append(f"{device.used_bytes / 2**30:.0f}/{device.total_bytes / 2**30:.0f} GiB")
    if device.utilization_percent is not None:
        parts.append(f"{device.utilization_percent:3.0f}%")
    if device.temperature_celsius is not None:
        parts.append(f"{device.temperature_celsius:.0f}°C")
    return "  ".join(parts) or plain_text(device.health)


# ---------------------------------------------------------------- parts that fit the room they get


class _Stretching:
    """A renderable that takes the available width, and can be as narrow as necessary."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, options.max_width)


@dataclass(frozen=True)
class Curve(_Stretching):
    """A curve with its highest and lowest value and its first and last step."""

    points: Points
    form: str
    color: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = options.height or 6
        points = averaged(self.points, max(1, options.max_width - 6))
        low, high = (self.form.format(value) for value in value_range(points))
        if not points:
            low = high = ""
        margin = max(len(low), len(high))
        width = max(1, options.max_width - margin - 1)
        has_axis = rows >= 4
        lines = text_chart(points, width, rows - has_axis, unicode=not options.ascii_only)
        labels = [high, *[""] * (len(lines) - 2), low]
        for label, line in zip(labels, lines, strict=False):
            yield Text.assemble((f"{label:>{margin}} ", "dim"), (line, self.color))
        if has_axis and self.points:
            first, last = f"{self.points[0][0]:,}", f"{self.points[-1][0]:,}"
            gap = max(1, width - len(first) - len(last))
            axis = f"{'':>{margin}} {first}{' ' * gap}{last}"
            yield Text(
                axis,
                style="dim",
                no_wrap=True,
                overflow="crop",
            )


@dataclass(frozen=True)
class Sparkline(_Stretching):
    """The course of some values in one line."""

    values: np.ndarray
    color: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = sparkline(self.values, options.max_width, unicode=not options.ascii_only)
        yield Text(line, self.color)


@dataclass(frozen=True)
class Gauge(_Stretching):
    """A share as a bar; empty if the bar would be too narrow to read.

    Attributes:
        alarming: whether a share near 1 is a bad sign, as it is for memory but not for a CPU.
    """

    share: float
    alarming: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        color = "green"
        if self.alarming and self.share > 0.85:
            color = "red" if self.share > 0.95 else "yellow"
        if options.max_width >= 3:
            yield Text(bar(self.share, options.max_width, unicode=not options.ascii_only), color)


@dataclass(frozen=True)
class Progress(_Stretching):
    """The share of the run that is done, as a thin line."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        done, left = "#." if options.ascii_only else "━─"
        filled = round(min(self.share, 1.0) * options.max_width)
        yield Text.assemble((done * filled, "cyan"), (left * (options.max_width - filled), "dim"))


def grid(
    rows: Sequence[Sequence[RenderableType]], *, stretching: int, right: Sequence[int] = ()
) -> Table:
    """Return a table without lines; each row is one line on the screen.

    Args:
        rows: cells of each, as many in every row. Of a line that is too long the right end is cut.
        stretching: the column that gets the room that is left, and gives way first.
        right: columns that are flush right.
    """
    table = Table.grid(padding=(0, 1), expand=True)
    for column, cells in enumerate(zip(*rows, strict=True)):
        is_stretching = column == stretching
        is_last = column == len(rows[0]) - 1
        width = max(cell_len(str(cell)) for cell in cells)
        table.add_column(
            no_wrap=True,
            justify="right" if column in right else "left",
            min_width=None if is_last or is_stretching else width,
            ratio=1 if is_stretching else None,
        )
    for row in rows:
        table.add_row(*row)
    return table


def one_line(text: Text) -> Text:
    """Return a text that is cut rather than wrapped."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def fact(name: str, value: str) -> Text:
    """Return a value with its name before it."""
    return Text.assemble((f"{name} ", "dim"), value)
