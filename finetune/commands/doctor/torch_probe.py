"""Started by doctor: import torch (and torch_npu), multiply two matrices on the device, say what it can do.

python -m finetune.commands.doctor.torch_probe REPORT < {"device_type": "auto"}
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.runtime import device as devices


def probe(device_type: str, *, torch_npu: bool = True) -> dict[str, Any]:
    """What torch sees here: versions, device types, and the capabilities of the one that a run would take.

    Args:
        torch_npu: False leaves torch_npu alone, to see whether torch works without it; then the device is the CPU.
    """
    import torch

    report: dict[str, Any] = {"torch": torch.__version__, "torch_npu": None}
    if not torch_npu:
        return report
    if find_spec("torch_npu") is not None:
        report["torch_npu"] = import_module("torch_npu").__version__
    available = devices.available_device_types()
    chosen = available[0] if device_type == "auto" else device_type
    report |= {"available": available, "device_type": chosen}
    if chosen in available:
        report |= {
            "count": devices.device_count(chosen),
            "capabilities": asdict(devices.capabilities(chosen)),
            "matmul_error": _matmul_error(chosen),
        }
    return report


def _matmul_error(device_type: str) -> str:
    """Why a matrix product on the device is wrong; empty where it is right."""
    import torch

    left = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) % 7
    try:
        product = (left.to(device_type) @ left.to(device_type)).cpu()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return "" if torch.equal(product, left @ left) else "a product of small whole numbers is wrong"


def main() -> None:
    request = json.load(sys.stdin)
    Path(sys.argv[1]).write_text(json.dumps(probe(**request)), encoding="utf-8")


if __name__ == "__main__":
    main()
