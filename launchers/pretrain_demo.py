"""`make pretrain-demo`: from text to a model that chats, on this machine: prepare, pretrain,
fine-tune.

The text is CPython's own standard library, which every machine that runs this has. A small model is
pretrained on it with two CPU processes, then fine-tuned with LoRA on the bundled questions. Ends
with what the base model goes on with, and what base and tuned model answer. The tuned one speaks in
the manner of the data; what it says is not to be relied on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from peft import PeftModel

ROOT = Path(__file__).resolve().parent.parent

# Parts of the standard library's folder that are no library, or that some systems leave out.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "__pycache__",
}
MODEL = ("--arch", "lfm2_value", "--depth", "2", "--max-seq-len", "256")
BATCH = ("--device-batch-size", "16", "--total-batch-size", "8192")
# The demo's own; they were not compared with those that the law of learning rates makes.
RATES = (
    "--lr-scaling",
    "false",
    "--matrix-lr",
    "0.01",
    "--embedding-lr",
    "0.05",
    "--unembedding-lr",
    "0.004",
)
# The base model has never seen a chat token, so its head has nothing to tell one from another: LoRA
# on the head too.
LORA = (
    "--lora-target-modules",
    "q_proj,k_proj,v_proj,in_proj,out_proj,w1,w2,w3,lm_head",
    "--lora-r",
    "64",
)
TUNING = ("--learning-rate", "4e-3", "--micro-batch-size", "8", "--global-batch-size", "32")
PROMPTS = ("def __init__(self", "import os\n", "class Error(Exception):\n")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
SAMPLE_TOKENS = 48
ANSWER_TOKENS = 80
LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def library_sources(folder: Path) -> list[str]:
    """The source files of a library, sorted."""
    return [
        str(path)
        for path in sorted(folder.rglob("*.py"))
        if not LEFT_OUT & set(path.relative_to(folder).parts)
    ]


def run(*words: str) -> None:
    """Run this Python with these words; ends this process with its exit code if it fails."""
    shown = [word for word in words if not word.startswith(str(LIBRARY))]
    print("$ python", " ".join(shown), flush=True)
    code = subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False
    ).returncode
    if code != 0:
        sys.exit(code)


def train(folder: Path, library: Path, steps: int, tuning_steps: int) -> tuple[Path, Path]:
    """Prepare, pretrain, fine-tune; the folders of the base model and of the adapter."""
    tokens, base, tuned = folder / "tokens", folder / "base", folder / "tuned"
    prepare = ("-m", "finetune", "prepare", "--output-dir", str(tokens), "--vocab-size", "4096")
    run(*prepare, "--valid-fraction", "0.05", "--data", *library_sources(library))
    data = (
        "--train-data-path",
        str(tokens),
        "--valid-data-path",
        str(tokens),
        "--output-dir",
        str(base),
    )
    quiet = ("--device-type", "cpu", "--report-to", "none", "--logging-steps", "25")
    length = ("--num-iterations", str(steps), "--compile", "--sample-every", "0")
    run(*TORCHRUN, "-m", "finetune.pretrain", *data, *MODEL, *BATCH, *RATES, *length, *quiet)
    data = (
        "--model",
        str(base),
        "--data",
        "data_samples/train.jsonl",
        "--valid-data",
        "data_samples/valid.jsonl",
    )
    out = ("--cutoff-len", "256", "--output-dir", str(tuned), "--max-steps", str(tuning_steps))
    run(*TORCHRUN, "-m", "finetune.sft", *data, *out, *LORA, *TUNING, *quiet)
    return base, tuned


def samples(base_folder: Path, tuned_folder: Path) -> tuple[Table, Table]:
    """Greedy text of the base model, and answers of base and tuned model, with transformers and
    peft.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.modeling import lfm2_value

    lfm2_value.register()
    tokenizer = AutoTokenizer.from_pretrained(tuned_folder)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, tuned_folder).eval()
    # A document's end stops the base model, a turn's end the tuned one.
    stops = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])

    def go_on(ids: list[int], limit: int) -> str:
        prompt = torch.tensor([ids])
        with torch.no_grad():
            made = tuned.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=stops,
                pad_token_id=tokenizer.pad_token_id,
            )
        return tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True).strip("\n")

    texts = Table(
        "beginning", "the base model goes on", title="base", show_lines=True, title_justify="left"
    )
    with tuned.disable_adapter():
        for text in PROMPTS:
            texts.add_row(
                text, go_on([tokenizer.bos_token_id, *tokenizer(text)["input_ids"]], SAMPLE_TOKENS)
            )

    def answer(chat: list[dict[str, str]]) -> str:
        return go_on(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"],
            ANSWER_TOKENS,
        )

    return texts, answers_table(one_row_per_level(), answer, tuned)


def bits_per_byte(base: Path) -> list[float]:
    """The base model's evaluations, in order."""
    return [event["eval_bpb"] for event in evaluations(base)]


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
        table.add_row(
            level,
            f"{before[name]:.3f}",
            f"{after[name]:.3f}",
            f"{after[name] / before[name] - 1:+.0%}",
        )
    return table


def answers_table(
    rows: list[dict[str, str]], answer: Callable[[list[dict[str, str]]], str], tuned: PeftModel
) -> Table:
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
    rows = [
        json.loads(line)
        for line in (ROOT / "data_samples/valid.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    first: dict[str, dict[str, str]] = {}
    for row in rows:
        first.setdefault(row["difficulty"], row)
    return [first[level] for level in ("explain", "reasoning", "topology")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="From CPython's own sources to a small model that chats."
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs") / time.strftime("pretrain-demo-%Y%m%d-%H%M%S")
    )
    parser.add_argument(
        "--library", type=Path, default=LIBRARY, help="folder of the text; CPython's library"
    )
    parser.add_argument("--steps", type=int, default=300, help="of pretraining")
    parser.add_argument("--tuning-steps", type=int, default=500)
    options = parser.parse_args()
    began = time.monotonic()
    os.chdir(ROOT)
    base, tuned = train(options.folder, options.library, options.steps, options.tuning_steps)
    first, *_, last = bits_per_byte(base)
    before, *_, after = evaluations(tuned)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    texts, answers = samples(base, tuned)
    console.print(
        f"the base model: {first:.2f} -> {last:.2f} bits per byte on held-out sources",
        highlight=False,
    )
    for table in (texts, loss_table(before, after), answers):
        console.print(table)
    print(f"the base model is in {base}, the adapter in {tuned}")
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
