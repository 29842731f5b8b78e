"""Train the byte-level BPE tokenizer of the bundled base model.

    python data_samples/generators/make_tokenizer.py --out runs/tokenizer data_samples/train.jsonl
    runs/base_corpus/corpus.jsonl

Every string value of the records is training text. The result is a transformers tokenizer folder
with Qwen's special tokens (`<|endoftext|>` pads, `<|im_end|>` ends a turn, so the two are
different) and a ChatML template. The same input gives the same files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

DATA = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 4096
MAX_LENGTH_TOKENS = 1024
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The word pattern of Qwen2.5 and Qwen3 (tokenizer.json of those models): every digit is a piece of
# its own.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Chinese has no spaces: without a limit whole phrases would become single tokens. 15 bytes are 5
# characters.
MAX_TOKEN_BYTES = 15
FIELDS_THAT_ARE_NOT_TEXT = {"role", "from", "difficulty"}


def strings_of(value: Any) -> Iterator[str]:
    """Yield every string value inside a JSON value, keys and fields that hold no text left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings_of(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in FIELDS_THAT_ARE_NOT_TEXT:
                yield from strings_of(item)


def read_texts(paths: list[Path]) -> Iterator[str]:
    """Yield the texts of JSON Lines files, in order."""
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield from strings_of(json.loads(line))


def train_tokenizer(texts: Iterator[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with `vocab_size` entries, the three special tokens (ids 0, 1, 2)
    included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        # Counted in characters of the byte alphabet, one per byte.
        max_token_length=MAX_TOKEN_BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        model_max_length=MAX_LENGTH_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=(DATA / "chat_template.jinja").read_text(encoding="utf-8"),
    )


def main() -> None:
    """Read the command line, train and save."""
    parser = argparse.ArgumentParser(description="Train the tokenizer of the bundled base model.")
    parser.add_argument("files", nargs="+", type=Path, help="JSON Lines files to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    options = parser.parse_args()
    tokenizer = train_tokenizer(read_texts(options.files), options.vocab_size)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
