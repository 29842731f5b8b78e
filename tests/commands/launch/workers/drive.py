"""`drive.py FOLDER WHAT PROCESSES [RESUME]`: the supervisor with workers that train nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from finetune.commands.launch.log import LaunchLog
from finetune.commands.launch.supervise import Launch, Supervisor
from finetune.runtime.nodes import Nodes
from finetune.runtime.ports import hold_port
from finetune.storage.launch_record import LaunchRecord

folder, what, processes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
held = hold_port(None, loopback=True)
launch = Launch(
    module="worker",
    flags=(str(folder), what),
    resume=sys.argv[4] if len(sys.argv) > 4 else "auto",
    digest="0" * 16,
    nodes=Nodes(1, 0, "127.0.0.1", None),
    processes=processes,
    held=held,
    environment=os.environ,
    output_dir=folder,
    timeout_seconds=60,
    shutdown_seconds=60,
    max_restarts=2,
    language="en",
)
with LaunchLog(folder / "logs" / "launch.log") as log:
    code = Supervisor(launch, log, LaunchRecord(log.path, folder)).run()
sys.exit(code)
