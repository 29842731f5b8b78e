"""Reading `npu-smi`: the table of `npu-smi info` (drivers 22 to 26; 910A, 910B, 910_93, 950, 310P) and `info -t`.

The table has two lines for a chip. The second one ends with the memory that a program gets: HBM where there is a column
for it, else DDR. Cards with two chips count programs' devices by chip ("Phy-ID"); a container may see only some of them
and counts those from 0, so a device's index is its place in the list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from finetune.runtime.smi import (
    MIB,
    Output,
    Runner,
    SmiDevice,
    SmiProcess,
    SmiReport,
    key_values,
    mebibytes,
    number,
    run_tool,
)

_VERSION = re.compile(r"npu-smi\s+(\S+)\s+Version:\s*(\S+)")
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_FIRST = re.compile(r"(\d+)\s+(\S.*)")  # "0     910B3", "2     Ascend910"
_PROCESS_OF_TYPE = re.compile(r"Process id:\s*(\d+)\s+Process name:(.*?)\s*Process memory\(MB\):\s*(\d+)")
# What npu-smi prints instead of a table.
_FAILURES = ("dcmi", "DrvMngGetConsoleLogLevel", "failed", "error", "did not answer", "cannot be run", "permission")


@dataclass
class _Chip:
    npu: int
    name: str
    health: str
    power: float | None
    temperature: float | None
    chip: int = 0
    bus_id: str = ""
    utilization: float | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    processes: list[SmiProcess] = field(default_factory=list)


def read_npus(run: Runner = run_tool) -> SmiReport | None:
    """What `npu-smi info` says; None where it is not installed."""
    output = run(["npu-smi", "info"])
    return None if output is None else parse_info(output)


def parse_info(output: Output) -> SmiReport:
    """A report from the output of `npu-smi info`."""
    chips: list[_Chip] = []
    pending: _Chip | None = None
    in_processes = has_process_table = False
    for line in output.text.splitlines():
        cells = _cells(line)
        if not cells:
            continue
        if "Process id" in line:
            in_processes = has_process_table = True
        elif in_processes:
            _take_process(cells, chips)
        elif pending is not None and len(cells) >= 3:
            chips.append(_second_line(pending, cells))
            pending = None
        else:
            pending = _first_line(cells)
    version = _VERSION.search(output.text)
    devices = tuple(_device(index, chip, chips, has_process_table) for index, chip in enumerate(chips))
    return SmiReport("npu", version[2] if version else "", devices=devices, problem="" if devices else _problem(output))


def _cells(line: str) -> list[str]:
    """The cells of a whole table line; nothing for rules, other lines, and a line that was cut."""
    line = line.strip()
    if len(line) < 2 or not (line.startswith("|") and line.endswith("|")):
        return []
    return [cell.strip() for cell in line[1:-1].split("|")]


def _first_line(cells: Sequence[str]) -> _Chip | None:
    """`| 0     910B3 | OK | 93.6  40  0 / 0 |`, or on 950 `| 0 | Ascend950 | OK | ... |`; None for a heading."""
    if len(cells) == 4:
        cells = [f"{cells[0]} {cells[1]}", *cells[2:]]
    found = _FIRST.fullmatch(cells[0]) if len(cells) == 3 else None
    if found is None or found[2].startswith("Name"):
        return None
    numbers = cells[2].split()
    power, temperature = (number(word) for word in [*numbers, "-", "-"][:2])
    return _Chip(int(found[1]), found[2].strip(), cells[1], power, temperature)


def _second_line(chip: _Chip, cells: Sequence[str]) -> _Chip:
    """`| 0     4 | 0000:C1:00.0 | 12   0 / 0   3161 / 65536 |`: chip, Phy-ID where there is one, bus, use, memory."""
    if len(cells) == 4:
        cells = [f"{cells[0]} {cells[1]}", *cells[2:]]
    ids = re.findall(r"\d+", cells[0])
    chip.chip = int(ids[0]) if ids else 0
    chip.bus_id = cells[1] if len(cells) > 1 and cells[1] not in ("NA", "-") else ""
    last = cells[-1]
    chip.utilization = number(last)
    pairs = _PAIR.findall(last)
    if pairs and int(pairs[-1][1]) > 0:
        chip.used_bytes, chip.total_bytes = (int(value) * MIB for value in pairs[-1])
    return chip


def _take_process(cells: Sequence[str], chips: Sequence[_Chip]) -> None:
    """`| 0   0 | 4242 | python | 30784 |` and, on newer drivers, the id in the container; other lines say nothing.

    On 950 the first cell is the NPU alone. In a container the tool may give the host's process id in the second column.
    """
    if len(cells) < 4 or not cells[1].isdigit():
        return
    ids = [int(word) for word in cells[0].split() if word.isdigit()]
    inside = cells[4] if len(cells) > 4 else ""
    process = SmiProcess(int(inside) if inside.isdigit() else int(cells[1]), cells[2], mebibytes(cells[3]))
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
        power_watts=chip.power,
        processes=tuple(chip.processes) if has_process_table else None,
        bus_id=chip.bus_id,
    )


def _problem(output: Output) -> str:
    """Why there is no device, in the tool's own words."""
    lines = [line.strip() for line in output.all.splitlines() if line.strip()]
    for word in _FAILURES:
        said = [line for line in lines if word.lower() in line.lower()]
        if said:
            return said[0]
    return "npu-smi lists no device" if output.code == 0 else (lines or [f"npu-smi ended with {output.code}"])[-1]


