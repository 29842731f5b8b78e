"""The host: memory under its cgroup's limit, /dev/shm, locked memory, open files, disk space and
inodes, a compiler, and DeepSpeed's C++ operators.

An operator is built (once, for about a minute) and tried in a separate process. That process runs
the training's own code, under the environment that a run prepares, so that a run finds what is
built here.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from finetune.commands.doctor.check import Check
from finetune.commands.doctor.probe import Answer, run_to_end
from finetune.runtime.device import LEAST_LOCKED_BYTES
from finetune.runtime.host import HostUse
from finetune.runtime.language import _
from finetune.storage.durable_files import format_bytes
from finetune.storage.run_lock import try_flock
from finetune.storage.shared_storage import is_shared, mount_of

# What processes on one machine put into /dev/shm: NCCL and gloo some MiB each, DeepSpeed's CPU
# collectives 66 MiB each.
SHM_PER_PROCESS_BYTES, LEAST_SHM_PER_PROCESS_BYTES = 66 << 20, 8 << 20
SHM_PER_LOADER_WORKER_BYTES = 16 << 20
LEAST_HOST_BYTES = 2 << 30
LEAST_DISK_BYTES, COMFORTABLE_DISK_BYTES = 256 << 20, 5 << 30
LEAST_INODES, COMFORTABLE_INODES = 200, 5000
LEAST_OPEN_FILES, COMFORTABLE_OPEN_FILES = 512, 4096


# ---------------------------------------------------------------- memory and limits


def check_host_memory(host: HostUse, needed_bytes: int = 0, needed_for: str = "") -> Check:
    """Check that the host has the memory that the run needs at least.

    Args:
        host: see `HostMeter.look`; a container has the memory that its limits leave.
        needed_bytes: a lower bound; 0 if it is not known.
        needed_for: what the memory is for, in the spoken language.
    """
    total = host.memory_total_bytes
    available = max(0, total - host.memory_used_bytes)
    values = {
        "total_bytes": total,
        "available_bytes": available,
        "needed_bytes": needed_bytes,
    }
    check = Check("host_memory", values=values)
    what = _("{free} of {total} host memory free")
    what = what.format(free=format_bytes(available), total=format_bytes(total))
    fix = _("end other programs, start fewer processes, or raise the container's limit")
    if needed_bytes:
        need = _("{what}; at least {needed} needed: {needed_for}")
        what = need.format(what=what, needed=format_bytes(needed_bytes), needed_for=needed_for)
    if needed_bytes > available:
        return check.fail(what, fix)
    if available < LEAST_HOST_BYTES:
        return check.warn(_("only {what}"), fix, what=what)
    return check.ok(what)


def check_shared_memory(
    processes: int, loader_workers: int = 0, folder: Path = Path("/dev/shm")
) -> Check:
    """Check that the processes of a run have room in /dev/shm: a bus error ends the run if not.

    Args:
        processes: processes of the run on this machine.
        loader_workers: loader processes of each of them.
    """
    if not folder.exists():
        return Check("shared_memory").skip(_("no {folder} here"), folder=folder)
    state = os.statvfs(folder)
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    several = processes if processes > 1 else 0
    needed = several * SHM_PER_PROCESS_BYTES
    needed += processes * loader_workers * SHM_PER_LOADER_WORKER_BYTES
    values = {
        "free_bytes": free,
        "total_bytes": total,
        "needed_bytes": needed,
    }
    check, shown = Check("shared_memory", values=values), format_bytes(free)
    if free >= needed:
        return check.ok(_("{folder}: {free} free"), folder=folder, free=shown)
    fix = _("docker run --shm-size={size}g, or as root: mount -o remount,size={size}G {folder}")
    if loader_workers:
        fix = _(
            "docker run --shm-size={size}g, or as root: mount -o remount,size={size}G {folder}; or "
            "--dataloader-num-workers 0"
        )
    is_too_small = free < several * LEAST_SHM_PER_PROCESS_BYTES
    return (check.fail if is_too_small else check.warn)(
        _(
            "{folder} has {free} free; {processes} processes with {workers} loader workers each may"
            " need {needed}, and die of a bus error without"
        ),
        fix,
        folder=folder,
        free=shown,
        processes=processes,
        workers=loader_workers,
        needed=format_bytes(needed),
        size=max(1, -(-2 * needed >> 30)),
    )


def check_locked_memory(pinned: bool, nodes: int = 1, limit: int | None = None) -> Check:
    """Check that memory can be locked, which pinned offload and RDMA between nodes need.

    Args:
        pinned: offload uses pinned memory.
        limit: bytes; None reads this process's, and -1 means no limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    check = Check("locked_memory", values={"limit_bytes": limit})
    unlimited = limit == resource.RLIM_INFINITY
    shown = _("unlimited") if unlimited else format_bytes(limit)
    if unlimited or limit >= LEAST_LOCKED_BYTES or not (pinned or nodes > 1):
        return check.ok(_("locked memory: {limit}"), limit=shown)
    what = _("locked memory is limited to {limit}; {why} may fail")
    why = _("pinned offload") if pinned else _("RDMA between nodes")
    return check.warn(
        what,
        _("ulimit -l unlimited (docker run --ulimit memlock=-1), or set pin_memory to false"),
        limit=shown,
        why=why,
    )


