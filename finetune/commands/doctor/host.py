"""The host: memory under its cgroup's limit, /dev/shm, locked memory, open files, disk space and inodes, a compiler."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from finetune.commands.doctor.check import GIB, Check, fail, gib, ok, skip, warn
from finetune.runtime.host import HostUse

MIB = 1 << 20
# What processes on one machine put into /dev/shm: NCCL and gloo some MiB each, DeepSpeed's CPU collectives 66 MiB each.
SHM_PER_PROCESS_BYTES, LEAST_SHM_PER_PROCESS_BYTES = 66 * MIB, 8 * MIB
SHM_PER_LOADER_WORKER_BYTES = 16 * MIB
LEAST_HOST_BYTES = 2 * GIB
LEAST_DISK_BYTES, COMFORTABLE_DISK_BYTES = 256 * MIB, 5 * GIB
LEAST_INODES, COMFORTABLE_INODES = 200, 5000
LEAST_OPEN_FILES, COMFORTABLE_OPEN_FILES = 512, 4096


# ---------------------------------------------------------------- memory


def check_host_memory(host: HostUse, needed_bytes: int = 0, needed_for: tuple[str, str] = ("", "")) -> Check:
    """Whether the host has the memory that the run needs at least.

    Args:
        host: see `HostMeter.look`; a container has the memory that its limits leave.
        needed_bytes: a lower bound; 0 where it is not known.
        needed_for: what it is, in English and Chinese.
    """
    name = "host_memory"
    available = max(0, host.memory_total_bytes - host.memory_used_bytes)
    values = {"total_bytes": host.memory_total_bytes, "available_bytes": available, "needed_bytes": needed_bytes}
    have = f"{gib(available)} of {gib(host.memory_total_bytes)} host memory free"
    have_zh = f"主机内存可用 {gib(available)} / {gib(host.memory_total_bytes)}"
    fix = (
        "end other programs, start fewer processes, or raise the container's limit",
        "结束其他程序、减少进程数，或提高容器的内存上限",
    )
    if needed_bytes > available:
        return fail(
            name,
            (
                f"{have}; at least {gib(needed_bytes)} needed: {needed_for[0]}",
                f"{have_zh}；至少需要 {gib(needed_bytes)}：{needed_for[1]}",
            ),
            fix,
            **values,
        )
    if available < LEAST_HOST_BYTES:
        return warn(name, (f"only {have}", f"{have_zh}，偏少"), fix, **values)
    needs = f", at least {gib(needed_bytes)} needed ({needed_for[0]})" if needed_bytes else ""
    needs_zh = f"，至少需要 {gib(needed_bytes)}（{needed_for[1]}）" if needed_bytes else ""
    return ok(name, have + needs, have_zh + needs_zh, **values)


# ---------------------------------------------------------------- /dev/shm, locked memory, open files


def check_shared_memory(processes: int, loader_workers: int = 0, folder: Path = Path("/dev/shm")) -> Check:
    """Whether the processes of a run find room in /dev/shm: a bus error ends the run where they do not.

    Args:
        processes: processes of the run on this machine.
        loader_workers: loader processes of each of them.
    """
    name = "shared_memory"
    try:
        state = os.statvfs(folder)
    except OSError:
        return skip(name, f"no {folder} here", f"本机没有 {folder}")
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    several = processes if processes > 1 else 0
    needed = several * SHM_PER_PROCESS_BYTES + processes * loader_workers * SHM_PER_LOADER_WORKER_BYTES
    values = {"free_bytes": free, "total_bytes": total, "needed_bytes": needed}
    if free >= needed:
        return ok(name, f"{folder}: {gib(free)} free", f"{folder}：可用 {gib(free)}", **values)
    size = max(1, -(-2 * needed // GIB))
    verdict = fail if free < several * LEAST_SHM_PER_PROCESS_BYTES else warn
    fewer = ("; or --dataloader-num-workers 0", "；或 --dataloader-num-workers 0") if loader_workers else ("", "")
    return verdict(
        name,
        (
            f"{folder} has {gib(free)} free; {processes} processes with {loader_workers} loader workers each may need "
            f"{gib(needed)}, and die of a bus error without",
            f"{folder} 可用 {gib(free)}；{processes} 个进程（每个 {loader_workers} 个数据加载进程）可能需要 "
            f"{gib(needed)}，"
            "不足时会因总线错误退出",
        ),
        (
            f"docker run --shm-size={size}g, or as root: mount -o remount,size={size}G {folder}{fewer[0]}",
            f"docker run --shm-size={size}g，或以 root 执行 mount -o remount,size={size}G {folder}{fewer[1]}",
        ),
        **values,
    )


def check_locked_memory(pinned: bool, nodes: int = 1, limit: int | None = None) -> Check:
    """Whether memory can be locked, which pinned offload and RDMA between nodes need.

    Args:
        pinned: the configuration pins host memory (DeepSpeed's `pin_memory`).
        limit: bytes; None reads this process's, and -1 means no limit.
    """
    name = "locked_memory"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    shown = "unlimited" if limit == resource.RLIM_INFINITY else gib(limit)
    values = {"limit_bytes": limit}
    if limit != resource.RLIM_INFINITY and limit < GIB and (pinned or nodes > 1):
        why = "pinned offload" if pinned else "RDMA between nodes"
        why_zh = "锁页卸载" if pinned else "节点间 RDMA"
        return warn(
            name,
            (f"locked memory is limited to {shown}; {why} may fail", f"锁定内存上限为 {shown}；{why_zh}可能失败"),
            (
                "ulimit -l unlimited (docker run --ulimit memlock=-1), or set pin_memory to false",
                "ulimit -l unlimited（docker run --ulimit memlock=-1），或将 pin_memory 设为 false",
            ),
            **values,
        )
    return ok(name, f"locked memory: {shown}", f"锁定内存上限：{shown}", **values)


def check_open_files(limit: int | None = None) -> Check:
    """Whether a process may open the files that loaders, logs and sockets need."""
    name = "open_files"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    values = {"limit": limit}
    if limit == resource.RLIM_INFINITY or limit >= COMFORTABLE_OPEN_FILES:
        return ok(name, f"open files: {limit}", f"可打开文件数：{limit}", **values)
    verdict = fail if limit < LEAST_OPEN_FILES else warn
    return verdict(
        name,
        (
            f"a process may open {limit} files; loaders and sockets may need more",
            f"每个进程最多打开 {limit} 个文件；数据加载与套接字可能不够用",
        ),
        ("ulimit -n 65535 in the shell that starts the run", "在启动训练的 shell 中执行 ulimit -n 65535"),
        **values,
    )


# ---------------------------------------------------------------- disk


def existing_parent(path: Path) -> Path:
    """The path, or the nearest folder above it that exists: where a run would make its folder."""
    path = path.expanduser().absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def check_disk(place: str, folder: Path, needed_bytes: int = 0) -> Check:
    """Whether a folder that a run writes to is writable and has space and inodes.

    Args:
        place: what the folder is: "output" or "cache"; part of the check's name.
        needed_bytes: a lower bound of what the run writes there; 0 where it is not known.
    """
    name = f"disk_{place}"
    there = existing_parent(folder)
    state = os.statvfs(there)
    free, inodes = state.f_bavail * state.f_frsize, state.f_favail
    values = {"folder": str(folder), "free_bytes": free, "free_inodes": inodes, "needed_bytes": needed_bytes}
    other = ("name another folder", "请改用其他目录")
    if state.f_flag & os.ST_RDONLY or not os.access(there, os.W_OK | os.X_OK):
        return fail(name, (f"{there} cannot be written to", f"{there} 不可写"), other, **values)
    room = ("free space there, or name another folder", "请清理空间，或改用其他目录")
    if free < max(LEAST_DISK_BYTES, needed_bytes):
        needs = max(LEAST_DISK_BYTES, needed_bytes)
        return fail(
            name,
            (
                f"{there} has {gib(free)} free; checkpoints and result need {gib(needs)} at least",
                f"{there} 可用 {gib(free)}；检查点与结果至少需要 {gib(needs)}",
            ),
            room,
            **values,
        )
    if state.f_files and inodes < COMFORTABLE_INODES:
        verdict = fail if inodes < LEAST_INODES else warn
        return verdict(
            name,
            (f"{there} has room for {inodes} more files only", f"{there} 仅能再创建 {inodes} 个文件（inode 不足）"),
            ("remove files there, or name another folder", "请删除其中的文件，或改用其他目录"),
            **values,
        )
    if free < max(COMFORTABLE_DISK_BYTES, 2 * needed_bytes):
        return warn(name, (f"{there} has only {gib(free)} free", f"{there} 仅剩 {gib(free)}"), room, **values)
    return ok(name, f"{there}: {gib(free)} free", f"{there}：可用 {gib(free)}", **values)


# ---------------------------------------------------------------- a compiler


def check_compiler(needed_for: tuple[str, str] | None, environment: Mapping[str, str]) -> Check:
    """Whether there is the C++ compiler that DeepSpeed's operators are built with (CXX, else c++, as torch looks).

    Args:
        needed_for: what will be built, in English and Chinese; None where nothing is.
    """
    name = "compiler"
    program = environment.get("CXX") or "c++"
    found = shutil.which(program.split(" ")[0], path=environment.get("PATH"))
    if found is not None:
        return ok(name, f"C++ compiler: {found}", f"C++ 编译器：{found}", path=found)
    if needed_for is None:
        return skip(name, f"no C++ compiler ({program}), and none is needed", f"没有 C++ 编译器（{program}），也不需要")
    return fail(
        name,
        (
            f"no C++ compiler ({program}): {needed_for[0]} cannot be built",
            f"没有 C++ 编译器（{program}）：无法编译 {needed_for[1]}",
        ),
        (
            "apt-get install g++ (or your system's package), or set CXX to a compiler",
            "安装 g++（如 apt-get install g++），或用 CXX 指定编译器",
        ),
    )
