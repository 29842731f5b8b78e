"""`python -m finetune inspect`: records as the model will see them, with the tokens that are
trained marked.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from finetune.config.fields import Paths, did_you_mean, setting
from finetune.config.options import Options, read_known_options
from finetune.errors import ConfigError, DataError, ExitCode
from finetune.plain_text import CONTROLS
from finetune.runtime.terminal import console as terminal_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from finetune.config.run_config import RunConfig
    from finetune.data.samples import Samples

_TRAINED, _CONTEXT = "bold green", "dim"


class InspectOptions(Options):
    """The command line, except for the flags of training."""

    usage: ClassVar[str] = (
        "python -m finetune inspect [--rows N] [--row ID] [--level NAME] [--audit [--benchmark"
        " FILE...] [--json]] [FLAGS OF TRAINING]"
    )
    summary: ClassVar[str] = (
        "Shows how the data becomes samples: a table of what is kept, trimmed and dropped, then"
        " samples as the model\nsees them. What is trained is green on a terminal and stands in"
        " brackets elsewhere. Needs the data and the\nmodel's tokenizer, and tokenizes all of the"
        " data as training would (later runs reuse it)."
    )
    epilog: ClassVar[str] = (
        "The other flags are those of `python -m finetune sft --help`; --model and --data are"
        " enough. For preferences\ngive their loss: --loss dpo shows the chosen answer and behind"
        " it the rejected one."
    )

    count: Annotated[int, Field(ge=0)] = setting(
        5,
        alias="rows",
        group="options",
        unit="N",
        description="How many samples to show; 0: the table only.",
    )
    record: int | None = setting(
        None,
        alias="row",
        group="options",
        unit="ID",
        description=(
            "Show the samples of this input record; records count from 0 through the files in"
            " order."
        ),
    )
    difficulty: str | None = setting(
        None,
        alias="level",
        group="options",
        unit="NAME",
        description="Show only records of this difficulty.",
    )
    audit: bool = setting(
        False,
        group="options",
        description=(
            "Instead of samples: duplicates, scripts, and what validation data and benchmarks share"
            " with it."
        ),
    )
    benchmark: Paths = setting(
        (),
        group="options",
        unit="FILE...",
        description="Files that must not be in the data, of any keys; for --audit.",
    )
    as_json: bool = setting(
        False,
        alias="json",
        group="options",
        description="Write the audit as one JSON object instead of a table.",
    )

    def problems(self) -> list[tuple[str, str]]:
        if self.audit:
            return []
        needing = {"--benchmark": self.benchmark, "--json": self.as_json}
        return [
            (f"{flag} belongs to --audit", "give --audit as well")
            for flag, given in needing.items()
            if given
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; what is wrong is raised as FinetuneError."""
    options, rest = read_known_options(InspectOptions, argv)

    from finetune.commands.inspect.audit import audit_data, print_audit
    from finetune.config.kinds import kind_of_arguments
    from finetune.config.resolution import resolve
    from finetune.config.run_config import RunConfig
    from finetune.data.dataset import samples_of
    from finetune.data.encoding.templates import load_tokenizer
    from finetune.modeling.hub import from_modelscope
    from finetune.runtime.launch_environment import launch_world

    world_size = launch_world().world_size
    overrides = {"output_dir": "."}  # nothing is written there
    settings = kind_of_arguments(rest, RunConfig).config_class
    config = resolve(
        rest,
        overrides=overrides,
        world_size=world_size,
        model_class=settings,
    ).config
    if options.audit and config.preference_form:
        raise ConfigError(
            "the audit reads one answer a record",
            "--audit",
            "leave it out, or the flags of preferences",
        )
    tokenizer = load_tokenizer(
        from_modelscope(config.model, config.hub),
        config.template,
        trust_remote_code=config.trust_remote_code,
    )

    levels = config.curriculum.levels if config.use_curriculum else None
    found = {"on_bad_row": "drop"} if options.audit else {}  # which are counted there
    samples = samples_of(config, tokenizer, levels, **found)
    console = terminal_console(highlight=False)
    if options.audit:
        splits = config.valid_split is not None
        valid = samples_of(config, tokenizer, levels, "valid", **found) if splits else None
        result = audit_data(config, samples, valid, options.benchmark)
        if options.as_json:
            sys.stdout.write(json.dumps(result, ensure_ascii=False, indent=2) + "\n")
        else:
            print_audit(result, console)
        return int(ExitCode.DONE)
    names = ", ".join(Path(source.path).name for source in config.sources)
    console.print(samples.report.table(names))
    for index in choose(
        samples, count=options.count, record=options.record, difficulty=options.difficulty
    ):
        show(samples, index, tokenizer, console)
    _check_embeddings(config, samples, tokenizer)
    return int(ExitCode.DONE)


