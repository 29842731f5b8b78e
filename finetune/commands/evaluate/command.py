"""`python -m finetune eval`: measure a model, its adapters and its base on held-out records, texts
and lm_eval's tasks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from finetune.commands.evaluate.options import RESULT_NAME, TABLE_NAME, EvalOptions
from finetune.config.options import read_options
from finetune.errors import INTERRUPTED, ExitCode, StateError
from finetune.runtime.terminal import console as terminal_console
from finetune.storage.run_folder import describe_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code; `EvalOptions.epilog` lists them.
    """
    options = read_options(EvalOptions, argv)
    output = options.output
    if output is not None and describe_folder(output).kind != "empty":
        raise StateError(
            "the output folder is not empty",
            str(output),
            "name a new folder; nothing is overwritten",
        )
    from finetune.runtime.launch_environment import probe_torch_npu
    from finetune.storage.run_log import setup_console

    setup_console(0)
    probe_torch_npu()
    from finetune.commands.evaluate.evaluation import Evaluation, find_candidates

    evaluation = Evaluation(
        options, find_candidates(options.model, options.adapter, base=options.base)
    )
    try:
        scores = evaluation.run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    from finetune.commands.evaluate.scores import compare, markdown_table, rich_table, tables
    from finetune.storage import durable_files
    from finetune.storage.run_log import strict

    differences = compare(scores)
    shown = tables(scores, differences)
    result = {
        **evaluation.facts(),
        "models": [score.to_dict() for score in scores],
        "differences": [asdict(difference) for difference in differences],
    }
    text = json.dumps(strict(result), indent=2, ensure_ascii=False) + "\n"
    in_markdown = "\n".join(map(markdown_table, shown))
    if output is not None:
        durable_files.replace_file(output / TABLE_NAME, in_markdown.encode())
        durable_files.replace_file(output / RESULT_NAME, text.encode())
    if options.as_json:
        sys.stdout.write(text)
    elif sys.stdout.isatty():
        console = terminal_console()
        for table in shown:
            console.print(rich_table(table, console))
    else:
        sys.stdout.write(in_markdown)
    return int(ExitCode.DONE)
