"""The tokenizer of a corpus: trained here or taken over, with its hash and the bytes of text
per token.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.errors import DataError
from finetune.storage.durable_files import remove_tree, sync_file, sync_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("finetune")

# Ids 0 to 3. The separator starts every document, and a turn's end ends an answer. Only padding is
# `PAD`, so that no token that must be learned is masked, or excluded from training as padding_idx.
PAD, SEPARATOR, TURN_START, TURN_END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
)
BYTES = 256
SMALLEST_VOCABULARY = BYTES + len(SPECIAL_TOKENS)
# The word pattern of Qwen2.5 and Qwen3, from their tokenizer.json: every digit is a separate piece.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What does not change which ids a text becomes, or is written otherwise by every version.
_NOT_HASHED = ("version", "truncation", "padding", "post_processor")


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """64 hexadecimal digits: the same for tokenizers that turn texts into the same ids, even if
    their templates differ.

    Raises:
        DataError: a tokenizer without a `tokenizers` backend.
    """
    content = json.loads(_backend(tokenizer).to_str())
    kept = {name: value for name, value in content.items() if name not in _NOT_HASHED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id: a vocabulary may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def bytes_per_token(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """int64 `(vocabulary,)`: the bytes of text of each token; 0 for special tokens and gaps.

    With it a loss per token becomes bits per byte, which tokenizers share: sum of nats / (ln 2 *
    sum of bytes). Exact for byte-level tokenizers. For those of SentencePiece's kind a word's
    leading space counts as a byte.
    """
    backend = json.loads(_backend(tokenizer).to_str())
    byte_level = "ByteLevel" in json.dumps(backend.get("decoder"))
    added = {entry["id"]: entry for entry in backend["added_tokens"]}
    sizes = np.zeros(vocabulary_of(tokenizer), dtype=np.int64)
    for token, number in tokenizer.get_vocab().items():
        if number in added:
            sizes[number] = 0 if added[number]["special"] else len(token.encode())
        elif byte_level:
            sizes[number] = len(token)  # one character of the byte alphabet per byte
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            sizes[number] = 1
        else:
            sizes[number] = len(token.replace("\u2581", " ").encode())
    sizes[list(set(tokenizer.all_special_ids))] = 0
    return sizes


def separator_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that starts every document: the beginning-of-text token, or `<|endoftext|>`, or
    the end token.

    Raises:
        DataError: the tokenizer has none of them.
    """
    if tokenizer.bos_token_id is not None:
        return int(tokenizer.bos_token_id)
    known = tokenizer.get_vocab()
    if SEPARATOR in known:
        return int(known[SEPARATOR])
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    raise DataError(
        "the tokenizer has no token to put between documents (bos_token, <|endoftext|> or"
        " eos_token)",
        str(tokenizer.name_or_path),
        "set bos_token in its tokenizer_config.json, or leave --tokenizer out to make a tokenizer",
    )


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the `tokenizers` object behind a tokenizer.

    Raises:
        DataError: there is none.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{type(tokenizer).__name__} has no tokenizer.json, which preparing data needs",
            str(tokenizer.name_or_path),
            "use a tokenizer with a tokenizer.json (one of the 'tokenizers' library)",
        )
    return tokenizer.backend_tokenizer


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE of at most `vocab_size` ids, with special tokens and a ChatML
    template.

    Every text comes back exactly: nothing is normalized, and every byte is a token. The same texts
    give the same tokenizer. Fewer ids than asked come out where the texts have no more pairs to
    merge; that is warned of.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from finetune.data.encoding.templates import TEMPLATES

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() < vocab_size:
        logger.warning(
            "the tokenizer has %d ids instead of %d: the data has no more pairs to merge "
            "(give more data, or a smaller --vocab-size)",
            backend.get_vocab_size(),
            vocab_size,
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SEPARATOR,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATES["chatml"],
    )


def without_special_tokens(text: str) -> str:
    """Return the text without strings that spell one of `SPECIAL_TOKENS`."""
    return re.sub("|".join(map(re.escape, SPECIAL_TOKENS)), "", text)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's folder atomically."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    remove_tree(temporary, missing_ok=True)
    tokenizer.save_pretrained(temporary)
    for path in sorted(temporary.rglob("*")):
        sync_file(path) if path.is_file() else sync_folder(path)
    sync_folder(temporary)
    temporary.replace(folder)
    sync_folder(folder.parent)


def open_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub, with or without chat template.

    Raises:
        DataError: there is none, or it has no tokenizer.json.
    """
    from finetune.data.encoding.templates import read_tokenizer

    tokenizer = read_tokenizer(str(source))
    _backend(tokenizer)
    return tokenizer


class DocumentEncoder:
    """Texts -> ids, each document with the separator before it.

    Args:
        tokenizer_json: content of the tokenizer.json.
        separator_id: the id before every document.
        special_tokens: what looks like a special token in a text is one; else it is text.
    """

    def __init__(
        self, tokenizer_json: str, separator_id: int, special_tokens: bool = False
    ) -> None:
        from tokenizers import Tokenizer

        self._arguments = (tokenizer_json, separator_id, special_tokens)
        backend = Tokenizer.from_str(tokenizer_json)
        backend.no_truncation()
        backend.no_padding()
        backend.post_processor = None  # it adds special tokens; the separator is ours to place
        backend.encode_special_tokens = not special_tokens
        self._backend = backend
        self._separator_id = separator_id

    def __reduce__(self) -> tuple[Any, ...]:
        # a Tokenizer that is sent to another process forgets `encode_special_tokens`
        return type(self), self._arguments

    def encode(self, texts: list[str], dtype: str) -> list[np.ndarray]:
        """Return the ids of each document, its separator included."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [
            np.array([self._separator_id, *encoding.ids], dtype=dtype) for encoding in encodings
        ]
