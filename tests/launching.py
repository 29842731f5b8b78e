"""The real command in a process of its own, under each launcher: for tests that must see what a
user sees.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
# Longest wait for a process that works: a guard against one that hangs, on a machine that may have
# other work to do.
PATIENCE_SECONDS = 900.0
# Of each process: tensors are tiny. `make test-isa` asks for more.
THREADS = os.environ.get("FINETUNE_TEST_THREADS", "1")

# What a launcher or a test before may have left behind; a started command must not inherit it.
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def environment(env: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This environment without launchers' variables, THREADS threads a process, no network; None takes a
    variable out.
    """
    made = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    made = {
        name: value
        for name, value in made.items()
        if not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    made |= {"OMP_NUM_THREADS": THREADS, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    made["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    for name, value in (env or {}).items():
        made.pop(name, None)
        if value is not None:
            made[name] = value
    return made


def command(
    args: Sequence[object],
    *,
    nproc: int | None = None,
    launcher: str | None = None,
    launcher_args: Sequence[object] = (),
    module: str = "finetune.sft",
) -> list[str]:
    """The words of a command line.

    Args:
        nproc: processes; None or 1 is one process without a launcher, unless a launcher is named.
        launcher: "python", "torchrun" or "accelerate"; None: torchrun for several processes, python
            for one.
        launcher_args: words for the launcher, before the module.
    """
    launcher = launcher or ("torchrun" if (nproc or 1) > 1 else "python")
    if launcher == "python":
        start: list[object] = [sys.executable, *launcher_args, "-m", module]
    elif launcher == "torchrun":
        # A port of the system's choice: tests run beside one another.
        start = [
            BIN / "torchrun",
            "--standalone",
            f"--nproc_per_node={nproc or 1}",
            *launcher_args,
            "-m",
            module,
        ]
    elif launcher == "accelerate":
        start = [BIN / "accelerate", "launch", *launcher_args, "-m", module]
    else:
        raise ValueError(f"unknown launcher {launcher!r}")
    return [str(word) for word in [*start, *args]]


def run_command(
    words: Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | str | None = None,
    timeout: float = PATIENCE_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run to the end; past the timeout the whole process group is ended and TimeoutExpired raised,
    with the output.
    """
    process = subprocess.Popen(
        list(words),
        env=environment(env),
        cwd=cwd or ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        # SIGTERM first: torchrun's workers are in sessions of their own, and only it can end them.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        sys.stderr.write(f"{' '.join(map(str, words))}\n{out}\n{err}\n")
        raise
    return subprocess.CompletedProcess(list(words), process.returncode, out, err)


def run_cli(
    args: Sequence[object],
    nproc: int | None = None,
    env: Mapping[str, str | None] | None = None,
    launcher: str | None = None,
    *,
    launcher_args: Sequence[object] = (),
    module: str = "finetune.sft",
    cwd: Path | str | None = None,
    timeout: float = PATIENCE_SECONDS,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`python -m finetune.sft ARGS` (or another module) as a user runs it.

    Args:
        nproc: processes; more than one starts torchrun, unless a launcher is named.
        env: variables to set; None takes one out.
        launcher: "python", "torchrun" or "accelerate".
        check: fail the test, with the output, unless the exit code is 0.
    """
    words = command(
        args, nproc=nproc, launcher=launcher, launcher_args=launcher_args, module=module
    )
    result = run_command(words, env=env, cwd=cwd, timeout=timeout)
    if check:
        assert result.returncode == 0, (
            f"{' '.join(words)}\nexit code {result.returncode}\n{said(result)}"
        )
    return result


def said(result: subprocess.CompletedProcess[str]) -> str:
    """Everything that a command printed."""
    return f"{result.stdout}\n{result.stderr}"
