"""The monitor's picture of a run, for a terminal of any size: what is on it and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from finetune.commands.monitor.dashboard_parts import Bar, Chart, Fixed, Spark, side_by_side
from finetune.commands.monitor.texts import WORDS, format_duration, way_on
from finetune.config.kinds import kind_title
from finetune.runs.console_lines import plain_text
from finetune.runs.event_texts import event_text
from finetune.runs.view import Message, RunView
from finetune.runtime.host import HostUse
from finetune.runtime.language import Language
from finetune.runtime.smi import SmiDevice, SmiReport

DIFFICULTY_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
STATE_COLOURS = {
    "waiting": "dim", "running": "green", "done": "green", "failed": "red", "stopped": "yellow", "vanished": "red"
}  # fmt: skip
SILENT_AFTER_SECONDS = 120.0  # longer than most steps, evaluations and saves
TALL, WIDE = 20, 76  # a terminal below these gets the short form


@dataclass(frozen=True)
class Machine:
    """What the monitor knows of the machine it runs on."""

    host: HostUse | None = None
    devices: Sequence[SmiReport] = field(default=())


@dataclass(frozen=True)
class Picture:
    """A rich renderable of a run.

    Attributes:
        note: a line for the foot, such as the keys.
        fill: whether to take the whole height of the terminal.
    """

    view: RunView
    machine: Machine
    language: Language
    note: str = ""
    fill: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unicode = (options.encoding or "").lower().startswith("utf")
        width, height = options.max_width, (console.size.height if self.fill else 32)
        small = height < TALL or width < WIDE
        parts = self._small(width, height, unicode) if small else self._large(width, height, unicode)
        yield Group(*parts)

    # ------------------------------------------------------------------ the two forms

    def _large(self, width: int, height: int, unicode: bool) -> list[RenderableType]:
        words, view = WORDS[self.language], self.view
        head = self._head(width, unicode)
        columns = [
            (words["now"], self._now(), 3 if width >= 96 else 4),
            (words["machine"], self._machine(unicode, max(3, height // 4)), 4),
        ]
        if view.difficulties:
            columns.insert(0, (words["levels"], self._difficulties(unicode), 4))
        # Charts get what the rest leaves; the rest gets less on a low terminal.
        middle_rows = min(max(3, height // 4), max(_line_count(rows) for _, rows, _ in columns))
        messages = max(1, min(height // 7, len(self._said()) + bool(way_on(view, self.language))))
        chart_rows = height - len(head) - (middle_rows + 2) - (messages + 2) - 2 - bool(self.note)
        charts = [
            (self._title("loss", "loss", "{:.4f}"), Chart(view.values("loss"), "{:.3f}", "cyan", unicode)),
            (
                self._title("tokens_per_second", "tokens_per_second", "{:,.0f}"),
                Chart(view.values("tokens_per_second"), "{:,.0f}", "green", unicode),
            ),
        ]
        frame = box.ROUNDED if unicode else box.ASCII
        return [
            *head,
            side_by_side([(title, chart, 1) for title, chart in charts], max(4, chart_rows), frame),
            side_by_side([(title, Group(*rows), share) for title, rows, share in columns], middle_rows, frame),
            Panel(
                Group(*self._messages(messages)), title=words["messages"], title_align="left", box=frame,
                border_style="dim", height=messages + 2, padding=(0, 1),
            ),
            *([Text(self.note, style="dim", no_wrap=True)] if self.note else []),
        ]  # fmt: skip

    def _small(self, width: int, height: int, unicode: bool) -> list[RenderableType]:
        view = self.view
        head = self._head(width, unicode)
        facts = Text("  ").join(_fact(name, value) for name, value in self._facts()[:5])
        host = Text("  ").join(self._machine_words())
        below = [facts, host] if host.plain else [facts]
        messages = 2 if height >= 12 else 1
        rows = height - len(head) - len(below) - messages - bool(self.note)
        chart = Chart(view.values("loss"), "{:.3f}", "cyan", unicode)
        for line in below:
            line.no_wrap, line.overflow = True, "ellipsis"
        parts: list[RenderableType] = list(head)
        if rows >= 3:
            parts.append(Fixed(chart, rows))
        return [
            *parts,
            *below,
            *self._messages(messages),
            *([Text(self.note, style="dim", no_wrap=True)] if self.note else []),
        ]

    # ------------------------------------------------------------------ parts

    def _head(self, width: int, unicode: bool) -> list[RenderableType]:
        words, view = WORDS[self.language], self.view
        name = Text.assemble((" finetune ", "bold reverse"), "  ", (plain_text(str(view.source)), "bold"))
        if view.kind:
            name.append(f"  {plain_text(kind_title(view.kind))}", "dim")
        state = Text.assemble((("● " if unicode else "* "), STATE_COLOURS[view.state]), words[view.state])
        if view.elapsed_seconds is not None:
            state.append(f"  {format_duration(view.elapsed_seconds)}", "dim")
        if view.silent_seconds > SILENT_AFTER_SECONDS:
            state.append(f"  {words['silent'].format(time=format_duration(view.silent_seconds))}", "yellow")
        total = view.total_steps
        done = view.step / total if total else 0.0
        said = Text(f" {words['step']} {view.step:,}" + (f" / {total:,}" if total else "") + "  ")
        right = Text(f"  {done:>4.0%}")
        if view.eta_seconds and view.state == "running":
            right.append(f"  {words['eta']} {format_duration(view.eta_seconds)}", "bold")
        room = max(4, width - said.cell_len - right.cell_len - 1)
        filled = round(min(done, 1.0) * room)
        line = ("━", "─") if unicode else ("#", ".")
        progress = Text.assemble(said, (line[0] * filled, "cyan"), (line[1] * (room - filled), "dim"), right)
        lines = [_spread(name, state, width), progress]
        if stage := self._stage():
            lines.append(stage)
        for text in lines:
            text.no_wrap, text.overflow = True, "ellipsis"
        return list(lines)

    def _stage(self) -> Text | None:
        words, view = WORDS[self.language], self.view
        stage = view.stage
        if stage is None:
            return Text(f" {words['stage']} {view.stage_text.removeprefix('stage ')}") if view.stage_text else None
        text = Text(f" {words['stage']} {stage.number}/{len(view.stages)}  ", style="")
        for number, (name, share) in enumerate(stage.shares.items()):
            text.append(f"{plain_text(str(name))} ", DIFFICULTY_COLOURS[number % len(DIFFICULTY_COLOURS)])
            text.append(f"{share:.0%}  ")
        return text

    def _title(self, name: str, field_name: str, form: str) -> Text:
        words, points = WORDS[self.language], self.view.values(field_name)
        title = Text.assemble((words[name], "bold"))
        if points:
            title.append(f" {form.format(points[-1][1])}", "bold")
        evaluated = self.view.evaluated()
        if name == "loss" and evaluated:
            step, loss = evaluated[-1]
            title.append(f"  {words['validation']} {loss:.4f} @ {step:,}", "dim")
        return title

    def _facts(self) -> list[tuple[str, str]]:
        """Name and value of the numbers of the last step, the most wanted first."""
        words, view = WORDS[self.language], self.view
        last = view.steps[-1] if view.steps else {}

        def said(name: str, form: str) -> tuple[str, str]:
            value = last.get(name)
            return words[name], form.format(value) if isinstance(value, (int, float)) else "–"

        facts = [said("loss", "{:.4f}"), said("tokens_per_second", "{:,.0f}")]
        if "mfu" in last:
            facts.append((words["mfu"], f"{last['mfu']:.1%}" if last["mfu"] is not None else words["unknown"]))
        facts += [said("learning_rate", "{:.3g}"), said("grad_norm", "{:.3f}"), said("samples_per_second", "{:,.1f}")]
        facts += [said("step_seconds", "{:.3f} s"), said("loader_wait_seconds", "{:.3f} s")]
        if bits := view.evaluated("eval_bpb"):
            facts.append((words["eval_bpb"], f"{bits[-1][1]:.4f}"))
        saved = view.of("checkpoint")
        facts.append((words["checkpoint"], f"@ {saved[-1].get('step')}" if saved else words["none"]))
        return [(name, value) for name, value in facts if value != "–"] or facts[:2]

    def _now(self) -> list[RenderableType]:
        return [_spread(Text(name, "dim"), Text(value), None) for name, value in self._facts()[2:]]

    def _difficulties(self, unicode: bool) -> list[RenderableType]:
        words, view = WORDS[self.language], self.view
        grid = Table.grid(padding=(0, 1), expand=True)
        for justify in ("left", "right", "right"):
            grid.add_column(justify=justify, no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True)
        grid.add_row(*(Text(words[name], "dim") for name in ("level", "share", "loss")), "")
        recent = view.steps[-1] if view.steps else {}
        for number, name in enumerate(view.difficulties):
            losses = [loss for _, loss in view.values(f"loss/{name}")]
            share = recent.get(f"share/{name}")
            grid.add_row(
                Text(plain_text(name), DIFFICULTY_COLOURS[number % len(DIFFICULTY_COLOURS)]),
                f"{share:.0%}" if isinstance(share, (int, float)) else "–",
                f"{losses[-1]:.4f}" if losses else "–",
                Spark(losses, DIFFICULTY_COLOURS[number % len(DIFFICULTY_COLOURS)], unicode),
            )
        return [Fixed(grid, len(view.difficulties) + 1)]

    def _machine(self, unicode: bool, most: int) -> list[RenderableType]:
        words, host = WORDS[self.language], self.machine.host
        devices = [device for report in self.machine.devices for device in report.devices]
        names = ["CPU", words["memory"], *(device.label for device in devices)]
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True, min_width=max(map(cell_len, names)))
        grid.add_column(ratio=1, no_wrap=True)
        grid.add_column(no_wrap=True)
        if host is not None:
            if host.cpu_share is not None:
                cores = words["cores"].format(count=f"{host.cores:g}")
                grid.add_row(
                    Text("CPU", "dim"), Bar(host.cpu_share, unicode, alarming=False), f"{host.cpu_share:.0%} {cores}"
                )
            memory = f"{host.memory_used_bytes / 2**30:.1f}/{host.memory_total_bytes / 2**30:.1f} GiB"
            used = host.memory_used_bytes / max(1, host.memory_total_bytes)
            self._gauge(grid, words["memory"], used, memory, unicode)
        room = max(1, most - grid.row_count)
        for device in devices[: room if len(devices) <= room else room - 1]:
            self._gauge(grid, device.label, _used(device), _device_words(device), unicode)
        rows: list[RenderableType] = [Fixed(grid, grid.row_count)]
        if len(devices) > room:
            rows.append(Text(words["more_devices"].format(count=len(devices) - room + 1), "dim"))
        rows += [Text(plain_text(report.problem), "yellow") for report in self.machine.devices if report.problem]
        if not devices:
            rows.append(Text(words["no_devices"], "dim"))
        return rows

    def _gauge(self, grid: Table, name: str, share: float, words: str, unicode: bool) -> None:
        grid.add_row(Text(plain_text(name), "dim"), Bar(share, unicode), words)

    def _machine_words(self) -> list[Text]:
        host, words = self.machine.host, []
        if host is not None and host.cpu_share is not None:
            words.append(_fact("CPU", f"{host.cpu_share:.0%}"))
        if host is not None:
            words.append(
                _fact(WORDS[self.language]["memory"], f"{host.memory_used_bytes / host.memory_total_bytes:.0%}")
            )
        for report in self.machine.devices:
            words += [_fact(device.label, _device_words(device)) for device in report.devices]
        return words

    def _said(self) -> list[Message]:
        """Warnings, and the error that ended the run."""
        error = self.view.status.get("error")
        return [*self.view.messages, *([Message(None, "ERROR", 0, str(error))] if error else [])]

    def _messages(self, count: int) -> list[Text]:
        texts = [_message(message, self.language) for message in self._said()[-count:]]
        if hint := way_on(self.view, self.language):
            texts = [*texts, Text(hint)][-count:]
        if not texts:
            texts = [Text(WORDS[self.language]["no_warnings"], "dim")]
        texts += [Text("")] * (count - len(texts))
        for text in texts:
            text.no_wrap, text.overflow = True, "ellipsis"
        return texts


def _message(message: Message, language: Language) -> Text:
    from time import localtime, strftime

    text = message.text if message.event is None else event_text(message.event, language)
    said = Text()
    if message.time is not None:
        said.append(strftime("%H:%M:%S ", localtime(message.time)), "dim")
    said.append(f"{message.level} ", "red" if message.level == "ERROR" else "yellow")
    if message.rank:
        said.append(f"rank {message.rank} ", "dim")
    return said.append(plain_text(text))


def _line_count(rows: Sequence[RenderableType]) -> int:
    return sum(row.rows if isinstance(row, Fixed) else 1 for row in rows)


def _used(device: SmiDevice) -> float:
    return (device.used_bytes or 0) / device.total_bytes if device.total_bytes else 0.0


def _device_words(device: SmiDevice) -> str:
    said = []
    if device.total_bytes is not None and device.used_bytes is not None:
        said.append(f"{device.used_bytes / 2**30:.0f}/{device.total_bytes / 2**30:.0f} GiB")
    if device.utilization_percent is not None:
        said.append(f"{device.utilization_percent:3.0f}%")
    if device.temperature_celsius is not None:
        said.append(f"{device.temperature_celsius:.0f}°C")
    return "  ".join(said) or plain_text(device.health)


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), value)


def _spread(left: Text, right: Text, width: int | None) -> RenderableType | Text:
    """Left and right end of a line; the left gives way."""
    if width is not None:
        left.truncate(max(1, width - right.cell_len - 2), overflow="ellipsis", pad=True)
        return Text.assemble(left, " ", right)
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid
