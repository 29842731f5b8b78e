"""Make the bundled base model `data_samples/tiny-qwen3/`, a small Qwen3, by this package's own full-parameter path.

    python data_samples/make_base_model.py                 # everything; leaves its work in runs/base_model/
    python data_samples/make_base_model.py --only init     # corpus, tokenizer and the untrained model, without training

The steps: corpus (make_corpus.py), tokenizer (make_tokenizer.py), a seeded random Qwen3, `finetune.run` on the corpus,
and a copy of the files that a user needs, with the recipe and the final losses in RECIPE.md. The model has
read definitions and worked examples as pages of a handbook, and no question of train.jsonl or valid.jsonl.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import make_corpus
import make_tokenizer
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
SEED = 20
# Only the weights come out of the run; everything else is as it went in.
UNCHANGED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
WEIGHTS = "model.safetensors"
# What the run gets on top of the package's defaults.
RUN_SETTINGS: dict[str, Any] = {
    "finetuning": "full",
    "use_curriculum": False,
    "packing": True,
    "dtype": "float32",
    "cutoff_len": 512,
    "micro_batch_size": 4,
    "global_batch_size": 64,
    "max_steps": 1300,
    "learning_rate": 3e-3,
    "warmup_steps": 0.05,
    "weight_decay": 0.01,
    "seed": SEED,
    "save_steps": 500,
    "logging_steps": 10,
    "report_to": ("none",),
}


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The shape: 1.3 million parameters, tied embeddings, the vocabulary rounded up to a multiple of 64."""
    return Qwen3Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def make_initial_model(tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """Save a seeded random model and its tokenizer in `folder`; return the number of parameters."""
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(model_config(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def prepare(work: Path) -> tuple[Path, int]:
    """Write corpus, tokenizer and untrained model below `work`; return the model's folder and number of parameters."""
    corpus, valid = make_corpus.write_corpus(work / "corpus")
    texts = make_tokenizer.read_texts([HERE / "train.jsonl", corpus, valid])
    folder = work / "init"
    return folder, make_initial_model(make_tokenizer.train_tokenizer(texts), folder)


def train(work: Path, steps: int) -> dict[str, float]:
    """Train the untrained model on the corpus with `finetune.run`, into `work`/run; return the last losses.

    Raises:
        SystemExit: the run did not get to its end now, so there are no losses to write down.
    """
    import finetune

    result = finetune.run(
        {
            **RUN_SETTINGS,
            "max_steps": steps,
            "model": str(work / "init"),
            "data": (str(work / "corpus" / make_corpus.TRAIN_NAME),),
            "valid_data": (str(work / "corpus" / make_corpus.VALID_NAME),),
            "output_dir": str(work / "run"),
        }
    )
    losses = {name: value for name, value in result.metrics.items() if name in ("loss", "eval_loss")}
    if result.state != "done" or "eval_loss" not in losses:
        raise SystemExit(
            f"{work / 'run'}: {result.state} at step {result.steps}; finish it, or remove it to begin again"
        )
    return losses


def write_recipe(path: Path, parameters: int, losses: dict[str, float], steps: int) -> None:
    """Write how the model was made, with no path of the machine that made it."""
    settings = {**RUN_SETTINGS, "max_steps": steps}
    lines = [
        "# tiny-qwen3",
        "",
        f"A Qwen3-shaped base model with {parameters:,} parameters, trained from a random start by this package's own",
        "full-parameter path on the corpus of `data_samples/make_corpus.py`. It follows the chat template and has",
        "read definitions and worked examples as pages of a handbook; it was never asked a question of `train.jsonl`",
        "or `valid.jsonl`.",
        "Made by `python data_samples/make_base_model.py`. Our own work, under the terms of this package.",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in settings.items()),
        "",
        "| result | value |",
        "|---|---|",
        *(f"| {name} | {value:.4f} |" for name, value in losses.items()),
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def export(work: Path, destination: Path) -> None:
    """Copy what a user needs from the start and the finished run to `destination`."""
    destination.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(work / "run" / WEIGHTS, destination / WEIGHTS)
    for name in UNCHANGED_FILES:
        shutil.copyfile(work / "init" / name, destination / name)


def main() -> None:
    """Read the command line and do the steps."""
    parser = argparse.ArgumentParser(description="Make the bundled base model.")
    parser.add_argument("--work", type=Path, default=Path("runs/base_model"), help="folder for corpus, start and run")
    parser.add_argument("--out", type=Path, default=HERE / "tiny-qwen3", help="folder of the finished model")
    parser.add_argument("--steps", type=int, default=RUN_SETTINGS["max_steps"])
    parser.add_argument("--only", choices=("all", "init"), default="all")
    options = parser.parse_args()
    folder, parameters = prepare(options.work)
    print(f"{folder}: {parameters:,} parameters, untrained")
    if options.only == "all":
        losses = train(options.work, options.steps)
        export(options.work, options.out)
        write_recipe(options.out / "RECIPE.md", parameters, losses, options.steps)
        print(f"{options.out}: trained")


if __name__ == "__main__":
    main()
