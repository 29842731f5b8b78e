"""Variables that contradict one another, or the machine: a small rule for each. What is right is
silent.

What the variables mean is the vendors' own: HCCL's in CANN's reference of environment variables,
NCCL's and gloo's in theirs, the allocators' in those of torch and torch_npu (PYTORCH_*_ALLOC_CONF).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from finetune.commands.doctor import collectives
from finetune.commands.doctor.check import Check, fail, ok, warn
from finetune.commands.doctor.facts import Facts
from finetune.runtime.device import DEVICE_KINDS
from finetune.runtime.language import _

Rule = Callable[[Facts], "Check | None"]


def check_variables(facts: Facts) -> list[Check]:
    """What the rules found; one ok where they found nothing. Variables of another kind of device
    are not looked at.
    """
    rules = (*RULES, *RULES_FOR.get(facts.device_type, ()))
    found = [check for rule in rules if (check := rule(facts)) is not None]
    return found or [ok("variables", _("no variables contradict one another"))]


# ---------------------------------------------------------------- who the processes are


def stale_world(facts: Facts) -> Check | None:
    """Launchers' variables that an older script exported."""
    rank, size = facts.get("RANK"), facts.get("WORLD_SIZE")
    if size and not rank:
        return warn(
            "stale_world_size",
            _("WORLD_SIZE={size} is set without RANK: it is ignored").format(size=size),
            _("unset WORLD_SIZE; the launcher sets it for each process"),
        )
    number, processes = facts.whole("RANK"), facts.whole("WORLD_SIZE") or 1
    if number is not None and number >= processes:
        return fail(
            "stale_rank",
            _("RANK={rank} is not below WORLD_SIZE={size}").format(rank=rank, size=size),
            _("unset both; launchers set them"),
        )
    launched = any(
        facts.get(name) for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    )
    if rank and not launched and processes > 1:
        # With an address and a port, a platform (Kubernetes) may have started this shell as one
        # rank.
        verdict = warn if facts.get("MASTER_ADDR") and facts.get("MASTER_PORT") else fail
        text = _(
            "RANK={rank} and WORLD_SIZE={size} are exported in this shell: a process started here"
            " would be rank {rank}, and wait for the others"
        )
        fix = _("unset RANK LOCAL_RANK WORLD_SIZE, unless a platform set them for this process")
        return verdict("stale_rank", text.format(rank=rank, size=size), fix)
    return None


