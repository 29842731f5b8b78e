"""`python -m finetune eval`: loss and exact answers per difficulty on held-out records: of a model, its adapters, its
base."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from finetune.commands.evaluate.options import RESULT_NAME, TABLE_NAME, EvalOptions
from finetune.config.options import read_options
from finetune.errors import ExitCode, StateError
from finetune.runtime.terminal import console as terminal_console
from finetune.storage.run_folder import describe_folder


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: evaluated; 1: failed while evaluating; 2: refused before that; 130: interrupted."""
    options = read_options(EvalOptions, argv)
    _check_output(options.output)
    from finetune.runtime.device import probe_torch_npu
    from finetune.storage.run_log import setup_console

    setup_console(0)
    probe_torch_npu()
    from finetune.commands.evaluate.candidates import find_candidates
    from finetune.commands.evaluate.evaluation import Evaluation

    evaluation = Evaluation(options, find_candidates(options.model, options.adapter, base=options.base))
    try:
        scores = evaluation.run(options.output)
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
    if options.as_json:
        sys.stdout.write(text)
    elif sys.stdout.isatty():
        terminal_console().print(rich_table(scores))
    else:
        sys.stdout.write(markdown_table(scores))
    return int(ExitCode.DONE)


def _check_output(folder: Path | None) -> None:
    """Raise StateError unless the folder is new or empty."""
    if folder is not None and describe_folder(folder).kind != "empty":
        raise StateError("the output folder is not empty", str(folder), "name a new folder; nothing is overwritten")
