"""`python -m finetune eval`: loss and exact answers per level on held-out rows, of a model, its adapters, its base."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError, ExitCode, StateError
from finetune.inference.flags import make_parser, with_dashes
from finetune.inference.origin import find_run
from finetune.storage.run_folder import describe_folder

if TYPE_CHECKING:
    from finetune.inference.loading import Source

EXIT_CODES = "Exit code: 0 evaluated; 1 failed while evaluating; 2 refused before that; 130 interrupted."
GENERATIONS_NAME, RESULT_NAME, TABLE_NAME = "generations.jsonl", "evaluation.json", "table.md"
DEFAULT_CUTOFF_TOKENS = 2048  # that of training


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit codes: see `EXIT_CODES`."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    _check_output(options.output)
    from finetune.runtime.device import probe_torch_npu
    from finetune.storage.run_log import setup_console

    setup_console(0)
    probe_torch_npu()
    from finetune.commands.evaluate.evaluation import Evaluation

    trained = find_trained(options.model, options.adapter or [])
    contestants = [*([Contestant("base", find_base(trained[0]))] if options.base else []), *map(_contestant, trained)]
    settings = _settings(options, run_settings(trained[0]))
    evaluation = Evaluation(settings, trained[0])
    try:
        scores = evaluation.run(contestants, _names(contestants), options.output)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    from finetune.commands.evaluate.scores import markdown_table, rich_table

    result = {**evaluation.facts(), "models": [score.to_dict() for score in scores]}
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    if options.output is not None:
        from finetune.storage import durable_files

        durable_files.replace_file(options.output / TABLE_NAME, markdown_table(scores).encode())
        durable_files.replace_file(options.output / RESULT_NAME, text.encode())
    if options.json:
        sys.stdout.write(text)
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_table(scores))
    else:
        sys.stdout.write(markdown_table(scores))
    return int(ExitCode.DONE)


# ---------------------------------------------------------------- flags


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(
        "eval",
        "Loss, perplexity and exact answers on held-out rows: of a model, its adapters, its base.",
        EXIT_CODES,
        several_adapters=True,
    )
    parser.add_argument("--base", action="store_true", help="evaluate the model without adapter (or training) as well")
    data = parser.add_argument_group("data")
    data.add_argument("--data", nargs="+", action="extend", required=True, metavar="FILE", help="held-out rows")
    data.add_argument("--max-samples", type=_at_least(1), metavar="N", help="of these samples only, levels in turn")
    data.add_argument(
        "--cutoff-len", type=_at_least(2), metavar="N", help="longest sample in tokens; default: the run's"
    )
    data.add_argument("--difficulty-field", metavar="NAME", help="field with a row's level; default: the run's")
    data.add_argument("--answer-field", default="answer", metavar="NAME", help="field with the answer (answer)")
    data.add_argument("--on-bad-row", choices=("refuse", "drop"), default="refuse", help="default: refuse")
    data.add_argument("--cache-dir", metavar="FOLDER", help="for tokenized data; default: that of training")
    answers = parser.add_argument_group("answers", "greedy; given to rows that have an answer to compare with")
    answers.add_argument(
        "--generate", type=_generate, default="answered", metavar="N|all", help="answer N rows, levels in turn, or all"
    )
    answers.add_argument("--max-new-tokens", type=_at_least(1), default=512, metavar="N", help="of an answer (512)")
    answers.add_argument("--batch-size", type=_at_least(1), default=32, metavar="N", help="answers at a time (32)")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--output", type=Path, metavar="FOLDER", help=f"new folder for {GENERATIONS_NAME}, {RESULT_NAME}, {TABLE_NAME}"
    )
    out.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args(with_dashes(arguments))


def _at_least(lowest: int) -> Any:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {lowest}")
        return int(text)

    return number


def _generate(text: str) -> int | str:
    return text if text in ("all", "answered") else _at_least(0)(text)


def _check_output(folder: Path | None) -> None:
    """Raise StateError unless the folder is new or empty."""
    if folder is not None and describe_folder(folder).kind != "empty":
        raise StateError("the output folder is not empty", str(folder), "name a new folder; nothing is overwritten")


# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Contestant:
    """One model of the comparison; `role` is base, adapter or model."""

    role: str
    source: Source


def _contestant(source: Source) -> Contestant:
    return Contestant("model" if source.adapter is None else "adapter", source)


def find_trained(model: str | None, adapters: Sequence[str]) -> list[Source]:
    """The models asked for, without the base.

    Raises:
        ConfigError: as `find_source`; adapters on different bases.
    """
    from finetune.inference.loading import find_source

    sources = [find_source(model, adapter) for adapter in adapters or [None]]
    bases = sorted({source.base for source in sources})
    if len(bases) > 1:
        raise ConfigError(
            f"the adapters stand on different bases: {', '.join(bases)}",
            "--adapter",
            "evaluate them apart, or name one base for all with --model",
        )
    return sources


def find_base(source: Source) -> Source:
    """What a model was before its training.

    Raises:
        ConfigError: it is neither an adapter nor the output of a run whose base is here.
    """
    from finetune.inference.loading import Source, find_source

    if source.adapter is not None:
        return Source(source.base, None)
    base = run_settings(source).get("model")
    if not isinstance(base, str) or Path(base).resolve() == Path(source.base).resolve():
        raise ConfigError(
            "there is no base to compare with: this is no adapter, and no run says what it was made from",
            f"--base, {source.base}",
            "leave --base out, or name an adapter with --adapter",
        )
    if not Path(base).exists() and base.count("/") != 1:
        raise ConfigError(
            f"the run's base model {base} is not here", "--base", "run from the folder that it was run in"
        )
    return find_source(base)


def run_settings(source: Source) -> dict[str, Any]:
    """The settings of the run that made a model or one of its checkpoints; empty where there is none."""
    run = find_run(Path(source.base if source.adapter is None else source.adapter))
    return {} if run is None else run.settings


def _names(contestants: Sequence[Contestant]) -> list[str]:
    """A name for each, that no other has."""
    names = [("base " if one.role == "base" else "") + one.source.name for one in contestants]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: number + 1].count(name)})"
        for number, name in enumerate(names)
    ]


@dataclass(frozen=True)
class EvaluationSettings:
    """What is evaluated, and how; see the flags."""

    data: tuple[str, ...]
    cutoff_len: int
    difficulty_field: str
    known_difficulties: tuple[str, ...]
    answer_field: str
    on_bad_row: str
    cache_dir: str | None
    max_samples: int | None
    generate: int | str
    max_new_tokens: int
    batch_size: int
    device_type: str
    dtype: str
    template: str | None
    context_tokens: int | None
    trust_remote_code: bool


def _settings(options: argparse.Namespace, run: dict[str, Any]) -> EvaluationSettings:
    """The flags, and for what they leave open the settings of the run that made the model."""
    cutoff, field, curriculum = run.get("cutoff_len"), run.get("difficulty_field"), run.get("curriculum")
    levels = curriculum.get("levels") if isinstance(curriculum, dict) else None
    return EvaluationSettings(
        data=tuple(options.data),
        cutoff_len=options.cutoff_len or (cutoff if isinstance(cutoff, int) else DEFAULT_CUTOFF_TOKENS),
        difficulty_field=options.difficulty_field or (field if isinstance(field, str) else "difficulty"),
        known_difficulties=tuple(map(str, levels)) if isinstance(levels, list) else (),
        answer_field=options.answer_field,
        on_bad_row=options.on_bad_row,
        cache_dir=options.cache_dir,
        max_samples=options.max_samples,
        generate=options.generate,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        device_type=options.device_type,
        dtype=options.dtype,
        template=options.template,
        context_tokens=options.context_tokens,
        trust_remote_code=options.trust_remote_code,
    )