# ---------------------------------------------------------------- npu-smi info -t ... -i N


def parse_type(text: str) -> list[SmiDevice]:
    """Devices from `npu-smi info -t usages|memory|health|board|proc-mem -i N`, as far as that type tells.

    `index` is the chip's number on its card here: one call is about one card.
    """
    devices: list[SmiDevice] = []
    card = "?"
    for block in _chip_blocks(text):
        card = block.get("NPU ID", card)
        chip = number(block.get("Chip ID", "0"))
        total = mebibytes(block.get("HBM Capacity(MB)", "")) or mebibytes(block.get("DDR Capacity(MB)", ""))
        kind = "HBM" if mebibytes(block.get("HBM Capacity(MB)", "")) else "DDR"
        rate = number(block.get(f"{kind} Usage Rate(%)", block.get("Memory Usage Rate(%)", "")))
        devices.append(
            SmiDevice(
                index=int(chip or 0),
                name=block.get("Chip Name", block.get("Product Name", "")),
                label=f"NPU {card}",
                health=block.get("Health", block.get("Health Status", "")),
                total_bytes=total,
                used_bytes=None if total is None or rate is None else int(total * rate / 100),
                utilization_percent=number(block.get("Aicore Usage Rate(%)", "")),
                temperature_celsius=number(block.get("Temperature(C)", block.get("Temperature (C)", ""))),
                power_watts=number(block.get("NPU Real-time Power(W)", block.get("Power Dissipation(W)", ""))),
            )
        )
    processes = tuple(
        SmiProcess(int(pid), name.strip(), int(memory) * MIB) for pid, name, memory in _PROCESS_OF_TYPE.findall(text)
    )
    if not processes and "Process id" not in text and "running process" not in text:
        return devices
    devices = devices or [SmiDevice(0, "", f"NPU {card}")]
    return [replace(devices[0], processes=processes), *devices[1:]]


def _chip_blocks(text: str) -> list[dict[str, str]]:
    """One mapping per chip. "Chip ID" closes a chip's block in most types, and opens it in none."""
    blocks: list[dict[str, str]] = []
    for block in key_values(text):
        if blocks and "Chip ID" not in blocks[-1]:
            blocks[-1].update(block)
        else:
            blocks.append(dict(block))
    return blocks
