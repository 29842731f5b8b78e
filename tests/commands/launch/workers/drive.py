"""`drive.py FOLDER WHAT PROCESSES [RESUME]`: the supervisor with workers that train nothing.

With NODE=RANK:PORT in the environment it is that one of two nodes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from finetune.commands.launch.launch_spec import LaunchSpec
from finetune.commands.launch.log import LaunchLog
from finetune.commands.launch.supervise import Supervisor
from finetune.runtime.nodes import Nodes
from finetune.runtime.ports import LOOPBACK, hold_port
from finetune.storage.launch_record import LaunchRecord

folder, what, processes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank, _, port = os.environ.get("NODE", "").partition(":")
nodes = Nodes(2, int(rank), LOOPBACK, int(port)) if port else Nodes(1, 0, LOOPBACK, None)
held = hold_port(nodes.port, address=LOOPBACK) if nodes.rank == 0 else None
spec = LaunchSpec(
    module="worker",
    flags=(str(folder), what),
    config=SimpleNamespace(
        resume=sys.argv[4] if len(sys.argv) > 4 else "auto",
        output_dir=str(folder),
        timeout_seconds=60,
    ),
    device_type="cpu",
    nodes=nodes,
    processes=processes,
    max_restarts=2,
    shutdown_seconds=60,
    environment=os.environ,
)
with LaunchLog(folder / "logs" / f"launch{rank}.log") as log:
    code = Supervisor(spec, held, log, LaunchRecord(log.path, folder)).run()
sys.exit(code)
