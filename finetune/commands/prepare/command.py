"""`python -m finetune prepare`: text into token shards and a tokenizer, for pretraining."""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationError

from finetune.config.fields import Paths, Strict, Text, ordered_fields, setting
from finetune.config.flags import flags_of, parse
from finetune.config.names import unknown_name
from finetune.config.rules import DEFAULT_LEVEL, Given, flag
from finetune.config.schema_errors import problems_of
from finetune.errors import ConfigError, ExitCode, raise_problems
from finetune.storage.run_log import LOGGER_NAME

if TYPE_CHECKING:
    from finetune.data.corpus.preparation import Prepared

DEFAULT_VOCAB_SIZE = 32_768
SMALLEST_VOCAB_SIZE = 260  # 256 bytes and 4 special tokens; a test compares it with data/corpus/tokenizer.py
_PROGRESS_SECONDS = 10.0

logger = logging.getLogger(LOGGER_NAME)


class PrepareConfig(Strict):
    """The flags of `prepare`."""

    data: Paths = setting(
        group="model and data",
        unit="path...",
        min_length=1,
        description="Text, JSONL, JSON and parquet files, folders, globs. A text file is one document (above 1 MiB: "
        "one per MiB, cut at a line's end); so is each row.",
    )
    output_dir: Text = setting(
        group="model and data",
        unit="folder",
        description="Folder for train-*.bin, val-*.bin and tokenizer/. Run again after a kill: it goes on.",
    )
    tokenizer: Text | None = setting(
        None, group="model and data", unit="folder|hub id", description="Take this tokenizer instead of making one."
    )
    vocab_size: Annotated[int, Field(ge=1)] | None = setting(
        None,
        group="model and data",
        unit="ids",
        shown_default=str(DEFAULT_VOCAB_SIZE),
        description=f"Ids of the byte-level BPE tokenizer to make, at least {SMALLEST_VOCAB_SIZE}.",
    )
    valid_fraction: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.01, group="data preparation", unit="fraction", description="Documents for validation, chosen by content."
    )
    seed: int = setting(42, ge=0, lt=2**32, group="data preparation", description="Seed of that choice.")
    shard_tokens: int = setting(
        100_000_000, ge=1, group="data preparation", unit="tokens", description="Most tokens of a shard."
    )
    text_field: Text = setting(
        "text", group="data preparation", unit="name", description="Field or column of rows that holds the text."
    )
    on_bad_row: Literal["refuse", "drop"] = setting(
        "refuse", group="data preparation", description="Rows without text and files that are not UTF-8."
    )
    special_tokens: bool = setting(
        False,
        group="data preparation",
        description="Read `<|im_start|>` and the like in documents as special tokens, for text that was rendered with "
        "a chat template. Otherwise they are text like any other.",
    )
    num_workers: Annotated[int, Field(ge=1)] | None = setting(
        None,
        group="data preparation",
        unit="processes",
        shown_default="by cores and data",
        description="Processes; the result does not depend on it.",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 0, or 3 after Ctrl-C.

    Raises:
        FinetuneError: with what is wrong, where, and the fix; the caller prints it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    config = read_flags(arguments)
    if config is None:
        sys.stdout.write(help_text())
        return int(ExitCode.DONE)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)

    from finetune.data.corpus.preparation import PrepareSettings, prepare_tokens

    settings = PrepareSettings(
        config.vocab_size or DEFAULT_VOCAB_SIZE,
        config.tokenizer,
        config.valid_fraction,
        config.seed,
        config.shard_tokens,
        config.text_field,
        config.on_bad_row == "drop",
        config.special_tokens,
    )
    begun = time.monotonic()
    try:
        with _Bar() as bar:
            prepared = prepare_tokens(
                config.data, Path(config.output_dir), settings, num_workers=config.num_workers, progress=bar.show
            )
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on with the unfinished shard", file=sys.stderr)
        return int(ExitCode.STOPPED)
    print(summary(prepared, time.monotonic() - begun))
    return int(ExitCode.DONE)


