"""`python -m finetune merge`: merge an adapter into its base model, test the result, and write a
model card. The folder appears atomically.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.commands.merge.options import MergeOptions
from finetune.config.options import read_options
from finetune.errors import INTERRUPTED, ConfigError, ExitCode, FinetuneError, StateError
from finetune.storage import durable_files
from finetune.storage.run_folder import reopen

if TYPE_CHECKING:
    from finetune.inference.loading import Source


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. 0: merged and tested; 1: failed, and nothing is left; 2: refused before
    that; 130: interrupted.
    """
    options = read_options(MergeOptions, argv)
    output = options.output_dir.expanduser()
    _check_output(output)
    from finetune.runtime.launch_environment import probe_torch_npu
    from finetune.storage.run_log import setup_console, success

    setup_console(0)
    probe_torch_npu()
    from finetune.inference.loading import find_source

    source = find_source(options.model, options.adapter)
    if options.format == "gguf":
        from finetune.commands.merge.gguf import check_architecture, check_end, find_converter

        find_converter(options.llama_cpp)
        check_architecture(source.base, options)
        check_end(source, options)
    try:
        publish(source, output, options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing is left\n")
        return INTERRUPTED
    success(f"merged, output in {output}")
    return int(ExitCode.DONE)


def _check_output(folder: Path) -> None:
    """Raise StateError unless a folder can be put there: the name is free, or an empty folder has
    it.
    """
    taken = durable_files.is_taken(folder)
    if taken and (folder.is_symlink() or not folder.is_dir() or os.listdir(folder)):
        raise StateError(
            "the output folder is there already and not empty",
            str(folder),
            "name a new folder; nothing is overwritten",
        )
    parent = folder.resolve().parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StateError(
            "the output folder cannot be made: no permission",
            str(parent),
            "choose another --output-dir",
        )


def publish(source: Source, output: Path, options: MergeOptions) -> None:
    """Write the merged model to a temporary folder next to its final name, test it, and rename it.

    Raises:
        ConfigError, DataError: files that do not fit, or an adapter that cannot be merged.
        FinetuneError: the self-test failed, or the disk is full; nothing is left.
    """
    from finetune.commands.merge.merging import merge_into

    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = output.parent / f".merging-{os.getpid()}-{output.name}"
    durable_files.remove_tree(staging, missing_ok=True)
    staging.mkdir()
    try:
        test = merge_into(staging, source, options, name=output.name)
        if options.format == "gguf":
            from finetune.commands.merge.gguf import make_gguf

            make_gguf(staging, source, options, name=output.name, test=test)
        for path in sorted(staging.iterdir()):
            durable_files.share_file(path)
            durable_files.sync_file(path)
            reopen(path)
        durable_files.sync_folder(staging)
        _give_name(staging, output)
    except Exception as error:
        failure = durable_files.os_error_in(error)  # safetensors has its own kind for a full disk
        if failure is None:
            raise
        raise FinetuneError(
            f"the merged model cannot be written: {failure.strerror or failure}",
            str(output),
            "free some space, or choose another --output-dir",
        ) from error
    finally:
        durable_files.remove_tree(staging, missing_ok=True)


def _give_name(staging: Path, output: Path) -> None:
    try:
        # takes the place of an empty folder, and of nothing else
        durable_files.move(staging, output)
    except OSError as error:
        if not durable_files.is_taken(output):
            raise
        raise ConfigError(
            "something else has been put there meanwhile",
            str(output),
            "name a new folder; nothing is overwritten",
        ) from error
    durable_files.sync_folder(output.parent)
