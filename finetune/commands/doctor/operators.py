"""DeepSpeed's C++ operators: built (once, for about a minute) and tried, each in a process of its
own.

What is started is the training's own code, under the environment that a run prepares, so that what
is built here is what a run finds.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from finetune.commands.doctor.check import Check, fail, ok
from finetune.commands.doctor.probe import Answer, run_to_end
from finetune.runtime.language import _

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
