"""The host: memory under its cgroup's limit, /dev/shm, locked memory, open files, disk space and
inodes, a compiler, and DeepSpeed's C++ operators.

An operator is built (once, for about a minute) and tried in a process of its own. That process runs
the training's own code, under the environment that a run prepares, so that what is built here is
what a run finds.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from finetune.commands.doctor.check import Check, fail, ok, skip, warn
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


# ---------------------------------------------------------------- memory


def check_host_memory(host: HostUse, needed_bytes: int = 0, needed_for: str = "") -> Check:
    """Whether the host has the memory that the run needs at least.

    Args:
        host: see `HostMeter.look`; a container has the memory that its limits leave.
        needed_bytes: a lower bound; 0 where it is not known.
        needed_for: what it is, in the spoken language.
    """
    name = "host_memory"
    available = max(0, host.memory_total_bytes - host.memory_used_bytes)
    values = {
        "total_bytes": host.memory_total_bytes,
        "available_bytes": available,
        "needed_bytes": needed_bytes,
    }
    what = _("{free} of {total} host memory free").format(
        free=format_bytes(available), total=format_bytes(host.memory_total_bytes)
    )
    fix = _("end other programs, start fewer processes, or raise the container's limit")
    if needed_bytes:
        need = _("{what}; at least {needed} needed: {needed_for}")
        what = need.format(what=what, needed=format_bytes(needed_bytes), needed_for=needed_for)
    if needed_bytes > available:
        return fail(name, what, fix, **values)
    if available < LEAST_HOST_BYTES:
        return warn(name, _("only {what}").format(what=what), fix, **values)
    return ok(name, what, **values)


# -------------------------------------------------------------- /dev/shm, locked memory, open files


def check_shared_memory(
    processes: int, loader_workers: int = 0, folder: Path = Path("/dev/shm")
) -> Check:
    """Whether the processes of a run have room in /dev/shm: a bus error ends the run if not.

    Args:
        processes: processes of the run on this machine.
        loader_workers: loader processes of each of them.
    """
    name = "shared_memory"
    try:
        state = os.statvfs(folder)
    except OSError:
        return skip(name, _("no {folder} here").format(folder=folder))
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    several = processes if processes > 1 else 0
    needed = (
        several * SHM_PER_PROCESS_BYTES + processes * loader_workers * SHM_PER_LOADER_WORKER_BYTES
    )
    values = {"free_bytes": free, "total_bytes": total, "needed_bytes": needed}
    if free >= needed:
        return ok(
            name,
            _("{folder}: {free} free").format(folder=folder, free=format_bytes(free)),
            **values,
        )
    what = _(
        "{folder} has {free} free; {processes} processes with {workers} loader workers each may"
        " need {needed}, and die of a bus error without"
    ).format(
        folder=folder,
        free=format_bytes(free),
        processes=processes,
        workers=loader_workers,
        needed=format_bytes(needed),
    )
    fix = _("docker run --shm-size={size}g, or as root: mount -o remount,size={size}G {folder}")
    if loader_workers:
        fix = _(
            "docker run --shm-size={size}g, or as root: mount -o remount,size={size}G {folder}; or "
            "--dataloader-num-workers 0"
        )
    fix = fix.format(size=max(1, -(-2 * needed >> 30)), folder=folder)
    return (fail if free < several * LEAST_SHM_PER_PROCESS_BYTES else warn)(
        name, what, fix, **values
    )


def check_locked_memory(pinned: bool, nodes: int = 1, limit: int | None = None) -> Check:
    """Whether memory can be locked, which pinned offload and RDMA between nodes need.

    Args:
        pinned: offload wants pinned memory: DeepSpeed's `pin_memory` says so, or says nothing and
            there is a device.
        limit: bytes; None reads this process's, and -1 means no limit.
    """
    name = "locked_memory"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    unlimited = limit == resource.RLIM_INFINITY
    shown = _("unlimited") if unlimited else format_bytes(limit)
    if unlimited or limit >= LEAST_LOCKED_BYTES or not (pinned or nodes > 1):
        return ok(name, _("locked memory: {limit}").format(limit=shown), limit_bytes=limit)
    what = _("locked memory is limited to {limit}; {why} may fail")
    why = _("pinned offload") if pinned else _("RDMA between nodes")
    fix = _("ulimit -l unlimited (docker run --ulimit memlock=-1), or set pin_memory to false")
    return warn(name, what.format(limit=shown, why=why), fix, limit_bytes=limit)


def check_open_files(limit: int | None = None) -> Check:
    """Whether a process may open the files that loaders, logs and sockets need."""
    name = "open_files"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY or limit >= COMFORTABLE_OPEN_FILES:
        return ok(name, _("open files: {limit}").format(limit=limit), limit=limit)
    what = _("a process may open {limit} files; loaders and sockets may need more").format(
        limit=limit
    )
    fix = _("ulimit -n 65535 in the shell that starts the run")
    return (fail if limit < LEAST_OPEN_FILES else warn)(name, what, fix, limit=limit)


# ---------------------------------------------------------------- disk


def existing_parent(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists: where a run would make its
    folder.
    """
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_disk(use: str, folder: Path, needed_bytes: int = 0) -> Check:
    """Whether a folder that a run writes to is writable and has space and inodes.

    Args:
        use: what the folder is for: "output" or "cache"; part of the check's name.
        needed_bytes: a lower bound of what the run writes there; 0 where it is not known.
    """
    name, there = f"disk_{use}", existing_parent(folder)
    state = os.statvfs(there)
    free, inodes = state.f_bavail * state.f_frsize, state.f_favail
    values = {
        "folder": str(folder),
        "free_bytes": free,
        "free_inodes": inodes,
        "needed_bytes": needed_bytes,
    }
    if state.f_flag & os.ST_RDONLY or not os.access(there, os.W_OK | os.X_OK):
        return fail(
            name,
            _("{folder} cannot be written to").format(folder=there),
            _("name another folder"),
            **values,
        )
    fix = _("free space there, or name another folder")
    least = max(LEAST_DISK_BYTES, needed_bytes)
    shown = {"folder": there, "free": format_bytes(free)}
    if free < least:
        what = _("{folder} has {free} free; checkpoints and result need {needed} at least")
        return fail(name, what.format(needed=format_bytes(least), **shown), fix, **values)
    if state.f_files and inodes < COMFORTABLE_INODES:
        what = _("{folder} has room for {inodes} more files only").format(
            folder=there, inodes=inodes
        )
        verdict = fail if inodes < LEAST_INODES else warn
        return verdict(name, what, _("remove files there, or name another folder"), **values)
    if free < max(COMFORTABLE_DISK_BYTES, 2 * needed_bytes):
        return warn(name, _("{folder} has only {free} free").format(**shown), fix, **values)
    return ok(name, _("{folder}: {free} free").format(**shown), **values)


