"""For tests of whole runs: a tiny model and data, processes that train, and what they left behind.

Ranks are forked from a server that has imported everything once, so that a run costs seconds. Each
has the environment that a launcher gives, and meets its peers in a store that the test holds, as
torchrun's does. `launch_torchrun` starts a real launcher.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from launching import PATIENCE_SECONDS, THREADS

from finetune.config.base_config import BaseConfig
from finetune.config.fields import flag
from finetune.config.options import EXTRA, ONLY_IN_FILES, flags_of

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = (
    "finetune.sft",
    "finetune.training.execute",
    "finetune.training.pretraining.build",
    "finetune.training.preferences.trainer",
    "finetune.data.dataset",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # brings torch._inductor, which takes two seconds
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.integrations.deepspeed",
    "frozen_imports",  # last
)
DEFAULT_TIMEOUT_SECONDS = PATIENCE_SECONDS


def make_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 1,
    hidden: int = 32,
    tokenizer_name: str = "chatml",
) -> Path:
    """A small Qwen3 with random weights, and its tokenizer."""
    import chat_models
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = chat_models.family(tokenizer_name)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # so that attention and depth matter, which at 0.02 and this width they hardly do
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def vocabulary(model: Path) -> int:
    """Embeddings of a model made here."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def make_data(path: Path, records: int, *, seed: int = 0) -> Path:
    """Alpaca records of very different lengths, of three difficulties."""
    choose = random.Random(seed)
    words = "router switch port frame packet BGP VLAN 路由 交换 端口 42 link node".split()
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            question = " ".join(choose.choices(words, k=choose.randint(1, 6)))
            answer = " ".join(choose.choices(words, k=int(choose.paretovariate(1.2)) % 24 + 1))
            difficulty = ("explain", "reasoning", "topology")[number % 3]
            record = {"instruction": question, "input": "", "output": answer}
            record["difficulty"] = difficulty
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return path


@dataclass(frozen=True)
class Materials:
    """A tiny model and its data, in one folder."""

    folder: Path
    model: Path
    data: Path
    valid: Path

    def settings(self, output_dir: Path, **changes: Any) -> dict[str, Any]:
        """Settings of a small float32 run; None takes a setting out."""
        settings = {
            "model": str(self.model),
            "data": str(self.data),
            "output_dir": str(output_dir),
            "cutoff_len": 96,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "max_steps": 6,
            "learning_rate": 1e-2,
            "lora_r": 4,
            "dtype": "float32",
            "device_type": "cpu",
            "save_steps": 0,
            "log_samples": True,
            "report_to": "none",
            "preprocessing_num_workers": 1,
            "cache_dir": str(self.folder / "cache"),
            "timeout_seconds": 600,
        } | changes
        return {name: value for name, value in settings.items() if value is not None}


def make_materials(
    folder: Path, *, records: int = 60, seed: int = 0, layers: int = 1, hidden: int = 32
) -> Materials:
    """One layer by default: most of a run's time goes to ZeRO's hooks, layer by layer."""
    folder.mkdir(parents=True, exist_ok=True)
    return Materials(
        folder=folder,
        model=make_model(folder / "model", seed=seed, layers=layers, hidden=hidden),
        data=make_data(folder / "train.jsonl", records, seed=seed),
        valid=make_data(folder / "valid.jsonl", 13, seed=seed + 1),
    )


def deepspeed_keys(stage: int, *, offload: bool = False) -> dict[str, Any]:
    """DeepSpeed keys for a ZeRO stage, with thresholds that partition even a tiny model."""
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0}
        if offload:
            zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    return {"zero_optimization": zero}


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero2": {"deepspeed": deepspeed_keys(2)},
    "zero3": {"deepspeed": deepspeed_keys(3)},
    "zero3_offload": {"deepspeed": deepspeed_keys(3, offload=True)},
}


