"""`python -m finetune monitor [RUN | --log FILE]`: how a run goes, for a second terminal. Reads
only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar, NoReturn

from rich.console import Console
from rich.live import Live

from finetune.commands.monitor.dashboard import Dashboard, Machine
from finetune.config.fields import Text, setting
from finetune.config.options import SpokenOptions, read_options
from finetune.errors import ExitCode
from finetune.plain_text import plain_text
from finetune.runs.console_lines import print_anything
from finetune.runs.event_texts import (
    advice,
    format_duration,
    message_text,
    preference_texts,
    ranked_text,
    state_text,
)
from finetune.runs.reader import Reader, open_run
from finetune.runs.view import ENDED, Message, RunView, is_finite_number
from finetune.runtime.host import HostMeter
from finetune.runtime.language import _, speaking
from finetune.runtime.smi import SmiDevice, SmiReport, read_devices
from finetune.runtime.terminal import console as terminal_console
from finetune.storage.durable_files import format_bytes

SHORTEST_INTERVAL_SECONDS = 0.2
KEY_POLL_SECONDS = 0.1
JSON_MESSAGES = 20

option = partial(setting, group="options")


class MonitorOptions(SpokenOptions):
    usage: ClassVar[str] = (
        "python -m finetune monitor [RUN | --log FILE] [--interval SECONDS] [--once] [--json]"
    )
    summary: ClassVar[str] = (
        "Show how a run goes: progress, curves, difficulties, memory, devices, warnings. q quits."
        " Into a pipe or a\nfile it writes a line whenever a step is logged, and ends when the run"
        " does."
    )
    epilog: ClassVar[str] = "Exit code: 0; 2 there is no such run or file."
    positional: ClassVar[tuple[str, ...]] = ("run",)

    run: Text | None = option(
        None, unit="RUN", shown_default="the newest in ./runs", description="The run's folder."
    )
    log: Text | None = option(
        None, unit="FILE", description="A copy of a run's console, where its folder is not at hand."
    )
    interval: float = option(
        3.0, unit="seconds", ge=SHORTEST_INTERVAL_SECONDS, description="Time between two looks."
    )
    once: bool = option(False, description="Look once and leave.")

    def problems(self) -> list[tuple[str, str]]:
        if self.run is not None and self.log is not None:
            return [("both a run and --log were given", "give one of them")]
        return []


class MachineWatch:
    """This machine and its devices. Drivers can take seconds to answer, so a thread queries them.

    Args:
        interval_seconds: between two questions to the drivers; None asks once, in this thread.
    """

    def __init__(self, interval_seconds: float | None) -> None:
        self._host = HostMeter()
        self._host.look()  # CPU use is counted from here
        self._devices: Sequence[SmiReport] = read_devices() if interval_seconds is None else ()
        if interval_seconds is not None:
            threading.Thread(
                target=self._watch, args=(interval_seconds,), name="devices", daemon=True
            ).start()
        else:
            time.sleep(SHORTEST_INTERVAL_SECONDS)

    def _watch(self, interval_seconds: float) -> None:
        while True:
            self._devices = read_devices()
            if not self._devices:
                return  # no driver is installed, and none will be
            time.sleep(interval_seconds)

    def look(self) -> Machine:
        return Machine(self._host.look(), self._devices)


# ---------------------------------------------------------------- forms


def to_json(view: RunView, machine: Machine) -> dict[str, Any]:
    """Return a snapshot as JSON-serializable values, with English strings.

    Its form is public (tests/frozen/monitor.txt).
    """
    stage, evaluation = view.stage, None
    if view.evaluations:
        facts = view.evaluations[-1].items()
        evaluation = {name: value for name, value in facts if name not in ("event", "time")}
    with speaking("en"):
        warnings = [
            {
                "time": message.time,
                "level": message.level,
                "rank": message.rank,
                "text": message_text(message),
            }
            for message in view.messages[-JSON_MESSAGES:]
        ]
    return {
        "run": str(view.source),
        "kind": view.kind or None,
        "state": view.state,
        "step": view.step,
        "total_steps": view.total_steps,
        "eta_seconds": view.eta_seconds,
        "elapsed_seconds": view.elapsed_seconds,
        "silent_seconds": view.silent_seconds,
        "stage": stage and asdict(stage),
        "last": view.steps.last or None,
        "evaluation": evaluation,
        "checkpoint": view.checkpoint.get("name"),
        "error": view.status.get("error"),
        "exit_code": view.status.get("exit_code"),
        "host": None if machine.host is None else asdict(machine.host),
        "devices": [
            {"type": report.device_type, **_device(device)}
            for report in machine.devices
            for device in report.devices
        ],
        "warnings": warnings,
    }


def _device(device: SmiDevice) -> dict[str, Any]:
    facts = asdict(device)
    del facts["label"], facts["processes"]
    return facts


def plain_line(view: RunView, machine: Machine) -> str:
    """Return a run in a line of text."""
    parts = [state_text(view)] if view.state != "running" else []
    total = view.total_steps
    if total or view.steps:
        step = f"{view.step:,}/{total:,} ({view.step / total:.0%})" if total else f"{view.step:,}"
        parts.append(_("step {step}").format(step=step))
    if view.stage_name:
        parts.append(_("stage {stage}").format(stage=view.stage_name))
    parts += _numbers(view)
    if view.state == "running" and view.eta_seconds is not None:
        parts.append(_("ETA {time}").format(time=format_duration(view.eta_seconds)))
    if machine.host is not None:
        host = machine.host
        used, most = format_bytes(host.memory_used_bytes), format_bytes(host.memory_total_bytes)
        parts.append(_("memory {used}/{total}").format(used=used, total=most))
    for device in machine.each_device:
        if device.used_bytes is not None and device.total_bytes:
            parts.append(f"{device.label} {device.used_bytes / device.total_bytes:.0%}")
    return "  ".join(parts)


def _numbers(view: RunView) -> list[str]:
    """Return the metrics of the last step and the last evaluation."""
    last = view.steps.last
    parts = []
    if is_finite_number(last.get("loss")):
        parts.append(_("loss {loss}").format(loss=f"{last['loss']:.4f}"))
    for field, names in (("loss", view.difficulties), ("source_loss", view.sources)):
        for name in names:
            loss = last.get(f"{field}/{name}")
            if is_finite_number(loss):
                parts.append(f"{plain_text(name)} {loss:.4f}")
    if evaluated := view.evaluated():
        step, loss = evaluated[-1]
        parts.append(_("eval {loss} @ {step}").format(loss=f"{loss:.4f}", step=f"{step:,}"))
    if match := view.evaluated("eval_exact_match"):
        parts.append(_("exact match {share}").format(share=f"{match[-1][1]:.1%}"))
    parts += [f"{name} {text}" for name, text in preference_texts(view)]
    if is_finite_number(last.get("tokens_per_second")):
        parts.append(f"{last['tokens_per_second']:,.0f} tok/s")
    if is_finite_number(last.get("mfu")):
        parts.append(f"MFU {last['mfu']:.1%}")
    return parts


def message_line(message: Message) -> str:
    return f"[{message.level}] {ranked_text(message)}"


# ---------------------------------------------------------------- ways to watch


def _watch_lines(reader: Reader, watch: MachineWatch, interval_seconds: float) -> None:
    """A line whenever there is something new, until the run has ended."""
    printed: set[str] = set()
    before = None
    while True:
        view = reader.poll()
        for message in view.messages:
            line = message_line(message)
            if f"{message.time} {line}" not in printed:
                printed.add(f"{message.time} {line}")
                print(line, flush=True)
        now = (view.state, view.step)
        if now != before:
            before = now
            print(f"{time.strftime('%H:%M:%S')}  {plain_line(view, watch.look())}", flush=True)
        if view.state in ENDED:
            _print_end(view)
            return
        time.sleep(interval_seconds)


def _print_end(view: RunView) -> None:
    if error := view.status.get("error"):
        print(f"[ERROR] {plain_text(str(error))}")
    if to_do := advice(view):
        print(f"[INFO] {to_do}", flush=True)


def _watch_json(reader: Reader, watch: MachineWatch, interval_seconds: float) -> None:
    while True:
        view = reader.poll()
        print(json.dumps(to_json(view, watch.look()), ensure_ascii=False), flush=True)
        if view.state in ENDED:
            return
        time.sleep(interval_seconds)


def _watch_screen(
    reader: Reader, watch: MachineWatch, interval_seconds: float, console: Console, note: str
) -> None:
    """Show the dashboard until `q`; it stays when the run has ended, because the run may be
    resumed.
    """
    with (
        _single_keys() as key,
        Live(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stderr=False,
            redirect_stdout=False,
        ) as live,
    ):
        due, size = 0.0, console.size
        while True:
            if time.monotonic() >= due or console.size != size:
                due, size = time.monotonic() + interval_seconds, console.size
                live.update(Dashboard(reader.poll(), watch.look(), note), refresh=True)
            if key() in ("q", "Q", "\x03"):
                return


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[], str]]:
    """Keys without Enter, as a function that waits a moment and returns one or "". The terminal is
    put back.
    """

    def no_key() -> str:
        time.sleep(KEY_POLL_SECONDS)
        return ""

    if not sys.stdin.isatty():
        yield no_key
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def key() -> str:
        if select.select([descriptor], [], [], KEY_POLL_SECONDS)[0]:
            pressed = os.read(descriptor, 16).decode("ascii", "replace")
            return pressed[:1] or "q"  # nothing to read: the terminal is gone
        return ""

    tty.setcbreak(descriptor)
    try:
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _leave(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)  # so that the terminal is put back on the way


def _look_once(reader: Reader, watch: MachineWatch, console: Console | None, as_json: bool) -> None:
    """`console`: None if it is no terminal."""
    view, machine = reader.poll(), watch.look()
    if as_json:
        print(json.dumps(to_json(view, machine), ensure_ascii=False))
    elif console is not None:
        console.print(Dashboard(view, machine, fill=False))
    else:
        print(f"{plain_text(str(view.source))}  {plain_line(view, machine)}")
        for message in view.messages:
            print(message_line(message))
        _print_end(view)


# ---------------------------------------------------------------- command


def main(argv: Sequence[str] | None = None) -> int:
    """Watch a run. 0; 2: refused."""
    print_anything()
    options = read_options(MonitorOptions, argv)
    reader = open_run(options.run, options.log, may_come=not options.once)
    note = " " + _("q quit")
    if options.run is None and options.log is None:
        newest = _("{run}: the run in {folder} that wrote last").format(
            run=reader.view.source, folder="runs"
        )
        note = f"{note}    {newest}"
        print(newest, file=sys.stderr)
    watch = MachineWatch(None if options.once else options.interval)
    console = terminal_console()
    pictures = console.is_terminal and not console.is_dumb_terminal
    if options.once:
        _look_once(reader, watch, console if pictures else None, options.as_json)
        return int(ExitCode.DONE)
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        if options.as_json:
            _watch_json(reader, watch, options.interval)
        elif pictures:
            _watch_screen(reader, watch, options.interval, console, note)
        else:
            _watch_lines(reader, watch, options.interval)
    return int(ExitCode.DONE)