def check_locks(use: str, folder: Path) -> Iterator[Check]:
    """Whether a file system that machines share has locks that all of them see; nothing for a disk
    of this machine.

    Args:
        use: as for `check_disk`.
    """
    name, there = f"locks_{use}", existing_parent(folder)
    if not is_shared(there):
        return
    kind = mount_of(there)[0] or "?"
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".locks-") as file:
            locked = try_flock(file.fileno(), fcntl.LOCK_EX, Path(file.name))
    except OSError as error:
        yield skip(
            name,
            _("{folder} ({kind}): no file can be made: {why}").format(
                folder=there, kind=kind, why=error
            ),
        )
        return
    if locked is not None:
        yield ok(
            name, _("{folder} ({kind}) has locks").format(folder=there, kind=kind), filesystem=kind
        )
        return
    what = _(
        "{folder} ({kind}) has no locks that all machines see: a file stands for one while a run"
        " works there"
    )
    fix = _(
        "mount it with locks (NFS: lockd, no local_lock; Lustre: flock), or remove that file if a"
        " machine is lost"
    )
    yield warn(name, what.format(folder=there, kind=kind), fix, filesystem=kind)


# ---------------------------------------------------------------- a compiler


def check_compiler(needed_for: str, environment: Mapping[str, str]) -> Check:
    """Whether there is the C++ compiler that DeepSpeed's operators are built with (CXX, else c++,
    as torch looks).

    Args:
        needed_for: what will be built, in the spoken language; empty where nothing is.
    """
    name, program = "compiler", environment.get("CXX") or "c++"
    found = shutil.which(program.split(" ")[0], path=environment.get("PATH"))
    if found is not None:
        return ok(name, _("C++ compiler: {path}").format(path=found), path=found)
    if not needed_for:
        return skip(
            name, _("no C++ compiler ({program}), and none is needed").format(program=program)
        )
    what = _("no C++ compiler ({program}): {operator} cannot be built").format(
        program=program, operator=needed_for
    )
    return fail(
        name, what, _("apt-get install g++ (or your system's package), or set CXX to a compiler")
    )