def check_open_files(limit: int | None = None) -> Check:
    """Check that a process may open the files that loaders, logs and sockets need.

    Args:
        limit: None reads this process's, and -1 means no limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    check = Check("open_files", values={"limit": limit})
    if limit == resource.RLIM_INFINITY or limit >= COMFORTABLE_OPEN_FILES:
        return check.ok(_("open files: {limit}"))
    what = _("a process may open {limit} files; loaders and sockets may need more")
    fix = _("ulimit -n 65535 in the shell that starts the run")
    return (check.fail if limit < LEAST_OPEN_FILES else check.warn)(what, fix)


# ---------------------------------------------------------------- disk


def existing_parent(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists: where a run would make its
    folder.
    """
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_disk(use: str, folder: Path, needed_bytes: int = 0) -> Check:
    """Check that a folder that a run writes to is writable and has space and inodes.

    Args:
        use: what the folder is for: "output" or "cache"; part of the check's name.
        needed_bytes: a lower bound of what the run writes there; 0 if it is not known.
    """
    there = existing_parent(folder)
    state = os.statvfs(there)
    free, inodes = state.f_bavail * state.f_frsize, state.f_favail
    values = {
        "folder": str(folder),
        "free_bytes": free,
        "free_inodes": inodes,
        "needed_bytes": needed_bytes,
    }
    check, least = Check(f"disk_{use}", values=values), max(LEAST_DISK_BYTES, needed_bytes)
    words = {
        "folder": there,
        "free": format_bytes(free),
        "needed": format_bytes(least),
    }
    fix = _("free space there, or name another folder")
    if state.f_flag & os.ST_RDONLY or not os.access(there, os.W_OK | os.X_OK):
        return check.fail(_("{folder} cannot be written to"), _("name another folder"), **words)
    if free < least:
        return check.fail(
            _("{folder} has {free} free; checkpoints and result need {needed} at least"),
            fix,
            **words,
        )
    if state.f_files and inodes < COMFORTABLE_INODES:
        what = _("{folder} has room for {inodes} more files only")
        fix = _("remove files there, or name another folder")
        verdict = check.fail if inodes < LEAST_INODES else check.warn
        return verdict(what, fix, inodes=inodes, **words)
    if free < max(COMFORTABLE_DISK_BYTES, 2 * needed_bytes):
        return check.warn(_("{folder} has only {free} free"), fix, **words)
    return check.ok(_("{folder}: {free} free"), **words)


def check_locks(use: str, folder: Path) -> Iterator[Check]:
    """Check that a file system that machines share has locks that all of them see; yield nothing
    for a disk of this machine.

    Args:
        use: as for `check_disk`.
    """
    there = existing_parent(folder)
    if not is_shared(there):
        return
    kind = mount_of(there)[0] or "?"
    words = {"folder": there, "kind": kind}
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".locks-") as file:
            locked = try_flock(file.fileno(), fcntl.LOCK_EX, Path(file.name))
    except OSError as error:
        yield Check(f"locks_{use}").skip(
            _("{folder} ({kind}): no file can be made: {why}"), why=error, **words
        )
        return
    check = Check(f"locks_{use}", values={"filesystem": kind})
    if locked is not None:
        yield check.ok(_("{folder} ({kind}) has locks"), **words)
        return
    yield check.warn(
        _(
            "{folder} ({kind}) has no locks that all machines see: a file stands for one while a"
            " run works there"
        ),
        _(
            "mount it with locks (NFS: lockd, no local_lock; Lustre: flock), or remove that file if"
            " a machine is lost"
        ),
        **words,
    )


# ---------------------------------------------------------------- a compiler


def check_compiler(needed_for: str, environment: Mapping[str, str]) -> Check:
    """Check that there is the C++ compiler that DeepSpeed's operators are built with (CXX, else
    c++, as torch looks).

    Args:
        needed_for: what will be built, in the spoken language; empty if nothing is.
    """
    program = environment.get("CXX") or "c++"
    found = shutil.which(program.split(" ")[0], path=environment.get("PATH"))
    check = Check("compiler")
    if found is not None:
        return Check("compiler", values={"path": found}).ok(_("C++ compiler: {path}"))
    if not needed_for:
        return check.skip(_("no C++ compiler ({program}), and none is needed"), program=program)
    return check.fail(
        _("no C++ compiler ({program}): {operator} cannot be built"),
        _("apt-get install g++ (or your system's package), or set CXX to a compiler"),
        program=program,
        operator=needed_for,
    )


