"""Workers never outlive their launcher: torch elastic starts them in sessions of their own, so they would train on."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from finetune.runtime.device import LaunchWorld

PARENT_CHECK_SECONDS = 2.0
PARENT_GRACE_SECONDS = 60.0


def die_with_launcher(world: LaunchWorld) -> None:
    """Make a worker stop when its launcher is gone. Called first thing; before training, the stop is an end.

    On Linux the kernel sends SIGTERM at the parent's death, elsewhere a thread that looks. A worker that has not
    stopped PARENT_GRACE_SECONDS after that is ended by SIGKILL: its peers may be gone, and it would wait in a
    collective for them.
    """
    if not world.launched:
        return
    parent = os.getppid()
    told_by_kernel = sys.platform == "linux"
    if told_by_kernel:
        PR_SET_PDEATHSIG = 1
        told_by_kernel = ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) == 0

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        if not told_by_kernel:  # a second SIGTERM, later than the first, would leave without saving
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PARENT_GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
