"""One contender of benchmarks/dpo.py, in a process of its own.

    python benchmarks/dpo_process.py WORK.json

Inputs, steps and memory are recorded as for benchmarks/sft.py (sft_process.py): what enters the
model is counted where it enters.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from sft_process import KEPT, Recorder, documents

BETA = 0.1
OUR_NAMES = ("loss", "grad_norm", "chosen_logprob", "rejected_logprob")
TRL_NAMES = ("loss", "grad_norm", "logps/chosen", "logps/rejected")


class LogRecorder(Recorder):
    """And what each step logs, as loss, gradient norm, and log-probabilities of chosen and rejected
    answers.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.logged: list[list[float]] = []
        # CPU time of the process, at the beginning and the end of each step
        self.cpu_marks: list[float] = []

    def _mark(self) -> None:
        super()._mark()
        self.cpu_marks.append(time.process_time())

    def _note(
        self, model: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Of the reference, too, for which ours puts the model into the mode for evaluation."""
        self.calls[-1].append(
            {key: named[key].detach() for key in KEPT if isinstance(named.get(key), torch.Tensor)}
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and all(name in logs for name in self.names):
            self.logged.append([float(logs[name]) for name in self.names])


def train_ours(work: dict[str, Any], output: Path) -> None:
    from finetune import dpo

    dpo.run(
        {
            "model": work["model"],
            "data": work["data"],
            "output_dir": str(output),
            "cache_dir": str(output.with_name("cache")),
            "finetuning": "lora",
            "lora_r": work["rank"],
            "lora_alpha": 2 * work["rank"],
            "beta": BETA,
            "learning_rate": work["learning_rate"],
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "micro_batch_size": work["batch"],
            "global_batch_size": work["batch"],
            "use_curriculum": False,
            "device_type": "cpu",
            "logging_steps": 1,
            "log_samples": True,
            "save_steps": 0,
            "report_to": "none",
            **work["own"],
        }
    )


def train_trl(work: dict[str, Any], output: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    settings = {
        "output_dir": str(output),
        "num_train_epochs": 1,
        "per_device_train_batch_size": work["batch"],
        "beta": BETA,
        "learning_rate": work["learning_rate"],
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",  # the rows are in the order of our run
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    rows = [
        json.loads(line) for line in Path(work["ordered"]).read_text(encoding="utf-8").splitlines()
    ]
    DPOTrainer(
        model=work["model"],
        args=DPOConfig(**settings | work["own"]),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        peft_config=LoraConfig(
            r=work["rank"],
            lora_alpha=2 * work["rank"],
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
    ).train()


def steps_of(recorder: Recorder, pairs: int) -> list[dict[str, Any]]:
    """Of each step the documents that entered the model, each with its trained places, and the
    tokens computed.

    Every document enters twice, as model and as reference; before the first step ours tries its
    largest microbatch too.
    """
    steps = []
    for calls in recorder.calls:
        whole = [document for call in calls[-2:] for document in documents(call)]
        if len(whole) != 4 * pairs:
            raise SystemExit(f"{len(whole)} documents entered the model in a step of {pairs} pairs")
        steps.append(
            {
                "documents": sorted([ids, targets] for ids, targets in whole),
                "computed": sum(call["input_ids"].numel() for call in calls[-2:]),
            }
        )
    return steps


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(work["threads"])
    ours = work["library"] == "ours"
    recorder = LogRecorder(OUR_NAMES if ours else TRL_NAMES)
    # Every Trainer begins its list of callbacks with these.
    transformers.trainer.DEFAULT_CALLBACKS.append(recorder)
    (train_ours if ours else train_trl)(work, Path(work["output"]))
    measured = {
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "trl")},
        **recorder.made_of,
        "step_seconds": recorder.step_seconds,
        "cpu_seconds": [end - begin for begin, end in pairwise(recorder.cpu_marks)],
        "steps": steps_of(recorder, work["batch"]),
        "logged": recorder.logged,
        "trained_parameters": recorder.trained_parameters,
        "peak_bytes": recorder.peak_bytes,
        "load_average": os.getloadavg()[0],
    }
    Path(work["result"]).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
