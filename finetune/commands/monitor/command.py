"""`python -m finetune monitor [RUN | --log FILE]`: how a run goes, for a second terminal. Reads only."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from finetune.commands.monitor.texts import WORDS, format_duration, way_on
from finetune.errors import ConfigError, ExitCode
from finetune.runs.console_lines import plain_text, print_anything
from finetune.runs.event_texts import event_text
from finetune.runs.reader import Reader, open_run
from finetune.runs.view import ENDED, Message, RunView
from finetune.runtime.host import HostMeter
from finetune.runtime.language import Language, pick_language
from finetune.runtime.smi import SmiReport, read_devices
from finetune.storage.durable_files import format_bytes

if TYPE_CHECKING:
    from finetune.commands.monitor.dashboard import Machine

SHORTEST_INTERVAL_SECONDS = 0.2
KEY_POLL_SECONDS = 0.1
JSON_MESSAGES = 20


class MachineWatch:
    """This machine and its devices. The drivers' tools can take seconds, so a thread of its own asks them.

    Args:
        interval_seconds: between two questions to the tools; None asks once, in this thread.
    """

    def __init__(self, interval_seconds: float | None) -> None:
        self._host = HostMeter()
        self._host.look()  # the processor's use is counted from here
        self._devices: Sequence[SmiReport] = read_devices() if interval_seconds is None else ()
        if interval_seconds is not None:
            threading.Thread(target=self._watch, args=(interval_seconds,), name="devices", daemon=True).start()
        else:
            time.sleep(SHORTEST_INTERVAL_SECONDS)

    def _watch(self, interval_seconds: float) -> None:
        while True:
            self._devices = read_devices()
            if not self._devices:
                return  # no tool is installed, and none will be
            time.sleep(interval_seconds)

    def look(self) -> Machine:
        from finetune.commands.monitor.dashboard import Machine

        return Machine(self._host.look(), self._devices)


# ---------------------------------------------------------------- forms


def to_json(view: RunView, machine: Machine) -> dict[str, Any]:
    """One look as plain values; its form is public (tests/frozen/monitor.txt)."""
    stage, evaluations, saved = view.stage, view.evaluations, view.of("checkpoint")
    return {
        "run": str(view.source),
        "kind": view.kind or None,
        "state": view.state,
        "step": view.step,
        "total_steps": view.total_steps,
        "eta_seconds": view.eta_seconds,
        "elapsed_seconds": view.elapsed_seconds,
        "silent_seconds": view.silent_seconds,
        "stage": None if stage is None else {"number": stage.number, "of": len(view.stages), "shares": stage.shares},
        "last": view.steps[-1] if view.steps else None,
        "evaluation": {n: v for n, v in evaluations[-1].items() if n not in ("event", "time")} if evaluations else None,
        "checkpoint": saved[-1].get("name") if saved else None,
        "error": view.status.get("error"),
        "exit_code": view.status.get("exit_code"),
        "host": None if machine.host is None else asdict(machine.host),
        "devices": [
            {"type": report.device_type, **_device(device)} for report in machine.devices for device in report.devices
        ],
        "warnings": [
            {"time": m.time, "level": m.difficulty, "rank": m.rank, "text": _message_text(m, "en")}
            for m in view.messages[-JSON_MESSAGES:]
        ],
    }


def _device(device: Any) -> dict[str, Any]:
    names = ("index", "name", "health", "total_bytes", "used_bytes", "utilization_percent", "temperature_celsius")
    return {name: getattr(device, name) for name in names}


def _message_text(message: Message, language: Language) -> str:
    return plain_text(message.text if message.event is None else event_text(message.event, language))


def plain_line(view: RunView, machine: Machine, language: Language) -> str:
    """A run in a line of text."""
    words, last = WORDS[language], view.steps[-1] if view.steps else {}
    parts = [words[view.state]] if view.state != "running" else []
    if total := view.total_steps:
        parts.append(f"{words['step']} {view.step:,}/{total:,} ({view.step / total:.0%})")
    elif view.steps:
        parts.append(f"{words['step']} {view.step:,}")
    if view.stage is not None:
        parts.append(f"{words['stage']} {view.stage.number}/{len(view.stages)}")
    elif view.stage_text:
        parts.append(f"{words['stage']} {view.stage_text.removeprefix('stage ')}")
    if isinstance(last.get("loss"), (int, float)):
        parts.append(f"{words['loss']} {last['loss']:.4f}")
    for name in view.difficulties:
        if isinstance(loss := last.get(f"loss/{name}"), (int, float)):
            parts.append(f"{plain_text(name)} {loss:.4f}")
    if evaluated := view.evaluated():
        parts.append(f"{words['validation']} {evaluated[-1][1]:.4f} @ {evaluated[-1][0]:,}")
    if isinstance(last.get("tokens_per_second"), (int, float)):
        parts.append(f"{last['tokens_per_second']:,.0f} tok/s")
    if isinstance(last.get("mfu"), (int, float)):
        parts.append(f"MFU {last['mfu']:.1%}")
    if view.state == "running" and view.eta_seconds is not None:
        parts.append(f"{words['eta']} {format_duration(view.eta_seconds)}")
    if machine.host is not None:
        host = machine.host
        used = f"{format_bytes(host.memory_used_bytes)}/{format_bytes(host.memory_total_bytes)}"
        parts.append(f"{words['memory']} {used}")
    for report in machine.devices:
        for device in report.devices:
            if device.used_bytes is not None and device.total_bytes:
                parts.append(f"{device.label} {device.used_bytes / device.total_bytes:.0%}")
    return "  ".join(parts)


def message_line(message: Message, language: Language) -> str:
    return (
        f"[{message.difficulty}] {f'rank {message.rank}: ' if message.rank else ''}{_message_text(message, language)}"
    )


# ---------------------------------------------------------------- ways to watch


def _watch_lines(reader: Reader, watch: MachineWatch, interval_seconds: float, language: Language) -> None:
    """A line whenever there is something new, until the run has ended."""
    said: set[Message] = set()
    before = None
    while True:
        view = reader.poll()
        for message in view.messages:
            key = message._replace(event=None, text=_message_text(message, language))
            if key not in said:
                said.add(key)
                print(message_line(message, language), flush=True)
        now = (view.state, view.step)
        if now != before:
            before = now
            print(f"{time.strftime('%H:%M:%S')}  {plain_line(view, watch.look(), language)}", flush=True)
        if view.state in ENDED:
            _print_end(view, language)
            return
        time.sleep(interval_seconds)


def _print_end(view: RunView, language: Language) -> None:
    if error := view.status.get("error"):
        print(f"[ERROR] {plain_text(str(error))}")
    if hint := way_on(view, language):
        print(f"[INFO] {hint}", flush=True)


def _watch_json(reader: Reader, watch: MachineWatch, interval_seconds: float) -> None:
    while True:
        view = reader.poll()
        print(json.dumps(to_json(view, watch.look()), ensure_ascii=False), flush=True)
        if view.state in ENDED:
            return
        time.sleep(interval_seconds)


def _watch_screen(
    reader: Reader, watch: MachineWatch, interval_seconds: float, language: Language, console: Any, note: str
) -> None:
    """The dashboard, until `q`; it stays when the run has ended, which may be gone on with."""
    from rich.live import Live

    from finetune.commands.monitor.dashboard import Picture

    with (
        _single_keys() as key,
        Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False, redirect_stdout=False) as live,
    ):
        due, size = 0.0, console.size
        while True:
            if time.monotonic() >= due or console.size != size:
                due, size = time.monotonic() + interval_seconds, console.size
                live.update(Picture(reader.poll(), watch.look(), language, note=note), refresh=True)
            if key() in ("q", "Q", "\x03"):
                return


@contextlib.contextmanager
def _single_keys() -> Iterator[Any]:
    """Keys without Enter, as a function that waits a moment and returns one or "". The terminal is put back."""
    if not sys.stdin.isatty():
        yield lambda: time.sleep(KEY_POLL_SECONDS) or ""
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


# ---------------------------------------------------------------- command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m finetune monitor",
        description="Show how a run goes: progress, curves, levels, memory, devices, warnings. q quits. Into a pipe or "
        "a file it writes a line whenever a step is logged, and ends when the run does.",
        epilog="Exit code: 0; 2 there is no such run or file.",
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="the run's folder; default: the newest in ./runs")
    parser.add_argument("--log", metavar="FILE", help="a copy of a run's console, where there is no run folder at hand")
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=3.0, help="between two looks (default 3)")
    parser.add_argument("--once", action="store_true", help="look once and leave")
    parser.add_argument("--json", action="store_true", help="an object a line instead of a picture")
    parser.add_argument("--lang", metavar="en|zh", help="language (default: the locale's)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Watch a run. 0; 2: refused."""
    from rich.console import Console

    options = _parser().parse_args(argv)
    language = pick_language(options.lang)
    print_anything()
    if options.run is not None and options.log is not None:
        raise ConfigError("both a run and --log were given", where="--log", fix="give one of them")
    if not options.interval >= SHORTEST_INTERVAL_SECONDS:
        raise ConfigError(
            f"--interval is {options.interval:g}, below {SHORTEST_INTERVAL_SECONDS:g} seconds",
            where="--interval",
            fix="give seconds, such as --interval 3",
        )
    reader = open_run(options.run, options.log, may_come=not options.once)
    note = WORDS[language]["keys"]
    if options.run is None and options.log is None:
        newest = WORDS[language]["newest"].format(run=reader.view.source, folder="runs")
        note = f"{note}    {newest}"
        print(newest, file=sys.stderr)
    watch = MachineWatch(None if options.once else options.interval)
    console = Console()
    pictures = console.is_terminal and not console.is_dumb_terminal and not options.json
    if options.once:
        _look_once(reader, watch, language, console if pictures else None, options.json)
        return int(ExitCode.DONE)
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        if options.json:
            _watch_json(reader, watch, options.interval)
        elif pictures:
            _watch_screen(reader, watch, options.interval, language, console, note)
        else:
            _watch_lines(reader, watch, options.interval, language)
    return int(ExitCode.DONE)


def _look_once(reader: Reader, watch: MachineWatch, language: Language, console: Any, as_json: bool) -> None:
    view, machine = reader.poll(), watch.look()
    if as_json:
        print(json.dumps(to_json(view, machine), ensure_ascii=False))
    elif console is not None:
        from finetune.commands.monitor.dashboard import Picture

        console.print(Picture(view, machine, language, fill=False))
    else:
        print(f"{plain_text(str(view.source))}  {plain_line(view, machine, language)}")
        for message in view.messages:
            print(message_line(message, language))
        _print_end(view, language)


if __name__ == "__main__":
    sys.exit(main())