@dataclass
class Ranks:
    """The processes of one run that are (or were) at work."""

    processes: list[Any]
    log_paths: list[Path]
    store: Any

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def wait(self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> list[int | None]:
        """Exit codes by rank, negative for a signal; all are killed when the time is up."""
        deadline = time.monotonic() + timeout_seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [process for process in self.processes if process.exitcode is None]
        for process in hung:
            process.kill()
            process.join()
        if hung:
            raise TimeoutError(f"a rank still ran after {timeout_seconds} s:\n{self.output()}")
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """SIGKILL to every rank, as nearly at once as can be."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def output(self) -> str:
        texts = (path.read_text(errors="replace") for path in self.log_paths if path.exists())
        return "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts))[-20_000:]


_forks: list[Any] = []


def _fork_context() -> Any:
    """A server that has imported what a run needs, without threads."""
    if not _forks:
        import torch

        os.environ["OMP_NUM_THREADS"] = THREADS
        # What has asked CUDA's driver for devices cannot be forked: torch asks NVML, and DeepSpeed, which
        # asks the driver as it is imported, is left to each rank.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        sees_devices = torch.cuda.device_count() > 0
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [name for name in PRELOADED if not (sees_devices and name.startswith("deepspeed"))]
        )
        if sees_devices:  # else each rank imports everything for itself
            process = context.Process(target=_add_on_the_device)
            process.start()
            process.join()
            if process.exitcode != 0:
                context = multiprocessing.get_context("spawn")
        _forks.append(context)
    return _forks[0]


def _add_on_the_device() -> None:
    import torch

    assert float(torch.ones(1, device="cuda") + 1) == 2


def _config_file(settings: Mapping[str, Any]) -> Path:
    """The settings of one start as a file, in a folder next to the run's."""
    output_dir = Path(str(settings["output_dir"]))
    side = output_dir.parent / f"{output_dir.name}.side"
    side.mkdir(parents=True, exist_ok=True)
    config = side / f"{len(list(side.glob('*.json')))}.json"
    config.write_text(json.dumps(settings), encoding="utf-8")
    return config


def start(
    settings: Mapping[str, Any],
    processes: int = 1,
    *,
    patch: Callable[..., None] | None = None,
    patch_arguments: Sequence[Any] = (),
    arguments: Sequence[str] = (),
    launched: bool | None = None,
    module: str = "finetune.sft",
) -> Ranks:
    """Start `python -m MODULE --config SETTINGS ARGUMENTS` on so many ranks.

    Args:
        patch: a function of a module, called in each rank first, with its rank and `patch_arguments`.
        launched: whether ranks have a launcher's environment; by default if there are several.
    """
    from torch.distributed import TCPStore

    config = _config_file(settings)
    launched = processes > 1 if launched is None else launched
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if launched else None
    logs = [config.with_name(f"{config.stem}-rank{rank}.log") for rank in range(processes)]
    made = []
    for rank, log in enumerate(logs):
        given = _environment(rank, processes, store.port) if store is not None else {}
        words = ["--config", str(config), *arguments]
        started = (given, words, str(log), patch, (rank, *patch_arguments), module)
        made.append(_fork_context().Process(target=_rank, args=started, daemon=True))
        made[-1].start()
    return Ranks(made, logs, store)


def train(
    settings: Mapping[str, Any], processes: int = 1, *, expect: int = 0, **options: Any
) -> Ranks:
    """Run to the end and check every rank's exit code."""
    ranks = start(settings, processes, **options)
    codes = ranks.wait()
    assert codes == [expect] * processes, f"exit codes {codes}\n{ranks.output()}"
    return ranks


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store exists already, as under torchrun: ranks only connect to it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": THREADS,
    }