# ---------------------------------------------------------------- DeepSpeed's operators

BUILD_TIMEOUT_SECONDS = 600.0
_PREPARE = """
import os, sys
os.environ.setdefault("DS_ACCELERATOR", sys.argv[1])
from finetune.commands.doctor.probe import print_report
from finetune.runtime.launch_environment import launch_world, prepare_environment
prepare_environment(launch_world(), use_deepspeed=True, timeout_seconds=60)
"""
_SHARED_MEMORY = (
    _PREPARE
    + """
from finetune.training.operators import load_shared_memory_operator
load_shared_memory_operator()
print_report({})
"""
)
# Three steps of DeepSpeed's CPU Adam against torch's AdamW, on the same numbers.
_CPU_ADAM = (
    _PREPARE
    + """
from pathlib import Path
from finetune.training.operators import one_at_a_time, prefer_own_ninja
prefer_own_ninja()
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch.utils.cpp_extension import _get_build_directory
start = torch.linspace(-1, 1, 4096)
mine, reference = (torch.nn.Parameter(start.clone()) for _ in range(2))
with one_at_a_time(Path(_get_build_directory(CPUAdamBuilder.NAME, verbose=False))):
    settings = {"lr": 0.01, "weight_decay": 0.1}
    optimizers = (DeepSpeedCPUAdam([mine], **settings), torch.optim.AdamW([reference], **settings))
for _ in range(3):
    for parameter, optimizer in zip((mine, reference), optimizers):
        parameter.grad = parameter.detach() ** 2 + 0.1
        optimizer.step()
print_report({"difference": float((mine - reference).abs().max())})
"""
)
# Float32 rounding of three steps; a wrong operator is off by a learning rate.
ADAM_TOLERANCE = 1e-5


def check_shared_memory_operator(environment: Mapping[str, str]) -> Check:
    """Build and load what DeepSpeed needs for several processes on a CPU."""
    answer, seconds = _run(_SHARED_MEMORY, "cpu", environment)
    if answer.report is None:
        return not_built("shared_memory_operator", answer)
    check = Check("shared_memory_operator", values={"seconds": round(seconds, 1)})
    return check.ok(_("built and loaded ({seconds:.0f} s)"))


def check_cpu_adam(device_type: str, environment: Mapping[str, str]) -> Check:
    """Build DeepSpeed's CPU Adam, and compare its steps with torch's."""
    answer, seconds = _run(_CPU_ADAM, device_type, environment)
    if answer.report is None:
        return not_built("cpu_adam", answer)
    difference = answer.report["difference"]
    check = Check("cpu_adam", values={"difference": difference, "seconds": round(seconds, 1)})
    if difference <= ADAM_TOLERANCE:
        return check.ok(
            _("built, three steps agree with torch's AdamW to {difference:.0e} ({seconds:.0f} s)")
        )
    return check.fail(
        _("three steps differ from torch's AdamW by {difference:.1e}"),
        _(
            "remove the built operators (TORCH_EXTENSIONS_DIR) and try again; or leave"
            " zero_force_ds_cpu_optimizer out"
        ),
    )


def _run(script: str, device_type: str, environment: Mapping[str, str]) -> tuple[Answer, float]:
    """Run a script that ends with its report; return the answer and the seconds that it took."""
    started = time.monotonic()
    command = [sys.executable, "-c", script, device_type]
    answer = run_to_end(command, environment=environment, timeout_seconds=BUILD_TIMEOUT_SECONDS)
    return answer, time.monotonic() - started


def not_built(name: str, answer: Answer) -> Check:
    """Report an operator that cannot be built: the first error of its messages, and whether a
    compiler is missing.
    """
    fix = _("install a C++ compiler (apt-get install g++) and ninja (pip install ninja)")
    if re.search(r"(c\+\+|g\+\+).*(not found|No such file)", answer.messages) is None:
        other = _("fix what the reason names, or {fix}; on Ascend source CANN's set_env.sh first")
        fix = other.format(fix=fix)
    # What follows the first error is torch and DeepSpeed passing it on.
    causes = re.findall(r"^(?:.*\berror: .*|\w+Error: .*)$", answer.messages, re.M)
    reason = causes[0].strip() if causes and answer.code is not None else answer.reason
    return Check(name).fail(_("cannot be built or loaded: {reason}"), fix, reason=reason)
