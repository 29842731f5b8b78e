"""DeepSpeed's C++ operators: built (once, for about a minute) and tried, each in a process of its own.

What is started is the training's own code, under the environment that a run prepares, so that what is built here is
what a run finds.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping

from finetune.commands.doctor.check import Check, fail, ok
from finetune.commands.doctor.probe import BUILD_TIMEOUT_SECONDS, Answer, run_to_end

_PREPARE = """
import json, os, sys
os.environ.setdefault("DS_ACCELERATOR", sys.argv[1])
from finetune.runtime.device import launch_world, prepare_environment
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
        return _not_built(name, answer)
    return ok(
        name, f"built and loaded ({seconds:.0f} s)", f"已编译并加载（{seconds:.0f} 秒）", seconds=round(seconds, 1)
    )


def check_cpu_adam(device_type: str, environment: Mapping[str, str]) -> Check:
    """DeepSpeed's CPU Adam: builds, steps, and its steps are torch's."""
    name = "cpu_adam"
    answer, seconds = _run(_CPU_ADAM, device_type, environment)
    if answer.report is None:
        return _not_built(name, answer)
    difference = answer.report["difference"]
    if not difference <= ADAM_TOLERANCE:
        return fail(
            name,
            (
                f"three steps differ from torch's AdamW by {difference:.1e}",
                f"三步结果与 torch 的 AdamW 相差 {difference:.1e}",
            ),
            (
                "remove the built operators (TORCH_EXTENSIONS_DIR) and try again; or leave "
                "zero_force_ds_cpu_optimizer out",
                "删除已编译的算子（TORCH_EXTENSIONS_DIR）后重试；或去掉 zero_force_ds_cpu_optimizer",
            ),
            difference=difference,
        )
    said = f"built, three steps agree with torch's AdamW to {difference:.0e} ({seconds:.0f} s)"
    chinese = f"已编译，三步结果与 torch 的 AdamW 相差不超过 {difference:.0e}（{seconds:.0f} 秒）"
    return ok(name, said, chinese, difference=difference, seconds=round(seconds, 1))


def _run(script: str, device_type: str, environment: Mapping[str, str]) -> tuple[Answer, float]:
    started = time.monotonic()
    code, messages = run_to_end(
        [sys.executable, "-c", script, device_type], environment=environment, timeout_seconds=BUILD_TIMEOUT_SECONDS
    )
    reports = [line for line in messages.splitlines() if line.startswith("REPORT ")]
    report = json.loads(reports[-1].removeprefix("REPORT ")) if code == 0 and reports else None
    return Answer(report, code, messages), time.monotonic() - started


def _not_built(name: str, answer: Answer) -> Check:
    missing_compiler = re.search(r"(c\+\+|g\+\+).*(not found|No such file)", answer.messages) is not None
    fix = (
        "install a C++ compiler (apt-get install g++) and ninja (pip install ninja)",
        "安装 C++ 编译器（apt-get install g++）与 ninja（pip install ninja）",
    )
    if not missing_compiler:
        fix = (
            f"mend what the reason says, or {fix[0]}; on Ascend source CANN's set_env.sh first",
            f"按上述原因处理，或{fix[1]}；在昇腾上请先 source CANN 的 set_env.sh",
        )
    reason = _first_cause(answer)
    return fail(name, (f"cannot be built or loaded: {reason}", f"无法编译或加载：{reason}"), fix)


def _first_cause(answer: Answer) -> str:
    """The first error among the messages: what follows is torch and DeepSpeed passing it on."""
    causes = re.findall(r"^(?:.*\berror: .*|\w+Error: .*)$", answer.messages, re.M)
    return causes[0].strip() if causes and answer.code is not None else answer.reason
