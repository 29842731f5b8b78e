"""DeepSpeed's C++ operator for processes on one CPU machine: loaded so that a killed start leaves
no lock behind.

torch builds and loads an operator under a file named `lock` and waits forever while that file
exists (torch/utils/file_baton.py). A process that is killed meanwhile leaves the file, and every
later DeepSpeed run on the machine hangs silently. An flock is released when its holder dies. So a
process that holds ours, and finds that its last holder had not finished, knows that torch's file is
stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("finetune")

_AT_WORK = b"loading\n"


def prefer_own_ninja() -> None:
    """Let torch build with this environment's ninja, even if the environment is not active.

    Two versions of ninja would each rebuild everything.
    """
    own = Path(sys.executable).parent / "ninja"
    if own.exists() and shutil.which("ninja") != str(own):
        os.environ["PATH"] = f"{own.parent}{os.pathsep}{os.environ.get('PATH', '')}"


def load_shared_memory_operator() -> None:
    """Load what `deepspeed.init_distributed` would load on a CPU; nothing on other devices."""
    prefer_own_ninja()
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return
    with one_at_a_time(Path(_get_build_directory(builder.name, verbose=False))):
        builder.load(verbose=False)


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the build folder for this process; remove torch's lock file if its owner, one of ours,
    was killed.
    """
    descriptor = os.open(folder / "finetune.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # a file system without locks: torch's own file has to do
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.pread(descriptor, len(_AT_WORK), 0) == _AT_WORK and (folder / "lock").exists():
                logger.warning("%s was left by a process that was killed: removed", folder / "lock")
                (folder / "lock").unlink(missing_ok=True)
        os.pwrite(descriptor, _AT_WORK, 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