def _check_embeddings(
    config: RunConfig, samples: Samples, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse tokens without an embedding, as a start would; a folder of a tokenizer alone has none.

    Raises:
        DataError: such a token, and its record.
    """
    from finetune.modeling.hub import from_modelscope
    from finetune.modeling.model_config import check_ids, load_model_config

    name = from_modelscope(config.model, config.hub)
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        return
    model = load_model_config(name, trust_remote_code=config.trust_remote_code)
    check_ids(model, samples, tokenizer)


def choose(
    samples: Samples, *, count: int, record: int | None, difficulty: str | None
) -> list[int]:
    """Indices of the samples to show, at most `count`; all samples of one input record if that is
    given.

    Raises:
        DataError: no such difficulty, or that record is not among the samples.
    """
    chosen = np.arange(len(samples))
    if difficulty is not None:
        if difficulty not in samples.difficulty_names:
            known = ", ".join(samples.difficulty_names) or "none"
            hint = did_you_mean(difficulty, samples.difficulty_names)
            what = f"unknown difficulty {difficulty!r}{hint}"
            raise DataError(what, "--level", f"the difficulties are {known}")
        chosen = chosen[samples.difficulties == samples.difficulty_names.index(difficulty)]
    if record is None:
        return chosen[:count].tolist()
    chosen = chosen[samples.record_ids[chosen] == record]
    if not len(chosen):
        last = samples.report.records_read - 1
        fix = f"records are 0 to {last}; dropped records and other difficulties have no sample"
        raise DataError(f"record {record} is not among the samples", "--row", fix)
    return chosen.tolist()


def show(
    samples: Samples, index: int, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    """Print one sample: where it is from, numbers, and text with the trained tokens marked; of a
    pair both answers.
    """
    input_ids, supervised = samples[index]
    difficulty = samples.difficulties[index]
    named = f"  difficulty {samples.difficulty_names[difficulty]}" if difficulty >= 0 else ""
    console.rule(
        f"record {samples.record_ids[index]}{named}  {len(input_ids)} tokens,"
        f" {int(supervised.sum())} trained",
        align="left",
    )
    console.print(samples.location(index), style="dim", markup=False)
    for name, here in _documents(samples, index, len(input_ids)):
        if name:
            numbers = f"{here.stop - here.start} tokens, {int(supervised[here].sum())} trained"
            console.print(f"{name}  {numbers}", style="bold")
        text = marked_text(
            tokenizer, input_ids[here], supervised[here], brackets=not console.is_terminal
        )
        console.print(text, soft_wrap=True)


def _documents(samples: Samples, index: int, length: int) -> list[tuple[str, slice]]:
    """Name and place of each document of a sample; one that stands alone needs no name."""
    from finetune.data.samples import PreferenceSamples

    if not isinstance(samples, PreferenceSamples):
        return [("", slice(0, length))]
    if first := int(samples.first_lengths[index]):
        return [("chosen", slice(0, first)), ("rejected", slice(first, length))]
    return [("label true" if samples.labels[index] else "label false", slice(0, length))]


def marked_text(
    tokenizer: PreTrainedTokenizerBase,
    input_ids: np.ndarray,
    supervised: np.ndarray,
    *,
    brackets: bool,
) -> Text:
    """Return the text of one sample; trained parts colored, and in brackets where colors would be
    lost.
    """
    from rich.text import Text

    text = Text()
    for trained, part in _parts(tokenizer, input_ids, supervised):
        shown = "\n".join(CONTROLS.sub(_written_out, line) for line in part.split("\n"))
        text.append(
            f"[[{shown}]]" if trained and brackets else shown,
            style=_TRAINED if trained else _CONTEXT,
        )
    return text


def _written_out(found: re.Match[str]) -> str:
    """Return a character that a terminal would act on, as Python writes it."""
    return found.group().encode("unicode_escape").decode("ascii")


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