def threads(facts: Facts) -> Check | None:
    """OMP_NUM_THREADS beyond the cores."""
    text, count = facts.get("OMP_NUM_THREADS"), facts.whole("OMP_NUM_THREADS")
    if text and (count is None or count < 1):
        what = _("OMP_NUM_THREADS is {text!r}, not a number of threads").format(text=text)
        return warn("omp_threads", what, "unset OMP_NUM_THREADS")
    if count and facts.processes > 1 and count * facts.processes > facts.cores:
        what = _(
            "OMP_NUM_THREADS={count} x {processes} processes on {cores} cores: they wait for one"
            " another"
        )
        fix = _("export OMP_NUM_THREADS={fitting}, or unset it")
        return warn(
            "omp_threads",
            what.format(count=count, processes=facts.processes, cores=facts.cores),
            fix.format(fitting=max(1, facts.cores // facts.processes)),
        )
    return None


# ---------------------------------------------------------------- devices that are shown


def visible_ids(facts: Facts) -> Check | None:
    """Ids in a visible-device variable that do not exist, or come twice."""
    name = "visible_devices"
    kind = DEVICE_KINDS.get(facts.device_type)
    variable = kind.visible_variable if kind is not None else ""
    if not variable or variable not in facts.environment:
        return None
    ids = [part.strip() for part in facts.get(variable).split(",") if part.strip()]
    setting = facts.shown(variable)
    if not ids or ids == ["-1"]:
        what = _("{variable}={value!r} hides every device: the run takes the CPU")
        fix = _("unset {variable}, or --device-type cpu if that is meant").format(variable=variable)
        return warn(name, what.format(variable=variable, value=facts.get(variable)), fix)
    if facts.device_type == "npu" and any(not one.isdigit() for one in ids):
        return fail(
            name,
            _("{setting} must be ids like 0,1,2,3").format(setting=setting),
            f"export {variable}=0,1",
        )
    if len(set(ids)) < len(ids):
        return fail(
            name,
            _("{setting} names a device twice").format(setting=setting),
            _("name each device once"),
        )
    count = facts.devices_here
    beyond = [one for one in ids if one.isdigit() and count is not None and int(one) >= count]
    if not beyond:
        return None
    if count:
        what = _("{setting} names device {device}, but there are {count} here (0 to {last})")
        what = what.format(setting=setting, device=int(beyond[0]), count=count, last=count - 1)
    else:
        what = _("{setting}, but there is no device here").format(setting=setting)
    return fail(
        name,
        what,
        _(
            "inside a container ids count from 0 again; name those that npu-smi or nvidia-smi"
            " lists, by their position"
        ),
    )


def ascend_visible(facts: Facts) -> Check | None:
    """The container runtime's variable and the program's, both set: the program's ids count within
    the container.
    """
    outer = [part for part in facts.get("ASCEND_VISIBLE_DEVICES").split(",") if part.strip()]
    inner = facts.get("ASCEND_RT_VISIBLE_DEVICES")
    ids = [int(part) for part in inner.split(",") if part.strip().isdigit()]
    if not outer or not ids or facts.devices_here is not None:
        return None  # where the devices are counted, visible_ids reports what is wrong
    if max(ids) < len(outer):
        return None
    what = _(
        "ASCEND_RT_VISIBLE_DEVICES={inner} and ASCEND_VISIBLE_DEVICES={outer}: the container has"
        " {count} devices, numbered from 0"
    )
    return fail(
        "ascend_visible_devices",
        what.format(inner=inner, outer=",".join(outer), count=len(outer)),
        _("export ASCEND_RT_VISIBLE_DEVICES={ids}, or unset it").format(
            ids=",".join(map(str, range(len(outer))))
        ),
    )


def device_choice(facts: Facts) -> Check | None:
    """DS_ACCELERATOR against the device of the run."""
    chosen = facts.get("DS_ACCELERATOR")
    if not facts.deepspeed or chosen in ("", facts.device_type):
        return None
    what = _(
        "DS_ACCELERATOR={chosen}, but the run takes {device_type}: DeepSpeed would work on another"
        " device"
    )
    return fail(
        "ds_accelerator",
        what.format(chosen=chosen, device_type=facts.device_type),
        _("unset DS_ACCELERATOR; it is set to the run's device"),
    )


# ---------------------------------------------------------------- allocators


def _allocator_settings(text: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in text.split(","))
    return {key.strip(): value.strip() for key, _colon, value in pairs if key.strip()}


def npu_allocator(facts: Facts) -> Check | None:
    """torch_npu refuses expandable segments beside limits on splitting or collecting."""
    variable = "PYTORCH_NPU_ALLOC_CONF"
    settings = _allocator_settings(facts.get(variable))
    others = [
        key for key in ("max_split_size_mb", "garbage_collection_threshold") if key in settings
    ]
    if settings.get("expandable_segments", "").lower() == "true" and others:
        what = _("{setting}: {others} cannot go with expandable_segments")
        return fail(
            "npu_allocator",
            what.format(setting=facts.shown(variable), others=", ".join(others)),
            _(
                "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True (samples of many lengths),"
                " or keep max_split_size_mb alone"
            ),
        )
    return _malformed_allocator("npu_allocator", facts, variable, settings)


def cuda_allocator(facts: Facts) -> Check | None:
    """The old and the new name with different settings; a backend that has no expandable
    segments.
    """
    name, names = "cuda_allocator", ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    new, old = (_allocator_settings(facts.get(variable)) for variable in names)
    if old and new and old != new:
        what = _("{old} and {new} differ: the new name wins")
        what = what.format(
            old=facts.shown("PYTORCH_CUDA_ALLOC_CONF"), new=facts.shown("PYTORCH_ALLOC_CONF")
        )
        return warn(name, what, _("keep PYTORCH_ALLOC_CONF alone"))
    for variable, settings in zip(names, (new, old), strict=True):
        if (
            settings.get("backend") == "cudaMallocAsync"
            and settings.get("expandable_segments", "").lower() == "true"
        ):
            what = _("{setting}: cudaMallocAsync has no expandable_segments").format(
                setting=facts.shown(variable)
            )
            return warn(name, what, _("keep one of the two"))
        if (found := _malformed_allocator(name, facts, variable, settings)) is not None:
            return found
    return None


def _malformed_allocator(
    name: str, facts: Facts, variable: str, settings: Mapping[str, str]
) -> Check | None:
    """Allocators refuse a key without a value when the first tensor is made."""
    key = next((key for key, value in settings.items() if not value), None)
    if key is None:
        return None
    what = _("{setting}: {key!r} has no value; write key:value,key:value").format(
        setting=facts.shown(variable), key=key
    )
    return fail(name, what, f"export {variable}=expandable_segments:True")


# ---------------------------------------------------------------- switches


def synchronous_launches(facts: Facts) -> Check | None:
    """Debugging switches that make every operator wait."""
    found = [name for name in ("ASCEND_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING") if facts.on(name)]
    if facts.device_type == "npu" and facts.get("TASK_QUEUE_ENABLE") == "0":
        found.append("TASK_QUEUE_ENABLE")
    if not found:
        return None
    what = _(
        "{settings}: every operator waits for the device, which is for debugging and several times"
        " slower"
    )
    what = what.format(settings=", ".join(map(facts.shown, found)))
    return warn("synchronous_launches", what, f"unset {' '.join(found)}")


def trackers_off(facts: Facts) -> Check | None:
    """Weights & Biases asked for and switched off."""
    if facts.get("WANDB_MODE") != "disabled" or not facts.get("WANDB_API_KEY"):
        return None
    what = _("WANDB_API_KEY is set, and WANDB_MODE=disabled: nothing is reported")
    return warn("wandb", what, _("unset WANDB_MODE, or set it to offline"))


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
        npu_allocator,
        collectives.hccl_address,
        collectives.hccl_base_port,
        collectives.hccl_ephemeral_ports,
        collectives.hccl_timeouts,
        collectives.hccl_whitelist,
    ),
    "cuda": (cuda_allocator, collectives.nccl_paths),
}
