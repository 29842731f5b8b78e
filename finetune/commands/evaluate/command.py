"""`python -m finetune eval`: held-out records, texts and lm_eval's tasks: of a model, its adapters,
its base.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from finetune.commands.evaluate.options import RESULT_NAME, TABLE_NAME, EvalOptions
from finetune.config.options import read_options
from finetune.errors import INTERRUPTED, ExitCode, StateError
from finetune.runtime.terminal import console as terminal_console
from finetune.storage.run_folder import describe_folder


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: evaluated; 1: failed while evaluating; 2: refused before that; 130:
    interrupted.
    """
    options = read_options(EvalOptions, argv)
    _check_output(options.output)
    from finetune.runtime.launch_environment import probe_torch_npu
    from finetune.storage.run_log import setup_console

    setup_console(0)
    probe_torch_npu()
    from finetune.commands.evaluate.evaluation import Evaluation, find_candidates

    evaluation = Evaluation(
        options, find_candidates(options.model, options.adapter, base=options.base)
    )
    try:
        scores = evaluation.run(options.output)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    from finetune.commands.evaluate.scores import (
        compare,
        comparison,
        markdown_table,
        rich_table,
        tables,
    )
    from finetune.storage.run_log import strict

    differences = compare(scores)
    shown = tables(scores, comparison(scores, differences))
    result = {
        **evaluation.facts(),
        "models": [score.to_dict() for score in scores],
        "differences": [difference.to_dict() for difference in differences],
    }
    text = json.dumps(strict(result), indent=2, ensure_ascii=False) + "\n"
    in_markdown = "\n".join(map(markdown_table, shown))
    if options.output is not None:
        from finetune.storage import durable_files

        durable_files.replace_file(options.output / TABLE_NAME, in_markdown.encode())
        durable_files.replace_file(options.output / RESULT_NAME, text.encode())
    if options.as_json:
        sys.stdout.write(text)
    elif sys.stdout.isatty():
        console = terminal_console()
        for table in shown:
            console.print(rich_table(table, console))
    else:
        sys.stdout.write(in_markdown)
    return int(ExitCode.DONE)


def _check_output(folder: Path | None) -> None:
    """Raise StateError unless the folder is new or empty."""
    if folder is not None and describe_folder(folder).kind != "empty":
        raise StateError(
            "the output folder is not empty",
            str(folder),
            "name a new folder; nothing is overwritten",
        )
