"""Reading `nvidia-smi`: the CSV of its queries (drivers 450 on), and its table where the queries are refused.

pynvml, where it is installed, asks the driver directly and is preferred: it is faster and sees MIG slices.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from finetune.runtime.smi import Output, Runner, SmiDevice, SmiProcess, SmiReport, mebibytes, number, run_tool

GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "driver_version",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "ecc.errors.uncorrected.volatile.total",
)
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")

_HEADER = re.compile(r"NVIDIA-SMI\s+(\S+)\s+(?:Driver Version:\s*(\S+))?(?:\s+CUDA Version:\s*([\d.]+))?")
_GPU_NAME = re.compile(r"(\d+)\s+(\S.*?)\s+(?:On|Off|N/A)\s*")
_MEMORY = re.compile(r"(\S+?)(?:MiB)?\s*/\s*(\S+?)(?:MiB)?$")
_OLD_PROCESS = re.compile(r"(\d+)\s+(\d+)\s+([CGM+]+)\s+(.*?)\s+(\d+MiB|N/A)?$")
_PROCESS = re.compile(r"(\d+)\s+(?:N/A|\d+)\s+(?:N/A|\d+)\s+(\d+)\s+([CGM+]+)\s+(.*?)\s+(\d+MiB|N/A)?$")
_MIG = re.compile(r"(\d+)\s+(\d+)\s+(\d+)\s+(\d+)$")
_FAILURES = (
    "NVIDIA-SMI has failed",
    "Failed to initialize NVML",
    "Unable to determine the device handle",
    "GPU is lost",
    "Insufficient Permissions",
    "did not answer",
    "cannot be run",
    "No devices were found",
)


def read_gpus(run: Runner = run_tool) -> SmiReport | None:
    """What the NVIDIA driver says; None where neither pynvml nor nvidia-smi is there."""
    if run is run_tool and find_spec("pynvml") is not None:
        from finetune.runtime.smi_nvml import read_nvml

        if (report := read_nvml()) is not None:
            return report
    table = run(["nvidia-smi"])
    if table is None:
        return None
    report = parse_table(table)
    if report.problem or any(" MIG " in device.label for device in report.devices):
        return report
    gpus = run(["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv"])
    apps = run(["nvidia-smi", f"--query-compute-apps={','.join(PROCESS_FIELDS)}", "--format=csv"])
    if gpus is None or gpus.code != 0:
        return report  # a field that this driver does not know, or no permission: the table has to do
    devices = parse_query(gpus.text, apps.text if apps is not None and apps.code == 0 else None)
    if not devices:
        return report
    return SmiReport("cuda", report.driver_version, report.runtime_version, devices)


# ---------------------------------------------------------------- queries


def parse_query(gpus: str, apps: str | None) -> tuple[SmiDevice, ...]:
    """Devices from `--query-gpu=... --format=csv` and `--query-compute-apps=... --format=csv`, both with headings.

    Args:
        apps: None where processes are not known.
    """
    processes: dict[str, list[SmiProcess]] = {}
    for row in _rows(apps or ""):
        if row.get("pid", "").isdigit():
            memory = mebibytes(row.get("used_gpu_memory", row.get("used_memory", "")))
            found = SmiProcess(int(row["pid"]), row.get("process_name", ""), memory)
            processes.setdefault(row.get("gpu_uuid", ""), []).append(found)
    devices = []
    for row in _rows(gpus):
        if not row.get("index", "").isdigit():
            continue
        errors = number(row.get("ecc.errors.uncorrected.volatile.total", ""))
        devices.append(
            SmiDevice(
                index=int(row["index"]),
                name=row.get("name", ""),
                label=f"GPU {row['index']}",
                health=health_of(errors),
                total_bytes=mebibytes(row.get("memory.total", "")),
                used_bytes=mebibytes(row.get("memory.used", "")),
                utilization_percent=number(row.get("utilization.gpu", "")),
                temperature_celsius=number(row.get("temperature.gpu", "")),
                power_watts=number(row.get("power.draw", "")),
                processes=None if apps is None else tuple(processes.get(row.get("uuid", ""), ())),
                bus_id=row.get("pci.bus_id", ""),
            )
        )
    return tuple(devices)


def _rows(text: str) -> list[dict[str, str]]:
    """CSV rows by heading; "memory.total [MiB]" is "memory.total"."""
    lines = [line for line in text.splitlines() if "," in line]
    if not lines:
        return []
    heading, *rest = csv.reader(lines, skipinitialspace=True)
    names = [name.split(" [")[0].strip() for name in heading]
    named = names.index("process_name") if "process_name" in names else len(names) - 1
    rows = []
    for row in rest:
        more = len(row) - len(names)  # commas in the name of a process
        joined = ", ".join(row[named : named + more + 1])
        cells = [*row[:named], joined, *row[named + more + 1 :]] if more > 0 else row
        rows.append(dict(zip(names, (cell.strip() for cell in cells), strict=False)))
    return rows


def health_of(uncorrected_errors: float | None) -> str:
    """The word for a number of uncorrected memory errors; empty where it is unknown."""
    if uncorrected_errors is None:
        return ""
    return "OK" if uncorrected_errors == 0 else f"ECC errors: {uncorrected_errors:.0f}"


# ---------------------------------------------------------------- the table


def parse_table(output: Output) -> SmiReport:
    """A report from the output of plain `nvidia-smi`."""
    header = _HEADER.search(output.text)
    failure = next((text for text in _FAILURES if text in output.all), None)
    devices = _table_devices(output.text.splitlines())
    if not devices:
        return SmiReport("cuda", _driver(header), _cuda(header), problem=_line_with(output, failure))
    return SmiReport("cuda", _driver(header), _cuda(header), devices)


def _driver(header: re.Match[str] | None) -> str:
    return "" if header is None else (header[2] or header[1])


def _cuda(header: re.Match[str] | None) -> str:
    return "" if header is None else (header[3] or "")


def _line_with(output: Output, failure: str | None) -> str:
    lines = [line.strip() for line in output.all.splitlines() if line.strip()]
    if failure is not None:
        return next(line for line in lines if failure in line)
    return (lines or [f"nvidia-smi ended with {output.code}"])[-1] if output.code else "nvidia-smi lists no device"


def _table_devices(lines: Sequence[str]) -> tuple[SmiDevice, ...]:
    """The GPUs; where some have MIG on, their slices in place of all GPUs, as CUDA counts them."""
    gpus: list[dict[str, Any]] = []
    slices: list[dict[str, Any]] = []
    processes: dict[int, list[SmiProcess]] = {}
    section = "gpus"
    named = False
    for line in lines:
        text = line.strip().strip("|").strip()
        if "MIG devices:" in line:
            section = "mig"
        elif "Processes:" in line:
            section = "processes"
        elif not (line.strip().startswith("|") and line.strip().endswith("|")) or set(text) <= set("-=+| "):
            continue  # a rule, or a line that was cut
        elif section == "processes":
            found = _PROCESS.match(text) or _OLD_PROCESS.match(text)
            if found is not None:
                process = SmiProcess(int(found[2]), found[4].strip(), mebibytes(found[5] or ""))
                processes.setdefault(int(found[1]), []).append(process)
        else:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if section == "mig":
                _take_slice(cells, slices)
            else:
                named = _take_gpu(cells, gpus, named)
    if slices:
        by_gpu = {gpu["index"]: gpu for gpu in gpus}
        return tuple(
            SmiDevice(
                index=place,
                name=f"{by_gpu.get(one['gpu'], {}).get('name', 'GPU')} MIG",
                label=f"GPU {one['gpu']} MIG {one['number']}",
                total_bytes=one["total"],
                used_bytes=one["used"],
            )
            for place, one in enumerate(slices)
        )
    return tuple(
        SmiDevice(
            index=gpu["index"],
            name=gpu["name"],
            label=f"GPU {gpu['index']}",
            health=gpu["health"],
            total_bytes=gpu.get("total"),
            used_bytes=gpu.get("used"),
            utilization_percent=gpu.get("utilization"),
            temperature_celsius=gpu.get("temperature"),
            power_watts=gpu.get("power"),
            processes=tuple(processes.get(gpu["index"], ())),
            bus_id=gpu["bus_id"],
        )
        for gpu in gpus
    )


def _take_gpu(cells: Sequence[str], gpus: list[dict[str, Any]], named: bool) -> bool:
    """Take one line of a GPU; returns whether its second line is still to come."""
    found = _GPU_NAME.fullmatch(cells[0]) if len(cells) == 3 else None
    if found is not None and ":" in cells[1]:
        errors = number(cells[2]) if cells[2] not in ("Off", "N/A") else None
        gpus.append(
            {"index": int(found[1]), "name": found[2], "bus_id": cells[1].split()[0], "health": health_of(errors)}
        )
        return True
    if named and len(cells) == 3:
        words = cells[0].split()
        temperature = next((word for word in words if re.fullmatch(r"\d+C", word)), "")
        power = re.search(r"(\d+)W\s*/", cells[0])
        memory = _MEMORY.match(cells[1])
        gpus[-1].update(
            temperature=number(temperature),
            power=None if power is None else float(power[1]),
            used=None if memory is None else mebibytes(memory[1]),
            total=None if memory is None else mebibytes(memory[2]),
            utilization=number(cells[2]),
        )
    return False


def _take_slice(cells: Sequence[str], slices: list[dict[str, Any]]) -> None:
    """`|  0    7   0   0  |     11MiB /  9728MiB  | 14  0 | ...`: GPU, GI, CI, MIG device; then its memory."""
    found = _MIG.match(cells[0])
    memory = _MEMORY.match(cells[1]) if len(cells) > 1 else None
    if found is not None and memory is not None:
        slices.append(
            {
                "gpu": int(found[1]),
                "number": int(found[4]),
                "used": mebibytes(memory[1]),
                "total": mebibytes(memory[2]),
            }
        )
