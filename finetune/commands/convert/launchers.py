"""What a command line says to the launcher of its processes: torchrun, DeepSpeed's or accelerate's,
in front of the tool's name, or behind it, where the tool passes it on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from finetune.commands.convert.draft import Tool

# Options of launchers: processes of the run, processes of a node, nodes.
_PROCESSES, _OF_NODE, _NODES = (
    ("num_processes",),
    ("nproc_per_node", "num_gpus"),
    ("nnodes", "num_nodes"),
)
# The others of torchrun 2.13 and accelerate 1.15 that say where processes are and how they meet.
_WHERE = """
    num_machines machine_rank main_process_ip main_process_port same_network gpu_ids multi_gpu cpu
    config_file launcher node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id
    rdzv_conf standalone max_restarts monitor_interval num_cpu_threads_per_process
    enable_cpu_affinity main_training_function use_deepspeed deepspeed_hostfile log_dir tee role
    zero3_init_flag zero3_save_16bit_model
"""
_NAMES = frozenset([*_PROCESSES, *_OF_NODE, *_NODES, *_WHERE.split()])
# What of accelerate's says how weights are sharded -> what a tool's own `deepspeed` has in its
# place.
_SHARDING = {"deepspeed_config_file": "{}", "zero_stage": "zero{}", "accelerate_config": "{}"}


def processes_of(words: Iterable[str], variables: Mapping[str, str]) -> int | None:
    """The processes that the words of a command line, and the environment, ask a launcher for; None
    for none.
    """
    given = {
        "nproc_per_node": variables.get("NPROC_PER_NODE", ""),
        "nnodes": variables.get("NNODES", ""),
    }
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        given[name.lstrip("-").replace("-", "_").lower()] = value if equals else following

    def number(names: tuple[str, ...]) -> int | None:
        return next((int(given[name]) for name in names if given.get(name, "").isdecimal()), None)

    of_node = number(_OF_NODE)
    return number(_PROCESSES) or (of_node * (number(_NODES) or 1) if of_node else None)


def without_launcher(options: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """A tool's options without those that it passes on to its launcher; how that shards stays, as
    `deepspeed`.
    """
    own = {
        name: value for name, value in options.items() if name in tool.options or name not in _NAMES
    }
    for name, form in _SHARDING.items():
        text = form.format(own.get(name))
        if (
            name in own
            and "deepspeed" in tool.options
            and ("zero" in text.lower() or text.endswith(".json"))
        ):
            own.setdefault("deepspeed", text)
            del own[name]
    return own


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line."""
    return [f"--{name}={value}" for name, value in options.items()]
