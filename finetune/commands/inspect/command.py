"""`python -m finetune inspect`: rows as the model will see them, with the tokens that are trained marked."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune.errors import ConfigError, DataError, ExitCode

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from finetune.data.samples import Samples

USAGE = """usage: python -m finetune inspect [--rows N] [--row ID] [--level LEVEL] [--config FILE] [FLAGS OF TRAINING]

Shows how the data becomes samples: a table of what is kept, trimmed and dropped, then rows as the model sees them.
What is trained is green on a terminal and stands in brackets elsewhere. Needs the data and the model's tokenizer, and
tokenizes all of the data as training would (later runs reuse it).

  --rows N       how many samples to show (default 5; 0: the table only)
  --row ID       show the samples of this input row; rows count from 0 through the files in order
  --level LEVEL  show only rows of this level
  The other flags are those of `python -m finetune sft --help`; --model and --data are enough.
"""

_TRAINED, _CONTEXT = "bold green", "dim"
# What a terminal would act on instead of showing: C0 but newline and tab, DEL, C1.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 0.

    Raises:
        FinetuneError: with what is wrong, where, and the fix; the caller prints it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(USAGE)
        return int(ExitCode.DONE)
    options, rest = _options(arguments)

    from rich.console import Console

    from finetune.config.resolution import resolve
    from finetune.data.dataset import prepare_samples
    from finetune.data.templates import load_tokenizer
    from finetune.runtime.device import launch_world

    world_size = launch_world().world_size
    config = resolve(rest, overrides={"output_dir": "."}, world_size=world_size).config  # nothing is written there
    tokenizer = load_tokenizer(config.model, config.template, trust_remote_code=config.trust_remote_code)
    samples = prepare_samples(
        config.data,
        tokenizer,
        cutoff_len=config.cutoff_len,
        difficulties=config.curriculum.levels,
        difficulty_field=config.difficulty_field,
        on_bad_row=config.on_bad_row,
        cache_dir=config.cache_dir,
        num_proc=config.preprocessing_num_workers,
    )
    console = Console(file=sys.stdout, highlight=False)
    console.print(samples.report.table(", ".join(Path(path).name for path in config.data)))
    for index in choose(samples, rows=options.rows, row=options.row, level=options.level):
        show(samples, index, tokenizer, console)
    return int(ExitCode.DONE)


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and the words that are left for the configuration."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--row", type=int)
    parser.add_argument("--level")
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(
            f"{error.argument_name}: {error.message}", where="the command line", fix="see inspect --help"
        ) from error


def choose(samples: Samples, *, rows: int, row: int | None, level: str | None) -> list[int]:
    """Indices of the samples to show, at most `rows`; all samples of one input row if `row` is given.

    Raises:
        DataError: no such level, or that row is not among the samples.
    """
    chosen = np.arange(len(samples))
    if level is not None:
        if level not in samples.difficulty_names:
            from finetune.data.problems import nearest

            known = ", ".join(samples.difficulty_names) or "none"
            raise DataError(
                f"unknown level {level!r}{nearest(level, samples.difficulty_names)}",
                "--level",
                f"the levels are {known}",
            )
        chosen = chosen[samples.difficulties == samples.difficulty_names.index(level)]
    if row is not None:
        chosen = chosen[samples.record_ids[chosen] == row]
        if not len(chosen):
            raise DataError(
                f"row {row} is not among the samples",
                where="--row",
                fix=f"rows are 0 to {samples.report.records_read - 1}; dropped rows and other levels have no sample",
            )
        return chosen.tolist()
    return chosen[: max(rows, 0)].tolist()


def show(samples: Samples, index: int, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print one sample: its place, numbers, and text with the trained tokens marked."""
    input_ids, supervised = samples[index]
    level = samples.difficulties[index]
    named = f"  level {samples.difficulty_names[level]}" if level >= 0 else ""
    console.rule(
        f"row {samples.record_ids[index]}{named}  {len(input_ids)} tokens, {int(supervised.sum())} trained",
        align="left",
    )
    console.print(samples.location(index), style="dim", markup=False)
    console.print(marked_text(tokenizer, input_ids, supervised, brackets=not console.is_terminal), soft_wrap=True)


def marked_text(
    tokenizer: PreTrainedTokenizerBase, input_ids: np.ndarray, supervised: np.ndarray, *, brackets: bool
) -> Text:
    """The text of one sample; trained parts coloured, and in brackets where colours would be lost."""
    from rich.text import Text

    text = Text()
    for trained, part in _parts(tokenizer, input_ids, supervised):
        shown = _CONTROLS.sub(lambda found: f"\\x{ord(found.group()):02x}", part)
        text.append(f"[[{shown}]]" if trained and brackets else shown, style=_TRAINED if trained else _CONTEXT)
    return text


def _parts(
    tokenizer: PreTrainedTokenizerBase, input_ids: np.ndarray, supervised: np.ndarray
) -> Iterator[tuple[bool, str]]:
    """(trained, text) of each run of tokens that are trained alike."""
    borders = np.flatnonzero(np.diff(supervised)) + 1
    before = ""
    for stop in [*borders.tolist(), len(input_ids)]:
        # Decoded from the beginning each time: some tokenizers drop the space before a first word.
        text = tokenizer.decode(input_ids[:stop].tolist(), clean_up_tokenization_spaces=False)
        yield bool(supervised[stop - 1]), text[len(before) :]
        before = text