def read_flags(arguments: Sequence[str]) -> PrepareConfig | None:
    """The settings of a command line; None where it asks for help.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several.
    """
    flags = flags_of(PrepareConfig)
    parsed = parse(arguments, flags)
    if parsed.help:
        return None
    problems = list(parsed.problems)
    for name in ("config_files", "deepspeed", "print_config"):
        if getattr(parsed, name):
            known = "--" + name.removesuffix("_files").replace("_", "-")
            problems.append(unknown_name(known, "the command line", flags, flags=True))
    values = {
        name: Given(value, DEFAULT_LEVEL + 1, flag(name), typed) for name, (value, typed) in parsed.values.items()
    }
    config = None
    try:
        config = PrepareConfig.model_validate({name: given.value for name, given in values.items()})
    except ValidationError as error:
        guessed = {getattr(problem, "guess", None) for problem in problems}
        found = problems_of(error, values, PrepareConfig)
        problems += [problem for problem in found if getattr(problem, "guess", "") not in guessed]
    problems += _vocabulary_problems(values)
    raise_problems(problems)
    return config


def _vocabulary_problems(values: dict[str, Given]) -> list[ConfigError]:
    size = values["vocab_size"].value if "vocab_size" in values else None
    if size is None:
        return []
    where = flag("vocab_size")
    if "tokenizer" in values and values["tokenizer"].value is not None:
        fix = "remove --vocab-size, or remove --tokenizer to make one of that size"
        return [ConfigError("vocab_size is given, and the tokenizer of --tokenizer has its own", where, fix)]
    if isinstance(size, int) and 1 <= size < SMALLEST_VOCAB_SIZE:
        what = f"vocab_size is {size}, too small for the 256 bytes and the 4 special tokens"
        return [ConfigError(what, where, f"give at least {SMALLEST_VOCAB_SIZE}; {DEFAULT_VOCAB_SIZE} is usual")]
    return []


def help_text() -> str:
    """The help: flags with units and defaults."""
    flags, required = flags_of(PrepareConfig), {n for n, i in PrepareConfig.model_fields.items() if i.is_required()}
    lines = ["usage: python -m finetune prepare --data PATH... --output-dir FOLDER [--flag value ...]", ""]
    lines += ["Turns text into token shards and a tokenizer for pretraining. Flags may be written with - or _.", ""]
    for name in ordered_fields(PrepareConfig):
        default = "required" if name in required else f"default {flags[name].default}"
        lines.append(f"  {flag(name)} {flags[name].metavar}")
        lines += textwrap.wrap(
            f"{flags[name].description} [{default}]", 110, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    return "\n".join(lines) + "\n"


def summary(prepared: Prepared, seconds: float) -> str:
    """What lies in the folder now, for people."""
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
        lines.append(f"  {split}-*.bin  {len(headers)} shards, {documents} documents, {of_split} tokens")
    lines.append(f"  {scan.text_bytes / tokens:.2f} bytes per token; {seconds:.1f} s")
    if not prepared.made:
        lines.append("  everything was there already, and was verified")
    return "\n".join(lines)


class _Bar:
    """Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._bar = None
        self._tasks: dict[str, object] = {}
        self._said = time.monotonic()

    def __enter__(self) -> _Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description:>22}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """Say how far a pass is."""
        if self._bar is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(what, total=total_bytes)
            self._bar.update(self._tasks[what], completed=done_bytes)
        elif time.monotonic() - self._said >= _PROGRESS_SECONDS:
            self._said = time.monotonic()
            share = 100 * done_bytes / max(total_bytes, 1)
            print(f"{what}: {done_bytes / 2**20:.0f} of {total_bytes / 2**20:.0f} MiB ({share:.0f}%)", file=sys.stderr)
