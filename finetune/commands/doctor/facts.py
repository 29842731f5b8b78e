"""What the rules about variables look at."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Attributes:
        environment: the variables that the run will be started with.
        interfaces: network interfaces that are up, and their addresses.
        device_type: what the run takes: "npu", "cuda", "mps" or "cpu".
        devices_here: devices of that type on this machine, before any is hidden; None where not
            known.
        deepspeed: the run is under DeepSpeed.
        processes: processes of the run on this machine.
        cores: CPU cores for this process.
        timeout_seconds: the process group's timeout.
        ephemeral_ports: ports that the kernel gives to outgoing connections; None where not known.
    """

    environment: Mapping[str, str]
    interfaces: Mapping[str, Sequence[str]] = field(default_factory=dict)
    device_type: str = "cpu"
    devices_here: int | None = None
    deepspeed: bool = False
    processes: int = 1
    nodes: int = 1
    cores: int = 1
    timeout_seconds: int = 1800
    ephemeral_ports: tuple[int, int] | None = None

    def get(self, name: str) -> str:
        return self.environment.get(name, "").strip()

    def on(self, name: str) -> bool:
        return self.get(name).lower() in ("1", "true", "on", "yes")

    def whole(self, name: str) -> int | None:
        """A variable that holds a whole number; None where it is not set or none."""
        text = self.get(name)
        return int(text) if re.fullmatch(r"-?\d{1,12}", text) else None

    def shown(self, name: str) -> str:
        """`NAME=value`, as the messages show a variable."""
        return f"{name}={self.get(name)}"