def _rank(
    environment: dict[str, str],
    arguments: list[str],
    log_path: str,
    patch: Callable[..., None] | None,
    patch_arguments: tuple[Any, ...],
    module: str,
) -> None:
    """One rank, in a forked process: never returns."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    for name in "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split():
        os.environ.pop(name, None)
    os.environ.update(environment)
    os.chdir(ROOT)
    import torch

    torch.set_num_threads(int(THREADS))
    code = 70
    try:
        if patch is not None:
            patch(*patch_arguments)
        found = importlib.import_module(module)
        if hasattr(found, "__path__"):  # a package is run by its __main__
            found = importlib.import_module(f"{module}.__main__")
        code = found.main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 70
    except BaseException:
        traceback.print_exc()
        code = 1  # what the interpreter makes of it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_module(
    module: str,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    folder: Path = ROOT,
) -> tuple[int, str]:
    """`python -m MODULE ARGUMENTS` in a folder, forked as `start` does; exit code, output."""
    process = _fork_context().Process(
        target=_rank,
        args=(dict(environment), list(arguments), str(log), os.chdir, (folder,), module),
        daemon=False,
    )
    process.start()
    process.join(PATIENCE_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode, log.read_text(errors="replace")


@contextlib.contextmanager
def launch_torchrun(
    settings: Mapping[str, Any],
    processes: int,
    *,
    max_restarts: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen]:
    """A real launcher in its own session; what is left of it at the end is killed, by process id."""
    config = _config_file(settings)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "--max-restarts", str(max_restarts), "-m", "finetune.sft", "--config", str(config),
    ]  # fmt: skip
    with config.with_suffix(".log").open("wb") as log:
        launcher = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": THREADS, **(environment or {})},
        )
    try:
        yield launcher
    finally:
        send([launcher.pid, *descendants(launcher.pid)], signal.SIGKILL)
        launcher.wait()


def descendants(pid: int) -> set[int]:
    """Process ids of all children, theirs included, that are alive now."""
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def workers(launcher_pid: int) -> list[int]:
    """Process ids of the launcher's own children that train."""
    children = psutil.Process(launcher_pid).children()
    return [child.pid for child in children if "finetune" in " ".join(child.cmdline())]


def alive(pids: Sequence[int]) -> list[int]:
    """Those of the processes that still run; one that ended and was not waited for does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def send(pids: Sequence[int], number: int) -> None:
    """Send a signal to processes, as nearly at once as can be; those that are gone are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sample_ids(output_dir: Path) -> list[list[int]]:
    """The ids of every step, in order; every step must be there once."""
    records = lines(output_dir / "samples.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["ids"] for record in records]


def losses(output_dir: Path) -> list[float]:
    """The loss of every step, in order; every step must be there once."""
    return values(output_dir, "loss")


def values(output_dir: Path, name: str) -> list[float]:
    """The same of another value of the log."""
    records = lines(output_dir / "trainer_log.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record[name] for record in records]


def events(output_dir: Path, name: str) -> list[dict[str, Any]]:
    return [record for record in lines(output_dir / "events.jsonl") if record["event"] == name]


def status(output_dir: Path) -> dict[str, Any]:
    return json.loads((output_dir / "status.json").read_text(encoding="utf-8"))


def result_weights(output_dir: Path) -> dict[str, Any]:
    """The tensors of the run's output: its adapter, or the whole model."""
    from safetensors.torch import load_file

    adapter = output_dir / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else output_dir / "model.safetensors")


def largest_relative_difference(first: Sequence[float], second: Sequence[float]) -> float:
    assert len(first) == len(second)
    return max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=True))


def wait_for(
    condition: Callable[[], Any],
    timeout_seconds: float = PATIENCE_SECONDS,
    *,
    what: str = "the condition",
) -> Any:
    """Poll until the condition is true; returns its value."""
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come about in {timeout_seconds} s")
        time.sleep(0.02)
    return value


def kill_and_resume(wanted: dict[str, Any], step: int, resumed_at: int, **options: Any) -> None:
    """Kill a run in `step`; started again, it goes on from the checkpoint of `resumed_at`."""
    import run_patches

    first = start(wanted, patch=run_patches.kill_self, patch_arguments=(0, step), **options)
    assert first.wait() == [-signal.SIGKILL], first.output()
    train(wanted, **options)
    assert [event["step"] for event in events(Path(wanted["output_dir"]), "resume")] == [resumed_at]


def assert_same_training(found: Path, expected: Path) -> None:
    """Losses and weights of two runs, to the bit."""
    import torch

    assert losses(found) == losses(expected)
    weights, wanted = result_weights(found), result_weights(expected)
    assert weights.keys() == wanted.keys()
    assert [name for name in weights if not torch.equal(weights[name], wanted[name])] == []


def flag_table(model_class: type[BaseConfig]) -> str:
    """Return a line per flag of a run - name, types, default - to compare with `tests/frozen`."""
    rows = [(flag(name), found.unit or "alone", "-") for name, found in EXTRA.items()]
    for found in flags_of(model_class).values():
        if found.name not in ONLY_IN_FILES:
            default = "required" if found.is_required else found.default
            rows.append((flag(found.name), found.expected, default))
    for other, name in model_class.aliases.items():
        rows.append((flag(other), f"the same as {flag(name)}", "-"))
    return "".join(f"{name}  {kind}  [{default}]\n" for name, kind, default in sorted(rows))
