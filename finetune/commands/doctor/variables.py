"""Variables that contradict one another, or the machine: a small rule for each. What is right is silent.

What the variables mean is the vendors' own: HCCL's in CANN's reference of environment variables, NCCL's and gloo's in
theirs, the allocators' in those of torch and torch_npu (PYTORCH_*_ALLOC_CONF).
"""

from __future__ import annotations

from collections.abc import Callable

from finetune.commands.doctor import allocators, collectives
from finetune.commands.doctor.check import Check, fail, ok, warn
from finetune.commands.doctor.facts import Facts

Rule = Callable[[Facts], "Check | None"]


def check_variables(facts: Facts) -> list[Check]:
    """What the rules found; one ok where they found nothing. Variables of another kind of device are not looked at."""
    rules = (*RULES, *RULES_FOR.get(facts.device_type, ()))
    found = [check for rule in rules if (check := rule(facts)) is not None]
    return found or [ok("variables", "no variables contradict one another", "环境变量之间没有矛盾")]


# ---------------------------------------------------------------- who the processes are


def stale_world(facts: Facts) -> Check | None:
    """Launchers' variables that an older script exported."""
    launched = any(facts.get(name) for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"))
    rank, size = facts.get("RANK"), facts.get("WORLD_SIZE")
    if size and not rank:
        return warn(
            "stale_world_size",
            (
                f"WORLD_SIZE={size} is set without RANK: it is ignored",
                f"设置了 WORLD_SIZE={size} 而没有 RANK：将被忽略",
            ),
            ("unset WORLD_SIZE; the launcher sets it for each process", "unset WORLD_SIZE；启动器会为每个进程设置"),
        )
    if facts.whole("RANK") is not None and (facts.whole("RANK") or 0) >= (facts.whole("WORLD_SIZE") or 1):
        return fail(
            "stale_rank",
            (f"RANK={rank} is not below WORLD_SIZE={size}", f"RANK={rank} 不小于 WORLD_SIZE={size}"),
            ("unset both; launchers set them", "请 unset 二者；由启动器设置"),
        )
    if rank and not launched and (facts.whole("WORLD_SIZE") or 1) > 1:
        whole = facts.get("MASTER_ADDR") and facts.get("MASTER_PORT")
        verdict = warn if whole else fail  # with both, a platform (Kubernetes) may have started this shell as one rank
        return verdict(
            "stale_rank",
            (
                f"RANK={rank} and WORLD_SIZE={size} are exported in this shell: a process started here would be rank "
                f"{rank}, and wait for the others",
                f"当前 shell 导出了 RANK={rank}、WORLD_SIZE={size}：在此启动的进程会以为自己是 {rank} "
                "号并一直等待其他进程",
            ),
            (
                "unset RANK LOCAL_RANK WORLD_SIZE, unless a platform set them for this process",
                "unset RANK LOCAL_RANK WORLD_SIZE，除非是平台为本进程设置的",
            ),
        )
    return None


def threads(facts: Facts) -> Check | None:
    """OMP_NUM_THREADS beyond the cores."""
    text = facts.get("OMP_NUM_THREADS")
    count = facts.whole("OMP_NUM_THREADS")
    if text and (count is None or count < 1):
        return warn(
            "omp_threads",
            (f"OMP_NUM_THREADS is {text!r}, not a number of threads", f"OMP_NUM_THREADS 为 {text!r}，不是线程数"),
            ("unset OMP_NUM_THREADS", "unset OMP_NUM_THREADS"),
        )
    if count and facts.processes > 1 and count * facts.processes > facts.cores:
        fitting = max(1, facts.cores // facts.processes)
        return warn(
            "omp_threads",
            (
                f"OMP_NUM_THREADS={count} x {facts.processes} processes on {facts.cores} cores: they wait for one "
                "another",
                f"OMP_NUM_THREADS={count} x {facts.processes} 个进程，而只有 {facts.cores} 个核：会互相等待",
            ),
            (f"export OMP_NUM_THREADS={fitting}, or unset it", f"export OMP_NUM_THREADS={fitting}，或 unset"),
        )
    return None


# ---------------------------------------------------------------- devices that are shown


def visible_ids(facts: Facts) -> Check | None:
    """Ids in a visible-device variable that do not exist, or come twice."""
    variable = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}.get(facts.device_type)
    if variable is None or variable not in facts.environment:
        return None
    words = [word.strip() for word in facts.get(variable).split(",") if word.strip()]
    name = "visible_devices"
    if not words or words == ["-1"]:
        return warn(
            name,
            (
                f"{variable}={facts.get(variable)!r} hides every device: the run takes the CPU",
                f"{variable}={facts.get(variable)!r} 隐藏了所有设备：训练将使用 CPU",
            ),
            (
                f"unset {variable}, or --device-type cpu if that is meant",
                f"unset {variable}；若确实要用 CPU，请写 --device-type cpu",
            ),
        )
    if facts.device_type == "npu" and any(not word.isdigit() for word in words):
        return fail(
            name,
            (
                f"{variable}={facts.get(variable)} must be ids like 0,1,2,3",
                f"{variable}={facts.get(variable)} 必须是 0,1,2,3 这样的编号",
            ),
            (f"export {variable}=0,1", f"export {variable}=0,1"),
        )
    ids = [int(word) for word in words if word.isdigit()]
    if len(set(words)) < len(words):
        return fail(
            name,
            (
                f"{variable}={facts.get(variable)} names a device twice",
                f"{variable}={facts.get(variable)} 重复列出了同一设备",
            ),
            ("name each device once", "每个设备只写一次"),
        )
    count = facts.devices_here
    beyond = [one for one in ids if count is not None and one >= count]
    if beyond:
        return fail(
            name,
            (
                f"{variable}={facts.get(variable)} names device {beyond[0]}, but there are {count} here (0 to "
                f"{count - 1})",
                f"{variable}={facts.get(variable)} 包含设备 {beyond[0]}，而本机只有 {count} 个（0 至 {count - 1}）",
            )
            if count
            else (
                f"{variable}={facts.get(variable)}, but there is no device here",
                f"{variable}={facts.get(variable)}，但本机没有设备",
            ),
            (
                "inside a container ids count from 0 again; name those that npu-smi or nvidia-smi lists, by their "
                "place",
                "容器内编号从 0 重新开始；请按 npu-smi / nvidia-smi 列出的顺序填写",
            ),
        )
    return None


def ascend_visible(facts: Facts) -> Check | None:
    """The container runtime's variable and the program's, both set: the program's ids count within the container."""
    outer = [word for word in facts.get("ASCEND_VISIBLE_DEVICES").split(",") if word.strip()]
    inner = facts.get("ASCEND_RT_VISIBLE_DEVICES")
    ids = [int(word) for word in inner.split(",") if word.strip().isdigit()]
    if not outer or not ids or facts.devices_here is not None:
        return None  # where the devices are counted, visible_ids says what is wrong
    if max(ids) < len(outer):
        return None
    places = ",".join(map(str, range(len(outer))))
    return fail(
        "ascend_visible_devices",
        (
            f"ASCEND_RT_VISIBLE_DEVICES={inner} and ASCEND_VISIBLE_DEVICES={','.join(outer)}: the container has "
            f"{len(outer)} devices, numbered from 0",
            f"ASCEND_RT_VISIBLE_DEVICES={inner} 与 ASCEND_VISIBLE_DEVICES={','.join(outer)} 矛盾：容器内有 "
            f"{len(outer)} 个设备，编号从 0 开始",
        ),
        (
            f"export ASCEND_RT_VISIBLE_DEVICES={places}, or unset it",
            f"export ASCEND_RT_VISIBLE_DEVICES={places}，或 unset",
        ),
    )


def device_choice(facts: Facts) -> Check | None:
    """DS_ACCELERATOR against the device of the run."""
    chosen = facts.get("DS_ACCELERATOR")
    if facts.deepspeed and chosen and chosen != facts.device_type:
        return fail(
            "ds_accelerator",
            (
                f"DS_ACCELERATOR={chosen}, but the run takes {facts.device_type}: DeepSpeed would work on another "
                "device",
                f"DS_ACCELERATOR={chosen}，而训练使用 {facts.device_type}：DeepSpeed 会使用另一种设备",
            ),
            ("unset DS_ACCELERATOR; it is set to the run's device", "unset DS_ACCELERATOR；会自动设为训练所用设备"),
        )
    return None


# ---------------------------------------------------------------- switches


def synchronous_launches(facts: Facts) -> Check | None:
    """Debugging switches that make every operator wait."""
    found = [name for name in ("ASCEND_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING") if facts.on(name)]
    if facts.device_type == "npu" and facts.get("TASK_QUEUE_ENABLE") == "0":
        found.append("TASK_QUEUE_ENABLE")
    if not found:
        return None
    said = ", ".join(f"{name}={facts.get(name)}" for name in found)
    return warn(
        "synchronous_launches",
        (
            f"{said}: every operator waits for the device, which is for debugging and several times slower",
            f"{said}：每个算子都等待设备完成，仅用于调试，会慢数倍",
        ),
        (f"unset {' '.join(found)}", f"unset {' '.join(found)}"),
    )


def trackers_off(facts: Facts) -> Check | None:
    """Weights & Biases asked for and switched off."""
    if facts.get("WANDB_MODE") == "disabled" and facts.get("WANDB_API_KEY"):
        return warn(
            "wandb",
            (
                "WANDB_API_KEY is set, and WANDB_MODE=disabled: nothing is reported",
                "设置了 WANDB_API_KEY，但 WANDB_MODE=disabled：不会上报任何内容",
            ),
            ("unset WANDB_MODE, or set it to offline", "unset WANDB_MODE，或设为 offline"),
        )
    return None


RULES: tuple[Rule, ...] = (
    stale_world,
    threads,
    visible_ids,
    device_choice,
    collectives.interface_names,
    synchronous_launches,
    trackers_off,
)
RULES_FOR: dict[str, tuple[Rule, ...]] = {
    "npu": (
        ascend_visible,
        allocators.npu_allocator,
        collectives.hccl_address,
        collectives.hccl_base_port,
        collectives.hccl_ephemeral_ports,
        collectives.hccl_timeouts,
        collectives.hccl_whitelist,
    ),
    "cuda": (allocators.cuda_allocator, collectives.nccl_paths),
}
