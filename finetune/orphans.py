"""Workers never outlive their launcher: torch elastic starts them in sessions of their own, so they would train on."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from finetune.device import LaunchWorld

PARENT_CHECK_SECONDS = 2.0
PARENT_GRACE_SECONDS = 60.0


def die_with_launcher(world: LaunchWorld) -> None:
    """Make a worker stop when its launcher is gone. Called first thing; before training, the stop is an end.

    The kernel sends SIGTERM at the parent's death (Linux); a thread looks as well, because that signal is bound to the
    parent's *thread* and does not exist elsewhere. A worker that has not stopped PARENT_GRACE_SECONDS after that is
    ended by SIGKILL: its peers may be gone, and it would wait in a collective for them.
    """
    if not world.launched:
        return
    parent = os.getppid()
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PARENT_GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
