"""`python -m finetune prepare`: text into token shards and a tokenizer, for pretraining."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from finetune.config.fields import PathOption, Paths, Text, setting
from finetune.config.options import Options, read_options
from finetune.errors import ExitCode
from finetune.inference.options import Count
from finetune.runtime.terminal import console as terminal_console
from finetune.storage.run_log import LOGGER_NAME

if TYPE_CHECKING:
    from finetune.data.corpus.preparation import Prepared

DEFAULT_VOCAB_SIZE = 32_768
# 256 bytes and 4 special tokens; a test compares it with data/corpus/tokenizer.py
SMALLEST_VOCAB_SIZE = 260
_PROGRESS_SECONDS = 10.0

logger = logging.getLogger(LOGGER_NAME)


class PrepareOptions(Options):
    """The command line."""

    usage: ClassVar[str] = (
        "python -m finetune prepare --data PATH... --output-dir FOLDER [--flag value ...]"
    )
    summary: ClassVar[str] = "Turns text into token shards and a tokenizer for pretraining."
    epilog: ClassVar[str] = "Exit code: 0 done; 1 failed; 2 refused; 3 stopped by Ctrl-C."
    groups: ClassVar[tuple[str, ...]] = ("data and tokenizer", "preparation")

    data: Paths = setting(
        group="data and tokenizer",
        unit="path...",
        min_length=1,
        description=(
            "Text, JSONL, JSON and parquet files, folders, globs. A text file is one document"
            " (above 1 MiB: one per MiB, cut at a line's end); so is each record."
        ),
    )
    output_dir: PathOption = setting(
        group="data and tokenizer",
        unit="folder",
        description=(
            "Folder for train-*.bin, val-*.bin and tokenizer/. Run again after a kill: it resumes."
        ),
    )
    tokenizer: Text | None = setting(
        None,
        group="data and tokenizer",
        unit="folder|hub id",
        description="Take this tokenizer instead of making one.",
    )
    vocab_size: Count | None = setting(
        None,
        group="data and tokenizer",
        unit="ids",
        shown_default=str(DEFAULT_VOCAB_SIZE),
        description=f"Ids of the byte-level BPE tokenizer to make, at least {SMALLEST_VOCAB_SIZE}.",
    )
    valid_fraction: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.01,
        group="preparation",
        unit="fraction",
        description="Documents for validation, chosen by content.",
    )
    seed: int = setting(
        42,
        ge=0,
        lt=2**32,
        group="preparation",
        description="Seed of that choice.",
    )
    shard_tokens: int = setting(
        100_000_000, ge=1, group="preparation", unit="tokens", description="Most tokens of a shard."
    )
    text_field: Text = setting(
        "text",
        group="preparation",
        unit="name",
        description="Field or column of records that holds the text.",
    )
    on_bad_row: Literal["refuse", "drop"] = setting(
        "refuse",
        group="preparation",
        description="Records without text and files that are not UTF-8.",
    )
    special_tokens: bool = setting(
        False,
        group="preparation",
        description=(
            "Read `<|im_start|>` and the like in documents as special tokens, for text that was"
            " rendered with a chat template. Otherwise they are text like any other."
        ),
    )
    num_workers: Count | None = setting(
        None,
        group="preparation",
        unit="processes",
        shown_default="by cores and data",
        description="Processes; the result does not depend on it.",
    )

    def problems(self) -> list[tuple[str, str]]:
        if self.vocab_size is None:
            return []
        if self.tokenizer is not None:
            what = "vocab_size is given, and the tokenizer of --tokenizer has its own"
            return [(what, "remove --vocab-size, or remove --tokenizer to make one of that size")]
        if self.vocab_size < SMALLEST_VOCAB_SIZE:
            what = (
                f"vocab_size is {self.vocab_size}, too small for the 256 bytes and the 4 special"
                " tokens"
            )
            return [(what, f"give at least {SMALLEST_VOCAB_SIZE}; {DEFAULT_VOCAB_SIZE} is usual")]
        return []


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 3 after Ctrl-C; what is wrong is raised as FinetuneError."""
    options = read_options(PrepareOptions, argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)

    from finetune.data.corpus.preparation import PrepareSettings, prepare_tokens

    settings = PrepareSettings(
        options.vocab_size or DEFAULT_VOCAB_SIZE,
        options.tokenizer,
        options.valid_fraction,
        options.seed,
        options.shard_tokens,
        options.text_field,
        options.on_bad_row == "drop",
        options.special_tokens,
    )
    begun = time.monotonic()
    try:
        with _Progress() as bar:
            prepared = prepare_tokens(
                options.data,
                options.output_dir,
                settings,
                num_workers=options.num_workers,
                progress=bar.show,
            )
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes with the unfinished shard", file=sys.stderr)
        return int(ExitCode.STOPPED)
    print(summary(prepared, time.monotonic() - begun))
    return int(ExitCode.DONE)


def summary(prepared: Prepared, seconds: float) -> str:
    """Describe what is in the folder now, for people."""
    scan = prepared.scan
    left_out = f", {scan.empty} empty" if scan.empty else ""
    left_out += f", {scan.problems.total} dropped" if scan.problems.total else ""
    lines = [
        f"{prepared.folder}: {scan.documents} documents, {scan.text_bytes} bytes of text{left_out}",
        f"  tokenizer/  {prepared.vocabulary} ids, {prepared.tokenizer_hash[:12]}",
    ]
    tokens = sum(header.tokens for headers in prepared.splits.values() for header in headers)
    for split, headers in prepared.splits.items():
        documents = sum(header.documents for header in headers)
        of_split = sum(header.tokens for header in headers)
        lines.append(
            f"  {split}-*.bin  {len(headers)} shards, {documents} documents, {of_split} tokens"
        )
    lines.append(f"  {scan.text_bytes / tokens:.2f} bytes per token; {seconds:.1f} s")
    if not prepared.made:
        lines.append("  everything was there already, and was verified")
    return "\n".join(lines)


class _Progress:
    """Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._bar = None
        self._tasks: dict[str, object] = {}
        self._last_line = time.monotonic()

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("{task.description:>22}"),
                BarColumn(),
                DownloadColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=terminal_console(stderr=True))
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """Show the progress of a pass."""
        if self._bar is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(what, total=total_bytes)
            self._bar.update(self._tasks[what], completed=done_bytes)
        elif time.monotonic() - self._last_line >= _PROGRESS_SECONDS:
            self._last_line = time.monotonic()
            share = 100 * done_bytes / max(total_bytes, 1)
            print(
                f"{what}: {done_bytes / 2**20:.0f} of {total_bytes / 2**20:.0f} MiB ({share:.0f}%)",
                file=sys.stderr,
            )
