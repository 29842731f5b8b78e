"""What `plan` predicts of a process's memory, beside what it is: LoRA and full, ZeRO 0, 2 and 3,
offload, lengths.

    python benchmarks/plan_memory.py --output runs/plan_memory   # two minutes each; prints the
    table python benchmarks/plan_memory.py --output runs/plan_memory --only-table

Runs on the CPU, where "device" and host are the same memory. Measured is, of rank 0, the high-water
mark of the resident set (VmHWM) from the first parameter to the end of the last save, less the
resident set after all imports; predicted is the worst phase of `finetune.planning.memory` without
its framework term. Both are also given for loading, training and saving alone. Nothing is fitted: a
miss stays in the table.

Each case runs twice. "Needed" is with glibc told to map every block of 64 KiB and more by itself,
so that what is freed is gone at once and the resident set is what is in use. "Kept" is with glibc
as it is: it raises that bound to 32 MiB as blocks are freed (mallopt(3), M_MMAP_THRESHOLD), takes
smaller ones from a heap, and gives back only the heap's end.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TOKENIZER = ROOT / "data_samples" / "tiny-qwen3"
LIMIT = 0.15
# How the C library is set while a case is measured: suffix of the measurement -> environment.
HEAPS = {"needed": {"MALLOC_MMAP_THRESHOLD_": str(64 * 2**10)}, "kept": {}}
# Over the bundled model's config.json: eight layers, 1,024 wide, 109 M parameters.
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Case:
    """A run: what is trained, how it is sharded, on how many processes, in microbatches of how many
    tokens.
    """

    finetuning: str
    stage: int | None = None
    offload: str = ""  # "", "optimizer" or "all"
    processes: int = 1
    tokens: int = 128
    checkpointing: bool = False

    @property
    def name(self) -> str:
        parts = [
            self.finetuning,
            "none" if self.stage is None else f"zero{self.stage}",
            self.offload,
        ]
        parts += [
            f"{self.processes}p",
            str(self.tokens),
            "checkpointing" if self.checkpointing else "",
        ]
        return "-".join(part for part in parts if part)

    def deepspeed(self) -> dict[str, Any] | None:
        if self.stage is None:
            return None
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        if self.offload == "all":
            zero["offload_param"] = {"device": "cpu", "pin_memory": False}
        return {"zero_optimization": zero}


CASES = (
    Case("lora", tokens=384),
    Case("lora", tokens=768, checkpointing=True),
    Case("lora", stage=2, processes=2, tokens=384),
    Case("lora", stage=3, processes=2, tokens=384),
    Case("lora", stage=3, offload="all", processes=2, tokens=128),
    Case("full", tokens=128),
    Case("full", processes=2, tokens=128),
    Case("full", stage=2, processes=2, tokens=128),
    Case("full", stage=2, offload="optimizer", processes=2, tokens=128),
    Case("full", stage=3, processes=2, tokens=128),
    Case("full", stage=3, offload="all", processes=2, tokens=384),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/plan_memory"), help="folder for models and runs"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="run only cases whose name has one of these in it"
    )
    parser.add_argument(
        "--heap", nargs="*", choices=list(HEAPS), default=list(HEAPS), help="which measurements"
    )
    parser.add_argument(
        "--only-table", action="store_true", help="print the table of what was measured before"
    )
    parser.add_argument("--child", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        _train(*options.child)
        return 0
    folder = options.output.resolve()
    if not options.only_table:
        _make_materials(folder)
        for case in CASES:
            if not options.only or any(word in case.name for word in options.only):
                for heap in options.heap:
                    _run(folder, case, heap)
    print(table(folder))
    return 0


# ---------------------------------------------------------------- what is trained


def _make_materials(folder: Path) -> None:
    """A Qwen3 of eight layers, 1,024 wide, with random weights and the bundled tokenizer; long
    samples.
    """
    model = folder / "model"
    if (model / "model.safetensors").exists():
        return
    import numpy as np
    from safetensors.numpy import save_file
    from transformers import AutoConfig

    from finetune.modeling.scratch import make_empty_model

    shutil.copytree(TOKENIZER, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | MODEL
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    drawn = np.random.default_rng(0).standard_normal(2**20, dtype=np.float32) * 0.02

    # The numbers repeat themselves: what the weights are is no matter.
    weights = {
        name: (
            np.ones(parameter.shape, np.float32)
            if parameter.ndim < 2
            else np.resize(drawn, parameter.shape)
        )
        for name, parameter in make_empty_model(
            AutoConfig.from_pretrained(model)
        ).named_parameters()
    }
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    record = {
        "instruction": "Count.",
        "input": "",
        "output": " ".join(str(number) for number in range(3000)),
    }
    lines = [json.dumps({**record, "instruction": f"Count from {start}."}) for start in range(16)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def settings_of(folder: Path, case: Case) -> dict[str, Any]:
    """The run's settings: two steps of two microbatches on each process, every one full."""
    made = {
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "output_dir": str(folder / case.name),
        "cache_dir": str(folder / "cache"),
        "finetuning": case.finetuning,
        "deepspeed": case.deepspeed(),
        "cutoff_len": case.tokens,
        "micro_batch_size": 1,
        "global_batch_size": 2 * case.processes,
        "max_steps": 2,
        "warmup_steps": 0,
        "device_type": "cpu",
        "gradient_checkpointing": case.checkpointing,
        "save_steps": 0,
        "report_to": "none",
        "preprocessing_num_workers": 1,
        "resume": "never",
    }
    return {name: value for name, value in made.items() if value is not None}


