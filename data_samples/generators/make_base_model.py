"""Make the bundled base model `data_samples/tiny-qwen3/`, a small Qwen3, by this package's own
pretraining.

    # everything; leaves its work in runs/base_model/
    python data_samples/generators/make_base_model.py
    # corpus, tokenizer and token files, without training
    python data_samples/generators/make_base_model.py --only tokens

The steps: corpus (make_corpus.py), tokenizer (make_tokenizer.py), `finetune prepare` on the
conversations as the chat template writes them, `finetune pretrain --arch qwen3`, and a copy of the
files that a user needs, with the recipe and the final figures in RECIPE.md. The model has read
definitions and worked examples as pages of a handbook, and no question of train.jsonl or
valid.jsonl. Four minutes on an H100; a night on two cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import make_corpus
import make_tokenizer
from transformers import PreTrainedTokenizerFast

DATA = Path(__file__).resolve().parents[1]
VALID_FRACTION = 0.001
# and what the model saves
SHIPPED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# What the run gets on top of the package's defaults. Its batches are too small for the law of
# learning rates.
RUN_SETTINGS: dict[str, Any] = {
    "arch": "qwen3",
    "depth": 4,
    "max_seq_len": 512,
    "device_batch_size": 64,
    "total_batch_size": 32768,
    "num_iterations": 4000,
    "lr_scaling": False,
    "matrix_lr": 0.02,
    "embedding_lr": 0.1,
    "unembedding_lr": 0.008,
    "weight_decay": 0.01,
    "dtype": "bfloat16",
    "compile": True,
    "seed": 20,
    "sample_every": 0,
    "logging_steps": 10,
    "report_to": ("none",),
}


def write_documents(rows: Path, tokenizer: PreTrainedTokenizerFast, path: Path) -> Path:
    """The conversations of a corpus file as documents, as the tokenizer's chat template writes
    them.
    """
    with (
        rows.open(encoding="utf-8") as lines,
        path.open("w", encoding="utf-8", newline="\n") as documents,
    ):
        for line in lines:
            text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
            documents.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return path


def prepare(work: Path) -> Path:
    """Write corpus, tokenizer and token files below `work`; return the folder of the token
    files.
    """
    from finetune.__main__ import main as finetune_command

    parts, valid = make_corpus.write_corpus(work / "corpus")
    texts = make_tokenizer.read_texts([DATA / "train.jsonl", parts[0], valid])
    tokenizer = make_tokenizer.train_tokenizer(texts)
    tokenizer.save_pretrained(work / "tokenizer")
    (work / "documents").mkdir(exist_ok=True)
    with Pool() as pool:
        documents = pool.starmap(
            write_documents, [(part, tokenizer, work / "documents" / part.name) for part in parts]
        )
    words = [
        "prepare",
        "--data",
        *documents,
        "--output-dir",
        work / "tokens",
        "--tokenizer",
        work / "tokenizer",
    ]
    words += ["--special-tokens", "true", "--valid-fraction", VALID_FRACTION]
    if code := finetune_command([str(word) for word in words]):
        raise SystemExit(code)
    return work / "tokens"


def train(work: Path, steps: int) -> dict[str, float]:
    """Pretrain on the token files into `work`/run; return the last figures.

    Raises:
        SystemExit: the run did not get to its end now, so there are no figures to write down.
    """
    from finetune.pretrain import run

    tokens = str(work / "tokens")
    paths = {
        "train_data_path": (tokens,),
        "valid_data_path": (tokens,),
        "output_dir": str(work / "run"),
    }
    result = run({**RUN_SETTINGS, "num_iterations": steps, **paths})
    figures = {
        name: value
        for name, value in result.metrics.items()
        if name in ("loss", "eval_loss", "eval_bpb")
    }
    if result.state != "done" or "eval_bpb" not in figures:
        raise SystemExit(
            f"{work / 'run'}: {result.state} at step {result.steps}; finish it, or remove it to"
            " begin again"
        )
    return figures


def write_recipe(path: Path, parameters: int, figures: dict[str, float], steps: int) -> None:
    """Write how the model was made, with no path of the machine that made it."""
    settings = {**RUN_SETTINGS, "num_iterations": steps}
    lines = [
        "# tiny-qwen3",
        "",
        (
            f"A Qwen3-shaped base model with {parameters:,} parameters, pretrained from scratch by"
            " this package"
        ),
        (
            "(`prepare`, then `pretrain --arch qwen3`) on the corpus of"
            " `data_samples/generators/make_corpus.py`. It knows the chat"
        ),
        (
            "template and has read definitions and worked examples as pages of a handbook; it was"
            " never asked a question"
        ),
        "of `train.jsonl` or `valid.jsonl`.",
        (
            "Made by `python data_samples/generators/make_base_model.py`. Our own work, under the terms of"
            " this package."
        ),
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in settings.items()),
        "",
        "| result | value |",
        "|---|---|",
        *(f"| {name} | {value:.4f} |" for name, value in figures.items()),
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def export(work: Path, destination: Path) -> int:
    """Copy what a user needs from the finished run to `destination`; return the number of
    parameters.

    Weights are shipped in bfloat16, which halves them.
    """
    import torch
    from transformers import AutoModelForCausalLM

    destination.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(work / "run", dtype=torch.bfloat16)
    model.save_pretrained(destination)
    for name in SHIPPED_FILES:
        shutil.copyfile(work / "run" / name, destination / name)
    return int(model.num_parameters())


def main() -> None:
    """Read the command line and do the steps."""
    parser = argparse.ArgumentParser(description="Make the bundled base model.")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/base_model"),
        help="folder for corpus, tokens and run",
    )
    parser.add_argument(
        "--out", type=Path, default=DATA / "tiny-qwen3", help="folder of the finished model"
    )
    parser.add_argument("--steps", type=int, default=RUN_SETTINGS["num_iterations"])
    parser.add_argument("--only", choices=("all", "tokens"), default="all")
    options = parser.parse_args()
    tokens = prepare(options.work)
    print(f"{tokens}: ready")
    if options.only == "all":
        figures = train(options.work, options.steps)
        parameters = export(options.work, options.out)
        write_recipe(options.out / "RECIPE.md", parameters, figures, options.steps)
        print(f"{options.out}: {parameters:,} parameters, trained")


if __name__ == "__main__":
    main()
