"""One contender of benchmarks/sft.py, in a process of its own, under the Python that has its
library.

    python benchmarks/sft_process.py SETTINGS.json

What is measured is measured alike everywhere, by one callback that transformers.Trainer (on which
all but the bare loop stand) gives to every trainer: the end of each optimizer step, and every
tensor that enters the model, kept as it is and made into conversations after training. So the work
is counted where it is done, not where it was asked for. On a device nothing of it has the host
wait: tensors stay there, and the ends of steps are the device's own events.
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
from sft_bare import train_bare
from sft_inputs import conversation_digest, our_settings
from transformers import TrainerCallback

KEPT = ("input_ids", "attention_mask", "position_ids", "labels", "logits_to_keep")


class Recorder(TrainerCallback):
    """Times, losses and inputs of a training.

    Attributes:
        first_step_ended: seconds since 1970.
        step_seconds: of each step, there after the training.
    """

    def __init__(self) -> None:
        self.device = "cpu"
        self.first_step_ended = 0.0
        self.step_seconds: list[float] = []
        self._marks: list[Any] = []  # the beginning of the first step, and the end of each
        self.calls: list[list[dict[str, torch.Tensor]]] = []  # of each step
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.trained_parameters = 0
        self.peak_bytes = 0
        self.made_of: dict[str, Any] = {}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(
        self, model: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if arguments:
            raise SystemExit(
                "the model was called with arguments without names: what enters it is not known"
            )
        if model.training:
            call = {k: named[k].detach() for k in KEPT if isinstance(named.get(k), torch.Tensor)}
            mask = call.get("attention_mask")
            if mask is not None and mask.dim() == 4:
                call["attention_mask"] = _diagonals(mask)
            self.calls[-1].append(call)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._marks:
            self._mark()
        self.calls.append([])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mark()
        if not self.first_step_ended:
            if self.device != "cpu":
                torch.accelerator.synchronize()
            self.first_step_ended = time.time()

    def _mark(self) -> None:
        if self.device == "cpu":
            self._marks.append(time.time())
            return
        # Not a wait at each step: one who prepares the next step while the device computes would be
        # slowed down by it.
        event = getattr(torch, self.device).Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            self.losses.append(float(logs["loss"]))
            self.gradient_norms.append(float(logs["grad_norm"]))

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if self.device == "cpu":
            self.step_seconds = [end - begin for begin, end in pairwise(self._marks)]
        else:
            torch.accelerator.synchronize()
            self.step_seconds = [
                begin.elapsed_time(end) / 1000 for begin, end in pairwise(self._marks)
            ]
        self.peak_bytes = _peak_bytes(self.device)
        self.made_of = _made_of(model)


def _made_of(model: Any) -> dict[str, Any]:
    """Where the model is, in what its frozen weights are held, who computes attention, what is
    recomputed.
    """
    frozen = next(parameter for parameter in model.parameters() if not parameter.requires_grad)
    return {
        "device": frozen.device.type,
        "frozen_dtype": str(frozen.dtype).removeprefix("torch."),
        "attention": str(model.config._attn_implementation),
        "recomputes": any(
            getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
        ),
    }


def _peak_bytes(device: str) -> int:
    """Of this process: the device's memory where there is one, else the host's."""
    if device != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    # Not getrusage: what it says of a child begins with the parent's size at the fork.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
    )


# ---------------------------------------------------------------------- what entered the model


def _diagonals(mask: torch.Tensor) -> torch.Tensor:
    """Of a mask `(rows, 1, T, T)` whether each token sees itself and the one before it: `(rows, 2,
    T)`, bool.

    The whole mask, kept to the end, would be a part of the peak memory.
    """
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    before = torch.nn.functional.pad(seen.diagonal(-1, 1, 2), (1, 0))
    return torch.stack([seen.diagonal(0, 1, 2), before], dim=1)


def documents(call: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """The conversations of one forward: tokens, and the places of those that are trained.

    Rows are cut where positions begin anew, where the number in a two-dimensional mask changes, or
    where a four-dimensional mask keeps a token from seeing the one before it; masked tokens are
    padding.
    """
    found = []
    for row, ids in enumerate(call["input_ids"].tolist()):
        real, begins = _bounds(call, row, len(ids))
        targets = _targets(call, row, len(ids))
        document: tuple[list[int], list[int]] = ([], [])
        for place, token in enumerate(ids):
            if begins[place] and document[0]:
                found.append(document)
                document = ([], [])
            if real[place]:
                if targets[place]:
                    document[1].append(len(document[0]))
                document[0].append(token)
        found.append(document)
    # Our padded rows need no mask: their padding is tokens at position 0, each of them alone.
    return [document for document in found if len(document[0]) > 1]


def _bounds(call: dict[str, torch.Tensor], row: int, length: int) -> tuple[list[bool], list[bool]]:
    real, begins = [True] * length, [False] * length
    mask, positions = call.get("attention_mask"), call.get("position_ids")
    if mask is not None and mask.dim() == 3:
        real, begins = mask[row, 0].tolist(), (~mask[row, 1]).tolist()
    elif mask is not None:
        numbers = mask[row].tolist()
        real = [number != 0 for number in numbers]
        begins = [place == 0 or numbers[place] != numbers[place - 1] for place in range(length)]
    if positions is not None and positions.dim() == 2 and (mask is None or mask.dim() == 2):
        line = positions[min(row, len(positions) - 1)].tolist()
        begins = [begin or place == 0 for begin, place in zip(begins, line, strict=True)]
    return real, begins


def _targets(call: dict[str, torch.Tensor], row: int, length: int) -> list[bool]:
    """For each place whether the token there is predicted; labels are shifted inside the model,
    masks are not.
    """
    if "labels" in call:
        return [False, *(call["labels"][row, 1:] != -100).tolist()]
    kept = call["logits_to_keep"]
    if kept.dtype == torch.bool:
        return [False, *kept[row, :-1].tolist()]
    places = {int(place) + 1 for place in kept}
    return [place in places for place in range(length)]


def steps_of(recorder: Recorder, rehearsals: int) -> list[dict[str, Any]]:
    """Of each step its tokens, trained tokens, conversations, and tokens that were computed,
    padding included.

    Args:
        rehearsals: forwards at the beginning that train nothing. Ours runs the largest microbatch
            of the run with weight 0 before the first, to see whether it fits; that it trains
            nothing is seen from the losses.
    """
    steps = []
    for calls in [recorder.calls[0][rehearsals:], *recorder.calls[1:]]:
        whole = [document for call in calls for document in documents(call)]
        steps.append(
            {
                "tokens": sum(len(ids) for ids, _ in whole),
                "supervised": sum(len(targets) for _, targets in whole),
                "computed": sum(call["input_ids"].numel() for call in calls),
                "conversations": sorted(
                    conversation_digest(ids, targets) for ids, targets in whole
                ),
            }
        )
    return steps


# ---------------------------------------------------------------------- contenders


def train_ours(work: dict[str, Any], folder: Path, output: Path) -> None:
    import finetune

    settings = our_settings(folder, work["inputs"]) | {
        "output_dir": str(output),
        "dtype": work["dtype"],
    }
    settings |= {
        "device_type": work["device"],
        "cache_dir": str(output.with_name(f"{output.name}-cache")),
    }
    finetune.run(settings | work["own"])


def train_trl(work: dict[str, Any], folder: Path, output: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    given, half = work["inputs"], work["dtype"] == "bfloat16"
    settings = {
        "output_dir": str(output),
        "num_train_epochs": 1,
        "per_device_train_batch_size": given["batch"],
        "learning_rate": given["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_length": given["cutoff_len"],
        "assistant_only_loss": True,
        "train_sampling_strategy": "sequential",  # the file is in the order of our run
        "model_init_kwargs": {"dtype": work["dtype"]},
        "bf16": half,
        "use_cpu": work["device"] == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    rows = json.loads((folder / "ordered" / "train.json").read_text(encoding="utf-8"))
    SFTTrainer(
        model=str(folder / "model"),
        args=SFTConfig(**settings | work["own"]),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=LoraConfig(
            r=given["lora_r"],
            lora_alpha=2 * given["lora_r"],
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
    ).train()


def train_llamafactory(work: dict[str, Any], folder: Path, output: Path) -> None:
    from llamafactory.train.tuner import run_exp

    given, half = work["inputs"], work["dtype"] == "bfloat16"
    settings = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(folder / "model"),
        "dataset_dir": str(folder / "ordered"),
        "dataset": "bench",
        "output_dir": str(output),
        "finetuning_type": "lora",
        "lora_rank": given["lora_r"],
        "lora_alpha": 2 * given["lora_r"],
        "lora_target": "all",
        "cutoff_len": given["cutoff_len"],
        "per_device_train_batch_size": given["batch"],
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1.0,
        "learning_rate": given["learning_rate"],
        "lr_scheduler_type": "constant",
        "disable_shuffling": True,  # the file is in the order of our run
        "bf16": half,
        "use_cpu": work["device"] == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    run_exp(args=settings | work["own"], callbacks=[])


def bare(work: dict[str, Any], folder: Path, output: Path) -> None:
    train_bare(work, folder, RECORDER)


RECORDER = Recorder()
LIBRARIES = {
    "ours": (train_ours, ()),  # it may be a folder without a package's metadata
    "bare": (bare, ()),
    "trl": (train_trl, ("trl",)),
    "llamafactory": (train_llamafactory, ("llamafactory",)),
}


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder, output = Path(work["folder"]), Path(work["output"])
    torch.set_num_threads(work["threads"])
    RECORDER.device = work["device"]
    # Every Trainer begins its list of callbacks with these.
    transformers.trainer.DEFAULT_CALLBACKS.append(RECORDER)
    train, packages = LIBRARIES[work["library"]]
    train(work, folder, output)
    measured = {
        "versions": {name: version(name) for name in (*packages, "torch", "transformers", "peft")},
        "threads": torch.get_num_threads(),
        **RECORDER.made_of,
        "start_seconds": RECORDER.first_step_ended - work["launched"],
        "step_seconds": RECORDER.step_seconds,
        "unmeasured_steps": work["inputs"]["unmeasured_steps"],
        "steps": steps_of(RECORDER, rehearsals=int(work["library"] == "ours")),
        "losses": RECORDER.losses,
        "gradient_norms": RECORDER.gradient_norms,
        "trained_parameters": RECORDER.trained_parameters,
        "peak_bytes": RECORDER.peak_bytes,
        "load_average": os.getloadavg()[0],
    }
    Path(work["result"]).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