def _run(folder: Path, case: Case, heap: str) -> None:
    shutil.rmtree(folder / case.name, ignore_errors=True)
    config = folder / f"{case.name}.json"
    config.write_text(json.dumps(settings_of(folder, case)), encoding="utf-8")
    words = [__file__, "--child", str(config), str(config.with_suffix(f".{heap}"))]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.processes}"]
    start = time.monotonic()
    print(f"{case.name}, {heap} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, *(launcher if case.processes > 1 else []), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **HEAPS[heap]},
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{case.name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    if done.returncode != 0:
        raise SystemExit(f"{case.name} failed:\n{done.stderr[-6000:]}")
    for weights in (folder / case.name).rglob("*.safetensors"):
        weights.unlink()


# ---------------------------------------------------------------- in the process that trains


def _status() -> dict[str, int]:
    """Bytes of VmHWM, VmRSS, RssAnon, RssFile and RssShmem."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) * 1024
        for words in lines
        if words[0].startswith(("VmHWM", "VmRSS", "Rss"))
    }


class Meter:
    """The high-water mark of each part of the run: the kernel's, set back where a part ends."""

    def __init__(self) -> None:
        self.parts: dict[str, int] = {}
        self.resident: dict[str, dict[str, int]] = {}

    def end_of(self, part: str) -> None:
        now = _status()
        self.parts[part] = max(self.parts.get(part, 0), now["VmHWM"])
        self.resident[part] = now
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS (proc(5))

    def at(self, part: str, function: Any) -> Any:
        """The function, called when the part before it has ended."""

        @functools.wraps(function)
        def marked(*arguments: Any, **named: Any) -> Any:
            self.end_of(part)
            return function(*arguments, **named)

        return marked

    def saving(self, function: Any) -> Any:
        """The function, measured as saving; what was before it is training."""

        @functools.wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            self.end_of("train")
            try:
                return function(*arguments, **named)
            finally:
                self.end_of("save")

        return measured

    def after_loading(self, function: Any) -> Any:
        """The function of a step; what was before the first is loading: model, adapter, engine."""

        @functools.wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            if "load" not in self.parts:
                self.end_of("load")
            return function(*arguments, **named)

        return measured


def _train(config: Path, to: Path) -> None:
    """One rank: import everything, look at the memory, train."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import transformers.integrations.deepspeed
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import finetune
    import finetune.data.dataset
    import finetune.training.execute
    from finetune.training import build
    from finetune.training.trainer import RunTrainer

    meter = Meter()
    imports, started = _status()["VmRSS"], time.process_time()
    build.load_model = meter.at("before", build.load_model)
    RunTrainer.training_step = meter.after_loading(RunTrainer.training_step)
    RunTrainer._save_checkpoint = meter.saving(RunTrainer._save_checkpoint)
    RunTrainer.save_output = meter.saving(RunTrainer.save_output)
    finetune.run(settings)
    meter.end_of("end")
    if int(os.environ.get("RANK", "0")) == 0:
        measured = {"imports": imports, "parts": meter.parts, "resident": meter.resident}
        measured["cpu_seconds"] = time.process_time() - started
        to.write_text(json.dumps(measured, indent=1), encoding="utf-8")


# ---------------------------------------------------------------- the table


def table(folder: Path) -> str:
    """Measured and predicted, case by case, as Markdown."""
    from finetune.config.resolution import resolve_object
    from finetune.planning.inputs import shape_for, workload_of
    from finetune.planning.memory import memory_of
    from finetune.planning.workload import STEP, Cluster

    lines = [
        (
            "| case | needed MiB | predicted MiB | error | loading | training | saving | kept MiB |"
            " error |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        needed = _measured(folder / f"{case.name}.needed")
        kept = _measured(folder / f"{case.name}.kept")
        if needed is None:
            continue
        config = resolve_object(settings_of(folder, case), case.processes).config
        cluster = Cluster(devices_per_node=case.processes, device_type="cpu")
        memory = memory_of(workload_of(config, shape_for(config), cluster))
        whole, said = max(needed.values()), memory.process()
        pairs = [
            (needed["load"], memory.process(("load",))),
            (needed["train"], memory.process(STEP)),
            (needed["save"], memory.process(("save", "result"))),
        ]
        cells = [case.name, _mib(whole), _mib(said), _error(said, whole)]
        cells += [f"{_mib(is_)} / {_mib(said_)}" for is_, said_ in pairs]
        most = max(kept.values()) if kept else None
        cells += ["", ""] if most is None else [_mib(most), _error(said, most)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(path: Path) -> dict[str, int] | None:
    """Bytes above the imports of each part of a run; None if it was not measured."""
    if not path.exists():
        return None
    measured = json.loads(path.read_text(encoding="utf-8"))
    return {name: value - measured["imports"] for name, value in measured["parts"].items()}


def _error(predicted: int, measured: int) -> str:
    error = predicted / measured - 1
    return f"{error:+.0%}" if abs(error) <= LIMIT else f"**{error:+.0%}**"


def _mib(number: int) -> str:
    return f"{number / 2**20:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
