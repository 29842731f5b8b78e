"""Ascend NPUs: the table of `npu-smi info` (drivers 22 to 26; 910A, 910B, 910_93, 950, 310P), run
and read.

The table has two lines for a chip. The second one ends with the memory that a program gets: HBM
where there is a column for it, else DDR. Cards with two chips count programs' devices by chip
("Phy-ID"); a container may see only some of them and counts those from 0, so a device's index is
its place in the list.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from finetune.runtime.smi_report import MIB, TIMEOUT_SECONDS, SmiDevice, SmiProcess, SmiReport

_VERSION = re.compile(r"npu-smi\s+(\S+)\s+Version:\s*(\S+)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_FIRST = re.compile(r"(\d+)\s+(\S.*)")  # "0     910B3", "2     Ascend910"
# What npu-smi prints instead of a table.
_FAILURES = ("dcmi", "DrvMngGetConsoleLogLevel", "failed", "error", "permission")


@dataclass
class _Chip:
    npu: int
    name: str
    health: str
    temperature: float | None
    chip: int = 0
    utilization: float | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    processes: list[SmiProcess] = field(default_factory=list)


def read_npus(timeout_seconds: float = TIMEOUT_SECONDS) -> SmiReport | None:
    """What `npu-smi info` tells; None where it is not installed. One that hangs (a lost device) is
    ended.
    """
    program = shutil.which("npu-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "info"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return SmiReport("npu", problem=f"npu-smi did not answer in {timeout_seconds:g} s")
    except OSError as error:
        return SmiReport("npu", problem=f"npu-smi cannot be run: {error.strerror or error}")
    return parse_info(done.stdout, done.stderr, done.returncode)


def parse_info(text: str, errors: str = "", exit_code: int = 0) -> SmiReport:
    """A report from what `npu-smi info` printed, to both streams."""
    chips: list[_Chip] = []
    pending: _Chip | None = None
    in_processes = has_process_table = False
    for line in text.splitlines():
        cells = _cells(line)
        if not cells:
            continue
        if "Process id" in line:
            in_processes = has_process_table = True
        elif in_processes:
            _add_process(cells, chips)
        elif pending is not None and len(cells) >= 3:
            chips.append(_second_line(pending, cells))
            pending = None
        else:
            pending = _first_line(cells)
    version = _VERSION.search(text)
    devices = tuple(
        _device(index, chip, chips, has_process_table) for index, chip in enumerate(chips)
    )
    problem = "" if devices else _problem(text, errors, exit_code)
    return SmiReport("npu", version[2] if version else "", devices=devices, problem=problem)


def _cells(line: str) -> list[str]:
    """The cells of a whole table line; nothing for rules, other lines, and a line that was cut."""
    line = line.strip()
    if len(line) < 2 or not (line.startswith("|") and line.endswith("|")):
        return []
    return [cell.strip() for cell in line[1:-1].split("|")]


def _first_line(cells: Sequence[str]) -> _Chip | None:
    """`| 0     910B3 | OK | 93.6  40  0 / 0 |`, or on 950 `| 0 | Ascend950 | OK | ... |`; None for
    a heading.
    """
    if len(cells) == 4:
        cells = [f"{cells[0]} {cells[1]}", *cells[2:]]
    found = _FIRST.fullmatch(cells[0]) if len(cells) == 3 else None
    if found is None or found[2].startswith("Name"):
        return None
    _power, temperature, *_rest = [*cells[2].split(), "-", "-"]
    return _Chip(int(found[1]), found[2].strip(), cells[1], _number(temperature))


def _second_line(chip: _Chip, cells: Sequence[str]) -> _Chip:
    """`| 0     4 | 0000:C1:00.0 | 12   0 / 0   3161 / 65536 |`: chip, Phy-ID where there is one,
    bus, use, memory.
    """
    if len(cells) == 4:
        cells = [f"{cells[0]} {cells[1]}", *cells[2:]]
    ids = re.findall(r"\d+", cells[0])
    chip.chip = int(ids[0]) if ids else 0
    last = cells[-1]
    chip.utilization = _number(last)
    pairs = _PAIR.findall(last)
    if pairs and int(pairs[-1][1]) > 0:
        chip.used_bytes, chip.total_bytes = (int(value) * MIB for value in pairs[-1])
    return chip


def _add_process(cells: Sequence[str], chips: Sequence[_Chip]) -> None:
    """`| 0   0 | 4242 | python | 30784 |` and, on newer drivers, the id in the container; other
    lines have no process.

    On 950 the first cell is the NPU alone. In a container the tool may give the host's process id
    in the second column.
    """
    if len(cells) < 4 or not cells[1].isdigit():
        return
    ids = [int(word) for word in cells[0].split() if word.isdigit()]
    inside = cells[4] if len(cells) > 4 else ""
    process = SmiProcess(
        int(inside) if inside.isdigit() else int(cells[1]), cells[2], _bytes(cells[3])
    )
    for chip in chips:
        if ids and chip.npu == ids[0] and (len(ids) < 2 or chip.chip == ids[1]):
            chip.processes.append(process)
            return


def _device(index: int, chip: _Chip, chips: Sequence[_Chip], has_process_table: bool) -> SmiDevice:
    several = sum(1 for other in chips if other.npu == chip.npu) > 1
    return SmiDevice(
        index=index,
        name=chip.name,
        label=f"NPU {chip.npu} chip {chip.chip}" if several else f"NPU {chip.npu}",
        health=chip.health,
        total_bytes=chip.total_bytes,
        used_bytes=chip.used_bytes,
        utilization_percent=chip.utilization,
        temperature_celsius=chip.temperature,
        processes=tuple(chip.processes) if has_process_table else None,
    )


def _problem(text: str, errors: str, exit_code: int) -> str:
    """Why there is no device, in the tool's own words."""
    lines = [line.strip() for line in f"{text}\n{errors}".splitlines() if line.strip()]
    for word in _FAILURES:
        matching = [line for line in lines if word.lower() in line.lower()]
        if matching:
            return matching[0]
    return (
        "npu-smi lists no device"
        if exit_code == 0
        else (lines or [f"npu-smi ended with {exit_code}"])[-1]
    )


def _number(cell: str) -> float | None:
    """The number a cell begins with, e.g. 12 of "12   0 / 0"; None for "-" and "NA"."""
    found = _NUMBER.match(cell)
    return None if found is None else float(found[0])


def _bytes(cell: str) -> int | None:
    """Bytes of a cell that counts MiB; None where it is no number."""
    value = _number(cell)
    return None if value is None else int(value * MIB)