# ---------------------------------------------------------------- DeepSpeed's operators

BUILD_TIMEOUT_SECONDS = 600.0
_PREPARE = """
import json, os, sys
os.environ.setdefault("DS_ACCELERATOR", sys.argv[1])
from finetune.runtime.launch_environment import launch_world, prepare_environment
prepare_environment(launch_world(), use_deepspeed=True, timeout_seconds=60)
"""
_SHARED_MEMORY = (
    _PREPARE
    + """
from finetune.training.operators import load_shared_memory_operator
load_shared_memory_operator()
print("REPORT " + json.dumps({}))
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
print("REPORT " + json.dumps({"difference": float((mine - reference).abs().max())}))
"""
)
# Float32 rounding of three steps; a wrong operator is off by a learning rate.
ADAM_TOLERANCE = 1e-5


def check_shared_memory_operator(environment: Mapping[str, str]) -> Check:
    """What DeepSpeed needs for several processes on a CPU."""
    name = "shared_memory_operator"
    answer, seconds = _run(_SHARED_MEMORY, "cpu", environment)
    if answer.report is None:
        return not_built(name, answer)
    what = _("built and loaded ({seconds:.0f} s)").format(seconds=seconds)
    return ok(name, what, seconds=round(seconds, 1))


def check_cpu_adam(device_type: str, environment: Mapping[str, str]) -> Check:
    """DeepSpeed's CPU Adam: builds, steps, and its steps are torch's."""
    name = "cpu_adam"
    answer, seconds = _run(_CPU_ADAM, device_type, environment)
    if answer.report is None:
        return not_built(name, answer)
    difference = answer.report["difference"]
    if not difference <= ADAM_TOLERANCE:
        what = _("three steps differ from torch's AdamW by {difference:.1e}").format(
            difference=difference
        )
        fix = _(
            "remove the built operators (TORCH_EXTENSIONS_DIR) and try again; or leave"
            " zero_force_ds_cpu_optimizer out"
        )
        return fail(name, what, fix, difference=difference)
    what = _("built, three steps agree with torch's AdamW to {difference:.0e} ({seconds:.0f} s)")
    what = what.format(difference=difference, seconds=seconds)
    return ok(name, what, difference=difference, seconds=round(seconds, 1))


def _run(script: str, device_type: str, environment: Mapping[str, str]) -> tuple[Answer, float]:
    started = time.monotonic()
    command = [sys.executable, "-c", script, device_type]
    answer = run_to_end(command, environment=environment, timeout_seconds=BUILD_TIMEOUT_SECONDS)
    reports = [line for line in answer.messages.splitlines() if line.startswith("REPORT ")]
    if answer.code == 0 and reports:
        answer = replace(answer, report=json.loads(reports[-1].removeprefix("REPORT ")))
    return answer, time.monotonic() - started


def not_built(name: str, answer: Answer) -> Check:
    """An operator that cannot be built: the first error of its messages, and whether a compiler is
    missing.
    """
    fix = _("install a C++ compiler (apt-get install g++) and ninja (pip install ninja)")
    if re.search(r"(c\+\+|g\+\+).*(not found|No such file)", answer.messages) is None:
        fix = _(
            "fix what the reason names, or {fix}; on Ascend source CANN's set_env.sh first"
        ).format(fix=fix)
    # What follows the first error is torch and DeepSpeed passing it on.
    causes = re.findall(r"^(?:.*\berror: .*|\w+Error: .*)$", answer.messages, re.M)
    reason = causes[0].strip() if causes and answer.code is not None else answer.reason
    return fail(name, _("cannot be built or loaded: {reason}").format(reason=reason), fix)
