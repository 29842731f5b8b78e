"""`make demo`: the main job on this machine, for real, then what it gave.

LoRA fine-tuning under DeepSpeed ZeRO-3 with optimizer and parameters offloaded to the CPU, two processes, the
staged curriculum on, bundled data and model. Ends with the validation loss by difficulty before and after, an answer
per difficulty from the base model and from the adapter (loaded with plain peft), and where the adapter is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from peft import PeftModel

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "ds_configs/zero3.json"
ANSWER_TOKENS = 120


def train(output_dir: Path) -> None:
    """Run the main job; ends this process with its exit code if it fails."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_2_zero3.yaml"),
        *("-m", "finetune.sft", "--config", CONFIG, "--device-type", "cpu", "--output-dir", str(output_dir)),
    ]
    print("$", " ".join(["accelerate launch", *command[3:]]), flush=True)
    # The demo's two processes share the machine's cores; the first start also builds DeepSpeed's extensions (a minute).
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False).returncode
    if code != 0:
        sys.exit(code)


def evaluations(output_dir: Path) -> list[dict[str, float]]:
    """The evaluation events of the run, in order."""
    lines = (output_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "eval"]


def loss_table(before: dict[str, float], after: dict[str, float]) -> Table:
    table = Table(title="validation loss, held-out records", title_justify="left")
    for name in ("difficulty", "before", "after", "change"):
        table.add_column(name, justify="left" if name == "difficulty" else "right")
    for name in [name for name in after if name.startswith("eval_loss/")] + ["eval_loss"]:
        level = name.partition("/")[2] or "all"
        table.add_row(level, f"{before[name]:.3f}", f"{after[name]:.3f}", f"{after[name] / before[name] - 1:+.0%}")
    return table


def answers(output_dir: Path, rows: list[dict[str, str]]) -> Table:
    """Greedy answers to a held-out record per difficulty, base model and adapter, with plain transformers and peft."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.training.build import quiet_known_warnings

    quiet_known_warnings()
    settings = json.loads((ROOT / CONFIG).read_text(encoding="utf-8"))["finetune"]
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    base = AutoModelForCausalLM.from_pretrained(ROOT / settings["model"], dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, output_dir).eval()

    def answer(chat: list[dict[str, str]]) -> str:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            ids = tuned.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()

    return answers_table(rows, answer, tuned)


def answers_table(rows: list[dict[str, str]], answer: Callable[[list[dict[str, str]]], str], tuned: PeftModel) -> Table:
    """What the base model says to each record, and what it says with the adapter."""
    table = Table(title="held-out questions", show_lines=True, title_justify="left")
    for name in ("difficulty", "question", "base model", "with the adapter", "reference"):
        table.add_column(name, overflow="fold")
    for row in rows:
        question = "\n".join(part for part in (row["instruction"], row.get("input", "")) if part)
        chat = [{"role": "user", "content": question}]
        with tuned.disable_adapter():
            before = answer(chat)
        table.add_row(row["difficulty"], row["instruction"], before, answer(chat), row["output"])
    return table


def one_row_per_level() -> list[dict[str, str]]:
    rows = [json.loads(line) for line in (ROOT / "data_samples/valid.jsonl").read_text(encoding="utf-8").splitlines()]
    first: dict[str, dict[str, str]] = {}
    for row in rows:
        first.setdefault(row["difficulty"], row)
    return [first[level] for level in ("explain", "reasoning", "topology")]


def main() -> None:
    began = time.monotonic()
    output_dir = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    os.chdir(ROOT)
    train(output_dir)
    before, *_, after = evaluations(output_dir)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(loss_table(before, after))
    console.print(answers(output_dir, one_row_per_level()))
    print(f"the adapter is in {output_dir}: PeftModel.from_pretrained(base, {str(output_dir)!r})")
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
